"""Stories of a pool: machines move warm, slices share one, caps and leases hold, a new broker takes over."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from rubberband.cloud.pool import FileJournal, Pool, PoolLimits
from rubberband.cloud.pool import pool as module
from rubberband.cloud.pool import provider as provider_module
from rubberband.cloud.pool.journal import Compacted, MachinePriced, MachineWarned, Opened, SliceReturned
from rubberband.cloud.pool.server import snapshot
from rubberband.cloud.provider import InstanceDescription, NoRecordError
from rubberband.cloud.virtual import InstanceFaults, VirtualClock, VirtualProvider
from rubberband.errors import JournalError, ProviderError
from rubberband.spec.pool import PoolFolder
from rubberband.values.offer import Offer, Spot
from rubberband.values.plan import Market
from tests.builders.invariants import validate_pool
from tests.builders.memory import MemoryPoolJournal

PRICE = 3.6
"""USD per hour, so that a second costs 0.001."""
LIMITS = PoolLimits(
    instances=2, gpus=4, price_usd_per_hour=PRICE, minimum_billed_s=60.0, idle_s=100.0, release_margin_s=3.0
)
OFFER = Offer(instance_type="v", gpus=4, price_usd_per_hour=PRICE, max_instances=9, provision_delay_s=10.0)


@dataclass
class World:
    """A pool above a virtual provider."""

    limits: PoolLimits = LIMITS
    clock: VirtualClock = field(default_factory=lambda: VirtualClock(1_700_000_000.0))
    journal: FileJournal = field(default_factory=MemoryPoolJournal)

    def __post_init__(self) -> None:
        self.below = VirtualProvider("pool", self.clock, offer=OFFER)
        self.reopen()

    def reopen(self, compact_events: int = 20_000) -> None:
        """Replace the broker, as after a crash."""
        self.pool = Pool(
            self.below,
            self.journal,
            self.limits,
            self.clock.now,
            start=lambda work: work(),
            compact_events=compact_events,
        )

    def compact(self) -> None:
        """Let a new broker replace the journal by its state, and the next one read that."""
        self.reopen(1)
        self.pool.look()
        self.reopen()

    def wait(self, seconds: float) -> None:
        """Let time pass, with a broker that looks every second."""
        for _ in range(math.ceil(seconds)):
            self.clock.advance_to(self.clock.now() + 1.0)
            self.pool.look()
            validate_pool(self.pool.state, self.pool.now())

    def ask(self, tenant: str, instance: str = "i", gpus: int = 4, market: Market = "on_demand") -> None:
        """Ask for a slice, with a lease of an hour."""
        self.pool.launch(tenant, tenant, instance, gpus, 3600.0, market)

    def machine(self, tenant: str, instance: str = "i") -> str | None:
        """Return the machine of a slice."""
        return next(lent.machine for lent in self.pool.describe(tenant) if lent.status.instance == instance)

    def state(self, tenant: str, instance: str = "i") -> str:
        """Return how the tenant sees it."""
        return next(lent.status.state for lent in self.pool.describe(tenant) if lent.status.instance == instance)


def test_a_warm_machine_moves_to_the_next_experiment() -> None:
    world = World()
    world.ask("a")
    world.wait(11)
    world.pool.release("a", "i")
    world.wait(5)
    world.ask("b")
    assert world.machine("b") == world.machine("a")
    assert world.state("b") == "running", "it needs no start"
    assert len(world.below.describe()) == 1


def test_slices_share_a_machine_and_leave_whole_ones_free() -> None:
    world = World()
    world.ask("a", gpus=1)
    world.ask("b", gpus=2)
    assert world.machine("a") == world.machine("b") == "m1"
    world.ask("c", gpus=2)
    assert world.machine("c") == "m2", "one GPU is left on m1"
    world.ask("d", gpus=1)
    assert world.machine("d") == "m1", "it fits best there"


def test_requests_wait_their_turn() -> None:
    world = World()
    for tenant in "abcd":
        world.ask(tenant)
    world.wait(11)
    assert [world.state(tenant) for tenant in "abcd"] == ["running", "running", "pending", "pending"]
    world.ask("e", gpus=1)
    world.pool.release("b", "i")
    assert [world.state(tenant) for tenant in "cde"] == ["running", "pending", "pending"]


def _spot_world(**limits: Any) -> World:
    """Return a pool on spot; hours of its spot machines cost 1.0, 2.0 and then 1.5 USD."""

    def faults_of(_machine: str, market: Market) -> InstanceFaults:
        return InstanceFaults(hour_prices_usd=(1.0, 2.0, 1.5)) if market == "spot" else InstanceFaults()

    world = World(limits=replace(LIMITS, market="spot", side_usd_per_hour=0.1, **limits))
    spotted = replace(OFFER, spot=Spot(price_usd_per_hour=0.9, interruptions_per_hour=0.0))
    world.below = VirtualProvider("pool", world.clock, offer=spotted, faults_of=faults_of)
    world.reopen()
    return world


def test_a_pool_on_spot_rents_on_the_market_that_is_asked_for() -> None:
    world = _spot_world(max_usd_per_hour=2 * PRICE)
    world.ask("a", market="spot")
    world.ask("b", gpus=2)
    world.wait(11)
    assert [machine.market for machine in world.below.describe()] == ["spot", "on_demand"]
    world.pool.release("a", "i")
    world.ask("c", gpus=4)
    world.wait(2)
    assert world.machine("c") == "m3", "an idle spot machine makes room for one on demand"
    world.ask("d", gpus=2, market="spot")
    assert world.state("d") == "pending", "it does not take what is left of one on demand"


def test_a_tenant_on_spot_keeps_the_price_of_the_hour_in_which_it_began() -> None:
    world = _spot_world()
    world.ask("a", market="spot")
    world.wait(11)
    world.pool.renew("a", world.clock.now() + 9000.0)
    world.wait(3700)
    world.pool.release("a", "i")
    world.ask("b", market="spot")
    world.wait(100)
    world.pool.release("b", "i")
    now, state = world.clock.now(), world.pool.state
    lent = state.lent_usd(now)
    assert lent["a"] == pytest.approx(1.1 * 3700 / 3600, rel=0.01)
    prices = {one.tenant: one.usd_per_hour for one in state.slices.values()}
    assert prices == {"a": pytest.approx(1.1), "b": pytest.approx(2.1)}, "with the costs beside the rent"
    assert sum(lent.values()) + state.idle_usd(now) == pytest.approx(state.bill_usd(now))
    world.reopen()
    assert world.pool.state.bill_usd(now) == pytest.approx(state.bill_usd(now))


@pytest.mark.parametrize(
    "faults",
    [
        InstanceFaults(refused="no capacity", sold_out=True),
        InstanceFaults(provision_s=math.inf, stillborn_after_s=0.5, sold_out=True),
    ],
)
def test_a_tenant_hears_that_machines_are_sold_out(faults: InstanceFaults) -> None:
    world = _spot_world()
    world.below = VirtualProvider("pool", world.clock, offer=OFFER, faults_of=lambda *_: faults)
    world.reopen()
    world.ask("a")
    world.wait(1)
    (lent,) = world.pool.describe("a")
    assert (lent.status.state, lent.status.sold_out) == ("terminated", True)
    assert lent.status.running_at is None


def test_an_idle_machine_is_released_after_its_minimum_and_its_time() -> None:
    world = World()
    world.ask("a")
    world.wait(20)
    world.pool.release("a", "i")
    world.wait(98)
    assert [status.state for status in world.below.describe()] == ["running"]
    world.wait(3)
    assert [status.state for status in world.below.describe()] == ["terminated"]


def test_an_idle_machine_is_there_for_others_as_long_as_it_is_paid_and_no_longer() -> None:
    world = World(replace(LIMITS, idle_s=10.0))
    world.ask("a")
    world.wait(30)
    world.pool.release("a", "i")
    world.wait(35)
    assert [status.state for status in world.below.describe()] == ["running"], "its first minute is paid"
    world.wait(20)
    assert world.below.bill_usd(world.clock.now()) == pytest.approx(0.06)


def test_a_machine_whose_tenant_went_silent_is_not_lent_again() -> None:
    world = World()
    world.pool.launch("a", "a", "i", 2, 30.0)
    world.ask("b", gpus=2)
    world.wait(45)
    assert world.state("a") == "terminated"
    world.ask("c", gpus=2)
    assert world.machine("c") == "m2"
    world.pool.release("b", "i")
    world.wait(2)
    assert [status.state for status in world.below.describe()] == ["terminated", "pending"]


def test_a_machine_that_is_lent_no_more_makes_room_where_requests_wait() -> None:
    world = World(limits=replace(LIMITS, instances=1))
    world.pool.launch("dead", "dead", "i", 1, 30.0)
    world.ask("living", gpus=1)
    world.wait(45.0)
    world.ask("living", "j", gpus=1)  # it goes on only with both
    world.wait(5.0)
    assert world.pool.describe("living")[0].status.interrupted_at is not None
    world.pool.release("living", "i")
    world.wait(15.0)
    assert world.state("living", "j") == "running"


def test_the_budget_of_a_month_warns_ends_and_refuses() -> None:
    world = World(replace(LIMITS, max_usd_per_month=0.5))
    world.ask("a")
    world.wait(450)
    warned = world.pool.describe("a")[0].status
    assert warned.interrupted_at is not None
    assert warned.state == "running"
    world.wait(65)
    ended = world.pool.describe("a")[0].status
    assert (ended.state, ended.preempted) == ("terminated", True)
    assert "max_usd_per_month" in ended.reason
    assert world.below.bill_usd(world.clock.now()) <= 0.5
    world.ask("b")
    world.wait(2)
    assert "max_usd_per_month" in world.pool.describe("b")[0].status.reason
    world.wait(3)
    assert len(world.below.describe()) == 1


def test_a_machine_that_a_tenant_finds_faulty_is_lent_no_more() -> None:
    world = World()
    world.ask("a", gpus=2)
    world.ask("b", gpus=2)
    world.wait(15)
    assert world.machine("a") == world.machine("b") == "m1"
    world.pool.release("a", "i", "its Ray node stopped answering")
    world.ask("a", "i2", gpus=2)
    world.ask("c", gpus=2)
    world.reopen()
    world.wait(15)
    assert (world.machine("a", "i2"), world.machine("c")) == ("m2", "m2")
    world.pool.release("b", "i")
    world.wait(3)
    assert world.pool.state.machines["m1"].status == "ended", "it is given back once nothing uses it"


def test_a_tenant_that_blames_many_machines_is_at_fault_itself() -> None:
    world = World(replace(LIMITS, instances=9))
    for turn in range(6):
        world.ask("a", f"i{turn}")
        world.wait(15)
        assert world.state("a", f"i{turn}") == "running"
        world.pool.release("a", f"i{turn}", "its workers did not start")
        world.compact()
    assert len(world.pool.state.machines) == 4, "three are retired, and the fourth is used on"
    world.wait(3600)
    world.ask("a", "later")
    world.wait(15)
    world.pool.release("a", "later", "its workers did not start")
    world.ask("b")
    world.wait(15)
    assert world.machine("b") == "m6"


def test_parts_of_one_machine_are_blamed_as_one() -> None:
    world = World(replace(LIMITS, instances=9))
    for number in range(4):
        world.ask("a", f"i{number}", gpus=1)
    world.wait(15)
    for number in range(4):
        world.pool.release("a", f"i{number}", "its workers did not start")
    world.ask("a", "j")
    world.wait(15)
    world.pool.release("a", "j", "its workers did not start")
    world.ask("b")
    world.wait(15)
    assert world.machine("b") == "m3", "m1 and m2 are retired"


class Attended(VirtualProvider):
    """A provider whose machines answer the broker, but for the `silent` ones."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__("pool", clock, offer=OFFER, lease_s=1e6)
        self.silent: set[str] = set()
        self.is_away = False
        self._answered: dict[str, float] = {}

    def describe(self) -> Sequence[InstanceDescription]:
        if self.is_away:
            raise ConnectionError
        found = []
        for status in super().describe():
            if status.running_at is not None and status.ended_at is None:
                if status.instance not in self.silent:
                    self._answered[status.instance] = self.virtual_clock.now()
                silent_since = self._answered.get(status.instance, status.running_at + 300.0)
                status = replace(status, silent_since=silent_since)
            found.append(status)
        return found


