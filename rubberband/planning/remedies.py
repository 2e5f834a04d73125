"""Remedies of an infeasible experiment: each change that suffices alone, as small as possible, and its plan.

Every remedy was planned with: it is feasible, and one step less is not. First come those that concede neither time nor
money (more GPUs for a trial, more instances), then a later deadline and a larger budget. Among equals the one whose
plan costs least comes first, then the faster one. Pairs of changes are searched if no single one suffices.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

from rubberband.errors import Change, InputError, Remedy
from rubberband.planner import (
    COST_TOLERANCE_USD,
    TIME_TOLERANCE_S,
    JobPlan,
    Nearest,
    Objective,
    Problem,
    least_instances,
    run_s,
    up_s,
    up_usd,
    varies,
)
from rubberband.spec.experiment import Experiment
from rubberband.spec.pool import PoolFile, PoolFolder
from rubberband.units import format_duration, format_usd
from rubberband.values.offer import slots
from rubberband.values.plan import Stage, gang_sizes

MOST_S = 4.0
"""Limit of the search: no attempt begins that would likely end later."""
_MOST_INSTANCES = 10_000
_STEP, _MOST_STEPS = 1.02, 25
"""Factor by which a limit that is about enough is raised until a plan keeps it, where times vary."""
_SURE = 0.9
"""From this confidence on, no plan keeps a limit that its mean exceeds."""

MAX_GPUS, MIN_GPUS = "resources.gpus_per_trial.max", "resources.gpus_per_trial.min"
MAX_INSTANCES = "resources.max_instances"
DEADLINE, MAX_COST = "constraints.deadline", "constraints.max_cost"
_OTHER = {DEADLINE: MAX_COST, MAX_COST: DEADLINE}
_PAIRS = (
    (MAX_INSTANCES, MAX_GPUS),
    (MAX_GPUS, MAX_COST),
    (MAX_INSTANCES, MAX_COST),
    (MIN_GPUS, MAX_COST),
    (DEADLINE, MAX_COST),
    (MAX_COST, DEADLINE),
)
"""The first is raised as if the second were no limit, then the second as far as necessary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """A plan within the limits."""

    jct_s: float
    cost_usd: float
    needs_s: float
    """A deadline that is about enough."""
    needs_usd: float
    """A max_cost that is about enough."""


CandidatesOf = Callable[[Experiment], Sequence[Problem]]
Attempt = Callable[[Sequence[Problem], Objective], Reached | None]
Changed = tuple[Experiment, Reached]


def reached(job: JobPlan, confidence: float) -> Reached:
    """Return a plan's figures from its prediction."""
    quantile = "p50" if confidence <= 0.5 else "p90" if confidence <= 0.9 else "p95"
    prediction, jct, cost = job.prediction, job.prediction.jct, job.prediction.cost
    needs_usd = prediction.cost_usd if cost is None else max(prediction.cost_usd, getattr(cost, quantile))
    return Reached(
        jct_s=prediction.jct_s,
        cost_usd=prediction.cost_usd,
        needs_s=prediction.jct_s if jct is None else max(prediction.jct_s, getattr(jct, quantile)),
        needs_usd=needs_usd + job.reserve_usd,
    )


def find_remedies(
    experiment: Experiment,
    candidates_of: CandidatesOf,
    attempt: Attempt,
    *,
    clock: Callable[[], float],
    most_usd: float | None = None,
    nearest: Nearest | None = None,
) -> tuple[Remedy, ...]:
    """Return the remedies of an experiment without a plan, the best first; none costs more than `most_usd`.

    `candidates_of` gives an experiment's candidates, and `attempt` their best plan. `nearest` is the nearest plan, if
    known. `clock` reads seconds.
    """
    finder = _Finder(experiment, candidates_of, attempt, clock, most_usd, nearest)
    found: list[Remedy] = []
    for singles_or_pairs in (finder.singles, finder.pairs):
        try:
            for each in singles_or_pairs():
                found.append(each)
        except _OutOfTimeError:
            break
        if found:
            break
    distinct = {tuple(change.setting for change in each.changes): each for each in found}
    return tuple(sorted(distinct.values(), key=_rank))


def _rank(remedy: Remedy) -> tuple[int, float, float]:
    concessions = sum(change.key in _OTHER for change in remedy.changes)
    return concessions, round(remedy.cost_usd, 6), remedy.jct_s


