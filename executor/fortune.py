"""What goes wrong in a virtual run: the fate of every instance, message and attempt, known beforehand."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from rubberband.cloud.virtual import Fate
from rubberband.executor.events import FailureKind
from rubberband.plan import Market


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """How slowly driver and cloud talk about one instance. Seconds."""

    answer_s: float = 0.0
    """From the order to launch it until the provider has answered."""
    arrives: bool = True
    """Whether the request takes effect at once; if not, with the answer."""
    seen_after_s: float = 0.0
    """From what happens to it until the driver sees it."""
    release_s: float = 0.0
    """From the order to release it until the provider has obeyed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFate:
    """What becomes of one attempt of a trial."""

    failure: FailureKind | None = None
    """How it ends; 'hung' is silence. None: it does not fail."""
    loses_checkpoint: bool = False
    """Whether the checkpoint that it starts from, if any, is gone or not what was written."""
    after_reports: int = 0
    """The failure comes in place of the report after so many."""
    pace: float = 1.0
    """Its iterations take so many times what the profile says."""
    startup: float = 1.0
    """And so does its startup."""
    outlives_stop: bool = False
    """Whether its next report is already under way when it is stopped."""


class Fortune(Protocol):
    """What goes wrong in a virtual run."""

    def instance(self, instance: str, market: Market) -> Fate:
        """The fate of an instance; asked once."""
        ...

    def messages(self, instance: str) -> Messages:
        """How slowly driver and cloud talk about it; asked once by each driver."""
        ...

    def attempt(self, trial: int, attempt: int) -> AttemptFate:
        """The fate of an attempt."""
        ...

    def iteration(self, trial: int, iterations: int) -> float:
        """How many times longer than the attempt's others the trial's iteration number `iterations` takes."""
        ...


_PROMPT = Messages()
_SOUND = AttemptFate()


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """A fortune that is written down: just these things go wrong; nothing by default."""

    refused: Collection[str] = ()
    """Instances that the provider refuses."""
    lost_after_s: Mapping[str, float] = field(default_factory=dict)
    """Instance -> seconds after it began to run at which it dies."""
    failures: Mapping[tuple[int, int], FailureKind] = field(default_factory=dict)
    """(trial, attempt) -> how the attempt ends, in place of its first report; 'hung' means silence."""
    lost_checkpoints: Collection[tuple[int, int]] = ()
    """(trial, attempt) that cannot go on from its checkpoint."""
    fates: Mapping[str, Fate] = field(default_factory=dict)
    """Instance -> whatever else becomes of it."""

    def instance(self, instance: str, market: Market) -> Fate:
        """As written."""
        if instance in self.fates:
            return self.fates[instance]
        refused = f"no capacity for {instance}" if instance in self.refused else ""
        return Fate(refused=refused, ends_after_s=self.lost_after_s.get(instance, math.inf))

    def messages(self, instance: str) -> Messages:
        """Prompt."""
        return _PROMPT

    def attempt(self, trial: int, attempt: int) -> AttemptFate:
        """As written."""
        kind, is_lost = self.failures.get((trial, attempt)), (trial, attempt) in self.lost_checkpoints
        return AttemptFate(failure=kind, loses_checkpoint=is_lost) if kind is not None or is_lost else _SOUND

    def iteration(self, trial: int, iterations: int) -> float:
        """As all others."""
        return 1.0
