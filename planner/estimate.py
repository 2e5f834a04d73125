"""An estimate: the plan for an experiment, what it takes and costs, and what the alternatives would (RubberBand §4).

It holds what `rubberband estimate` prints (as JSON: `rubberband.planner.estimate`), and prints nothing. The clock
that times the planning is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from rubberband.errors import InfeasibleError
from rubberband.planner import risk, search
from rubberband.planner.brackets import JobPlan, Lane, plan_job, plan_job_or_none, single
from rubberband.planner.solver import Objective
from rubberband.values.chance import FIXED
from rubberband.values.offer import Offer
from rubberband.values.plan import (
    Distribution,
    Odds,
    Plan,
    Planned,
    PlanningConstraints,
    Policy,
    Prediction,
    Remedy,
    Stage,
    StagePlan,
    StagePrediction,
)
from rubberband.values.profile import Profile

USER_PLAN = "user"
"""The `policy` of an estimate of a plan that the user wrote."""
BASELINES: tuple[Policy, ...] = ("static", "naive_elastic", "greedy")
_OTHERS: tuple[Policy, ...] = ("optimal", *BASELINES)
_FRONTIER_POINTS = 5
_FRONTIER_STEP = 0.75
"""Of a job with several brackets: so many deadlines, each so much shorter than the one before."""
Point = tuple[float, float]
"""(jct_s, cost_usd)"""
Batch = Literal["fixed", "goodput"]
"""A batch that stays as it is, or one that adapts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An instance type that the experiment may use, with the profile and the limits that hold on it."""

    offer: Offer
    profile: Profile
    constraints: PlanningConstraints
    fixed: Profile | None = None
    """Set where trials adapt their batch, as `profile` has it: how fast they are if it stays fixed."""

    @property
    def batch(self) -> Batch:
        """How the trials' batch is planned."""
        return "fixed" if self.fixed is None else "goodput"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """Something else that could be done: another policy, market or instance type, or a batch that does not adapt."""

    policy: str
    instance_type: str
    spot: bool
    """Whether it may buy on the spot market."""
    batch: Batch = "fixed"
    job: JobPlan | None
    """None if it meets no constraints."""
    reason: str | None = None
    """Why it does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearest:
    """What the constraints would have to allow: the shortest time and the lowest cost that any plan reaches."""

    jct_s: float
    cost_usd: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A plan with its prediction, or why there is none."""

    experiment_name: str
    policy: str
    objective: Objective = "min_cost"
    brackets: tuple[tuple[Stage, ...], ...]
    case: Case
    """Of the instance type that was chosen (or, without a plan, that comes nearest)."""
    feasible: bool
    """Whether the plan keeps the deadline and the budget; where times vary, with the confidence."""
    job: JobPlan | None
    """None if no plan meets the constraints."""
    nearest: Nearest | None
    """Set if no plan meets the constraints."""
    reason: str | None = None
    """Why no plan meets the constraints, and the remedy, in one line."""
    obstacle: str | None = None
    """Of these, why."""
    remedies: tuple[Remedy, ...] = ()
    """What would make it feasible, the best first, where it was looked for."""
    options: tuple[Option, ...] = ()
    """What else could be done."""
    frontier: tuple[Point, ...] = ()
    """(jct_s, cost_usd) of plans that no other beats on both, fastest first; the plan's own point at least."""
    static_frontier: tuple[Point, ...] = ()
    """The same for clusters of a fixed size; empty unless it was asked for."""
    planning_s: float
    """Seconds that finding the plan took; options and frontier not counted."""
    seed: int = 0

    @property
    def offer(self) -> Offer:
        """What is rented."""
        return self.case.offer

    @property
    def profile(self) -> Profile:
        """How fast the trials train on it."""
        return self.case.profile

    @property
    def constraints(self) -> PlanningConstraints:
        """What the plan must keep."""
        return self.case.constraints

    @property
    def plan(self) -> Plan | None:
        """The plan (of all lanes, one after another), None if no plan meets the constraints."""
        return None if self.job is None else self.job.plan

    @property
    def prediction(self) -> Prediction | None:
        """What the plan takes and costs."""
        return None if self.job is None else self.job.prediction

    @property
    def odds(self) -> Odds | None:
        """How likely the plan keeps its constraints; None if nothing varies or there is no plan."""
        return None if self.job is None else self.job.odds

    @property
    def fixed_batch(self) -> JobPlan | None:
        """The plan of the same policy for trials that do not adapt their batch; None if the plan's own do not either.

        None as well if such a plan meets no constraints, or was not looked for.
        """
        mine, spot = self.offer.instance_type, self.offer.spot is not None
        found = [
            option.job
            for option in self.options
            if (option.instance_type, option.spot, option.policy) == (mine, spot, self.policy)
            and option.batch != self.case.batch
        ]
        return found[0] if found else None

    @property
    def baselines(self) -> dict[str, JobPlan]:
        """Policy -> its plan on the same instances, where it has one within the constraints."""
        mine, spot = self.offer.instance_type, self.offer.spot is not None
        return {
            option.policy: option.job
            for option in self.options
            if option.job is not None
            and (option.instance_type, option.spot, option.batch) == (mine, spot, self.case.batch)
            and option.policy != self.policy
        }

    def to_json(self) -> dict[str, Any]:
        """The object that `rubberband estimate -o json` prints, schema `rubberband.estimate/1`."""

        return estimate_to_json(self)


