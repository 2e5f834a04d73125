"""A fake account on a clock that a test sets, and launches as the driver's policy allows them."""

from __future__ import annotations

from typing import Any

from tests.builders.aws_account import START_AT, Account

START = START_AT
TAGS = {"rubberband:owner": "rubberband", "rubberband:run": "r1"}


class Launches:
    """Launches that an account fills, and what it shows of them: `image` and the client `ec2` are the account's."""

    image: str
    ec2: Any

    def order(self, **changed: Any) -> dict[str, Any]:
        """The parameters of a launch that succeeds, unless what is changed prevents it; None leaves one out."""
        tags = [{"Key": key, "Value": value} for key, value in TAGS.items()]
        order = {
            "ImageId": self.image,
            "InstanceType": "p3.2xlarge",
            "MinCount": 1,
            "MaxCount": 1,
            "UserData": "#!/bin/bash",
            "MetadataOptions": {"HttpTokens": "required"},
            "InstanceInitiatedShutdownBehavior": "terminate",
            "TagSpecifications": [{"ResourceType": kind, "Tags": tags} for kind in ("instance", "volume")],
            **changed,
        }
        return {key: value for key, value in order.items() if value is not None}

    def launch(self, **changed: Any) -> str:
        return str(self.ec2.run_instances(**self.order(**changed))["Instances"][0]["InstanceId"])

    def look(self, **params: Any) -> list[dict[str, Any]]:
        reservations = self.ec2.describe_instances(**params)["Reservations"]
        return [instance for reservation in reservations for instance in reservation["Instances"]]

    def shown(self, instance_id: str) -> dict[str, Any]:
        return self.look(InstanceIds=[instance_id])[0]


class Rental(Launches, Account):
    """A fake account, and the driver's client of EC2."""

    def __init__(self, principal: str = "driver", **options: Any) -> None:
        super().__init__(**options)
        self.ec2 = self.fake.session(principal).client("ec2")
        images = self.fake.world.images.values()
        self.image = next(one.image_id for one in images if one.architecture == "x86_64")

    def order(self, **changed: Any) -> dict[str, Any]:
        """One with the profile of workers, which the account has."""
        return super().order(**{"IamInstanceProfile": {"Name": "rubberband-worker"}, **changed})


def spot(max_price: str | None = None) -> dict[str, Any]:
    """InstanceMarketOptions of a spot instance."""
    price = {} if max_price is None else {"MaxPrice": max_price}
    return {"MarketType": "spot", "SpotOptions": {"SpotInstanceType": "one-time", **price}}
