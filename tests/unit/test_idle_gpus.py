"""GPUs that are idle within a stage: the report says how long and why, and they are given back or join a gang."""

from __future__ import annotations

import dataclasses

import pytest

from rubberband.executor import Faults, Job, TrialEnd, paid_time
from rubberband.planner.exact.model import predict
from rubberband.values.offer import Offer
from rubberband.values.plan import Plan, Stage, StagePlan
from rubberband.values.profile import Profile
from tests.builders.jobs import JOB
from tests.builders.virtual_runs import run_virtual

PROFILE = Profile(seconds_per_iteration={1: 100.0, 2: 55.0, 4: 30.0}, trial_startup_s=10.0)
OFFER = Offer(
    instance_type="test",
    gpus=1,
    price_usd_per_hour=3.6,
    max_instances=8,
    provision_delay_s=20.0,
    init_delay_s=30.0,
    minimum_billed_s=60.0,
)


def a_job(stages: list[tuple[int, int]], plan: list[tuple[int, int]], offer: Offer = OFFER, **changes: object) -> Job:
    """A job of stages (trials, iterations) with (instances, GPUs per trial) in each."""
    of = tuple(Stage(trials=trials, iterations=iterations) for trials, iterations in stages)
    chosen = Plan(stages=tuple(StagePlan(instances=held, gpus_per_trial=gpus) for held, gpus in plan))
    job = dataclasses.replace(
        JOB, stages=of, plan=chosen, offer=offer, profile=PROFILE, prediction=predict(of, chosen, PROFILE, offer)
    )
    return dataclasses.replace(job, **changes)


def test_idle_time_is_divided_by_its_cause() -> None:
    job = a_job([(4, 1), (3, 1)], [(2, 1), (3, 1)])
    state = run_virtual(job)[0].state
    paid = paid_time(state, state.now)
    assert paid.idle_between_gpu_s == pytest.approx(2 * 50.0)  # two wait for the third: asked for, then warmed up
    assert paid.idle_gpu_s == paid.idle_between_gpu_s
    wave = a_job([(5, 1)], [(4, 1)])
    state = run_virtual(wave)[0].state
    paid = paid_time(state, state.now)
    assert paid.idle_in_stage_gpu_s == pytest.approx(3 * 110.0)  # three of four have no trial in the second wave
    assert paid.idle_gpu_s == paid.idle_in_stage_gpu_s


def test_an_early_end_leaves_idle_time_within_the_stage() -> None:
    job = a_job([(2, 3), (2, 1)], [(2, 1), (2, 1)])
    state = run_virtual(job, Faults(ends={0: TrialEnd(iterations=1)}))[0].state
    paid = paid_time(state, state.now)
    assert paid.idle_in_stage_gpu_s == pytest.approx(200.0)  # its instance is kept for the next stage
