"""The logs of an experiment, page by page: the output of its trials and its process, and why trials failed.

A page ends with a cursor, which holds how far each log was read; the next page continues there. Logs may be huge, hold
any bytes, be cut (`rubberband.executor.logs.trial_log`), be replaced, or be missing.
"""

from __future__ import annotations

import base64
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rubberband.errors import InputError
from rubberband.executor.logs.trial_log import LINE_BYTES, Stretch, left_out_line, printed_bytes, read, split_rank
from rubberband.executor.run.follower import Failure
from rubberband.units import shown

TAIL = "tail"
"""The cursor of a page that begins shortly before the end."""
PAGE_BYTES = 1 << 20
TAIL_BYTES = 64 << 10
"""How far before the end `TAIL` begins, over all files."""
MAX_FILES = 1000
"""The most places in a cursor."""
_MAX_CURSOR_BYTES = 1 << 16
_TRIAL_LOG = re.compile(r"trial-(\d{1,9})\.log")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrintedLine:
    """A line of a log."""

    trial: int | None
    """None: the experiment's process."""
    rank: int | None = None
    """Rank of the worker of a gang that printed it; None: no worker did, it was alone, or this is not known."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The lines to show."""

    text: str = ""
    """Only lines that contain it, in upper or lower case."""
    rank: int | None = None
    """Only lines that this worker of a gang printed; None: all."""

    def shows(self, line: PrintedLine) -> bool:
        """Whether a line is one of them."""
        return self.rank in (None, line.rank) and self.text.casefold() in line.text.casefold()


ALL_LINES = Wanted()


@dataclass(slots=True, kw_only=True)
class LogPlace:
    """How far a log was read."""

    offsets: dict[int, int] = field(default_factory=dict)
    """Number of the file -> bytes read."""
    failure_seq: int = -1
    """Sequence number of the last failure that was shown."""
    is_tail: bool = False
    """Whether to begin shortly before the end."""


def trial_files(folder: Path, trial: int | None) -> dict[int | None, Path]:
    """Return the logs of all trials, or of one, by number."""
    if trial is not None:
        return {trial: folder / f"trial-{trial:03d}.log"}
    try:
        names = os.listdir(folder)
    except OSError:
        return {}
    numbered = sorted((int(match[1]), name) for name in names if (match := _TRIAL_LOG.fullmatch(name)))
    return {number: folder / name for number, name in numbered[:MAX_FILES]}


def page(
    files: Mapping[int | None, Path],
    failures: Sequence[Failure],
    *,
    cursor: str | None,
    limit: int,
    is_whole: bool,
    wanted: Wanted = ALL_LINES,
) -> tuple[list[PrintedLine], str]:
    """Return at most `limit` lines after `cursor`, and the cursor after them.

    Where few lines are `wanted`, a page may have few or none, and more follow as long as the cursor changes.
    The file of the process has the number None. `is_whole`: nothing is written any more, so that the last line counts
    even without an end. Raises InputError for an invalid cursor, and for a rank of the process.
    """
    if wanted.rank is not None and None in files:
        raise InputError(f"rank {wanted.rank}: the experiment's process has no ranks; leave out either")
    place = read_cursor(cursor)
    lines: list[PrintedLine] = []
    left_bytes = PAGE_BYTES
    for number, path in files.items():
        key = 0 if number is None else number + 1
        share = TAIL_BYTES // max(1, min(len(files), 32))
        begin = _tail_offset(path, share) if place.is_tail else place.offsets.get(key, 0)
        room = PAGE_BYTES if place.is_tail else limit - len(lines)
        more, end, used = _read(number, path, begin, room, left_bytes, is_whole, wanted)
        lines += more
        left_bytes -= used
        if end:
            place.offsets[key] = end
        if not place.is_tail and (len(lines) >= limit or left_bytes <= 0):
            return lines, write_cursor(place)
    room = PAGE_BYTES if place.is_tail else limit - len(lines)
    lines += filter(wanted.shows, _failure_lines(failures, place, room))
    return (lines[-limit:] if place.is_tail else lines), write_cursor(place)


