"""A planning problem (a job on an instance type, its limits, and the policy that plans it), and its answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from rubberband.errors import InfeasibleError, InputError
from rubberband.planner.exact.labels import COST_TOLERANCE_USD, TIME_TOLERANCE_S
from rubberband.planner.exact.model import predict
from rubberband.planner.exact.solver import Box, Objective
from rubberband.planner.exact.table import gangs_of
from rubberband.planner.noise.sampling import Draws, varies
from rubberband.planner.reserve import Reserve
from rubberband.units import format_duration, format_usd
from rubberband.values.offer import Offer
from rubberband.values.plan import (
    Cohort,
    Market,
    Odds,
    Plan,
    Planned,
    PlanningConstraints,
    Policy,
    Prediction,
    Speeds,
    Stage,
    StagePlan,
    repeating,
)
from rubberband.values.profile import Profile

Batch = Literal["fixed", "goodput"]
"""A batch of constant size, or one that adapts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A job to plan, or the rest of a running one."""

    brackets: Sequence[Sequence[Stage]]
    """Chains of stages that may run side by side; one, unless it is Hyperband."""
    profile: Profile
    offer: Offer
    constraints: PlanningConstraints
    policy: Policy = "optimal"
    objective: Objective = "min_cost"
    held: Sequence[Cohort] = ()
    """Instances held now, where the rest of a job is planned."""
    speeds: Speeds | None = None
    """Speeds of the trials that go on, where the rest of a job is planned."""
    seed: int = 0
    """Seed of the samples, where times vary."""
    reserve: Reserve | None = None
    """Terms of the money that a plan leaves of max_cost beside its cost; None: it leaves none."""
    quick: bool = False
    """Whether few simulations do, where there is no SYNC: for a row beside another plan."""
    fixed: Profile | None = None
    """Profile with a fixed batch; set where the trials of `profile` adapt theirs."""

    def __post_init__(self) -> None:
        if not self.profile.resumes:
            object.__setattr__(self, "brackets", tuple(repeating(stages) for stages in self.brackets))

    def with_checkpoints(self) -> Problem:
        """Return the problem of the same trials if they went on from checkpoints."""
        brackets = [[replace(stage, repeats=None) for stage in stages] for stages in self.brackets]
        fixed = None if self.fixed is None else replace(self.fixed, resumes=True)
        return replace(self, brackets=brackets, profile=replace(self.profile, resumes=True), fixed=fixed)

    @property
    def stages(self) -> Sequence[Stage]:
        """The stages of a job of one bracket."""
        return self.brackets[0]

    @property
    def batch(self) -> Batch:
        """Whether the trials' batch adapts."""
        return "fixed" if self.fixed is None else "goodput"

    def with_fixed_batch(self) -> Problem:
        """Return the problem of trials that do not adapt their batch."""
        assert self.fixed is not None, "the caller has seen one"
        return replace(self, profile=self.fixed, fixed=None)

    def with_limits(self, **changes: float | None) -> Problem:
        """Return the problem with other limits, such as `deadline_s`."""
        return replace(self, constraints=replace(self.constraints, **changes))  # type: ignore[arg-type]

    @property
    def box(self) -> Box:
        """The limits as the solver takes them."""
        return Box.of(self.constraints)

    @property
    def constant(self) -> bool:
        """Whether all stages have the same number of instances."""
        return self.policy == "static"

    @property
    def has_sync(self) -> bool:
        """Whether its stages end in a SYNC; else its trials climb rungs, and simulations decide."""
        return self.stages[0].has_sync

    @property
    def varies(self) -> bool:
        """Whether times vary: then samples decide."""
        return varies(self.profile, self.offer, self.speeds)

    @property
    def prefers_spot(self) -> bool:
        """Whether a plan on spot alone comes first.

        Where time is the objective, on demand would always be chosen to save the losses of spot, which was asked for.
        """
        on_demand = any(cohort.market == "on_demand" for cohort in self.held)
        return self.objective == "min_time" and self.offer.spot is not None and not on_demand

    def draws(self) -> Draws:
        """Return the samples of the job, not yet drawn."""
        return Draws(self.stages, self.profile, self.offer, seed=self.seed, speeds=self.speeds)

    @property
    def reserve_text(self) -> str:
        """The other thing that max_cost pays for, named after the cost of a plan."""
        terms = self.reserve
        return ", with the release of its instances" if terms is not None and terms.is_asked_for(self.offer) else ""

    def reserve_usd(self, plan: Plan, costs_usd: Sequence[float] | None = None) -> float:
        """Return the reserve of a plan, by the mean costs of its stages if they are known."""
        terms = self.reserve
        if terms is None or not terms.is_asked_for(self.offer):
            return 0.0
        if costs_usd is None:
            predicted = predict(self.stages, plan, self.profile, self.offer, self.held).stages
            costs_usd = [stage.cost_usd for stage in predicted]
        return terms.usd(self.offer, plan.stages, costs_usd)

    @property
    def least_reserve_usd(self) -> float:
        """The money that a run keeps back with any plan: that of one instance at its end."""
        if self.reserve is None:
            return 0.0
        markets: tuple[Market, ...] = ("on_demand",) if self.offer.spot is None else ("on_demand", "spot")
        return min(
            self.reserve.release_usd(self.offer, StagePlan(instances=1, gpus_per_trial=1, market=market))
            for market in markets
        )

    def families(self) -> list[PlanningConstraints]:
        """Return the limits of each search that the policy makes; the best of their plans is its plan.

        `naive_elastic` searches once for every number of GPUs per trial.
        """
        if self.policy != "naive_elastic":
            return [self.constraints]
        gangs = gangs_of(self.profile, self.offer, self.constraints)
        return [replace(self.constraints, min_gpus_per_trial=gpus, max_gpus_per_trial=gpus) for gpus in gangs]

    def check(self) -> None:
        """Raise InputError unless there are stages, each with trials and iterations."""
        if not self.stages:
            raise InputError("the job has 0 stages; give it at least 1")
        for index, stage in enumerate(self.stages):
            if stage.trials < 1 or stage.iterations < 1:
                raise InputError(
                    f"stage {index} has trials={stage.trials} and iterations={stage.iterations}; "
                    "both must be at least 1"
                )


