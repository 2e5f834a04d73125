"""A trial's log on disk: the beginning and the end of its output, within its limit.

`trial-007.log` holds the beginning, up to half of the limit. The rest goes to pieces of an eighth each in
`trial-007.end/`, named after the byte at which they begin in the whole output; the oldest is deleted before another one
is begun. Nothing is moved or rewritten: a process that is killed leaves a log that can be read and added to, and a
reader, which counts the bytes of the whole output, is never interrupted.

The lines of a gang of several workers begin with the `_RANK` of theirs. Workers write whole lines only, so that no line
holds what two of them printed.

A trial's output goes through a pipe to a small process, which runs this module (`rubberband.executor.ray.slot_worker`
starts it). A thread would not work: if C code prints while it holds Python's lock, it would wait without end. Only the
standard library is imported, and nothing of rubberband, so that it starts in 20 ms.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import selectors
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HEAD_SHARE = 2
"""The beginning is kept up to the limit divided by this."""
PIECE_SHARE = 8
"""A piece of the end holds the limit divided by this."""
PIPE_BYTES = 2**20
"""Size of a pipe, and of a read."""
_GATHERING_S = 0.002
"""The interval of reads, so that not every line is read on its own."""
_MESSAGE_END = b"\0"
_MASKED = b"="
MASK = b"***"
"""Stands for a text that is not kept."""
_MOST_FDS = 8
LINE_BYTES = 64 << 10
"""A longer line is cut into pieces."""
_SIGN = b"\x1erank "
_RANK = _SIGN + b"%d | "
"""Stands before each line of a gang; hardly any trial prints its control character."""
_RANKED = re.compile(rb"\x1erank (\d{1,6}) \| ")
_RANKED_BYTES = LINE_BYTES - 20
"""The most bytes of a line, or a piece, after its rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialLog:
    """The log of a trial, and how much of it is kept."""

    path: Path
    limit_bytes: int
    rank: int | None = None
    """Rank of the worker that prints; None: it is alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Bytes of a log that were printed one after another."""

    begin: int
    """Bytes of the output before it, kept or not."""
    content: bytes
    is_cut: bool
    """Whether the output right after it was left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    begin: int
    end: int
    path: Path


def left_out_line(left_out_bytes: int) -> str:
    """Return the line that stands for bytes that were not kept."""
    return f"[{left_out_bytes:,} bytes are left out here; resources.log_limit says how much of a log is kept]"


def split_rank(line: bytes) -> tuple[int | None, bytes]:
    """Return the rank of the worker that printed a line, None without one, and the text."""
    marked = _RANKED.match(line)
    return (int(marked[1]), line[marked.end() :]) if marked else (None, line)


def begins_ranked(content: bytes) -> bool:
    """Whether the first line of a gang's log is whole, with its rank."""
    return content.startswith(_SIGN)


def whole_lines(content: bytes) -> bytes:
    """Return the beginning of a gang's log up to the end of a line; any other log as it is.

    The logs of the gang's machines come into one, and none may come into a line of another.
    """
    return content[: content.rfind(b"\n") + 1] if _SIGN in content else content


def printed_bytes(path: Path) -> int:
    """Return the size of the whole output to the log at `path`, kept or not; 0 if there is none."""
    return max([piece.end for piece in _pieces(path)], default=0)


def read(path: Path, begin: int, most_bytes: int) -> Stretch:
    """Return at most `most_bytes` from the first kept byte at or after `begin`; none at the end. Raises OSError.

    Any other file reads as a log that was never cut.
    """
    while True:
        try:
            return _read(_pieces(path), begin, most_bytes)
        except FileNotFoundError:  # a piece was deleted just now
            continue


def _read(pieces: Sequence[_Piece], begin: int, most_bytes: int) -> Stretch:
    content, reached = bytearray(), begin
    for piece in pieces:
        if piece.end <= reached:
            continue
        if piece.begin > reached:
            if content:
                return Stretch(begin=begin, content=bytes(content), is_cut=True)
            begin = reached = piece.begin
        with open(piece.path, "rb") as file:
            file.seek(reached - piece.begin)
            part = file.read(min(most_bytes - len(content), piece.end - reached))
        content += part
        reached += len(part)
        if len(content) >= most_bytes or reached < piece.end:
            break
    return Stretch(begin=begin, content=bytes(content), is_cut=False)