def attended(machines: int) -> tuple[World, Attended]:
    """Return a pool whose tenant `t` has `machines` of 9, which answer."""
    world = World(replace(LIMITS, instances=9, idle_s=1e6))
    world.below = below = Attended(world.clock)
    world.reopen()
    for number in range(machines):
        world.ask("t", f"i{number}")
    world.wait(45.0)
    return world, below


def retired(world: World) -> list[str]:
    """Return the machines that are lent no more."""
    return [machine.name for machine in world.pool.state.machines.values() if machine.retired]


def test_a_machine_that_answers_the_broker_no_more_is_lent_no_more() -> None:
    world, below = attended(3)
    below.silent.add("m2")
    world.wait(58.0)
    assert not retired(world)
    world.wait(5.0)
    assert retired(world) == ["m2"]
    assert world.state("t", "i1") == "running", "its tenant may still reach it"
    world.compact()
    world.pool.release("t", "i1")
    world.ask("u")
    world.wait(15.0)
    assert world.machine("u") == "m4"
    assert world.pool.state.machines["m2"].status == "ended"


def test_one_of_two_machines_may_be_at_fault() -> None:
    world, below = attended(2)
    below.silent.add("m2")
    world.wait(65.0)
    assert retired(world) == ["m2"]


def test_a_machine_that_has_never_answered_has_its_time_to_join_first() -> None:
    world, below = attended(2)
    below.silent.add("m3")
    world.ask("u")
    world.wait(300.0)
    assert not retired(world)
    world.wait(75.0)
    assert retired(world) == ["m3"]


