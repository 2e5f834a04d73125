"""The head that `rubberband cloud up` starts: an instance in the VPC from which `run` works as anywhere, until `down`.

There is one for each owner and region. It has no lease, since the instances that it rents have their own. It stops
itself when nothing has run on it for `resources.aws.head_idle`; its disk, with the journals, stays. `up` needs the
driver's permissions, and `iam:PassRole` on the head's role.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import ClientError

from rubberband.cloud.aws.boot import head_script, made_of
from rubberband.cloud.aws.calls import OWNER_TAG, ROLE_TAG, AwsSession, Role, by_tags, changed_disks, machine_request
from rubberband.cloud.aws.client import age, instances
from rubberband.cloud.aws.errors import FAILURES, code_of, ignoring, in_one_line, verdict
from rubberband.cloud.aws.images import find_image, root_volume_gb, type_facts
from rubberband.cloud.aws.network import OwnInstance, choose_subnets, own_place
from rubberband.cloud.aws.preflight import refused_launch
from rubberband.cloud.aws.resolving import security_group, what_to_install
from rubberband.cloud.aws.s3 import is_bucket, place_in, put_package
from rubberband.cloud.aws.states import why_not_started
from rubberband.cloud.clock import Waiting, elapsed_s
from rubberband.errors import InputError, ProviderError
from rubberband.spec.resources import Resources

_LOOK_S = 3.0
_RUNNING_S = 600.0
"""An instance that does not run after this time never will."""
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
    """Whether this call launched it."""
    restarted: bool = False
    """Whether it was stopped, and this call started it again."""


def ensure_head(
    session: AwsSession,
    resources: Resources,
    *,
    folders: Sequence[str] = (),
    confirm: Callable[[], None] = lambda: None,
    place: OwnInstance | None = None,
    clock: Callable[[], float] = elapsed_s,
    sleep: Callable[[float], None] = time.sleep,
) -> HeadInstance:
    """Return the owner's running head in the session's region; start it if it is stopped, and launch one if there is
    none. Idempotent.

    `folders` are s3:// addresses of packed folders that a new head fetches. `confirm` is called before one costs money
    that did not before, and may raise. If two are started at the same time, only the older one stays. Raises InputError
    for a wrong setting, ProviderError if EC2 does not start it.
    """
    waiting, started, restarted = Waiting(clock=clock, sleep=sleep), "", False
    place = place or own_place()
    with in_one_line():
        found = next(iter(heads(session, resources.aws.owner)), None)
        if found is None or found["State"]["Name"] in _STOPPED:
            confirm()
        if found is None:
            started = _launch(session, resources, folders, place, sleep)
            found = _the_only_one(session, resources.aws.owner, started, waiting)
        elif found["State"]["Name"] in _STOPPED:
            _restart(session, str(found["InstanceId"]), waiting)
            restarted = True
        running = _until_running(session, str(found["InstanceId"]), waiting)
    return HeadInstance(
        instance_id=str(running["InstanceId"]),
        instance_type=str(running["InstanceType"]),
        zone=str(running["Placement"]["AvailabilityZone"]),
        started=running["InstanceId"] == started,
        restarted=restarted,
    )


def upload_folder(session: AwsSession, checkpoints: str | None, name: str, archive: bytes) -> str | None:
    """Put an experiment's packed folder beside its checkpoints. Return its s3:// address, or None without a bucket.

    The address ends in the folder's digest, so that the head takes no other. Raises InputError, with the remedy, if it
    cannot be written.
    """
    if not is_bucket(checkpoints):
        return None
    with in_one_line():
        address = put_package(session, checkpoints, f"folders/{name}.zip", archive)
    return f"{address}#sha256={hashlib.sha256(archive).hexdigest()}"


def heads(session: AwsSession, owner: str) -> list[Any]:
    """Return the owner's heads that are not terminated, the oldest first. Raises botocore's errors."""
    return sorted(instances(session, by_tags(owner=owner, role="head"), *_LIVING, *_STOPPED), key=age)


def running_head(
    session: AwsSession,
    owner: str,
    announce: Callable[[str], None],
    may_start: Callable[[], None],
    *,
    clock: Callable[[], float] = elapsed_s,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Return the id of the owner's head, which is started again if it has stopped; `announce` says so.

    `may_start` is called before that, and may raise. Raises InputError if there is none, ProviderError if it does not
    start.
    """
    waiting = Waiting(clock=clock, sleep=sleep)
    with in_one_line():
        found = next(iter(heads(session, owner)), None)
        if found is None:
            raise InputError(
                f"owner {owner} has no head in {session.region}; `rubberband run FILE --on head` starts one"
            )
        instance_id = str(found["InstanceId"])
        if found["State"]["Name"] in _STOPPED:
            may_start()
            announce(f"the head {instance_id} has stopped and is started again")
            _restart(session, instance_id, waiting)
            _until_running(session, instance_id, waiting)
    return instance_id