def _failure_lines(failures: Sequence[Failure], place: LogPlace, room: int) -> Iterator[PrintedLine]:
    """Yield the new failures, each as a whole, so that a page may be a little longer than its limit."""
    for failure in failures:
        if failure.seq > place.failure_seq and room > 0:
            room -= len(failure.lines)
            place.failure_seq = failure.seq
            yield from (PrintedLine(trial=failure.trial, text=line) for line in failure.lines)


def _tail_offset(path: Path, share: int) -> int:
    """Return the beginning of a line about `share` bytes before the end."""
    try:
        size = printed_bytes(path)
        if size <= share:
            return 0
        stretch = read(path, size - share, share)
        return stretch.begin + stretch.content.find(b"\n") + 1
    except OSError:
        return 0


def _read(
    trial: int | None, path: Path, begin: int, room: int, most_bytes: int, is_whole: bool, wanted: Wanted
) -> tuple[list[PrintedLine], int, int]:
    """Return at most `room` wanted lines from `begin` on, their end, and the bytes that were read.

    A log that shrank was replaced.
    """
    lines: list[PrintedLine] = []
    left_bytes, goes_on = most_bytes, True
    with suppress(OSError):
        if printed_bytes(path) < begin:
            begin = 0
        while goes_on and left_bytes > 0 and len(lines) < room:
            stretch = read(path, begin, left_bytes)
            goes_on = stretch.is_cut
            if stretch.content:
                missing = stretch.begin - begin
                more, used = _lines(trial, stretch, missing, room - len(lines), is_whole or goes_on, wanted)
                lines += more
                begin = stretch.begin + used
                left_bytes -= used
    return lines, begin, most_bytes - left_bytes


def _lines(
    trial: int | None, stretch: Stretch, left_out_bytes: int, room: int, is_whole: bool, wanted: Wanted
) -> tuple[list[PrintedLine], int]:
    """Return the wanted lines of a stretch, and the bytes up to them; `left_out_bytes` are missing before it."""
    data, lines, used = stretch.content, list[PrintedLine](), 0
    if left_out_bytes:
        lines.append(PrintedLine(trial=trial, text=left_out_line(left_out_bytes)))
    while len(lines) < room and used < len(data):
        end = data.find(b"\n", used, used + LINE_BYTES)
        if end < 0:
            if len(data) - used < LINE_BYTES and not is_whole:
                break
            end = min(used + LINE_BYTES, len(data)) - 1
            piece, used = data[used : end + 1], end + 1
        else:
            piece, used = data[used:end], end + 1
        rank, text = split_rank(piece)
        line = PrintedLine(trial=trial, rank=rank, text=text.decode("utf-8", "replace").rstrip("\r"))
        if wanted.shows(line):
            lines.append(line)
    return lines, used


def write_cursor(place: LogPlace) -> str:
    """Return a place in the logs as the text of a cursor, URL-safe."""
    numbers = [place.failure_seq + 1]
    last = 0
    for number, offset in sorted(place.offsets.items()):
        numbers += [number - last, offset]
        last = number
    packed = zlib.compress(b"".join(_varint(number) for number in numbers), 9)
    return base64.urlsafe_b64encode(packed).decode().rstrip("=")


def read_cursor(cursor: str | None) -> LogPlace:
    """Return the place that `write_cursor` wrote; the beginning without one. Raises InputError for anything else."""
    if cursor is None:
        return LogPlace()
    if cursor == TAIL:
        return LogPlace(is_tail=True)
    try:
        packed = base64.b64decode(cursor.encode("ascii") + b"=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        unpacking = zlib.decompressobj()
        data = unpacking.decompress(packed, _MAX_CURSOR_BYTES)
        if not unpacking.eof:
            raise ValueError("it does not end")
        failure_seq, *pairs = _varints(data)
    except (ValueError, zlib.error):
        raise InputError(
            f"cursor {shown(cursor)} was not issued by this service; leave it out for the beginning"
        ) from None
    place, number = LogPlace(failure_seq=failure_seq - 1), 0
    for step, offset in zip(pairs[::2], pairs[1::2], strict=False):
        number += step
        place.offsets[number] = offset
    return place


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number >= 0x80:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])


def _varints(data: bytes) -> list[int]:
    numbers, number, shift = [], 0, 0
    for byte in data:
        if shift > 56:
            raise ValueError("no such number")
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            numbers.append(number)
            number = shift = 0
    if shift or not numbers:
        raise ValueError("it is cut off")
    return numbers
