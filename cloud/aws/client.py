"""AWS through boto3: one region, the credentials of the environment (or of this machine's role), few retries.

EC2 throttles launches, terminations and describe calls separately. Each kind has its own client here, so a throttled
launch never delays a termination. (botocore's adaptive mode slows down every call of a throttled client: a termination
behind 16 launches took 30 s and more.)
"""

from __future__ import annotations

import getpass
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import boto3
import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ReadTimeoutError

import rubberband
from rubberband.cloud.aws.calls import OWNER_TAG, AwsSession, tags_in
from rubberband.cloud.aws.errors import FAILURES, explain, in_one_line, settings_error
from rubberband.cloud.aws.states import ALIVE
from rubberband.errors import InputError, ProviderError
from rubberband.units import nearest, shown

_ATTEMPTS = 5
_ATTEMPTS_TO_END = 3
"""A launch is tried once: the launcher itself retries, with the same token. botocore would also retry refusals (a zone
without capacity answers 500), and each retry costs one of two launches a second."""
_CONNECT_S, _READ_S = 5.0, 20.0
_CONNECTIONS = 32
"""Per client: parallel launches share one."""


class BotoSession:
    """Implements `rubberband.cloud.aws.calls.AwsSession` with boto3. Thread-safe, as its clients are."""

    def __init__(self, region: str) -> None:
        """Raises InputError if the environment's AWS settings contradict each other."""
        self.region = region
        self._mutex = threading.Lock()
        self._clients: dict[str, Any] = {}
        with in_one_line():
            self._boto = boto3.session.Session(region_name=region)
            roles = self._boto._session.get_component("credential_provider").get_provider("assume-role")
            roles._prompter = _code_of_a_device

    def client(self, service: str) -> Any:
        """Return the client of a service, always the same one. Raises InputError if this region cannot have one."""
        with self._mutex:
            if service not in self._clients:
                try:
                    self._clients[service] = self._ec2() if service == "ec2" else self._made(service, _ATTEMPTS)
                except BotoCoreError as error:
                    raise InputError(explain(error)) from error
                except (ValueError, OSError) as error:  # a wrong address, or a program of the profile
                    raise InputError(settings_error(error)) from error
            return self._clients[service]

    def _made(self, service: str, attempts: int) -> Any:
        config = Config(
            connect_timeout=_CONNECT_S,
            read_timeout=_READ_S,
            retries={"mode": "standard", "total_max_attempts": attempts},
            max_pool_connections=_CONNECTIONS,
            user_agent_extra=f"rubberband/{rubberband.__version__}",
        )
        home = "us-east-1" if service in ("pricing", "freetier") else None  # these are not in every region
        return self._boto.client(service, region_name=home, config=config)

    def _ec2(self) -> Any:
        """Return the client of describe calls; launches and terminations go through clients of their own."""
        ec2 = self._made("ec2", _ATTEMPTS)
        launch, dry_run = self._made("ec2", 1).run_instances, ec2.run_instances
        ec2.run_instances = lambda **words: (dry_run if words.get("DryRun") else launch)(**words)
        ec2.terminate_instances = self._made("ec2", _ATTEMPTS_TO_END).terminate_instances
        return ec2


def _code_of_a_device(question: str) -> str:
    """Ask for the code of the second factor. Raises InputError without a terminal."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", getpass.GetPassWarning)
        try:
            return getpass.getpass(question)
        except (EOFError, getpass.GetPassWarning):
            raise InputError(
                f"AWS wants a code here ({question.strip(': ')}), and this is no terminal; run this in one, or take "
                "credentials that need no code (`aws sts get-session-token`)"
            ) from None


def open_session(region: str) -> BotoSession:
    """Open AWS in `region`, with the environment's AWS_ENDPOINT_URL, AWS_PROFILE and so on. It makes no call yet.

    Raises InputError if a setting is wrong (a missing profile, an unknown region).
    """
    return BotoSession(region)


MOST_PAGES = 1000
"""A longer listing repeats itself."""


def pages(
    operation: Callable[..., Any], key: str, *, in_time: Callable[[], bool] = lambda: True, **words: Any
) -> Iterator[Any]:
    """Yield all that an operation lists under `key`, page after page.

    Raises the operation's errors, and ReadTimeoutError (as botocore does for a late page) once `in_time` is false.
    botocore's own paginators know no limit for all pages together.
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


def described_types(
    session: AwsSession, names: Sequence[str], *, in_time: Callable[[], bool] = lambda: True
) -> Iterator[Any]:
    """Yield the instance types of these names (`*` fits any), as far as EC2 knows them. Raises botocore's errors."""
    named = [{"Name": "instance-type", "Values": list(names)}]
    return pages(session.client("ec2").describe_instance_types, "InstanceTypes", in_time=in_time, Filters=named)


def instances(session: AwsSession, wanted: list[dict[str, Any]], *states: str) -> list[Any]:
    """Return the instances that pass the filters, in any of `states`. Raises botocore's errors."""
    if states:
        wanted = [*wanted, {"Name": "instance-state-name", "Values": list(states)}]
    reservations = pages(session.client("ec2").describe_instances, "Reservations", Filters=wanted)
    return [machine for reservation in reservations for machine in reservation["Instances"]]


def age(machine: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the key by which instances sort, the oldest first."""
    return machine["LaunchTime"], machine["InstanceId"]


def described(session: AwsSession, wanted: list[dict[str, Any]], *states: str) -> list[dict[str, Any]]:
    """Return the same as `instances`. Raises ProviderError if EC2 does not answer."""
    try:
        return instances(session, wanted, *states)
    except FAILURES as error:
        raise ProviderError(f"EC2 does not list the instances: {explain(error)}") from error


def account_of(session: AwsSession) -> str:
    """Return the number of the account whose credentials these are. Raises InputError."""
    with in_one_line():
        return str(session.client("sts").get_caller_identity()["Account"])


def other_owners(session: AwsSession, owner: str) -> Counter[str]:
    """Return how many instances that are not terminated each other owner has in the region. Raises InputError."""
    with in_one_line():
        found = instances(session, [{"Name": "tag-key", "Values": [OWNER_TAG]}], *ALIVE)
    owners = Counter(tags_in(one).get(OWNER_TAG, "") for one in found)
    del owners[owner]
    return owners


def check_region(region: str) -> None:
    """Raise InputError, naming near ones, unless the installed boto3 knows the region."""
    with in_one_line():
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