def _restart(session: AwsSession, instance_id: str, waiting: Waiting) -> None:
    """Start a stopped head, once it has stopped. Raises ProviderError if it does not start; botocore's errors."""
    for _ in waiting.looks(_RUNNING_S, every_s=_LOOK_S):
        try:
            session.client("ec2").start_instances(InstanceIds=[instance_id])
            return
        except ClientError as error:  # it may be stopping still
            if code_of(error) != "IncorrectInstanceState" and verdict(error) not in ("throttled", "unknown"):
                raise
    raise ProviderError(f"the head {instance_id} has not stopped after {_RUNNING_S:g} s; try again later")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadBoot:
    """Boot of a head for an experiment."""

    script: str
    made_of: str
    """See `boot.made_of`."""
    installs: bool


def head_boot(session: AwsSession, resources: Resources, folders: Sequence[str] = ()) -> HeadBoot:
    """Return how a head for such resources boots, with its packages put into the bucket. Raises InputError."""
    words, checkpoints = resources.aws, resources.checkpoints
    installed = what_to_install(session, words, checkpoints)
    script = head_script(
        session.region,
        installed,
        words.setup,
        tuple(folders),
        idle_s=words.head_idle_s,
        bucket=place_in(checkpoints, "")[0] if is_bucket(checkpoints) else "",
    )
    made = made_of(installed, words.setup, idle_s=words.head_idle_s)
    return HeadBoot(script=script, made_of=made, installs=bool(installed.requirements))


def _launch(
    session: AwsSession,
    resources: Resources,
    folders: Sequence[str],
    place: OwnInstance | None,
    sleep: Callable[[float], None],
) -> str:
    """Launch a head and return its id. Raises InputError, ProviderError."""
    words = resources.aws
    name = words.head_instance_type
    facts = type_facts(session, name, "resources.aws.head_instance_type")
    boot = head_boot(session, resources, folders)
    installs = boot.installs
    # `resources.aws.image` is meant for workers; only an image that has everything serves the head as well.
    image_word = None if installs else words.image
    image = find_image(session, image_word, facts, installs=installs)
    vpc, subnets = choose_subnets(session, words.subnets, name, place)
    volume_gb = root_volume_gb(None, image, plain=image_word is None and installs)
    request = machine_request(
        image=image.image_id,
        instance_type=name,
        security_group=security_group(session, words, vpc, sleep),
        profile=words.head_profile,
        key_name=words.key_name,
        user_data=boot.script,
        disks=changed_disks(image.root_device, volume_gb, image.further_disks),
        tags={OWNER_TAG: words.owner, ROLE_TAG: "head", "Name": f"rubberband head of {words.owner}"},
    )
    request["InstanceInitiatedShutdownBehavior"] = "stop"
    return launch_in_some_zone(session, request, subnets, words.head_profile, sleep)


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
    """Launch one instance in the first zone that has it, and return its id. The same request launches once in a zone.

    `before` is called with each zone before its request. Raises InputError for a wrong setting, ProviderError if no
    zone has an instance.
    """
    key = "head_profile" if role == "head" else "worker_profile"
    refusals = []
    for zone, subnet in subnets.items():
        before(zone)
        try:
            return _with_a_token(session, {**request, "SubnetId": subnet}, sleep, role)
        except ClientError as error:
            if verdict(error) != "capacity":
                raise InputError(refused_launch(error, profile, request.get("KeyName"), key)) from None
            refusals.append(f"{zone}: {code_of(error)}")
    raise ProviderError(
        f"no zone has a {request['InstanceType']} for the {role} ({', '.join(refusals)}); choose another "
        f"{'resources.aws.head_instance_type' if role == 'head' else 'resources.instance_type'}, or try again later"
    )


