"""The deterministic model, by hand."""

from __future__ import annotations

import pytest

from rubberband.errors import InputError
from rubberband.planner.exact.model import least_instances, predict
from rubberband.values.offer import Offer, Spot
from rubberband.values.plan import Cohort, Plan, Stage, StagePlan
from rubberband.values.profile import Profile

PROFILE = Profile(seconds_per_iteration={1: 110.0, 2: 57.0, 4: 30.0, 8: 18.0}, trial_startup_s=2.0)
RATE = 0.001  # USD per instance and second


def offer(**overrides):
    values = {
        "instance_type": "p3.8xlarge",
        "gpus": 4,
        "price_usd_per_hour": 3.6,
        "max_instances": 16,
        "provision_delay_s": 15.0,
        "init_delay_s": 10.0,
        "minimum_billed_s": 60.0,
    }
    return Offer(**(values | overrides))


def job(*shape):
    """Stages and a plan from (trials, iterations, instances, gpus_per_trial) each."""
    stages = [Stage(trials=trials, iterations=iterations) for trials, iterations, _, _ in shape]
    return stages, Plan(stages=tuple(StagePlan(instances=k, gpus_per_trial=g) for _, _, k, g in shape))


def predicted(*shape, profile=PROFILE, **overrides):
    return predict(*job(*shape), profile, offer(**overrides))


def test_one_stage_waits_for_its_instances_and_bills_their_initialising():
    result = predicted((4, 1, 1, 1))
    assert result.jct_s == pytest.approx(15 + 10 + 112)
    assert result.cost_usd == pytest.approx((10 + 112) * RATE)
    (stage,) = result.stages
    assert (stage.start_s, stage.provisioning_s, stage.duration_s, stage.slots) == (0.0, 25.0, 112.0, 4)


@pytest.mark.parametrize(
    ("trials", "instances", "gpus", "num_slots", "num_waves"),
    [(8, 1, 1, 4, 2), (9, 1, 1, 4, 3), (5, 2, 2, 4, 2), (3, 2, 3, 2, 2), (3, 5, 8, 2, 2), (3, 4, 4, 4, 1)],
)
def test_trials_queue_in_waves_on_packed_gangs(trials, instances, gpus, num_slots, num_waves):
    stage = predicted((trials, 1, instances, gpus)).stages[0]
    assert stage.slots == num_slots
    assert stage.duration_s == pytest.approx(num_waves * (2 + PROFILE.iteration_s(gpus)))


def test_shrinking_is_instant():
    result = predicted((8, 1, 2, 1), (4, 1, 1, 1))
    assert result.jct_s == pytest.approx(25 + 112 + 112)
    assert result.cost_usd == pytest.approx((2 * (10 + 112) + 112) * RATE)
    assert result.stages[1].provisioning_s == 0.0


def test_growing_bills_what_is_held_meanwhile():
    result = predicted((4, 1, 1, 1), (8, 1, 2, 1))
    assert result.jct_s == pytest.approx(25 + 112 + 25 + 112)
    assert result.cost_usd == pytest.approx((10 + 112 + 25 + 112 + 10 + 112) * RATE)
    assert result.stages[1].start_s == pytest.approx(137.0)


def test_an_instance_released_early_owes_the_minimum():
    quick = Profile(seconds_per_iteration={1: 8.0}, trial_startup_s=2.0)
    result = predicted((8, 1, 2, 1), (4, 1, 1, 1), (4, 10, 1, 1), profile=quick)
    assert [stage.cost_usd for stage in result.stages] == pytest.approx(
        [2 * 60 * RATE, 0.0, (10 + 10 + 10 + 82 - 60) * RATE]
    )
    assert result.cost_usd == pytest.approx((60 + 112) * RATE)


def test_the_instances_billed_longest_are_released_first():
    quick = Profile(seconds_per_iteration={1: 68.0}, trial_startup_s=2.0)
    result = predicted((4, 1, 1, 1), (8, 1, 2, 1), (4, 1, 1, 1), profile=quick, minimum_billed_s=300.0)
    first_s, second_s = 10 + 70 + 25 + 70, 10 + 70 + 70
    assert first_s < 300
    assert second_s < 300
    assert result.cost_usd == pytest.approx(600 * RATE)
    later = predicted((4, 1, 1, 1), (8, 1, 2, 1), (4, 3, 1, 1), profile=quick, minimum_billed_s=160.0)
    assert later.cost_usd == pytest.approx((first_s + 10 + 70 + 206) * RATE)


