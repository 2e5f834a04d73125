"""The experiments of the service: each runs in a process of its own, which outlives the server and is adopted again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rubberband.api.settings import Settings
from rubberband.api.store.protocol import Store
from rubberband.api.store.records import Submission
from rubberband.executor.result import Result
from rubberband.experiment import Experiment
from rubberband.planner.families import Policy

if TYPE_CHECKING:
    from rubberband.executor.extending import Extension


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """A line that was printed."""

    trial: int | None
    """Which trial printed it; None for the process."""
    text: str


class Runs:
    """Starts, adopts, watches and ends the processes of experiments, and reads what they journal."""

    def __init__(self, settings: Settings, store: Store, wake: Callable[[], None]) -> None:
        """`wake` is called when something was added to the feed."""
        self._settings, self._store, self._wake = settings, store, wake

    def start(self) -> None:
        """Adopt what runs, start what waits, and watch from now on (in a thread)."""

    def close(self) -> None:
        """Watch no longer. The experiments go on."""

    @property
    def alive(self) -> bool:
        """Whether it watches."""
        return True

    def submit(
        self,
        experiment: Experiment,
        *,
        policy: Policy = "optimal",
        owner: str = "",
        plan: str | None = None,
        request: str = "",
    ) -> Submission:
        """Accept an experiment; its process starts as soon as fewer run than may. Raises Problem (NAME_TAKEN, …).

        The name being taken by a submission of the same `request` (not empty) is no problem: that one is the answer.
        """
        raise NotImplementedError

    def cancel(self, name: str) -> Submission:
        """Ask for a clean end: instances are given back, the best so far is kept. Idempotent. Raises Problem."""
        raise NotImplementedError

    def resume(self, name: str) -> Submission:
        """Go on with what was interrupted, cancelled, or ended by a budget that was raised since. Raises Problem."""
        raise NotImplementedError

    def extension(self, name: str, *, deadline: object = None, max_cost_usd: float | None = None) -> Extension:
        """What another deadline or budget would change: the plan of the rest, before and after. Raises Problem."""
        raise NotImplementedError

    def extend(
        self, name: str, *, deadline: object = None, max_cost_usd: float | None = None, request: str
    ) -> Extension:
        """Change the limits; `request` is an id that makes it happen once. Raises Problem."""
        raise NotImplementedError

    def result(self, name: str) -> Result | None:
        """What came of it so far; None while nothing is journalled. Raises Problem if there is none of the name."""
        raise NotImplementedError

    def lines(
        self,
        name: str,
        *,
        source: Literal["trials", "process"] = "trials",
        trial: int | None = None,
        cursor: str | None = None,
        limit: int = 1000,
    ) -> tuple[Sequence[LogLine], str]:
        """Lines of logs past `cursor`, and the cursor of what comes after them. Raises Problem for a forged cursor."""
        raise NotImplementedError