def test_machines_that_fall_silent_together_are_not_blamed_for_it() -> None:
    world, below = attended(3)
    below.silent = {"m1", "m2", "m3"}
    world.wait(600.0)
    below.silent = {"m2"}
    world.wait(50.0)
    below.silent = set()
    world.wait(100.0)
    below.silent = {"m2", "m3"}
    world.wait(600.0)
    assert not retired(world), "neither the head nor the network of the broker is a machine's fault"


def test_a_broker_that_did_not_look_blames_none() -> None:
    world, below = attended(3)
    below.is_away, below.silent = True, {"m1"}
    world.wait(300.0)
    below.is_away = False
    world.wait(30.0)
    world.reopen()
    world.wait(50.0)
    world.clock.advance_to(world.clock.now() + 40.0)
    world.wait(50.0)
    assert not retired(world)
    world.wait(15.0)
    assert retired(world) == ["m1"]


def reclaimed(*, ends_after_s: float = 720.0, notice_s: float = 120.0) -> World:
    """A pool on spot, whose first machine the provider reclaims while a tenant has it."""
    world = World(limits=replace(LIMITS, market="spot"))
    faults = InstanceFaults(hour_prices_usd=(1.0, 1.0), ends_after_s=ends_after_s, preempted=True, notice_s=notice_s)
    offer = replace(OFFER, spot=Spot(price_usd_per_hour=1.0, interruptions_per_hour=0.05))
    world.below = VirtualProvider("pool", world.clock, offer=offer, faults_of=lambda *_: faults)
    world.reopen()
    world.ask("a", market="spot")
    world.wait(10.0 + ends_after_s - notice_s + 2.0)
    assert world.pool.describe("a")[0].status.interrupted_at is not None
    world.pool.release("a", "i")
    return world


