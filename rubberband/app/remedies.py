"""What makes an experiment feasible that is not: each change that suffices alone, as small as may be, and its plan.

Every remedy that is told was planned with: it is feasible, and one step less is not. First come those that concede
neither time nor money (more GPUs for a trial, more instances), then a later deadline and a larger budget; among equals
the one whose plan costs least, then the faster one. Where no change suffices alone, pairs are looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rubberband.errors import InputError
from rubberband.planner.estimate import Case, Nearest
from rubberband.planner.labels import COST_TOLERANCE_USD, TIME_TOLERANCE_S
from rubberband.planner.model import least_instances, run_s
from rubberband.planner.sampling import varies
from rubberband.planner.solver import Objective
from rubberband.planner.wording import up_s, up_usd
from rubberband.spec.experiment import Experiment
from rubberband.units import format_duration
from rubberband.values.offer import gang_sizes, slots
from rubberband.values.plan import Change, Prediction, Remedy, Stage

MOST_S = 4.0
"""So long remedies are looked for: none is begun that would likely take longer."""
_MOST_INSTANCES = 10_000
_STEP, _MOST_STEPS = 1.02, 25
"""Where times vary, what is about enough is raised by this factor until it surely is."""
_SURE = 0.9
"""From this confidence on, no plan keeps a limit that its mean does not."""

MAX_GPUS, MIN_GPUS = "resources.gpus_per_trial.max", "resources.gpus_per_trial.min"
MAX_INSTANCES = "resources.max_instances"
DEADLINE, MAX_COST = "constraints.deadline", "constraints.max_cost"
_PAIRS = (
    (MAX_INSTANCES, MAX_GPUS),
    (MAX_GPUS, MAX_COST),
    (MAX_INSTANCES, MAX_COST),
    (MIN_GPUS, MAX_COST),
    (DEADLINE, MAX_COST),
    (MAX_COST, DEADLINE),
)
"""The first is raised as if the second were no limit, then that one as far as it takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """A plan within the limits."""

    jct_s: float
    cost_usd: float
    needs_s: float
    """A deadline that is about enough for it."""
    needs_usd: float
    """A max_cost that is."""


CasesOf = Callable[[Experiment], Sequence[Case]]
Attempt = Callable[[Sequence[Case], Objective], Reached | None]
Changed = tuple[Experiment, Reached]


def reached(prediction: Prediction, confidence: float) -> Reached:
    """A plan by its prediction."""
    quantile = "p50" if confidence <= 0.5 else "p90" if confidence <= 0.9 else "p95"
    jct, cost = prediction.jct, prediction.cost
    return Reached(
        jct_s=prediction.jct_s,
        cost_usd=prediction.cost_usd,
        needs_s=prediction.jct_s if jct is None else max(prediction.jct_s, getattr(jct, quantile)),
        needs_usd=prediction.cost_usd if cost is None else max(prediction.cost_usd, getattr(cost, quantile)),
    )


def find_remedies(
    experiment: Experiment,
    cases_of: CasesOf,
    attempt: Attempt,
    *,
    clock: Callable[[], float],
    most_usd: float | None = None,
    nearest: Nearest | None = None,
) -> tuple[Remedy, ...]:
    """The remedies of an experiment without a plan, the best first; none costs more than `most_usd`.

    `cases_of` tells what an experiment can be planned on, `attempt` the best plan there; `nearest` is what is known of
    it. `clock` reads seconds.
    """
    finder = _Finder(experiment, cases_of, attempt, clock, most_usd, nearest)
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
    concessions = sum(change.key in (DEADLINE, MAX_COST) for change in remedy.changes)
    return concessions, round(remedy.cost_usd, 6), remedy.jct_s


class _OutOfTimeError(Exception):
    """What is looked for next would take too long."""