def estimate(
    brackets: Sequence[Sequence[Stage]],
    cases: Sequence[Case],
    policy: Policy = "optimal",
    experiment_name: str = "",
    *,
    clock: Callable[[], float],
    objective: Objective = "min_cost",
    compare: bool = True,
    with_frontier: bool = False,
    seed: int = 0,
) -> Estimate:
    """Plan an experiment on the best of the instance types, and set the plan beside what else could be done.

    `clock` reads seconds. No plan at all is an answer: `feasible` is False and `nearest` set. To `compare` is to plan
    with the other policies, on demand only, and on the other types; where the optimal policy finds no plan, none of the
    others does, and they are left out. The frontier is whole `with_frontier`, else the
    plan's own point. Raises InputError if no plan can exist, whatever the constraints.
    """
    began_s = clock()
    answers = [_answer(brackets, case, policy, objective, seed) for case in cases]
    planning_s = clock() - began_s
    chosen = min(range(len(cases)), key=lambda at: _merit(answers[at], cases[at], objective))
    case, (job, error) = cases[chosen], answers[chosen]
    options = [
        _option(policy, other, answer)
        for at, (other, answer) in enumerate(zip(cases, answers, strict=True))
        if at != chosen
    ]
    if compare and (job is not None or policy != "optimal"):
        options += _compared(brackets, case, policy, objective, seed)
    elastic, static = _frontiers(brackets, case, seed) if with_frontier else (_own_point(job), [])
    return Estimate(
        experiment_name=experiment_name,
        policy=policy,
        objective=objective,
        brackets=tuple(tuple(stages) for stages in brackets),
        case=case,
        feasible=job is not None and keeps(job, case.constraints),
        job=job,
        nearest=None if error is None else Nearest(jct_s=error.shortest_jct_s, cost_usd=error.cheapest_usd),
        reason=None if error is None else str(error),
        obstacle=None if error is None else error.obstacle,
        options=tuple(options),
        frontier=tuple(elastic),
        static_frontier=tuple(static),
        planning_s=planning_s,
        seed=seed,
    )


def best_job(
    brackets: Sequence[Sequence[Stage]], cases: Sequence[Case], policy: Policy, objective: Objective, *, seed: int = 0
) -> tuple[Case, JobPlan] | None:
    """The plan of `estimate` and its case, without saying why there is none: for searches that try many."""
    found = [
        (case, plan_job_or_none(brackets, case.profile, case.offer, case.constraints, policy, objective, seed=seed))
        for case in cases
    ]
    kept = [(case, job) for case, job in found if job is not None and keeps(job, case.constraints)]
    return min(kept, key=lambda pair: _merit((pair[1], None), pair[0], objective), default=None)


def estimate_plan(
    stages: Sequence[Stage],
    plan: Plan,
    case: Case,
    experiment_name: str = "",
    *,
    compare: bool = True,
    with_frontier: bool = False,
    seed: int = 0,
) -> Estimate:
    """Predict a plan that the user wrote, as it is; `feasible` says whether it keeps the constraints.

    Raises InputError if the plan does not fit the job or the offer (`predict`).
    """
    planned = risk.planned(stages, plan, case.profile, case.offer, case.constraints, seed=seed)
    job = single(stages, planned, case.offer)
    elastic, static = _frontiers([stages], case, seed) if with_frontier else (_own_point(job), [])
    return Estimate(
        experiment_name=experiment_name,
        policy=USER_PLAN,
        brackets=(tuple(stages),),
        case=case,
        feasible=keeps(planned, case.constraints),
        job=job,
        nearest=None,
        options=tuple(_compared_plan(stages, plan, case, seed) if compare else ()),
        frontier=tuple(elastic),
        static_frontier=tuple(static),
        planning_s=0.0,
        seed=seed,
    )