def test_a_machine_that_the_provider_takes_away_for_free_is_left_to_it() -> None:
    world = reclaimed()
    world.reopen()
    world.wait(130)
    (machine,) = world.pool.state.machines.values()
    assert (machine.status, machine.preempted, machine.bill_usd(world.clock.now())) == ("ended", True, 0.0)


def test_a_machine_that_the_provider_does_not_take_away_is_given_back_shortly_after() -> None:
    world = reclaimed(ends_after_s=1000.0, notice_s=400.0)
    world.wait(140)
    assert next(iter(world.pool.state.machines.values())).status == "running"
    world.wait(15)
    assert next(iter(world.pool.state.machines.values())).status == "ended"


def test_a_machine_that_the_provider_does_not_take_away_for_free_is_given_back_at_once() -> None:
    world = reclaimed(ends_after_s=3700.0)
    world.wait(2)
    assert not next(iter(world.pool.state.machines.values())).preempted


def test_a_pool_that_closes_gives_interrupted_machines_back_at_once() -> None:
    world = reclaimed()
    world.pool.close()
    assert not next(iter(world.pool.state.machines.values())).is_live


def test_a_new_broker_knows_what_is_lent_and_gives_drivers_time_to_renew() -> None:
    world = World()
    world.pool.renew("a", world.clock.now() + 30.0)
    world.ask("a")
    world.wait(11)
    world.pool.renew("a", world.clock.now() + 30.0)
    world.clock.advance_to(world.clock.now() + 35.0)
    world.reopen()
    world.wait(5)
    assert world.state("a") == "running"
    world.wait(15)
    assert world.state("a") == "terminated"


@pytest.mark.parametrize("first_lease_s", [None, 30.0])
def test_a_lease_that_a_budget_cut_and_a_first_one_get_no_more_time_from_a_new_broker(
    first_lease_s: float | None,
) -> None:
    world = World()
    world.pool.renew("a", world.clock.now() + 3600.0)
    world.pool.launch("a", "a", "i", 4, first_lease_s or 3600.0)
    world.wait(11)
    if first_lease_s is None:
        world.pool.renew("a", world.clock.now() + 5.0)
    world.clock.advance_to(world.clock.now() + (first_lease_s or 5.0) + 1.0)
    world.reopen()
    world.wait(1)
    assert world.state("a") == "terminated"