class _Finder:
    """The remedies of one experiment."""

    def __init__(
        self,
        experiment: Experiment,
        cases_of: CasesOf,
        attempt: Attempt,
        clock: Callable[[], float],
        most_usd: float | None,
        nearest: Nearest | None,
    ) -> None:
        self._experiment, self._cases_of, self._attempt = experiment, cases_of, attempt
        self._nearest = nearest
        self._cases = cases_of(experiment)
        self._clock, self._most_usd = clock, most_usd
        self._began_s, self._longest_s = clock(), 0.0

    def singles(self) -> Iterator[Remedy]:
        """Those that are one change."""
        for key in (DEADLINE, MAX_COST, MAX_GPUS, MAX_INSTANCES, MIN_GPUS):  # first what is soon known
            yield from self._told(self._raised(key, self._experiment), key)

    def pairs(self) -> Iterator[Remedy]:
        """Those that are two."""
        for first, second in _PAIRS:
            yield from self._told(self._raised_both(first, second), first, second)

    def _raised_both(self, first: str, second: str) -> Changed | None:
        if second in (DEADLINE, MAX_COST):
            if _value(self._experiment, second) is None:
                return None
            without = _with(self._experiment, second, None)
        else:
            values = self._values(second, self._experiment)
            if not values:
                return None
            without = _with(self._experiment, second, values[-1])
        found = self._raised(first, without)
        if found is None:
            return None
        return self._raised(second, _with(found[0], second, _value(self._experiment, second)))

    def _told(self, found: Changed | None, *keys: str) -> Iterator[Remedy]:
        if found is None:
            return
        experiment, plan = found
        cap_usd = experiment.constraints.max_cost_usd
        if self._most_usd is not None and max(plan.cost_usd, cap_usd or 0.0) > self._most_usd:
            return
        before, after = self._cases[0].constraints, self._cases_of(experiment)[0].constraints
        yield Remedy(
            changes=tuple(
                Change(key=key, value=_words(_value(experiment, key), key), was=_words(self._was(key), key))
                for key in sorted(keys, key=(MAX_GPUS, MAX_INSTANCES, MIN_GPUS, DEADLINE, MAX_COST).index)
            ),
            jct_s=plan.jct_s,
            cost_usd=plan.cost_usd,
            later_s=(after.deadline_s or 0.0) - (before.deadline_s or 0.0) if DEADLINE in keys else 0.0,
            dearer_usd=(after.max_cost_usd or 0.0) - (before.max_cost_usd or 0.0) if MAX_COST in keys else 0.0,
        )

    def _was(self, key: str) -> Any:
        deadline_s = self._cases[0].constraints.deadline_s
        return deadline_s if key == DEADLINE else _value(self._experiment, key)

    def _raised(self, key: str, experiment: Experiment) -> Changed | None:
        """The experiment with the smallest change of `key` that has a plan, and that; None if none has."""
        if key == DEADLINE:
            return self._later(experiment)
        if key == MAX_COST:
            return self._dearer(experiment)
        return self._least(experiment, key, self._values(key, experiment))

    def _values(self, key: str, experiment: Experiment) -> Sequence[int]:
        """What an integer may be changed to, the smallest change first."""
        asked, resources = experiment.resources.gpus_per_trial, experiment.resources
        packing = [case.offer.gpus for case in self._cases]
        if key == MAX_INSTANCES:
            most = max(self._widest(case, experiment) for case in self._cases)
            room = max(case.offer.max_instances for case in self._cases_of(_with(experiment, key, max(most, 1))))
            return range(resources.max_instances + 1, min(most, room, _MOST_INSTANCES) + 1)
        if key == MIN_GPUS:
            smallest = min((case.fixed or case.profile).smallest_gpus for case in self._cases)
            return [gpus for gpus in range(asked.min - 1, smallest - 1, -1) if _packs(gpus, packing)]
        if asked.max is None:
            return ()
        most = max(min(_known(case), case.offer.gpus * case.offer.max_instances) for case in self._cases)
        most = min(most, experiment.batch.max or most)
        return [gpus for gpus in range(asked.max + 1, most + 1) if _packs(gpus, packing)]

    def _widest(self, case: Case, experiment: Experiment) -> int:
        """The instances that run all trials at once, however many GPUs each has: more are of no use."""
        asked, gpus = experiment.resources.gpus_per_trial, case.offer.gpus
        sizes = gang_sizes(gpus, asked.min, max(asked.min, asked.max or _known(case)))
        return sum(
            max(least_instances(max(stage.trials for stage in stages), gpus, size) for size in sizes)
            for stages in experiment.brackets()
            if sizes
        )

    def _least(self, experiment: Experiment, key: str, values: Sequence[int]) -> Changed | None:
        """The first of `values` with which there is a plan: the more, the better."""
        if not values or self._is_hopeless(_with(experiment, key, values[-1])):
            return None
        low, high = -1, len(values) - 1
        while high - low > 1:  # cheaply: from where on it is not out of the question
            middle = (low + high) // 2
            low, high = (middle, high) if self._is_hopeless(_with(experiment, key, values[middle])) else (low, middle)
        found, at, stride = None, high, 1
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

    def _later(self, experiment: Experiment) -> Changed | None:
        """With the earliest deadline, in whole seconds, that a plan keeps."""
        if experiment.constraints.deadline is None:
            return None
        if experiment is self._experiment and self._nearest and experiment.constraints.max_cost_usd is None:
            return self._enough(experiment, DEADLINE, self._nearest.jct_s)
        soonest = self._try(_with(experiment, DEADLINE, None), "min_time")
        return None if soonest is None else self._enough(experiment, DEADLINE, soonest[1].needs_s)

    def _dearer(self, experiment: Experiment) -> Changed | None:
        """With the smallest max_cost, in cents, that a plan keeps."""
        if experiment.constraints.max_cost_usd is None:
            return None
        if experiment is self._experiment and self._nearest and experiment.constraints.deadline is None:
            return self._enough(experiment, MAX_COST, self._nearest.cost_usd)
        cheapest = self._try(_with(experiment, MAX_COST, None), "min_cost")
        return None if cheapest is None else self._enough(experiment, MAX_COST, cheapest[1].needs_usd)

    def _enough(self, experiment: Experiment, key: str, about: float) -> Changed | None:
        for _ in range(_MOST_STEPS):
            found = self._try(_with(experiment, key, float(up_s(about)) if key == DEADLINE else up_usd(about)))
            if found is not None:
                return found
            about *= _STEP
        return None

    def _try(self, experiment: Experiment, objective: Objective | None = None) -> Changed | None:
        began_s = self._clock()
        if began_s - self._began_s + self._longest_s > MOST_S:
            raise _OutOfTimeError
        try:
            plan = self._attempt(self._cases_of(experiment), objective or experiment.constraints.objective)
        except InputError:
            plan = None
        self._longest_s = max(self._longest_s, self._clock() - began_s)
        return None if plan is None else (experiment, plan)

    def _is_hopeless(self, experiment: Experiment) -> bool:
        """Whether it is seen without a search that there is no plan."""
        try:
            return all(_is_hopeless(case, experiment.brackets()) for case in self._cases_of(experiment))
        except InputError:
            return True


