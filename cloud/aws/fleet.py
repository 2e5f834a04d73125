"""Instances of one run: EC2's view compared with the requests, their termination, and their bills on spot by the hour.

It never launches. EC2 is eventually consistent: an instance that it has accepted and does not show counts as ended only
once its lease is over, since it may train all the while. A request without an answer launched nothing if two looks and
the visibility window show nothing. A shown instance that was not requested (or was given up) is terminated at once.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from rubberband.cloud.aws import calls, client
from rubberband.cloud.aws.calls import AwsSession
from rubberband.cloud.aws.client import described, pages
from rubberband.cloud.aws.errors import FAILURES, Verdict, explain, lacks_rights, verdict
from rubberband.cloud.aws.intents import HOUR_S, Intent, Intents, LaunchAttempt, Run, billed_prices_usd
from rubberband.cloud.catalogue import firmware_s
from rubberband.errors import ProviderError
from rubberband.values.plan import Market

_log = logging.getLogger(__name__)

VISIBILITY_S = 300.0
"""EC2 shows an instance after this time at the latest."""
_FORGETS_S = 1800.0
"""EC2 shows an ended instance for "usually less than one hour" (DescribeInstances): later, absence proves nothing."""
LOOK_S = 5.0
PATIENCE_S = 60.0
"""A termination is repeated for this long before the caller gets an error."""
_LONGEST_PAUSE_S = 20.0
_REMEMBERED_S = 60.0
"""A zone that has refused is tried after the others for this long."""
SHUTDOWN_S = 90.0
"""Longest time from the end of a lease until the machine is off."""


class Ec2Fleet:
    """Instances of one run. Thread-safe."""

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
        """Names in a launch, which settles them instead of a look."""
        self.strays: dict[str, Mapping[str, Any]] = {}
        """Id -> terminated instance without a request."""
        self.session = session
        self._random = random.Random(f"{run.experiment}/{run.run}")
        self._looking = threading.RLock()
        self._looked_at: float | None = None
        self.hours = SpotHours(session, intents)
        self._pending_at: dict[str, float] = {}
        self._missed: set[str] = set()
        self._refused_at: dict[tuple[str, str, Market], float] = {}
        """(type, zone, market) -> when it had no more."""
        self._termination_asked: set[str] = set()
        self._deaf = (-math.inf, -math.inf)
        """First and last time at which EC2 failed to terminate an instance, without a success since."""
        self._met: set[str] = set()
        self._former_until = self.intents.kept_until()
        self._latest_until = 0.0

    @property
    def ec2(self) -> Any:
        """boto3's client."""
        return self.session.client("ec2")

    def pauses(self) -> Iterator[float]:
        """Yield the seconds to wait before each repetition of a request."""
        ceiling_s = 1.0
        while True:
            yield self._random.uniform(0.5, 1.0) * ceiling_s
            ceiling_s = min(2.0 * ceiling_s, _LONGEST_PAUSE_S)

    def keep_until(self, until: float) -> None:
        """Remember the end of the latest lease: no instance of this run lives much longer."""
        if until > self._latest_until:
            self._latest_until = until
            self.intents.keep_until(until)

    def look(self) -> None:
        """Bring the intents up to date, at most every `look_s`.

        Raises ProviderError if EC2 does not answer: then nothing has changed.
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
        """Update the intent of an instance that EC2 shows. Return its name, or None for a stray."""
        name = calls.name_of(machine)
        intent = self.intents.get(name)
        attempt = None if intent is None else intent.attempt_of(machine)
        given_up = intent is None or attempt is None or not intent.lives or attempt is not intent.last
        if intent is None or attempt is None or given_up or attempt.outcome == "refused":
            self.terminate_stray(machine)
            return None
        if attempt.outcome == "unknown":
            self.accept(name, machine)
        elif attempt.instance_id != machine["InstanceId"]:
            self.terminate_stray(machine)
            return None
        self._missed.discard(name)
        self._follow(name, machine, at)
        return name

    def accept(self, name: str, machine: Mapping[str, Any]) -> None:
        """Record that the last attempt of `name` launched this instance."""
        self._met.add(name)
        self.intents.change_last(name, outcome="accepted", instance_id=machine["InstanceId"])

    def _follow(self, name: str, machine: Mapping[str, Any], at: float) -> None:
        state = machine["State"]["Name"]
        if state in client.ALIVE:
            self._met.add(name)
        if state == "pending":
            self._pending_at[name] = at
        elif state == "running":
            self._record_running(name, machine, at)
        elif state in ("stopping", "stopped"):
            self._record_running(name, machine, at)
            self.terminate_soon(name, "it was stopped, and an instance of rubberband is used once")
        else:
            self._record_end_shown(name, machine, at)
        intent = self.intents.get(name)
        if intent is None or not intent.lives or intent.last is None:
            return
        wrong = calls.mismatch(machine, intent.last.choice)
        if wrong:
            self.terminate_soon(name, f"not what was asked for: {wrong}")
        elif intent.ending is not None:
            self.terminate_soon(name, intent.ending)

    def _record_running(self, name: str, machine: Mapping[str, Any], at: float) -> None:
        self.intents.change(
            name,
            lambda intent: (
                intent
                if intent.running_at is not None
                else replace(intent, running_at=self._billed_from(intent, machine, at), seen_running_at=at)
            ),
        )

    def _billed_from(self, intent: Intent, machine: Mapping[str, Any], at: float) -> float:
        """Return the earliest time at which it can have begun to run, so that no bill is underestimated.

        EC2 bills from `running`, and shows only the time of the launch. A look may show an outdated state.
        """
        launched_at = client.launched_at(machine) or intent.requested_at
        pending_at = self._pending_at.get(intent.instance, launched_at) - LOOK_S
        return max(intent.requested_at, min(at, max(launched_at, pending_at)))

    def _record_end_shown(self, name: str, machine: Mapping[str, Any], at: float) -> None:
        ended_at = at if client.never_ran(machine) else self._ran_until(name, machine, at)
        if (began_at := client.transition_at(machine)) is not None:
            ended_at = min(at, began_at + 1.0)
        reason = self.intents.known(name).ending if client.ended_by_a_call(machine) else None
        if reason is None:
            lease_over = ended_at >= self._latest_until - self.look_s
            reason = client.why_ended(self.session, machine, lease_over=lease_over)
        if sold_out := client.sold_out(machine):
            self.note_refusal(self.intents.last(name).choice)
        self._record_end(name, ended_at, reason, preempted=client.taken_back(machine), sold_out=sold_out)

    def note_refusal(self, choice: calls.Purchase) -> None:
        """Note that a choice is sold out: launches try others first for a while."""
        self._refused_at[choice.instance_type, choice.zone, choice.market] = self.clock()

    def refused_lately(self, choice: calls.Purchase) -> bool:
        """Return whether a choice was sold out a moment ago."""
        refused_at = self._refused_at.get((choice.instance_type, choice.zone, choice.market), -math.inf)
        return self.clock() - refused_at < _REMEMBERED_S

    def latest_end(self, name: str) -> float:
        """Return when an instance has certainly ended itself, with its lease and without its driver."""
        intent = self.intents.get(name)
        if intent is None or intent.last is None:
            return math.inf
        if intent.running_at is None:  # no driver has reached it
            return self._boot_end(intent)
        until = self._latest_until if name in self._met else self._former_until
        return max(until + SHUTDOWN_S, self._boot_end(intent))

    def _boot_end(self, intent: Intent) -> float:
        """Return when an instance has ended itself, with the lease that it boots with."""
        assert intent.last is not None, "an attempt is written before its request"
        began_at = intent.last.asked_at if intent.running_at is None else intent.running_at
        return began_at + firmware_s(intent.last.choice.instance_type) + intent.last.lease_s + SHUTDOWN_S

    def _record_end(
        self, name: str, ended_at: float, reason: str, *, preempted: bool = False, sold_out: bool = False
    ) -> Intent:
        def finished(intent: Intent) -> Intent:
            ended = ended_at if intent.running_at is None else max(ended_at, intent.running_at)
            return replace(intent, ended_at=ended, reason=reason, preempted=preempted, sold_out=sold_out)

        return self.intents.change(name, finished)

    def _miss(self, seen: Intent, at: float) -> None:
        """Handle a requested instance that EC2 does not show."""
        name, intent = seen.instance, self.intents.get(seen.instance)
        if intent is None or not intent.lives or name in self.launching:
            return
        last = intent.last
        if last is None or last.outcome == "refused":
            self._record_end(name, at, "the driver was interrupted while requesting it")
            return
        is_over = at > self.latest_end(name) + VISIBILITY_S  # it may have been pending for minutes
        believed = name in self._missed or is_over  # else EC2 may omit it for a moment
        self._missed.add(name)
        if not is_over and intent.running_at is not None:  # the driver takes it for alive, and may reach it
            self._met.add(name)
        if not believed or at - last.asked_at < VISIBILITY_S:
            return
        if last.outcome != "accepted":
            if self._is_forgotten(intent, at):
                self._bill_whole_lease(name, at)
            else:
                self._record_end(name, at, "the request was interrupted, and launched no instance")
        elif shown := self._by_id(last.instance_id):  # EC2 removes the tags of ended instances after a while
            self._follow(name, shown[0], at)
        elif is_over:  # until then it may train, with a lease that is renewed: EC2 omits it
            self._record_end_of_forgotten(name, at)

    def _record_end_of_forgotten(self, name: str, at: float) -> None:
        """Record the end of an instance that EC2 has forgotten: it ended with its lease at the latest."""
        self._record_end(name, self._ran_until(name, {}, at), "EC2 no longer lists it")

    def _ran_until(self, name: str, machine: Mapping[str, Any], at: float) -> float:
        """Note that an instance ran, and return when it had ended at the latest."""
        latest_at = self.latest_end(name)
        if self.intents.known(name).running_at is None:  # no driver has reached it, whatever leases were renewed since
            self._record_running(name, machine, at)
            latest_at = self._boot_end(self.intents.known(name))
        return min(at, latest_at)

    def _is_forgotten(self, intent: Intent, at: float) -> bool:
        """Return whether an unanswered request is so old that EC2 may have forgotten its instance."""
        return at - intent.requested_at >= _FORGETS_S

    def _bill_whole_lease(self, name: str, at: float) -> None:
        """Take the instance of an unanswered request as having run for its whole lease: no bill is underestimated."""
        self.intents.change_last(name, outcome="accepted")
        self._record_end_of_forgotten(name, at)

    def terminate_stray(self, machine: Mapping[str, Any]) -> None:
        """Terminate an instance of this run without a request: one that was given up took effect after all."""
        identity = machine["InstanceId"]
        if machine["State"]["Name"] not in client.ALIVE:
            return
        if identity not in self._termination_asked:  # else EC2 shows an outdated state
            _log.warning("terminating %s, which was abandoned but still runs", identity)
            self.strays[identity] = machine
        with suppress(*FAILURES):  # the next look repeats it
            self.ec2.terminate_instances(InstanceIds=[identity])
            self._termination_asked.add(identity)

    def terminate_soon(self, name: str, reason: str) -> None:
        """Request the termination of an instance once, without waiting; a look that still finds it repeats it."""
        intent = self._record_ending(name, reason)
        if intent.lives and intent.last is not None and intent.last.outcome == "accepted":
            with suppress(*FAILURES):
                self._terminate_once(name, intent.last)

    def _record_ending(self, name: str, reason: str) -> Intent:
        return self.intents.change(name, lambda i: replace(i, ending=reason if i.ending is None else i.ending))

    def terminate(self, name: str, reason: str = "") -> Intent:
        """Terminate the instance, and return once EC2 has accepted that; idempotent. First settle an open request.

        Raises ProviderError if EC2 does not accept: the instance may then run until its lease ends.
        """
        intent = self._record_ending(name, reason)
        if not intent.lives:
            return intent
        last = intent.last
        if last is None or last.outcome == "refused" or (last.outcome == "unknown" and self.settle(name) is None):
            return self._record_end(name, self.clock(), reason)
        return self._terminate_until_accepted(name)

    def _terminate_until_accepted(self, name: str) -> Intent:
        pauses = self.pauses()
        while (intent := self.intents.known(name)).lives:
            last = self.intents.last(name)
            try:
                return self._terminate_once(name, last)
            except FAILURES as error:
                meaning = self._meaning(error, name, last)
                if meaning == "absent" and self.clock() - last.asked_at >= VISIBILITY_S:
                    self._record_end_of_forgotten(name, self.clock())
                    continue
                patient = meaning == "absent" or self._deaf_for_s() < PATIENCE_S
                if meaning not in ("absent", "unknown", "throttled") or not patient:
                    raise ProviderError(
                        f"instance {name} ({last.instance_id}) is not released yet: {explain(error)}"
                    ) from error
            self.sleep(next(pauses))
        return intent

    def _deaf_for_s(self) -> float:
        """Return how long EC2 has terminated nothing. All instances share this wait."""
        (since, last), at = self._deaf, self.clock()
        self._deaf = (at if at - last > VISIBILITY_S else since, at)
        return at - self._deaf[0]

    def _meaning(self, error: BaseException, name: str, attempt: LaunchAttempt) -> Verdict:
        """Return the meaning of a refused termination. The permission needs tags, which come late and later vanish."""
        if not lacks_rights(error):
            return verdict(error)
        shown, at = self._by_id(attempt.instance_id), self.clock()
        if shown and shown[0]["State"]["Name"] not in client.ALIVE:
            self._record_end_shown(name, shown[0], at)
            return "unknown"
        return "refused" if shown and at - attempt.asked_at >= VISIBILITY_S else "absent"

    def _terminate_once(self, name: str, attempt: LaunchAttempt) -> Intent:
        ending = self.intents.known(name).ending or ""
        answer = self.ec2.terminate_instances(InstanceIds=[attempt.instance_id])
        self._termination_asked.add(attempt.instance_id)
        self._deaf, at = (-math.inf, -math.inf), self.clock()
        before = answer["TerminatingInstances"][0]["PreviousState"]["Name"]
        if before in ("shutting-down", "terminated"):  # by itself, or by a request whose answer was lost
            shown = []
            with suppress(ProviderError):
                shown = [m for m in self._by_id(attempt.instance_id) if m["State"]["Name"] not in client.ALIVE]
            for machine in shown:
                self._record_end_shown(name, machine, at)
            if not shown:  # it may have run: a bill is never underestimated
                self._record_running(name, {}, at)
        elif before != "pending":
            self._record_running(name, {}, at)
        return self._record_end(name, at, ending)

    def _by_id(self, identity: str) -> list[dict[str, Any]]:
        return described(self.session, [{"Name": "instance-id", "Values": [identity]}])

    def last_words(self, name: str) -> str:
        """Return the last step and output on an instance's console, in a line; empty where it shows nothing."""
        intent = self.intents.get(name)
        if intent is None or intent.last is None or not intent.last.instance_id:
            return ""
        return client.current_step(client.output(self.session, intent.last.instance_id))

    def settle(self, name: str) -> dict[str, Any] | None:
        """Return the instance of an unanswered request, without repeating it; None if EC2 shows none.

        Looks by its token until the visibility window is over. Raises ProviderError if EC2 does not answer.
        """
        machine = self._find(name)
        if machine is not None:
            self.accept(name, machine)
        elif self._is_forgotten(self.intents.known(name), self.clock()):
            self._bill_whole_lease(name, self.clock())
        else:
            self.intents.change_last(name, outcome="refused", reason="no instance was launched")
        return machine

    def _find(self, name: str) -> dict[str, Any] | None:
        found = self.find_now(name)
        while found is None:
            self.sleep(self.look_s)
            found = self.find_now(name)
            if self.clock() - self.intents.last(name).asked_at >= VISIBILITY_S:
                break
        return found

    def find_now(self, name: str) -> dict[str, Any] | None:
        """Return the instance that the last attempt of this name launched, if EC2 shows it."""
        intent, last = self.intents.known(name), self.intents.last(name)
        shown = described(self.session, [{"Name": "client-token", "Values": [last.token]}])
        return next((machine for machine in shown if intent.comes_of(last, machine)), None)

    def terminate_all(self, end: Callable[[str], object]) -> None:
        """Terminate everything, strays included, each instance by `end`.

        Raises ProviderError in the end if an instance may still run.
        """
        troubles = []
        # First those that certainly cost money.
        for intent in sorted(self.intents.living(), key=lambda i: i.last is not None and i.last.outcome == "unknown"):
            try:
                end(intent.instance)
            except ProviderError as error:
                troubles.append(str(error))
        if any(intent.attempts for intent in self.intents.all()):
            self._terminate_strays(troubles)
        if troubles:
            raise ProviderError(
                f"{'; '.join(troubles)}. Instances that still run end when their lease expires; `rubberband cleanup` "
                "ends them now"
            )

    def _terminate_strays(self, troubles: list[str]) -> None:
        """Look until nothing is left, nor can appear from requests without an answer."""
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
        alive = [machine for machine in self._shown() if machine["State"]["Name"] in client.ALIVE]
        for machine in alive:
            self.terminate_stray(machine)
        return alive