def frontier(
    brackets: Sequence[Sequence[Stage]], case: Case, policy: Policy = "optimal", *, seed: int = 0
) -> list[Point]:
    """(jct_s, cost_usd) of plans that no other beats on both, fastest first, whatever the limits.

    Whole for one bracket (`search.frontier`). Of several brackets, the plans for a few deadlines, all times taken as
    fixed; empty where they may be on spot, which is never fixed.
    """
    limits = replace(case.constraints, deadline_s=None, max_cost_usd=None)
    if len(brackets) == 1:
        return search.frontier(brackets[0], case.profile, case.offer, limits, policy, seed=seed)
    if case.offer.spot is not None:
        return []
    profile = replace(case.profile, trial_cv=0.0, iteration_cv=0.0, startup_cv=0.0, mean_cv=0.0)
    offer = replace(case.offer, provision_spread=FIXED, init_spread=FIXED)
    points: list[Point] = []
    for deadline_s in _deadlines_s(brackets, Case(offer=offer, profile=profile, constraints=limits), policy):
        limited = Case(offer=offer, profile=profile, constraints=replace(limits, deadline_s=deadline_s))
        job, _ = _answer(brackets, limited, policy, "min_cost", seed)
        if job is None:
            break
        points.append((job.prediction.jct_s, job.prediction.cost_usd))
    return _unbeaten(points)


def _frontiers(brackets: Sequence[Sequence[Stage]], case: Case, seed: int) -> tuple[list[Point], list[Point]]:
    """The frontier of all plans, and of clusters of a fixed size (which are plans as well)."""
    elastic, static = frontier(brackets, case, seed=seed), frontier(brackets, case, "static", seed=seed)
    return (elastic if len(brackets) == 1 else _unbeaten([*elastic, *static])), static


def _unbeaten(points: Sequence[Point]) -> list[Point]:
    """The points that no other beats on both, fastest first."""
    steps: list[Point] = []
    for point in sorted(points):
        if not steps or point[1] < steps[-1][1]:
            steps.append(point)
    return steps


def _deadlines_s(brackets: Sequence[Sequence[Stage]], case: Case, policy: Policy) -> list[float | None]:
    """None and then shorter and shorter deadlines, from the shortest time of all the brackets in one chain down.

    They end well above what the longest bracket takes by itself, since finding that there is no plan is slow.
    """

    def fastest_s(stages: Sequence[Stage]) -> float:
        planned = search.plan(stages, case.profile, case.offer, case.constraints, policy, "min_time")
        return planned.prediction.jct_s

    longest_s = fastest_s([stage for stages in brackets for stage in stages])
    shortest_s = max(fastest_s(stages) for stages in brackets)
    deadlines_s = [1.01 * longest_s * _FRONTIER_STEP**at for at in range(_FRONTIER_POINTS)]
    return [None, deadlines_s[0], *(deadline_s for deadline_s in deadlines_s[1:] if deadline_s > 1.7 * shortest_s)]


Answer = tuple[JobPlan | None, InfeasibleError | None]


def _answer(brackets: Sequence[Sequence[Stage]], case: Case, policy: Policy, objective: Objective, seed: int) -> Answer:
    try:
        return plan_job(brackets, case.profile, case.offer, case.constraints, policy, objective, seed=seed), None
    except InfeasibleError as error:
        return None, error


def _merit(answer: Answer, case: Case, objective: Objective) -> tuple[float, float, float]:
    """What decides between instance types: the objective; without any plan, by how little the limits are missed."""
    job, error = answer
    if job is None:
        assert error is not None, "what has no plan has a reason"
        late = error.shortest_jct_s / (case.constraints.deadline_s or math.inf)
        dear = error.cheapest_usd / (case.constraints.max_cost_usd or math.inf)
        return 1.0 + max(0.0, late - 1.0) + max(0.0, dear - 1.0), error.shortest_jct_s, error.cheapest_usd
    cost_usd, jct_s = job.prediction.cost_usd, job.prediction.jct_s
    return (0.0, cost_usd, jct_s) if objective == "min_cost" else (0.0, jct_s, cost_usd)


def _compared(
    brackets: Sequence[Sequence[Stage]], case: Case, policy: str, objective: Objective, seed: int
) -> list[Option]:
    """The other policies on the same instances, and the same on demand only, or with a fixed batch."""
    others = [(other, case) for other in _OTHERS if other != policy]
    if case.offer.spot is not None:
        others.append(("optimal", replace(case, offer=replace(case.offer, spot=None))))
    if case.fixed is not None and policy in _OTHERS:
        others.append((policy, _as_fixed(case)))
    return [_option(other, terms, _answer(brackets, terms, other, objective, seed)) for other, terms in others]


def _compared_plan(stages: Sequence[Stage], plan: Plan, case: Case, seed: int) -> list[Option]:
    """What policies find, and the same plan with a fixed batch."""
    options = _compared([stages], case, USER_PLAN, "min_cost", seed)
    if case.fixed is not None:
        planned = risk.planned(stages, plan, case.fixed, case.offer, case.constraints, seed=seed)
        options.append(_option(USER_PLAN, _as_fixed(case), (single(stages, planned, case.offer), None)))
    return options


