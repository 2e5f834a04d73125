"""The ledger of spot instances against EC2's bill, for any walk of prices: AwsProvider on the fake EC2."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rubberband.cloud.aws.fleet import highest
from rubberband.cloud.provider import InstanceDescription
from rubberband.executor import InstanceStatus, Job, State, instance_cost_usd, spending
from rubberband.executor.core.fleet import InstanceRecord
from tests.builders.aws_account import START_AT
from tests.builders.budget import examples
from tests.builders.fake_ec2 import World
from tests.ec2 import Fault
from tests.harness.crash_cases import job_of

ON_DEMAND_USD = 1.006
WALKS = st.lists(
    st.tuples(st.integers(-60, 300), st.floats(0.05, ON_DEMAND_USD).map(lambda usd: round(usd, 4))),
    min_size=1,
    max_size=10,
)

"""(minutes after the start, USD per hour)."""
WAITS_S = st.lists(st.floats(0.0, 8000.0), min_size=1, max_size=6)
OFFER = dataclasses.replace(job_of("spot", "roomy").offer, side_costs=(), head_price_usd_per_hour=0.0)
JOB: Job = dataclasses.replace(job_of("spot", "roomy"), offer=OFFER, max_cost_usd=100.0)


class Rented:
    """A spot instance whose price walks, as its driver knows it."""

    def __init__(self, folder: str, walk: Sequence[tuple[int, float]], *, pending_s: float = 0.0) -> None:
        self.world = World(Path(folder))
        self.world.fake.world.pending_s = pending_s
        # Half a minute past the full one: EC2 tells instants to the second, and hours begin on full minutes here.
        changes = sorted((START_AT + 60.0 * minute + 30.0, price) for minute, price in walk)
        for zone in self.world.fake.world.zones:
            self.world.fake.world.spot.set("g5.xlarge", zone, [(START_AT - 7200.0, ON_DEMAND_USD), *changes])
        self.driver = self.world.driver(lease_s=1e6)
        self.world.now += 0.7  # orders are gathered for 0.3 s: it is bought, and runs, at a full second
        self.driver.launch("a", "spot")

    def look(self) -> InstanceDescription:
        """What a driver sees that has just come."""
        (status,) = self.driver.describe()
        return status

    def billed_usd(self) -> float:
        """By EC2, for its rent."""
        return self.world.fake.bill().rent_usd

    def ledger_usd(self, status: InstanceDescription) -> float:
        """What the ledger says at this instant."""
        return instance_cost_usd(JOB, _record(status), self.world.now)

    def counted_usd(self, status: InstanceDescription) -> float:
        """What the cap counts at this instant."""
        state = State.of(JOB)
        state.started_at = state.now = self.world.now
        state.fleet.add(_record(status))
        return spending(state).spent_usd(self.world.now)


def _record(status: InstanceDescription) -> InstanceRecord:
    return InstanceRecord(
        instance=status.instance,
        requested_at=status.requested_at,
        status=InstanceStatus.RUNNING if status.ended_at is None else InstanceStatus.ENDED,
        running_at=status.running_at,
        ended_at=status.ended_at,
        market="spot",
        price_usd_per_hour=status.price_usd_per_hour,
        hour_prices_usd=status.hour_prices_usd,
        preempted=status.preempted,
    )


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@settings(max_examples=examples(150), deadline=None)
@given(walk=WALKS, waits_min=st.lists(st.integers(0, 100), min_size=1, max_size=4))
def test_the_ledger_is_the_bill_where_it_is_known_since_when_it_runs(
    walk: list[tuple[int, float]], waits_min: list[int]
) -> None:
    with TemporaryDirectory() as folder:
        rented = Rented(folder, walk)
        for wait_min in (0, *waits_min):
            rented.world.now += 60.0 * wait_min + 6.0 * (wait_min > 0)
            status = rented.look()
            assert rented.ledger_usd(status) == pytest.approx(rented.billed_usd())
            assert rented.counted_usd(status) == pytest.approx(rented.billed_usd())
        status = rented.driver.release("a")
        rented.world.now += 5000.0
        assert rented.ledger_usd(status) == pytest.approx(rented.billed_usd())


@settings(max_examples=examples(200), deadline=None)
@given(walk=WALKS, waits_s=WAITS_S, pending_s=st.floats(0.0, 200.0), fails=st.lists(st.booleans(), max_size=8))
def test_the_cap_never_counts_less_than_the_bill(
    walk: list[tuple[int, float]], waits_s: list[float], pending_s: float, fails: list[bool]
) -> None:
    """Whenever a driver looks, if it looks at all, and whether EC2 tells its prices then or not."""
    with TemporaryDirectory() as folder:
        rented = Rented(folder, walk, pending_s=pending_s)
        answers = iter(fails)
        rented.world.fake.fault = lambda call: (
            Fault.throttled() if call.operation == "DescribeSpotPriceHistory" and next(answers, False) else None
        )
        for wait_s in waits_s:
            status = rented.look()
            rented.world.now += wait_s
            if status.running_at is not None:
                assert rented.ledger_usd(status) >= rented.billed_usd() - 1e-9
                assert rented.counted_usd(status) >= rented.billed_usd() - 1e-9
        status = rented.driver.release("a")
        assert rented.ledger_usd(status) >= rented.billed_usd() - 1e-9


@settings(max_examples=examples(150), deadline=None)
@given(walk=WALKS, ran_s=st.floats(0.0, 9000.0), gap_s=st.floats(6.0, 9000.0))
def test_a_driver_that_comes_after_a_gap_reads_the_prices_of_the_gap(
    walk: list[tuple[int, float]], ran_s: float, gap_s: float
) -> None:
    with TemporaryDirectory() as folder:
        rented = Rented(folder, walk)
        seen = rented.look()
        rented.world.now += ran_s
        rented.driver = rented.world.driver(lease_s=1e6)
        rented.world.now += gap_s
        found = rented.look()
        hours = found.hour_prices_usd
        assert hours is not None
        assert len(hours) == int((ran_s + gap_s) // 3600.0) + 1
        assert hours[:1] == seen.hour_prices_usd
        assert rented.billed_usd() - 1e-9 <= rented.ledger_usd(found)


@pytest.mark.parametrize(("ran_s", "is_free"), [(600.0, True), (3500.0, True), (3700.0, False)])
def test_an_instance_that_is_taken_away_in_its_first_hour_is_free(ran_s: float, is_free: bool, tmp_path: Path) -> None:
    rented = Rented(str(tmp_path), [(0, 0.4)])
    rented.look()
    rented.world.now += ran_s
    (machine,) = rented.world.fake.living
    rented.world.fake.reclaim(machine.instance_id, notice_s=None)
    rented.world.now += 6.0
    status = rented.look()
    assert status.preempted
    assert (rented.ledger_usd(status) == 0.0) == is_free
    assert rented.ledger_usd(status) >= rented.billed_usd()


def test_prices_are_asked_for_once_an_hour_and_for_all_at_once(tmp_path: Path) -> None:
    rented = Rented(str(tmp_path), [(0, 0.4)])
    for name in "bcd":
        rented.driver.launch(name, "spot")
    asked = len(_histories(rented))
    for _ in range(2 * 360):
        rented.world.now += 10.0
        rented.driver.describe()
    assert len(_histories(rented)) - asked == 2


def _histories(rented: Rented) -> list[str]:
    return [call.operation for call in rented.world.fake.calls if call.operation == "DescribeSpotPriceHistory"]


@given(
    changes=st.lists(st.tuples(st.floats(0.0, 100.0), st.floats(0.1, 2.0)), max_size=10).map(sorted),
    since=st.floats(0.0, 100.0),
    lasts_s=st.floats(0.0, 50.0),
    share=st.floats(0.0, 1.0),
)
def test_no_price_in_between_is_higher(
    changes: list[tuple[float, float]], since: float, lasts_s: float, share: float
) -> None:
    found = highest(changes, since, since + lasts_s)
    at = since + share * lasts_s
    in_effect = [price for begins_at, price in changes if begins_at <= at]
    assert (found is None) == (not changes or changes[0][0] > since)
    assert found is None or found >= in_effect[-1]