class _OutOfTimeError(Exception):
    """The next attempt would take too long."""


@dataclass(slots=True)
class _Finder:
    """The search for the remedies of one experiment."""

    experiment: Experiment
    candidates_of: CandidatesOf
    attempt: Attempt
    clock: Callable[[], float]
    most_usd: float | None
    nearest: Nearest | None
    candidates: Sequence[Problem] = field(init=False)
    began_s: float = field(init=False)
    longest_s: float = 0.0
    """Seconds of the longest attempt."""

    def __post_init__(self) -> None:
        self.candidates, self.began_s = self.candidates_of(self.experiment), self.clock()

    def singles(self) -> Iterator[Remedy]:
        """Yield those that are one change."""
        for key in (DEADLINE, MAX_COST, MAX_GPUS, MAX_INSTANCES, MIN_GPUS):  # the quickest searches first
            yield from self._remedy(self._raised(key, self.experiment), key)

    def pairs(self) -> Iterator[Remedy]:
        """Yield those that are two changes."""
        for first, second in _PAIRS:
            yield from self._remedy(self._raised_both(first, second), first, second)

    def _raised_both(self, first: str, second: str) -> Changed | None:
        if second in _OTHER:
            if _value(self.experiment, second) is None:
                return None
            without = _with(self.experiment, second, None)
        else:
            values = self._values(second, self.experiment)
            if not values:
                return None
            without = _with(self.experiment, second, values[-1])
        found = self._raised(first, without)
        if found is None:
            return None
        return self._raised(second, _with(found[0], second, _value(self.experiment, second)))

    def _remedy(self, found: Changed | None, *keys: str) -> Iterator[Remedy]:
        if found is None:
            return
        experiment, plan = found
        cap_usd = experiment.constraints.max_cost_usd
        if self.most_usd is not None and max(plan.cost_usd, cap_usd or 0.0) > self.most_usd:
            return
        before, after = self.candidates[0].constraints, self.candidates_of(experiment)[0].constraints
        was = {key: before.deadline_s if key == DEADLINE else _value(self.experiment, key) for key in keys}
        yield Remedy(
            changes=tuple(
                Change(key=key, value=_words(_value(experiment, key), key), was=_words(was[key], key))
                for key in sorted(keys, key=(MAX_GPUS, MAX_INSTANCES, MIN_GPUS, DEADLINE, MAX_COST).index)
            ),
            jct_s=plan.jct_s,
            cost_usd=plan.cost_usd,
            later_s=(after.deadline_s or 0.0) - (before.deadline_s or 0.0) if DEADLINE in keys else 0.0,
            extra_usd=(after.max_cost_usd or 0.0) - (before.max_cost_usd or 0.0) if MAX_COST in keys else 0.0,
        )

    def _raised(self, key: str, experiment: Experiment) -> Changed | None:
        """Return the experiment with the smallest change of `key` that has a plan, and the plan; None without any."""
        if key in _OTHER:
            return self._relaxed(experiment, key)
        return self._least(experiment, key, self._values(key, experiment))

    def _values(self, key: str, experiment: Experiment) -> Sequence[int]:
        """Return the other values of an integer, the smallest change first."""
        asked, resources = experiment.resources.gpus_per_trial, experiment.resources
        packing = [one.offer.slots for one in self.candidates]
        if key == MAX_INSTANCES:
            most = max(self._widest(one, experiment) for one in self.candidates)
            room = max(one.offer.max_instances for one in self.candidates_of(_with(experiment, key, max(most, 1))))
            if resources.pool is not None:
                pool, gpus = PoolFile(**PoolFolder(path=Path(resources.pool)).read()), self.candidates[0].offer.gpus
                room = min(room, pool.slices_at_once(gpus))
            return range(resources.max_instances + 1, min(most, room, _MOST_INSTANCES) + 1)
        if key == MIN_GPUS:
            if not isinstance(asked.min, int):
                return ()
            smallest = min((one.fixed or one.profile).smallest_gpus for one in self.candidates)
            return [gpus for gpus in range(asked.min - 1, smallest - 1, -1) if _packs(gpus, packing)]
        if asked.max is None or experiment.is_function or resources.trials_per_gpu > 1:
            return ()
        most = max(min(_known(one), one.offer.slots * one.offer.max_instances) for one in self.candidates)
        most = min(most, experiment.batch.max or most)
        return [gpus for gpus in range(asked.max + 1, most + 1) if _packs(gpus, packing)]

    def _widest(self, problem: Problem, experiment: Experiment) -> int:
        """Return the instances that run all trials at once, at any size of gang: more are of no use."""
        asked, gpus = experiment.resources.gpus_per_trial, problem.offer.slots
        widest = 1 if problem.offer.trials_per_gpu > 1 else asked.most or _known(problem)
        sizes = gang_sizes(gpus, asked.least, max(asked.least, widest), asked.sizes or ())
        return sum(
            max(least_instances(max(stage.trials for stage in stages), gpus, size) for size in sizes)
            for stages in experiment.brackets()
            if sizes
        )

    def _least(self, experiment: Experiment, key: str, values: Sequence[int]) -> Changed | None:
        """Return the experiment with the first of `values` that has a plan; later values only make it easier."""
        if not values or self._is_hopeless(_with(experiment, key, values[-1])):
            return None
        # Bounds, which are cheap, skip the first values; plans find the one among the rest.
        at = bisect_left(
            values, True, hi=len(values) - 1, key=lambda x: not self._is_hopeless(_with(experiment, key, x))
        )
        found, low, stride = None, at - 1, 1
        while found is None:
            found = self._try(_with(experiment, key, values[at]))
            if found is None:
                if at == len(values) - 1:
                    return None
                low, at, stride = at, min(len(values) - 1, at + stride), 2 * stride
        high = at
        while high - low > 1:
            middle = (low + high) // 2
            other = self._try(_with(experiment, key, values[middle]))
            if other is None:
                low = middle
            else:
                found, high = other, middle
        return found

    def _relaxed(self, experiment: Experiment, key: str) -> Changed | None:
        """Return it with the tightest limit that a plan keeps: a deadline in whole seconds, a max_cost in cents."""
        if _value(experiment, key) is None:
            return None
        in_time = key == DEADLINE
        if experiment is self.experiment and self.nearest and _value(experiment, _OTHER[key]) is None:
            about = self.nearest.jct_s if in_time else self.nearest.cost_usd
        else:
            free = self._try(_with(experiment, key, None), "min_time" if in_time else "min_cost")
            if free is None:
                return None
            about = free[1].needs_s if in_time else free[1].needs_usd
        for _ in range(_MOST_STEPS):
            found = self._try(_with(experiment, key, float(up_s(about)) if in_time else up_usd(about)))
            if found is not None:
                return found
            about *= _STEP
        return None

    def _try(self, experiment: Experiment, objective: Objective | None = None) -> Changed | None:
        began_s = self.clock()
        if began_s - self.began_s + self.longest_s > MOST_S:
            raise _OutOfTimeError
        try:
            plan = self.attempt(self.candidates_of(experiment), objective or experiment.constraints.objective)
        except InputError:
            plan = None
        self.longest_s = max(self.longest_s, self.clock() - began_s)
        return None if plan is None else (experiment, plan)

    def _is_hopeless(self, experiment: Experiment) -> bool:
        """Return whether bounds show that there is no plan."""
        try:
            return all(is_out_of_reach(one) for one in self.candidates_of(experiment))
        except InputError:
            return True


