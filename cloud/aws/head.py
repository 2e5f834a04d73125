"""The head that `rubberband cloud up` starts: an instance in the VPC from which `run` works as anywhere, until `down`.

There is one for each owner and region. It has no lease, since the instances that it rents have their own. It stops
itself when nothing has run on it for `resources.aws.head_idle`; its disk, with the journals, stays. `up` needs the
driver's permissions, and `iam:PassRole` on the head's role.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import shlex
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

from botocore.exceptions import ClientError

from rubberband.cloud.aws.boot import head_script, made_of, remake_script, security_group
from rubberband.cloud.aws.calls import OWNER_TAG, ROLE_TAG, AwsSession, Machines, Purchase, by_tags, launch_request
from rubberband.cloud.aws.client import age, instances, type_facts, why_not_started
from rubberband.cloud.aws.errors import FAILURES, code_of, in_one_line, verdict
from rubberband.cloud.aws.handover import delete_secrets, put_secrets
from rubberband.cloud.aws.images import choose_image
from rubberband.cloud.aws.installing import what_to_install
from rubberband.cloud.aws.network import choose_subnets, own_place
from rubberband.cloud.aws.preflight import refused_launch
from rubberband.cloud.aws.s3 import Packages, is_bucket, place_in, put_package
from rubberband.cloud.clock import Waiting, elapsed_s
from rubberband.errors import InputError, ProviderError
from rubberband.spec.resources import Resources

_LOOK_S = 3.0
_RUNNING_S = 600.0
"""An instance that does not run after this time never will."""
_PAUSES_S = (1.0, 2.0, 4.0, 8.0)
_LIVING = ("pending", "running")
_STOPPED = ("stopping", "stopped")


class HeadInstance(NamedTuple):
    """The head as EC2 shows it."""

    instance_id: str
    instance_type: str
    zone: str
    restarted: bool
    """Whether it was stopped, and this call started it again."""
    started: bool = False
    """Whether this call launched it."""


def ensure_head(
    session: AwsSession,
    resources: Resources,
    *,
    folders: Sequence[str] = (),
    confirm: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = elapsed_s,
    sleep: Callable[[float], None] = time.sleep,
) -> HeadInstance:
    """Return the owner's running head in the session's region; start it if it is stopped, and launch one if there is
    none. Idempotent.

    `folders` are s3:// addresses of packed folders that a new head fetches. `confirm` is called before one costs money
    that did not before, and may raise. If two are started at the same time, only the older one stays. Raises InputError
    for a wrong setting, ProviderError if EC2 does not start it.
    """
    owner, waiting = resources.aws.owner, Waiting(clock=clock, sleep=sleep)
    if (found := running_head(session, owner, lambda _: confirm(), clock=clock, sleep=sleep)) is not None:
        return found
    confirm()
    with in_one_line():
        started = _launch(session, resources, folders, sleep)
        head = _until_running(session, _the_only_one(session, owner, started, waiting), waiting)
    return head._replace(started=head.instance_id == started)


def running_head(
    session: AwsSession,
    owner: str,
    may_start: Callable[[str], None],
    *,
    clock: Callable[[], float] = elapsed_s,
    sleep: Callable[[float], None] = time.sleep,
) -> HeadInstance | None:
    """Return the owner's head, which is started again if it has stopped; None without one.

    `may_start` is called with its id before that, and may raise. Raises ProviderError if it does not start.
    """
    waiting = Waiting(clock=clock, sleep=sleep)
    with in_one_line():
        found = next(iter(heads(session, owner)), None)
        if found is None:
            return None
        instance_id, is_stopped = str(found["InstanceId"]), found["State"]["Name"] in _STOPPED
        if is_stopped:
            may_start(instance_id)
            _restart(session, instance_id, waiting)
        return _until_running(session, instance_id, waiting)._replace(restarted=is_stopped)


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


def _restart(session: AwsSession, instance_id: str, waiting: Waiting) -> None:
    """Start a stopped head, once it has stopped. Raises ProviderError if it does not start; botocore's errors."""
    for _ in waiting.polls(_RUNNING_S, every_s=_LOOK_S):
        try:
            session.client("ec2").start_instances(InstanceIds=[instance_id])
            return
        except ClientError as error:  # it may be stopping still
            if code_of(error) != "IncorrectInstanceState" and verdict(error) not in ("throttled", "unknown"):
                raise
    raise ProviderError(f"the head {instance_id} has not stopped after {_RUNNING_S:g} s; try again later")


