"""What trials print on an instance that is another machine: files there, from which the driver takes what is new."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rubberband.cloud.node import machine_folder

_PART_BYTES = 2**18
_PARTS_BYTES = 2**20
_NAME = re.compile(r"[A-Za-z0-9_-]+\.log")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPart:
    """A stretch of a log file."""

    name: str
    offset: int
    content: bytes

    @property
    def end(self) -> int:
        """Where the next part begins."""
        return self.offset + len(self.content)


def logs_folder() -> Path:
    """Where the logs of this machine lie."""
    folder = machine_folder() / "logs"
    folder.mkdir(exist_ok=True)
    return folder


def read_new(folder: Path, taken: Mapping[str, int]) -> Sequence[LogPart]:
    """What lies in the logs beyond what the driver has `taken` (name -> bytes): not all at once where that is much.

    What a driver has taken is noted beside the log, for the next one, which does not know.
    """
    parts: list[LogPart] = []
    room = _PARTS_BYTES
    for path in sorted(folder.glob("*.log")):
        note = path.with_suffix(".taken")
        offset = taken.get(path.name)
        if offset is None:
            offset = _noted(note)
        elif offset != _noted(note):
            note.write_text(str(offset))
        with open(path, "rb") as file:
            file.seek(offset)
            content = file.read(min(_PART_BYTES, room))
        if content:
            parts.append(LogPart(name=path.name, offset=offset, content=content))
            room -= len(content)
        if room <= 0:
            break
    return parts


def _noted(note: Path) -> int:
    with suppress(OSError, ValueError):
        return int(note.read_text())
    return 0


def append(folder: Path, part: LogPart) -> None:
    """Add a part to the driver's own file of that name. Raises OSError."""
    if _NAME.fullmatch(part.name) is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / part.name, "ab") as file:
        file.write(part.content)