@pytest.mark.parametrize("machine_ends_after_s", [math.inf, 100.0])
def test_a_tenant_pays_until_its_lease_ended_also_if_no_broker_saw_it(machine_ends_after_s: float) -> None:
    world = World()
    world.pool.renew("a", world.clock.now() + 60.0)
    world.ask("a")
    world.wait(11)
    world.pool.renew("a", world.clock.now() + 60.0)
    lease_until = world.clock.now() + 60.0
    if machine_ends_after_s < math.inf:
        world.clock.advance_to(world.clock.now() + machine_ends_after_s)
        world.below.lose("m1")
    world.clock.advance_to(world.clock.now() + 200.0)
    world.reopen()
    world.wait(17)
    ended = world.pool.describe("a")[0].status
    assert (ended.state, ended.ended_at) == ("terminated", lease_until)
    state, now = world.pool.state, world.clock.now()
    assert sum(state.lent_usd(now).values()) + state.idle_usd(now) == pytest.approx(world.below.bill_usd(now))


def test_a_machine_that_the_journal_does_not_know_is_released() -> None:
    world = World()
    world.below.launch("stray")
    world.wait(1)
    assert [status.state for status in world.below.describe()] == ["terminated"]


def test_more_gpus_than_a_machine_has_are_refused() -> None:
    with pytest.raises(ProviderError, match="needs 8 GPUs and an instance of the pool has 4"):
        World().ask("a", gpus=8)


def test_closing_ends_every_machine_and_every_request() -> None:
    world = World()
    for tenant in "abc":
        world.ask(tenant)
    world.wait(11)
    world.pool.close()
    assert {status.state for status in world.below.describe()} == {"terminated"}
    assert [world.state(tenant) for tenant in "abc"] == ["terminated"] * 3
    with pytest.raises(ProviderError, match="closed"):
        world.ask("d")


def test_a_long_journal_is_replaced_by_the_state_that_it_led_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HISTORY_S", 1000.0)
    world = World()
    world.journal = FileJournal(tmp_path)
    world.reopen()
    world.ask("old")
    world.wait(60)
    world.pool.release("old", "i")
    world.wait(1200)
    world.ask("a", gpus=2)
    world.ask("b", gpus=4)
    world.ask("c", gpus=4)
    world.wait(60)
    world.pool.release("b", "i")
    before = snapshot(world.pool, "team")
    world.reopen(5)
    assert len((tmp_path / "journal.jsonl").read_text().splitlines()) > 5, "only a look compacts"
    world.pool.look()
    assert len((tmp_path / "journal.jsonl").read_text().splitlines()) == 1
    world.reopen()
    after = snapshot(world.pool, "team")
    assert [tenant["tenant"] for tenant in after["tenants"]] == ["a", "b", "c"], "what ended long ago is in the sums"
    usd = ("bill", "lent", "idle", "per_hour")
    assert {name: after["usd"][name] for name in usd} == pytest.approx({name: before["usd"][name] for name in usd})
    names = ("started", "instances", "free_gpus", "machines", "waiting")
    assert {name: after[name] for name in names} == {name: before[name] for name in names}
    validate_pool(world.pool.state, world.pool.now())
    world.pool.release("a", "i")
    world.ask("d")
    world.wait(30)
    assert world.machine("d") == "m2", "no name is used twice"


def test_a_long_life_keeps_its_sums_however_often_its_journal_is_compacted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HISTORY_S", 1000.0)
    world = World()
    for tenant in "abc":
        world.ask(tenant, gpus=3)
        world.wait(60)
        world.pool.release(tenant, "i")
        world.wait(1200)  # its machine has ended, and is history
        world.compact()
    now, state = world.clock.now(), world.pool.state
    assert not state.machines
    assert state.bill_usd(now) == pytest.approx(world.below.bill_usd(now))
    assert state.idle_usd(now) == pytest.approx(state.bill_usd(now) - 3 * 50 * 0.001 * 3 / 4)
    world.ask("d")
    assert world.machine("d") == "m4", "no name is used twice"


OCTOBER = 1_696_118_400.0
"""2023-10-01, UTC."""