class HeadBoot(NamedTuple):
    """Boot of a head: its script, what it is made of (`boot.made_of`), and whether it installs packages."""

    script: str
    made_of: str
    installs: bool


def head_boot(session: AwsSession, resources: Resources, folders: Sequence[str] = ()) -> HeadBoot:
    """Return how a head for such resources boots, with its packages put into the bucket. Raises InputError."""
    words, checkpoints = resources.aws, resources.checkpoints
    installed = what_to_install(Packages(session, checkpoints), words)
    script = head_script(
        session.region,
        installed,
        words.setup,
        tuple(folders),
        idle_s=words.head_idle_s,
        bucket=place_in(checkpoints, "")[0] if is_bucket(checkpoints) else "",
    )
    return HeadBoot(script, made_of(installed, words.setup, idle_s=words.head_idle_s), bool(installed.requirements))


def _launch(session: AwsSession, resources: Resources, folders: Sequence[str], sleep: Callable[[float], None]) -> str:
    """Launch a head and return its id. Raises InputError, ProviderError."""
    words = resources.aws
    name = words.head_instance_type
    facts = type_facts(session, name, "resources.aws.head_instance_type")
    script, _, installs = head_boot(session, resources, folders)
    # `resources.aws.image` is meant for workers; only an image that has everything serves the head as well.
    image_word = None if installs else words.image
    image, volume_gb = choose_image(session, image_word, facts, installs=installs)
    vpc, subnets = choose_subnets(session, words.subnets, name, own_place())
    machines = Machines(
        image=image.image_id,
        subnets=subnets,
        security_group=security_group(session, words, vpc, sleep),
        instance_profile=words.head_profile,
        key_name=words.key_name,
        owner=words.owner,
        volume_gb=volume_gb,
        root_device=image.root_device,
        further_disks=image.further_disks,
        user_data=lambda _: script,
    )
    tags = {OWNER_TAG: words.owner, ROLE_TAG: "head", "Name": f"rubberband head of {words.owner}"}
    return launch_in_some_zone(session, machines, name, script, tags, sleep)


def launch_in_some_zone(
    session: AwsSession,
    machines: Machines,
    instance_type: str,
    user_data: str,
    tags: Mapping[str, str],
    sleep: Callable[[float], None],
    *,
    before: Callable[[str], object] = lambda zone: None,
) -> str:
    """Launch one head, or one builder, in the first zone that has it, and return its id. The same launches once in a
    zone.

    `before` is called with each zone before its request. Raises InputError for a wrong setting, ProviderError if no
    zone has an instance.
    """
    role, refusals = tags[ROLE_TAG], []
    profile_key, type_key = _KEYS[role]
    for zone in machines.subnets:
        before(zone)
        choice = Purchase(instance_type=instance_type, zone=zone, market="on_demand")
        request = launch_request(machines, choice, tags=tags, user_data=user_data)
        if role == "head":
            request["InstanceInitiatedShutdownBehavior"] = "stop"
        try:
            return _with_a_token(session, request, sleep, role)
        except ClientError as error:
            if verdict(error) != "capacity":
                raise InputError(refused_launch(error, machines.instance_profile, profile_key)) from None
            refusals.append(f"{zone}: {code_of(error)}")
    raise ProviderError(
        f"no zone has a {instance_type} for the {role} ({', '.join(refusals)}); choose another {type_key}, or try "
        "again later"
    )


_KEYS = {
    "head": ("head_profile", "resources.aws.head_instance_type"),
    "builder": ("worker_profile", "resources.instance_type"),
}
"""Fields of the file with the profile and the type, by role."""


