"""Launches where EC2 throttles, and what they do to ends: `python -m tests.bench.bench_ec2_limits [N ...]`.

AwsProvider asks through HTTP, by boto3 with the package's own session, the fake EC2 under the limits that AWS
documents: RunInstances in a burst of 5 and then 2 a second, each taking a second; Describe* and TerminateInstances by
their own buckets. N instances (4, 16, 32) are asked for at once, each from a thread of its own as a run does, where
only the last of six zones has any; meanwhile one of the instances that were there before is released every 2 s. Then
32 are asked for and every launch is throttled: after 20 s of that, three instances are released. All seconds are real
ones, of this machine. What it was before a change: the same command at the commit before.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rubberband.cloud.aws.client import open_session
from rubberband.cloud.aws.provider import AwsProvider
from rubberband.errors import ProviderError
from tests.builders.aws_account import offer
from tests.builders.fake_ec2 import Standing, machines_of
from tests.ec2 import FakeAws
from tests.ec2.limits import Limits, Rate
from tests.ec2.server import DRIVER, SECRET_KEY, FakeServer, access_key

TYPE = offer("c7i.xlarge", usd=0.1785)
"""Every zone of us-east-1 offers it."""
BEFORE = 12
"""Instances that are there before, and are released one by one."""
EVERY_S = 2.0
THROTTLED_S = 20.0


@contextmanager
def _provider() -> Iterator[tuple[FakeAws, AwsProvider]]:
    """On an account with `BEFORE` instances, which sells more in its last zone only."""
    with tempfile.TemporaryDirectory() as folder:
        fake = FakeAws(time.time, pending_s=2.0, shutting_down_s=1.0)
        fake.world.quotas_vcpus = dict.fromkeys(fake.world.quotas_vcpus, 1e6)
        with FakeServer(fake, Path(folder) / "s3") as server:
            os.environ |= {
                "AWS_ENDPOINT_URL": server.url,
                "AWS_ACCESS_KEY_ID": access_key(DRIVER),
                "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
                "AWS_EC2_METADATA_DISABLED": "true",
            }
            provider = AwsProvider(
                "bench",
                Path(folder) / "instances",
                open_session(fake.region),
                machines_of(fake, zones=fake.world.zones),
                Standing(),
                run="run-1",
                offers=[TYPE],
                gpus=1,
                lease_s=3600.0,
            )
            for index in range(BEFORE):
                provider.launch(f"before-{index}")
            for zone in fake.world.zones[:-1]:
                fake.set_capacity(0, zone=zone)
            provider.describe()
            yield fake, provider


def _launch(provider: AwsProvider, count: int) -> list[threading.Thread]:
    def launch(name: str) -> None:
        with suppress(ProviderError):
            provider.launch(name)

    threads = [threading.Thread(target=launch, args=(f"new-{index}",), daemon=True) for index in range(count)]
    for thread in threads:
        thread.start()
    return threads


class _Ends:
    """Releases the instances that were there before, one after the other, while in the block."""

    def __init__(self, provider: AwsProvider, most: int = BEFORE) -> None:
        self._provider, self._most = provider, most
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.took_s: list[float] = []

    def _run(self) -> None:
        for index in range(self._most):
            if self._over.wait(EVERY_S):
                return
            began_at = time.monotonic()
            self._provider.release(f"before-{index}")
            self.took_s.append(time.monotonic() - began_at)

    def __enter__(self) -> _Ends:
        self._thread.start()
        return self

    def join(self) -> None:
        """Wait until all are released."""
        self._thread.join()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def __str__(self) -> str:
        return f"{len(self.took_s)} released meanwhile, the slowest in {max(self.took_s, default=0.0):.2f} s"


def launched(count: int) -> str:
    """What it takes to buy `count` instances of the last zone."""
    with _provider() as (fake, provider):
        fake.limits = Limits()
        seen, began_at = len(fake.calls), time.monotonic()
        with _Ends(provider) as ends:
            for thread in _launch(provider, count):
                thread.join()
            took_s = time.monotonic() - began_at
        asked = [call for call in fake.calls[seen:] if call.operation == "RunInstances"]
        throttled = sum(call.outcome == "RequestLimitExceeded" for call in asked)
        bought = sum(one.zone == fake.world.zones[-1] for one in fake.living)
        return (
            f"{count:3} instances: {bought} bought after {took_s:.1f} s by {len(asked)} requests, {throttled} of them "
            f"throttled; {ends}"
        )


def throttled_for_good(count: int) -> str:
    """What releases take while no launch is let in."""
    with _provider() as (fake, provider):
        fake.limits = Limits()
        fake.limits.requests["RunInstances"] = Rate(0, 0)
        threads = _launch(provider, count)
        time.sleep(THROTTLED_S)
        with _Ends(provider, most=3) as ends:
            ends.join()
        fake.limits = None
        for zone in fake.world.zones:
            fake.set_capacity(None, zone=zone)
        for thread in threads:
            thread.join()
        return f"{count:3} instances, every launch throttled: {ends}"


def main() -> None:
    """Print a line for each number of instances."""
    for count in [int(word) for word in sys.argv[1:]] or [4, 16, 32]:
        print(launched(count), flush=True)
    print(throttled_for_good(32), flush=True)


if __name__ == "__main__":
    main()
