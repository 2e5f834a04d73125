"""A small job of three brackets in two lanes."""

from __future__ import annotations

import dataclasses

from rubberband.executor import Job, brackets_of
from rubberband.planner.exact.model import predict
from rubberband.values.plan import Plan, Prediction, Stage, StagePlan
from tests.builders.jobs import JOB

WIDE = (Stage(trials=4, iterations=1), Stage(trials=1, iterations=2))
NARROW = (Stage(trials=2, iterations=3),)
LATER = (Stage(trials=2, iterations=1),)


def divided(first: list[int], second: list[int], **changes: object) -> Job:
    """Make a job whose lane 0 runs WIDE and LATER, and lane 1 NARROW, with these instances in their stages."""
    lanes = [(*WIDE, *LATER), NARROW]
    plans = [Plan(stages=tuple(StagePlan(instances=k, gpus_per_trial=1) for k in held)) for held in (first, second)]
    offer = dataclasses.replace(JOB.offer, max_instances=8, provision_delay_s=60.0)
    found = [predict(stages, plan, JOB.profile, offer) for stages, plan in zip(lanes, plans, strict=True)]
    job = dataclasses.replace(
        JOB,
        stages=tuple(stage for stages in lanes for stage in stages),
        plan=Plan(stages=tuple(choice for plan in plans for choice in plan.stages)),
        prediction=Prediction(
            jct_s=max(one.jct_s for one in found),
            cost_usd=sum(one.cost_usd for one in found),
            stages=tuple(stage for one in found for stage in one.stages),
        ),
        offer=offer,
        replan=False,
        brackets=brackets_of([WIDE, NARROW, LATER], [(0, 2), (1,)]),
        lane_instances=(4, 4),
    )
    return dataclasses.replace(job, **changes)
