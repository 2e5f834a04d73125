"""The plan with which an experiment would run: within its limits, with a reserve for the release of its instances.

A run keeps to max_cost by stopping while there is still money to release everything. A plan therefore leaves a reserve
for that: an accepted plan also finishes, as long as times are as predicted.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rubberband.app.cases import Room, Spent, cases
from rubberband.app.remedies import Reached, find_remedies, reached
from rubberband.cloud.catalogue import Table
from rubberband.errors import InfeasibleError
from rubberband.planner.brackets import JobPlan
from rubberband.planner.estimate import Case, Estimate, best_job, estimate
from rubberband.planner.reserve import Reserve
from rubberband.planner.sizing import largest
from rubberband.planner.solver import Objective
from rubberband.planner.wording import advice, none_within, usd_up
from rubberband.spec.experiment import Experiment
from rubberband.units import format_duration, format_usd
from rubberband.values.plan import PlanningConstraints, Policy
from rubberband.values.profile import Profile

_STEP = 1.02
"""The max_cost of a remedy is raised by this factor until a plan is accepted with it."""
_MOST_STEPS = 40
_FEW_WIDTHS = 3
"""Number of widths without a plan after which the narrowest width that is in time is searched."""
Profiles = Profile | Mapping[str, Profile]
Found = tuple[Case, JobPlan]
"""A plan with the case that it is for."""


@dataclass(frozen=True, slots=True)
class CasesLeft:
    """A function from an experiment to its cases, with what is left of its limits."""

    profiles: Profiles
    used: Spent
    now: float
    """Unix time."""
    table: Table | None = None
    room: Room | None = None

    def __call__(self, experiment: Experiment) -> list[Case]:
        """Return the cases. Raises InputError as `rubberband.app.cases.cases` does."""
        began_at = self.now - self.used.seconds
        found = cases(experiment, self.profiles, began_at, table=self.table, room=self.room)
        return [replace(case, constraints=_left(case.constraints, self.used)) for case in found]


def refusal(
    experiment: Experiment, cases_of: CasesLeft, policy: Policy, most_usd: float | None = None
) -> InfeasibleError:
    """Return the error of an experiment that cannot run within its limits, with remedies of at most `most_usd`."""
    options = cases_of(experiment)
    planner = RunPlanner.of(experiment, policy, options)
    try:
        planner.affordable(options)
    except InfeasibleError as error:
        return planner.advised(error, cases_of, cases_of.used, most_usd)
    raise AssertionError("the caller found no plan")


def affordable_job(experiment: Experiment, options: Sequence[Case], policy: Policy) -> JobPlan | None:
    """Return the plan with which the experiment would run, its reserve left aside; None if there is none."""
    planner, objective = RunPlanner.of(experiment, policy, options), experiment.constraints.objective
    first = planner.found(options, objective)
    found = None if first is None else planner.within(options, objective, first)
    return None if found is None else found[1]


@dataclass(frozen=True, slots=True)
class RunPlanner:
    """The planning of one experiment with a reserve for the release of its instances."""

    experiment: Experiment
    policy: Policy
    reserve: Reserve

    @classmethod
    def of(cls, experiment: Experiment, policy: Policy, options: Sequence[Case]) -> RunPlanner:
        """Return the planner of an experiment with these cases."""
        margin_s = experiment.resources.kind.release_margin_s
        return cls(experiment, policy, Reserve(margin_s, dearest(experiment, options)))

    def found(self, options: Sequence[Case], objective: Objective) -> Found | None:
        """Return the plan of `planned`, or None without the reason."""
        return best_job(self.experiment.brackets(), options, self.policy, objective)

    def planned(self, options: Sequence[Case], objective: Objective) -> Estimate:
        """Return the best plan, with no reserve."""
        stages, name = self.experiment.brackets(), self.experiment.name
        clock = time.perf_counter
        return estimate(stages, options, self.policy, name, clock=clock, objective=objective, compare=False)

    def affordable(self, options: Sequence[Case]) -> Found:
        """Return the plan that leaves its reserve. Raises InfeasibleError, with a max_cost that suffices."""
        objective = self.experiment.constraints.objective
        first = self.planned(options, objective)
        if first.job is None and (not _is_capped(options) or _too_late(first) or not self.reserve.is_asked_for):
            raise _no_plan(first)
        if first.job is not None and not first.feasible:
            raise _missed(first)
        found = None if first.job is None else self.within(options, objective, (first.case, first.job))
        if found is None:
            raise self._too_dear(options, first)
        return found

    def advised(
        self,
        error: InfeasibleError,
        cases_of: Callable[[Experiment], Sequence[Case]],
        used: Spent,
        most_usd: float | None,
    ) -> InfeasibleError:
        """Return the error with remedies that make a run possible, its reserve included."""

        def attempt(tried: Sequence[Case], objective: Objective) -> Reached | None:
            first = self.found(tried, objective)
            answer = None if first is None else self.within(tried, objective, first)
            if answer is None:
                return None
            plain = reached(answer[1].prediction, answer[0].constraints.confidence)
            needs_usd = plain.needs_usd + self._reserve_usd(*answer) + used.cost_usd
            return replace(plain, needs_s=plain.needs_s + used.seconds, needs_usd=needs_usd)

        remedies = find_remedies(self.experiment, cases_of, attempt, clock=time.perf_counter, most_usd=most_usd)
        if not remedies and most_usd is None:
            return error
        return InfeasibleError(
            error.obstacle,
            advice=advice(remedies[0]) if remedies else none_within(most_usd),
            remedies=remedies,
            shortest_jct_s=error.shortest_jct_s,
            cheapest_usd=error.cheapest_usd,
        )

    def within(self, options: Sequence[Case], objective: Objective, first: Found) -> Found | None:
        """Return `first` if it leaves its reserve, else the plan of the widest clusters that does; None without any."""
        if not _is_capped(options) or self._leaves(*first):
            return first
        widths = range(1, max(case.offer.max_instances for case in options) + 1)

        def narrower(width: int, reserved: int) -> Found | None:
            cases = [case for case in options if case.offer.max_instances >= width]
            return self.found([self._narrowed(case, width, reserved) for case in cases], objective)

        def is_cheap(width: int) -> bool:
            return self.found([self._saving(case, width) for case in options], objective) is not None

        def is_fast(width: int) -> bool:
            return narrower(width, 1) is not None

        def guess(_: int) -> int:
            return bisect_left(widths, True, key=lambda width: not self._leaves(*first, width))

        widest, narrowest = largest(widths[:1], widths[-1], is_cheap, lambda _: True, guess) or 0, 1
        for width in range(widest, 0, -1):
            if width == widest - _FEW_WIDTHS:  # the rest may all be too slow
                narrowest = bisect_left(widths[:width], True, key=is_fast) + 1
            answer = narrower(width, width) if width >= narrowest else None
            if answer is not None or width < narrowest:
                return answer
        return None

    def _leaves(self, case: Case, job: JobPlan, width: int | None = None) -> bool:
        """Return whether the plan keeps its limits with its reserve set aside, or that of `width` instances."""
        assert case.constraints.max_cost_usd is not None, "what is asked has a cap"
        reserve_usd = self._reserve_usd(case, job) if width is None else self.reserve.of_width(case.offer, width)
        left_usd = case.constraints.max_cost_usd - reserve_usd
        prediction = job.prediction
        if prediction.cost is None:
            return prediction.cost_usd <= left_usd
        return prediction.cost.p95 <= left_usd and case.constraints.confidence <= 0.95

    def _reserve_usd(self, case: Case, job: JobPlan) -> float:
        # Lanes run side by side, and may be at their widest stages at once.
        return sum(self.reserve.of_plan(case.offer, lane.planned.plan.stages) for lane in job.lanes)

    def _narrowed(self, case: Case, width: int, reserved: int) -> Case:
        return replace(self._saving(case, reserved), offer=replace(case.offer, max_instances=width))

    def _saving(self, case: Case, width: int) -> Case:
        """Return the case with the reserve of `width` instances set aside."""
        cap_usd = case.constraints.max_cost_usd
        return _capped(case, None if cap_usd is None else max(0.0, cap_usd - self.reserve.of_width(case.offer, width)))

    def _too_dear(self, options: Sequence[Case], first: Estimate) -> InfeasibleError:
        """Return the error for a max_cost that is too low; it names one that suffices."""
        free = self.planned([_capped(case, None) for case in options], "min_cost")
        if free.job is None or free.prediction is None:
            return _no_plan(first)
        likely_usd = free.prediction.cost.p95 if free.prediction.cost else free.prediction.cost_usd
        enough_usd = likely_usd + self._reserve_usd(free.case, free.job)
        for _ in range(_MOST_STEPS):
            tried = [_capped(case, enough_usd) for case in options]
            answer = self.found(tried, "min_cost")
            if answer is not None and self.within(tried, "min_cost", answer):
                break
            enough_usd *= _STEP
        cap_usd = first.constraints.max_cost_usd
        assert cap_usd is not None, "what is too dear has a limit"
        in_time = "" if first.constraints.deadline_s is None else " in time"
        return InfeasibleError(
            f"max_cost {format_usd(cap_usd)} cannot be kept: the cheapest plan{in_time} needs {usd_up(enough_usd)}, "
            "with the release of its instances",
            advice=f"raise max_cost to {usd_up(enough_usd)}",
            shortest_jct_s=free.prediction.jct_s if first.nearest is None else first.nearest.jct_s,
            cheapest_usd=enough_usd,
        )


def dearest(experiment: Experiment, options: Sequence[Case]) -> float | None:
    """Return the price of the most expensive type that may replace a sold-out one; None without fallback."""
    prices = [case.offer.price_usd_per_hour for case in options]
    return max(prices) if experiment.resources.kind.is_rented and len(prices) > 1 else None


def _is_capped(options: Sequence[Case]) -> bool:
    return any(case.constraints.max_cost_usd is not None for case in options)


def _too_late(answer: Estimate) -> bool:
    assert answer.nearest is not None, "an infeasible answer has a nearest plan"
    deadline_s = answer.constraints.deadline_s
    return deadline_s is not None and answer.nearest.jct_s > deadline_s


def _no_plan(answer: Estimate) -> InfeasibleError:
    assert answer.nearest is not None, "an infeasible answer has a nearest plan"
    return InfeasibleError(
        answer.obstacle or "",
        advice=(answer.reason or "").removeprefix(f"{answer.obstacle}; "),
        shortest_jct_s=answer.nearest.jct_s,
        cheapest_usd=answer.nearest.cost_usd,
    )


def _missed(answer: Estimate) -> InfeasibleError:
    """Return the error for a policy that has one plan, which misses the limits."""
    assert answer.prediction is not None, "there is a plan"
    prediction = answer.prediction
    limits = answer.constraints
    missed = []
    if limits.deadline_s is not None:
        missed.append(f"deadline {format_duration(limits.deadline_s)}")
    if limits.max_cost_usd is not None:
        missed.append(f"max_cost {format_usd(limits.max_cost_usd)}")
    surely = "" if answer.odds is None else f" with confidence {limits.confidence:g}"
    return InfeasibleError(
        f"the {answer.policy} plan does not keep {' and '.join(missed)}{surely}: it takes "
        f"{format_duration(prediction.jct_s)} and costs {format_usd(prediction.cost_usd)}",
        advice="use the policy optimal, or raise the limits",
        shortest_jct_s=prediction.jct_s,
        cheapest_usd=prediction.cost_usd,
    )


def _capped(case: Case, cap_usd: float | None) -> Case:
    return replace(case, constraints=replace(case.constraints, max_cost_usd=cap_usd))


def _left(constraints: PlanningConstraints, spent: Spent) -> PlanningConstraints:
    deadline_s, max_cost_usd = constraints.deadline_s, constraints.max_cost_usd
    return replace(
        constraints,
        deadline_s=None if deadline_s is None else max(0.0, deadline_s - spent.seconds),
        max_cost_usd=None if max_cost_usd is None else max(0.0, max_cost_usd - spent.cost_usd),
    )
