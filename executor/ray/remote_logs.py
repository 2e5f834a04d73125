"""What trials print on an instance that is another machine: files there, from which the driver takes what is new."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from rubberband.cloud.node import machine_folder
from rubberband.executor.trial_log import Appender, TrialLog, left_out_line, printed_bytes, read

_PART_BYTES = 2**18
_PARTS_BYTES = 2**20
_NAME = re.compile(r"[A-Za-z0-9_-]+\.log")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPart:
    """A stretch of a log file."""

    name: str
    offset: int
    content: bytes
    left_out: int = 0
    """Bytes before it that the driver did not take, and does not get."""

    @property
    def end(self) -> int:
        """Where the next part begins."""
        return self.offset + len(self.content)


def logs_folder() -> Path:
    """Where the logs of this machine lie."""
    folder = machine_folder() / "logs"
    folder.mkdir(exist_ok=True)
    return folder


def read_new(folder: Path, taken: Mapping[str, int], *, is_last: bool = False) -> Sequence[LogPart]:
    """What lies in the logs beyond what the driver has `taken` (name -> bytes): not all at once where that is much.

    The last time it is the end of each log. What a driver has taken is noted beside the log, for the next one, which
    does not know.
    """
    parts: list[LogPart] = []
    room = _PARTS_BYTES
    paths = sorted(folder.glob("*.log"))
    most_bytes = min(_PART_BYTES, _PARTS_BYTES // max(1, len(paths))) if is_last else _PART_BYTES
    for path in paths:
        note = path.with_suffix(".taken")
        offset = taken.get(path.name)
        if offset is None:
            offset = _noted(note)
        elif offset != _noted(note):
            note.write_text(str(offset))
        begin = max(offset, printed_bytes(path) - most_bytes) if is_last else offset
        new = read(path, begin, min(most_bytes, room))
        if new.content:
            left_out = new.begin - offset
            parts.append(LogPart(name=path.name, offset=new.begin, content=new.content, left_out=left_out))
            room -= len(new.content)
        if room <= 0:
            break
    return parts


def _noted(note: Path) -> int:
    with suppress(OSError, ValueError):
        return int(note.read_text())
    return 0


def append(folder: Path, part: LogPart, limit_bytes: int) -> None:
    """Add a part to the driver's own log of that name, of which `limit_bytes` are kept. Raises OSError."""
    if _NAME.fullmatch(part.name) is None:
        return
    missing = f"\n{left_out_line(part.left_out)}\n".encode() if part.left_out else b""
    with closing(Appender(TrialLog(path=folder / part.name, limit_bytes=limit_bytes))) as log:
        log.write(missing + part.content)
