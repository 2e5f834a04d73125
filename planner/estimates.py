"""An estimate: the plan for an experiment, with its time and cost and those of the alternatives (RubberBand §4).

It holds the figures that `rubberband estimate` prints. The clock that times the planning is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from operator import itemgetter
from typing import Any

from rubberband.errors import Remedy
from rubberband.planner import search
from rubberband.planner.exact.solver import by_objective, unbeaten
from rubberband.planner.planning import Point, frontier, method_of, plan
from rubberband.planner.problem import Batch, Infeasible, JobPlan, Lane, Problem
from rubberband.planner.search import keeps
from rubberband.values.offer import Offer
from rubberband.values.plan import Distribution, Odds, Plan, PlanningConstraints, Policy, Prediction, Stage
from rubberband.values.profile import Profile

USER_PLAN = "user"
"""The `policy` of an estimate of a plan that the user wrote."""
BASELINES: tuple[Policy, ...] = ("static", "naive_elastic", "greedy")
_OTHERS: tuple[Policy, ...] = ("optimal", *BASELINES)
_MOST_SIMULATED_TRIALS = 2000
"""Most trials for which a scheduler without a SYNC is shown beside another one."""
Json = dict[str, Any]
SCHEMA = "rubberband.estimate/1"
OtherScheduler = tuple[str, tuple[Stage, ...]]
"""Another scheduler of the same configurations, without a SYNC beside one with or the reverse, and its stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An alternative: another policy, market or instance type, or a batch that does not adapt."""

    policy: str
    instance_type: str
    spot: bool
    """Whether it may buy on the spot market."""
    batch: Batch = "fixed"
    scheduler: str = ""
    """The scheduler, where that is another one for the same configurations; empty: that of the estimate."""
    job: JobPlan | None
    """None if no plan meets the constraints."""
    reason: str | None = None
    """Why none does."""
    is_pending: bool = False
    """Whether it was left out, as it takes a simulation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearest:
    """The shortest time and the lowest cost that any plan reaches."""

    jct_s: float
    cost_usd: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A plan with its prediction, or the reason why there is none."""

    experiment_name: str
    policy: str
    """That of the problem, or `USER_PLAN`."""
    problem: Problem
    """That of the chosen instance type (or, without a plan, of the one that comes nearest)."""
    feasible: bool
    """Whether the plan keeps the deadline and the budget; where times vary, with the confidence."""
    job: JobPlan | None
    """None if no plan meets the constraints."""
    nearest: Nearest | None
    """Set if no plan meets the constraints."""
    reason: str | None = None
    """Why no plan meets the constraints, and the remedy, in one line."""
    obstacle: str | None = None
    """The reason without the remedy."""
    remedies: tuple[Remedy, ...] = ()
    """Changes that make it feasible, the best first, where they were searched for."""
    options: tuple[Option, ...] = ()
    """The alternatives."""
    frontier: tuple[Point, ...] = ()
    """(jct_s, cost_usd) of plans that no other beats on both, fastest first; at least the plan's own point."""
    static_frontier: tuple[Point, ...] = ()
    """The same for clusters of a fixed size; empty unless asked for."""
    planning_s: float
    """Seconds that finding the plan took, without options and frontier."""

    @property
    def brackets(self) -> Sequence[Sequence[Stage]]:
        """Brackets of the problem."""
        return self.problem.brackets

    @property
    def offer(self) -> Offer:
        """Offer of the problem."""
        return self.problem.offer

    @property
    def profile(self) -> Profile:
        """Profile of the problem."""
        return self.problem.profile

    @property
    def constraints(self) -> PlanningConstraints:
        """Constraints of the problem."""
        return self.problem.constraints

    @property
    def plan(self) -> Plan | None:
        """Plan of all lanes, one after another; None if no plan meets the constraints."""
        return None if self.job is None else self.job.plan

    @property
    def prediction(self) -> Prediction | None:
        """Time and cost of the plan."""
        return None if self.job is None else self.job.prediction

    @property
    def odds(self) -> Odds | None:
        """Odds of keeping the constraints; None if nothing varies or there is no plan."""
        return None if self.job is None else self.job.odds

    def rungs(self, lane: Lane) -> list[tuple[int, int]]:
        """Return the bracket, and the number within it, of each stage of a lane of the plan, or of an option's."""
        if len(self.brackets) == 1:
            return [(0, rung) for rung in range(len(lane.stages))]
        return [(bracket, rung) for bracket in lane.brackets for rung in range(len(self.brackets[bracket]))]

    @property
    def fixed_batch(self) -> JobPlan | None:
        """Plan of the same policy with a fixed batch, where the plan's own batch adapts.

        None otherwise, if no such plan meets the constraints, or if it was not searched for.
        """
        others = (o for o in self._on_these if o.policy == self.policy and o.batch != self.problem.batch)
        return next((option.job for option in others), None)

    @property
    def baselines(self) -> dict[str, JobPlan]:
        """Policy -> its plan on the same instances, where it has one within the constraints."""
        others = (o for o in self._on_these if o.policy != self.policy and o.batch == self.problem.batch)
        return {option.policy: option.job for option in others if option.job is not None}

    @property
    def _on_these(self) -> list[Option]:
        """Options of the same scheduler on the same instances and markets."""
        mine = (self.offer.instance_type, self.offer.spot is not None, "")
        return [one for one in self.options if (one.instance_type, one.spot, one.scheduler) == mine]

    def to_json(self) -> Json:
        """Return the object that `rubberband estimate -o json` prints, schema `rubberband.estimate/1`.

        Where nothing varies every quantile is the mean, and a probability is 1.0 or 0.0. Costs of stages add up to the
        mean cost (with `head_usd`, where several lanes share the head node).
        """
        whole = _job(self, self.job) if self.job else {"plan": None, "prediction": None}
        data: Json = {
            "schema": SCHEMA,
            "feasible": self.feasible,
            "experiment": self.experiment_name,
            "policy": self.policy,
            "objective": self.problem.objective,
            "instance_type": self.offer.instance_type,
            "batch": self.problem.batch,
            **({"scheduler": self.brackets[0][0].scheduler} if self.brackets[0][0].scheduler else {}),
            "constraints": {
                "deadline_s": self.constraints.deadline_s,
                "max_cost_usd": self.constraints.max_cost_usd,
                "confidence": self.constraints.confidence,
            },
            **whole,
            "baselines": {policy: _job(self, job) for policy, job in self.baselines.items()},
            "options": [_option_json(self, option) for option in self.options],
            "frontier": _points(self.frontier),
            "static_frontier": _points(self.static_frontier),
            "planning_s": self.planning_s,
            "seed": self.problem.seed,
        }
        if self.nearest is not None:
            data["nearest"] = asdict(self.nearest)
            data["remedies"] = [remedy_to_json(remedy) for remedy in self.remedies]
        if self.reason is not None:
            data |= {"reason": self.reason, "obstacle": self.obstacle}
        return data