def _with_a_token(session: AwsSession, request: dict[str, Any], sleep: Callable[[float], None], role: str) -> str:
    """Launch once for the same request, however often it is repeated; launch again once that instance has ended.

    Raises ProviderError if the instance of this call ends at once.
    """
    former = {one["InstanceId"] for one in instances(session, by_tags(role=role))}
    digest = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
    for attempt in count():
        token = hashlib.sha256(f"head\0{session.region}\0{digest}\0{attempt}".encode()).hexdigest()
        try:
            launched = _answer(session, {**request, "ClientToken": token}, sleep)["Instances"][0]
        except ClientError as error:
            if code_of(error) != "IdempotentInstanceTerminated":
                raise
            continue
        started = str(launched["InstanceId"])
        shown = _described(session, started) or launched  # the answer for a used token may show it as it was
        if shown["State"]["Name"] in (*_LIVING, *_STOPPED):
            return started
        if started not in former:
            raise ProviderError(f"the {role} {started} ended before it ran: {why_not_started(shown)}")
    raise AssertionError


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


def _the_only_one(session: AwsSession, owner: str, started: str, waiting: Waiting) -> str:
    """Return the oldest head's id, as another may have been started at the same time; terminate ours if that is
    younger."""
    for _ in waiting.polls(_RUNNING_S, every_s=_LOOK_S):
        found = heads(session, owner)
        if any(one["InstanceId"] == started for one in found):
            if found[0]["InstanceId"] != started:
                session.client("ec2").terminate_instances(InstanceIds=[started])
            return str(found[0]["InstanceId"])
    raise ProviderError(f"the head {started} was launched, but EC2 does not list it; check the console, and try again")


def _until_running(session: AwsSession, instance_id: str, waiting: Waiting) -> HeadInstance:
    for _ in waiting.polls(_RUNNING_S, every_s=_LOOK_S):
        shown = _described(session, instance_id)
        state = shown["State"]["Name"] if shown is not None else "pending"
        if shown is not None and state == "running":
            zone = str(shown["Placement"]["AvailabilityZone"])
            return HeadInstance(instance_id, str(shown["InstanceType"]), zone, restarted=False)
        if state not in (*_LIVING, *_STOPPED):  # a look may be older than its start
            raise ProviderError(f"the head {instance_id} ended before it ran: {why_not_started(shown or {})}")
    raise ProviderError(
        f"the head {instance_id} is not running after {_RUNNING_S:g} s; end it with `rubberband cloud down`"
    )


def _described(session: AwsSession, instance_id: str) -> Any | None:
    """Return the instance as EC2 shows it; None while it does not (yet)."""
    return next(iter(instances(session, [{"Name": "instance-id", "Values": [instance_id]}])), None)


READY_S = 1500.0
"""A head that is not set up after this time never will be."""
_POLL_S = 2.0
_COMMAND_S = 600.0
_REACH_S = 300.0
"""Longest time for which a head that has been reached may be offline."""
_NOT_READY, _BROKEN, _BUSY = 75, 70, 73
_PENDING = ("Pending", "InProgress", "Delayed", "Cancelling")


class HeadRefusedError(ProviderError):
    """The head itself refuses: the work is not done, and never will be."""


class Seen(NamedTuple):
    """Output of a run on the head, from a place on; `lives`: whether it runs, or has ended by itself."""

    log: bytes
    more: bool
    """Whether there is more already."""
    exit_code: int | None
    lives: bool


