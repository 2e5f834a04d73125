"""The instances of a virtual run as its driver sees them: the events of each, and when they arrive.

It keeps to what `rubberband.executor.ray.fleet` promises: the last event of an instance is that it was refused, lost or
released; a launch that is given up is answered by its release; an instance that the driver gave up has no other event.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from rubberband.cloud.provider import InstanceDescription
from rubberband.cloud.virtual import InstanceFaults, VirtualClock, VirtualProvider
from rubberband.errors import NoCapacityError, ProviderError
from rubberband.executor.core.backend import ended, living, released, running
from rubberband.executor.core.events import (
    DriverResumed,
    EndedInstance,
    Event,
    FailureKind,
    InstanceInterrupted,
    InstanceLost,
    InstancePriced,
    InstanceReady,
    InstanceRefused,
    LiveInstance,
)
from rubberband.values.offer import SECONDS_PER_HOUR, Offer
from rubberband.values.plan import Market
from rubberband.values.profile import Law, Profile, Spread

# What goes wrong in a virtual run: the faults of every instance, message and attempt, known beforehand.


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """How slowly driver and cloud talk about one instance. Seconds."""

    answer_s: float = 0.0
    """From the order to launch it until the provider has answered."""
    arrives: bool = True
    """Whether the request takes effect at once; if not, with the answer."""
    seen_after_s: float = 0.0
    """From what happens to it until the driver sees it."""
    release_s: float = 0.0
    """From the order to release it until the provider has obeyed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFaults:
    """Faults of one attempt of a trial."""

    failure: FailureKind | None = None
    """How it ends; 'hung' is silence. None: it does not fail."""
    loses_checkpoint: bool = False
    """Whether the checkpoint that it starts from, if any, is gone or not what was written."""
    after_reports: int = 0
    """The failure comes in place of the report after this number."""
    pace: float = 1.0
    """Factor of its iterations' times over the profile's."""
    startup: float = 1.0
    """Factor of its start-up's time over the profile's."""
    outlives_stop: bool = False
    """Whether its next report is already under way when it is stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialEnd:
    """End of a trial by itself."""

    iterations: int
    """Iterations that it has done by then."""
    returns: bool = False
    """Whether a function returns some time after its last report; otherwise that report says so."""


class FaultModel(Protocol):
    """Faults of a virtual run."""

    def instance(self, instance: str, market: Market) -> InstanceFaults:
        """The faults of an instance; asked once."""
        ...

    def messages(self, instance: str) -> Messages:
        """How slowly driver and cloud talk about it; asked once by each driver."""
        ...

    def attempt(self, trial: int, attempt: int) -> AttemptFaults:
        """The faults of an attempt."""
        ...

    def end(self, trial: int) -> TrialEnd | None:
        """The end of a trial by itself; None: it trains as long as it may."""
        ...

    def iteration(self, trial: int, iterations: int) -> float:
        """How many times longer than the attempt's others the trial's iteration number `iterations` takes."""
        ...

    def pace(self, instance: str, at: float) -> float:
        """How many times longer a step takes on an instance than on the others, at an instant of the clock."""
        ...


_PROMPT = Messages()
_SOUND = AttemptFaults()


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """A fault model that is written down: just these things go wrong; nothing by default."""

    refused: Collection[str] = ()
    """Instances that the provider refuses."""
    lost_after_s: Mapping[str, float] = field(default_factory=dict)
    """Instance -> seconds after it began to run at which it dies."""
    failures: Mapping[tuple[int, int], FailureKind] = field(default_factory=dict)
    """(trial, attempt) -> how the attempt ends, in place of its first report; 'hung' means silence."""
    lost_checkpoints: Collection[tuple[int, int]] = ()
    """(trial, attempt) that cannot go on from its checkpoint."""
    instance_faults: Mapping[str, InstanceFaults] = field(default_factory=dict)
    """Instance -> whatever else becomes of it."""
    ends: Mapping[int, TrialEnd] = field(default_factory=dict)
    """Trial -> when it ends by itself."""
    slow: Mapping[str, float] = field(default_factory=dict)
    """Instance -> how many times longer a step takes on it."""
    slow_from: float = 0.0
    """Instant of the clock from which slow instances are slow."""

    def instance(self, instance: str, market: Market) -> InstanceFaults:
        """Return what is written down."""
        if instance in self.instance_faults:
            return self.instance_faults[instance]
        refused = f"no capacity for {instance}" if instance in self.refused else ""
        return InstanceFaults(refused=refused, ends_after_s=self.lost_after_s.get(instance, math.inf))

    def messages(self, instance: str) -> Messages:
        """Prompt."""
        return _PROMPT

    def attempt(self, trial: int, attempt: int) -> AttemptFaults:
        """Return what is written down."""
        kind, is_lost = self.failures.get((trial, attempt)), (trial, attempt) in self.lost_checkpoints
        return AttemptFaults(failure=kind, loses_checkpoint=is_lost) if kind is not None or is_lost else _SOUND

    def end(self, trial: int) -> TrialEnd | None:
        """Return what is written down."""
        return self.ends.get(trial)

    def iteration(self, trial: int, iterations: int) -> float:
        """Return that no iteration differs."""
        return 1.0

    def pace(self, instance: str, at: float) -> float:
        """Return what is written down."""
        return self.slow.get(instance, 1.0) if at >= self.slow_from else 1.0


_BEATS = 10
"""Renewals in the time of a lease."""

Action = Callable[[float], Event | None]
"""An occurrence at an instant, and its event."""


class Agenda:
    """Future occurrences, in order."""

    def __init__(self) -> None:
        self._items: list[tuple[float, int, Action]] = []
        self._order = itertools.count()

    def add(self, instant: float, action: Action) -> None:
        """Add an occurrence; at the same instant, the one that was added first comes first."""
        heapq.heappush(self._items, (instant, next(self._order), action))

    def next_at(self) -> float:
        """Return when the next occurrence is; infinite if there is none."""
        return self._items[0][0] if self._items else math.inf

    def pop_due(self, now: float) -> Action | None:
        """Return the next occurrence, if it is due by now; None otherwise."""
        items = self._items
        return heapq.heappop(items)[2] if items and items[0][0] <= now else None

    def postpone(self, seconds: float) -> None:
        """Move all future occurrences `seconds` later."""
        self._items = [(at + seconds, order, action) for at, order, action in self._items]

    def clear(self) -> None:
        """Drop all future occurrences."""
        self._items.clear()


@dataclass(slots=True)
class _VirtualHold:
    """One instance as the driver sees it, from the order to launch it to its end."""

    messages: Messages
    answered_at: float
    launched: bool = False
    running: bool = False
    interrupted: bool = False
    hour_prices_usd: tuple[float, ...] | None = None
    """Prices of the latest event."""
    over: bool = False
    """Released (or about to be), refused or lost: its next event is its last, or was."""


class VirtualFleet:
    """Instances of a `VirtualProvider`; what happens to them goes on the agenda."""

    def __init__(
        self,
        provider: VirtualProvider,
        clock: VirtualClock,
        agenda: Agenda,
        fault_model: FaultModel,
        *,
        lease_s: float,
        ready_timeout_s: float,
    ) -> None:
        """Leases are of `lease_s`; what is not warm `ready_timeout_s` after it was seen to run is given up as lost."""
        self._provider = provider
        self._clock = clock
        self._agenda = agenda
        self._fault_model = fault_model
        self._lease_s = lease_s
        self._ready_timeout_s = ready_timeout_s
        self._next_beat_at = self._began_at = -math.inf
        self._holds: dict[str, _VirtualHold] = {}
        self.gone: set[str] = set()
        """Instances that no worker lives on, whether the driver knows it or not."""
        self.hold_until = math.inf
        """Leases never reach beyond it."""

    # Leases

    def beat(self, at: float) -> None:
        """Renew the leases if that is due; the driver lives at least until `at`, which is now or later."""
        if at >= self._next_beat_at:
            self.renew(at)

    def renew(self, at: float) -> None:
        """Renew the leases; the driver lives at least until `at`, which is now or later."""
        lapsed = self._clock.now() > self._provider.lease_until
        self._provider.renew_lease(min(at + self._lease_s, self.hold_until))
        self._next_beat_at = at + self._lease_s / _BEATS
        if lapsed:
            self.notice_ends()

    def next_end_at(self) -> float:
        """Return when the first live instance ends, if nothing is done about it; infinite: never."""
        return min((self._provider.ends_at(instance) for instance in self._unended()), default=math.inf)

    def notice_ends(self) -> None:
        """Put the ends of instances that were not reported yet on the agenda."""
        for instance in self._unended():
            ends_at = self._provider.ends_at(instance)
            if ends_at <= self._clock.now():
                hold = self._holds[instance]
                self.gone.add(instance)
                self._agenda.add(ends_at + hold.messages.seen_after_s, self._ending(instance, hold))

    def _unended(self) -> list[str]:
        return [instance for instance, hold in self._holds.items() if hold.launched and instance not in self.gone]

    # Launch

    def launch(self, instance: str, market: Market, first_lease_s: float | None = None) -> None:
        """Rent an instance; its events follow. Harmless when repeated."""
        if instance in self._holds:
            return
        messages = self._fault_model.messages(instance)
        hold = self._holds[instance] = _VirtualHold(messages, self._clock.now() + messages.answer_s)
        now = self._clock.now()
        self.renew(now)
        lease_s = max(0.0, self._provider.lease_until - now) if first_lease_s is None else first_lease_s
        if messages.arrives:
            self._ask(instance, market, hold, lease_s)
        else:
            self._agenda.add(
                hold.answered_at, lambda _: None if hold.over else self._ask(instance, market, hold, lease_s)
            )

    def _ask(self, instance: str, market: Market, hold: _VirtualHold, lease_s: float) -> None:
        try:
            self._provider.launch(instance, market, first_lease_s=lease_s)
        except ProviderError as error:
            reason, sold_out = str(error), isinstance(error, NoCapacityError)
            self._agenda.add(
                hold.answered_at, lambda now: self._refused(instance, hold, reason, now, sold_out=sold_out)
            )
        else:
            hold.launched = True
            self._follow(instance, hold)

    def _refused(
        self,
        instance: str,
        hold: _VirtualHold,
        reason: str,
        now: float,
        *,
        failed_start: bool = False,
        sold_out: bool = False,
    ) -> Event | None:
        if hold.over:
            return None
        hold.over = True
        return InstanceRefused(
            occurred_at=now, instance=instance, reason=reason, failed_start=failed_start, sold_out=sold_out
        )

    def _follow(self, instance: str, hold: _VirtualHold) -> None:
        """Put on the agenda what will become of an instance that is asked for."""
        course, late_s = self._provider.course(instance), hold.messages.seen_after_s
        seen_at = max(course.running_at + late_s, hold.answered_at)
        if course.running_at < math.inf:
            self._agenda.add(seen_at, lambda now: self._running(instance, hold, now))
            self._agenda.add(course.ends_at, lambda now: self._end(instance, hold))
            if course.init_s > self._ready_timeout_s:
                self._agenda.add(seen_at + self._ready_timeout_s, lambda now: self._give_up(instance, hold, now))
            elif course.init_s < math.inf:
                self._agenda.add(seen_at + course.init_s, lambda now: self._ready(instance, hold, now))
        if course.notice_at < math.inf:
            noticed_at = max(course.notice_at + late_s, seen_at)
            self._agenda.add(noticed_at, lambda now: self._interrupted(instance, hold, now))
        if course.taken_at < math.inf:
            self._agenda.add(course.taken_at, lambda now: self._end(instance, hold))

    # What the driver sees

    def _running(self, instance: str, hold: _VirtualHold, now: float) -> Event | None:
        if hold.over or hold.running:
            return None
        status = self._provider.status(instance)
        if status.running_at is None:  # it ended before, and an event says so
            return None
        hold.running, hold.hour_prices_usd = True, status.hour_prices_usd
        if hold.hour_prices_usd is not None and status.ended_at is None:
            self._agenda.add(status.running_at + SECONDS_PER_HOUR, lambda then: self._begun(instance, hold, then))
        return running(status, status.running_at, now)

    def _begun(self, instance: str, hold: _VirtualHold, now: float) -> Event | None:
        """Begin another hour, whose price is reported once it is seen."""
        if hold.over or instance in self.gone:
            return None
        self._agenda.add(now + SECONDS_PER_HOUR, lambda then: self._begun(instance, hold, then))
        self._agenda.add(now + hold.messages.seen_after_s, lambda then: self._priced(instance, hold, then))
        return None

    def _priced(self, instance: str, hold: _VirtualHold, now: float) -> Event | None:
        """Return the prices of its begun hours, if they are news."""
        prices = self._provider.status(instance).hour_prices_usd if hold.launched else None
        if prices is None or prices == hold.hour_prices_usd:
            return None
        hold.hour_prices_usd = prices
        return InstancePriced(occurred_at=now, instance=instance, hour_prices_usd=prices)

    def _ready(self, instance: str, hold: _VirtualHold, now: float) -> Event | None:
        if hold.over or instance in self.gone:
            return None
        self._provider.reach(instance)
        return InstanceReady(occurred_at=now, instance=instance)

    def _interrupted(self, instance: str, hold: _VirtualHold, now: float) -> Event | None:
        if hold.over or hold.interrupted or instance in self.gone:
            return None
        hold.interrupted = True
        return InstanceInterrupted(
            occurred_at=now,
            instance=instance,
            free_if_taken=self._provider.status(instance).hour_prices_usd is not None,
        )

    def _give_up(self, instance: str, hold: _VirtualHold, now: float) -> Event | None:
        """An instance that is of no use is given back, and called lost."""
        if hold.over or instance in self.gone:
            return None
        hold.over = True
        self.gone.add(instance)
        return _lost(self._provider.lose(instance, "its workers did not become warm"), now)

    def _end(self, instance: str, hold: _VirtualHold) -> Event | None:
        """End a machine that may have ended by itself; the driver sees it later."""
        now = self._clock.now()
        if instance not in self.gone and self._provider.ends_at(instance) <= now:
            self.gone.add(instance)
            self._agenda.add(now + hold.messages.seen_after_s, self._ending(instance, hold))
        return None

    def _ending(self, instance: str, hold: _VirtualHold) -> Action:
        """Return the events of an end: that it ran, if that was not seen before, and that it is gone."""

        def seen(now: float) -> Event | None:
            if hold.over:
                return None
            status = self._provider.status(instance)
            if status.running_at is None:
                failed_start = not status.preempted and status.requested_at >= self._began_at
                reason = status.reason or "ended by another user or process"
                return self._refused(instance, hold, reason, now, failed_start=failed_start)
            if not hold.running:
                self._agenda.add(now, seen)
                return self._running(instance, hold, now)
            if (priced := self._priced(instance, hold, now)) is not None:
                self._agenda.add(now, seen)
                return priced
            hold.over = True
            return _lost(status, now)

        return seen

    # Release

    def release(self, instance: str) -> None:
        """Give an instance back; InstanceReleased follows. Harmless when repeated."""
        now = self._clock.now()
        hold = self._holds.get(instance)
        if hold is None:
            hold = self._holds[instance] = _VirtualHold(self._fault_model.messages(instance), now)
        elif hold.over:
            return
        hold.over = True
        self.gone.add(instance)
        if hold.launched:
            self._provider.lose_touch(instance)
        obeyed_at = max(now, hold.answered_at) + hold.messages.release_s
        if obeyed_at > now:
            self._agenda.add(obeyed_at, lambda then: self._release(instance, hold, then))
        else:
            self._release(instance, hold, now)

    def _release(self, instance: str, hold: _VirtualHold, now: float) -> None:
        try:
            given_back = released(instance, self._provider.release(instance), now)
        except ProviderError:  # it was refused, or never asked for
            given_back = released(instance, None, now)
        self._agenda.add(now, lambda then: self._priced(instance, hold, then))
        self._agenda.add(now, lambda _: given_back)

    # A new driver

    def reconcile(self, known: Collection[str]) -> DriverResumed:
        """Say what lives and what ended, adopt the `known`, release the others."""
        self._holds.clear()
        self.gone.clear()
        self.hold_until, self._next_beat_at = math.inf, -math.inf
        self._provider.change_driver()
        self._began_at = self._clock.now()
        live: list[LiveInstance] = []
        gone: list[EndedInstance] = []
        for status in self._provider.describe():
            if status.instance not in known and status.state != "terminated":
                status = self._provider.release(status.instance)
            if status.state != "terminated":
                live.append(living(status))
                self._adopt(status)
            elif status.running_at is not None:
                gone.append(ended(status))
        return DriverResumed(occurred_at=self._clock.now(), live=tuple(live), ended=tuple(gone))

    def _adopt(self, status: InstanceDescription) -> None:
        hold = _VirtualHold(self._fault_model.messages(status.instance), self._clock.now())
        hold.launched, hold.running = True, status.running_at is not None
        hold.hour_prices_usd = status.hour_prices_usd
        if hold.running and status.hour_prices_usd and status.running_at is not None:
            next_at = status.running_at + len(status.hour_prices_usd) * SECONDS_PER_HOUR
            self._agenda.add(next_at, lambda then: self._begun(status.instance, hold, then))
        self._holds[status.instance] = hold
        self._follow(status.instance, hold)

    def close(self) -> None:
        """Release everything."""
        self._holds.clear()
        self._provider.close()


def _lost(status: InstanceDescription, now: float) -> InstanceLost:
    return InstanceLost(
        occurred_at=now,
        instance=status.instance,
        ended_at=now if status.ended_at is None else status.ended_at,
        reason=status.reason,
        preempted=status.preempted,
        overslept=status.overslept(now),
    )


# The noise that a profile and an offer describe, drawn for a virtual run: the planner's model, one trial at a time.
#
# It is the other side of `rubberband.planner.noise.sampling`, and shares none of its code: iterations are drawn one by
# one, instances are taken away and replaced, and the controller decides. Nothing fails here for other reasons.


class Noise:
    """A `FaultModel` in which everything varies as the profile and the offer say, and nothing else goes wrong."""

    def __init__(
        self, profile: Profile, offer: Offer, *, seed: object, now: Callable[[], float], end_chance: float = 0.0
    ) -> None:
        """The same `seed` gives the same noise, whatever the plan. `now` reads the clock of the virtual run.

        `end_chance` is the probability with which a trial ends by itself after an iteration.
        """
        self._profile, self._offer, self._seed, self._now = profile, offer, seed, now
        self._end_chance = end_chance
        self._speeds: dict[int, float] = {}
        self._mean = _factor(profile.mean_cv, "lognormal", Random(f"{seed}/mean"))
        self._provision: dict[float, float] = {}
        self._iterations: dict[int, list[float]] = {}
        self._iteration_rngs: dict[int, Random] = {}

    def instance(self, instance: str, market: Market) -> InstanceFaults:
        """Return delays, and when the spot market takes it. Launches of one instant wait in one queue (SCALE)."""
        source, offer = Random(f"{self._seed}/{instance}"), self._offer
        asked_at = self._now()
        if asked_at not in self._provision:
            shared = Random(f"{self._seed}/provision {len(self._provision)}")
            self._provision[asked_at] = _spread_factor(offer.provision_spread, shared)
        ends_after_s = math.inf
        if market == "spot" and offer.spot is not None and offer.spot.interruptions_per_hour > 0.0:
            ends_after_s = source.expovariate(offer.spot.interruptions_per_hour / SECONDS_PER_HOUR)
        return InstanceFaults(
            provision_s=offer.provision_delay_s * self._provision[asked_at],
            init_s=offer.init_delay_s * _spread_factor(offer.init_spread, source),
            ends_after_s=ends_after_s,
            preempted=ends_after_s < math.inf,
        )

    def messages(self, instance: str) -> Messages:
        """Return that nothing is late."""
        return _PROMPT

    def attempt(self, trial: int, attempt: int) -> AttemptFaults:
        """Return the trial's own speed, and a start-up drawn anew."""
        source = Random(f"{self._seed}/trial {trial}/start {attempt}")
        startup = _factor(self._profile.startup_cv, "lognormal", source)
        return AttemptFaults(pace=self.speed(trial), startup=startup)

    def end(self, trial: int) -> TrialEnd | None:
        """Return an end after a number of iterations that is drawn (geometric); None without a chance of one."""
        if self._end_chance == 0.0:
            return None
        source = Random(f"{self._seed}/trial {trial}/end")
        lasted = math.log(1.0 - source.random()) / math.log1p(-self._end_chance)
        return TrialEnd(iterations=1 + int(lasted), returns=source.random() < 0.5)

    def speed(self, trial: int) -> float:
        """Return how many times longer than profiled the trial's iterations take, all along."""
        if trial not in self._speeds:
            source = Random(f"{self._seed}/trial {trial}")
            self._speeds[trial] = self._mean * _factor(self._profile.trial_cv, self._profile.law, source)
        return self._speeds[trial]

    def iteration(self, trial: int, iterations: int) -> float:
        """Return how many times longer than its mean the trial's iteration number `iterations` takes."""
        if self._profile.iteration_cv == 0.0:
            return 1.0
        source = self._iteration_rngs.setdefault(trial, Random(f"{self._seed}/trial {trial}/iterations"))
        drawn = self._iterations.setdefault(trial, [])
        while len(drawn) < iterations:
            drawn.append(_factor(self._profile.iteration_cv, self._profile.law, source))
        return drawn[iterations - 1]

    def pace(self, instance: str, at: float) -> float:
        """Return that instances are alike."""
        return 1.0


def _factor(cv: float, law: Law, source: Random) -> float:
    if cv == 0.0:
        return 1.0
    if law == "normal":
        return max(0.0, source.gauss(1.0, cv))
    variance = math.log1p(cv * cv)
    return source.lognormvariate(-variance / 2.0, math.sqrt(variance))


def _spread_factor(spread: Spread, source: Random) -> float:
    return source.choice(spread.samples) if spread.samples else _factor(spread.cv, "lognormal", source)