def estimate(
    problems: Sequence[Problem],
    experiment_name: str = "",
    *,
    clock: Callable[[], float],
    compare: bool = True,
    with_frontier: bool = False,
    other_scheduler: OtherScheduler | None = None,
    simulate: bool = True,
) -> Estimate:
    """Plan an experiment on the best of its instance types, and compare the plan with the alternatives.

    `problems` are the same job, with the same policy, on each type. `clock` reads seconds. If no plan meets the
    constraints, `feasible` is False and `nearest` is set. `compare` plans with the other policies, on demand only, on
    the other types, and with the other scheduler. Where the optimal policy finds no plan, no other does, and they
    are left out. Without `simulate` an option that takes a simulation is pending. The frontier is whole
    `with_frontier`, else the plan's own point.

    Raises InputError if no plan can exist for any constraints.
    """
    began_s = clock()
    answers = [plan(problem) for problem in problems]
    planning_s = clock() - began_s
    chosen = min(range(len(problems)), key=lambda at: _rank(answers[at], problems[at]))
    problem, found = problems[chosen], answers[chosen]
    job, error = (None, found.error) if isinstance(found, Infeasible) else (found, None)
    options = [
        _option(problem.policy, other, answer)
        for at, (other, answer) in enumerate(zip(problems, answers, strict=True))
        if at != chosen
    ]
    if compare and (job is not None or problem.policy != "optimal"):
        options += _compared(problem, problem.policy)
        options += _under(other_scheduler, problem, simulate=simulate)
    elastic, static = _frontiers(problem) if with_frontier else (_own_point(job), [])
    return Estimate(
        experiment_name=experiment_name,
        policy=problem.policy,
        problem=problem,
        feasible=job is not None and keeps(job, problem.constraints),
        job=job,
        nearest=None if error is None else Nearest(jct_s=error.shortest_jct_s, cost_usd=error.cheapest_usd),
        reason=None if error is None else str(error),
        obstacle=None if error is None else error.obstacle,
        options=tuple(options),
        frontier=tuple(elastic),
        static_frontier=tuple(static),
        planning_s=planning_s,
    )


