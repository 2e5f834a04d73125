"""What is asked of a driver while it runs, by whoever may write in the experiment's folder: to end, or other limits.

Each request is a file that appears whole. The driver journals what it takes from here as an event that carries the
request's id, so that one that is found again after a crash is not taken twice.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverRequest:
    """Something that is asked of the driver."""

    id: str
    """Whoever asks twice by the same id asks once. Letters, digits and -."""
    kind: Literal["cancel", "extend"]
    asked_at: float
    """Unix time."""
    deadline_s: float | None = None
    """Of `extend`: the new deadline, from Started as in `Job.deadline_s`; None: as it was."""
    max_cost_usd: float | None = None
    """Of `extend`: the new cap, as in `Job.max_cost_usd`; None: as it was."""


class Inbox:
    """The requests to one driver, in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, request: DriverRequest) -> None:
        """Leave a request. Idempotent by its id. Raises InputError if the folder cannot be written."""
        raise NotImplementedError

    def pending(self, done: Collection[str] = ()) -> list[DriverRequest]:
        """The requests that are not `done`, by when they were asked. What is no request is left out."""
        raise NotImplementedError

    def discard(self, id: str) -> None:
        """Let go of a request that is journalled. Idempotent."""
        raise NotImplementedError
