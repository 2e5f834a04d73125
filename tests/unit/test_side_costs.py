"""Volumes, addresses and NAT: lines of the estimate, of the ledger and of what EC2 bills, and the same in all three."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rubberband.cloud.aws.extras import side_costs, side_prices
from rubberband.cloud.aws.quotes import side_facts, with_side_facts
from rubberband.cloud.catalogue import LiveTable, SideFacts, catalogue
from rubberband.cloud.offers import offer
from rubberband.executor import Controller, bill_lines, bill_usd, replay, summarise
from rubberband.planner.estimates import estimate_plan
from rubberband.planner.problem import Problem
from rubberband.planning import assumptions
from rubberband.spec.resources import Resources
from rubberband.values.offer import BillLine, SideCost
from rubberband.values.plan import PlanningConstraints
from rubberband.views.charts.spending import spending
from rubberband.views.estimate.tables import covers
from tests.builders.aws_account import Account, started
from tests.ec2.policy import statements
from tests.harness.crash_cases import STAGES, job_of, undisturbed
from tests.harness.crash_story import Story

LINES = {"root volumes": "volume", "public IPv4 addresses": "address"}


def usd(lines: tuple[BillLine, ...]) -> dict[str, float]:
    return {line.line: line.usd for line in lines}


def all_private(account: Account, **words: Any) -> None:
    subnets = account.fake.world.subnets
    subnets.update({name: replace(one, public=False, **words) for name, one in subnets.items()})


@pytest.mark.parametrize("markets", ["on_demand", "spot"])
def test_the_estimate_the_ledger_and_ec2_agree_line_by_line(tmp_path: Path, markets: str) -> None:
    point = undisturbed(markets, "roomy")
    story = Story(point=point, here=str(tmp_path))
    story.world.fake.world.spot.swing = 0.2
    story.tell()
    assert story.ended == "done"
    controller = Controller(story.job)
    replay(controller, story.journal)
    job, state = story.job, controller.state
    story.world.sleep(120.0)
    billed = story.world.fake.bill()
    ledger = usd(bill_lines(state, story.world.clock.now()))
    problem = Problem(brackets=[STAGES], offer=job.offer, profile=job.profile, constraints=PlanningConstraints())
    predicted = usd(assumptions.bill_lines(estimate_plan(problem, job.plan, "digits")))

    assert sum(ledger.values()) == pytest.approx(bill_usd(state, story.world.clock.now()))
    assert ledger.keys() == predicted.keys() == {"instances", *LINES}
    rates = {cost.line: cost.usd_per_hour for cost in job.offer.side_costs}
    for line, kind in LINES.items():
        paid_usd, minute_usd = billed.side_usd(kind), len(billed.lines) * rates[line] / 60.0
        assert paid_usd <= ledger[line] <= paid_usd + minute_usd
        assert predicted[line] == pytest.approx(paid_usd, abs=minute_usd)
    assert ledger["instances"] == pytest.approx(billed.rent_usd, rel=0.1)
    assert predicted["instances"] == pytest.approx(billed.rent_usd, rel=0.3)


def test_the_lines_of_an_estimate_add_up_to_its_cost_and_are_the_prices_times_hours() -> None:
    job = job_of("spot", "roomy")
    free = replace(job.offer, side_costs=())
    dear = replace(free, side_costs=(SideCost(line="a", usd_per_hour=2.0), SideCost(line="b", usd_once=0.5)))
    problem = Problem(brackets=[STAGES], offer=dear, profile=job.profile, constraints=PlanningConstraints())
    found = estimate_plan(problem, job.plan, "digits")
    lines = usd(assumptions.bill_lines(found))
    assert found.prediction is not None
    alone = estimate_plan(replace(problem, offer=free), job.plan, "digits").prediction
    assert alone is not None
    assert sum(lines.values()) == pytest.approx(found.prediction.cost_usd)
    assert lines["instances"] == pytest.approx(alone.cost_usd, rel=1e-3)
    assert lines["b"] >= 2 * 0.5


def test_the_bill_over_time_ends_at_the_bill(tmp_path: Path) -> None:
    story = Story(point=undisturbed("spot", "roomy"), here=str(tmp_path))
    story.tell()
    controller = Controller(story.job)
    replay(controller, story.journal)
    setup = {"configurations": [{} for _ in controller.state.trials]}
    result = summarise(controller.state, setup, story.world.clock.now())
    assert spending(result).amount[-1] == pytest.approx(result.actual_cost_usd)
    assert sum(line.usd for line in result.bill) == pytest.approx(result.actual_cost_usd)


def test_without_asking_aws_a_new_account_is_assumed() -> None:
    found = offer(Resources(provider="aws", instance_type="g5.xlarge"))
    assert [cost.line for cost in found.side_costs] == list(LINES)
    assert found.side_usd_per_hour == pytest.approx(75 * 0.08 / 720 + 0.005)
    assert found.price_usd_per_s * 3600 == pytest.approx(found.price_usd_per_hour + found.side_usd_per_hour)
    assert "root volumes (0.0083 USD/h each)" in covers(found)
    larger = offer(Resources(provider="aws", instance_type="g5.xlarge", aws={"volume_gb": 500}))
    assert larger.side_usd_per_hour == pytest.approx(500 * 0.08 / 720 + 0.005)
    assert offer(Resources(provider="virtual", instance_type="g5.xlarge")).side_costs == ()


def test_a_region_that_the_table_lacks_is_taken_at_the_dearest() -> None:
    every = [side_prices(region).volume_usd_per_gb_month for region in ("us-east-1", "eu-central-1", "sa-east-1")]
    assert side_prices("mars-north-1").volume_usd_per_gb_month == max(every)


def test_the_account_is_inspected(account: Account) -> None:
    resources = account.resources(aws={"volume_gb": 120})
    found = side_facts(account.session, resources, "g5.xlarge")
    assert found == SideFacts(volume_gb=120, public_address=True, nat=False, installed=False)


def test_all_volumes_of_an_image_are_in_the_line_that_ec2_bills(account: Account) -> None:
    images = account.fake.world.images
    images.update({name: replace(one, lasting_disks=("/dev/sdf", "/dev/sdg")) for name, one in images.items()})
    image = next(one for one in images.values() if one.architecture == "x86_64")
    resources = account.resources(instance_type="m7i.large", aws={"image": image.image_id})

    costs = side_costs(resources, side_facts(account.session, resources, "m7i.large"), gpus=False)
    started(account)
    account.sleep(3600.0 - 60.0)

    assert costs[0].usd_per_hour == pytest.approx(account.fake.bill().side_usd("volume"))


@pytest.mark.parametrize(("endpoint", "passed_gb"), [(False, 14.0), (True, 4.0)])
def test_behind_nat_the_downloads_are_a_line_and_there_is_no_address(
    account: Account, endpoint: bool, passed_gb: float
) -> None:
    all_private(account, s3_endpoint=endpoint)
    resources = account.resources(dataset_gb=10, aws={"install": "scikit-learn"})
    table = with_side_facts(LiveTable(catalogue()), account.session, resources)
    found = {cost.line: cost for cost in offer(resources, table=table).side_costs}
    assert found.keys() == {"root volumes", "NAT gateway (estimated)"}
    assert found["NAT gateway (estimated)"].usd_once == pytest.approx(passed_gb * 0.045)
    assert table.notes == ()


def test_where_route_tables_may_not_be_seen_a_note_says_what_is_assumed(account: Account) -> None:
    all_private(account)
    allowed: Mapping[str, Any] = {
        "Version": "2012-10-17",
        "Statement": [
            {"Effect": "Allow", "Action": "*", "Resource": "*"},
            {"Effect": "Deny", "Action": "ec2:DescribeRouteTables", "Resource": "*"},
        ],
    }
    account.fake.policies["driver"] = statements(dict(allowed))
    table = with_side_facts(LiveTable(catalogue()), account.session, account.resources())
    (note,) = table.notes
    assert "no NAT gateway" in note
    assert "ec2:DescribeRouteTables" in note
    assert [cost.line for cost in offer(account.resources(), table=table).side_costs] == list(LINES)


def test_functions_have_none() -> None:
    found = offer(Resources(provider="aws", instance_type="g5.xlarge", billing="per_function"))
    assert found.side_costs == ()
    assert side_costs(Resources(), None, gpus=False)[0].usd_per_hour == pytest.approx(60 * 0.08 / 720)


@pytest.mark.parametrize("provider", ["local", "virtual"])
def test_a_given_price_of_volume_and_address_counts_at_every_provider(provider: str) -> None:
    given = {"provider": provider, "gpus_per_instance": 1, "price_per_hour": 1.0}
    assert offer(Resources(**given)).side_usd_per_hour == 0.0
    assert offer(Resources(**given, side_price_per_hour=0.5)).side_usd_per_hour == 0.5
