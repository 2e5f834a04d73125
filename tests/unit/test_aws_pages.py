"""AWS may show fewer than there are, and a token for the rest: no listing ends with its first page."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rubberband.cloud.aws import capacity
from rubberband.cloud.aws.capacity import quotas
from rubberband.cloud.aws.cleanup import living
from rubberband.cloud.aws.network import choose_subnets, delete_groups, ensure_group, zones_of
from rubberband.cloud.aws.quotes import on_demand_price, spot_prices
from tests.builders.aws_account import Account, started
from tests.ec2 import filters


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> Account:
    account = Account()
    account.session = account.fake.session("admin")
    for _ in range(2):
        started(account)
    monkeypatch.setattr(filters, "shown_at_once", 1)
    return account


def test_all_zones_and_their_subnets_and_prices_are_found(account: Account) -> None:
    zones = zones_of(account.session, "g5.xlarge")
    assert len(zones) > 1
    assert set(choose_subnets(account.session, (), "g5.xlarge", None)[1]) == set(zones)
    assert set(spot_prices(account.session, ["g5.xlarge"], account.now)["g5.xlarge"]) == set(zones)
    assert on_demand_price(account.session, "g5.xlarge") == pytest.approx(1.006)


def test_all_instances_count_in_a_quota_and_are_ended(account: Account) -> None:
    (room,) = quotas(account.session, ["m7i.large"], ["on_demand"])
    assert room.quota.used_vcpus == 4.0
    assert len(living(account.session, "rubberband")) == 2


def test_the_groups_of_all_networks_are_deleted(account: Account) -> None:
    world = account.fake.world
    world.vpcs["vpc-2"] = replace(world.vpcs[account.vpc], vpc_id="vpc-2", default=False)
    groups = {ensure_group(account.session, "team", vpc) for vpc in world.vpcs}
    assert len(groups) == 2
    assert set(delete_groups(account.session, "team")[0]) == groups


def test_the_cheapest_block_may_be_on_the_last_page(account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    found = capacity.cheapest_block(account.session, "p5.48xlarge", 1, 3600.0)
    monkeypatch.setattr(filters, "shown_at_once", filters.PAGE)
    assert found is not None
    assert found == capacity.cheapest_block(account.session, "p5.48xlarge", 1, 3600.0)
