"""The virtual cloud: leases end instances, bills are EC2's, and a driver sees no more than a real one would."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest

import rubberband
from rubberband.cloud.virtual import InstanceFaults, VirtualClock, VirtualProvider
from rubberband.executor import (
    AttemptFaults,
    Event,
    Faults,
    InstanceLost,
    InstanceReady,
    InstanceRefused,
    InstanceReleased,
    InstanceRunning,
    LaunchInstance,
    ReleaseInstance,
    Result,
    VirtualBackend,
)
from rubberband.executor.virtual.fleet import Messages
from rubberband.values.offer import Offer, Spot
from rubberband.values.plan import Market
from rubberband.values.profile import Profile

OFFER = Offer(
    instance_type="test",
    gpus=2,
    price_usd_per_hour=3.6,
    max_instances=4,
    provision_delay_s=30.0,
    init_delay_s=10.0,
    data_usd_per_instance=0.5,
    head_price_usd_per_hour=0.36,
    spot=Spot(price_usd_per_hour=1.8, interruptions_per_hour=0.0),
)
PROFILE = Profile(seconds_per_iteration={1: 10.0})


def provider(**instance_faults: InstanceFaults) -> tuple[VirtualProvider, VirtualClock]:
    clock = VirtualClock()
    faults = Faults(instance_faults={name.replace("_", "-"): faults for name, faults in instance_faults.items()})
    return VirtualProvider("test", clock, offer=OFFER, lease_s=100.0, faults_of=faults.instance), clock


def test_the_bill_is_by_market_from_running_to_the_end_with_the_minimum_and_the_data() -> None:
    rented, clock = provider()
    rented.renew_lease(math.inf)
    rented.launch("a")
    rented.launch("b", "spot")
    head_usd_per_s = 0.0001
    assert rented.bill_usd(20.0) == pytest.approx(20.0 * head_usd_per_s)
    assert rented.bill_usd(40.0) == pytest.approx(60 * 0.001 + 60 * 0.0005 + 2 * 0.5 + 40 * head_usd_per_s)
    clock.advance_to(130.0)
    rented.release("a")
    assert rented.bill_usd(1030.0) == pytest.approx(100 * 0.001 + 1000 * 0.0005 + 2 * 0.5 + 1030 * head_usd_per_s)
    rented.close()
    assert rented.bill_usd(math.inf) == pytest.approx(100 * 0.001 + 100 * 0.0005 + 2 * 0.5 + 130 * head_usd_per_s)


def test_an_instance_ends_itself_at_its_first_lease_and_later_ones_put_it_off() -> None:
    rented, clock = provider()
    for name in ("a", "b"):
        rented.launch(name)
    clock.advance_to(90.0)
    rented.renew_lease(150.0)
    assert rented.ends_at("a") == 150.0
    rented.renew_lease(120.0)
    clock.advance_to(140.0)
    assert [status.state for status in rented.describe()] == ["terminated", "terminated"]
    assert rented.status("a").ended_at == 120.0
    assert rented.status("a").reason == "lease expired"


def test_the_first_lease_begins_when_the_instance_runs_and_is_as_long_as_the_latest_renewal_reached() -> None:
    rented, clock = provider(late=InstanceFaults(provision_s=1000.0))
    rented.renew_lease(70.0)
    rented.launch("late")
    assert rented.ends_at("late") == 1070.0
    clock.advance_to(1070.0)
    assert rented.status("late").running_at == 1000.0
    assert rented.status("late").state == "terminated"


def test_after_the_lease_a_returning_driver_finds_no_head() -> None:
    rented, clock = provider(late=InstanceFaults(provision_s=1000.0))
    rented.launch("late")
    clock.advance_to(200.0)
    rented.renew_lease(300.0)
    assert rented.status("late").state == "terminated"
    assert rented.status("late").reason == "the Ray head ended"


def test_an_interruption_is_announced_and_distinguished_from_a_death() -> None:
    taken = InstanceFaults(ends_after_s=50.0, preempted=True, notice_s=20.0)
    rented, clock = provider(taken=taken, dies=InstanceFaults(ends_after_s=50.0))
    for name in ("taken", "dies"):
        rented.launch(name)
    clock.advance_to(59.0)
    assert [status.interrupted_at for status in rented.describe()] == [None, None]
    clock.advance_to(61.0)
    assert rented.status("taken").interrupted_at == 60.0
    clock.advance_to(90.0)
    assert [(status.ended_at, status.preempted) for status in rented.describe()] == [(80.0, True), (80.0, False)]


@dataclass(frozen=True)
class Slow:
    """A fault model of late messages."""

    late: Mapping[str, Messages] = field(default_factory=dict)
    instance_faults: Mapping[str, InstanceFaults] = field(default_factory=dict)

    def instance(self, instance: str, market: Market) -> InstanceFaults:
        return self.instance_faults.get(instance, InstanceFaults())

    def messages(self, instance: str) -> Messages:
        return self.late.get(instance, Messages())

    def attempt(self, trial: int, attempt: int) -> AttemptFaults:
        return AttemptFaults()

    def iteration(self, trial: int, iterations: int) -> float:
        return 1.0

    def pace(self, instance: str, at: float) -> float:
        return 1.0


def backend(messages: Messages | None = None, faults: InstanceFaults | None = None) -> VirtualBackend:
    """One whose instance `a` has these messages and these faults."""
    fault_model = Slow({"a": messages or Messages()}, {"a": faults or InstanceFaults()})
    return VirtualBackend(
        "test", OFFER, PROFILE, metric="score", faults=fault_model, lease_s=100.0, ready_timeout_s=60.0
    )


def events_until(driven: VirtualBackend, instant: float) -> list[Event]:
    found: list[Event] = []
    while driven.now() < instant:
        found += driven.next_events(instant)
    return found


def test_events_come_late_and_show_when_it_was() -> None:
    driven = backend(Messages(seen_after_s=7.0))
    driven.execute(LaunchInstance(instance="a"))
    assert events_until(driven, 100.0) == [
        InstanceRunning(occurred_at=37.0, instance="a", running_at=30.0),
        InstanceReady(occurred_at=47.0, instance="a"),
    ]


@pytest.mark.parametrize("arrives", [True, False])
def test_a_launch_whose_answer_is_late_may_have_taken_effect(arrives: bool) -> None:
    driven = backend(Messages(answer_s=20.0, arrives=arrives))
    driven.execute(LaunchInstance(instance="a"))
    assert len(driven.provider.describe()) == int(arrives)
    [running] = events_until(driven, 50.5)[:1]
    assert isinstance(running, InstanceRunning)
    assert running.running_at == (30.0 if arrives else 50.0)


def test_a_launch_that_is_given_up_before_its_answer_is_answered_by_its_release() -> None:
    driven = backend(Messages(answer_s=20.0), InstanceFaults(refused="no capacity"))
    driven.execute(LaunchInstance(instance="a"))
    driven.execute(ReleaseInstance(instance="a"))
    assert events_until(driven, 100.0) == [InstanceReleased(occurred_at=20.0, instance="a", ended_at=20.0)]


def test_a_release_that_must_be_asked_for_again_is_billed_until_it_is_obeyed() -> None:
    driven = backend(Messages(release_s=30.0))
    driven.execute(LaunchInstance(instance="a"))
    events_until(driven, 50.0)
    driven.execute(ReleaseInstance(instance="a"))
    assert events_until(driven, 100.0) == [
        InstanceReleased(occurred_at=80.0, instance="a", ended_at=80.0, running_at=30.0)
    ]


def test_events_before_the_first_look_come_in_order() -> None:
    driven = backend(Messages(seen_after_s=15.0), InstanceFaults(ends_after_s=0.0, preempted=True))
    driven.execute(LaunchInstance(instance="a"))
    running, lost = events_until(driven, 100.0)
    assert running == InstanceRunning(occurred_at=45.0, instance="a", running_at=30.0, ended_at=30.0)
    assert isinstance(lost, InstanceLost)
    assert (lost.ended_at, lost.preempted) == (30.0, True)


def test_a_start_that_never_runs_is_refused_and_one_that_never_warms_is_given_up() -> None:
    stillborn = backend(faults=InstanceFaults(stillborn_after_s=12.0))
    stillborn.execute(LaunchInstance(instance="a"))
    assert events_until(stillborn, 100.0) == [
        InstanceRefused(occurred_at=12.0, instance="a", reason="it did not start", failed_start=True)
    ]
    cold = backend(faults=InstanceFaults(init_s=math.inf))
    cold.execute(LaunchInstance(instance="a"))
    lost = events_until(cold, 100.0)[-1]
    assert isinstance(lost, InstanceLost)
    assert lost.ended_at == 90.0


def test_where_the_budget_ends_instances_end_themselves_and_the_driver_is_reported() -> None:
    driven = backend()
    driven.execute(LaunchInstance(instance="a"))
    events_until(driven, 50.0)
    driven.hold_until(70.0)
    lost = events_until(driven, 200.0)[-1]
    assert isinstance(lost, InstanceLost)
    assert (lost.ended_at, lost.reason) == (70.0, "lease expired")


def test_a_driver_that_lives_renews_and_one_that_stalls_does_not() -> None:
    driven = backend()
    driven.execute(LaunchInstance(instance="a"))
    assert [type(event) for event in events_until(driven, 5000.0)] == [InstanceRunning, InstanceReady]
    driven.stall(101.0)
    lost = events_until(driven, 6000.0)[-1]
    assert isinstance(lost, InstanceLost)
    assert lost.ended_at == 5100.0
    assert lost.occurred_at == 5101.0


def test_a_new_driver_reaches_an_instance_only_once_its_own_worker_is_warm() -> None:
    driven = backend()
    driven.execute(LaunchInstance(instance="a"))
    events_until(driven, 50.0)
    resumed = driven.reconcile(["a"])
    assert [found.instance for found in resumed.live] == ["a"]
    driven.hold_until(1000.0)
    assert driven.provider.ends_at("a") == 150.0
    events_until(driven, 61.0)
    assert driven.provider.ends_at("a") > 150.0


def test_a_release_that_is_not_obeyed_yet_is_not_renewed_either() -> None:
    driven = backend(Messages(release_s=1000.0))
    driven.execute(LaunchInstance(instance="a"))
    events_until(driven, 50.0)
    driven.execute(ReleaseInstance(instance="a"))
    assert driven.provider.ends_at("a") == 150.0
    [released] = events_until(driven, 2000.0)
    assert isinstance(released, InstanceReleased)
    assert released.ended_at == 150.0


SCHEDULERS = [
    {"type": "sha", "num_samples": 9, "grace_period": 1, "max_t": 9, "reduction_factor": 3},
    {"type": "hyperband", "max_t": 9, "reduction_factor": 3},
    {"type": "asha", "num_samples": 9, "grace_period": 1, "max_t": 9, "reduction_factor": 3},
]


def ran(home: Path, scheduler: dict[str, Any], mode: str) -> Result:
    return rubberband.tune(
        name="virtual",
        home=home,
        verbose=0,
        search={"space": {"x": 1}, "scheduler": scheduler, "metric": "score", "mode": mode},
        constraints={"deadline": "2h"},
        resources={"provider": "virtual", "instance_type": "p3.2xlarge", "max_instances": 4},
        profile={"seconds_per_iteration": {1: 10}, "trial_startup": "1s"},
    )


@pytest.mark.usefixtures("trained_runs")
@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=lambda words: words["type"])
@pytest.mark.parametrize("mode", ["max", "min"])
def test_metrics_improve_in_the_direction_of_the_mode_and_the_winner_is_the_best(
    tmp_path: Path, scheduler: dict[str, Any], mode: Literal["max", "min"]
) -> None:
    result = ran(tmp_path / "one", scheduler, mode)
    sign = 1.0 if mode == "max" else -1.0
    best = {trial.trial: sign * trial.metrics["score"] for trial in result.trials}
    assert result.best is not None
    assert best[result.best.trial] == max(best.values())
    for trial in result.trials:
        scores = [sign * metrics["score"] for _, _, metrics in trial.curve]
        assert all(before < after for before, after in pairwise(scores)), f"trial {trial.trial}"
    again = ran(tmp_path / "two", scheduler, mode)
    assert [trial.metrics for trial in again.trials] == [trial.metrics for trial in result.trials]