def _with_a_token(session: AwsSession, request: dict[str, Any], sleep: Callable[[float], None], role: Role) -> str:
    """Launch once for the same request, however often it is repeated; launch again once that instance has ended.

    Raises ProviderError if the instance of this call ends at once.
    """
    former = {one["InstanceId"] for one in instances(session, by_tags(role=role))}
    digest = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
    for attempt in range(_MOST_HEADS):
        token = hashlib.sha256(f"head\0{session.region}\0{digest}\0{attempt}".encode()).hexdigest()
        try:
            launched = _answer(session, {**request, "ClientToken": token}, sleep)["Instances"][0]
        except ClientError as error:
            if code_of(error) != "IdempotentInstanceTerminated":
                raise
            continue
        started = str(launched["InstanceId"])
        if not _ended_before(session, launched):
            return started
        if started not in former:
            why = why_not_started(_described(session, started) or launched)
            raise ProviderError(f"the {role} {started} ended before it ran: {why}")
    raise ProviderError(f"{_MOST_HEADS} heads like this one have ended here; change resources.aws to start another")


def _answer(session: AwsSession, request: dict[str, Any], sleep: Callable[[float], None]) -> Any:
    """Repeat a launch with its token until EC2's answer is definite, and return that."""
    for pause_s in _PAUSES_S:
        try:
            return session.client("ec2").run_instances(**request)
        except FAILURES as error:
            if verdict(error) not in ("unknown", "throttled"):
                raise
            sleep(pause_s)
    return session.client("ec2").run_instances(**request)


def _ended_before(session: AwsSession, launched: Any) -> bool:
    """Return whether the instance has ended: the answer for a used token may show it as it was at its launch."""
    if launched["State"]["Name"] not in _LIVING:
        return True
    shown = _described(session, launched["InstanceId"])
    return shown is not None and shown["State"]["Name"] not in (*_LIVING, *_STOPPED)


def _the_only_one(session: AwsSession, owner: str, started: str, waiting: Waiting) -> Any:
    """Return the oldest head, as another may have been started at the same time; terminate ours if it is not that."""
    for _ in waiting.looks(_RUNNING_S, every_s=_LOOK_S):
        found = heads(session, owner)
        if any(one["InstanceId"] == started for one in found):
            if found[0]["InstanceId"] != started:
                session.client("ec2").terminate_instances(InstanceIds=[started])
            return found[0]
    raise ProviderError(f"the head {started} was launched, but EC2 does not list it; check the console, and try again")


def _until_running(session: AwsSession, instance_id: str, waiting: Waiting) -> Any:
    for _ in waiting.looks(_RUNNING_S, every_s=_LOOK_S):
        shown = _described(session, instance_id)
        state = shown["State"]["Name"] if shown is not None else "pending"
        if state == "running":
            return shown
        if state not in (*_LIVING, *_STOPPED):  # a look may be older than its start
            raise ProviderError(f"the head {instance_id} ended before it ran: {why_not_started(shown or {})}")
    raise ProviderError(
        f"the head {instance_id} is not running after {_RUNNING_S:g} s; end it with `rubberband cloud down`"
    )


def _described(session: AwsSession, instance_id: str) -> Any | None:
    """Return the instance as EC2 shows it; None while it does not (yet)."""
    with ignoring("InvalidInstanceID."):
        answer = session.client("ec2").describe_instances(InstanceIds=[instance_id])
        return next((one for each in answer["Reservations"] for one in each["Instances"]), None)
    return None
