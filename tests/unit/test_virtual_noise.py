"""Virtual runs vary as their profile and offer say."""

from __future__ import annotations

import statistics
from dataclasses import replace

import numpy as np
import pytest

from rubberband.cloud.virtual import VirtualClock
from rubberband.executor import Job, Noise, VirtualBackend, bill_usd
from rubberband.planner.exact.model import predict
from rubberband.values.offer import Offer
from rubberband.values.plan import Plan, Stage, StagePlan
from rubberband.values.profile import Profile, Spread
from tests.builders.plans import sample
from tests.builders.virtual_runs import run_virtual

OFFER = Offer(
    instance_type="test",
    gpus=1,
    price_usd_per_hour=3.6,
    max_instances=4,
    provision_delay_s=5.0,
    init_delay_s=10.0,
    minimum_billed_s=0.0,
)
STAGES = (Stage(trials=6, iterations=3), Stage(trials=3, iterations=6), Stage(trials=1, iterations=12))
PLAN = Plan(stages=tuple(StagePlan(instances=count, gpus_per_trial=1) for count in (4, 3, 1)))
PROFILE = Profile(seconds_per_iteration={1: 10.0}, trial_startup_s=4.0)


def shuffled(seed: int):
    """Which trials survive has nothing to do with their ids, nor with their speeds."""
    merit = np.random.default_rng(seed).random(STAGES[0].trials)
    return lambda trial, iterations: float(merit[trial])


def finished(profile: Profile, offer: Offer, seed: int) -> tuple[float, float]:
    prediction = predict(STAGES, PLAN, profile, offer)
    job = Job(
        name="noise",
        stages=STAGES,
        plan=PLAN,
        prediction=prediction,
        offer=offer,
        profile=profile,
        metric="score",
        mode="max",
        replan=False,
    )
    clock = VirtualClock()
    noise = Noise(profile, offer, seed=seed, now=clock.now)
    backend = VirtualBackend(
        "noise", offer, profile, metric="score", metric_of=shuffled(seed), faults=noise, clock=clock
    )
    controller, backend, _ = run_virtual(job, backend=backend)
    state = controller.state
    return state.stages[-1].ended_at - state.started_at, bill_usd(state, state.now)


@pytest.mark.by_default(2)
@pytest.mark.parametrize(
    ("noise", "delays"),
    [
        ({"trial_cv": 0.4}, {}),
        ({"iteration_cv": 0.6}, {}),
        ({"mean_cv": 0.3}, {}),
        ({"trial_startup_s": 10.0, "startup_cv": 0.8}, {}),
        ({}, {"provision_spread": Spread(cv=0.8), "init_spread": Spread(samples=(0.5, 0.5, 2.0))}),
    ],
    ids=["trials", "iterations", "mean", "start-ups", "instances"],
)
def test_runs_are_distributed_as_the_planner_samples_them(noise, delays):
    profile, offer = replace(PROFILE, **noise), replace(OFFER, **delays)
    runs = [finished(profile, offer, seed) for seed in range(100)]
    samples = sample(STAGES, PLAN, profile, offer)
    for ours, theirs in (([jct for jct, _ in runs], samples.jct_s), ([usd for _, usd in runs], samples.cost_usd)):
        error = 4.0 * theirs.std() / len(ours) ** 0.5
        assert statistics.fmean(ours) == pytest.approx(theirs.mean(), abs=error)
        assert statistics.stdev(ours) == pytest.approx(theirs.std(), rel=0.25)


def test_the_same_seed_gives_the_same_noise_in_any_order():
    profile = replace(PROFILE, trial_cv=0.3, iteration_cv=0.3)
    first, second = (Noise(profile, OFFER, seed=1, now=lambda: 0.0) for _ in range(2))
    assert second.iteration(3, 5) == first.iteration(3, 5)
    assert [first.speed(2), first.speed(1)] == [second.speed(2), second.speed(1)]
    assert first.speed(1) != Noise(profile, OFFER, seed=2, now=lambda: 0.0).speed(1)
