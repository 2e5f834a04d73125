"""AWS through boto3: one region, the credentials of the environment (or of this machine's role), few retries; and
instances, their types and their ends as EC2 describes them.

EC2 throttles launches, terminations and describe calls separately. Each kind has its own client here, so a throttled
launch never delays a termination. (botocore's adaptive mode slows down every call of a throttled client: a termination
behind 16 launches took 30 s and more.)
"""

from __future__ import annotations

import getpass
import re
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from typing import Any

import boto3
import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ReadTimeoutError

import rubberband
from rubberband.cloud.aws.calls import OWNER_TAG, AwsSession, tags_in
from rubberband.cloud.aws.errors import FAILURES, explain, in_one_line
from rubberband.cloud.aws.prices import TypeFacts
from rubberband.cloud.provider import LEASE_EXPIRED
from rubberband.errors import InputError, ProviderError
from rubberband.units import nearest, shown

ALIVE = ("pending", "running", "stopping", "stopped")
"""States in which an instance costs money, or may again."""

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
                except (BotoCoreError, ValueError, OSError) as error:  # also of a wrong address, or of a program
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


def type_facts(session: AwsSession, instance_type: str, key: str = "resources.instance_type") -> TypeFacts:
    """Return the facts of a type. Raises InputError, naming near ones, for an unknown type; botocore's errors."""
    for one in described_types(session, [instance_type]):
        return facts_in(one)
    known = [one["InstanceType"] for one in described_types(session, ["*"])]
    raise InputError(
        f"{key}: EC2 has no type {shown(instance_type)} in {session.region}; {nearest(instance_type, sorted(known))}"
    )


def facts_in(described: Any) -> TypeFacts:
    """Return the facts of a type as `describe_instance_types` shows it."""
    gpus, network = described.get("GpuInfo", {}).get("Gpus", ()), described.get("NetworkInfo", {})
    memory_mib = next((float(gpu["MemoryInfo"]["SizeInMiB"]) for gpu in gpus if "MemoryInfo" in gpu), None)
    return TypeFacts(
        instance_type=described["InstanceType"],
        gpus=sum(int(gpu["Count"]) for gpu in gpus),
        gpu=str(gpus[0].get("Name", "")) if gpus else "",
        gpu_memory_gib=None if memory_mib is None else round(memory_mib / 1024, 1),
        vcpus=int(described["VCpuInfo"]["DefaultVCpus"]),
        memory_gib=round(float(described["MemoryInfo"]["SizeInMiB"]) / 1024, 1),
        network_gbps=_sustained_gbps(network),
        architectures=tuple(described.get("ProcessorInfo", {}).get("SupportedArchitectures", ())),
        clusters="cluster" in described.get("PlacementGroupInfo", {}).get("SupportedStrategies", ()),
        efa_cards=_efa_cards(network) if gpus else (),
    )


_WHOLE = re.compile(r"(\d+(?:\.\d+)?) Gigabit")


def _sustained_gbps(network: Any) -> float | None:
    # `50 Gigabit` is sustained; for `Up to 10 Gigabit` the baseline of its cards is.
    whole = _WHOLE.fullmatch(network.get("NetworkPerformance", ""))
    if whole is not None:
        return float(whole.group(1))
    cards = network.get("NetworkCards", ())
    return round(sum(float(card.get("BaselineBandwidthInGbps", 0.0)) for card in cards), 3) or None


def _efa_cards(network: Mapping[str, Any]) -> tuple[int, ...]:
    if not network.get("EfaSupported"):
        return ()
    cards = sorted(network.get("NetworkCards", ()), key=lambda card: int(card["NetworkCardIndex"]))
    if any("InterfaceTypes" in card for card in cards):
        cards = [card for card in cards if "efa-only" in card.get("InterfaceTypes", ())]
    else:  # as boto3 before 1.43 shows them; where one has no adapter, it is the first
        cards = cards[-int(network.get("EfaInfo", {}).get("MaximumEfaInterfaces", 1)) :]
    return tuple(int(card["NetworkCardIndex"]) for card in cards)


_BY_A_CALL = "Client.UserInitiatedShutdown"
_BY_ITSELF = "Client.InstanceInitiatedShutdown"
_SOLD_OUT = ("Server.InsufficientInstanceCapacity", "Client.VolumeLimitExceeded")
_KEYS = ("Client.InternalError", "Client.InvalidKMSKey")
"""Codes of an instance whose volume EC2 cannot encrypt or open with a key of KMS."""
_NEVER_RAN = (*_SOLD_OUT, "Client.InvalidSnapshot", *_KEYS)
_KEY_REMEDY = (
    "if the account encrypts volumes with a key of its own (EC2 > EBS encryption), attach "
    "rubberband/cloud/aws/policies/kms.json to your own role for a head, to the head's role for workers; for spot, "
    "give the key to AWSServiceRoleForEC2Spot (rubberband/cloud/aws/policies/README.md, Keys of KMS)"
)
_TRANSITION = re.compile(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (?:GMT|UTC)\)")


