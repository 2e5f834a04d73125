"""Gangs on instances of several types: how fast they are taken to be, in forecasts, replans and estimates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubberband.cloud import offers
from rubberband.cloud.catalogue import catalogue
from rubberband.cloud.offers import fallback_offers
from rubberband.cloud.virtual import InstanceFaults
from rubberband.executor import Controller, Event, Faults, Job, Slot, TrialReported, forecast, measured
from rubberband.executor.core.forecast import gang_factor
from rubberband.planner.exact.model import predict
from rubberband.planner.queueing import mixed_factor as mixed_factor_of_updates
from rubberband.planner.queueing import scaled
from rubberband.planning.candidates import candidates, mixture_notes, stand_in_speeds
from rubberband.spec.experiment import Experiment
from rubberband.spec.resources import Resources
from rubberband.values.asynchronous import AsyncProfile, AsyncTimes
from rubberband.values.offer import Offer
from rubberband.values.plan import Plan, Stage, StagePlan
from rubberband.values.profile import Profile, mixed_factor, relative_speed
from tests.builders.experiment_words import words
from tests.builders.virtual_runs import jct_s, run_virtual

MODEL = AsyncProfile(times=AsyncTimes(compute_s=0.3, up_s=0.05, server_s=0.1, down_s=0.05), updates_per_iteration=100.0)
OFFER = Offer(instance_type="fast", gpus=1, price_usd_per_hour=3.6, max_instances=4)
PROFILE = Profile(seconds_per_iteration={1: 40.0, 2: 20.0, 4: 10.0})
ON_SLOW = Faults(slow={"i-002": 2.0}, instance_faults={"i-002": InstanceFaults(instance_type="slow")})
"""One instance is of another type, which is half as fast."""


def a_job(*, replan: bool = False, **changes: Any) -> Job:
    stages = (Stage(trials=1, iterations=8), Stage(trials=1, iterations=20))
    plan = Plan(stages=(StagePlan(instances=4, gpus_per_trial=4),) * 2)
    job = Job(
        name="test",
        stages=stages,
        plan=plan,
        prediction=predict(stages, plan, PROFILE, OFFER),
        offer=OFFER,
        profile=PROFILE,
        metric="score",
        mode="max",
        deadline_s=2000.0,
        max_gpus_per_trial=4,
        replan=replan,
        speeds={"slow": 0.5},
    )
    return replace(job, **changes)


@given(st.lists(st.floats(0.05, 20.0), min_size=1, max_size=16))
def test_a_balanced_gang_is_never_slower_than_one_with_equal_shares(speeds: list[float]) -> None:
    balanced, equal = mixed_factor(speeds, balanced=True), mixed_factor(speeds, balanced=False)
    assert 1.0 / max(speeds) <= balanced * (1 + 1e-9)
    assert balanced <= equal * (1 + 1e-9)


def test_speeds_add_up_in_a_balanced_gang() -> None:
    assert mixed_factor([1.0, 1.0, 1.0, 0.5], balanced=True) == pytest.approx(4 / 3.5)
    assert mixed_factor([1.0, 1.0, 1.0, 0.5], balanced=False) == 2.0


def test_the_speed_of_a_type_is_that_of_its_profile_at_common_gpu_counts() -> None:
    assert relative_speed(Profile(seconds_per_iteration={1: 80.0, 2: 40.0}), PROFILE) == pytest.approx(0.5)
    assert relative_speed(Profile(seconds_per_iteration={8: 10.0}), PROFILE) == pytest.approx(0.5)


def test_workers_that_train_asynchronously_are_compared_by_the_updates_of_one_alone() -> None:
    slow = AsyncProfile(times=replace(MODEL.times, compute_s=0.8), updates_per_iteration=100.0)
    both = [Profile(seconds_per_iteration={4: 1.0}, asynchronous=model) for model in (slow, MODEL)]
    assert relative_speed(*both) == pytest.approx(0.5)


def test_a_forecast_of_asynchronous_workers_counts_with_the_servers_that_all_share() -> None:
    """One of four instances is half as fast: the servers have time for the others meanwhile."""
    profile = scaled(Profile(seconds_per_iteration={1: 50.0}, asynchronous=MODEL), [1, 2, 4])
    controller, _, _ = run_virtual(a_job(), ON_SLOW)
    state = controller.state
    four = tuple(Slot(instance=f"i-{number:03d}", gpu=0) for number in range(1, 5))
    factor = gang_factor(profile, state, four)
    assert factor == mixed_factor_of_updates(profile.asynchronous, (1.0, 0.5, 1.0, 1.0))
    assert 1.0 < factor < 4 / 3.5
    waits = state.supposed(job=replace(state.job, balances=False))
    assert gang_factor(profile, waits, four) == 2.0


def test_a_forecast_knows_the_speeds_of_the_types() -> None:
    forecasts = []

    def watch(event: Event, controller: Controller) -> None:
        if isinstance(event, TrialReported) and event.iterations in (3, 15):
            forecasts.append(forecast(controller.state, controller.state.now).jct_s)

    job = a_job(stages=(Stage(trials=1, iterations=28),))
    job = replace(job, plan=Plan(stages=job.plan.stages[:1]))
    job = replace(job, prediction=predict(job.stages, job.plan, PROFILE, OFFER))
    controller, _, _ = run_virtual(job, ON_SLOW, observers=[watch])
    assert forecasts == [pytest.approx(jct_s(controller.state))] * 2
    assert jct_s(controller.state) == pytest.approx(28 * 10.0 * 4 / 3.5)


def test_the_slower_type_is_not_taken_for_a_slow_trial() -> None:
    controller, _, _ = run_virtual(a_job(), ON_SLOW)
    assert measured(controller.state).profile == PROFILE
    ignorant, _, _ = run_virtual(a_job(speeds={}), ON_SLOW)
    assert measured(ignorant.state).profile.iteration_s(4) == pytest.approx(10.0 * 4 / 3.5, rel=0.02)


def test_a_replan_counts_with_the_mixture_and_says_what_it_assumes() -> None:
    controller, _, _ = run_virtual(a_job(replan=True), ON_SLOW)
    (decision,) = controller.state.decisions
    assert "1 of 4 instances is slow, 0.5x as fast by the profile; speeds add up in a gang" in decision.reason
    assert decision.present_jct_s == pytest.approx(28 * 10.0 * 4 / 3.5)
    assert decision.profile == PROFILE


def test_slow_types_are_given_back_first() -> None:
    plan = Plan(stages=(StagePlan(instances=4, gpus_per_trial=4), StagePlan(instances=2, gpus_per_trial=2)))
    controller, _, _ = run_virtual(a_job(plan=plan), ON_SLOW)
    assert "i-002" not in {slot.instance for slot in controller.state.trials[0].gang}


TYPES = ["g5.xlarge", "g6.xlarge", "g4dn.xlarge"]


def an_experiment(**changes: Any) -> Experiment:
    table = {
        name: {"seconds_per_iteration": {1: s, 2: s / 2}} for name, s in zip(TYPES, (40.0, 80.0, 160.0), strict=True)
    }
    resources = {"provider": "aws", "instance_types": TYPES, "max_instances": 4, "checkpoints": "s3://b/x"}
    return Experiment(**words(resources=resources, profile={"by_instance_type": table}, **changes))


def test_types_of_another_model_stand_in_where_their_speed_is_known_and_memory_suffices() -> None:
    resources = Resources(provider="aws", instance_types=TYPES, max_instances=4, checkpoints="s3://b/x")
    offer = offers.offer(resources, instance_type="g5.xlarge")
    assert fallback_offers(resources, offer) == []
    found = fallback_offers(resources, offer, speeds={"g6.xlarge": 0.5, "g4dn.xlarge": 0.25})
    assert [one.instance_type for one in found] == ["g6.xlarge"]


def test_the_type_that_is_cheapest_for_its_speed_stands_in_first() -> None:
    resources = Resources(provider="aws", instance_types=TYPES, max_instances=4, checkpoints="s3://b/x")
    table = {name: replace(row, gpu_memory_gib=24.0) for name, row in catalogue().items()}
    offer = offers.offer(resources, instance_type="g6.xlarge", table=table)
    found = fallback_offers(resources, offer, speeds={"g5.xlarge": 0.9, "g4dn.xlarge": 0.3}, table=table)
    assert [one.instance_type for one in found] == ["g5.xlarge", "g4dn.xlarge"]
    assert found[0].price_usd_per_hour > found[1].price_usd_per_hour, "an hour of the slow one costs less"


@pytest.mark.parametrize(("balance", "expected"), [("auto", 1), ("equal", 0)])
def test_an_estimate_says_what_is_assumed_of_types_that_stand_in(balance: str, expected: int) -> None:
    experiment = an_experiment(batch={"balance": {"policy": balance}})
    profiles = experiment.loaded_profiles()
    assert profiles is not None
    options = candidates(experiment, profiles, 0.0)
    assert stand_in_speeds(experiment, options[0], options) == {"g6.xlarge": 0.5}
    notes = mixture_notes(experiment, options[0], options, 2)
    assert len(notes) == expected
    if expected:
        assert notes[0] == (
            "instances: g6.xlarge is used instead of g5.xlarge where that is sold out, and is 0.5x as fast by the "
            "profile. An iteration of a gang on 2 instances, one of them g6.xlarge, takes 1.33x as long; speeds add up."
        )


@pytest.mark.parametrize(("training", "expected"), [({}, 1), ({"max_staleness": 4}, 0)])
def test_an_estimate_of_asynchronous_training_counts_with_the_updates_of_each(
    training: dict[str, Any], expected: int
) -> None:
    model = {"compute_s": 0.3, "up_s": 0.05, "server_s": 0.1, "down_s": 0.05}
    table = {
        name: {
            "seconds_per_iteration": {1: 100.0 * (0.2 + s)},
            "asynchronous": {"times": model | {"compute_s": s}, "updates_per_iteration": 100},
        }
        for name, s in zip(TYPES, (0.3, 0.8, 1.8), strict=True)
    }
    resources = {"provider": "aws", "instance_types": TYPES, "max_instances": 4, "checkpoints": "s3://b/x"}
    experiment = Experiment(
        **words(resources=resources, profile={"by_instance_type": table}, training={"mode": "async"} | training)
    )
    profiles = experiment.loaded_profiles()
    assert profiles is not None
    options = candidates(experiment, profiles, 0.0)
    notes = mixture_notes(experiment, options[0], options, 2)
    assert len(notes) == expected
    if expected:
        assert notes[0] == (
            "instances: g6.xlarge is used instead of g5.xlarge where that is sold out, and is 0.5x as fast by the "
            "profile. An iteration of a gang on 2 instances, one of them g6.xlarge, takes 1.31x as long; each worker "
            "updates at its own speed."
        )