class HeadAnswer(NamedTuple):
    """Result of a short command on the head, with the content of the file that it wrote."""

    exit_code: int
    out: str
    err: str
    file: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteHead:
    """A running head."""

    session: AwsSession
    instance_id: str
    owner: str
    store: str
    """s3:// address below which long answers and copies of its home go."""
    on_month: Callable[[float, float, bool], None] = lambda usd, open_usd, has_ended: None
    """Is called with the month's bill of the head's home, what it may still spend, and whether a run has ended."""
    waiting: Waiting = field(default_factory=Waiting)
    clock: Callable[[], float] = time.time

    def wait_until_ready(self, announce: Callable[[str], None]) -> str:
        """Wait until the head is reached and set up; `announce` gets each line of its progress once.

        Returns what it is made of (`boot.made_of`); empty for a head of an older version. Raises ProviderError if that
        takes too long or fails.
        """
        last = ""
        for _ in self.waiting.polls(READY_S, every_s=3 * _POLL_S):
            code, out = self._ran("cat made-of 2> /dev/null || true", READY_S)
            said = out.strip()
            if code == 0:
                return said
            if code == _BROKEN:
                raise ProviderError(
                    f"the head {self.instance_id} could not be set up: {said}; `rubberband cloud down` ends it"
                )
            if said != last:
                announce(said)
            last = said
        raise ProviderError(
            f"the head {self.instance_id} is not ready after {READY_S:g} s ({last}); "
            "end it with `rubberband cloud down`"
        )

    def remake(self, boot: str, announce: Callable[[str], None]) -> str:
        """Have the head made anew by a boot script, and return what it is made of then; what it had if that fails.

        Raises InputError while something runs there.
        """
        key = uuid.uuid4().hex
        packed = base64.b64encode(gzip.compress(remake_script(key, boot).encode(), mtime=0)).decode()
        # A file: on a command line, what the script looks for would be found in the script.
        work = f'file=".remake-{key}.sh"; echo {packed} | base64 -d | gzip -d > "$file"; bash "$file"'
        code, out = self._ran(work, _REACH_S)
        if code == _BUSY:
            raise InputError(
                f"the head {self.instance_id} has other code or packages than this needs, and something runs there; "
                "wait for its end, or give a head of its own: -s resources.aws.owner=NAME"
            )
        if code not in (0, _NOT_READY):  # a repeat finds it at work
            raise ProviderError(f"the head {self.instance_id} cannot be brought up to date: {out.strip()[:300]}")
        return self.wait_until_ready(announce)

    def start(self, name: str, words: list[str], packed: str | None, made_of: str, secrets: str = "") -> str:
        """Start `rubberband WORDS` as a unit that outlives this process, and return its key.

        `secrets`: its variables, packed (`handover`). Raises ProviderError, also if the head is not `made_of` that any
        more.
        """
        key = uuid.uuid4().hex
        if not secrets:
            self._call("start", key=key, name=name, words=words, packed=packed, made_of=made_of)
            return key
        parameter = put_secrets(self.session, self.owner, key, secrets, clock=self.clock)
        try:
            self._call("start", key=key, name=name, words=words, packed=packed, made_of=made_of, secrets=parameter)
        except BaseException:
            with suppress(*FAILURES):  # it expires
                delete_secrets(self.session, parameter)
            raise
        return key

    def look(self, name: str, key: str | None, offset: int) -> Seen:
        """Return the output of a run, by default of the latest of experiment `name`. Raises ProviderError."""
        found = self._call("look", name=name, key=key, offset=offset)
        return Seen(
            log=base64.b64decode(found["log"]), more=found["more"], exit_code=found["exit"], lives=found["lives"]
        )

    def ask(self, words: list[str]) -> HeadAnswer:
        """Run a short `rubberband WORDS`; the word {file} stands for a file whose content the answer has."""
        found = self._call("ask", words=words, store=self.store)
        if "at" in found:
            found = json.loads(self._fetched(found["at"]))
        file = None if found["file"] is None else base64.b64decode(found["file"])
        return HeadAnswer(exit_code=found["exit"], out=found["out"], err=found["err"], file=file)

    def fetch(self, packed: str) -> None:
        """Have the head unpack a folder from its s3:// address. Raises ProviderError."""
        code, out = self._ran(shlex.join(["rubberband-fetch", packed]), _REACH_S)
        if code:
            raise ProviderError(f"the head {self.instance_id} cannot fetch the folder: {out.strip()[-300:]}")

    def keep(self) -> str:
        """Copy the head's home to the bucket, and return the address. Raises ProviderError."""
        return str(self._call("keep", reach_s=60.0, store=self.store)["at"])

    def _fetched(self, address: str) -> bytes:
        bucket, _, key = address.removeprefix("s3://").partition("/")
        s3 = self.session.client("s3")
        with in_one_line():
            content: bytes = s3.get_object(Bucket=bucket, Key=key)["Body"].read()
            s3.delete_object(Bucket=bucket, Key=key)
        return content

    def _call(self, what: str, *, reach_s: float = _REACH_S, **words: Any) -> Mapping[str, Any]:
        work = shlex.join(["python3", "-m", "rubberband.cloud.aws.on_head", what, json.dumps(words)])
        code, out = self._ran(work, reach_s)
        if code in (_NOT_READY, _BROKEN):
            raise ProviderError(f"the head {self.instance_id} is not set up: {out.strip()[:300]}")
        try:
            answer: dict[str, Any] = json.loads(out)
        except ValueError:
            last = (out.strip().splitlines() or ["no output"])[-1]
            raise ProviderError(
                f"the head {self.instance_id} failed (exit code {code}): {last[:300]}; if its rubberband is older than "
                "this one, `rubberband cloud down` and a new head help"
            ) from None
        if "error" in answer:
            raise HeadRefusedError(answer["error"])
        if answer.get("month") is not None:
            usd, open_usd = answer["month"]
            self.on_month(usd, open_usd, what == "look")
        return answer

    def _ran(self, work: str, reach_s: float) -> tuple[int, str]:
        """Run a shell command on the head and return its exit code and output, or what its set-up says (75, 70)."""
        script = _SCRIPT.format(region=shlex.quote(self.session.region), work=work)
        for _ in self.waiting.polls(reach_s, every_s=_POLL_S):
            sent = self._asked(lambda: self._sent(script))
            found = None if sent is None else self._result(sent)
            if found is not None:
                return found
        raise ProviderError(
            f"SSM has not reached the head {self.instance_id} for {reach_s:g} s: it boots, is offline or was "
            "terminated, or its role lacks the policy session.json (`rubberband aws setup` attaches it); try again, or "
            "`rubberband cloud down`"
        )

    def _sent(self, script: str) -> str:
        answer = self.session.client("ssm").send_command(
            InstanceIds=[self.instance_id],
            DocumentName="AWS-RunShellScript",
            Parameters={"commands": [script], "executionTimeout": [f"{_COMMAND_S:.0f}"]},
            TimeoutSeconds=60,
            Comment="rubberband --on head",
        )
        return str(answer["Command"]["CommandId"])

    def _result(self, command_id: str) -> tuple[int, str] | None:
        """Return exit code and output of a command; None if it was not delivered."""
        ssm = self.session.client("ssm")
        for _ in self.waiting.polls(_COMMAND_S + 90.0, every_s=_POLL_S / 2):
            found = self._asked(lambda: ssm.get_command_invocation(CommandId=command_id, InstanceId=self.instance_id))
            if found is None or found["Status"] in _PENDING:
                continue
            if found["Status"] in ("Success", "Failed") and found["ResponseCode"] >= 0:
                out = found["StandardOutputContent"] or found["StandardErrorContent"]
                return found["ResponseCode"], out
            return None
        return None

    def _asked(self, call: Callable[[], Any]) -> Any | None:
        """Return the answer to a call; None where it is worth another one. Raises InputError for a refusal."""
        with in_one_line():
            try:
                return call()
            except FAILURES as error:
                waits = isinstance(error, ClientError) and code_of(error) in ("InvalidInstanceId", _NOT_THERE)
                if waits or verdict(error) in ("throttled", "unknown"):
                    return None
                raise


_NOT_THERE = "InvocationDoesNotExist"
_SCRIPT = """root="${{RUBBERBAND_ROOT:-}}"
log="$root/var/log/rubberband.log"
if ! grep -q 'rubberband: .* the head is ready' "$log" 2> /dev/null; then
    tail -n 1 "$log" 2> /dev/null || echo 'the head boots'
    grep -q 'rubberband: .* the head could not be set up' "$log" 2> /dev/null && exit 70
    exit 75
fi
export HOME="${{HOME:-$root/root}}" AWS_DEFAULT_REGION={region}
export PATH="$root/opt/rubberband/venv/bin:$root/usr/local/bin:$PATH"
cd "$root/opt/rubberband"
touch busy
{work}
"""
"""Each command renews `busy`, so that the head does not stop itself while it is in use."""