def launched_at(machine: Mapping[str, Any]) -> float | None:
    """Return the Unix time of the accepted launch, to the second. Billing begins later, with `running`."""
    found = machine.get("LaunchTime")
    return found.timestamp() if isinstance(found, datetime) else None


def transition_at(machine: Mapping[str, Any]) -> float | None:
    """Return when a requested termination began, to the second (rounded down); None if EC2 does not show it."""
    found = _TRANSITION.search(machine.get("StateTransitionReason", "") or "")
    if found is None:
        return None
    return datetime.strptime(found.group(1), "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).timestamp()


def never_ran(machine: Mapping[str, Any]) -> bool:
    """Return whether the launch failed after it had been accepted: that costs nothing."""
    return _code(machine).startswith(_NEVER_RAN)


def sold_out(machine: Mapping[str, Any]) -> bool:
    """Return whether EC2 accepted the launch and had no room for the instance, or the account none for its volume."""
    return _code(machine).startswith(_SOLD_OUT)


def taken_back(machine: Mapping[str, Any]) -> bool:
    """Return whether EC2 interrupted a spot instance."""
    return _code(machine).startswith("Server.Spot")


def ended_by_a_call(machine: Mapping[str, Any]) -> bool:
    """Return whether a call, of this driver or another user, terminated it."""
    return _code(machine) in ("", _BY_A_CALL)


def why(machine: Mapping[str, Any], *, lease_over: bool) -> str:
    """Return why it ended without this driver. `lease_over`: whether its lease had expired by then."""
    code = _code(machine)
    said = machine.get("StateReason", {}).get("Message", "") or machine.get("StateTransitionReason", "")
    if taken_back(machine):
        return "EC2 took the spot instance back"
    if code == _BY_ITSELF and lease_over:
        return LEASE_EXPIRED
    if code == _BY_ITSELF:
        return (
            "it powered itself off: its lease expired, its boot script failed, or Ray ended there; see `aws ec2 "
            f"get-console-output --latest --instance-id {machine['InstanceId']}`"
        )
    if code == _BY_A_CALL:
        return "terminated by another user or process, or by its guard while AWS refused to move that"
    return f"EC2 ended it ({said or 'no reason given'}){_key_remedy(code)}"


def why_not_started(machine: Mapping[str, Any]) -> str:
    """Return EC2's reason why an instance ended before it ran, with the remedy."""
    code = _code(machine)
    said = machine.get("StateReason", {}).get("Message", "") or "no reason given"
    return f"{said}{_key_remedy(code) or '; try again'}"


def _key_remedy(code: str) -> str:
    return f"; {_KEY_REMEDY}" if code.startswith(_KEYS) else ""


def _code(machine: Mapping[str, Any]) -> str:
    return str(machine.get("StateReason", {}).get("Code", ""))


# Why an instance powered itself off, by its boot script's output on the console. For messages only, never a condition.


_STEP = re.compile(r"rubberband: \d\d:\d\d:\d\d (?P<step>.*)")
_ENDING, _JOINING, _LEASE = "ending", "joining ", "rubberband: the lease has ended"
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|\r")
_LONGEST = 200


def why_ended(session: AwsSession, machine: Mapping[str, Any], *, lease_over: bool) -> str:
    """Return why it ended without this driver, by its console if it powered itself off early, else by `why`."""
    early = _code(machine) == _BY_ITSELF and not lease_over
    words = last_words(output(session, machine["InstanceId"])) if early else ""
    return words or why(machine, lease_over=lease_over)


def output(session: AwsSession, instance_id: str) -> str:
    """Return the console's output as far as EC2 has it; empty where the role may not read it."""
    with suppress(*FAILURES):
        return str(session.client("ec2").get_console_output(InstanceId=instance_id, Latest=True).get("Output") or "")
    return ""


def last_words(console: str) -> str:
    """Return the step at which the boot script ended, and its last output; empty if the console shows none."""
    lines, steps = _steps_in(console)
    if any(line.endswith(_LEASE) for line in lines):
        return LEASE_EXPIRED
    if len(steps) < 2 or steps[-1][1] != _ENDING:
        return ""
    (begun, step), (ended, _) = steps[-2:]
    said = next((line for line in reversed(lines[begun + 1 : ended]) if line), "it said nothing")
    what = "Ray ended there" if step.startswith(_JOINING) else f"its boot script failed at `{_short(step)}`"
    return f"it powered itself off: {what}: {_short(said)}"


def current_step(console: str) -> str:
    """Return the step of the boot script, and its last output; empty if the console shows none."""
    lines, steps = _steps_in(console)
    if not steps:
        return ""
    begun, step = steps[-1]
    said = next((f": {_short(line)}" for line in reversed(lines[begun + 1 :]) if line), "")
    return f"its boot script is at `{_short(step)}`{said}"


def _steps_in(console: str) -> tuple[list[str], list[tuple[int, str]]]:
    """Return the console's lines, and (index of its line, text) of each step."""
    lines = [_ESCAPES.sub("", line).strip() for line in console.splitlines()]
    return lines, [(index, found["step"]) for index, line in enumerate(lines) if (found := _STEP.search(line))]


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
