"""What counts as an attempt to launch, and what is not worth one."""

from __future__ import annotations

import math
from dataclasses import replace

from rubberband.cloud.virtual import Fate
from rubberband.executor.state import Job
from rubberband.executor.virtual import Faults
from rubberband.offer import Offer, Spot
from rubberband.plan import Market, Plan, Stage, StagePlan
from rubberband.planner.model import predict
from rubberband.profile import Profile
from tests.unit.virtual_runs import run_virtual

STAGES = (Stage(trials=4, iterations=3),)


def a_job(market: Market = "on_demand", max_cost_usd: float | None = None) -> Job:
    """Four trials on four instances, ready after 130 s, for 300 s."""
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
        stages=STAGES,
        plan=plan,
        prediction=predict(STAGES, plan, profile, replace(offer, spot=replace(offer.spot, interruptions_per_hour=0.0))),
        offer=offer,
        profile=profile,
        metric="score",
        mode="max",
        max_cost_usd=max_cost_usd,
        launch_attempts=2,
        replan=False,
        lease_s=600.0,
    )


def fates(count: int, fate: Fate) -> Faults:
    """The first `count` instances share a fate."""
    return Faults(fates={f"i-{number:03d}": fate for number in range(1, count + 1)})


def test_instances_that_are_lost_together_are_replaced_in_one_attempt() -> None:
    controller, _, finish = run_virtual(a_job(), fates(4, Fate(ends_after_s=50.0)))
    assert finish.outcome == "done"
    assert len(controller.state.instances) == 8


def test_instances_that_are_lost_again_and_again_use_up_the_attempts() -> None:
    controller, _, finish = run_virtual(a_job(), fates(30, Fate(ends_after_s=50.0)))
    assert finish.outcome == "failed"
    assert len(controller.state.instances) == 8


def test_instances_that_are_taken_away_use_up_none() -> None:
    taken = Fate(ends_after_s=50.0, preempted=True, notice_s=20.0)
    controller, _, finish = run_virtual(a_job("spot"), fates(16, taken))
    assert finish.outcome == "done"
    assert len(controller.state.instances) == 20


def test_no_instance_is_asked_for_that_could_not_be_paid_until_it_is_ready() -> None:
    ready_usd = 100.0 * 0.001
    too_little, _, finish = run_virtual(a_job(max_cost_usd=0.9 * ready_usd))
    assert (finish.outcome, finish.reason) == ("budget", "no instance to train on: max_cost leaves room for none")
    assert not too_little.state.instances
    for_two, _, _ = run_virtual(a_job(max_cost_usd=2.5 * ready_usd))
    assert len(for_two.state.instances) == 2
    enough, _, finish = run_virtual(a_job(max_cost_usd=math.ceil(a_job().prediction.cost_usd)))
    assert finish.outcome == "done"
    assert len(enough.state.instances) == 4


def test_what_was_taken_away_leaves_no_more_attempts_than_there_are() -> None:
    """However often: launches that are refused after that are not repeated for ever."""
    taken = Fate(ends_after_s=50.0, preempted=True, notice_s=20.0)
    all_fates = {f"i-{number:03d}": taken if number <= 16 else Fate(refused="sold out") for number in range(1, 400)}
    controller, _, finish = run_virtual(a_job("spot"), Faults(fates=all_fates))
    assert finish.outcome == "failed"
    assert len(controller.state.instances) <= 16 + 3 * 4
