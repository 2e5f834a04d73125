"""What an estimate rests on: each input changed, the plan kept."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rubberband.planner.estimates import estimate, estimate_plan
from rubberband.planner.exact.model import predict
from rubberband.planner.problem import Problem
from rubberband.planning.assumptions import assumptions
from rubberband.values.offer import Offer, Spot
from rubberband.values.plan import Plan, PlanningConstraints, Stage, StagePlan
from rubberband.values.profile import Profile, Spread

STAGES = [Stage(trials=8, iterations=20), Stage(trials=2, iterations=80)]
PROFILE = Profile(seconds_per_iteration={1: 30.0, 4: 9.0}, trial_startup_s=2.0)
OFFER = Offer(
    instance_type="p3.8xlarge", gpus=4, price_usd_per_hour=3.6, max_instances=8, provision_delay_s=20.0,
    init_delay_s=40.0, minimum_billed_s=60.0, head_price_usd_per_hour=0.36, data_usd_per_instance=0.5,
)  # fmt: skip
PLAN = Plan(stages=(StagePlan(instances=2, gpus_per_trial=1), StagePlan(instances=4, gpus_per_trial=8)))


def estimated(profile=PROFILE, offer=OFFER, plan=PLAN, **limits):
    constraints = PlanningConstraints(max_gpus_per_trial=8, **limits)
    problem = Problem(brackets=[STAGES], offer=offer, profile=profile, constraints=constraints)
    return estimate_plan(problem, plan, compare=False)


def effects(answer, bases=None):
    return {one.name: one for one in assumptions(answer, bases or {})}


def test_every_effect_is_the_difference_that_a_changed_prediction_makes():
    answer = estimated()
    found = effects(answer)
    changed = {
        "time per iteration": (replace(PROFILE, seconds_per_iteration={1: 33.0, 4: 9.9}), OFFER),
        "start-up of a trial": (replace(PROFILE, trial_startup_s=2.2), OFFER),
        "provisioning of an instance": (PROFILE, replace(OFFER, provision_delay_s=22.0)),
        "initialising of an instance": (PROFILE, replace(OFFER, init_delay_s=44.0)),
        "price of an instance": (PROFILE, replace(OFFER, price_usd_per_hour=3.96)),
        "head node": (PROFILE, replace(OFFER, head_price_usd_per_hour=0.396)),
        "data": (PROFILE, replace(OFFER, data_usd_per_instance=0.55)),
        "speed beyond measured GPU counts": (replace(PROFILE, seconds_per_iteration={1: 30.0, 4: 9.0, 8: 9.9}), OFFER),
    }
    assert set(found) == {*changed, "noise of trials"}
    for name, (profile, offer) in changed.items():
        prediction = predict(STAGES, PLAN, profile, offer)
        assert found[name].effect_usd == pytest.approx(prediction.cost_usd - answer.prediction.cost_usd), name
        assert found[name].effect_s == pytest.approx(prediction.jct_s - answer.prediction.jct_s), name


def test_effects_have_the_sign_and_the_order_of_what_they_do():
    found = assumptions(estimated(), {})
    assert [abs(one.effect_usd) for one in found] == sorted((abs(one.effect_usd) for one in found), reverse=True)
    assert all(one.effect_usd >= 0 and one.effect_s >= 0 for one in found)
    by_name = {one.name: one for one in found}
    assert by_name["price of an instance"].effect_s == 0
    assert by_name["noise of trials"].effect_s > 0
    assert by_name["noise of trials"].value == "none"


def test_the_source_of_every_input_is_reported():
    found = effects(estimated(), {"time per iteration": "measured", "start-up of a trial": "default"})
    assert found["time per iteration"].basis == "measured"
    assert found["start-up of a trial"].basis == "default"
    assert found["price of an instance"].basis == "given"
    assert found["speed beyond measured GPU counts"].basis == "extrapolated"
    narrower = Plan(stages=(PLAN.stages[0], StagePlan(instances=4, gpus_per_trial=2)))
    assert effects(estimated(plan=narrower))["speed between measured GPU counts"].basis == "interpolated"


def test_a_zero_time_is_tried_as_some_seconds():
    found = effects(estimated(offer=replace(OFFER, provision_delay_s=0.0)))["provisioning of an instance"]
    assert (found.change, found.effect_s) == ("10s instead", 20.0)


def test_a_limit_that_a_change_breaks_is_reported():
    tight = estimated(deadline_s=estimated().prediction.jct_s + 1.0)
    found = effects(tight)
    assert found["time per iteration"].p_kept == 0.0
    assert found["price of an instance"].p_kept == 1.0


def test_with_noise_the_effects_are_those_on_the_means():
    noisy = replace(PROFILE, trial_cv=0.2)
    answer = estimated(noisy, replace(OFFER, init_spread=Spread(cv=0.5)), deadline_s=1500.0)
    found = effects(answer)
    certain = effects(estimated())
    assert found["time per iteration"].effect_usd == pytest.approx(certain["time per iteration"].effect_usd, rel=0.5)
    assert found["price of an instance"].effect_s == 0.0
    assert found["noise of trials"].effect_s > 0.0
    assert 0.0 < found["time per iteration"].p_kept < found["price of an instance"].p_kept <= 1.0
    assert effects(answer) == found


def test_spot_prices_and_interruptions_count_where_the_plan_is_on_spot():
    offer = replace(OFFER, spot=Spot(price_usd_per_hour=1.2, interruptions_per_hour=0.5, restart_s=60.0))
    on_spot = Plan(stages=tuple(replace(choice, market="spot") for choice in PLAN.stages))
    found = effects(estimated(offer=offer, plan=on_spot))
    assert found["price of a spot instance"].effect_usd > 0 == found["price of an instance"].effect_usd
    assert found["spot interruptions"].effect_s > 0


def test_brackets_share_the_head_node():
    brackets = [STAGES, [Stage(trials=2, iterations=50)]]
    limits = PlanningConstraints(max_gpus_per_trial=4, deadline_s=4000.0)
    problem = Problem(brackets=brackets, offer=OFFER, profile=PROFILE, constraints=limits)
    answer = estimate([problem], clock=lambda: 0.0, compare=False)
    found = effects(answer)
    assert found["head node"].effect_usd == pytest.approx(0.1 * OFFER.head_cost_usd(answer.prediction.jct_s))
    assert found["price of an instance"].effect_usd > 0


def test_without_a_plan_there_is_nothing_to_assume():
    limits = PlanningConstraints(deadline_s=1.0)
    problem = Problem(brackets=[STAGES], offer=OFFER, profile=PROFILE, constraints=limits)
    assert assumptions(estimate([problem], clock=lambda: 0.0), {}) == ()