def _packs(gpus: int, packing: Sequence[int]) -> bool:
    return all(gpus <= each or gpus % each == 0 for each in packing)


def _known(case: Case) -> int:
    """The most GPUs of a trial that the profile knows, or a model that trials adapt by."""
    known = (case.fixed or case.profile).largest_gpus
    return known if case.fixed is None else max(known, case.offer.gpus)


def _is_hopeless(case: Case, brackets: Sequence[Sequence[Stage]]) -> bool:
    """Whether not even all instances at once are in time, or no idle slot at all is too dear."""
    limits = case.constraints
    if varies(case.profile, case.offer) and limits.confidence < _SURE:
        return False
    times_s, costs_usd = zip(*(_bounds(case, stages) for stages in brackets), strict=True)
    late = limits.deadline_s is not None and max(times_s) > limits.deadline_s + TIME_TOLERANCE_S
    return late or (limits.max_cost_usd is not None and sum(costs_usd) > limits.max_cost_usd + COST_TOLERANCE_USD)


def _bounds(case: Case, stages: Sequence[Stage]) -> tuple[float, float]:
    """Seconds (exactly, where nothing varies: with all instances throughout) and US dollars that no plan goes below."""
    offer, profile, limits = case.offer, case.profile, case.constraints
    sizes = [
        gpus
        for gpus in gang_sizes(offer.gpus, limits.min_gpus_per_trial, limits.max_gpus_per_trial)
        if slots(offer.max_instances, offer.gpus, gpus)
    ]
    if not sizes:
        raise InputError("no gang fits")
    price = offer.least_price_usd_per_s
    time_s, gpu_s = offer.provision_delay_s + offer.init_delay_s, 0.0
    for stage in stages:
        runs = [(gpus, run_s(stage, gpus, profile)) for gpus in sizes]
        time_s += min(-(-stage.trials // slots(offer.max_instances, offer.gpus, gpus)) * each for gpus, each in runs)
        gpu_s += stage.trials * min(gpus * each for gpus, each in runs)
    return time_s, price * gpu_s / offer.gpus


def _value(experiment: Experiment, key: str) -> Any:
    """The value of a key, as the experiment has it."""
    resources, constraints = experiment.resources, experiment.constraints
    return {
        MAX_GPUS: resources.gpus_per_trial.max,
        MIN_GPUS: resources.gpus_per_trial.min,
        MAX_INSTANCES: resources.max_instances,
        DEADLINE: constraints.deadline,
        MAX_COST: constraints.max_cost_usd,
    }[key]


def _with(experiment: Experiment, key: str, value: Any) -> Experiment:
    """The experiment with another value; what it is made of was checked before."""
    if key in (DEADLINE, MAX_COST):
        name = "deadline" if key == DEADLINE else "max_cost_usd"
        return experiment.model_copy(update={"constraints": experiment.constraints.model_copy(update={name: value})})
    resources = experiment.resources
    if key == MAX_INSTANCES:
        changed = resources.model_copy(update={"max_instances": value})
    else:
        asked = resources.gpus_per_trial.model_copy(update={key.rpartition(".")[2]: value})
        changed = resources.model_copy(update={"gpus_per_trial": asked})
    return experiment.model_copy(update={"resources": changed})


def _words(value: Any, key: str) -> int | float | str:
    """A value as the file has it."""
    if key == DEADLINE:
        return format_duration(value)
    written: int | float = value
    return written
