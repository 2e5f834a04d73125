"""AWS as boto3 reaches it: one region, the credentials of the environment (or of this machine's role), few retries.

EC2 counts launches, ends and looks apart, and so do their clients here, each with its own connections: whatever
launches come to, an end is asked for at once. (botocore's adaptive mode slows down every call of a client that was
throttled: 30 s and more for an end behind 16 launches.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import boto3
import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ReadTimeoutError

import rubberband
from rubberband.cloud.aws.calls import AwsSession
from rubberband.cloud.aws.errors import FAILURES, explain
from rubberband.errors import InputError, ProviderError
from rubberband.units import nearest, shown

_ATTEMPTS = 5
_ATTEMPTS_TO_END = 3
"""Of a launch there is one: who launches asks again, with the same token. botocore would repeat refusals as well (that
a zone has no capacity is a 500), and each costs one of two launches a second."""
_CONNECT_S, _READ_S = 5.0, 20.0
_CONNECTIONS = 32
"""At once: as many launches as run in parallel share a client."""


class BotoSession:
    """A `rubberband.cloud.aws.calls.Session` of boto3. Safe to use from several threads, as its clients are."""

    def __init__(self, region: str) -> None:
        """Raises InputError if the environment's settings of AWS do not hold together."""
        self._region = region
        self._mutex = threading.Lock()
        self._clients: dict[str, Any] = {}
        try:
            self._boto = boto3.session.Session(region_name=region)
        except BotoCoreError as error:
            raise InputError(explain(error)) from error

    @property
    def region(self) -> str:
        """Such as `us-east-1`."""
        return self._region

    def client(self, service: str) -> Any:
        """The client of a service, always the same one. Raises InputError if there cannot be one in this region."""
        with self._mutex:
            if service not in self._clients:
                try:
                    self._clients[service] = self._ec2() if service == "ec2" else self._made(service, _ATTEMPTS)
                except (BotoCoreError, ValueError) as error:
                    raise InputError(explain(error)) from error
            return self._clients[service]

    def _made(self, service: str, attempts: int) -> Any:
        config = Config(
            connect_timeout=_CONNECT_S,
            read_timeout=_READ_S,
            retries={"mode": "standard", "total_max_attempts": attempts},
            max_pool_connections=_CONNECTIONS,
            user_agent_extra=f"rubberband/{rubberband.__version__}",
        )
        return self._boto.client(service, region_name=_home(service), config=config)

    def _ec2(self) -> Any:
        """The client that looks; its launches and ends go through clients of their own."""
        ec2 = self._made("ec2", _ATTEMPTS)
        launch, dry_run = self._made("ec2", 1).run_instances, ec2.run_instances
        ec2.run_instances = lambda **words: (dry_run if words.get("DryRun") else launch)(**words)
        ec2.terminate_instances = self._made("ec2", _ATTEMPTS_TO_END).terminate_instances
        return ec2


def _home(service: str) -> str | None:
    """The region of a service that is not in every one; None: the session's."""
    return "us-east-1" if service == "pricing" else None


def open_session(region: str) -> BotoSession:
    """AWS in `region`; the environment's AWS_ENDPOINT_URL, AWS_PROFILE and so on hold. It makes no call yet.

    Raises InputError if the settings do not hold together (a profile that is not there, no such region's name).
    """
    return BotoSession(region)


# Answers of AWS that come in pages, as one stream; it stops where its time is up, however many pages are left.


MOST_PAGES = 1000
"""A listing that is longer goes in circles."""


def pages(
    operation: Callable[..., Any], key: str, *, in_time: Callable[[], bool] = lambda: True, **words: Any
) -> Iterator[Any]:
    """What an operation lists under `key`, page after page.

    Raises ReadTimeoutError (which botocore raises for a single page that is late) once `in_time` is false, and what
    the operation raises.
    """
    token = None
    for _ in range(MOST_PAGES):
        if not in_time():
            break
        answer = operation(**words, **({"NextToken": token} if token else {}))
        yield from answer.get(key, ())
        token = answer.get("NextToken")
        if not token:
            return
    raise ReadTimeoutError(endpoint_url=f"the rest of {key}")


def described(session: AwsSession, wanted: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The instances that pass the filters. Raises ProviderError if EC2 does not answer."""
    try:
        reservations = pages(session.client("ec2").describe_instances, "Reservations", Filters=wanted)
        return [machine for reservation in reservations for machine in reservation["Instances"]]
    except FAILURES as error:
        raise ProviderError(f"EC2 does not list the instances: {explain(error)}") from error


# The regions of EC2, as far as the installed boto3 knows them; nothing is asked of AWS.


def check_region(region: str) -> None:
    """Raise InputError, naming near ones, unless boto3 knows the region."""
    known = _known()
    if region not in known:
        raise InputError(
            f"resources.region: {shown(region)} is not a region of EC2 (a new one needs a newer boto3); "
            f"{nearest(region, known)}"
        )


@cache
def _known() -> tuple[str, ...]:
    session = botocore.session.get_session()
    return tuple(
        name
        for partition in session.get_available_partitions()
        for name in session.get_available_regions("ec2", partition_name=partition)
    )
