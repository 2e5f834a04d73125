"""What counts as an attempt to launch, and what is not worth one."""

from __future__ import annotations

import math

import pytest

from rubberband.cloud.virtual import InstanceFaults
from rubberband.executor import (
    DriverResumed,
    EndedInstance,
    Faults,
    InstanceRefused,
    InstanceReleased,
    InstanceStatus,
    Started,
    bill_usd,
    instance_cost_usd,
)
from tests.builders.jobs import launching_job
from tests.builders.stories import Story
from tests.builders.virtual_runs import run_virtual


def instance_faults(count: int, faults: InstanceFaults) -> Faults:
    """The first `count` instances share their faults."""
    return Faults(instance_faults={f"i-{number:03d}": faults for number in range(1, count + 1)})


def test_instances_that_are_lost_together_are_replaced_in_one_attempt() -> None:
    controller, _, finish = run_virtual(launching_job(), instance_faults(4, InstanceFaults(ends_after_s=50.0)))
    assert finish.outcome == "done"
    assert len(controller.state.instances) == 8


def test_instances_that_are_lost_again_and_again_use_up_the_attempts() -> None:
    controller, _, finish = run_virtual(launching_job(), instance_faults(30, InstanceFaults(ends_after_s=50.0)))
    assert finish.outcome == "failed"
    assert len(controller.state.instances) == 8


def test_instances_that_are_taken_away_use_up_none() -> None:
    taken = InstanceFaults(ends_after_s=50.0, preempted=True, notice_s=20.0)
    controller, _, finish = run_virtual(launching_job("spot"), instance_faults(16, taken))
    assert finish.outcome == "done"
    assert len(controller.state.instances) == 20


def test_no_instance_is_asked_for_that_could_not_be_paid_until_it_is_ready() -> None:
    ready_usd = 100.0 * 0.001
    too_little, _, finish = run_virtual(launching_job(max_cost_usd=0.9 * ready_usd))
    assert (finish.outcome, finish.reason) == ("budget", "no instance to train on: max_cost leaves room for none")
    assert not too_little.state.instances
    for_two, _, _ = run_virtual(launching_job(max_cost_usd=2.5 * ready_usd))
    assert len(for_two.state.instances) == 2
    enough, _, finish = run_virtual(launching_job(max_cost_usd=math.ceil(launching_job().prediction.cost_usd)))
    assert finish.outcome == "done"
    assert len(enough.state.instances) == 4


def test_an_interruption_leaves_no_extra_attempts() -> None:
    """However often: launches that are refused after that are not repeated for ever."""
    taken = InstanceFaults(ends_after_s=50.0, preempted=True, notice_s=20.0)
    all_faults = {
        f"i-{number:03d}": taken if number <= 16 else InstanceFaults(refused="sold out") for number in range(1, 400)
    }
    controller, _, finish = run_virtual(launching_job("spot"), Faults(instance_faults=all_faults))
    assert finish.outcome == "failed"
    assert len(controller.state.instances) <= 16 + 3 * 4


@pytest.mark.parametrize("dies", [False, True])
def test_an_instance_that_shows_up_after_its_launch_was_given_up_is_in_the_bill(dies: bool) -> None:
    story = Story()
    story.tell(Started)
    story.tell(InstanceRefused, instance="i-001", reason="the provider does not answer")
    assert story.state.instances["i-001"].status is InstanceStatus.REFUSED
    if dies:
        seen = EndedInstance(instance="i-001", running_at=105.0, ended_at=115.0)
        story.tell(DriverResumed, live=(), ended=(seen,))
    else:
        story.tell(InstanceReleased, instance="i-001", running_at=105.0, ended_at=115.0)
    cost_usd = instance_cost_usd(story.controller.job, story.state.instances["i-001"], math.inf)
    assert cost_usd > 0.0
    assert bill_usd(story.state, 200.0) >= cost_usd
