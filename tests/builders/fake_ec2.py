"""AwsProvider on the fake EC2, in virtual time: nothing sleeps, and a sleep of the provider's lets time pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rubberband.cloud.aws.calls import Machines, NodeStart, name_in
from rubberband.cloud.aws.provider import AwsProvider
from rubberband.cloud.provider import Head, InstanceDescription
from rubberband.values.offer import Offer
from tests.builders.aws_account import boot_times, offer
from tests.ec2 import FakeAws, FakeCall, Fault

START_AT = 1_800_000_000.0
ZONES = ("us-east-1a", "us-east-1b")
ONE_GPU = (offer("g5.xlarge", usd=1.006, spot_usd=0.42),)


class Killed(BaseException):
    """The driver is killed."""


@dataclass
class StubHead:
    """A Ray head that is just there, until it is not."""

    lives: bool = True
    address: str = "10.0.0.1:6379"
    until: float = 0.0
    closed: int = 0

    def living(self) -> Head | None:
        return Head(address=self.address, temp_dir=None, environment={}) if self.lives else None

    def ensure(self) -> Head:
        self.lives = True
        head = self.living()
        assert head is not None
        return head

    def renew_lease(self, until: float) -> None:
        self.until = until

    def close(self) -> None:
        self.lives = False
        self.closed += 1


def boot_script(start: NodeStart) -> str:
    """A UserData that says what the fake needs to know."""
    return (
        f"#!/bin/bash\nINSTANCES=({' '.join(start.instances)})\nHEAD_ADDRESS={start.head_address}\nGPUS={start.gpus}\n"
        f"LEASE_S={start.lease_s:.0f}\nBOOT_S={start.boot_s:.0f}\nLIFETIME_S={start.lifetime_s:.0f}\n"
    )


def machines_of(fake: FakeAws, *, profile: str = "rubberband-worker", zones: Sequence[str] = ZONES) -> Machines:
    """Machines on one of the account's images, in the default VPC's subnets and default group."""
    world = fake.world
    image = next(one for one in world.images.values() if one.architecture == "x86_64")
    subnets = {one.zone: one.subnet_id for one in world.subnets.values() if one.default}
    return Machines(
        image=image.image_id,
        subnets={zone: subnets[zone] for zone in zones},
        security_group=next(iter(world.groups)),
        instance_profile=profile,
        key_name=None,
        owner="rubberband",
        volume_gb=None,
        root_device=image.root_device,
        user_data=boot_script,
    )


@dataclass
class World:
    """A fake account, its clock, and the drivers that come and go."""

    directory: Path
    now: float = START_AT
    offers: Sequence[Offer] = ONE_GPU
    settings: dict[str, Any] = field(default_factory=dict)
    """Of FakeAws."""
    experiment: str = "digits"
    run: str = "run-1"

    def __post_init__(self) -> None:
        self.fake = FakeAws(lambda: self.now, reads=boot_times, **self.settings)
        self.machines = machines_of(self.fake)
        self.head = StubHead()

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def driver(self, **changes: Any) -> AwsProvider:
        words: dict[str, Any] = {
            "run": self.run,
            "offers": self.offers,
            "gpus": 1,
            "clock": lambda: self.now,
            "sleep": self.sleep,
        }
        session = self.fake.session("driver")
        return AwsProvider(self.experiment, self.directory, session, self.machines, self.head, **{**words, **changes})

    @property
    def living(self) -> list[str]:
        return sorted(name_in(instance.tags, instance.launch_index) for instance in self.fake.living)

    def look(self, provider: AwsProvider) -> dict[str, InstanceDescription]:
        """Name -> what the provider shows, after a fresh look at EC2."""
        self.sleep(provider.look_s)
        return {status.instance: status for status in provider.describe()}

    def beat(self, until: float) -> None:
        for instance in self.fake.living:
            self.fake.extend_lease(instance.instance_id, until)


def asked(world: World) -> list[FakeCall]:
    return [call for call in world.fake.calls if call.operation == "RunInstances"]


def once(operation: str, fault: Fault) -> Callable[[FakeCall], Fault | None]:
    """A hook: the first call of this kind meets the fault."""
    left = [fault]
    return lambda call: left.pop() if call.operation == operation and left else None
