"""The plan with which an experiment would run, or the changes that make one possible: the one way of every front door.

`estimate`, previews and admission, `run` and the size of a search all count the same: the limits of
`rubberband.planning.candidates`, and the money that a run keeps back (`rubberband.planner.reserve`).
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rubberband.cloud.catalogue import Table
from rubberband.errors import InfeasibleError, InputError
from rubberband.planner import (
    Estimate,
    JobPlan,
    Nearest,
    Objective,
    Problem,
    estimate,
    estimate_plan,
    first_kept,
    without_noise,
)
from rubberband.planning.candidates import Room, candidates, gang_notes, with_start_times
from rubberband.planning.remedies import (
    CandidatesOf,
    Reached,
    advice,
    find_remedies,
    is_out_of_reach,
    none_within,
    reached,
)
from rubberband.planning.startup_history import StartTimes
from rubberband.spec.experiment import Experiment
from rubberband.spec.schedulers import MAX_ASHA_TRIALS
from rubberband.spec.scheduling import MAX_TRIALS
from rubberband.units import counted, format_duration, format_usd, in_unit
from rubberband.values.plan import Plan, Policy, Size, SizeKey, Spent
from rubberband.values.profile import Profile

if TYPE_CHECKING:
    from rubberband.planning.month_cap import MonthCap

Profiles = Profile | Mapping[str, Profile]


@dataclass(frozen=True, slots=True, kw_only=True)
class PricesAndQuotas:
    """Inputs of an estimate beside the file and its profile."""

    table: Table | None = None
    """Instance types and prices; None: the experiment's own table."""
    room: Room | None = None
    """Instances that the account's quota allows; None: the file's limit counts."""
    starts: StartTimes | None = None
    """Measured start times of instances on this machine; None for other providers, or before a first run."""
    notes: tuple[str, ...] = ()
    """Remarks on these: stale prices, quotas. Every screen of an estimate shows them."""
    blocks: Callable[[str, int, float, float], str | None] | None = None
    """Compares a plan with capacity that is sold in advance, as in `rubberband.cloud.provider.Today`."""
    month_cap: MonthCap | None = None
    """The cap of the experiment's pool on a month's bill, and what is spent of it; None without a cap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedExperiment:
    """An experiment with its plan, or the reason why there is none."""

    experiment: Experiment
    """With the start times of this machine, and a number as the size of its search."""
    candidates: tuple[Problem, ...]
    estimate: Estimate
    size: Size | None
    """Set if the search was sized to the limits."""
    remarks: tuple[str, ...]
    """On the start times, and on the least gang."""
    seen: frozenset[str]
    """The words that measured start times replace."""

    @property
    def job(self) -> JobPlan:
        """The plan to run. Raises InfeasibleError, with remedies, if it does not keep the limits."""
        if self.estimate.job is None or not self.estimate.feasible:
            raise _refusal(self.estimate)
        return self.estimate.job


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningOptions:
    """How an experiment is planned."""

    now: float
    """Unix time of its start."""
    policy: Policy = "optimal"
    given: Plan | None = None
    """The user's own plan, to predict instead of search."""
    spent: Spent = field(default_factory=Spent)
    """Part of its limits that is used already."""
    to_size: bool = False
    """Whether the search is sized to the limits first; it is in any case where its size is auto."""
    compare: bool = False
    """Whether the alternatives are planned too."""
    simulate: bool = True
    """Whether they include one that takes a simulation; else it is pending."""
    frontier: bool = False
    """Whether the whole frontier is found, which takes much longer."""
    seed: int = 0
    most_usd: float | None = None
    """Highest cost of a remedy."""
    advise: bool = True
    """Whether remedies are searched for where there is no plan."""
    clock: Callable[[], float] = time.perf_counter
    """Reads seconds, to time the planning."""