# Hourly prices of spot instances: each hour since an instance began to run costs the price at its beginning.
#
# "You pay the Spot price that's in effect at the beginning of each instance-hour for your running instance. If Spot
# price changes after you launch the instance, the new price is charged against the instance usage for the subsequent
# hour" (Amazon EC2 FAQs, Spot Instances). So a price is requested once an hour has begun, and stays. EC2 does not show
# the exact second at which an instance began to run: the highest price that may have been in effect counts.


PAUSE_S = 60.0
"""Pause before missing prices are requested again."""
ROUNDING_S = 1.0
"""EC2's times are in whole seconds, rounded down."""

Changes = Sequence[tuple[float, float]]
"""(start time, USD per hour), in order."""


class SpotHours:
    """Looks up the prices of all hours that the spot instances of a run have begun. Thread-safe."""

    def __init__(self, session: AwsSession, intents: Intents) -> None:
        self._session = session
        self._intents = intents
        self._mutex = threading.Lock()
        self._ask_at = -math.inf

    def look(self, now: float) -> None:
        """Request all unknown prices at once; repeat those that EC2 lacks at most once a minute."""
        with self._mutex:
            unknown = [one for one in self._intents.all() if len(billed_prices_usd(one)) < _hours(one, now)]
            if not unknown or now < self._ask_at:
                return
            try:
                found = priced(self._session, unknown, now)
            except FAILURES as error:
                _log.warning("this hour's spot prices are not known yet: %s", explain(error))
                found = {}
            self._ask_at = now if len(found) == len(unknown) else now + PAUSE_S
            for name, hour_prices_usd in found.items():
                self._intents.price(name, hour_prices_usd)


