"""The head as the laptop sees it: commands by SSM's Run Command, with no session, key or open port.

Any answer may be lost, and SSM has no client tokens: what is sent may be repeated. A command that SSM does not know yet
(InvocationDoesNotExist), an agent that is offline, and throttling are waited for.
"""

from __future__ import annotations

import base64
import gzip
import json
import shlex
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from botocore.exceptions import ClientError

from rubberband.cloud.aws.boot import remake_script
from rubberband.cloud.aws.calls import AwsSession
from rubberband.cloud.aws.client import described
from rubberband.cloud.aws.errors import FAILURES, code_of, in_one_line, verdict
from rubberband.cloud.clock import Waiting
from rubberband.errors import InputError, ProviderError

READY_S = 1500.0
"""A head that is not set up after this time never will be."""
_LOOK_S = 2.0
_COMMAND_S = 600.0
_REACH_S = 300.0
"""Longest time for which a head that has been reached may be offline."""
_NOT_READY, _BROKEN, _BUSY = 75, 70, 73
_PENDING = ("Pending", "InProgress", "Delayed", "Cancelling")


class HeadError(ProviderError):
    """The head itself refuses, or was terminated: the work is not done, and never will be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Output of a run on the head, from a place on."""

    log: bytes
    more: bool
    """Whether there is more already."""
    exit_code: int | None
    """None while it runs."""
    lives: bool
    """Whether it runs, or has ended by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadAnswer:
    """Result of a short command on the head."""

    exit_code: int
    out: str
    err: str
    file: bytes | None
    """Content of the file that it wrote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteHead:
    """A running head."""

    session: AwsSession
    instance_id: str
    store: str
    """s3:// address below which long answers and copies of its home go."""
    on_month: Callable[[float, float, bool], None] = lambda usd, open_usd, has_ended: None
    """Is called with the month's bill of the head's home, what it may still spend, and whether a run has ended."""
    waiting: Waiting = field(default_factory=Waiting)

    def wait_until_ready(self, announce: Callable[[str], None]) -> str:
        """Wait until the head is reached and set up; `announce` gets each line of its progress once.

        Returns what it is made of (`boot.made_of`); empty for a head of an older version. Raises ProviderError if that
        takes too long or fails.
        """
        last = ""
        for _ in self.waiting.looks(READY_S, every_s=3 * _LOOK_S):
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

    def start(self, name: str, words: list[str], packed: str | None, made_of: str) -> str:
        """Start `rubberband WORDS` as a unit that outlives this process, and return its key. Raises ProviderError, also
        if the head is not `made_of` that any more."""
        key = uuid.uuid4().hex
        self._call("start", key=key, name=name, words=words, packed=packed, made_of=made_of)
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
            raise HeadError(answer["error"])
        if answer.get("month") is not None:
            usd, open_usd = answer["month"]
            self.on_month(usd, open_usd, what == "look")
        return answer

    def _ran(self, work: str, reach_s: float) -> tuple[int, str]:
        """Run a shell command on the head and return its exit code and output, or what its set-up says (75, 70)."""
        script, missed = _SCRIPT.format(region=shlex.quote(self.session.region), work=work), False
        for _ in self.waiting.looks(reach_s, every_s=_LOOK_S):
            sent = self._asked(lambda: self._sent(script))
            if sent is None and not missed:
                self._require_there()
            missed = missed or sent is None
            found = None if sent is None else self._result(sent)
            if found is not None:
                return found
        self._require_there()
        raise ProviderError(
            f"SSM has not reached the head {self.instance_id} for {reach_s:g} s: it boots or is offline, or its role "
            "lacks the policy session.json (`rubberband aws setup` attaches it); try again, or `rubberband cloud down`"
        )

    def _require_there(self) -> None:
        """Raise HeadError if EC2 shows that the head has ended."""
        shown = []
        with suppress(ProviderError):
            shown = described(self.session, [{"Name": "instance-id", "Values": [self.instance_id]}])
        if shown and shown[0]["State"]["Name"] in ("shutting-down", "terminated"):
            raise HeadError(
                f"the head {self.instance_id} was terminated, and the journals on its disk with it; what runs there "
                "rented ends with its lease (`rubberband cloud down` ends what it rented now); checkpoints are kept"
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
        for _ in self.waiting.looks(_COMMAND_S + 90.0, every_s=_LOOK_S / 2):
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