def _packs(gpus: int, packing: Sequence[int]) -> bool:
    return all(gpus <= each or gpus % each == 0 for each in packing)


def _known(problem: Problem) -> int:
    """Return the most GPUs of a trial that the profile, or the model of adaptive batches, covers."""
    known = (problem.fixed or problem.profile).largest_gpus
    return known if problem.fixed is None else max(known, problem.offer.slots)


def is_out_of_reach(problem: Problem) -> bool:
    """Return whether all instances at once are too late, or a cluster without idle slots is too expensive."""
    limits = problem.constraints
    if varies(problem.profile, problem.offer) and limits.confidence < _SURE:
        return False
    times_s, costs_usd = zip(*(_bounds(problem, stages) for stages in problem.brackets), strict=True)
    late = limits.deadline_s is not None and max(times_s) > limits.deadline_s + TIME_TOLERANCE_S
    return late or (limits.max_cost_usd is not None and sum(costs_usd) > limits.max_cost_usd + COST_TOLERANCE_USD)


def _bounds(problem: Problem, stages: Sequence[Stage]) -> tuple[float, float]:
    """Return lower bounds on seconds (exact if nothing varies: all instances throughout) and US dollars of a plan."""
    offer, profile, limits = problem.offer, problem.profile, problem.constraints
    sizes = [gpus for gpus in limits.gang_sizes(offer.slots) if slots(offer.max_instances, offer.slots, gpus)]
    if not sizes:
        raise InputError("no gang fits")
    price = offer.least_price_usd_per_s
    time_s, gpu_s = offer.provision_delay_s + offer.init_delay_s, 0.0
    for stage in stages:
        fewest, work = stage.rungs.fewest(stage.trials), stage.rung_work
        rungs = [Stage(trials=max(1, trials), iterations=each) for trials, each in zip(fewest, work, strict=True)]
        times_s, gpus_s = [], []
        for gpus in sizes:
            num_slots = slots(offer.max_instances, offer.slots, gpus)
            runs_s = [run_s(rung, gpus, profile) for rung in rungs]
            work_s = sum(rung.trials * each_s for rung, each_s in zip(rungs, runs_s, strict=True))
            waves = -(-stage.trials // num_slots) if stage.has_sync else 1
            # One trial climbs all rungs, and all slots train the fewest trials of each; to a SYNC in whole waves.
            times_s.append(max(waves * sum(runs_s), work_s / num_slots))
            gpus_s.append(gpus * work_s)
        time_s, gpu_s = time_s + min(times_s), gpu_s + min(gpus_s)
    return time_s, price * gpu_s / offer.slots


def _attributes(key: str) -> list[str]:
    return key.replace(MAX_COST, f"{MAX_COST}_usd").split(".")


def _value(experiment: Experiment, key: str) -> Any:
    return reduce(getattr, _attributes(key), experiment)


def _with(experiment: Experiment, key: str, value: Any) -> Experiment:
    """Return the experiment with another value, which is not validated again."""

    def changed(model: Any, name: str, *below: str) -> Any:
        return model.model_copy(update={name: changed(getattr(model, name), *below) if below else value})

    copy: Experiment = changed(experiment, *_attributes(key))
    return copy


def _words(value: Any, key: str) -> Any:
    return format_duration(value) if key == DEADLINE else value


def advice(remedy: Remedy) -> str:
    """Return a remedy in a line: `raise max_instances to 24 (-s resources.max_instances=24: 18m41s, 14.47 USD)`."""
    named = [
        (
            "lower" if change.key.endswith(".min") else "raise",
            f"{_NAMES[change.key]} to "
            + (format_usd(change.value) if isinstance(change.value, float) else str(change.value)),
        )
        for change in remedy.changes
    ]
    verbs = dict.fromkeys(verb for verb, _ in named)
    steps = " and ".join(f"{verb} {' and '.join(what for each, what in named if each == verb)}" for verb in verbs)
    return f"{steps} ({settings(remedy)}: {format_duration(remedy.jct_s)}, {format_usd(remedy.cost_usd)})"


def none_within(most_usd: float | None) -> str:
    """Say that no remedy within the budget was found."""
    return f"no remedy was found within {format_usd(most_usd or 0.0)}, the limit here"


def line(remedy: Remedy) -> str:
    """Return a remedy as a line of a list: `-s constraints.deadline=26m5s: 26m5s, 13.71 USD; 6m5s later`."""
    figures = f"{settings(remedy)}: {format_duration(remedy.jct_s)}, {format_usd(remedy.cost_usd)}"
    return "; ".join(filter(None, (figures, concessions(remedy))))


def settings(remedy: Remedy) -> str:
    """Return the options to add to a command line."""
    return " ".join(f"-s {change.setting}" for change in remedy.changes)


def concessions(remedy: Remedy) -> str:
    """Return the time and money that a remedy asks for, such as `6m5s later, 2.48 USD more`; empty if none."""
    later = f"{format_duration(remedy.later_s)} later" if remedy.later_s else ""
    return ", ".join(filter(None, (later, f"{format_usd(remedy.extra_usd)} more" if remedy.extra_usd else "")))


_NAMES = {
    "resources.gpus_per_trial.max": "gpus_per_trial.max",
    "resources.gpus_per_trial.min": "gpus_per_trial.min",
    "resources.max_instances": "max_instances",
    "constraints.deadline": "the deadline",
    "constraints.max_cost": "max_cost",
}
