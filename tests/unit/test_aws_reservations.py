"""Capacity that the user has reserved: what is launched in it, what it costs, and what is refused before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rubberband.cloud.aws import calls, capacity, preflight
from rubberband.cloud.aws.boot import resolve
from rubberband.cloud.aws.calls import Reservation
from rubberband.cloud.aws.preflight import preflight as checked
from rubberband.cloud.offers import offers
from rubberband.errors import InputError, NoCapacityError
from rubberband.planning import prices_and_quotas
from rubberband.planning.feasible import PlanningOptions
from rubberband.planning.prices_and_quotas import answer, live_prices_and_quotas
from rubberband.pools import process as pools
from rubberband.spec.experiment import Experiment
from rubberband.spec.pool import PoolFile, PoolFolder, on_pool
from rubberband.spec.resources import Aws
from rubberband.values.profile import Profile
from tests.builders.aws_account import START_AT, Account, offer
from tests.builders.fake_ec2 import World, asked
from tests.ec2 import world as ec2

NAME = "cr-0a1b2c3d4e5f60718"
DAY_S = 86_400.0


@pytest.fixture
def account(off_ec2: Path, monkeypatch: pytest.MonkeyPatch) -> Account:
    account = Account()
    for module in (prices_and_quotas, preflight):
        monkeypatch.setattr(module.time, "time", lambda: account.now)
    monkeypatch.setattr(calls, "open_aws", lambda region: account.session)
    return account


def reserve(world: ec2.World, **words: Any) -> ec2.Reservation:
    chosen = {"instance_type": "g5.xlarge", "zone": "us-east-1b", "instances": 4, "kind": "capacity-block"}
    chosen |= {"begins_at": START_AT - 60.0, "ends_at": START_AT + DAY_S}
    found = ec2.Reservation(reservation_id=NAME, **{**chosen, **words})
    world.reservations[NAME] = found
    return found


def held(**words: Any) -> Reservation:
    one = Reservation(
        reservation_id=NAME,
        zone="us-east-1b",
        instances=2,
        is_block=True,
        state="active",
        begins_at=START_AT,
        ends_at=START_AT + DAY_S,
    )
    return replace(one, **words)


@pytest.mark.parametrize("kind", ["default", "capacity-block"])
def test_instances_run_in_the_reservation_and_no_more_than_it_has(tmp_path: Path, kind: str) -> None:
    world = World(tmp_path)
    reserve(world.fake.world, kind=kind, instances=2, ends_at=START_AT + 7200.0)
    world.fake.world.quotas_vcpus = dict.fromkeys(world.fake.world.quotas_vcpus, 0.0)
    subnet = {"us-east-1b": world.machines.subnets["us-east-1b"]}
    world.machines = replace(world.machines, reservation=held(is_block=kind == "capacity-block"), subnets=subnet)
    driver = world.driver(together=True)
    failed = driver.launch_all(["a", "b", "c"])
    assert world.living == ["a", "b"]
    assert {one.reservation for one in world.fake.living} == {NAME}
    assert {type(error) for error in failed.values()} == {NoCapacityError}
    assert {status.zone for status in world.look(driver).values()} == {"us-east-1b"}
    assert not any("Placement" in call.params for call in asked(world))
    world.sleep(60.0)
    world.beat(world.now + 7200.0)
    world.sleep(3600.0)
    assert (world.fake.bill().rent_usd == 0.0) == (kind == "capacity-block")
    assert len(world.living) == 2
    world.sleep(1860.0)
    assert (world.living == []) == (kind == "capacity-block"), "EC2 ends them with the block"


def test_machines_have_the_reservations_subnet_alone_and_builders_are_not_in_it(account: Account) -> None:
    reserve(account.fake.world)
    words = Aws(install="none", reservation=NAME)
    machines = resolve(account.session, words, "g5.xlarge", place=account.place)
    assert list(machines.subnets) == ["us-east-1b"]
    assert machines.reservation == held(instances=4, begins_at=START_AT - 60.0)
    assert resolve(account.session, words, "g5.xlarge", place=account.place, builds=True).reservation is None


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ({"instance_type": "g4dn.xlarge"}, rf"{NAME} is of g4dn.xlarge, and g5.xlarge is asked for"),
        ({"instances": 2}, r"max_instances: 4 are more than the 2 instances of"),
        ({"begins_at": START_AT + 3600.0}, r"begins at 2027-01-15 09:00 UTC; start then"),
        ({"ends_at": START_AT - 10.0}, r"is expired; name one that is active"),
        ({"ends_at": START_AT + 600.0}, r"ends its instances since"),
        ({"zone": "us-east-1e"}, r"is in us-east-1e, and the subnets are in"),
        (None, rf"'{NAME}' does not exist\); correct resources\.aws\.reservation"),
    ],
)
def test_a_reservation_that_does_not_fit_is_refused_before_anything_is_rented(
    account: Account, words: dict[str, Any] | None, text: str
) -> None:
    if words is not None:
        reserve(account.fake.world, **words)
    resources = account.resources(aws={"reservation": NAME})
    with pytest.raises(InputError, match=text):
        checked(resources, [offer()], session=account.session, place=account.place)
    assert not [call for call in account.fake.calls if call.operation == "RunInstances" and call.took_effect]


def test_a_reservation_passes_the_checks_with_no_quota_left(account: Account) -> None:
    reserve(account.fake.world)
    account.fake.world.quotas_vcpus = dict.fromkeys(account.fake.world.quotas_vcpus, 0.0)
    notes = checked(
        account.resources(aws={"reservation": NAME}), [offer()], session=account.session, place=account.place
    )
    assert f"EC2 ends the instances of {NAME} at 2027-01-16 07:30 UTC, in 23h30m" in notes


def team(account: Account, **words: Any) -> PoolFile:
    asked = {"name": "team", "provider": "aws", "instance_type": "g5.xlarge", "instances": 4, "max_usd_per_hour": 5}
    asked |= {"checkpoints": f"s3://{account.bucket}/team", "aws": {"install": "none", "reservation": NAME}}
    return PoolFile(**{**asked, **words})


def brought_up(account: Account, home: Path, monkeypatch: pytest.MonkeyPatch, **words: Any) -> Path:
    monkeypatch.setattr(pools.RemotePool, "ensure_broker", lambda self: None)
    monkeypatch.setattr(preflight, "own_place", lambda: account.place)
    return pools.bring_up(team(account, **words), home).path


def test_a_pool_in_a_block_costs_its_volumes_and_is_no_larger_than_it(
    account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve(account.fake.world)
    with pytest.raises(InputError, match=r"^instances: 5 are more than the 4 instances of .*; lower it to 4"):
        brought_up(account, tmp_path, monkeypatch, instances=5)
    with pytest.raises(ValidationError, match="spot instances are not launched in a reservation"):
        team(account, market="spot")
    pool = PoolFile(**PoolFolder(path=brought_up(account, tmp_path, monkeypatch)).read())
    limits = pools.limits_of(pool, pools.offer(pools.resources_of(pool)))
    assert pool.price_usd_per_hour == 0.0
    assert limits.instances == 4
    assert 0.0 < limits.price_usd_per_hour == limits.side_usd_per_hour < 0.1


@pytest.mark.parametrize("kind", ["default", "capacity-block"])
def test_an_experiment_in_a_pool_ends_before_the_pools_reservation(
    account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    reserve(account.fake.world, kind=kind)
    path = brought_up(account, tmp_path, monkeypatch)

    def asked(**words: Any) -> Experiment:
        own = experiment(account).model_dump(mode="json", by_alias=True, exclude_unset=True)
        limits = {"max_cost": 50, **words}
        return Experiment(**on_pool({**own, "resources": {"pool": str(path)}, "constraints": limits}, tmp_path))

    what = "ends the instances" if kind == "capacity-block" else "launches no more instances"
    for found in (
        live_prices_and_quotas,
        lambda found, home: prices_and_quotas.cloud_prices_and_quotas(found, home, lambda note: None),
    ):
        with pytest.raises(InputError, match=rf"EC2 {what}.* before constraints\.deadline; set an earlier deadline"):
            found(asked(deadline="25h"), tmp_path)
        with pytest.raises(InputError, match=r"constraints\.deadline is missing; set one before that"):
            found(asked(), tmp_path)
    assert any(f"EC2 {what}" in note for note in live_prices_and_quotas(asked(deadline="20h"), tmp_path).notes)


@pytest.mark.parametrize(
    "words", [{"market": "spot"}, {"instance_types": ["g5.xlarge", "g4dn.xlarge"], "instance_type": None}]
)
def test_spot_and_several_types_do_not_go_with_a_reservation(account: Account, words: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="reservation"):
        account.resources(aws={"reservation": NAME}, **words)


def experiment(account: Account, **words: Any) -> Experiment:
    resources = account.resources(**words).model_dump(mode="json", by_alias=True, exclude_unset=True)
    return Experiment(
        name="digits",
        search={
            "space": {"lr": [0.1, 0.2]},
            "scheduler": {"type": "stages", "stages": [{"trials": 8, "iterations": 10}]},
            "metric": "loss",
            "mode": "min",
        },
        constraints={"deadline": "20h", "max_cost": 5000},
        resources=resources,
    )


PROFILE = Profile(seconds_per_iteration={1: 600.0, 2: 300.0, 4: 150.0, 8: 80.0})


def notes_of(account: Account, home: Path, **words: Any) -> tuple[str, ...]:
    asked = experiment(account, **words)
    return answer(
        asked, PROFILE, live_prices_and_quotas(asked, home), PlanningOptions(now=account.now, clock=lambda: 0.0)
    ).notes


def test_a_plan_names_the_price_and_the_window_of_a_block_beside_on_demand(account: Account, tmp_path: Path) -> None:
    notes = notes_of(account, tmp_path, instance_type="p5.48xlarge", max_instances=2)
    (note,) = [one for one in notes if "a capacity block" in one]
    assert "a capacity block of 1 day with" in note
    assert "from 2027-01-18 11:30 UTC in us-east-1a" in note, "the cheapest, not the next"
    assert note.startswith("on demand the instances cost ")
    assert f"costs {31.464 * 24:.2f} USD" in note or f"costs {31.464 * 48:,.2f} USD" in note
    assert not any("capacity block" in one for one in notes_of(account, tmp_path))
    assert "PurchaseCapacityBlock" not in account.operations()


def test_the_rent_in_a_block_is_paid_and_its_end_bounds_the_deadline(account: Account, tmp_path: Path) -> None:
    block = reserve(account.fake.world)
    found = experiment(account, aws={"reservation": NAME})
    ours = live_prices_and_quotas(found, tmp_path)
    (priced,) = offers(found.resources, table=ours.table)
    assert (priced.price_usd_per_hour, bool(priced.side_usd_per_hour)) == (0.0, True)
    estimate = answer(found, PROFILE, ours, PlanningOptions(now=account.now, clock=lambda: 0.0))
    assert estimate.estimate.feasible
    assert "instances" not in {line.line for line in estimate.bill}
    assert any(f"the rent in {NAME} counts as 0" in note for note in estimate.notes)
    reserve(account.fake.world, kind="default")
    (usual,) = offers(found.resources, table=live_prices_and_quotas(found, tmp_path).table)
    assert usual.price_usd_per_hour > 1.0
    account.fake.world.reservations[NAME] = replace(block, ends_at=START_AT + 20.2 * 3600.0)
    with pytest.raises(InputError, match=r"before constraints\.deadline; set an earlier deadline"):
        live_prices_and_quotas(found, tmp_path)


def test_blocks_last_days_or_weeks_and_have_certain_sizes(account: Account) -> None:
    for hours, days in ((1, 1), (23.6, 2), (13 * 24 + 2, 14), (15 * 24, 21)):
        found = capacity.cheapest_block(account.session, "p5.48xlarge", 3, hours * 3600.0)
        assert found is not None
        assert (found.instances, found.duration_s) == (4, days * DAY_S)
    assert capacity.cheapest_block(account.session, "g5.xlarge", 1, 60.0) is None
    account.fake.world.block_currency = "CNY"
    assert capacity.cheapest_block(account.session, "p5.48xlarge", 3, 3600.0) is None, "a bill is in USD"
    assert capacity.cheapest_block(account.session, "p5.48xlarge", 65, 60.0) is None
    assert capacity.cheapest_block(account.session, "p5en.48xlarge", 1, 60.0) is None, "not sold here"