def _pieces(path: Path) -> list[_Piece]:
    """Return the files of a log, in order."""
    pieces = []
    with contextlib.suppress(FileNotFoundError):
        pieces.append(_Piece(begin=0, end=path.stat().st_size, path=path))
    return pieces + _end_pieces(path)


def _end_pieces(path: Path) -> list[_Piece]:
    folder, pieces = _end_folder(path), []
    try:
        names = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    for name in names:
        begin = name.removesuffix(".log")
        with contextlib.suppress(FileNotFoundError):
            if begin.isdecimal():
                size = (folder / name).stat().st_size
                pieces.append(_Piece(begin=int(begin), end=int(begin) + size, path=folder / name))
    return pieces


def _end_folder(path: Path) -> Path:
    return path.with_suffix(".end")


class Appender:
    """Adds to a log, beside other processes of this machine (the workers of a gang)."""

    def __init__(self, log: TrialLog) -> None:
        self._path = log.path
        self._limit_bytes = log.limit_bytes
        self._head_bytes = log.limit_bytes // HEAD_SHARE
        self._piece_bytes = log.limit_bytes // PIECE_SHARE
        self._head = -1
        self._piece = -1

    def write(self, content: bytes, *, on_new_line: bool = False) -> None:
        """Add `content`, on a new line if asked to. Raises OSError; a part of it may be there then."""
        rest = memoryview(content)
        if is_first := self._head < 0:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._head = _open(self._path)
        fcntl.flock(self._head, fcntl.LOCK_EX)
        try:
            if is_first and _end_pieces(self._path):
                self._begin_piece()
            if on_new_line and not self._ends_a_line():
                rest = memoryview(b"\n" + content)
            while rest:
                file, room = self._place()
                rest = rest[os.write(file, rest[:room]) :]
        finally:
            fcntl.flock(self._head, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the files; the next write opens them again."""
        for file in (self._head, self._piece):
            if file >= 0:
                os.close(file)
        self._head = self._piece = -1

    def _ends_a_line(self) -> bool:
        """Whether the last byte of the newest file is the end of a line, or there is none."""
        file, _ = self._place()
        size = os.fstat(file).st_size
        return size == 0 or os.pread(file, 1, size - 1) == b"\n"

    def _place(self) -> tuple[int, int]:
        """Return the file of the next byte, and the room in it."""
        if self._piece < 0:
            room = self._head_bytes - os.fstat(self._head).st_size
            if room > 0:
                return self._head, room
            self._begin_piece()
        while True:
            status = os.fstat(self._piece)
            room = self._piece_bytes - status.st_size
            if status.st_nlink and room > 0:
                return self._piece, room
            self._begin_piece()

    def _begin_piece(self) -> None:
        """Open the newest piece of the end, or a new one if it is full."""
        pieces = _end_pieces(self._path)
        end = pieces[-1].end if pieces else os.fstat(self._head).st_size
        path = pieces[-1].path if pieces else None
        if path is None or pieces[-1].end - pieces[-1].begin >= self._piece_bytes:
            folder = _end_folder(self._path)
            folder.mkdir(exist_ok=True)
            self._make_room(pieces)
            path = folder / f"{end:015d}.log"
        if self._piece >= 0:
            os.close(self._piece)
            self._piece = -1
        self._piece = _open(path)
        if os.fstat(self._head).st_size > self._head_bytes:  # it was written with a higher limit, or none
            os.ftruncate(self._head, self._head_bytes)

    def _make_room(self, pieces: Sequence[_Piece]) -> None:
        sizes = [piece.end - piece.begin for piece in pieces]
        for index, piece in enumerate(pieces):
            if self._head_bytes + sum(sizes[index:]) + self._piece_bytes > self._limit_bytes:
                piece.path.unlink(missing_ok=True)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


class Ranked:
    """Adds to a log the lines of one worker of a gang, whole and each after its rank."""

    def __init__(self, log: Appender, rank: int) -> None:
        self._log, self._rank = log, _RANK % rank
        self._held = b""
        """A line that has no end yet, as that of a progress bar."""

    def write(self, content: bytes) -> None:
        """Add the lines that end in `content`, and pieces of longer ones. Raises OSError."""
        *lines, self._held = (self._held + content).split(b"\n")
        if len(self._held) >= _RANKED_BYTES:
            lines, self._held = [*lines, self._held], b""
        if lines:
            self._log.write(b"".join(self._marked(line) for line in lines), on_new_line=True)

    def close(self) -> None:
        """Add a line without an end, and close the files; the next write opens them again."""
        rest, self._held = self._held, b""
        if rest:
            with contextlib.suppress(OSError):
                self._log.write(self._marked(rest), on_new_line=True)
        self._log.close()

    def _marked(self, line: bytes) -> bytes:
        begins = range(0, max(1, len(line)), _RANKED_BYTES)
        return b"".join(self._rank + line[begin : begin + _RANKED_BYTES] + b"\n" for begin in begins)


class Masked:
    """Adds to a log what is printed, without the texts to mask: one may come in parts."""

    def __init__(self, log: Appender | Ranked, masks: Sequence[bytes]) -> None:
        self._log, self._masks = log, masks
        self._held = b""
        """The end of what was printed, where it may be the beginning of such a text."""

    def write(self, content: bytes) -> None:
        """Add `content`; nothing: the output has ended. Raises OSError."""
        printed = self._held + content
        for text in self._masks:
            printed = printed.replace(text, MASK)
        held = max((_begun(printed, text) for text in self._masks), default=0) if content else 0
        self._held = printed[len(printed) - held :]
        self._log.write(printed[: len(printed) - held])

    def close(self) -> None:
        """Close the files; the next write opens them again."""
        self._log.close()


def _begun(printed: bytes, text: bytes) -> int:
    """Return how much of the text stands at the end of what was printed."""
    return next((size for size in range(len(text) - 1, 0, -1) if printed.endswith(text[:size])), 0)


def masking(text: str) -> bytes:
    """Return the message after which no log gets this text."""
    return _MASKED + os.fsencode(text) + _MESSAGE_END


def opening(log: TrialLog) -> bytes:
    """Return the message that goes with the end of a pipe whose bytes are to be added to `log`."""
    rank = -1 if log.rank is None else log.rank
    return b"%d %d %s" % (log.limit_bytes, rank, os.fsencode(log.path)) + _MESSAGE_END


def _opened(message: bytes) -> Appender | Ranked:
    """Return the log that an `opening` names."""
    limit, rank, path = message.split(b" ", 2)
    log = Appender(TrialLog(path=Path(os.fsdecode(path)), limit_bytes=int(limit)))
    return log if int(rank) < 0 else Ranked(log, int(rank))


def draining() -> bytes:
    """Return the message that asks for an answer once the content of the newest pipe is written."""
    return _MESSAGE_END


def pump(control: socket.socket) -> None:
    """Write from pipes to logs, until all pipes and `control` are closed."""
    logs: dict[int, Masked] = {}
    masks: list[bytes] = []
    newest = -1
    rest = b""
    pipes: list[int] = []
    with selectors.DefaultSelector() as ready:
        ready.register(control, selectors.EVENT_READ)
        while ready.get_map():
            for key, _ in ready.select():
                if key.fileobj is not control:
                    select.select([control], [], [], _GATHERING_S)
                    if _carry(key.fd, logs[key.fd]):
                        ready.unregister(key.fd)
                        logs.pop(key.fd).close()
                        os.close(key.fd)
                    continue
                received, fds, _, _ = socket.recv_fds(control, 2**16, _MOST_FDS)
                if not received:
                    ready.unregister(control)
                    continue
                pipes += fds
                *messages, rest = (rest + received).split(_MESSAGE_END)
                for message in messages:
                    if message.startswith(_MASKED):
                        masks.append(message.removeprefix(_MASKED))
                    elif message:
                        newest = pipes.pop(0)
                        os.set_blocking(newest, False)
                        logs[newest] = Masked(_opened(message), masks)
                        ready.register(newest, selectors.EVENT_READ)
                    else:
                        _drain(newest, logs)
                        with contextlib.suppress(OSError):
                            control.send(b".")


def _drain(pipe: int, logs: dict[int, Masked]) -> None:
    """Write the content of the pipe, in two reads at most, since it may be filled again and again."""
    if pipe in logs:
        for _ in range(2):
            if _carry(pipe, logs[pipe]):
                break


def _carry(pipe: int, log: Masked) -> bool:
    """Write a read from the pipe to its log; return True at its end. Bytes that cannot be written are dropped."""
    try:
        content = os.read(pipe, PIPE_BYTES)
    except BlockingIOError:
        return False
    try:
        log.write(content)
    except OSError:
        log.close()
    return not content


if __name__ == "__main__":
    if os.fork() == 0:  # so that it is no child of the trial's process, which may wait for its children, or kill them
        pump(socket.socket(fileno=int(sys.argv[1])))
