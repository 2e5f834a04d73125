"""A fake account with a clock that jumps, for tests of what is looked up and made in it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rubberband.cloud.aws.network import OwnInstance
from rubberband.spec.resources import Resources
from rubberband.values.offer import Offer, Spot
from tests.ec2 import FakeAws
from tests.ec2.policy import Statement

START_AT = 1_800_000_000.0


class Account:
    def __init__(self, *, policies: Mapping[str, Sequence[Statement] | None] | None = None, **options: Any) -> None:
        self.now = START_AT
        self.fake = FakeAws(lambda: self.now, policies=policies, **options)
        self.session = self.fake.session()
        self.bucket = next(iter(self.fake.world.buckets))

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    @property
    def vpc(self) -> str:
        return next(iter(self.fake.world.vpcs))

    @property
    def place(self) -> OwnInstance:
        """A machine in its second zone."""
        zone = self.fake.world.zones[1]
        subnet = next(one for one in self.fake.world.subnets.values() if (one.vpc_id, one.zone) == (self.vpc, zone))
        return OwnInstance(
            instance_id="i-0123456789abcdef0",
            address="172.31.16.4",
            region=self.fake.region,
            zone=zone,
            vpc=self.vpc,
            subnet=subnet.subnet_id,
        )

    def resources(self, *, aws: Mapping[str, Any] | None = None, **words: Any) -> Resources:
        """What an experiment asks for that this account can give."""
        chosen = {
            "provider": "aws",
            "instance_type": "g5.xlarge",
            "checkpoints": f"s3://{self.bucket}/tests",
            "max_instances": 4,
            "aws": {"install": "none", **(aws or {})},
        }
        return Resources(**{**chosen, **words})

    def operations(self) -> list[str]:
        return [call.operation for call in self.fake.calls]


def offer(
    instance_type: str = "g5.xlarge", gpus: int = 1, *, usd: float = 1.006, spot_usd: float | None = None
) -> Offer:
    """An offer of a type, with its prices in USD per hour."""
    spot = None if spot_usd is None else Spot(price_usd_per_hour=spot_usd, interruptions_per_hour=0.0)
    return Offer(instance_type=instance_type, gpus=gpus, price_usd_per_hour=usd, max_instances=4, spot=spot)


def boot_times(text: str) -> tuple[float, float]:
    """Return the (lease, lifetime) in seconds that a worker's UserData arms, as a simulated machine reads them.

    The lease is the longest: that of a machine which boots until it may extend it no further.
    """
    found = {name: float(value) for name, value in re.findall(r"^(LEASE_S|BOOT_S|LIFETIME_S)=(\d+)$", text, re.M)}
    return max(found["LEASE_S"], found.get("BOOT_S", 0.0)), found["LIFETIME_S"]


def started(account: Account) -> None:
    tags = [{"ResourceType": "instance", "Tags": [{"Key": "rubberband:owner", "Value": "rubberband"}]}]
    account.fake.launched("m7i.large", SubnetId=account.place.subnet, TagSpecifications=tags)
    account.sleep(60.0)
