"""The instances of one run, as EC2 shows them, held against what was asked for; and how they are ended.

It never launches. EC2 is eventually consistent: what is not shown is only believed to be absent after two looks and
after the visibility window; what is shown and was not asked for (or has been given up) is ended at once.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from rubberband.cloud.aws import calls, states
from rubberband.cloud.aws import states as console
from rubberband.cloud.aws.calls import AwsSession
from rubberband.cloud.aws.client import described
from rubberband.cloud.aws.errors import FAILURES, Verdict, explain, lacks_rights, verdict
from rubberband.cloud.aws.intents import Intent, Intents, LaunchAttempt, Run
from rubberband.cloud.aws.pricing import SpotHours
from rubberband.errors import ProviderError

_log = logging.getLogger(__name__)

VISIBILITY_S = 300.0
"""After so long EC2 shows what exists."""
_FORGETS_S = 1800.0
"""It shows what has ended for "usually less than one hour" (DescribeInstances): later, absence proves nothing."""
LOOK_S = 5.0
PATIENCE_S = 60.0
"""For so long an order to end an instance is repeated before the caller hears that EC2 does not obey."""
_LONGEST_PAUSE_S = 20.0
SHUTDOWN_S = 90.0
"""From the end of a lease until the machine is off, at most."""


class Ec2Fleet:
    """What there is of one run. Safe to use from several threads."""

    def __init__(
        self,
        session: AwsSession,
        run: Run,
        intents: Intents,
        *,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
        look_s: float = LOOK_S,
    ) -> None:
        """`clock` is Unix time."""
        self.run = run
        self.intents = intents
        self.look_s = look_s
        self.clock = clock
        self.sleep = sleep
        self.launching: set[str] = set()
        """Names that a launch is at work on: it, not a look, settles them."""
        self.strays: dict[str, Mapping[str, Any]] = {}
        """Id -> what was ended since nothing referred to it."""
        self.session = session
        self._random = random.Random(f"{run.experiment}/{run.run}")
        self._looking = threading.RLock()
        self._looked_at: float | None = None
        self.hours = SpotHours(session, intents)
        self._pending_at: dict[str, float] = {}
        self._missed: dict[str, tuple[int, float]] = {}
        self._told_to_end: set[str] = set()
        self._deaf = (-math.inf, -math.inf)
        """When EC2 did not obey an order to end an instance, at first and at last; since then it obeyed none."""
        self._met: set[str] = set()
        self._former_until = self.intents.kept_until()
        self._latest_until = 0.0

    @property
    def ec2(self) -> Any:
        """The client."""
        return self.session.client("ec2")

    def pauses(self) -> Iterator[float]:
        """How long to wait before each repetition of a request, in seconds."""
        ceiling_s = 1.0
        while True:
            yield self._random.uniform(0.5, 1.0) * ceiling_s
            ceiling_s = min(2.0 * ceiling_s, _LONGEST_PAUSE_S)

    def keep_until(self, until: float) -> None:
        """Remember how far any lease reaches: nothing of this run lives much longer."""
        if until > self._latest_until:
            self._latest_until = until
            self.intents.keep_until(until)

    def look(self) -> None:
        """Bring the intents up to date, at most every `look_s`.

        Raises ProviderError if EC2 does not answer: then all is as it was known last.
        """
        with self._looking:
            at = self.clock()
            if self._looked_at is not None and at - self._looked_at < self.look_s:
                return
            before = self.intents.living()
            shown = self._shown()
            self._looked_at = at
            found = {self._take_in(machine, at) for machine in shown}
            for intent in before:
                if intent.instance not in found:
                    self._miss(intent, at)
            self.hours.look(at)

    def _shown(self) -> list[dict[str, Any]]:
        return described(self.session, calls.by_tags(experiment=self.run.experiment, run=self.run.run, role="worker"))

    def _take_in(self, machine: Mapping[str, Any], at: float) -> str | None:
        """Learn from an instance that EC2 shows; the name whose instance it is, or None for a stray."""
        name = calls.name_of(machine)
        intent = self.intents.get(name)
        attempt = None if intent is None else intent.attempt_of(machine)
        given_up = intent is None or attempt is None or not intent.lives or attempt is not intent.last
        if intent is None or attempt is None or given_up or attempt.outcome == "refused":
            self.end_stray(machine)
            return None
        if attempt.outcome == "unknown":
            self.accept(name, machine)
        elif attempt.instance_id != machine["InstanceId"]:
            self.end_stray(machine)
            return None
        self._missed.pop(name, None)
        self._follow(name, machine, at)
        return name

    def accept(self, name: str, machine: Mapping[str, Any]) -> None:
        """The last attempt of `name` is answered: this instance."""
        self._met.add(name)
        self.intents.change_last(name, outcome="accepted", instance_id=machine["InstanceId"])

    def _follow(self, name: str, machine: Mapping[str, Any], at: float) -> None:
        state = machine["State"]["Name"]
        if state in states.ALIVE:
            self._met.add(name)
        if state == "pending":
            self._pending_at[name] = at
        elif state == "running":
            self._runs(name, machine, at)
        elif state in ("stopping", "stopped"):
            self._runs(name, machine, at)
            self.end_soon(name, "it was stopped, and an instance of rubberband is used once")
        else:
            self._ended(name, machine, at)
        intent = self.intents.get(name)
        if intent is None or not intent.lives or intent.last is None:
            return
        wrong = calls.amiss(machine, intent.last.choice)
        if wrong:
            self.end_soon(name, f"not what was asked for: {wrong}")
        elif intent.ending is not None:
            self.end_soon(name, intent.ending)

    def _runs(self, name: str, machine: Mapping[str, Any], at: float) -> None:
        self.intents.change(
            name,
            lambda intent: (
                intent
                if intent.running_at is not None
                else replace(intent, running_at=self._billed_from(intent, machine, at), seen_running_at=at)
            ),
        )

    def _billed_from(self, intent: Intent, machine: Mapping[str, Any], at: float) -> float:
        """The earliest that it can have begun to run: a bill is never underestimated.

        EC2 bills from `running`, and tells only when the launch was. A look may show a state that is out of date.
        """
        launched_at = states.launched_at(machine) or intent.requested_at
        pending_at = self._pending_at.get(intent.instance, launched_at) - LOOK_S
        return max(intent.requested_at, min(at, max(launched_at, pending_at)))

    def _ended(self, name: str, machine: Mapping[str, Any], at: float) -> None:
        if not states.never_ran(machine):
            self._runs(name, machine, at)
        told_at = states.transition_at(machine)
        ended_at = min(at, self.latest_end(name) if told_at is None else told_at + 1.0)
        intent = self.intents.get(name)
        ours = None if intent is None or not states.ended_by_a_call(machine) else intent.ending
        lease_over = ended_at >= self._latest_until - self.look_s
        reason = console.why_ended(self.session, machine, lease_over=lease_over) if ours is None else ours
        self._finish(name, ended_at, reason, preempted=states.taken_back(machine))

    def latest_end(self, name: str) -> float:
        """When an instance has surely ended itself, whatever became of the driver: with its lease."""
        intent = self.intents.get(name)
        if intent is None or intent.last is None:
            return math.inf
        began_at = intent.last.asked_at if intent.running_at is None else intent.running_at
        until = self._latest_until if name in self._met else self._former_until
        return max(until, began_at + intent.last.lease_s) + SHUTDOWN_S

    def _finish(self, name: str, ended_at: float, reason: str, *, preempted: bool = False) -> Intent:
        def finished(intent: Intent) -> Intent:
            ended = ended_at if intent.running_at is None else max(ended_at, intent.running_at)
            return replace(intent, ended_at=ended, reason=reason, preempted=preempted)

        return self.intents.change(name, finished)

    def _miss(self, seen: Intent, at: float) -> None:
        """EC2 does not show what was asked for."""
        name, intent = seen.instance, self.intents.get(seen.instance)
        if intent is None or not intent.lives or name in self.launching:
            return
        last = intent.last
        if last is None or last.outcome == "refused":
            self._finish(name, at, "the driver was interrupted while requesting it")
            return
        count, first_at = self._missed.get(name, (0, at))
        self._missed[name] = (count + 1, first_at)
        believed = count >= 1 or at > self.latest_end(name)  # else EC2 may only not show it for a moment
        if not believed or at - last.asked_at < VISIBILITY_S:
            return
        if last.outcome != "accepted" and not self._take_for_forgotten(name, at):
            self._finish(name, at, "the request was interrupted, and launched no instance")
        elif shown := self._by_id(last.instance_id):  # EC2 takes the tags of what has ended away after a while
            self._follow(name, shown[0], at)
        else:
            self._vanished(name, first_at)

    def _vanished(self, name: str, at: float) -> None:
        """It was accepted, or even seen, and EC2 forgot it: it ended, at the latest when its lease did."""
        self._runs(name, {}, at)
        self._finish(name, min(at, self.latest_end(name)), "EC2 no longer lists it")

    def _take_for_forgotten(self, name: str, at: float) -> bool:
        """Whether an unanswered request is so old that its instance may have run, ended and been forgotten.

        It is then taken to have run for its whole lease: a bill is never underestimated.
        """
        intent = self.intents.get(name)
        if intent is None or at - intent.requested_at < _FORGETS_S:
            return False
        self.intents.change_last(name, outcome="accepted")
        self._vanished(name, at)
        return True

    def end_stray(self, machine: Mapping[str, Any]) -> None:
        """An instance of this run that nothing refers to: a request that was given up took effect after all."""
        identity = machine["InstanceId"]
        if machine["State"]["Name"] not in states.ALIVE:
            return
        if identity not in self._told_to_end:  # else EC2 shows a state that is out of date
            _log.warning("terminating %s, which was abandoned but still runs", identity)
            self.strays[identity] = machine
        with suppress(*FAILURES):  # it is ended at the next look
            self.ec2.terminate_instances(InstanceIds=[identity])
            self._told_to_end.add(identity)

    def end_soon(self, name: str, reason: str) -> None:
        """Order the end of an instance once, without waiting; a look that still finds it is to order it again."""
        intent = self.intents.change(name, lambda i: replace(i, ending=reason if i.ending is None else i.ending))
        if intent.lives and intent.last is not None and intent.last.outcome == "accepted":
            with suppress(*FAILURES):
                self._terminate_once(name, intent.last)

    def end(self, name: str, reason: str = "") -> Intent:
        """End the instance, and return once EC2 has accepted that; idempotent. Settles first what was not answered.

        Raises ProviderError if EC2 cannot be made to: it may still run then, until its lease ends.
        """
        intent = self.intents.change(name, lambda i: replace(i, ending=reason if i.ending is None else i.ending))
        if not intent.lives:
            return intent
        last = intent.last
        if last is None or last.outcome == "refused":
            return self._finish(name, self.clock(), reason)
        if last.outcome == "unknown" and self.settle(name) is None:
            return self._finish(name, self.clock(), reason)
        return self._end_accepted(name)

    def _end_accepted(self, name: str) -> Intent:
        pauses = self.pauses()
        while True:
            intent = self.intents.get(name)
            assert intent is not None
            assert intent.last is not None
            if not intent.lives:
                return intent
            try:
                return self._terminate_once(name, intent.last)
            except FAILURES as error:
                meaning = self._meaning(error, name, intent.last)
                if meaning == "absent" and self.clock() - intent.last.asked_at >= VISIBILITY_S:
                    self._vanished(name, self.clock())
                    continue
                patient = meaning == "absent" or self._deaf_for_s() < PATIENCE_S
                if meaning not in ("absent", "unknown", "throttled") or not patient:
                    raise ProviderError(
                        f"instance {name} ({intent.last.instance_id}) is not released yet: {explain(error)}"
                    ) from error
            self.sleep(next(pauses))

    def _deaf_for_s(self) -> float:
        """For how long EC2 obeys none: what one instance has waited for in vain, others do not wait for."""
        (since, last), at = self._deaf, self.clock()
        self._deaf = (at if at - last > VISIBILITY_S else since, at)
        return at - self._deaf[0]

    def _meaning(self, error: BaseException, name: str, attempt: LaunchAttempt) -> Verdict:
        """What a refusal to end it means: the right to hangs on its tags, which come late and go after its end."""
        if not lacks_rights(error):
            return verdict(error)
        shown, at = self._by_id(attempt.instance_id), self.clock()
        if shown and shown[0]["State"]["Name"] not in states.ALIVE:
            self._ended(name, shown[0], at)
            return "unknown"
        return "refused" if shown and at - attempt.asked_at >= VISIBILITY_S else "absent"

    def _terminate_once(self, name: str, attempt: LaunchAttempt) -> Intent:
        intent = self.intents.get(name)
        answer = self.ec2.terminate_instances(InstanceIds=[attempt.instance_id])
        self._told_to_end.add(attempt.instance_id)
        self._deaf, at = (-math.inf, -math.inf), self.clock()
        before = answer["TerminatingInstances"][0]["PreviousState"]["Name"]
        if before in ("shutting-down", "terminated"):  # by itself, or by an order whose answer was lost
            shown = []
            with suppress(ProviderError):
                shown = [m for m in self._by_id(attempt.instance_id) if m["State"]["Name"] not in states.ALIVE]
            for machine in shown:
                self._ended(name, machine, at)
            if not shown:  # whether it ever ran is not known: a bill is never underestimated
                self._runs(name, {}, at)
        elif before != "pending":
            self._runs(name, {}, at)
        return self._finish(name, at, (intent.ending if intent is not None else None) or "")

    def _by_id(self, identity: str) -> list[dict[str, Any]]:
        return described(self.session, [{"Name": "instance-id", "Values": [identity]}])

    def last_words(self, name: str) -> str:
        """What the console of an instance shows last, in a line; empty where it shows nothing."""
        intent = self.intents.get(name)
        if intent is None or intent.last is None or not intent.last.instance_id:
            return ""
        return console.at_work_on(console.output(self.session, intent.last.instance_id))

    def settle(self, name: str) -> dict[str, Any] | None:
        """Find out, without asking for it, whether an instance came of an unanswered request; None if none is shown.

        Looks by its token until the visibility window is over. Raises ProviderError if EC2 does not answer.
        """
        machine = self._find(name)
        if machine is not None:
            self.accept(name, machine)
        elif not self._take_for_forgotten(name, self.clock()):
            self.intents.change_last(name, outcome="refused", reason="no instance was launched")
        return machine

    def _find(self, name: str) -> dict[str, Any] | None:
        """The instance that came of the last attempt, looked for until the visibility window is over."""
        looks = 0
        while True:
            looks += 1
            found = self.find_now(name)
            if found is not None:
                return found
            if looks >= 2 and self.clock() - self.intents.last(name).asked_at >= VISIBILITY_S:
                return None
            self.sleep(self.look_s)

    def find_now(self, name: str) -> dict[str, Any] | None:
        """The instance of this name that came of its last attempt, if EC2 shows it."""
        intent = self.intents.get(name)
        assert intent is not None
        assert intent.last is not None
        shown = described(self.session, [{"Name": "client-token", "Values": [intent.last.token]}])
        return next((machine for machine in shown if intent.comes_of(intent.last, machine)), None)

    def end_all(self, end: Callable[[str], object] | None = None) -> list[Intent]:
        """End everything, strays included, each by `end` (by default this fleet's), and return what this ended.

        Raises ProviderError, after all that could be ended was, if something may still run.
        """
        before = sorted(self.intents.living(), key=lambda i: i.last is not None and i.last.outcome == "unknown")
        troubles = []
        for intent in before:  # those first that surely cost money
            try:
                (end or self.end)(intent.instance)
            except ProviderError as error:
                troubles.append(str(error))
        if any(intent.attempts for intent in self.intents.all()):
            self._end_strays(troubles)
        if troubles:
            raise ProviderError(
                f"{'; '.join(troubles)}. Instances that still run end when their lease expires; `rubberband sweep` "
                "ends them now"
            )
        return [ended for intent in before if (ended := self.intents.get(intent.instance)) and not ended.lives]

    def _end_strays(self, troubles: list[str]) -> None:
        """Look until nothing is left, nor can appear of requests that were never answered."""
        pauses, quiet_at = self.pauses(), self.clock()
        while True:
            trouble = ""
            try:
                alive = [machine["InstanceId"] for machine in self._strays()]
            except ProviderError as error:
                trouble = str(error)
            else:
                if alive:
                    trouble = f"{', '.join(alive)} did not end within {PATIENCE_S:.0f} s"
                elif not self.intents.in_doubt(self.clock(), VISIBILITY_S):
                    return
            if not trouble:
                quiet_at = self.clock()
            elif troubles or self.clock() - quiet_at >= PATIENCE_S:
                troubles.append(trouble)
                return
            self.sleep(max(self.look_s, next(pauses)))

    def _strays(self) -> list[dict[str, Any]]:
        alive = [machine for machine in self._shown() if machine["State"]["Name"] in states.ALIVE]
        for machine in alive:
            self.end_stray(machine)
        return alive
