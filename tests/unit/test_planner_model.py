"""The model of a plan, by hand: steady times, losses, speeds and samples."""

from __future__ import annotations

import numpy as np
import pytest

from rubberband.errors import InfeasibleError, InputError
from rubberband.planner.exact.model import least_instances, predict
from rubberband.planner.exact.solver import Box
from rubberband.planner.noise.sampling import Draws
from rubberband.values.offer import Offer, Spot
from rubberband.values.plan import Cohort, Plan, PlanningConstraints, Speeds, Stage, StagePlan
from rubberband.values.profile import Law, Profile, Spread
from tests.builders.plans import plan, sample

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


@pytest.mark.parametrize(("seconds", "launch_s"), [(0.0, 25.0), (12.0, 13.0), (99.0, 0.0)])
def test_a_launch_that_has_begun_shortens_the_first_stage_only(seconds, launch_s):
    whole = predicted((4, 1, 1, 1), (8, 1, 2, 1))
    found = whole.ahead(seconds)
    assert [stage.provisioning_s for stage in found.stages] == [launch_s, 25.0]
    assert [stage.start_s for stage in found.stages] == [0.0, launch_s + 112.0]
    assert found.jct_s == pytest.approx(launch_s + 112 + 25 + 112)
    assert found.cost_usd == whole.cost_usd


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


STAGES = [Stage(trials=8, iterations=4), Stage(trials=3, iterations=8), Stage(trials=1, iterations=16)]
OFFER = Offer(instance_type="test", gpus=1, price_usd_per_hour=3.6, max_instances=8)
PLAN = Plan(stages=tuple(StagePlan(instances=stage.trials, gpus_per_trial=1) for stage in STAGES))


def draws(stages=STAGES, speeds=None, **noise):
    return Draws(stages, Profile(seconds_per_iteration={1: 10.0}, **noise), OFFER, seed=3, speeds=speeds)


def test_a_trial_has_the_same_speed_in_every_stage():
    chunk = draws(trial_cv=0.3).chunk(0)
    first, second, third = (chunk.factor(index) for index in range(3))
    assert first.shape[0] == 8
    for row in range(20):
        assert set(third[:, row]) < set(second[:, row]) < set(first[:, row])


def test_the_noise_of_iterations_is_drawn_anew_and_averages_out():
    chunk = draws(iteration_cv=0.4).chunk(0)
    spreads = [chunk.factor(index).std() for index in range(3)]
    assert spreads == pytest.approx([0.4 / np.sqrt(stage.iterations) for stage in STAGES], rel=0.1)


def test_trials_of_another_bracket_have_speeds_of_their_own():
    stages = [Stage(trials=4, iterations=1), Stage(trials=1, iterations=3), Stage(trials=3, iterations=9)]
    chunk = draws(stages, trial_cv=0.3).chunk(0)
    first, last = chunk.factor(0), chunk.factor(2)
    assert not set(first[:, 0]) & set(last[:, 0])


def test_an_error_of_the_mean_is_shared_by_all_trials_of_a_run_until_they_have_been_seen():
    stages = [Stage(trials=4, iterations=1), Stage(trials=1, iterations=3), Stage(trials=3, iterations=9)]
    chunk = draws(stages, mean_cv=0.2).chunk(0)
    factors = np.concatenate([chunk.factor(index) for index in range(3)])
    assert (factors == factors[0]).all()
    assert (factors.mean(), factors[0].std()) == pytest.approx((1.0, 0.2), rel=0.1)
    known = draws(stages, Speeds(factors=(1.0,) * 4, errors=(0.0,) * 4), mean_cv=0.2).chunk(0)
    assert (known.factor(0) == 1.0).all()


def test_speeds_that_are_known_exactly_leave_nothing_to_chance_in_the_stage_that_begins():
    rest, known = STAGES[1:], Speeds(factors=(0.5, 1.0, 3.0), errors=(0.0, 0.0, 0.0))
    plan = Plan(stages=PLAN.stages[1:])
    samples = sample(rest, plan, Profile(seconds_per_iteration={1: 10.0}), OFFER, speeds=known)
    by_survivor = {(3.0 * 80 + factor * 160) for factor in known.factors}
    assert set(np.round(samples.jct_s, 6)) == by_survivor


@pytest.mark.parametrize(("with_metric", "mean"), [(-1.0, 0.5), (0.0, 1.5), (1.0, 3.0)])
def test_survivors_are_slow_where_slow_trials_are_good(with_metric, mean):
    known = Speeds(factors=(0.5, 1.0, 3.0), errors=(0.0,) * 3, with_metric=with_metric)
    factor = draws(STAGES[1:], known).chunk(0).factor(1)
    assert factor.mean() == pytest.approx(mean, abs=1.01 if with_metric == 0.0 else 1e-9)


