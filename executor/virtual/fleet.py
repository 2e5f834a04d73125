"""The instances of a virtual run as its driver sees them: the events of each, and when they arrive.

Events come from the machine that `rubberband.executor.ray.fleet` uses too, `rubberband.executor.core.backend`.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Protocol

from rubberband.cloud.provider import InstanceDescription
from rubberband.cloud.virtual import InstanceFaults, VirtualClock, VirtualProvider
from rubberband.errors import NoCapacityError, ProviderError
from rubberband.executor.core.backend import Lifecycle, resumed
from rubberband.executor.core.events import DriverResumed, Event, FailureKind, LiveInstance
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

    def messages(self, instance: str) -> Messages:
        """How slowly driver and cloud talk about it; asked once by each driver."""

    def attempt(self, trial: int, attempt: int) -> AttemptFaults:
        """The faults of an attempt."""

    def end(self, trial: int) -> TrialEnd | None:
        """The end of a trial by itself; None: it trains as long as it may."""

    def iteration(self, trial: int, iterations: int) -> float:
        """How many times longer than the attempt's others the trial's iteration number `iterations` takes."""

    def pace(self, instance: str, instant: float) -> float:
        """How many times longer a step takes on an instance than on the others, at an instant of the clock."""


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
        if instance in self.instance_faults:
            return self.instance_faults[instance]
        refused = f"no capacity for {instance}" if instance in self.refused else ""
        return InstanceFaults(refused=refused, ends_after_s=self.lost_after_s.get(instance, math.inf))

    def messages(self, instance: str) -> Messages:
        return _PROMPT

    def attempt(self, trial: int, attempt: int) -> AttemptFaults:
        kind, is_lost = self.failures.get((trial, attempt)), (trial, attempt) in self.lost_checkpoints
        return AttemptFaults(failure=kind, loses_checkpoint=is_lost) if kind is not None or is_lost else _SOUND

    def end(self, trial: int) -> TrialEnd | None:
        return self.ends.get(trial)

    def iteration(self, trial: int, iterations: int) -> float:
        return 1.0

    def pace(self, instance: str, instant: float) -> float:
        return self.slow.get(instance, 1.0) if instant >= self.slow_from else 1.0


_BEATS = 10
"""Renewals in the time of a lease."""

Action = Callable[[float], Event | None]
"""An occurrence at an instant, and its event."""


def _same(event: Event, _: float) -> Event:
    return event


class Agenda:
    """Future occurrences, in order."""

    def __init__(self) -> None:
        self._items: list[tuple[float, int, Action]] = []
        self._order = itertools.count()

    def add(self, instant: float, action: Action) -> None:
        """Add an occurrence; at the same instant, the one that was added first comes first."""
        heapq.heappush(self._items, (instant, next(self._order), action))

    def add_all(self, instant: float, events: Sequence[Event]) -> None:
        """Add events, in their order."""
        for event in events:
            self.add(instant, partial(_same, event))

    def begin(self, now: float, events: Sequence[Event]) -> Event | None:
        """Return the first of the events; the others follow at once."""
        self.add_all(now, events[1:])
        return events[0] if events else None

    def next_at(self) -> float:
        """Return when the next occurrence is; infinite if there is none."""
        return self._items[0][0] if self._items else math.inf

    def pop_due(self, now: float) -> Action | None:
        """Return the next occurrence, if it is due by now; None otherwise."""
        items = self._items
        return heapq.heappop(items)[2] if items and items[0][0] <= now else None

    def postpone(self, seconds: float) -> None:
        """Move all future occurrences `seconds` later."""
        self._items = [(instant + seconds, order, action) for instant, order, action in self._items]

    def clear(self) -> None:
        """Drop all future occurrences."""
        self._items.clear()


@dataclass(slots=True)
class VirtualHold:
    """One instance as the driver sees it, from the order to launch it to its end."""

    messages: Messages
    answered_at: float
    life: Lifecycle
    launched: bool = False


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
        self.provider = provider
        self.clock = clock
        self.agenda = agenda
        self._fault_model = fault_model
        self._lease_s = lease_s
        self._ready_timeout_s = ready_timeout_s
        self._next_beat_at = self._began_at = -math.inf
        self.holds: dict[str, VirtualHold] = {}
        self.gone: set[str] = set()
        """Instances that no worker lives on, whether the driver knows it or not."""
        self.hold_until = math.inf
        """Leases never reach beyond it."""

    # Leases

    def beat(self, instant: float) -> None:
        """Renew the leases if that is due; the driver lives at least until `instant`, which is now or later."""
        if instant >= self._next_beat_at:
            self.renew(instant)

    def renew(self, instant: float) -> None:
        """Renew the leases; the driver lives at least until `instant`, which is now or later."""
        lapsed = self.clock.now() > self.provider.lease_until
        self.provider.renew_lease(min(instant + self._lease_s, self.hold_until))
        self._next_beat_at = instant + self._lease_s / _BEATS
        if lapsed:
            self.notice_ends()

    def next_end_at(self) -> float:
        """Return when the first live instance ends, if nothing is done about it; infinite: never."""
        return min((self.provider.ends_at(instance) for instance in self._unended()), default=math.inf)

    def notice_ends(self) -> None:
        """Put the ends of instances that were not reported yet on the agenda."""
        for instance in self._unended():
            ends_at = self.provider.ends_at(instance)
            if ends_at <= self.clock.now():
                hold = self.holds[instance]
                self.gone.add(instance)
                self.agenda.add(ends_at + hold.messages.seen_after_s, partial(self._look, hold))

    def _unended(self) -> list[str]:
        return [instance for instance, hold in self.holds.items() if hold.launched and instance not in self.gone]

    # Launch

    def launch(self, instance: str, market: Market, first_lease_s: float | None = None) -> None:
        """Rent an instance; its events follow. Harmless when repeated."""
        if instance in self.holds:
            return
        hold, now = self.hold(instance), self.clock.now()
        hold.answered_at += hold.messages.answer_s
        self.renew(now)
        lease_s = max(0.0, self.provider.lease_until - now) if first_lease_s is None else first_lease_s
        if hold.messages.arrives:
            self.ask(hold, market, lease_s)
        else:
            self.agenda.add(hold.answered_at, lambda _: None if hold.life.over else self.ask(hold, market, lease_s))

    def hold(self, instance: str) -> VirtualHold:
        """Begin to hold an instance that is not asked for yet."""
        messages, life = self._fault_model.messages(instance), Lifecycle(instance=instance)
        hold = self.holds[instance] = VirtualHold(messages, self.clock.now(), life)
        return hold

    def ask(self, hold: VirtualHold, market: Market, lease_s: float) -> None:
        """Carry a request out: it is refused, or the instance is followed."""
        try:
            self.provider.launch(hold.life.instance, market, first_lease_s=lease_s)
        except ProviderError as error:
            reason, sold_out = str(error), isinstance(error, NoCapacityError)
            self.agenda.add(hold.answered_at, lambda now: self.fail(hold, None, reason, now, sold_out=sold_out))
        else:
            hold.launched = True
            self._follow(hold)

    def fail(
        self, hold: VirtualHold, status: InstanceDescription | None, reason: str, now: float, *, sold_out: bool = False
    ) -> Event | None:
        """End a launch that failed, or whose answer was lost."""
        if not hold.life.end():
            return None
        return self.agenda.begin(now, hold.life.lose(status, reason, now, sold_out=sold_out))

    def _follow(self, hold: VirtualHold) -> None:
        """Put on the agenda what will become of an instance that is asked for."""
        course, late_s = self.provider.course(hold.life.instance), hold.messages.seen_after_s
        seen_at = max(course.running_at + late_s, hold.answered_at)
        if course.running_at < math.inf:
            self.agenda.add(seen_at, partial(self._look, hold))
            self.agenda.add(course.ends_at, lambda _: self._end(hold))
            if course.init_s > self._ready_timeout_s:
                self.agenda.add(seen_at + self._ready_timeout_s, partial(self._give_up, hold))
            elif course.init_s < math.inf:
                self.agenda.add(seen_at + course.init_s, partial(self._ready, hold))
        if course.notice_at < math.inf:
            self.agenda.add(max(course.notice_at + late_s, seen_at), partial(self._look, hold))
        if course.taken_at < math.inf:
            self.agenda.add(course.taken_at, lambda _: self._end(hold))

    # What the driver sees

    def _look(self, hold: VirtualHold, now: float) -> Event | None:
        """Return the news of an instance, as the provider shows it."""
        life = hold.life
        status, was_running = self.provider.status(life.instance), life.running_at is not None
        if status.ended_at is not None and life.end():
            return self.agenda.begin(now, life.lose_ended(status, now, began_at=self._began_at))
        free_if_taken = status.hour_prices_usd is not None
        event = self.agenda.begin(now, life.see(status, now, free_if_taken=free_if_taken))
        if not was_running:
            self._expect_hour(hold)
        return event

    def _expect_hour(self, hold: VirtualHold) -> None:
        if hold.life.running_at is not None and hold.life.hour_prices_usd:
            next_at = hold.life.running_at + len(hold.life.hour_prices_usd) * SECONDS_PER_HOUR
            self.agenda.add(next_at, partial(self._begun, hold))

    def _begun(self, hold: VirtualHold, now: float) -> None:
        """Begin another hour, whose price is reported once it is seen."""
        if not hold.life.over and hold.life.instance not in self.gone:
            self.agenda.add(now + SECONDS_PER_HOUR, partial(self._begun, hold))
            self.agenda.add(now + hold.messages.seen_after_s, partial(self._look, hold))

    def _ready(self, hold: VirtualHold, now: float) -> Event | None:
        if hold.life.over or hold.life.instance in self.gone:
            return None
        self.provider.reach(hold.life.instance)
        return self.agenda.begin(now, hold.life.ready(now))

    def _give_up(self, hold: VirtualHold, now: float) -> Event | None:
        """Give an instance of no use back, and report it as lost."""
        if hold.life.over or hold.life.instance in self.gone:
            return None
        self.gone.add(hold.life.instance)
        reason = "its workers did not become warm"
        return self.fail(hold, self.provider.lose(hold.life.instance, reason), reason, now)

    def _end(self, hold: VirtualHold) -> None:
        """End a machine that may have ended by itself; the driver sees it later."""
        instance, now = hold.life.instance, self.clock.now()
        if instance not in self.gone and self.provider.ends_at(instance) <= now:
            self.gone.add(instance)
            self.agenda.add(now + hold.messages.seen_after_s, partial(self._look, hold))

    # Release

    def release(self, instance: str) -> None:
        """Give an instance back; InstanceReleased follows. Harmless when repeated."""
        now = self.clock.now()
        hold = self.holds.get(instance) or self.hold(instance)
        if not hold.life.end():
            return
        self.gone.add(instance)
        if hold.launched:
            self.provider.lose_touch(instance)
        obeyed_at = max(now, hold.answered_at) + hold.messages.release_s
        if obeyed_at > now:
            self.agenda.add(obeyed_at, partial(self.give_back, hold))
        else:
            self.give_back(hold, now)

    def give_back(self, hold: VirtualHold, now: float) -> None:
        """Carry a release out."""
        try:
            status = self.provider.release(hold.life.instance)
        except ProviderError:  # it was refused, or never asked for
            status = None
        self.agenda.add_all(now, hold.life.release(status, now))

    # A new driver

    def reconcile(self, known: Collection[str]) -> DriverResumed:
        """Say what lives and what ended, adopt the `known`, release the others."""
        self.holds.clear()
        self.gone.clear()
        self.hold_until, self._next_beat_at = math.inf, -math.inf
        self.provider.change_driver()
        self._began_at = self.clock.now()
        event = resumed(self.provider.describe(), known, self.provider.release, self._began_at)
        for live in event.live:
            self._adopt(live)
        return event

    def _adopt(self, live: LiveInstance) -> None:
        hold = self.hold(live.instance)
        hold.launched = True
        hold.life.running_at, hold.life.hour_prices_usd = live.running_at, live.hour_prices_usd
        self._expect_hour(hold)
        self._follow(hold)

    def close(self) -> None:
        """Release everything."""
        self.holds.clear()
        self.provider.close()


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

    def pace(self, instance: str, instant: float) -> float:
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
