"""What the console of an instance that powered itself off is taken to say."""

from __future__ import annotations

from typing import Any

import pytest

from rubberband.cloud.aws import client
from tests.builders.aws_account import Account
from tests.ec2 import Fault
from tests.ec2.faults import FakeError

SETUP = """
rubberband: 18:14:22 i-001 boots
rubberband: 18:14:22 setup: pip install nothing
Looking in indexes: https://packages.example.org/simple
\x1b[31mERROR: No matching distribution found for nothing\x1b[0m\r

rubberband: 18:14:25 ending
18:14:25 the system is going down for poweroff now
"""


@pytest.mark.parametrize(
    ("shown", "told"),
    [
        (
            SETUP,
            "it powered itself off: its boot script failed at `setup: pip install nothing`: "
            "ERROR: No matching distribution found for nothing",
        ),
        (
            "[ 1.2] bash[7]: rubberband: 18:14:22 joining 10.0.0.1:1 as i-001\nno route\nrubberband: 18:14:25 ending",
            "it powered itself off: Ray ended there: no route",
        ),
        (
            "rubberband: 18:14:22 setup: false\nrubberband: 18:14:22 ending",
            "it powered itself off: its boot script failed at `setup: false`: it said nothing",
        ),
        ("rubberband: 18:14:22 joining x as i-001\nrubberband: the lease has ended\n", "lease expired"),
        ("rubberband: 18:14:22 setup: false\n", ""),
        ("rubberband: 18:14:22 ending", ""),
        ("", ""),
    ],
)
def test_the_last_words_name_the_step_and_what_it_said(shown: str, told: str) -> None:
    assert client.last_words(shown) == told


def machine_of(account: Account) -> dict[str, Any]:
    ec2 = account.fake.session("admin").client("ec2")
    image = next(iter(account.fake.world.images))
    tags = [{"Key": "rubberband:owner", "Value": "rubberband"}]
    answer = ec2.run_instances(
        ImageId=image,
        InstanceType="g5.xlarge",
        MinCount=1,
        MaxCount=1,
        InstanceInitiatedShutdownBehavior="terminate",
        TagSpecifications=[{"ResourceType": "instance", "Tags": tags}],
    )
    instance_id = answer["Instances"][0]["InstanceId"]
    account.sleep(60)
    account.fake.power_off(instance_id)
    shown: dict[str, Any] = ec2.describe_instances(InstanceIds=[instance_id])["Reservations"][0]["Instances"][0]
    return shown


def test_the_driver_reads_the_console_of_what_powered_itself_off() -> None:
    account = Account()
    machine = machine_of(account)
    account.fake.world.console = lambda _: SETUP
    assert "`setup: pip install nothing`" in client.why_ended(account.session, machine, lease_over=False)
    assert client.why_ended(account.session, machine, lease_over=True) == "lease expired"


@pytest.mark.parametrize("code", ["UnauthorizedOperation", "InternalError", "UnsupportedOperation"])
def test_where_the_console_cannot_be_read_the_command_that_shows_it_is_reported(code: str) -> None:
    account = Account()
    machine = machine_of(account)
    account.fake.fault = lambda call: (
        Fault(error=FakeError(code, "no", 400)) if call.operation == "GetConsoleOutput" else None
    )
    why = client.why_ended(account.session, machine, lease_over=False)
    assert f"get-console-output --latest --instance-id {machine['InstanceId']}" in why


def test_a_type_that_cannot_show_the_latest_shows_what_it_has() -> None:
    account = Account()
    machine = machine_of(account)
    account.fake.world.console = lambda _: SETUP
    account.fake.fault = lambda call: (
        Fault(error=FakeError("UnsupportedOperation", "no", 400)) if call.params.get("Latest") else None
    )
    assert "No matching distribution" in client.why_ended(account.session, machine, lease_over=False)


@pytest.mark.parametrize(
    ("shown", "told"),
    [
        ("", ""),
        ("Linux boots\n", ""),
        ("rubberband: 01:02:03 i-001 boots\n", "its boot script is at `i-001 boots`"),
        (
            "rubberband: 01:02:03 i-001 boots\nrubberband: 01:02:04 setup: sleep 1000\nwaits for the disk\n\n",
            "its boot script is at `setup: sleep 1000`: waits for the disk",
        ),
    ],
)
def test_a_boot_step_that_takes_too_long_is_named(shown: str, told: str) -> None:
    assert client.current_step(shown) == told
