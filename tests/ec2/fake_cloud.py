"""A whole AWS on this computer, for tests and for trying a run: the server, and machines that are real processes."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rubberband.spec.account import Remembered, remember
from tests.ec2.core import FakeAws
from tests.ec2.machine import Machines
from tests.ec2.principals import BUCKET
from tests.ec2.server import DRIVER, SECRET_KEY, FakeServer, access_key

_NEAR = ("127.0.0.1", "localhost")


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeCloud:
    """What runs while the context lasts."""

    fake: FakeAws
    machines: Machines
    server: FakeServer
    environment: dict[str, str]
    """For a driver's process, in the VPC; its credentials come from its machine's metadata service."""

    def outside(self, principal: str = "admin") -> dict[str, str]:
        """For a process outside the VPC, without metadata, which has the keys of `principal` (`driver`, `worker`,
        `admin`)."""
        return {
            **self.environment,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": f"{self.server.url}/no-such-machine",
            "AWS_ACCESS_KEY_ID": access_key(principal),
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        }


@contextlib.contextmanager
def fake_cloud(directory: Path, *, fake: FakeAws | None = None, boot_s: float = 0.0) -> Iterator[FakeCloud]:
    """AWS with its machines and its S3, which has BUCKET, under `directory`, an absolute path, until the block ends.

    `fake` must be on the real clock; by default, one whose instances run at once. `boot_s`: from running to the start
    of UserData. At the end every machine is ended, and what it cost stays in `fake.bill()`.
    """
    fake = fake or FakeAws(time.time, pending_s=0.0, shutting_down_s=0.0)
    with FakeServer(fake, directory / "s3") as server:
        fake.world.buckets[BUCKET] = fake.world.new_bucket(BUCKET)
        remember(directory / "home", Remembered(bucket=BUCKET, region=fake.region))
        machines = Machines(
            fake,
            directory / "machines",
            environment=lambda instance_id: {**_endpoints(server, instance_id), **_device()},
            boot_s=boot_s,
        )
        machines.start()
        try:
            yield FakeCloud(
                fake=fake, machines=machines, server=server, environment=_driver_environment(server, directory)
            )
        finally:
            machines.close()


def _endpoints(server: FakeServer, machine: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": server.url,
        "AWS_EC2_METADATA_SERVICE_ENDPOINT": server.metadata_url(machine),
        # One try of a second is too short where all machines share this one's cores.
        "AWS_METADATA_SERVICE_NUM_ATTEMPTS": "10",
        "AWS_METADATA_SERVICE_TIMEOUT": "5",
    }


def _device() -> dict[str, str]:
    return {"RUBBERBAND_DEVICE": os.environ.get("RUBBERBAND_DEVICE", "cpu")}


def _driver_environment(server: FakeServer, directory: Path) -> dict[str, str]:
    """This process's, less whatever could lead to a real account or mix the fake with the real."""
    nowhere = str(directory / "no-such-file")
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("AWS_")},
        **_endpoints(server, DRIVER),
        "AWS_DEFAULT_REGION": server.fake.region,
        "AWS_REGION": server.fake.region,
        **_device(),
        "AWS_CONFIG_FILE": nowhere,
        "AWS_SHARED_CREDENTIALS_FILE": nowhere,
        "RUBBERBAND_HOME": str(directory / "home"),
        **{name: ",".join(filter(None, [os.environ.get(name), *_NEAR])) for name in ("NO_PROXY", "no_proxy")},
    }