def planned(
    experiment: Experiment, profiles: Profiles, prices: PricesAndQuotas, options: PlanningOptions
) -> PlannedExperiment:
    """Plan an experiment with what is left of its limits. Raises InputError for what cannot be planned."""
    started, remarks, seen = with_start_times(experiment, prices.starts, profiles)

    def candidates_of(changed: Experiment) -> tuple[Problem, ...]:
        return candidates(
            changed,
            profiles,
            options.now,
            policy=options.policy,
            seed=options.seed,
            table=prices.table,
            room=prices.room,
            spent=options.spent,
        )

    found, sized = candidates_of(started), None
    if options.to_size or started.search.auto is not None:
        if options.given is not None:
            raise InputError(
                "--plan: a plan file is for one size, and this search is sized to the limits; leave it out"
            )
        sized, started = size(started, found)
        found = tuple(replace(one, brackets=started.brackets()) for one in found)
    best = _estimated(started, found, options)
    if best.job is None and options.advise:
        best = _with_remedies(best, started, candidates_of, options)
    if sized is not None and sized.number is None:
        best = _unsized(best, sized)
    gangs = gang_notes(started, profiles, best.problem.offer, table=prices.table, room=prices.room)
    return PlannedExperiment(
        experiment=started, candidates=found, estimate=best, size=sized, remarks=(*remarks, *gangs), seen=seen
    )


def _estimated(experiment: Experiment, found: Sequence[Problem], options: PlanningOptions) -> Estimate:
    if options.given is not None:
        only, fewest = _only(found), min(stage.gpus_per_trial for stage in options.given.stages)
        if fewest < (least := only.constraints.min_gpus_per_trial):
            raise InputError(
                f"--plan: {counted(fewest, 'GPU')} per trial are fewer than {least}, the least here "
                "(resources.gpus_per_trial.min, or where the profile starts); raise gpus_per_trial in the plan"
            )
        return estimate_plan(only, options.given, experiment.name, with_frontier=options.frontier)
    return estimate(
        found,
        experiment.name,
        clock=options.clock,
        compare=options.compare,
        with_frontier=options.frontier,
        other_scheduler=experiment.search.other_scheduler() if options.compare else None,
        simulate=options.simulate,
    )


def _only(found: Sequence[Problem]) -> Problem:
    """Return the problem that the user's own plan solves. Raises InputError if that is ambiguous."""
    brackets = found[0].brackets
    if len(brackets) > 1:
        raise InputError(
            f"--plan: a plan file holds one chain of stages and hyperband has {counted(len(brackets), 'bracket')}; "
            "leave --plan out, or use the scheduler sha or stages"
        )
    if len(found) > 1:
        names = [one.offer.instance_type for one in found]
        raise InputError(
            f"--plan: a plan is for one instance type and the experiment has {', '.join(names)}; "
            f"choose one with -s 'resources.instance_types=[{names[0]}]'"
        )
    # Predicted as it is written, and compared by its cost.
    return replace(found[0], policy="optimal", objective="min_cost")


def _unsized(best: Estimate, sized: Size) -> Estimate:
    """Return the estimate of the smallest search, which does not fit, with the reason and the remedies of a run."""
    error = refused(sized, _refusal(best))
    return replace(
        best,
        feasible=False,
        job=None,
        nearest=Nearest(jct_s=error.shortest_jct_s, cost_usd=error.cheapest_usd),
        reason=str(error),
        obstacle=error.obstacle,
        remedies=error.remedies,
        options=(),
        frontier=(),
        static_frontier=(),
    )


def _with_remedies(
    found: Estimate, experiment: Experiment, candidates_of: CandidatesOf, options: PlanningOptions
) -> Estimate:
    """Return an estimate without a plan with the remedies that make a run possible."""
    used, most_usd = options.spent, options.most_usd

    def attempt(tried: Sequence[Problem], objective: Objective) -> Reached | None:
        kept = first_kept([replace(one, brackets=found.brackets, objective=objective) for one in tried])
        if kept is None:
            return None
        plain = reached(kept[1], tried[kept[0]].constraints.confidence)
        return replace(plain, needs_s=plain.needs_s + used.seconds, needs_usd=plain.needs_usd + used.cost_usd)

    nearest = found.nearest if used == Spent() else None
    remedies = find_remedies(
        experiment, candidates_of, attempt, clock=options.clock, most_usd=most_usd, nearest=nearest
    )
    if not remedies and most_usd is None:
        return found
    fix = advice(remedies[0]) if remedies else none_within(most_usd)
    if used != Spent():
        fix = f"measuring took {format_duration(used.seconds)} and {format_usd(used.cost_usd)} of the limits; {fix}"
    return replace(found, remedies=remedies, reason=in_unit(f"{found.obstacle}; {fix}", experiment.resources.unit))


