"""An estimate: the plan for an experiment, what it takes and costs, and what the alternatives would (RubberBand §4).

It holds what `rubberband estimate` prints, and prints nothing. The clock that times the planning is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from rubberband.errors import InfeasibleError
from rubberband.offer import Offer
from rubberband.plan import Constraints, Plan, Planned, Prediction, Stage
from rubberband.planner import search
from rubberband.planner.families import Policy
from rubberband.planner.model import predict
from rubberband.planner.solver import Objective
from rubberband.profile import Profile

Json = dict[str, Any]
SCHEMA = "rubberband.estimate/1"
USER_PLAN = "user"
"""The `policy` of an estimate of a plan that the user wrote."""


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
    stages: tuple[Stage, ...]
    constraints: Constraints
    instance_type: str
    feasible: bool
    """Whether the plan keeps the deadline and the budget."""
    planned: Planned | None
    """None if no plan meets the constraints."""
    nearest: Nearest | None
    """Set if no plan meets the constraints."""
    reason: str | None = None
    """Why no plan meets the constraints, and the remedy, in one line."""
    baselines: dict[str, Planned] = field(default_factory=dict)
    """Policy -> its plan, where it has one within the constraints."""
    frontier: tuple[tuple[float, float], ...] = ()
    """(jct_s, cost_usd) of plans that no other beats on both, fastest first; the plan's own point at least."""
    planning_s: float
    """Seconds that finding the plan took, baselines and frontier not counted."""

    @property
    def plan(self) -> Plan | None:
        """The plan, None if no plan meets the constraints."""
        return None if self.planned is None else self.planned.plan

    @property
    def prediction(self) -> Prediction | None:
        """What the plan takes and costs."""
        return None if self.planned is None else self.planned.prediction

    def to_json(self) -> Json:
        """The object that `rubberband estimate -o json` prints, schema `rubberband.estimate/1`.

        With deterministic times every quantile is the mean, and a probability is 1.0 or 0.0.
        """
        whole = self._planned_json(self.planned) if self.planned else {"plan": None, "prediction": None}
        data: Json = {
            "schema": SCHEMA,
            "feasible": self.feasible,
            "experiment": self.experiment_name,
            "policy": self.policy,
            **whole,
            "baselines": {policy: self._planned_json(planned) for policy, planned in self.baselines.items()},
            "frontier": [{"jct_s": jct_s, "cost_usd": cost_usd} for jct_s, cost_usd in self.frontier],
            "planning_s": self.planning_s,
        }
        if self.nearest is not None:
            data["nearest"] = {"jct_s": self.nearest.jct_s, "cost_usd": self.nearest.cost_usd}
        return data

    def _planned_json(self, planned: Planned) -> Json:
        return {
            "plan": {"stages": [self._stage_json(planned, index) for index in range(len(self.stages))]},
            "prediction": self._prediction_json(planned.prediction),
        }

    def _stage_json(self, planned: Planned, index: int) -> Json:
        stage, choice = self.stages[index], planned.plan.stages[index]
        predicted = planned.prediction.stages[index]
        return {
            "stage": index,
            "trials": stage.trials,
            "iterations": stage.iterations,
            "instances": choice.instances,
            "gpus_per_trial": choice.gpus_per_trial,
            "slots": predicted.slots,
            "instance_type": self.instance_type,
            "market": choice.market,
            "start_s": predicted.start_s,
            "provisioning_s": predicted.provisioning_s,
            "duration_s": predicted.duration_s,
            "cost_usd": predicted.cost_usd,
        }

    def _prediction_json(self, prediction: Prediction) -> Json:
        in_time, in_budget = search.meets(prediction, self.constraints)
        return {
            "jct_s": _certain(prediction.jct_s),
            "cost_usd": _certain(prediction.cost_usd),
            "p_deadline": float(in_time),
            "p_budget": float(in_budget),
        }


def _certain(value: float) -> Json:
    """The distribution of a value that does not vary."""
    return dict.fromkeys(("mean", "p10", "p50", "p90", "p95"), value)


def estimate(
    stages: Sequence[Stage],
    profile: Profile,
    offer: Offer,
    constraints: Constraints,
    policy: Policy = "optimal",
    experiment_name: str = "",
    *,
    clock: Callable[[], float],
    objective: Objective = "min_cost",
    baselines: Sequence[Policy] = ("static",),
    with_frontier: bool = False,
) -> Estimate:
    """Plan an experiment, and set the plan beside the baselines.

    `clock` reads seconds. A baseline without a plan, or the policy itself, is left out. No plan at all is an answer:
    `feasible` is False and `nearest` set. The frontier is whole `with_frontier`, else the plan's own point.
    Raises InputError if no plan can exist, whatever the constraints."""
    began_s = clock()
    planned, nearest, reason = None, None, None
    try:
        planned = search.plan(stages, profile, offer, constraints, policy, objective)
    except InfeasibleError as error:
        nearest, reason = Nearest(jct_s=error.shortest_jct_s, cost_usd=error.cheapest_usd), str(error)
    planning_s = clock() - began_s
    return Estimate(
        experiment_name=experiment_name,
        policy=policy,
        stages=tuple(stages),
        constraints=constraints,
        instance_type=offer.instance_type,
        feasible=planned is not None,
        planned=planned,
        nearest=nearest,
        reason=reason,
        baselines=_baselines(stages, profile, offer, constraints, set(baselines) - {policy}),
        frontier=tuple(search.frontier(stages, profile, offer, constraints) if with_frontier else _own_point(planned)),
        planning_s=planning_s,
    )


def estimate_plan(
    stages: Sequence[Stage],
    plan: Plan,
    profile: Profile,
    offer: Offer,
    constraints: Constraints,
    experiment_name: str = "",
    *,
    baselines: Sequence[Policy] = (),
) -> Estimate:
    """Predict a plan that the user wrote, as it is; `feasible` says whether it keeps the constraints.

    Raises InputError if the plan does not fit the job or the offer (`predict`).
    """
    planned = Planned(plan=plan, prediction=predict(stages, plan, profile, offer))
    return Estimate(
        experiment_name=experiment_name,
        policy=USER_PLAN,
        stages=tuple(stages),
        constraints=constraints,
        instance_type=offer.instance_type,
        feasible=all(search.meets(planned.prediction, constraints)),
        planned=planned,
        nearest=None,
        baselines=_baselines(stages, profile, offer, constraints, baselines),
        frontier=tuple(_own_point(planned)),
        planning_s=0.0,
    )


def _own_point(planned: Planned | None) -> list[tuple[float, float]]:
    return [(planned.prediction.jct_s, planned.prediction.cost_usd)] if planned else []


def _baselines(
    stages: Sequence[Stage], profile: Profile, offer: Offer, constraints: Constraints, policies: Collection[Policy]
) -> dict[str, Planned]:
    found: dict[str, Planned] = {}
    for policy in sorted(policies):
        try:
            found[policy] = search.plan(stages, profile, offer, constraints, policy)
        except InfeasibleError:
            continue
    return found