def estimate_plan(
    problem: Problem, chosen: Plan, experiment_name: str = "", *, compare: bool = True, with_frontier: bool = False
) -> Estimate:
    """Predict a plan that the user wrote; `feasible` says whether it keeps the constraints.

    Raises InputError if the plan does not fit the job or the offer (`predict`).
    """
    found = method_of(problem.stages).planned(problem, chosen)
    job = JobPlan.of_chain(problem, found)
    elastic, static = _frontiers(problem) if with_frontier else (_own_point(job), [])
    return Estimate(
        experiment_name=experiment_name,
        policy=USER_PLAN,
        problem=problem,
        feasible=keeps(found, problem.constraints),
        job=job,
        nearest=None,
        options=tuple(_compared_plan(problem, chosen) if compare else ()),
        frontier=tuple(elastic),
        static_frontier=tuple(static),
        planning_s=0.0,
    )


def _frontiers(problem: Problem) -> tuple[list[Point], list[Point]]:
    """Return the frontier of all plans, and that of clusters of a fixed size (which are plans as well)."""
    elastic = frontier(replace(problem, policy="optimal"))
    if not problem.has_sync:
        return elastic, []
    static = frontier(replace(problem, policy="static"))
    return (elastic if len(problem.brackets) == 1 else unbeaten([*elastic, *static])), static


Answer = JobPlan | Infeasible


def first_kept(problems: Sequence[Problem]) -> tuple[int, JobPlan] | None:
    """Return the plan of `estimate` and the number of its problem; None, at once, if no plan keeps its limits."""
    found = [(at, problem, plan(problem)) for at, problem in enumerate(problems)]
    kept = [
        (_rank(job, problem), at, job)
        for at, problem, job in found
        if isinstance(job, JobPlan) and keeps(job, problem.constraints)
    ]
    return min(kept, key=itemgetter(0))[1:] if kept else None


def _rank(answer: Answer, problem: Problem) -> tuple[float, float, float]:
    """Return the rank of an instance type, the lowest best: the objective; without a plan, how far it is off limits."""
    if isinstance(answer, Infeasible):
        error, limits = answer.error, problem.constraints
        late = error.shortest_jct_s / (limits.deadline_s or math.inf)
        dear = error.cheapest_usd / (limits.max_cost_usd or math.inf)
        return 1.0 + max(0.0, late - 1.0) + max(0.0, dear - 1.0), error.shortest_jct_s, error.cheapest_usd
    return 0.0, *by_objective(problem.objective, answer.prediction.jct_s, answer.prediction.cost_usd)


def _compared(problem: Problem, policy: str) -> list[Option]:
    """Return the other policies on the same instances, and the same on demand only, or with a fixed batch.

    All policies hold the same instances through a job that has no SYNC.
    """
    others = [replace(problem, policy=other) for other in _OTHERS if other != policy and problem.has_sync]
    if problem.offer.spot is not None:
        others.append(replace(problem, policy="optimal", offer=replace(problem.offer, spot=None)))
    if problem.fixed is not None and policy in _OTHERS:
        others.append(problem.with_fixed_batch())
    return [_option(other.policy, other, plan(other)) for other in others]


def _under(other: OtherScheduler | None, problem: Problem, *, simulate: bool) -> list[Option]:
    """Return the best plan under another scheduler; none where simulating that takes long."""
    if other is None:
        return []
    scheduler, stages = other
    is_simulated = not stages[0].has_sync
    if is_simulated and stages[0].trials > _MOST_SIMULATED_TRIALS:
        return []
    if is_simulated and not simulate:
        return [replace(_option("optimal", problem, None), scheduler=scheduler, is_pending=True)]
    found = plan(replace(problem, brackets=(stages,), policy="optimal", quick=True))
    return [replace(_option("optimal", problem, found), scheduler=scheduler)]