def _as_fixed(case: Case) -> Case:
    """The case of trials that do not adapt their batch."""
    assert case.fixed is not None, "the caller has seen one"
    return replace(case, profile=case.fixed, fixed=None)


def _option(policy: str, case: Case, answer: Answer) -> Option:
    job, error = answer
    return Option(
        policy=policy,
        instance_type=case.offer.instance_type,
        spot=case.offer.spot is not None,
        batch=case.batch,
        job=job,
        reason=None if error is None else str(error),
    )


def keeps(planned: Planned | JobPlan, constraints: PlanningConstraints) -> bool:
    """Whether a plan keeps the limits, as surely as they ask where times vary (greedy decides on few samples)."""
    if planned.odds is not None:
        return planned.odds.p_both >= constraints.confidence
    return all(search.meets(planned.prediction, constraints))


def _own_point(job: JobPlan | None) -> list[Point]:
    return [(job.prediction.jct_s, job.prediction.cost_usd)] if job else []


# An estimate as the JSON object that every front door gives: schema `rubberband.estimate/1`.


Json = dict[str, Any]
SCHEMA = "rubberband.estimate/1"


def estimate_to_json(estimate: Estimate) -> Json:
    """The object that `rubberband estimate -o json` prints.

    Where nothing varies every quantile is the mean, and a probability is 1.0 or 0.0. Costs of stages add up to the
    mean cost (with `head_usd`, where several lanes share the head node).
    """
    whole = _job(estimate, estimate.job) if estimate.job else {"plan": None, "prediction": None}
    data: Json = {
        "schema": SCHEMA,
        "feasible": estimate.feasible,
        "experiment": estimate.experiment_name,
        "policy": estimate.policy,
        "objective": estimate.objective,
        "instance_type": estimate.offer.instance_type,
        "batch": estimate.case.batch,
        "constraints": {
            "deadline_s": estimate.constraints.deadline_s,
            "max_cost_usd": estimate.constraints.max_cost_usd,
            "confidence": estimate.constraints.confidence,
        },
        **whole,
        "baselines": {policy: _job(estimate, job) for policy, job in estimate.baselines.items()},
        "options": [_option_json(estimate, option) for option in estimate.options],
        "frontier": _points(estimate.frontier),
        "static_frontier": _points(estimate.static_frontier),
        "planning_s": estimate.planning_s,
        "seed": estimate.seed,
    }
    if estimate.nearest is not None:
        data["nearest"] = asdict(estimate.nearest)
        data["remedies"] = [remedy_to_json(remedy) for remedy in estimate.remedies]
    if estimate.reason is not None:
        data["reason"] = estimate.reason
        data["obstacle"] = estimate.obstacle
    return data


def remedy_to_json(remedy: Remedy) -> Json:
    """A remedy, with what `-s` (and `set` over REST) is to be given."""
    return {**asdict(remedy), "set": [change.setting for change in remedy.changes]}


def _points(points: Sequence[Point]) -> list[Json]:
    return [{"jct_s": jct_s, "cost_usd": cost_usd} for jct_s, cost_usd in points]


def _option_json(estimate: Estimate, option: Option) -> Json:
    words: Json = {
        "policy": option.policy,
        "instance_type": option.instance_type,
        "spot": option.spot,
        "batch": option.batch,
    }
    if option.job is None:
        return {**words, "feasible": False, "reason": option.reason}
    return {**words, "feasible": True, **_job(estimate, option.job, option.instance_type)}


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
    rungs = [(bracket, rung) for bracket in lane.brackets for rung in range(len(estimate.brackets[bracket]))]
    return [
        _stage(rung, stage, choice, predicted, instance_type)
        | ({"bracket": bracket} if len(estimate.brackets) > 1 else {})
        for (bracket, rung), stage, choice, predicted in zip(
            rungs, lane.stages, lane.planned.plan.stages, lane.planned.prediction.stages, strict=True
        )
    ]


def _stage(rung: int, stage: Stage, choice: StagePlan, predicted: StagePrediction, instance_type: str) -> Json:
    return {
        "stage": rung,
        "trials": stage.trials,
        "iterations": stage.iterations,
        "instances": choice.instances,
        "gpus_per_trial": choice.gpus_per_trial,
        "slots": predicted.slots,
        "instance_type": instance_type,
        "market": choice.market,
        "start_s": predicted.start_s,
        "provisioning_s": predicted.provisioning_s,
        "duration_s": predicted.duration_s,
        "cost_usd": predicted.cost_usd,
    }


def _prediction(estimate: Estimate, job: JobPlan) -> Json:
    prediction = job.prediction
    if job.odds is None:
        in_time, in_budget = map(float, search.meets(prediction, estimate.constraints))
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
