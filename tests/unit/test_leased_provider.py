"""What a pool's broker does for rented machines: it renews their leases, hears their notices, and cuts leases first."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from rubberband.cloud.provider import INSTANCE_LABEL, ClusterProvider, Head, InstanceDescription
from rubberband.cloud.virtual import InstanceFaults, VirtualClock, VirtualProvider
from rubberband.errors import ProviderError
from rubberband.executor import fleet
from rubberband.pools import process as pool
from rubberband.pools.process import LeasedProvider
from rubberband.values.offer import Offer
from rubberband.values.plan import Market
from tests.builders.waiting import eventually

LEASE_S, READY_S = 600.0, 900.0


@dataclass
class FakeAgent:
    """An agent whose beats the test sends."""

    instance: str
    words: dict[str, Any]
    reaches: float = -math.inf
    begun: bool = False
    dismissed: bool = False
    hurried: int = 0
    answers: bool = True

    def begin(self) -> None:
        self.begun = True

    def dismiss(self) -> None:
        self.dismissed = True

    def hurry(self) -> None:
        self.hurried += 1
        if self.answers:
            self.beat()

    def beat(self) -> None:
        until = self.words["until"]()
        self.reaches = self.reaches if until is None else until


class Cluster(VirtualProvider):
    """A virtual provider with a head."""

    device, remote, is_lent, look_s = "cpu", True, False, 5.0
    is_borrowed, node_label = False, INSTANCE_LABEL

    def __init__(self, clock: VirtualClock) -> None:
        offer = Offer(instance_type="v", gpus=1, price_usd_per_hour=0.0, max_instances=8, provision_delay_s=0.0)
        super().__init__("team", clock, offer=offer, faults_of=self._faults)
        self.clock = clock.now
        self.renewed: list[float] = []

    def _faults(self, _instance: str, _market: Market) -> InstanceFaults:
        return InstanceFaults()

    def node(self, instance: str) -> str:
        return instance

    def head(self) -> Head:
        return Head(address="head:1", temp_dir=None, environment={})

    ensure_head = head

    def renew_lease(self, until: float) -> None:
        self.renewed.append(until)
        super().renew_lease(until)


def attend(below: Cluster) -> LeasedProvider:
    return LeasedProvider(cast(ClusterProvider, below), lease_s=LEASE_S, interval_s=5.0, ready_s=READY_S)


class NoConnection:
    """A connection that is there."""

    address: str | None = "head:1"

    def open(self, _head: Head) -> None:
        """At once."""

    def close(self) -> None:
        """At once."""


@dataclass
class Story:
    """A broker's cluster on a virtual clock."""

    clock: VirtualClock = field(default_factory=lambda: VirtualClock(1000.0))
    agents: dict[str, FakeAgent] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.below = Cluster(self.clock)
        self.cluster = attend(self.below)

    def agent(self, instance: str, **words: Any) -> FakeAgent:
        """Make an agent, in place of `RemoteAgent`."""
        self.agents[instance] = FakeAgent(instance, words)
        return self.agents[instance]

    def launch(self, instance: str) -> None:
        """Rent a machine, and wait until it runs and has an agent."""
        self.cluster.launch(instance)
        self.clock.advance_to(self.clock.now() + 60.0)
        self.describe()
        eventually(lambda: instance in self.agents and self.agents[instance].begun)

    def describe(self) -> dict[str, InstanceDescription]:
        """Look."""
        return {status.instance: status for status in self.cluster.describe()}


@pytest.fixture
def story(monkeypatch: pytest.MonkeyPatch) -> Story:
    found = Story()
    monkeypatch.setattr(pool, "RemoteAgent", found.agent)
    monkeypatch.setattr(pool, "Connection", NoConnection)
    found.cluster = attend(found.below)
    return found


def test_machines_that_run_have_an_agent_until_they_are_released(story: Story) -> None:
    story.cluster.renew_lease(story.clock.now() + 900.0)
    story.launch("m1")
    story.agents["m1"].beat()
    assert story.agents["m1"].reaches == story.clock.now() + LEASE_S, "less far than while it booted"
    story.cluster.release("m1")
    assert story.agents["m1"].dismissed
    story.agents.clear()
    story.describe()
    assert not story.agents


def test_a_notice_that_a_machine_hears_is_shown(story: Story) -> None:
    story.cluster.renew_lease(story.clock.now() + 900.0)
    story.launch("m1")
    assert story.describe()["m1"].interrupted_at is None
    story.agents["m1"].words["on_notice"]()
    heard_at = story.clock.now()
    story.clock.advance_to(heard_at + 10.0)
    story.agents["m1"].words["on_notice"]()
    assert story.describe()["m1"].interrupted_at == heard_at


def test_a_machine_is_silent_since_its_latest_answer_or_since_it_should_have_joined(story: Story) -> None:
    story.cluster.renew_lease(story.clock.now() + 9000.0)
    story.launch("m1")
    running_at = story.describe()["m1"].running_at
    assert running_at is not None
    assert story.describe()["m1"].silent_since == running_at + READY_S
    story.agents["m1"].words["on_answer"]()
    story.clock.advance_to((answered_at := story.clock.now()) + 100.0)
    assert story.describe()["m1"].silent_since == answered_at
    story.cluster.release("m1")
    assert story.describe()["m1"].silent_since is None


def test_no_machine_is_rented_before_the_leases_of_the_others_are_cut(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "_CUT_S", 0.3)
    story.cluster.renew_lease(story.clock.now() + 900.0)
    story.launch("m1")
    story.agents["m1"].beat()
    until = story.clock.now() + 100.0
    story.agents["m1"].answers = False
    story.cluster.renew_lease(until)
    with pytest.raises(ProviderError, match="shorter leases of m1"):
        story.cluster.launch("m2")
    story.agents["m1"].answers = True
    story.cluster.launch("m2")
    assert story.agents["m1"].reaches == until
    assert sorted(story.describe()) == ["m1", "m2"]


def test_leases_of_an_earlier_broker_count_until_they_are_cut(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "_CUT_S", 0.3)
    story.below.renew_lease(story.clock.now() + 900.0)
    story.below.launch("m1")
    story.clock.advance_to(story.clock.now() + 60.0)
    began_at = story.clock.now()
    story.cluster = attend(story.below)
    story.cluster.renew_lease(began_at + 30.0)
    story.describe()
    eventually(lambda: story.agents["m1"].begun)
    assert story.agents["m1"].reaches == began_at + LEASE_S
    story.cluster.launch("m2")
    assert story.agents["m1"].reaches == began_at + 30.0