def test_functions_are_billed_while_they_run():
    result = predicted((5, 1, 1, 2), (2, 2, 2, 8), billing="per_function")
    assert result.jct_s == pytest.approx(25 + 3 * 59 + 25 + 2 * 38)
    assert result.cost_usd == pytest.approx((5 * 59 * 2 / 4 + 2 * 38 * 8 / 4) * RATE)


def test_data_is_paid_for_each_instance_started_and_the_head_for_the_whole_time():
    shape = (8, 1, 2, 1), (4, 1, 1, 1), (8, 1, 2, 1)
    plain = predicted(*shape)
    result = predicted(*shape, data_usd_per_instance=0.5, head_price_usd_per_hour=0.36)
    assert result.cost_usd - plain.cost_usd == pytest.approx(3 * 0.5 + result.jct_s * 0.0001)
    assert [after.cost_usd - before.cost_usd for after, before in zip(result.stages, plain.stages, strict=True)] == (
        pytest.approx([1.0 + 137 * 0.0001, 112 * 0.0001, 0.5 + 137 * 0.0001])
    )


def test_the_plan_says_where_it_leaves_the_profile():
    result = predicted((1, 1, 4, 16), (1, 1, 3, 12), (1, 1, 2, 8))
    assert result.extrapolated == (12, 16)
    assert result.stages[0].duration_s == pytest.approx(20.0)


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ([(1, 1)], ["1 stage", "2"]),
        ([(1, 1), (17, 1)], ["stage 1", "17 instances", "max_instances is 16"]),
        ([(1, 0), (1, 1)], ["stage 0", "gpus_per_trial=0"]),
        ([(0, 1), (1, 1)], ["stage 0", "instances=0"]),
        ([(4, 6), (1, 1)], ["gpus_per_trial=6", "multiple of 4"]),
        ([(1, 8), (1, 1)], ["none fits", "at least 2 instances"]),
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_refused(choices, words):
    plan = Plan(stages=tuple(StagePlan(instances=k, gpus_per_trial=g) for k, g in choices))
    with pytest.raises(InputError) as caught:
        predict([Stage(trials=1, iterations=1)] * 2, plan, PROFILE, offer())
    assert all(word in str(caught.value) for word in words)


def test_fewer_gpus_than_measured_are_refused():
    with pytest.raises(InputError, match="starts at 2 GPUs"):
        predicted((1, 1, 1, 1), profile=Profile(seconds_per_iteration={2: 10.0}))


@pytest.mark.parametrize(("num_slots", "gpus", "instances"), [(1, 1, 1), (5, 1, 2), (5, 3, 5), (3, 4, 3), (3, 8, 6)])
def test_the_fewest_instances_for_a_number_of_slots(num_slots, gpus, instances):
    assert least_instances(num_slots, 4, gpus) == instances


@pytest.mark.parametrize("ages_s", [(10.0, 100.0), (100.0, 10.0)])
def test_the_longest_billed_instances_are_released_and_paid_time_is_used_up(ages_s):
    held = [Cohort(instances=1, held_s=age_s, market="on_demand") for age_s in ages_s]
    profile = Profile(seconds_per_iteration={1: 30.0})
    for iterations, cost_usd in ((1, 0.0), (2, 10 * RATE)):
        rest = predict(*job((1, iterations, 1, 1)), profile, offer(), held)
        assert rest.cost_usd == pytest.approx(cost_usd)


def test_on_spot_a_trial_takes_as_much_longer_as_its_interruptions_cost():
    spot = Spot(price_usd_per_hour=0.9, interruptions_per_hour=3.6, restart_s=45.0)
    stages, plan = job((1, 2, 1, 1))
    on_spot = Plan(stages=(StagePlan(instances=1, gpus_per_trial=1, market="spot"),))
    steady_s, lost_s = 2.0 + 2 * 110.0, 45.0 + 110.0 / 2.0
    assert predict(stages, on_spot, PROFILE, offer(spot=spot)).jct_s == pytest.approx(
        25.0 + steady_s * (1.0 + 0.001 * lost_s)
    )
    assert predict(stages, plan, PROFILE, offer(spot=spot)).jct_s == pytest.approx(25.0 + steady_s)
