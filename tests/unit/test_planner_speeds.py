"""A trial's speed is its own: the same in every stage, and known once it has been seen."""

from __future__ import annotations

import numpy as np
import pytest

from rubberband.planner.noise.sampling import Draws
from rubberband.values.offer import Offer
from rubberband.values.plan import Plan, Speeds, Stage, StagePlan
from rubberband.values.profile import Profile
from tests.builders.plans import sample

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


def test_the_total_of_a_trial_varies_more_than_if_its_stages_were_independent():
    profile = Profile(seconds_per_iteration={1: 10.0}, trial_cv=0.3)
    one = [Stage(trials=1, iterations=4), Stage(trials=1, iterations=4)]
    plan = Plan(stages=(StagePlan(instances=1, gpus_per_trial=1),) * 2)
    spread = sample(one, plan, profile, OFFER).jct_s
    assert spread.std() / spread.mean() == pytest.approx(0.3, rel=0.05)


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


def test_start_ups_vary_by_themselves():
    profile = Profile(seconds_per_iteration={1: 1e-9}, trial_startup_s=10.0, startup_cv=0.5)
    one, plan = [Stage(trials=1, iterations=1)], Plan(stages=(StagePlan(instances=1, gpus_per_trial=1),))
    jct_s = sample(one, plan, profile, OFFER).jct_s
    assert jct_s.mean() == pytest.approx(10.0, rel=0.02)
    assert jct_s.std() == pytest.approx(5.0, rel=0.05)


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
