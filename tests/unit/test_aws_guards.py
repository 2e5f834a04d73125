"""The schedules with which AWS ends what outlives driver and lease, on the fake's EventBridge Scheduler."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import CredentialRetrievalError

from rubberband.cloud.aws.fleet import SHUTDOWN_S
from rubberband.cloud.aws.guards import LEAST_SLACK_S, SLACK_S, Schedules
from rubberband.cloud.aws.handover import put_secrets
from rubberband.cloud.aws.preflight import preflight
from rubberband.cloud.aws.provider import AwsProvider
from rubberband.cloud.offers import offer as catalogue_offer
from rubberband.errors import ProviderError
from rubberband.spec.resources import Resources
from tests.builders.aws_account import Account, offer
from tests.builders.fake_ec2 import World
from tests.ec2 import FakeError, Fault

ROLE = "rubberband-guard"


def guards(world: World, begin: Callable[[Callable[[], None]], None] = lambda work: work()) -> Schedules:
    return Schedules(world.fake.session(), ROLE, clock=lambda: world.now, begin=begin)


def scheduled(world: World) -> list[str]:
    return [call.operation for call in world.fake.calls if call.service == "scheduler"]


def test_a_guest_that_never_boots_is_ended_by_aws_when_its_driver_is_dead(world: World) -> None:
    world.settings = {"boot_s": float("inf")}
    world.__post_init__()
    world.driver(guards=guards(world)).launch("a")
    (name, schedule), (machine,) = next(iter(world.fake.world.schedules.items())), world.fake.living
    assert name == f"rubberband-{machine.instance_id}"
    world.sleep(3 * 3600.0)
    assert world.fake.living == ()
    assert machine.ended_at == schedule.at
    assert schedule.at - machine.launched_at < 600.0 + 90.0 + SLACK_S + 60.0
    assert world.fake.world.schedules == {}


def test_the_document_states_the_cost_of_a_guard_beyond_max_cost() -> None:
    document = (Path(__file__).parents[2] / "docs/ec2.md").read_text(encoding="utf-8")
    found = re.search(r"up to (\d+) minutes after its lease: (\d\.\d\d) USD for each g4dn\.xlarge", document)
    assert found is not None
    minutes, usd = float(found[1]), float(found[2])
    assert minutes == math.ceil((SHUTDOWN_S + SLACK_S + 60.0) / 60.0), "a schedule runs up to a minute late"
    dear = catalogue_offer(Resources(provider="aws", instance_type="g4dn.xlarge", market="on_demand"))
    assert usd == pytest.approx(dear.price_usd_per_s * minutes * 60.0, abs=0.005)


def test_a_guard_is_moved_while_the_lease_is_renewed_and_deleted_with_the_instance(world: World) -> None:
    driver = world.driver(guards=guards(world))
    driver.launch("a")
    (machine,) = world.fake.living
    for _ in range(120):
        world.sleep(60.0)
        driver.renew_lease(world.now + 600.0)
        world.fake.extend_lease(machine.instance_id, world.now + 600.0)
        driver.describe()
        assert machine.guard_at is not None
        assert machine.guard_at >= world.now + 600.0 + LEAST_SLACK_S
    assert scheduled(world).count("CreateSchedule") == 1
    assert 5 <= scheduled(world).count("UpdateSchedule") <= 7200.0 / (SLACK_S - LEAST_SLACK_S) + 1
    driver.release("a")
    driver.describe()
    assert world.fake.world.schedules == {}


def test_the_next_driver_takes_guards_over_and_closes_without_leaving_any(world: World) -> None:
    world.driver(guards=guards(world)).launch("a")
    later = world.driver(guards=guards(world))
    world.sleep(10.0)
    later.describe()
    assert scheduled(world)[-2:] == ["CreateSchedule", "UpdateSchedule"]
    later.launch("b")
    assert len(world.fake.world.schedules) == 2
    later.close()
    assert (world.fake.world.schedules, world.fake.living) == ({}, ())


def test_a_scheduler_that_refuses_is_reported_once_and_launches_continue(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.fake.world.scheduler_roles.clear()
    driver = world.driver(guards=guards(world))
    with caplog.at_level(logging.WARNING):
        for name in "abc":
            driver.launch(name)
        for _ in range(5):
            world.sleep(61.0)
            driver.describe()
    assert len(world.fake.living) == 3
    assert [record.message for record in caplog.records if "guard" in record.message] == [caplog.records[0].message]
    assert set(scheduled(world)) == {"CreateSchedule"}
    world.fake.world.scheduler_roles.add(ROLE)
    world.sleep(61.0)
    driver.describe()
    assert len(world.fake.world.schedules) == 3, "the role was added in the middle of the run"
    driver.close()


BAD_ANSWERS = [
    *(
        FakeError(code, "No.")
        for code in (
            "ExpiredTokenException",
            "AccessDeniedException",
            "ServiceQuotaExceededException",
            "ValidationException",
            "ConflictException",
            "ThrottlingException",
        )
    ),
    CredentialRetrievalError(provider="iam-role", error_msg="no answer"),
]


def renewed(world: World, driver: AwsProvider, minutes: int) -> None:
    """A run that renews its leases each minute, whether or not EC2 answers."""
    for _ in range(minutes):
        world.sleep(60.0)
        driver.renew_lease(world.now + 600.0)
        world.beat(world.now + 600.0)
        with contextlib.suppress(ProviderError):
            driver.describe()


@pytest.mark.parametrize("error", BAD_ANSWERS, ids=lambda error: getattr(error, "code", type(error).__name__))
def test_one_bad_answer_of_the_scheduler_ends_no_healthy_instance(world: World, error: Exception) -> None:
    driver = world.driver(guards=guards(world))
    driver.launch_all("abcd")
    renewed(world, driver, 20)
    left = [Fault(error=error)]
    world.fake.fault = lambda call: left.pop() if call.service == "scheduler" and left else None
    renewed(world, driver, 60)
    assert not left
    assert len(world.fake.living) == 4
    assert all(machine.guard_at is not None and machine.guard_at > world.now for machine in world.fake.living)


@pytest.mark.parametrize("code", ["RequestLimitExceeded", "AccessDenied"])
def test_guards_move_while_ec2_describes_nothing(world: World, code: str) -> None:
    driver = world.driver(guards=guards(world))
    driver.launch_all("abcd")
    renewed(world, driver, 20)
    world.fake.fault = lambda call: (
        Fault(error=FakeError(code, "No.")) if call.operation == "DescribeInstances" else None
    )
    renewed(world, driver, 60)
    world.fake.fault = None
    renewed(world, driver, 5)
    assert len(world.fake.living) == 4


def test_the_guard_of_an_instance_that_the_next_driver_never_sees_is_moved(world: World) -> None:
    first = world.driver(guards=guards(world))
    first.launch("a")
    renewed(world, first, 5)
    world.fake.fault = lambda call: Fault.stale(1e9) if call.operation == "DescribeInstances" else None
    later = world.driver(guards=guards(world))
    renewed(world, later, 60)
    (machine,) = world.fake.living
    assert machine.guard_at is not None
    assert machine.guard_at > world.now
    assert [one.ended_at for one in later.describe()] == [None]


def test_one_instance_that_the_scheduler_refuses_keeps_no_other_from_its_guard(world: World) -> None:
    driver = world.driver(guards=guards(world))
    driver.launch_all("abcd")
    renewed(world, driver, 5)
    first = world.fake.living[0].instance_id
    world.fake.fault = lambda call: (
        Fault(error=FakeError("ValidationException", "No."))
        if call.service == "scheduler" and first in call.params["Name"]
        else None
    )
    renewed(world, driver, 60)
    assert len(world.fake.living) == 3


def test_a_guard_that_is_still_being_changed_is_moved_later(world: World) -> None:
    driver = world.driver(guards=guards(world))
    world.fake.world.schedule_settles_s = 90.0
    driver.launch("a")
    successor = world.driver(guards=guards(world))
    world.sleep(10.0)
    successor.describe()
    assert scheduled(world)[-2:] == ["CreateSchedule", "UpdateSchedule"]
    renewed(world, successor, 60)
    assert len(world.fake.living) == 1


@pytest.mark.parametrize(
    "fault", [Fault.timeout(took_effect=False), Fault(error=FakeError("ThrottlingException", "Rate exceeded"))]
)
def test_a_scheduler_that_does_not_answer_is_asked_again_a_minute_later(world: World, fault: Fault) -> None:
    world.fake.fault = lambda call: fault if call.service == "scheduler" else None
    driver = world.driver(guards=guards(world))
    driver.launch_all("ab")
    driver.launch("c")
    assert scheduled(world) == ["CreateSchedule"], "nor would it answer for the next one"
    world.fake.fault = None
    world.sleep(61.0)
    driver.describe()
    assert len(world.fake.world.schedules) == 3


def test_a_guard_that_is_not_deleted_yet_is_deleted_later(world: World) -> None:
    driver = world.driver(guards=guards(world))
    driver.launch_all("ab")
    world.fake.fault = lambda call: Fault.timeout(took_effect=False) if call.operation == "DeleteSchedule" else None
    driver.release("a")
    renewed(world, driver, 1)
    world.fake.fault = None
    renewed(world, driver, 3)
    assert len(world.fake.world.schedules) == 1


def test_nothing_waits_for_the_scheduler(world: World) -> None:
    put_off: list[Callable[[], None]] = []
    driver = world.driver(guards=guards(world, put_off.append))
    driver.launch("a")
    assert scheduled(world) == []
    for work in put_off:
        work()
    assert scheduled(world) == ["CreateSchedule"]


def test_a_schedule_runs_once_and_may_end_this_instance_alone(world: World) -> None:
    world.driver(guards=guards(world)).launch("a")
    (asked,) = (call.params for call in world.fake.calls if call.operation == "CreateSchedule")
    assert asked["ActionAfterCompletion"] == "DELETE"
    assert asked["FlexibleTimeWindow"] == {"Mode": "OFF"}
    assert asked["Target"]["RoleArn"] == "arn:aws:iam::123456789012:role/rubberband-guard"
    assert json.loads(asked["Target"]["Input"]) == {"InstanceIds": [world.fake.living[0].instance_id]}
    assert asked["Target"]["RetryPolicy"]["MaximumEventAgeInSeconds"] == 3600, "an outage may last"


def test_a_guard_ends_nothing_of_other_owners(world: World) -> None:
    world.driver().launch("a")
    (machine,) = world.fake.living
    machine.tags["rubberband:owner"] = "another"
    guards(world).tend({machine.instance_id: world.now + 100.0})
    machine.lease_until = machine.hard_stop_at = None
    world.sleep(3600.0)
    assert world.fake.living == (machine,)


@pytest.mark.parametrize("zone", ["LINT-14", "PST8PDT"])
def test_aws_is_asked_the_same_in_every_time_zone(zone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(name: str) -> list[Any]:
        monkeypatch.setenv("TZ", name)
        time.tzset()
        world = World(tmp_path / name)
        driver = world.driver(guards=guards(world))
        driver.launch("a", "spot")
        renewed(world, driver, 70)
        driver.close()
        put_secrets(world.fake.session("admin"), "rubberband", "key", "e30=", clock=lambda: world.now)
        return [(call.operation, dict(call.params) | {"ClientToken": ""}) for call in world.fake.calls]

    try:
        here, there = asked("UTC"), asked(zone)
    finally:
        monkeypatch.undo()
        time.tzset()
    assert {"CreateSchedule", "UpdateSchedule", "DescribeSpotPriceHistory", "PutParameter"} <= dict(here).keys()
    assert there == here


def test_an_account_without_the_role_is_reported_before_a_run() -> None:
    account = Account()
    account.fake.world.scheduler_roles.clear()
    notes = preflight(account.resources(), [offer()], session=account.session, place=account.place)
    (note,) = (one for one in notes if "guard" in one)
    assert "assume the role" in note
    assert "rubberband aws setup" in note
    account.fake.world.scheduler_roles.add(ROLE)
    assert not any(
        "guard" in one
        for one in preflight(account.resources(), [offer()], session=account.session, place=account.place)
    )
    assert account.fake.world.schedules == {}
