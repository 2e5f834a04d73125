"""How fast EC2 may be asked, as AWS documents it ("Request throttling for the Amazon EC2 API"), and how long it takes.

Each operation of EC2 has a bucket of request tokens of its own; launches and ends also pay a token for each instance.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.ec2.faults import FakeError
from tests.ec2.world import ACCOUNT


class Rate(NamedTuple):
    most: float
    """Tokens that it holds when it is full."""
    refill_per_s: float


LOOKING = Rate(100, 20)
UNFILTERED = Rate(50, 10)
"""Of listings that ask for neither a filter nor pages."""
CHANGING = Rate(50, 5)
REQUESTS: Mapping[str, Rate] = {
    "RunInstances": Rate(5, 2),
    "TerminateInstances": Rate(100, 5),
    "CreateTags": Rate(100, 10),
}
INSTANCES: Mapping[str, Rate] = {"RunInstances": Rate(1000, 2), "TerminateInstances": Rate(1000, 20)}
_LOOKS = ("Describe", "Get", "List", "Search")
_LISTINGS = ("DescribeInstances", "DescribeSecurityGroups")
"""Of those that have a smaller bucket where they are asked for everything, what the fake has."""
LATENCY_S: Mapping[str, float] = {"RunInstances": 1.0}


@dataclass(slots=True, kw_only=True)
class _Bucket:
    tokens: float
    at: float


@dataclass(slots=True, kw_only=True)
class Limits:
    """EC2's, for one account in one region; its rates may be changed at any time. Other services
    have none."""

    requests: dict[str, Rate] = field(default_factory=lambda: dict(REQUESTS))
    """Operation -> the rate of its requests; the others have that of their kind."""
    instances: dict[str, Rate] = field(default_factory=lambda: dict(INSTANCES))
    """Operation -> the rate of the instances that it launches or ends."""
    latency_s: dict[str, float] = field(default_factory=lambda: dict(LATENCY_S))
    """Operation -> until it is carried out, where it is not throttled."""
    sleep: Callable[[float], None] = time.sleep
    buckets: dict[str, _Bucket] = field(default_factory=dict)

    def refusal(self, service: str, operation: str, params: Mapping[str, Any], now: float) -> FakeError | None:
        """What a request is answered with that comes too soon; else None, and its tokens are gone."""
        if service != "ec2":
            return None
        name, rate = self._kind(operation, params)
        due = [("request", self._filled(name, rate, now), 1)]
        if operation in self.instances:
            filled = self._filled(f"instances of {operation}", self.instances[operation], now)
            due.append(("resource", filled, _instances(params)))
        for kind, bucket, tokens in due:
            if bucket.tokens < tokens:
                message = (
                    f"Request limit exceeded. Account {ACCOUNT} has been throttled on ec2:{operation} because it "
                    f"exceeded its {kind} rate limit."
                )
                return FakeError("RequestLimitExceeded", message, 503)
        for _, bucket, tokens in due:
            bucket.tokens -= tokens
        return None

    def wait(self, service: str, operation: str) -> None:
        if service == "ec2" and operation in self.latency_s:
            self.sleep(self.latency_s[operation])

    def _kind(self, operation: str, params: Mapping[str, Any]) -> tuple[str, Rate]:
        """The bucket that a request pays from, and its rate."""
        if operation in self.requests:
            return operation, self.requests[operation]
        if operation in _LISTINGS and not {"Filters", "MaxResults"} & params.keys():
            return f"{operation} of everything", UNFILTERED
        return operation, LOOKING if operation.startswith(_LOOKS) else CHANGING

    def _filled(self, name: str, rate: Rate, now: float) -> _Bucket:
        """A bucket as it is by now; full at first."""
        bucket = self.buckets.setdefault(name, _Bucket(tokens=rate.most, at=now))
        bucket.tokens = min(rate.most, bucket.tokens + max(0.0, now - bucket.at) * rate.refill_per_s)
        bucket.at = now
        return bucket


def _instances(params: Mapping[str, Any]) -> int:
    return int(params.get("MaxCount", 0)) or len(params.get("InstanceIds", ()))
