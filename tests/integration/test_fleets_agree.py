"""The same fates of instances give the same events on Ray and on a virtual clock. No Ray node is started."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rubberband.cloud.provider import INSTANCE_LABEL, ClusterProvider, Head
from rubberband.cloud.virtual import InstanceFaults, VirtualClock, VirtualProvider
from rubberband.executor import (
    Agenda,
    Connection,
    Event,
    Faults,
    InstancePriced,
    InstanceRunning,
    Leases,
    Mailbox,
    RayFleet,
    Workers,
    connection,
)
from rubberband.executor.ray.workers import WorkersError
from rubberband.executor.virtual.fleet import VirtualFleet
from rubberband.values.offer import Offer

READY_TIMEOUT_S = 307.0
NEVER_WARM = "its workers did not become warm"
OFFER = Offer(
    instance_type="test", gpus=2, price_usd_per_hour=3.6, max_instances=3, provision_delay_s=30.0, init_delay_s=10.0
)
RUNS = st.builds(
    InstanceFaults,
    provision_s=st.sampled_from([0.0, 60.0, 240.0]),
    init_s=st.sampled_from([13.0, 103.0, 3003.0]),
    ends_after_s=st.sampled_from([5.0, 45.0, 1805.0, 5405.0, math.inf]),
    preempted=st.booleans(),
    notice_s=st.sampled_from([None, 20.0, 120.0]),
    hour_prices_usd=st.sampled_from([(1.0,), (1.0, 0.5), (0.5, 1.0, 0.5)]),
)
"""No two things that a driver notices happen at one instant: their order would be chance."""
NEVER_RUNS = st.builds(
    InstanceFaults, provision_s=st.just(math.inf), stillborn_after_s=st.just(65.0), sold_out=st.booleans()
)
FATES = st.one_of(
    RUNS, RUNS, RUNS, NEVER_RUNS, st.builds(InstanceFaults, refused=st.just("no quota"), sold_out=st.booleans())
)
ORDERS = st.lists(
    st.tuples(st.sampled_from([0.0, 9.0, 69.0, 209.0, 2009.0, 4009.0]), st.sampled_from(["release", "die"])), max_size=2
)
END_S = 8000.0


class Shown(VirtualProvider):
    """A virtual provider as a cluster's, whose head is not needed."""

    look_s, remote, is_lent, is_borrowed, node_label, device = 1.0, False, False, False, INSTANCE_LABEL, "cpu"

    def node(self, instance: str) -> str:
        return instance

    def slowness(self, _instance: str) -> float:
        return 1.0

    def last_words(self, _instance: str) -> str:
        return ""

    def head(self) -> Head | None:
        return None

    def ensure_head(self) -> Head:
        return Head(address="", temp_dir=None, environment={})


class Warm:
    """Workers that are warm at once, or never: the time that they take passes before they are asked."""

    def __init__(self, fate: InstanceFaults) -> None:
        self.fate = fate

    def assemble(self, _slowness: float) -> None:
        if (self.fate.init_s or 0.0) > READY_TIMEOUT_S:
            raise WorkersError(NEVER_WARM)

    def dismiss(self) -> None:
        """Nothing."""


class OnRay:
    """The fleet of the Ray backend, whose threads run at once, in turn."""

    def __init__(self, fates: dict[str, InstanceFaults], clock: VirtualClock, provider: Shown) -> None:
        self.fates, self.clock, self.provider = fates, clock, provider
        self.assembles: list[tuple[float, Callable[[], None]]] = []
        """Workers on their way: when they are warm, or too late, and what is done then."""

    def begin(self) -> None:
        """A new driver takes over."""
        self.assembles.clear()
        self.leases = Leases(self.provider, lease_s=math.inf, interval_s=3600.0, clock=self.clock.now)
        self.fleet = RayFleet(
            cast(ClusterProvider, self.provider),
            lambda instance, _: cast(Workers, Warm(self.fates[instance])),
            Mailbox(self.clock.now),
            leases=self.leases,
            on_gone=lambda _: None,
        )

    def start(self, target: Callable[[], None], name: str) -> None:
        """Stand in for a thread."""
        if name.startswith("assemble-"):
            fate = self.fates[name.removeprefix("assemble-")]
            self.assembles.append((self.clock.now() + min(fate.init_s or 0.0, READY_TIMEOUT_S), target))
        elif not name.startswith("_watch"):
            target()

    def next_at(self) -> float:
        return min((at for at, _ in self.assembles), default=math.inf)

    def events(self) -> list[Event]:
        """What is news now."""
        self.fleet.look()
        due = [one for one in self.assembles if one[0] <= self.clock.now()]
        self.assembles = [one for one in self.assembles if one not in due]
        for _, target in due:
            target()
        return self.fleet.mailbox.take(self.clock.now())


def _play(
    fates: dict[str, InstanceFaults], orders: Sequence[tuple[float, str]], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Event], list[Event]]:
    """Return what both fleets report, and release `a` and resume both as is ordered."""
    clock, agenda = VirtualClock(), Agenda()
    shown, virtual_provider = (
        Shown("test", clock, offer=OFFER, lease_s=math.inf, faults_of=lambda name, _: fates[name]) for _ in range(2)
    )
    model = Faults(instance_faults=fates)
    virtual = VirtualFleet(virtual_provider, clock, agenda, model, lease_s=math.inf, ready_timeout_s=READY_TIMEOUT_S)
    on_ray = OnRay(fates, clock, shown)
    monkeypatch.setattr(connection, "start", on_ray.start)
    on_ray.begin()
    heard: tuple[list[Event], list[Event]] = ([], [])
    for name in fates:
        on_ray.fleet.launch(name, "on_demand")
        virtual.launch(name, "on_demand")
    waiting = sorted(orders)
    while clock.now() < END_S:
        heard[0].extend(on_ray.events())
        while (action := agenda.pop_due(clock.now())) is not None:
            if (event := action(clock.now())) is not None:
                heard[1].append(event)
        while waiting and waiting[0][0] <= clock.now():
            if waiting.pop(0)[1] == "release":
                on_ray.fleet.release("a")
                virtual.release("a")
            else:
                on_ray.leases.close()
                on_ray.begin()
                agenda.clear()
                heard[0].append(on_ray.fleet.reconcile(list(fates)))
                heard[1].append(virtual.reconcile(list(fates)))
        steps = [on_ray.next_at(), agenda.next_at(), END_S, *(at for at, _ in waiting)]
        clock.advance_to(max(min(steps), clock.now()))
    on_ray.leases.close()
    return heard


def _of(events: Sequence[Event], instance: str | None) -> list[Event]:
    return [e for e in events if getattr(e, "instance", None) == instance and not isinstance(e, InstancePriced)]


def _last_prices(events: Sequence[Event], instance: str) -> tuple[float, ...] | None:
    priced = [e for e in events if isinstance(e, InstancePriced | InstanceRunning) and e.instance == instance]
    return priced[-1].hour_prices_usd if priced else None


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.fixed_dictionaries({"a": FATES, "b": FATES}), ORDERS)
def test_both_fleets_report_the_same_events(fates: dict[str, InstanceFaults], orders: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connection, "open", lambda *_: None)
        on_ray, virtual = _play(fates, orders, patch)
    for instance in [*fates, None]:
        assert _of(on_ray, instance) == _of(virtual, instance)
    for instance, fate in fates.items():
        if fate.ends_after_s < math.inf:  # it has ended: prices are final; before, they are seen when it is looked
            assert _last_prices(on_ray, instance) == _last_prices(virtual, instance)