class Infeasible:
    """The answer that no plan meets the limits. The reason takes time to find, and is sought when it is looked at."""

    def __init__(self, find: Callable[[], InfeasibleError]) -> None:
        self._find = find

    @cached_property
    def error(self) -> InfeasibleError:
        """The limit out of reach, and the shortest time and the lowest cost of any plan."""
        return self._find()


def unreachable(
    problem: Problem, shortest_s: float, cheapest_usd: float, both: Callable[[], tuple[float, float]], surely: str = ""
) -> InfeasibleError:
    """Return the error for limits out of reach, with the nearest values within reach.

    `shortest_s` and `cheapest_usd` are those of all plans. `both` finds the lowest cost in time and the shortest time
    within the budget, where each limit can be kept by itself. `surely` names the confidence asked for.
    """
    box = problem.box
    in_time, in_budget = box.limits_kept(shortest_s, cheapest_usd)
    if not in_time:
        return too_late(problem, shortest_s, cheapest_usd, surely)
    if not in_budget:
        return too_expensive(problem, shortest_s, cheapest_usd, surely)
    in_time_usd, in_budget_s = both()
    cost, duration = usd_up(in_time_usd), format_duration(up_s(in_budget_s))
    return InfeasibleError(
        f"deadline {format_duration(box.time_s)} and max_cost {format_usd(box.cost_usd)} cannot both be kept{surely}: "
        f"the cheapest plan in time costs {cost}{problem.reserve_text} and the shortest plan for the money takes "
        f"{duration}",
        advice=f"raise max_cost to {cost}, or the deadline to {duration}",
        shortest_jct_s=shortest_s,
        cheapest_usd=cheapest_usd,
    )


