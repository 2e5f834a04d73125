"""The head that `rubberband up` starts: an instance in the VPC from which `run` works as on any machine, until `down`.

There is one for each owner and region. It has no lease: nothing of a run depends on who watches it, and instances that
it rented end with their own leases. It stops itself (its disk, with the journals, stays) when nothing has run on it for
`resources.aws.head_idle`. Whoever runs `up` needs the rights of the driver and `iam:PassRole` on the head's
role.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import ClientError

from rubberband.cloud.aws.boot import head_script
from rubberband.cloud.aws.calls import OWNER_TAG, ROLE_TAG, AwsSession, Role, bursts, by_tags, changed_disks
from rubberband.cloud.aws.client import pages
from rubberband.cloud.aws.errors import FAILURES, code_of, verdict
from rubberband.cloud.aws.images import find_image, root_volume_gb, type_facts
from rubberband.cloud.aws.metadata import OwnInstance, own_place
from rubberband.cloud.aws.network import choose_subnets
from rubberband.cloud.aws.preflight import refused_launch
from rubberband.cloud.aws.resolving import in_one_line, security_group, what_to_install
from rubberband.cloud.aws.s3 import is_bucket, put
from rubberband.cloud.steady import elapsed_s
from rubberband.errors import InputError, ProviderError
from rubberband.spec.resources import Resources

_LOOK_S = 3.0
_RUNNING_S = 600.0
"""A machine that is not running after this time never will be."""
_MOST_HEADS = 100
_PAUSES_S = (1.0, 2.0, 4.0, 8.0)
_LIVING = ("pending", "running")
_STOPPED = ("stopping", "stopped")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadInstance:
    """The head as EC2 shows it."""

    instance_id: str
    instance_type: str
    zone: str
    started: bool
    """Whether it was started just now, rather than found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    """How time passes while EC2 works."""

    clock: Callable[[], float]
    sleep: Callable[[float], None]


def ensure_head(
    session: AwsSession,
    resources: Resources,
    *,
    folders: Sequence[str] = (),
    place: OwnInstance | None = None,
    clock: Callable[[], float] = elapsed_s,
    sleep: Callable[[float], None] = time.sleep,
) -> HeadInstance:
    """The head of the owner in the session's region, running; it is started unless there is one. Idempotent.

    `folders` are s3:// addresses of packed folders that a new head fetches. Of two that were started at the same time
    only the older one stays. Raises InputError for what does not fit, ProviderError if EC2 does not start it.
    """
    waiting = _Waiting(clock=clock, sleep=sleep)
    place = place or own_place()
    with in_one_line():
        found = _oldest(session, resources.aws.owner)
        if found is None:
            started = _launch(session, resources, folders, place, sleep)
            found = _the_only_one(session, resources.aws.owner, started, waiting)
        else:
            started = ""
        running = _until_running(session, str(found["InstanceId"]), waiting)
    return HeadInstance(
        instance_id=str(running["InstanceId"]),
        instance_type=str(running["InstanceType"]),
        zone=str(running["Placement"]["AvailabilityZone"]),
        started=running["InstanceId"] == started,
    )


def upload_folder(session: AwsSession, checkpoints: str | None, name: str, archive: bytes) -> str | None:
    """Put an experiment's packed folder beside its checkpoints; its s3:// address, or None if they are in no bucket.

    Raises InputError, with the remedy, if it cannot be written.
    """
    if checkpoints is None or not is_bucket(checkpoints):
        return None
    with in_one_line():
        return put(session, checkpoints, f"folders/{name}.zip", archive)


def heads(session: AwsSession, owner: str) -> list[Any]:
    """The owner's heads that live, as EC2 shows them, the oldest first. Raises botocore's errors."""
    living = [*by_tags(owner=owner, role="head"), {"Name": "instance-state-name", "Values": [*_LIVING, *_STOPPED]}]
    shown = pages(session.client("ec2").describe_instances, "Reservations", Filters=living)
    return sorted((one for each in shown for one in each["Instances"]), key=_age)


def _age(instance: Any) -> tuple[Any, str]:
    return instance["LaunchTime"], instance["InstanceId"]


def _oldest(session: AwsSession, owner: str) -> Any | None:
    found = heads(session, owner)
    if found and found[0]["State"]["Name"] in _STOPPED:
        stopped = found[0]["InstanceId"]
        itself = found[0].get("StateReason", {}).get("Code") == "Client.InstanceInitiatedShutdown"
        why = "stopped itself: nothing had run on it for resources.aws.head_idle" if itself else "is stopped"
        raise InputError(
            f"the head {stopped} {why}; you pay only for its disk, which keeps your experiments; start it (aws ec2 "
            f"start-instances --instance-ids {stopped} --region {session.region}), or end it with `rubberband down`"
        )
    return found[0] if found else None


