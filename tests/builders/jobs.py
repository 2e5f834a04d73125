"""Small jobs, and events of every kind."""

from __future__ import annotations

import dataclasses

from rubberband.executor import (
    CheckpointLost,
    CheckpointRef,
    DriverResumed,
    DriverStopped,
    EndedInstance,
    Event,
    InstanceRunning,
    Job,
    LiveInstance,
    RestPlanned,
    Started,
    TrialEnded,
    TrialFailed,
    TrialReported,
)
from rubberband.executor.core.own_speeds import OwnSpeed
from rubberband.planner.exact.model import predict
from rubberband.values.offer import Offer, Spot
from rubberband.values.plan import Market, Plan, Stage, StagePlan
from rubberband.values.profile import Profile

OFFER = Offer(instance_type="test", gpus=2, price_usd_per_hour=3.6, max_instances=4)


PROFILE = Profile(seconds_per_iteration={1: 10.0, 2: 6.0})


STAGES = (Stage(trials=4, iterations=1), Stage(trials=2, iterations=2))


PLAN = Plan(stages=(StagePlan(instances=2, gpus_per_trial=1), StagePlan(instances=1, gpus_per_trial=1)))


JOB = Job(
    name="test",
    stages=STAGES,
    plan=PLAN,
    prediction=predict(STAGES, PLAN, PROFILE, OFFER),
    offer=OFFER,
    profile=PROFILE,
    metric="score",
    mode="max",
    replan=False,
)


CHECKPOINT = CheckpointRef(url="file:///tmp/x", digest="ab", size_bytes=3)


EVENTS: list[Event] = [
    Started(occurred_at=1.5),
    InstanceRunning(occurred_at=2.0, instance="i-001", running_at=1.9),
    TrialReported(
        occurred_at=3.0, trial=2, attempt=1, iterations=1, metrics={"score": 0.1 + 0.2}, checkpoint=CHECKPOINT
    ),
    TrialFailed(occurred_at=4.0, trial=1, attempt=1, kind="died", message="exit code 7", details="…\n"),
    TrialEnded(occurred_at=4.5, trial=2, attempt=1),
    CheckpointLost(occurred_at=5.0, trial=1, attempt=2, message="the checkpoint is gone"),
    DriverStopped(occurred_at=6.0, reason="the checkpoint store is away"),
    DriverResumed(
        occurred_at=9.0,
        live=(LiveInstance(instance="i-001", running_at=None),),
        ended=(EndedInstance(instance="i-002", running_at=1.0, ended_at=8.0),),
    ),
    RestPlanned(
        occurred_at=10.0,
        stage=1,
        plan=PLAN,
        predicted=JOB.prediction.stages[1:],
        profile=PROFILE,
        changed=False,
        reason="1m40s to spare",
        present_jct_s=1.0,
        present_cost_usd=2.0,
        jct_s=3.0,
        cost_usd=4.0,
        own={2: OwnSpeed(factor=1.25, error=0.1)},
    ),
]

SPOT_OFFER = dataclasses.replace(
    JOB.offer, spot=Spot(price_usd_per_hour=1.2, interruptions_per_hour=0.05), minimum_billed_s=60.0
)
"""3.6 USD an hour (a tenth of a cent a second) on demand, a third of that on spot."""
SPOT_PLAN = Plan(
    stages=(
        StagePlan(instances=2, gpus_per_trial=1, market="spot"),
        StagePlan(instances=1, gpus_per_trial=1, market="on_demand"),
    )
)
SPOT = dataclasses.replace(
    JOB, offer=SPOT_OFFER, plan=SPOT_PLAN, prediction=predict(STAGES, SPOT_PLAN, PROFILE, SPOT_OFFER)
)


def launching_job(market: Market = "on_demand", max_cost_usd: float | None = None) -> Job:
    """Four trials on four instances, ready after 130 s, for 300 s."""
    stages = (Stage(trials=4, iterations=3),)
    offer = Offer(
        instance_type="test",
        gpus=1,
        price_usd_per_hour=3.6,
        max_instances=4,
        provision_delay_s=30.0,
        init_delay_s=100.0,
        spot=Spot(price_usd_per_hour=0.9, interruptions_per_hour=1.0),
    )
    profile = Profile(seconds_per_iteration={1: 100.0})
    plan = Plan(stages=(StagePlan(instances=4, gpus_per_trial=1, market=market),))
    return Job(
        name="test",
        stages=stages,
        plan=plan,
        prediction=predict(
            stages,
            plan,
            profile,
            dataclasses.replace(offer, spot=dataclasses.replace(offer.spot, interruptions_per_hour=0.0)),
        ),
        offer=offer,
        profile=profile,
        metric="score",
        mode="max",
        max_cost_usd=max_cost_usd,
        launch_attempts=2,
        replan=False,
        lease_s=600.0,
    )
