"""The fleet, with a provider that breaks in ways that no provider should. No Ray node is started."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from rubberband.cloud.provider import INSTANCE_LABEL, ClusterProvider, Head, InstanceDescription, NoRecordError
from rubberband.errors import ProviderError
from rubberband.executor import (
    Connection,
    Event,
    InstanceInterrupted,
    InstanceLost,
    InstanceRefused,
    InstanceReleased,
    InstanceRunning,
    Leases,
    Mailbox,
    RayFleet,
    Workers,
)
from rubberband.executor.ray.fleet import described
from rubberband.executor.ray.workers import WorkersError
from rubberband.values.plan import Market
from tests.builders.waiting import eventually


class Breaking:
    """Rents one instance; what it is told to break raises an error that is no ProviderError."""

    def __init__(self) -> None:
        self.broken: set[str] = set()
        self.asked: list[str] = []
        self.leases: list[float] = []
        self.markets: list[Market] = []
        self.status = InstanceDescription(instance="a", experiment="test", state="pending", requested_at=1.0)

    def _called(self, what: str) -> None:
        self.asked.append(what)
        if what in self.broken:
            raise OSError(28, "No space left on device")

    look_s = 0.05
    remote = False
    is_lent = False
    is_borrowed = False
    node_label = INSTANCE_LABEL

    def launch(self, instance: str, market: Market = "on_demand", *, first_lease_s: float | None = None) -> None:
        """Rent it."""
        self._called("launch")
        self.markets.append(market)

    away = False
    on_sick: Callable[[str, str], None]

    def describe(self) -> Sequence[InstanceDescription]:
        """The instance."""
        self._called("describe")
        if self.away:
            raise ProviderError("away")
        return [self.status]

    def release(self, instance: str, *, fault: str = "") -> InstanceDescription:
        """Give it back."""
        self._called("release")
        return InstanceDescription(
            instance="a", experiment="test", state="terminated", requested_at=1.0, running_at=2.0, ended_at=3.0
        )

    def last_words(self, instance: str) -> str:
        """What its log says."""
        return ""

    def node(self, instance: str) -> str:
        return instance

    def slowness(self, instance: str) -> float:
        """As usual."""
        return 1.0

    def renew_lease(self, until: float) -> None:
        """The driver lives."""
        self._called("renew_lease")
        self.leases.append(until)

    def head(self) -> Head | None:
        """None."""
        self._called("head")
        return None

    def close(self) -> None:
        """Nothing is held."""


class NoWorkers:
    """Nobody to dismiss."""

    def __init__(self, provider: Breaking, on_sick: Callable[[str, str], None]) -> None:
        provider.on_sick = on_sick

    def dismiss(self) -> None:
        """Nothing."""


@pytest.fixture
def provider() -> Breaking:
    return Breaking()


@pytest.fixture
def mailbox() -> Mailbox:
    return Mailbox(lambda: 10.0)


@pytest.fixture
def leases(provider: Breaking) -> Leases:
    return Leases(provider, lease_s=30.0, interval_s=0.02, clock=lambda: 10.0)


@pytest.fixture
def fleet(provider: Breaking, mailbox: Mailbox, leases: Leases, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayFleet]:
    monkeypatch.setattr("rubberband.executor.ray.fleet._RETRY_S", 0.02)
    opened = RayFleet(
        cast(ClusterProvider, provider),
        lambda _, on_sick: cast(Workers, NoWorkers(provider, on_sick)),
        mailbox,
        leases=leases,
        on_gone=lambda _: None,
    )
    yield opened
    opened.close()


def test_a_release_that_breaks_is_reported_once_and_asked_for_until_it_works(
    fleet: RayFleet, provider: Breaking, mailbox: Mailbox, caplog: pytest.LogCaptureFixture
) -> None:
    provider.broken = {"release", "describe"}
    fleet.launch("a")
    eventually(lambda: "launch" in provider.asked)
    with caplog.at_level(logging.WARNING):
        fleet.release("a")
        eventually(lambda: provider.asked.count("release") >= 5)
        assert mailbox.take(10.0) == []
        provider.broken = set()
        events: list[Event] = []
        eventually(lambda: bool(events.extend(mailbox.take(10.0)) or events))
    assert events == [InstanceReleased(occurred_at=10.0, instance="a", ended_at=3.0, running_at=2.0)]
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["instance a is not released yet; retrying: OSError: [Errno 28] No space left on device"]


def test_parts_of_one_machine_that_are_given_up_have_one_fault(
    fleet: RayFleet, provider: Breaking, mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provider, "node", {"a": "m1", "b": "m1", "c": "m2", "d": "m1"}.get)
    for name in "abc":
        fleet.launch(name)
    for name in "abcd":
        if name == "d":  # it was held later: the machine is lent on, and fails again
            fleet.launch(name)
        provider.on_sick(name, "its workers did not start")
    lost = [event for event in mailbox.take(10.0) if isinstance(event, InstanceLost)]
    assert [(event.instance, event.same_fault) for event in lost] == [
        ("a", False),
        ("b", True),
        ("c", False),
        ("d", False),
    ]


def test_a_release_of_which_the_provider_has_no_record_is_left_to_the_lease_and_said(
    fleet: RayFleet, provider: Breaking, mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def unknown(instance: str, *, fault: str = "") -> InstanceDescription:
        provider.asked.append("release")
        raise NoRecordError("line 7 is damaged")

    monkeypatch.setattr(provider, "release", unknown)
    fleet.launch("a")
    eventually(lambda: "launch" in provider.asked)
    fleet.release("a")
    events: list[Event] = []
    eventually(lambda: bool(events.extend(mailbox.take(10.0)) or events))
    assert [type(event) for event in events] == [InstanceReleased]
    assert provider.asked.count("release") == 1
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["instance a cannot be given back, and ends with its lease: line 7 is damaged"]


@pytest.mark.parametrize("runs", [True, False])
def test_a_launch_whose_answer_is_lost_is_released_and_never_refused_once_it_ran(
    fleet: RayFleet, provider: Breaking, mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch, runs: bool
) -> None:
    provider.broken = {"launch", "release"}
    if runs:
        provider.status = replace(provider.status, state="running", running_at=2.0)
    else:
        ended = replace(provider.status, state="terminated", ended_at=3.0)
        monkeypatch.setattr(provider, "release", lambda instance, **_: (provider._called("release"), ended)[1])
    fleet.launch("a")
    eventually(lambda: provider.asked.count("release") >= 3)
    assert mailbox.take(10.0) == [], "whether it was rented is not known yet"
    provider.broken = set()
    events: list[Event] = []
    eventually(lambda: len(events.extend(mailbox.take(10.0)) or events) >= 1 + runs)
    reason, lines = "OSError: [Errno 28] No space left on device", {"occurred_at": 10.0, "instance": "a"}
    if runs:
        assert events == [
            InstanceRunning(running_at=2.0, ended_at=3.0, **lines),
            InstanceLost(ended_at=3.0, reason=reason, **lines),
        ]
    else:
        assert events == [InstanceRefused(reason=reason, **lines)]


@pytest.mark.parametrize("ended_at", [None, 3.0])
def test_an_instance_that_shows_up_after_its_launch_was_given_up_is_given_back_and_paid_for(
    fleet: RayFleet, provider: Breaking, mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch, ended_at: float | None
) -> None:
    def unknown(instance: str, *, fault: str = "") -> InstanceDescription:
        raise NoRecordError("no such instance")

    with monkeypatch.context() as patch:
        patch.setattr(provider, "release", unknown)
        provider.broken = {"launch"}
        fleet.launch("a")
        events: list[Event] = []
        eventually(lambda: bool(events.extend(mailbox.take(10.0)) or events))
        assert [type(event) for event in events] == [InstanceRefused]
    provider.broken = set()
    fleet.launch("b")
    shown = _shown(
        provider, mailbox, 1, state="terminated" if ended_at else "running", running_at=2.0, ended_at=ended_at
    )
    assert InstanceReleased(occurred_at=10.0, instance="a", ended_at=3.0, running_at=2.0) in shown


def test_a_lease_that_may_have_been_renewed_is_cut(provider: Breaking, leases: Leases) -> None:
    provider.broken = {"renew_lease"}
    leases.renew()
    assert leases.hold_until(20.0), "the provider may have been told 40"


def test_the_lease_is_renewed_and_the_provider_watched_after_they_broke(fleet: RayFleet, provider: Breaking) -> None:
    provider.broken = {"renew_lease", "describe", "head"}
    fleet.launch("a")
    eventually(lambda: provider.asked.count("renew_lease") >= 3 and provider.asked.count("describe") >= 2)
    provider.broken = set()
    provider.asked.clear()
    eventually(lambda: "renew_lease" in provider.asked and "head" in provider.asked)
    assert "release" not in provider.asked, "what cannot be watched for a while is kept"


def _shown(provider: Breaking, mailbox: Mailbox, count: int, **values: Any) -> list[Event]:
    provider.status = replace(provider.status, **values)
    events: list[Event] = []
    eventually(lambda: len(events.extend(mailbox.take(10.0)) or events) >= count)
    return events


def test_purchases_and_notices_are_reported_once(
    fleet: RayFleet, provider: Breaking, mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RayFleet, "_assemble", lambda *_: None)
    fleet.launch("a", "spot")
    bought = {"price_usd_per_hour": 0.4, "instance_type": "g5.xlarge", "zone": "us-east-1b"}
    (running,) = _shown(provider, mailbox, 1, state="running", running_at=5.0, **bought)
    assert running == InstanceRunning(occurred_at=10.0, instance="a", running_at=5.0, **bought)  # type: ignore[arg-type]
    (notice,) = _shown(provider, mailbox, 1, interrupted_at=6.0)
    assert notice == InstanceInterrupted(occurred_at=10.0, instance="a", free_if_taken=True)
    (lost,) = _shown(provider, mailbox, 1, state="terminated", ended_at=7.0, reason="taken away", preempted=True)
    assert lost == InstanceLost(occurred_at=10.0, instance="a", ended_at=7.0, reason="taken away", preempted=True)
    assert provider.markets == ["spot"]


def test_a_lease_never_reaches_beyond_what_is_held(leases: Leases, provider: Breaking) -> None:
    assert leases.until is None
    leases.hold_until(math.inf)
    eventually(lambda: provider.leases[-1:] == [40.0])
    leases.hold_until(25.0)
    eventually(lambda: provider.leases[-1] == 25.0)
    leases.hold_until(math.inf)
    eventually(lambda: provider.leases[-1] == 40.0)
    leases.close()


class StubAgent:
    """Of an instance that was told that it may live until 40, and answers when a test lets it."""

    def __init__(self, instance: str, **_: object) -> None:
        self.instance = instance
        self.reaches = 40.0
        self.hurried = False

    def hurry(self) -> None:
        """Somebody waits."""
        self.hurried = True

    def collect(self) -> None:
        """Nothing."""

    def dismiss(self) -> None:
        """Nothing."""


@pytest.fixture
def posted(provider: Breaking, monkeypatch: pytest.MonkeyPatch) -> list[StubAgent]:
    """The agents of remote instances."""
    made: list[StubAgent] = []
    agent = "rubberband.executor.ray.fleet.RemoteAgent"
    monkeypatch.setattr(agent, lambda name, **_: made.append(StubAgent(name)) or made[-1])
    monkeypatch.setattr(provider, "remote", True)
    return made


def test_no_instance_is_asked_for_before_the_leases_of_the_others_are_cut(
    fleet: RayFleet, provider: Breaking, posted: list[StubAgent], mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.launch("a")
    eventually(lambda: provider.markets == ["on_demand"])
    fleet.hold_until(25.0)
    fleet.launch("b", "spot")
    eventually(lambda: posted[0].hurried)
    assert provider.markets == ["on_demand"]
    posted[0].reaches = posted[1].reaches = 25.0
    eventually(lambda: provider.markets == ["on_demand", "spot"])
    assert provider.leases[-1] == 25.0
    monkeypatch.setattr("rubberband.executor.ray.fleet._CUT_S", 0.0)
    fleet.hold_until(20.0)
    fleet.launch("c")
    events: list[Event] = []
    eventually(lambda: bool(events.extend(mailbox.take(10.0)) or events))
    (refused,) = events
    assert isinstance(refused, InstanceRefused)
    assert "the budget covers it only with shorter leases of a, b, c" in refused.reason


def test_the_lease_of_an_instance_counts_until_it_is_given_back(
    fleet: RayFleet, provider: Breaking, posted: list[StubAgent]
) -> None:
    provider.broken = {"release", "describe"}
    fleet.launch("a")
    eventually(lambda: provider.markets == ["on_demand"])
    fleet.hold_until(25.0)
    fleet.release("a")
    fleet.launch("b", "spot")
    eventually(lambda: provider.asked.count("release") >= 3 and len(posted) == 2)
    posted[1].reaches = -math.inf
    assert provider.markets == ["on_demand"]
    provider.broken = set()
    eventually(lambda: provider.markets == ["on_demand", "spot"])


def test_a_resume_asks_again_while_the_provider_does_not_answer_and_leases_of_an_earlier_driver_may_last() -> None:
    """Or it would fail, and end instances that live."""
    provider, waited = Breaking(), list[float]()
    provider.away = True

    def wait(seconds: float) -> None:
        waited.append(seconds)
        provider.away = len(waited) < 3

    assert described(cast(ClusterProvider, provider), 50.0, lambda: 10.0, wait) == [provider.status]
    assert waited == [provider.look_s] * 3
    provider.away = True
    with pytest.raises(ProviderError, match="away"):
        described(cast(ClusterProvider, provider), 50.0, lambda: 50.0, wait)


def test_the_lease_that_an_earlier_driver_gave_counts_until_this_one_has_cut_it(
    fleet: RayFleet, provider: Breaking, posted: list[StubAgent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "_assemble", lambda *_: None)
    provider.status = replace(provider.status, state="running", running_at=2.0)
    fleet.reconcile(["a"])
    fleet.hold_until(25.0)
    fleet.launch("b")
    eventually(lambda: posted[0].hurried)
    assert provider.markets == []
    posted[0].reaches, posted[1].reaches = 25.0, -math.inf
    eventually(lambda: provider.markets == ["on_demand"])


class Failing(NoWorkers):
    """Workers that never get warm."""

    def assemble(self, slowness: float = 1.0) -> None:
        """In vain."""
        raise WorkersError(f"its Ray node did not offer 2 GPUs in {slowness:.0f} s")


class Joined(Breaking):
    """An instance that runs, and a head that this is connected to."""

    device = "cpu"

    def ensure_head(self) -> Head:
        """One."""
        return Head(address="", temp_dir=None, environment={})

    def last_words(self, instance: str) -> str:
        """What its log says."""
        return "its boot script is at `setup: sleep 1000`"

    def node(self, instance: str) -> str:
        return instance

    def slowness(self, instance: str) -> float:
        """Slow."""
        return 7.0


def test_the_boot_step_of_a_failed_instance_comes_first(mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "open", lambda *_: None)
    provider = Joined()
    provider.status = replace(provider.status, state="running", running_at=2.0)
    fleet = RayFleet(
        cast(ClusterProvider, provider),
        lambda _, on_sick: cast(Workers, Failing(provider, on_sick)),
        mailbox,
        leases=Leases(provider, lease_s=30.0, interval_s=0.02, clock=lambda: 10.0),
        on_gone=lambda _: None,
    )
    with contextlib.closing(fleet):
        fleet.launch("a")
        events: list[Event] = []
        eventually(lambda: bool(events.extend(mailbox.take(10.0))) or any(isinstance(e, InstanceLost) for e in events))
    (lost,) = [event for event in events if isinstance(event, InstanceLost)]
    assert lost.reason == "its boot script is at `setup: sleep 1000` (its Ray node did not offer 2 GPUs in 7 s)"


@pytest.mark.parametrize(("asked_at", "failed"), [(20.0, True), (1.0, False)])
def test_one_that_ended_before_it_ran_failed_to_start_unless_an_earlier_driver_asked_for_it(
    fleet: RayFleet, provider: Breaking, mailbox: Mailbox, asked_at: float, failed: bool
) -> None:
    provider.status = replace(
        provider.status, state="terminated", requested_at=asked_at, ended_at=30.0, reason="no disk"
    )
    fleet.launch("a")
    events: list[Event] = []
    eventually(lambda: bool(events.extend(mailbox.take(10.0)) or events))
    assert events == [InstanceRefused(occurred_at=10.0, instance="a", reason="no disk", failed_start=failed)]