def _refusal(found: Estimate) -> InfeasibleError:
    """Return the error of an estimate that is not feasible, with its remedies."""
    if found.job is not None:
        return _missed(found)
    assert found.nearest is not None, "an infeasible answer has a nearest plan"
    return InfeasibleError(
        found.obstacle or "",
        advice=(found.reason or "").removeprefix(f"{found.obstacle}; "),
        remedies=found.remedies,
        shortest_jct_s=found.nearest.jct_s,
        cheapest_usd=found.nearest.cost_usd,
    )


def _missed(found: Estimate) -> InfeasibleError:
    """Return the error for a policy that has one plan, which misses the limits."""
    assert found.prediction is not None, "there is a plan"
    prediction, limits = found.prediction, found.constraints
    missed = []
    if limits.deadline_s is not None:
        missed.append(f"deadline {format_duration(limits.deadline_s)}")
    if limits.max_cost_usd is not None:
        missed.append(f"max_cost {format_usd(limits.max_cost_usd)}")
    surely = "" if found.odds is None else f" with confidence {limits.confidence:g}"
    return InfeasibleError(
        f"the {found.policy} plan does not keep {' and '.join(missed)}{surely}: it takes "
        f"{format_duration(prediction.jct_s)} and costs {in_unit(format_usd(prediction.cost_usd), found.offer.unit)}",
        advice="use the policy optimal, or raise the limits",
        shortest_jct_s=prediction.jct_s,
        cheapest_usd=prediction.cost_usd,
    )


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
    search, by_grid = experiment.search, experiment.search.sampler.type == "grid"
    if (key := search.auto or search.scheduler.sized_by[by_grid]) is not None:
        return key
    written = {"stages": "stages written out"}.get(search.scheduler.type, f"a grid with {search.scheduler.type}")
    raise InputError(f"search.scheduler: {written} cannot be sized to the limits; use the scheduler sha")


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
    return Size(key=key, number=number, smallest=sizer.smallest, num_trials=sized.search.num_configurations), sized


def refused(found: Size, error: InfeasibleError) -> InfeasibleError:
    """Return the error of the smallest search as that of all."""
    smallest = counted(found.smallest, "configuration") if found.key == "num_samples" else f"max_t={found.smallest}"
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
        most = MAX_ASHA_TRIALS if self.is_simulated else MAX_TRIALS
        return most // self.experiment.search.repeats

    @property
    def is_simulated(self) -> bool:
        """Whether a plan is found by simulation, which takes up to seconds; its bounds are not tight."""
        return not self.candidates[0].has_sync

    @property
    def confidence(self) -> float:
        """The probability with which limits are to be kept."""
        return self.candidates[0].constraints.confidence

    @property
    def _starts(self) -> list[int]:
        return self.experiment.search.scheduler.falls(self.key)

    def on_average(self) -> Sizer:
        """Return the sizer on mean times, which is much quicker; itself where nothing varies."""
        if not any(one.varies for one in self.candidates):
            return self
        return replace(self, candidates=[_without_noise(one) for one in self.candidates], _jobs={})

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
        return largest(self._starts, self.most, fits, may_fit, None if quick is self else guess)

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


def _without_noise(problem: Problem) -> Problem:
    profile, offer = without_noise(problem.profile, problem.offer)
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
        confidence=_SURE, deadline_s=_times(limits.deadline_s, room), max_cost_usd=_times(limits.max_cost_usd, room)
    )