def _launch(
    session: AwsSession,
    resources: Resources,
    folders: Sequence[str],
    place: OwnInstance | None,
    sleep: Callable[[float], None],
) -> str:
    """The id of a head that was just launched. Raises InputError, ProviderError."""
    words = resources.aws
    name = words.head_instance_type
    facts = type_facts(session, name, "resources.aws.head_instance_type")
    installed = what_to_install(session, words, resources.checkpoints)
    installs = bool(installed.requirements)
    # What is told of images is told of workers'; only one that has everything is the head's as well.
    image_word = None if installs else words.image
    image = find_image(session, image_word, facts, installs=installs)
    vpc, subnets = choose_subnets(session, words.subnets, name, place)
    request: dict[str, Any] = {
        "ImageId": image.image_id,
        "InstanceType": name,
        "MinCount": 1,
        "MaxCount": 1,
        "SecurityGroupIds": [security_group(session, words, vpc, sleep)],
        "IamInstanceProfile": {"Name": words.head_profile},
        "InstanceInitiatedShutdownBehavior": "stop",
        "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 1, "HttpEndpoint": "enabled"},
        "UserData": head_script(session.region, installed, words.setup, tuple(folders), idle_s=words.head_idle_s),
        "TagSpecifications": [{"ResourceType": kind, "Tags": _tags(words.owner)} for kind in ("instance", "volume")],
    }
    if bursts(name):
        request["CreditSpecification"] = {"CpuCredits": "standard"}
    if words.key_name is not None:
        request["KeyName"] = words.key_name
    volume_gb = root_volume_gb(None, image, plain=image_word is None and installs)
    request["BlockDeviceMappings"] = changed_disks(image.root_device, volume_gb, image.lasting_disks)
    return launch_in_some_zone(session, request, subnets, words.head_profile, sleep)


def _tags(owner: str) -> list[dict[str, str]]:
    tags = {OWNER_TAG: owner, ROLE_TAG: "head", "Name": f"rubberband head of {owner}"}
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def launch_in_some_zone(
    session: AwsSession,
    request: dict[str, Any],
    subnets: Mapping[str, str],
    profile: str,
    sleep: Callable[[float], None],
    role: Role = "head",
    *,
    before: Callable[[str], object] = lambda zone: None,
) -> str:
    """Launch one instance, in the first zone that has it, once for the same request in a zone: its id.

    `before` is called with a zone before that is asked.
    Raises InputError for what does not fit, ProviderError where no zone has one.
    """
    key = {"head": "head_profile"}.get(role, "worker_profile")
    refusals = []
    for zone, subnet in subnets.items():
        before(zone)
        try:
            return _with_a_token(session, {**request, "SubnetId": subnet}, sleep)
        except ClientError as error:
            if verdict(error) != "capacity":
                raise InputError(refused_launch(error, profile, request.get("KeyName"), key)) from None
            refusals.append(f"{zone}: {code_of(error)}")
    raise ProviderError(
        f"no zone has a {request['InstanceType']} for the {role} ({', '.join(refusals)}); choose another "
        f"{'resources.aws.head_instance_type' if role == 'head' else 'resources.instance_type'}, or try again later"
    )


def _with_a_token(session: AwsSession, request: dict[str, Any], sleep: Callable[[float], None]) -> str:
    """Launch once for the same request, however often it is asked for; anew where what it launched has ended."""
    digest = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
    for attempt in range(_MOST_HEADS):
        token = hashlib.sha256(f"head\0{session.region}\0{digest}\0{attempt}".encode()).hexdigest()
        try:
            launched = _answer(session, {**request, "ClientToken": token}, sleep)["Instances"][0]
        except ClientError as error:
            if code_of(error) != "IdempotentInstanceTerminated":
                raise
            continue
        if not _ended_before(session, launched):
            return str(launched["InstanceId"])
    raise ProviderError(f"{_MOST_HEADS} heads like this one have ended here; change resources.aws to start another")


def _answer(session: AwsSession, request: dict[str, Any], sleep: Callable[[float], None]) -> Any:
    """What EC2 makes of a launch, which is asked for again, with its token, until the answer is definite."""
    for pause_s in _PAUSES_S:
        try:
            return session.client("ec2").run_instances(**request)
        except FAILURES as error:
            if verdict(error) not in ("unknown", "throttled"):
                raise
            sleep(pause_s)
    return session.client("ec2").run_instances(**request)


def _ended_before(session: AwsSession, launched: Any) -> bool:
    """The answer for a token that was used may show the instance as it was when it was launched."""
    if launched["State"]["Name"] not in _LIVING:
        return True
    shown = _described(session, launched["InstanceId"])
    return shown is not None and shown["State"]["Name"] not in (*_LIVING, *_STOPPED)


def _the_only_one(session: AwsSession, owner: str, started: str, waiting: _Waiting) -> Any:
    """The head that stays: another may have been started at the same time. Ours is ended unless it is the oldest."""
    before = waiting.clock() + _RUNNING_S
    while waiting.clock() < before:
        found = heads(session, owner)
        if any(one["InstanceId"] == started for one in found):
            if found[0]["InstanceId"] != started:
                session.client("ec2").terminate_instances(InstanceIds=[started])
            return found[0]
        waiting.sleep(_LOOK_S)
    raise ProviderError(f"the head {started} was launched, but EC2 does not list it; check the console, and try again")


def _until_running(session: AwsSession, instance_id: str, waiting: _Waiting) -> Any:
    before = waiting.clock() + _RUNNING_S
    while waiting.clock() < before:
        shown = _described(session, instance_id)
        state = shown["State"]["Name"] if shown is not None else "pending"
        if state == "running":
            return shown
        if state not in _LIVING:
            why = (shown or {}).get("StateReason", {}).get("Message", state)
            raise ProviderError(f"the head {instance_id} ended before it ran ({why}); try again")
        waiting.sleep(_LOOK_S)
    raise ProviderError(f"the head {instance_id} is not running after {_RUNNING_S:g} s; end it with `rubberband down`")


def _described(session: AwsSession, instance_id: str) -> Any | None:
    """None while EC2 does not show it (yet)."""
    try:
        answer = session.client("ec2").describe_instances(InstanceIds=[instance_id])
    except ClientError as error:
        if verdict(error) != "absent":
            raise
        return None
    return next((one for each in answer["Reservations"] for one in each["Instances"]), None)