def surely_unreachable(problem: Problem, points: Sequence[tuple[float, float]]) -> InfeasibleError:
    """Return the error of `unreachable` by the (seconds, US dollars) that each plan keeps with the confidence."""
    box = problem.box
    kept = [(box.limits_kept(*point), *point) for point in points]
    return unreachable(
        problem,
        min(jct_s for jct_s, _ in points),
        min(cost_usd for _, cost_usd in points),
        lambda: (
            min(cost_usd for (in_time, _), _, cost_usd in kept if in_time),
            min(jct_s for (_, in_budget), jct_s, _ in kept if in_budget),
        ),
        f" with confidence {problem.constraints.confidence:g}",
    )


def too_late(problem: Problem, shortest_s: float, cheapest_usd: float, surely: str = "") -> InfeasibleError:
    """Return the error for a deadline out of reach."""
    shortest = format_duration(up_s(shortest_s))
    return InfeasibleError(
        f"deadline {format_duration(problem.box.time_s)} cannot be met{surely}: the shortest plan takes {shortest}",
        advice=f"raise the deadline to {shortest}",
        shortest_jct_s=shortest_s,
        cheapest_usd=cheapest_usd,
    )


def too_expensive(problem: Problem, shortest_s: float, cheapest_usd: float, surely: str = "") -> InfeasibleError:
    """Return the error for a budget out of reach."""
    cheapest = usd_up(cheapest_usd)
    return InfeasibleError(
        f"max_cost {format_usd(problem.box.cost_usd)} cannot be kept{surely}: the cheapest plan costs {cheapest}"
        f"{problem.reserve_text}",
        advice=f"raise max_cost to {cheapest}",
        shortest_jct_s=shortest_s,
        cheapest_usd=cheapest_usd,
    )


def up_s(seconds: float) -> int:
    """Round up to whole seconds: the value that a remedy names must be enough."""
    return math.ceil(seconds - TIME_TOLERANCE_S)


def up_usd(amount_usd: float) -> float:
    """Round up to cents (below ten cents, to hundredths of a cent)."""
    decimals = 2 if amount_usd >= 0.1 else 4
    return round(math.ceil((amount_usd - COST_TOLERANCE_USD) * 10.0**decimals) / 10.0**decimals, decimals)


def usd_up(amount_usd: float) -> str:
    """Format an amount, rounded up."""
    return format_usd(up_usd(amount_usd))


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """Brackets that run one after another."""

    brackets: tuple[int, ...]
    """Their numbers."""
    stages: tuple[Stage, ...]
    """Stages of all its brackets, in order."""
    max_instances: int
    """Its share of the job's instances."""
    planned: Planned


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """A plan of a whole job: one lane if it has one bracket."""

    lanes: tuple[Lane, ...]
    prediction: Prediction
    """Prediction of the whole; its stages are those of the lanes, one lane after another."""
    odds: Odds | None
    head_usd: float = 0.0
    """Cost of the head node where several lanes share it; else the stages include it."""
    reserve_usd: float = 0.0
    """Money that a run keeps back beside the cost."""

    @classmethod
    def of_chain(cls, problem: Problem, planned: Planned) -> JobPlan:
        """Return the plan of a job of one bracket."""
        offer, stages = problem.offer, tuple(problem.stages)
        lane = Lane(brackets=(0,), stages=stages, max_instances=offer.max_instances, planned=planned)
        return cls(lanes=(lane,), prediction=planned.prediction, odds=planned.odds, reserve_usd=planned.reserve_usd)

    @property
    def plan(self) -> Plan:
        """The stages of all lanes, one lane after another."""
        return Plan(stages=tuple(choice for lane in self.lanes for choice in lane.planned.plan.stages))