def test_trials_that_queued_survive_as_often_as_those_that_started_first_and_start_by_number():
    chunk = draws(trial_cv=0.3).chunk(0)
    first, second = chunk.factor(0), chunk.factor(1)
    numbers = (first[None] == second[:, None]).argmax(axis=1)
    assert (np.diff(numbers, axis=0) > 0).all()
    shares = [(numbers == trial).any(axis=0).mean() for trial in range(8)]
    assert shares == pytest.approx([3 / 8] * 8, abs=0.13)


@pytest.mark.parametrize("with_metric", [0.0, 0.5])
def test_the_same_of_very_many_trials_survive_in_each_row_at_every_sync(with_metric):
    stages = [Stage(trials=trials, iterations=1) for trials in (300, 150, 40)]
    known = Speeds(factors=(1.0,) * 300, errors=(0.3,) * 300, with_metric=with_metric)
    second, third = (draws(stages, known).chunk(0).factor(index) for index in (1, 2))
    for row in (0, 300, 900):
        assert set(third[:, row]) < set(second[:, row % second.shape[1]])


def test_both_limits_are_kept_only_where_each_of_them_is() -> None:
    jct_s, cost_usd = np.array([1.0, 2.0, 3.0, 4.0]), np.array([4.0, 1.0, 3.0, 1.0])
    found = Box(time_s=2.5, cost_usd=2.0).odds(jct_s, cost_usd)
    assert (found.p_deadline, found.p_budget, found.p_both) == (0.5, 0.5, 0.25)


@pytest.mark.parametrize("law", ["lognormal", "normal"])
def test_times_that_vary_are_on_average_those_that_were_profiled_and_the_same_each_time(law: Law) -> None:
    delays = {"init_delay_s": 50.0, "init_spread": Spread(cv=0.5), "provision_spread": Spread(cv=0.5)}
    offer = Offer(
        instance_type="test", gpus=1, price_usd_per_hour=1.0, max_instances=1, provision_delay_s=50.0, **delays
    )
    profile = Profile(seconds_per_iteration={1: 100.0}, trial_cv=0.4, law=law)
    plan = Plan(stages=(StagePlan(instances=1, gpus_per_trial=1),))
    first, again = (sample([Stage(trials=1, iterations=1)], plan, profile, offer) for _ in range(2))
    assert first.jct_s.mean() == pytest.approx(200.0, rel=0.02)
    assert first.jct_s.std() > 30.0
    assert (first.jct_s == again.jct_s).all()


def test_a_plan_that_is_hardly_faster_is_not_worth_three_times_the_money():
    spot = Spot(price_usd_per_hour=1.0, interruptions_per_hour=0.05, restart_s=30.0)
    offer = Offer(instance_type="test", gpus=1, price_usd_per_hour=3.0, max_instances=2, init_delay_s=200.0, spot=spot)
    stages = [Stage(trials=4, iterations=3), Stage(trials=2, iterations=4)]
    limits = PlanningConstraints(deadline_s=300.0)
    found = plan(stages, Profile(seconds_per_iteration={1: 2.0}), offer, limits, objective="min_time")
    assert {choice.market for choice in found.plan.stages} == {"spot"}


def test_the_fastest_plan_stays_on_the_spot_market_that_was_asked_for_where_that_keeps_the_limits() -> None:
    spot = Spot(price_usd_per_hour=1.0, interruptions_per_hour=2.0, restart_s=60.0)
    offer = Offer(instance_type="test", gpus=1, price_usd_per_hour=3.0, max_instances=2, spot=spot)
    job = ([Stage(trials=4, iterations=20)], Profile(seconds_per_iteration={1: 30.0}), offer)
    found = plan(*job, PlanningConstraints(max_cost_usd=5.0), objective="min_time")
    assert {choice.market for choice in found.plan.stages} == {"spot"}
    late = plan(*job, PlanningConstraints(deadline_s=1250.0), objective="min_time")
    assert {choice.market for choice in late.plan.stages} == {"on_demand"}
    for market in ("spot", "on_demand"):
        held = [Cohort(instances=1, held_s=60.0, market=market)]
        with pytest.raises(InfeasibleError):
            plan(*job, PlanningConstraints(deadline_s=900.0), objective="min_time", held=held)


@pytest.mark.parametrize(("gpus", "instances"), [(4, 1), (1, 4)])
def test_trials_that_share_a_spot_instance_are_interrupted_together(gpus: int, instances: int) -> None:
    """So nothing is late as often as no instance is taken, however many trials are on each."""
    spot = Spot(price_usd_per_hour=1.0, interruptions_per_hour=1.0, restart_s=60.0)
    offer = Offer(instance_type="test", gpus=gpus, price_usd_per_hour=3.0, max_instances=instances, spot=spot)
    plan = Plan(stages=(StagePlan(instances=instances, gpus_per_trial=1, market="spot"),))
    profile = Profile(seconds_per_iteration={1: 90.0})
    jct_s = sample([Stage(trials=8, iterations=4)], plan, profile, offer).jct_s
    assert (jct_s <= 720.0).mean() == pytest.approx(np.exp(-instances * 720.0 / 3600.0), abs=0.01)
