"""Live prices and quotas on the fake EC2: what is asked for and kept, and what stands in where AWS does not tell."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.parsers import ResponseParserError

from rubberband.cloud.aws.capacity import quota_code, quotas
from rubberband.cloud.aws.prices import ON_DEMAND_GOOD_S, SPOT_GOOD_S, live_table, prices_of
from rubberband.cloud.aws.quotes import PATIENCE_S, facts_of, fetch, on_demand_price, spot_prices
from rubberband.cloud.catalogue import catalogue
from rubberband.cloud.offers import offer, offers, price_source, spot_source
from rubberband.errors import InputError, ProviderError
from rubberband.spec.resources import Resources
from rubberband.values.plan import Market
from tests.ec2 import FakeAws, FakeCall, FakeDisconnect, FakeError, Fault
from tests.ec2.machine_types import MachineType
from tests.ec2.quota_codes import QUOTAS
from tests.ec2.quota_codes import quota_code as code_of_the_fake

START_AT = 1_800_000_000.0
REGION = "us-east-1"


class World:
    """A fake EC2 whose prices are not those of the catalogue, a clock, and a home."""

    def __init__(self, home: Path) -> None:
        self.now, self.home = START_AT, home
        self.fake = FakeAws(lambda: self.now)

    def table(self, *types: str, principal: str = "driver", refresh: bool = False, region: str = REGION) -> Any:
        return prices_of(
            types or None,
            region,
            self.home,
            session=self.fake.session(principal, region=region),
            refresh=refresh,
            clock=lambda: self.now,
        )

    def live(self, principal: str = "driver", **words: Any) -> Any:
        session = self.fake.session(principal)
        return live_table(resources(**words), self.home, session=session, clock=lambda: self.now, environment={})

    def asked(self) -> list[str]:
        """The operations since the last time, in order and each once."""
        found = list(dict.fromkeys(call.operation for call in self.fake.calls))
        self.fake.calls.clear()
        return found


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def resources(**words: Any) -> Resources:
    return Resources.model_validate({"provider": "aws", **words})


def refusing(*operations: str) -> Callable[[FakeCall], Fault | None]:
    """A role that may not call some operations."""

    def fault(call: FakeCall) -> Fault | None:
        if call.operation not in operations:
            return None
        message = f"User: arn:x is not authorized to perform: {call.service}:{call.operation} on resource: *"
        return Fault(error=FakeError("UnauthorizedOperation", message, 403))

    return fault


def test_prices_and_facts_of_aws_lie_over_the_catalogue(world: World) -> None:
    world.fake.world.machine_types = {
        name: _at_twice_the_price(machine) for name, machine in world.fake.world.machine_types.items()
    }
    table = world.table("g5.xlarge", "c7i.xlarge")
    assert table.notes == ()
    g5, old = table["g5.xlarge"], catalogue()["g5.xlarge"]
    assert g5.prices_usd_per_hour[REGION] == 2 * old.prices_usd_per_hour[REGION]
    assert g5.prices_usd_per_hour["eu-west-1"] == old.prices_usd_per_hour["eu-west-1"]
    assert (g5.gpus, g5.gpu_model, g5.vcpus) == (1, "A10G (24 GiB)", 4)
    assert set(g5.live) == {REGION}
    cpu = table["c7i.xlarge"]
    assert (cpu.gpus, cpu.vcpus, cpu.memory_gib) == (0, 4, 8)
    assert table["p5.48xlarge"] == catalogue()["p5.48xlarge"]


def _at_twice_the_price(machine: MachineType) -> MachineType:
    return replace(machine, price_usd_per_hour=2 * machine.price_usd_per_hour)


def test_the_spot_price_is_that_of_the_cheapest_zone_now(world: World) -> None:
    session = world.fake.session()
    before = spot_prices(session, ["g5.xlarge", "g6.xlarge"], world.now)
    assert set(before) == {"g5.xlarge", "g6.xlarge"}
    assert len(before["g5.xlarge"]) > 1
    world.now += 7200.0
    after = spot_prices(session, ["g5.xlarge"], world.now)
    assert after["g5.xlarge"] != before["g5.xlarge"]
    row = world.table("g5.xlarge")["g5.xlarge"]
    assert row.live_spot_usd_per_hour(REGION) == min(after["g5.xlarge"].values())
    assert row.live_spot_usd_per_hour("eu-west-1") is None


def test_a_clock_that_is_late_gets_the_latest_spot_price_all_the_same(world: World) -> None:
    world.now += 7200.0
    session = world.fake.session()
    assert spot_prices(session, ["g5.xlarge"], world.now - 7000.0) == spot_prices(session, ["g5.xlarge"], world.now)


def test_only_linux_on_shared_hardware_by_the_hour_counts(world: World) -> None:
    assert on_demand_price(world.fake.session(), "p3.8xlarge") == 12.24
    assert on_demand_price(world.fake.session(region="eu-west-1"), "p3.8xlarge") == pytest.approx(12.24 * 1.1)
    assert on_demand_price(world.fake.session(), "nothing.large") is None


def test_answers_are_kept_and_renewed_when_old(world: World) -> None:
    first = world.table("g5.xlarge")
    assert world.asked() == ["DescribeInstanceTypes", "DescribeSpotPriceHistory", "GetProducts"]
    world.now += SPOT_GOOD_S
    assert world.table("g5.xlarge") == first
    assert world.asked() == []
    world.now += 1.0
    world.table("g5.xlarge")
    assert world.asked() == ["DescribeSpotPriceHistory"]
    world.now = START_AT + ON_DEMAND_GOOD_S + 1.0
    world.table("g5.xlarge")
    assert world.asked() == ["DescribeInstanceTypes", "DescribeSpotPriceHistory", "GetProducts"]
    world.table("g5.xlarge", refresh=True)
    assert "GetProducts" in world.asked()


def test_types_that_the_region_lacks_are_not_asked_for_again(world: World) -> None:
    for _ in range(2):
        assert "g5.xlrge" not in world.table("g5.xlrge")
    assert world.asked() == ["DescribeInstanceTypes"]


def test_all_types_with_gpus(world: World) -> None:
    table = world.table()
    asked = world.fake.calls[0].params["Filters"]
    assert asked == [{"Name": "instance-type", "Values": ["g*", "p*"]}]
    live = [row for row in table.values() if REGION in row.live and row.live[REGION].offered]
    assert len(live) > 10
    assert all(row.gpus and row.live[REGION].on_demand_at == START_AT for row in live)
    gone = {name for name, row in catalogue().items() if row.gpus} - set(world.fake.world.machine_types)
    assert gone
    assert all(REGION not in table[name].prices_usd_per_hour for name in gone)
    world.asked()
    world.table()
    assert world.asked() == []
    world.now += SPOT_GOOD_S + 1.0
    world.table()
    assert world.asked() == ["DescribeSpotPriceHistory"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 2}', '{"region": "eu-west-1"}', "\0", "null"])
def test_a_broken_cache_is_ignored_and_written_anew(content: str, world: World) -> None:
    path = world.home / "prices" / f"{REGION}.json"
    path.parent.mkdir()
    path.write_text(content)
    world.table("g5.xlarge")
    assert json.loads(path.read_text())["quotes"]["g5.xlarge"]["on_demand_at"] == START_AT
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("price", [-1.0, "NaN", 1e12, "x"])
def test_a_cache_with_an_impossible_price_is_a_broken_one(price: object, world: World) -> None:
    world.table("g5.xlarge")
    path = world.home / "prices" / f"{REGION}.json"
    book = json.loads(path.read_text())
    book["quotes"]["g5.xlarge"]["on_demand_usd_per_hour"] = price
    path.write_text(json.dumps(book))
    world.asked()
    assert world.table("g5.xlarge")["g5.xlarge"].prices_usd_per_hour[REGION] == 1.006
    assert "GetProducts" in world.asked()


def test_prices_from_the_future_are_not_believed(world: World) -> None:
    world.table("g5.xlarge")
    world.now -= 3600.0
    world.asked()
    world.table("g5.xlarge")
    assert "GetProducts" in world.asked()


def test_a_home_that_cannot_be_written_to_costs_only_the_cache(world: World) -> None:
    world.home = world.home / "file" / "home"
    world.home.parent.write_text("")
    assert world.table("g5.xlarge")["g5.xlarge"].live


def test_without_credentials_the_cache_is_used_and_then_the_catalogue(world: World) -> None:
    table = world.table("g5.xlarge", principal="nobody")
    assert dict(table) == dict(catalogue())
    assert len(table.notes) == 1
    assert "there are no AWS credentials" in table.notes[0]
    found = world.table("g5.xlarge")
    world.now += 10 * ON_DEMAND_GOOD_S
    later = world.table("g5.xlarge", principal="nobody")
    assert later == found
    assert later.notes == table.notes


def test_a_refresh_that_fails_is_an_error_with_the_remedy(world: World) -> None:
    with pytest.raises(ProviderError, match=r"there are no AWS credentials .*; run `aws configure`"):
        world.table("g5.xlarge", principal="nobody", refresh=True)
    with pytest.raises(ProviderError, match="AWS does not answer"):
        world.table("g5.xlarge", region="us-easy-1", refresh=True)


def test_a_right_that_is_missing_costs_only_its_part(world: World) -> None:
    world.fake.fault = refusing("GetProducts")
    table = world.table("g5.xlarge")
    row = table["g5.xlarge"]
    assert row.live[REGION].on_demand_at is None
    assert row.prices_usd_per_hour == catalogue()["g5.xlarge"].prices_usd_per_hour
    assert row.live_spot_usd_per_hour(REGION) is not None
    assert [note.partition(";")[0] for note in table.notes] == ["arn:x may not pricing:GetProducts"]
    world.fake.fault = refusing("DescribeInstanceTypes", "DescribeSpotPriceHistory")
    world.asked()
    row = world.table("g5.xlarge")["g5.xlarge"]
    assert row.live[REGION].on_demand_at == START_AT
    assert world.asked() == ["GetProducts"]


def test_late_points_are_left_out(world: World) -> None:
    def slow(call: FakeCall) -> Fault | None:
        if call.operation == "DescribeSpotPriceHistory":
            world.now += PATIENCE_S
        return None

    world.fake.fault = slow
    answer = fetch(world.fake.session(), ["g5.xlarge"], clock=lambda: world.now)
    assert answer.quotes["g5.xlarge"].on_demand_at is None
    assert answer.quotes["g5.xlarge"].spot_at == START_AT
    assert "AWS does not answer" in answer.problems[0]


@pytest.mark.parametrize(
    "error", [FakeDisconnect("connect_timeout"), ResponseParserError("<html>"), FakeError("Unavailable", "busy", 503)]
)
def test_where_nothing_answers_nothing_more_is_asked(error: Exception, world: World) -> None:
    world.fake.fault = lambda call: Fault(error=error)
    assert len(world.table("g5.xlarge").notes) == 1
    assert world.asked() == ["DescribeInstanceTypes"]


def test_a_table_of_the_users_wins(world: World, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("instance_type,gpus,us-east-1\ng5.xlarge,1,9\n")
    table = world.live(instance_type="g5.xlarge", catalogue=str(path))
    assert table["g5.xlarge"].prices_usd_per_hour == {REGION: 9.0}
    assert world.asked() == []


def test_offers_take_live_prices_also_of_the_head(world: World) -> None:
    words: Mapping[str, Any] = {"instance_type": "g5.xlarge", "market": "spot"}
    table = world.live(**words)
    found = offer(resources(**words), table=table)
    assert found.price_usd_per_hour == 1.006
    assert found.spot is not None
    assert found.spot.price_usd_per_hour == table["g5.xlarge"].live_spot_usd_per_hour(REGION)
    assert found.head_price_usd_per_hour - found.head_side_usd_per_hour == pytest.approx(0.09576)
    assert found.head_side_usd_per_hour == pytest.approx(60 * 0.08 / 720 + 0.005)
    assert offer(resources(**words, head_price_per_hour=0), table=table).head_price_usd_per_hour == 0.0
    assert offer(resources(**{**words, "price_per_hour": 7}), table=table).price_usd_per_hour == 7.0
    at = "2027-01-15T08:00Z"
    assert price_source(resources(**words), "g5.xlarge", table=table)[1] == f"AWS, us-east-1, {at}"
    assert spot_source(resources(**words), "g5.xlarge", table=table)[1].startswith("AWS, us-east-1")
    with pytest.raises(InputError, match=r"no spot price of g5.xlarge"):
        offer(resources(**words))


def test_types_without_gpus_are_rentable_where_the_file_says_how_many_slots_they_have(world: World) -> None:
    table = world.live(instance_type="c7i.xlarge")
    with pytest.raises(InputError, match=r"c7i.xlarge has no GPUs; give slots"):
        offer(resources(instance_type="c7i.xlarge"), table=table)
    (found,) = offers(resources(instance_type="c7i.xlarge", gpus_per_instance=2), table=table)
    assert (found.gpus, found.price_usd_per_hour) == (2, 0.1785)


def test_a_type_that_the_region_lacks_is_refused(world: World) -> None:
    table = world.live(instance_type="p6-b200.48xlarge")
    with pytest.raises(InputError, match=r"AWS has no p6-b200.48xlarge in us-east-1; choose another type or r"):
        offer(resources(instance_type="p6-b200.48xlarge"), table=table)
    with pytest.raises(InputError, match=r"'g5.xlrge' is not in the catalogue; did you mean 'g5.xlarge'"):
        offer(resources(instance_type="g5.xlrge"), table=world.live(instance_type="g5.xlrge"))


def test_a_type_that_the_region_does_not_sell_on_spot_is_refused(world: World) -> None:
    words: Mapping[str, Any] = {"instance_type": "g5.xlarge", "market": "spot"}
    table = dict(world.live(**words))
    row = table["g5.xlarge"]
    table["g5.xlarge"] = replace(row, live={REGION: replace(row.live_in(REGION), spot_usd_per_hour={})})
    with pytest.raises(InputError, match=r"resources.market: AWS has no g5.xlarge on spot in us-east-1; set market"):
        offer(resources(**words), table=table)


def test_ec2s_own_description_of_its_types_is_what_the_catalogue_says() -> None:
    """moto has no prices, but ships what EC2 itself says of its types."""
    from moto.ec2.models.instance_types import INSTANCE_TYPES  # slow, and no other test here needs it

    described = [one for name, one in INSTANCE_TYPES.items() if name.startswith(("g", "p"))]
    ec2 = SimpleNamespace(describe_instance_types=lambda Filters: {"InstanceTypes": described})  # noqa: N803
    found = facts_of(SimpleNamespace(region=REGION, client=lambda _: ec2), None)
    both = catalogue().keys() & found.keys()
    assert len(both) > 40
    for name in both:
        row, facts = catalogue()[name], found[name]
        assert (row.gpus, row.vcpus, row.memory_gib) == (facts.gpus, facts.vcpus, facts.memory_gib)
        assert facts.gpu_memory_gib == pytest.approx(row.gpu_memory_gib, rel=0.07)
        assert facts.network_gbps == pytest.approx(row.network_gbps or facts.network_gbps, rel=0.1)


# Quotas

G_ON_DEMAND, G_SPOT = "L-DB2E81BA", "L-3819A6DF"


@pytest.fixture
def fake(world: World) -> FakeAws:
    return world.fake


def launch(fake: FakeAws, instance_type: str, market: Market) -> None:
    words = {"InstanceMarketOptions": {"MarketType": "spot"}} if market == "spot" else {}
    fake.launched(instance_type, **words)


def test_a_quota_of_vcpus_is_a_number_of_instances(fake: FakeAws) -> None:
    fake.world.quotas_vcpus[G_ON_DEMAND] = 20.0
    fake.world.quotas_vcpus[G_SPOT] = 0.0
    found = quotas(fake.session(), ["g5.xlarge", "g5.2xlarge"], ["on_demand", "spot"])
    assert [(one.instance_type, one.market, one.vcpus, one.instances) for one in found] == [
        ("g5.xlarge", "on_demand", 4, 5),
        ("g5.xlarge", "spot", 4, 0),
        ("g5.2xlarge", "on_demand", 8, 2),
        ("g5.2xlarge", "spot", 8, 0),
    ]


def test_running_instances_are_deducted_by_family_and_market(fake: FakeAws) -> None:
    fake.world.quotas_vcpus[G_ON_DEMAND] = 24.0
    launch(fake, "g6.2xlarge", "on_demand")
    launch(fake, "g5.2xlarge", "spot")
    launch(fake, "m7i.xlarge", "on_demand")
    on_demand, spot = quotas(fake.session(), ["g5.xlarge"], ["on_demand", "spot"])
    assert (on_demand.quota.used_vcpus, on_demand.instances) == (8.0, 4)
    assert spot.quota.used_vcpus == 8.0
    for instance in fake.living:
        fake.session("admin").client("ec2").terminate_instances(InstanceIds=[instance.instance_id])
    assert quotas(fake.session(), ["g5.xlarge"], ["on_demand"])[0].instances == 6


def test_the_refusal_names_the_quota_and_how_to_raise_it(fake: FakeAws) -> None:
    fake.world.quotas_vcpus[G_ON_DEMAND] = 2.0
    (room,) = quotas(fake.session(), ["g5.xlarge"], ["on_demand"])
    assert room.refusal(16) == (
        "no quota for g5.xlarge on demand in us-east-1: it has 4 vCPUs, and 'Running On-Demand G and VT instances' "
        "(L-DB2E81BA) allows 2, 0 in use; end running instances, or request more: aws service-quotas "
        "request-service-quota-increase --service-code ec2 --quota-code L-DB2E81BA --desired-value 64 --region "
        "us-east-1"
    )
    used = replace(room, quota=replace(room.quota, used_vcpus=None))
    assert "use not known" in used.note()


def test_types_and_families_that_are_not_known_have_no_room(fake: FakeAws) -> None:
    assert quotas(fake.session(), ["nothing.large", "g5.nothing"], ["on_demand"]) == ()
    assert quota_code("p6-b200.48xlarge", "spot") is None
    assert quota_code("", "spot") is None


@pytest.mark.parametrize("market", ["on_demand", "spot"])
@pytest.mark.parametrize(
    "family", ["g4dn", "g5", "g5g", "gr6", "g6e", "p3", "p3dn", "p4d", "p5", "p5en", "m7i", "c7g", "t3", "trn1", "inf2"]
)
def test_every_family_counts_against_its_own_quota(family: str, market: Market) -> None:
    found = quota_code(f"{family}.xlarge", market)
    assert found is not None
    code, name = found
    assert code == code_of_the_fake(family, "spot" if market == "spot" else "on-demand")
    assert QUOTAS[code] == name


@pytest.mark.parametrize(
    ("code", "answer"), [("NoSuchResourceException", "default"), ("AccessDeniedException", "refused")]
)
def test_a_quota_that_cannot_be_read(code: str, answer: str, fake: FakeAws) -> None:
    def fault(call: FakeCall) -> Fault | None:
        message = "User: arn:x is not authorized to perform: servicequotas:GetServiceQuota"
        return Fault(error=FakeError(code, message)) if call.operation == "GetServiceQuota" else None

    fake.fault = fault
    if answer == "refused":
        with pytest.raises(ProviderError, match="may not servicequotas:GetServiceQuota; attach the policy"):
            quotas(fake.session(), ["g5.xlarge"], ["on_demand"])
    else:
        (room,) = quotas(fake.session(), ["g5.xlarge"], ["on_demand"])
        assert room.quota.code == G_ON_DEMAND


def test_a_role_that_may_not_see_what_runs_still_sees_its_quotas(fake: FakeAws) -> None:
    def fault(call: FakeCall) -> Fault | None:
        return Fault(error=FakeError("UnauthorizedOperation", "no", 403)) if "Instances" in call.operation else None

    fake.fault = fault
    (room,) = quotas(fake.session(), ["g5.xlarge"], ["on_demand"])
    assert room.quota.used_vcpus is None
    assert room.instances == 768 // 4