def _compared_plan(problem: Problem, chosen: Plan) -> list[Option]:
    """Return the plans of the policies, and the same plan with a fixed batch."""
    options = _compared(problem, USER_PLAN)
    if problem.fixed is not None:
        fixed = problem.with_fixed_batch()
        planned = method_of(fixed.stages).planned(fixed, chosen)
        options.append(_option(USER_PLAN, fixed, JobPlan.of_chain(fixed, planned)))
    return options


def _option(policy: str, problem: Problem, answer: Answer | None) -> Option:
    return Option(
        policy=policy,
        instance_type=problem.offer.instance_type,
        spot=problem.offer.spot is not None,
        batch=problem.batch,
        job=answer if isinstance(answer, JobPlan) else None,
        reason=str(answer.error) if isinstance(answer, Infeasible) else None,
    )


def _own_point(job: JobPlan | None) -> list[Point]:
    return [(job.prediction.jct_s, job.prediction.cost_usd)] if job else []


def remedy_to_json(remedy: Remedy) -> Json:
    """Return a remedy, with its settings for `-s` (and `set` over REST)."""
    return {**asdict(remedy), "set": [change.setting for change in remedy.changes]}


def _points(points: Sequence[Point]) -> list[Json]:
    return [{"jct_s": jct_s, "cost_usd": cost_usd} for jct_s, cost_usd in points]


def _option_json(estimate: Estimate, option: Option) -> Json:
    data: Json = {
        "policy": option.policy,
        "instance_type": option.instance_type,
        "spot": option.spot,
        "batch": option.batch,
    }
    if option.scheduler:
        data["scheduler"] = option.scheduler
    if option.is_pending:
        return {**data, "pending": True}
    if option.job is None:
        return {**data, "feasible": False, "reason": option.reason}
    return {**data, "feasible": True, **_job(estimate, option.job, option.instance_type)}


def _job(estimate: Estimate, job: JobPlan, instance_type: str = "") -> Json:
    name = instance_type or estimate.offer.instance_type
    lanes = [_lane(estimate, lane, name) for lane in job.lanes]
    data: Json = {
        "plan": {"stages": [stage for stages in lanes for stage in stages]},
        "prediction": _prediction(estimate, job),
    }
    if len(estimate.brackets) > 1:
        data["brackets"] = [
            {
                "bracket": bracket,
                "lane": at,
                "max_instances": lane.max_instances,
                "stages": [stage for stage in lanes[at] if stage["bracket"] == bracket],
            }
            for at, lane in enumerate(job.lanes)
            for bracket in lane.brackets
        ]
        data["head_usd"] = job.head_usd
    return data


def _lane(estimate: Estimate, lane: Lane, instance_type: str) -> list[Json]:
    several, rungs = len(estimate.brackets) > 1, estimate.rungs(lane)
    shared, place = estimate.offer.trials_per_gpu, estimate.offer.place
    return [
        {
            "stage": rung,
            "trials": stage.trials,
            "iterations": stage.iterations,
            "instances": choice.instances,
            "gpus_per_trial": choice.gpus_per_trial,
            **({"trials_per_gpu": shared} if shared > 1 else {}),
            **({"place": place} if place != "GPU" else {}),
            "slots": predicted.slots,
            "instance_type": instance_type,
            "market": choice.market,
            "start_s": predicted.start_s,
            "provisioning_s": predicted.provisioning_s,
            "duration_s": predicted.duration_s,
            "cost_usd": predicted.cost_usd,
            **({"bracket": bracket} if several else {}),
        }
        for (bracket, rung), stage, choice, predicted in zip(
            rungs, lane.stages, lane.planned.plan.stages, lane.planned.prediction.stages, strict=True
        )
    ]


def _prediction(estimate: Estimate, job: JobPlan) -> Json:
    prediction = job.prediction
    if job.odds is None:
        in_time, in_budget = map(float, search.meets(prediction, estimate.constraints, reserve_usd=job.reserve_usd))
        both = min(in_time, in_budget)
    else:
        in_time, in_budget, both = job.odds.p_deadline, job.odds.p_budget, job.odds.p_both
    return {
        "jct_s": (prediction.jct or Distribution.point(prediction.jct_s)).to_json(),
        "cost_usd": (prediction.cost or Distribution.point(prediction.cost_usd)).to_json(),
        "p_deadline": in_time,
        "p_budget": in_budget,
        "p_both": both,
        "num_samples": prediction.num_samples,
    }