def test_the_cap_counts_the_first_day_of_a_month_on_its_last_day_also_after_a_compaction() -> None:
    world = World(replace(LIMITS, max_usd_per_month=0.5), clock=VirtualClock(OCTOBER))
    world.ask("a")
    world.wait(460)
    world.pool.release("a", "i")
    world.wait(2)
    world.clock.advance_to(OCTOBER + 30.9 * 24 * 3600.0)
    world.compact()
    now = world.clock.now()
    assert world.pool.state.month_usd(now) == pytest.approx(world.below.bill_usd(now))
    world.ask("b")
    world.wait(2)
    assert "max_usd_per_month" in world.pool.describe("b")[0].status.reason
    world.clock.advance_to(OCTOBER + 31 * 24 * 3600.0)
    world.ask("b", "j")
    world.wait(11)
    assert world.state("b", "j") == "running", "the next month has a budget of its own"


@pytest.mark.usefixtures("zone")
def test_a_month_is_that_of_utc_wherever_the_pool_runs() -> None:
    def spent_by(at: float) -> float:
        world = World(clock=VirtualClock(at))
        world.ask("a")
        world.wait(110)
        world.pool.close()
        return world.pool.state.month_usd(world.clock.now())

    over_midnight, before_midnight = spent_by(OCTOBER - 80.0), spent_by(OCTOBER - 3600.0)
    assert before_midnight == pytest.approx(0.1, abs=1e-3)
    assert over_midnight == pytest.approx(0.03, abs=1e-3), "the rest is the bill of September"


def test_nothing_is_announced_at_the_end_of_a_month_whose_budget_ends_only_in_the_next() -> None:
    world = World(replace(LIMITS, max_usd_per_month=0.5), clock=VirtualClock(OCTOBER - 470.0))
    world.ask("a")
    world.wait(800)
    (seen,) = world.pool.describe("a")
    assert (seen.status.state, seen.status.interrupted_at) == ("running", None)


class SlowToEnd(VirtualProvider):
    """Answers a release only 4 s after the first request, as a provider that is busy."""

    def release(self, instance: str, *, fault: str = "") -> InstanceDescription:
        """Raises ProviderError before."""
        asked_at = self.__dict__.setdefault("asked_at", {}).setdefault(instance, self.virtual_clock.now())
        if self.virtual_clock.now() < asked_at + 4.0:
            raise ProviderError("busy; try again")
        return super().release(instance, fault=fault)


@pytest.mark.parametrize("begun_s", [0.1, 0.6, 1.1, 1.6])
def test_the_bill_of_a_month_keeps_its_cap_also_if_a_look_is_late_and_a_release_slow(begun_s: float) -> None:
    world = World(replace(LIMITS, max_usd_per_month=0.5, release_margin_s=4.0))
    world.below = SlowToEnd("pool", world.clock, offer=OFFER, faults_of=lambda *_: InstanceFaults(lease_late_s=2.0))
    world.reopen()
    world.ask("a")
    world.clock.advance_to(world.clock.now() + 10.0 + begun_s)
    while world.below.describe()[0].ended_at is None:
        world.pool.look()
        world.pool.renew("a", world.clock.now() + 60.0)
        world.clock.advance_to(world.clock.now() + 2.0)
    assert world.below.bill_usd(world.clock.now()) <= 0.5
    assert world.below.describe()[0].reason == "", "it was released, before its lease had to end it"


def test_a_machine_on_spot_that_outlives_its_broker_keeps_the_cap_at_any_price_of_the_next_hour() -> None:
    world = World(limits=replace(LIMITS, market="spot", max_usd_per_month=1.6, lease_s=7200.0))
    spotted = replace(OFFER, spot=Spot(price_usd_per_hour=0.9, interruptions_per_hour=0.0))
    faults = InstanceFaults(hour_prices_usd=(1.0, 3.5))
    world.below = VirtualProvider("pool", world.clock, offer=spotted, faults_of=lambda *_: faults)
    world.reopen()
    world.ask("a", market="spot")
    world.wait(11)
    world.pool.renew("a", world.clock.now() + 9000.0)
    world.wait(3500)
    world.clock.advance_to(world.clock.now() + 9000.0)
    ended = world.below.describe()[0]
    assert ended.ended_at is not None
    assert 1.3 < world.below.bill_usd(world.clock.now()) <= 1.6


class PricesLate(VirtualProvider):
    """Knows the price of an hour only when the hour is over, as EC2's history of spot prices may."""

    def status(self, instance: str) -> InstanceDescription:
        """One instance; its last hour has no price for the first minute after its end."""
        found = super().status(instance)
        now, prices = self.virtual_clock.now(), found.hour_prices_usd
        if prices and (found.ended_at is None or now < found.ended_at + 60.0):
            return replace(found, hour_prices_usd=prices[:-1])
        return found


