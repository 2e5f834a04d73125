"""The search sized to the limits: the largest `num_samples` (or `max_t`) with a plan within deadline and budget.

A size fits if `run` would accept it: its plan keeps the limits with the confidence, and leaves a reserve for the
release of its instances. One more does not fit. A larger search needs no less than a smaller one, except where it has
a stage more (`Sha.falls`): those are looked at one by one. Hyperband's rounding, and the samples of times that vary
and of asha's results, may break the order by a little.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from rubberband.errors import InfeasibleError, InputError
from rubberband.planner import JobPlan, Problem, first_kept, steady
from rubberband.planning.remedies import is_out_of_reach, reached
from rubberband.spec.experiment import Experiment
from rubberband.spec.search import MAX_ASHA_TRIALS, MAX_TRIALS, Asha, Hyperband, Sha
from rubberband.values.plan import Size, SizeKey

_FIRST_STEPS = 128
"""The first step away from a guess is this part of it."""


def largest(
    starts: Sequence[int],
    most: int,
    fits: Callable[[int], bool],
    may_fit: Callable[[int], bool],
    guess: Callable[[int], int] | None = None,
) -> int | None:
    """Return the largest number up to `most` that fits; None if none does.

    From each of `starts` (increasing) to the next one, small numbers fit and large ones do not. `may_fit` is quick, and
    true wherever `fits` is. A good `guess`, from a number that fits, saves looks.
    """
    ends = [*starts[1:], most + 1]
    for start, end in reversed(list(zip(starts, ends, strict=True))):
        end = bisect_left(range(start, end), True, key=lambda number: not may_fit(number)) + start
        if end > start and fits(start):
            return _last(start, end, fits, min(end - 1, guess(start) if guess else end))
    return None


def _last(low: int, high: int, fits: Callable[[int], bool], guess: int) -> int:
    """Return the last number below `high` that fits; `low` does. Steps away from the guess grow fourfold."""
    step, at = max(1, guess // _FIRST_STEPS), guess
    while low < at < high:
        if fits(at):
            low, at = at, at + step
        else:
            high, at = at, at - step
        step *= 4
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


MOST_ITERATIONS = 1_000_000_000
"""Largest `max_t`."""
_SURE = 0.9
_ROOM = {0.5: 3.0, 0.0: 30.0}
"""Confidence -> how far beyond the limits the mean of a plan that keeps them may be, at most."""


def size_key(experiment: Experiment) -> SizeKey:
    """Return the key that sizes the search: the one that is auto, else the one that changes the number of trials.

    Raises InputError for schedulers whose size is written.
    """
    search = experiment.search
    if search.auto is not None:
        return search.auto
    if search.scheduler.type in ("sha", "asha"):
        return "max_t" if search.sampler.type == "grid" else "num_samples"
    if search.scheduler.type == "hyperband" and search.sampler.type != "grid":
        return "max_t"
    written = {"stages": "stages written out", "hyperband": "a grid with hyperband"}
    raise InputError(
        f"search.scheduler: {written[search.scheduler.type]} cannot be sized to the limits; use the scheduler sha"
    )


def size(experiment: Experiment, candidates: Sequence[Problem]) -> tuple[Size, Experiment]:
    """Return the size of a search within its limits, and the experiment with it; the smallest if none fits.

    Raises InputError without limits, for limits that allow more than a search may have, for stages that are written
    out, and for more `points_to_evaluate` than trials.
    """
    key, limits = size_key(experiment), candidates[0].constraints
    if limits.deadline_s is None and limits.max_cost_usd is None:
        raise InputError(
            "constraints: there are no limits to size the search to; set constraints.deadline or constraints.max_cost"
        )
    sizer = Sizer(experiment, key, candidates)
    number = sizer.largest(limits.deadline_s, limits.max_cost_usd)
    sized = experiment.sized(key, sizer.smallest if number is None else number)
    if number is not None:
        sized.search.check()
    return Size(key=key, number=number, smallest=sizer.smallest, num_trials=sized.search.num_trials), sized


def refused(found: Size, error: InfeasibleError) -> InfeasibleError:
    """Return the error of the smallest search as that of all."""
    smallest = "1 configuration" if found.key == "num_samples" else f"max_t={found.smallest}"
    return InfeasibleError(
        f"no search fits, not even {smallest}: {error.obstacle}",
        advice=str(error)[len(error.obstacle) :].removeprefix("; "),
        remedies=error.remedies,
        shortest_jct_s=error.shortest_jct_s,
        cheapest_usd=error.cheapest_usd,
    )


def _times(limit: float | None, share: float) -> float | None:
    return None if limit is None else share * limit


@dataclass(slots=True)
class Sizer:
    """The search for the size of one experiment."""

    experiment: Experiment
    key: SizeKey
    candidates: Sequence[Problem]
    _jobs: dict[tuple[int, float | None, float | None], JobPlan | None] = field(default_factory=dict)

    @property
    def smallest(self) -> int:
        """The smallest size."""
        return self._starts[0]

    @property
    def most(self) -> int:
        """The largest size that a search may have."""
        if self.key == "max_t":
            return MOST_ITERATIONS
        return MAX_ASHA_TRIALS if self.is_simulated else MAX_TRIALS

    @property
    def is_simulated(self) -> bool:
        """Whether a plan is found by simulation (asha), which takes up to seconds; its bounds are not tight."""
        return self.experiment.search.scheduler.type == "asha"

    @property
    def confidence(self) -> float:
        """The probability with which limits are to be kept."""
        return self.candidates[0].constraints.confidence

    @property
    def _starts(self) -> list[int]:
        scheduler = self.experiment.search.scheduler
        assert isinstance(scheduler, Sha | Asha | Hyperband), "stages are not sized"
        return scheduler.falls(self.key)

    def on_average(self) -> Sizer:
        """Return the sizer on mean times, which is much quicker; itself where nothing varies."""
        if not any(one.varies for one in self.candidates):
            return self
        return replace(self, candidates=[_steady(one) for one in self.candidates], _jobs={})

    def largest(self, deadline_s: float | None, max_cost_usd: float | None) -> int | None:
        """Return the largest size that fits these limits; None if none does.

        Raises InputError if the limits allow more than a search may have.
        """
        quick = self.on_average()

        def may_fit(number: int) -> bool:
            return self._may_fit(number, deadline_s, max_cost_usd)

        def fits(number: int) -> bool:
            return self.job(number, deadline_s, max_cost_usd) is not None

        def guess(number: int) -> int:
            """Return the largest size on mean times, where these are as far below the limits as in a sampled plan."""
            for _ in range(2):
                sampled = self.job(number, deadline_s, max_cost_usd)
                if sampled is not None:
                    shares = _mean_shares(sampled, self.confidence)
                    number = quick.largest(_times(deadline_s, shares[0]), _times(max_cost_usd, shares[1])) or number
            return number

        if may_fit(self.most) and (not self.is_simulated or fits(self.most)):
            raise InputError(
                f"search.scheduler.{self.key}: the limits allow more than {self.most:,}, so that they size nothing; "
                "write a number, or set a lower constraints.deadline or constraints.max_cost"
            )
        return largest(
            self._starts,
            self.most,
            fits,
            may_fit,
            None if quick is self else guess,
        )

    def job(self, number: int, deadline_s: float | None, max_cost_usd: float | None) -> JobPlan | None:
        """Return the plan of a size within these limits; None if it does not fit."""
        key = (number, deadline_s, max_cost_usd)
        if key not in self._jobs:
            kept = first_kept(self._sized(number, deadline_s, max_cost_usd))
            self._jobs[key] = None if kept is None else kept[1]
        return self._jobs[key]

    def _sized(self, number: int, deadline_s: float | None, max_cost_usd: float | None) -> list[Problem]:
        brackets = self.experiment.sized(self.key, number).brackets()
        return [
            replace(one.with_limits(deadline_s=deadline_s, max_cost_usd=max_cost_usd), brackets=brackets)
            for one in self.candidates
        ]

    def _may_fit(self, number: int, deadline_s: float | None, max_cost_usd: float | None) -> bool:
        """Return whether bounds, which are quick, allow the size."""
        try:
            return not all(is_out_of_reach(_roomy(one)) for one in self._sized(number, deadline_s, max_cost_usd))
        except InputError:
            return False


def _steady(problem: Problem) -> Problem:
    profile, offer = steady(problem.profile, problem.offer)
    return replace(problem, profile=profile, offer=offer)


def _mean_shares(job: JobPlan, confidence: float) -> tuple[float, float]:
    """Return the mean as a share of what is kept with the confidence, of a plan's time and of its cost."""
    prediction, found = job.prediction, reached(job, confidence)
    return (
        prediction.jct_s / found.needs_s if found.needs_s else 1.0,
        prediction.cost_usd / found.needs_usd if found.needs_usd else 1.0,
    )


def _roomy(problem: Problem) -> Problem:
    """Return the problem with the limits that the mean of a plan surely keeps, where the confidence is low."""
    limits = problem.constraints
    if limits.confidence >= _SURE or not problem.varies:
        return problem
    room = next(times for least, times in _ROOM.items() if limits.confidence >= least)
    return problem.with_limits(
        confidence=_SURE,
        deadline_s=_times(limits.deadline_s, room),
        max_cost_usd=_times(limits.max_cost_usd, room),
    )
