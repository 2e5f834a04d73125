"""How long trials take to start, as a run shows it: the first time on a worker, and later. Pure.

A worker that has trained nothing yet has modules to import and a GPU to wake, and on a new instance all of them do it
at once. Later stages on instances that are held begin on warm workers; who grows pays for cold ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from rubberband.executor.events import Slot
from rubberband.executor.shrinking import SMALLEST_DELAY_S, settled
from rubberband.executor.state import Job, State

FEWEST_STARTS = 3
"""Fewer starts of trials do not tell how long one takes."""
LATEST_STARTS = 8
"""Earlier ones do not count: of wide stages, where more trials start at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Starts:
    """What the start of a trial takes."""

    warm_s: float
    """On workers that have trained before, as a profile has it."""
    cold_surplus_s: float
    """How much longer it takes on a worker that has trained nothing yet."""


def starts(job: Job, state: State) -> Starts:
    """Return what the starts of a run's trials take, as far as it shows another time than the profile's."""
    warm_s, cold_s = _seen(state)
    profile = job.profile
    usual_s = profile.trial_startup_s
    if len(warm_s) >= FEWEST_STARTS:
        usual_s = settled(usual_s, warm_s[-LATEST_STARTS:], profile.startup_cv)
    if len(cold_s) < FEWEST_STARTS:
        return Starts(warm_s=usual_s, cold_surplus_s=0.0)
    first_s = settled(usual_s, cold_s, profile.startup_cv)
    if len(warm_s) < FEWEST_STARTS:
        usual_s = min(usual_s, first_s)
    surplus_s = first_s - usual_s
    return Starts(warm_s=usual_s, cold_surplus_s=surplus_s if surplus_s > SMALLEST_DELAY_S else 0.0)


def _seen(state: State) -> tuple[list[float], list[float]]:
    """The starts on workers that had all trained before, and the others."""
    warm_s, cold_s, trained = list[float](), list[float](), set[Slot]()
    for use in state.allocations:
        if use.training_at is not None:
            is_warm = trained.issuperset(use.gang)
            (warm_s if is_warm else cold_s).append(use.training_at - use.started_at)
            trained.update(use.gang)
    return warm_s, cold_s