def test_a_price_that_is_known_after_a_machine_has_ended_is_in_the_bill() -> None:
    world = World(limits=replace(LIMITS, market="spot"))
    spotted = replace(OFFER, spot=Spot(price_usd_per_hour=0.9, interruptions_per_hour=0.0))
    faults = InstanceFaults(hour_prices_usd=(1.0, 2.0))
    world.below = PricesLate("pool", world.clock, offer=spotted, faults_of=lambda *_: faults)
    world.reopen()
    world.ask("a", market="spot")
    world.wait(11)
    world.pool.renew("a", world.clock.now() + 5000.0)
    world.wait(4000)
    world.pool.release("a", "i")
    world.wait(130)
    assert world.below.describe()[0].ended_at is not None
    world.wait(60)
    now = world.clock.now()
    assert world.pool.state.bill_usd(now) == pytest.approx(world.below.bill_usd(now))


def test_a_price_of_a_machine_that_the_journal_has_forgotten_stops_no_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HISTORY_S", 1000.0)
    world = World(limits=replace(LIMITS, market="spot"))
    world.below = VirtualProvider(
        "pool", world.clock, offer=OFFER, faults_of=lambda *_: InstanceFaults(hour_prices_usd=(1.0,))
    )
    world.reopen(1)
    world.ask("a", market="spot")
    world.wait(60)
    world.pool.release("a", "i")
    world.wait(2000)
    bill_usd = world.pool.state.bill_usd(world.clock.now())
    world.pool.take_in([MachinePriced(at=world.clock.now(), machine="m1", hour_prices_usd=(2.0,))])
    world.pool.take_in([MachineWarned(at=world.clock.now(), machine="m1")])
    world.reopen()
    assert world.pool.state.machines == {}
    assert world.pool.state.bill_usd(world.clock.now()) == pytest.approx(bill_usd)


class AnswersLost(VirtualProvider):
    """Carries launches out, and says that it has not."""

    is_silent = False

    def launch(self, instance: str, market: Market = "on_demand", *, first_lease_s: float | None = None) -> None:
        super().launch(instance, market, first_lease_s=first_lease_s)
        raise ProviderError("the connection was reset")

    def describe(self) -> Sequence[InstanceDescription]:
        if self.is_silent:
            raise ProviderError("the connection was reset")
        return super().describe()


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_machine_whose_launch_was_not_answered_is_released_and_billed(is_silent: bool) -> None:
    world = World()
    world.below = AnswersLost("pool", world.clock, offer=replace(OFFER, provision_delay_s=0.0))
    world.below.is_silent = is_silent
    world.reopen()
    world.ask("a")
    world.clock.advance_to(world.clock.now() + 5.0)
    world.below.is_silent = False
    world.wait(5)
    (lent,) = world.pool.describe("a")
    assert (lent.status.state, lent.status.reason) == ("terminated", "the connection was reset")
    machine = world.pool.state.machines["m1"]
    assert machine.ended_at is not None
    now = world.clock.now()
    assert world.pool.state.bill_usd(now) == pytest.approx(world.below.bill_usd(now))
    assert world.below.bill_usd(now) > 0.0


def test_a_call_for_which_there_is_no_thread_is_made_later() -> None:
    world, threads = World(), [0]

    def start(work: Callable[[], None]) -> None:
        if threads[0] == 0:
            raise RuntimeError("can't start new thread")
        work()

    world.pool = Pool(world.below, world.journal, LIMITS, world.clock.now, start=start)
    world.ask("a")
    assert world.below.describe() == []
    threads[0] = 1
    world.wait(12)
    assert world.state("a") == "running"


def test_a_new_broker_on_a_clock_that_stepped_back_goes_on_from_its_journal() -> None:
    world = World()
    world.ask("a")
    world.wait(60)
    world.pool.release("a", "i")
    at = world.pool.now()
    world.clock = VirtualClock(at - 3600.0)
    world.reopen()
    assert world.pool.now() == at


def test_a_request_for_more_gpus_than_machines_have_now_blocks_no_other() -> None:
    world = World(limits=replace(LIMITS, instances=1))
    world.ask("a")
    world.ask("large", gpus=4)
    world.ask("small", gpus=1)
    world.wait(20)
    world.limits = replace(LIMITS, instances=2, gpus=2)
    world.reopen()
    world.pool.look()
    (refused,) = world.pool.describe("large")
    assert "it needs 4 GPUs and an instance of the pool has 2" in refused.status.reason
    assert world.machine("small") == "m2"
    assert world.state("a") == "running"