def _hours(intent: Intent, now: float) -> int:
    """Return the number of hours of a spot instance that have begun, for a living one with certainty."""
    if intent.market != "spot" or intent.running_at is None or intent.last is None:
        return 0
    if intent.ended_at is not None:
        return max(1, math.ceil((intent.ended_at - intent.running_at) / HOUR_S))
    return math.floor((now - intent.running_at - _doubt_s(intent)) / HOUR_S) + 1


def _doubt_s(intent: Intent) -> float:
    """Return the uncertainty of its start."""
    if intent.running_at is None or intent.seen_running_at is None:
        return 0.0
    return max(0.0, intent.seen_running_at - intent.running_at)


def priced(session: AwsSession, intents: Sequence[Intent], now: float) -> dict[str, tuple[float, ...]]:
    """Return name -> prices of all begun hours, for the instances with new prices.

    One request serves all types and zones. Raises botocore's errors.
    """
    since = min(_begins_at(intent, len(intent.hour_prices_usd)) for intent in intents) - ROUNDING_S
    choices = [intent.last.choice for intent in intents if intent.last is not None]
    changes: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for one in pages(
        session.client("ec2").describe_spot_price_history,
        "SpotPriceHistory",
        InstanceTypes=sorted({choice.instance_type for choice in choices}),
        ProductDescriptions=["Linux/UNIX"],
        Filters=[{"Name": "availability-zone", "Values": sorted({choice.zone for choice in choices})}],
        StartTime=datetime.fromtimestamp(since, UTC),
        EndTime=datetime.fromtimestamp(now, UTC),
    ):
        place = one["InstanceType"], one["AvailabilityZone"]
        changes.setdefault(place, []).append((one["Timestamp"].timestamp(), float(one["SpotPrice"])))
    found = ((intent, _with_more(intent, changes, now)) for intent in intents)
    return {intent.instance: prices for intent, prices in found if prices != intent.hour_prices_usd}


def _with_more(intent: Intent, changes: Mapping[tuple[str, str], Changes], now: float) -> tuple[float, ...]:
    prices = list(intent.hour_prices_usd)
    assert intent.last is not None, "what runs was asked for"
    known = sorted(changes.get((intent.last.choice.instance_type, intent.last.choice.zone), ()))
    while len(prices) < _hours(intent, now):
        begins_at = _begins_at(intent, len(prices))
        price = highest(known, begins_at - ROUNDING_S, begins_at + _doubt_s(intent))
        if price is None:
            break
        prices.append(price)
    return tuple(prices)


def _begins_at(intent: Intent, hour: int) -> float:
    return (intent.running_at or 0.0) + hour * HOUR_S


def highest(changes: Changes, since: float, until: float) -> float | None:
    """Return the highest price in effect between two times; None if it is unknown at the first."""
    before = [price for at, price in changes if at <= since]
    during = [price for at, price in changes if since < at <= until]
    return max([before[-1], *during]) if before else None
