"""An estimate as the JSON object that every front door gives: schema `rubberband.estimate/1`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rubberband.plan import Distribution, Remedy, Stage, StagePlan, StagePrediction
from rubberband.planner import search
from rubberband.planner.estimate import Estimate, Option, Point
from rubberband.planner.lanes import JobPlan, Lane

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
        "options": [_option(estimate, option) for option in estimate.options],
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


def _option(estimate: Estimate, option: Option) -> Json:
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