def test_a_journal_survives_a_line_that_was_cut_off(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path)
    events = [Opened(at=1.0, limits=LIMITS), SliceReturned(at=2.0, tenant="a", instance="i")]
    journal.append(events)
    with open(tmp_path / "journal.jsonl", "a") as file:
        file.write('{"event": "SliceRet')
    assert list(FileJournal(tmp_path).events()) == events
    journal.append(events)
    assert list(FileJournal(tmp_path).events()) == events * 2


def test_a_full_disk_adds_no_part_of_an_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, events = FileJournal(tmp_path), [Opened(at=1.0, limits=LIMITS)]
    journal.append(events)

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            journal.append(events)
    journal.append(events)
    assert list(FileJournal(tmp_path).events()) == events * 2


@pytest.mark.parametrize("line", [b'{"event": "Nothing"}', b"\xff\xfe", b"[]", b"{}"])
def test_a_line_that_is_no_event_is_reported_with_its_number(tmp_path: Path, line: bytes) -> None:
    content = line + b"\n" + b'{"event": "SliceRet'
    (tmp_path / "journal.jsonl").write_bytes(content)
    with pytest.raises(JournalError, match=r"journal\.jsonl:1 is no event"):
        FileJournal(tmp_path).require_sound()
    assert (tmp_path / "journal.jsonl").read_bytes() == content
    with pytest.raises(JournalError, match=r"journal\.jsonl:1 is no event"):
        list(FileJournal(tmp_path).events())


@pytest.mark.parametrize("is_up", [True, False])
def test_a_pool_whose_journal_is_damaged_says_so_and_asks_for_no_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_up: bool
) -> None:
    monkeypatch.setattr(provider_module, "start_broker", lambda _: pytest.fail("it cannot start"))
    folder = PoolFolder(path=tmp_path)
    folder.write({})
    if not is_up:
        folder.note_closed()
    (tmp_path / "journal.jsonl").write_bytes(b"\xff\n")
    pool = provider_module.RemotePool(folder)
    with pytest.raises(NoRecordError, match=r"journal\.jsonl:1 is no event"):
        pool.release("tenant", "i-001")
    provider_module.PoolProvider("job", pool, 1, run="1", clock=lambda: 0.0).close()


def test_a_pool_that_scales_down_releases_idle_machines_at_once_and_reports_it() -> None:
    world = World(limits=replace(LIMITS, idle_s=1000.0, autoscales=True))
    world.ask("a")
    world.ask("b")
    world.pool.scale(2, 0.8)
    world.wait(100)
    world.pool.release("b", "i")
    world.wait(20)
    assert len(world.pool.state.live) == 2, "two are in use by the rule: one waits for a request"
    world.pool.scale(1, 0.6)
    world.pool.scale(1, 0.7)
    assert snapshot(world.pool, "team")["efficiency"] == 0.7
    world.wait(2)
    assert list(world.pool.state.live) == ["m1"]
    world.compact()
    found = snapshot(world.pool, "team")
    assert found["autoscaled"] == 1
    assert [(one["instances"], one["efficiency"]) for one in found["scales"]] == [(2, 0.8), (1, 0.6)]
    assert [one["instances"] for one in found["sizes"]] == [2, 1]
    assert found["efficiency"] is None, "a new broker has not heard of it yet"
    world.pool.release("a", "i")
    world.pool.scale(0, 0.0)
    world.wait(20)
    assert list(world.pool.state.live) == ["m1"], "without experiments it waits for the next one, as ever"
    world.ask("c")
    world.ask("d")
    world.wait(20)
    assert world.state("c") == world.state("d") == "running", "what is asked for is lent"


def test_a_pool_that_does_not_scale_forgets_an_earlier_scale() -> None:
    world = World(limits=replace(LIMITS, autoscales=True))
    world.pool.scale(0, 0.0)
    world.limits = LIMITS
    world.reopen()
    world.pool.scale(1, 0.5)
    assert snapshot(world.pool, "team")["autoscaled"] is None
    world.ask("a")
    world.wait(100)
    world.pool.release("a", "i")
    world.wait(50)
    assert len(world.pool.state.live) == 1, "an idle one waits its time"


def test_a_journal_from_before_pools_scaled_is_read() -> None:
    world = World()
    world.ask("a")
    world.wait(20)
    words = json.loads(json.dumps(world.pool.state.to_json(0.0)))
    del words["scales"], words["limits"]["autoscales"]
    world.journal = MemoryPoolJournal()
    world.journal.append([Compacted(at=world.clock.now(), state=words)])
    world.reopen()
    assert world.state("a") == "running"
    assert snapshot(world.pool, "team")["autoscaled"] is None
