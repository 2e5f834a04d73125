"""Chaos: a random experiment in random weather, driven to its end, judged by what the provider bills.

One seed is one run; `tell` replays it and tells its story.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any, Literal

from rubberband.cloud.virtual import VirtualClock
from rubberband.errors import StoreAwayError
from rubberband.executor import (
    CheckpointLost,
    Command,
    Controller,
    DiscardCheckpoint,
    DriverRequest,
    DriverResumed,
    Event,
    Finish,
    LimitsChanged,
    LimitsExtended,
    StartTrial,
    State,
    TrialEnded,
    TrialForked,
    TrialReported,
    TrialsDrawn,
    VirtualBackend,
    bill_usd,
    drive,
    replay,
)
from rubberband.executor.core.limits import can_go_on
from rubberband.executor.core.state import LaneState
from rubberband.executor.virtual.backend import by_trial
from tests.builders.additions import add
from tests.builders.invariants import validate
from tests.builders.lost_answers import LossyFleet
from tests.builders.memory import MemoryJournal
from tests.harness import together
from tests.harness.chaos_cases import CALM, LEASE_S, READY_TIMEOUT_S, WEATHERS, Case, Chance, Family, Weather
from tests.harness.chaos_plans import InstanceCapWatch, PlanWatch
from tests.harness.chaos_stops import StopWatch, uneven
from tests.harness.chaos_verdict import after_the_end, judged_by_the_bill
from tests.harness.together import Features, LaterInbox, all_together, caps, case_of, new_trials, random_end

MOST_EVENTS = 20_000
"""A run with more does not end."""
CENT = 0.01


class DriverDied(Exception):
    """Stands for kill -9."""


class ChaoticBackend(VirtualBackend):
    """A virtual backend whose driver dies at a random call, and whose machine sleeps now and then."""

    def set_out(self, source: Random, disk: Random, weather: Weather, calls_left: float, seen: Counter[str]) -> None:
        """`calls_left` until the driver dies; `disk` says when the checkpoint store goes away."""
        self._source = source
        self._disk = disk
        self._weather = weather
        self._restless = bool(weather.wake_early or weather.stall or weather.busy)
        self.calls_left = calls_left
        self._seen = seen
        self.story: list[str] | None = None
        self.inbox: ChaoticInbox | None = None
        """Requests to wake up for; None: they are seen when something else happens."""
        self.discarded: set[str] = set()
        self.ended: set[int] = set()
        """Trials that have ended by themselves."""
        self.given_up: set[str] = set()
        """Instances that showed up after their launches had been given up."""
        self.behind_s = 0.0
        """How far the clock has stepped back since the driver before, until the new one has seen what it holds."""

    def lose_answers(self, source: Random) -> None:
        """Lose some answers to launches from now on."""
        fleet = LossyFleet(
            self.provider, self.clock, self.agenda, self.fault_model, lease_s=LEASE_S, ready_timeout_s=READY_TIMEOUT_S
        )
        fleet.set_out(source, self._seen, self.given_up)
        self.fleet = fleet

    def now(self) -> float:
        """The clock, which may have stepped back."""
        return super().now() - self.behind_s

    def execute(self, command: Command) -> None:
        """Die before or after it, if it is time. No trial goes on from what was thrown away."""
        self.count()
        if isinstance(command, DiscardCheckpoint):
            self.discarded.add(command.checkpoint.url)
        elif isinstance(command, StartTrial) and command.checkpoint is not None:
            url = command.checkpoint.url
            assert url not in self.discarded, f"trial {command.trial} is to go on from {url}, which was discarded"
        if isinstance(command, StartTrial):
            assert command.trial not in self.ended, f"trial {command.trial} is to train after it has ended by itself"
        super().execute(command)
        if self.story is not None:
            self.story.append(f"{self.now():10.1f}   -> {command}")
        self.count()

    def hold_until(self, instant: float) -> None:
        """Die before or after it, if it is time."""
        self.count()
        super().hold_until(instant)
        if self.story is not None:
            self.story.append(f"{self.now():10.1f}   hold until {instant:.1f}")

    def next_events(self, wake_at: float | None) -> Sequence[Event]:
        """Sleep, or wake up for nothing, if chance will have it."""
        self.count()
        if self.inbox is not None:
            wake_at = self.inbox.wake_at(wake_at)
        if self._disk.random() < self._weather.store_away:
            self._seen["checkpoint store away"] += 1
            raise StoreAwayError("the checkpoint store is away")
        if self._restless:
            chance = self._source.random()
            if chance < self._weather.stall:
                self._seen["driver stalls"] += 1
                self.stall(self._source.choice([self._source.expovariate(1 / 60.0), 1.5 * LEASE_S]))
            elif chance < self._weather.stall + self._weather.wake_early:
                self._seen["woken early"] += 1
                return []
            elif chance > 1.0 - self._weather.busy:
                return self._several(wake_at)
        return super().next_events(wake_at)

    def _several(self, wake_at: float | None) -> Sequence[Event]:
        """The driver was busy for some seconds: what happened meanwhile comes at once."""
        self._seen["several events at once"] += 1
        events = [*super().next_events(wake_at)]
        until = min(self.now() + self._source.uniform(0.0, 20.0), math.inf if wake_at is None else wake_at)
        while events and self.agenda.next_at() <= until:
            events += super().next_events(until)
        return events

    def reconcile(self, known: Collection[str]) -> DriverResumed:
        """Die before or after it, if it is time."""
        self.count()
        resumed = replace(super().reconcile(known), occurred_at=self.now())
        self.behind_s = 0.0
        self.count()
        return resumed

    def count(self) -> None:
        """One more call; the driver dies of its last one."""
        self.calls_left -= 1
        if self.calls_left < 0:
            raise DriverDied


class ChaoticInbox(LaterInbox):
    """Its driver may die before it lets go of a request."""

    def __init__(self, backend: ChaoticBackend, now: Callable[[], float]) -> None:
        super().__init__(now)
        self._backend = backend
        self.clock: Random | None = None
        """By how much the clock of those who ask has stepped, at each request; None: not at all."""

    def put(self, request: DriverRequest) -> None:
        """Leave it as their clock says."""
        stepped_s = 0.0 if self.clock is None else self.clock.uniform(-3600.0, 3600.0)
        super().put(replace(request, asked_at=request.asked_at + stepped_s))

    def discard(self, id: str) -> None:
        """Die before it, if it is time."""
        self._backend.count()
        super().discard(id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    case: Case
    ended: str
    """How: the controller's outcome, or 'abandoned' where no driver came back."""
    reason: str
    num_events: int
    num_instances: int
    bill_usd: float
    ledger_usd: float
    cap_usd: float | None
    """In the end."""
    seen: Counter[str]
    """What went wrong, and how often."""
    wrong: tuple[str, ...]
    """What must not be; empty if all is well."""
    story: Sequence[str] = field(repr=False)


class Run:
    """One seed's run, over all its drivers."""

    def __init__(self, seed: int, features: Features, *, check_every: int = 1, keeps_story: bool = False) -> None:
        """The state is checked after every `check_every`th event."""
        self._source = source = Random(seed)
        self.case = case_of(seed, features, source)
        job, weather = self.case.job, WEATHERS[self.case.weather]
        clock = VirtualClock(1000.0)
        disk = Random(f"{seed}/the disk")
        chance = Chance(source, weather, job.offer, job.reserved_usd_per_hour, clock.now, disk)
        if features.ends:
            chance.ends = partial(random_end, seed)
        self._odd = Random(f"{seed}/odd orders") if features.odd else None
        """Ends that are resumed, with other caps, and clocks that step back; None: none of it."""
        self.weather, self.clock, self.seen = weather, clock, chance.seen
        self.backend = ChaoticBackend(
            job.name,
            job.offer,
            job.profile,
            metric=job.metric,
            metric_of=uneven(seed) if features.stops else by_trial,
            faults=chance,
            clock=clock,
            checkpoint_every=Random(f"{seed}/checkpoints").choice([1, 1, 2, 5]),
            limits=job.limits,
            lease_s=LEASE_S,
            ready_timeout_s=READY_TIMEOUT_S,
        )
        self.backend.set_out(source, disk, weather, self._life(), chance.seen)
        if features.odd:
            self.backend.lose_answers(Random(f"{seed}/lost answers"))
        self.story: list[str] = []
        self.backend.story = self.story if keeps_story else None
        self.journal = MemoryJournal()
        self.controller = Controller(job)
        self._check_every = check_every
        is_capped = features.capped or features.family == "caps"
        assert is_capped or not features.odd, "odd orders are about caps"
        is_watched = job.replan and not is_capped and not features.adds  # what is added is planned beside that
        self.watch = PlanWatch(self.controller) if is_watched else None
        """Only of what is planned again: where plans are fixed, speed is measured."""
        self.cap_watch = InstanceCapWatch(self.controller) if is_capped else None
        self.stop_watch = StopWatch(job) if features.stops else None
        self.num_events = 0
        self._cancel_at = source.randrange(200) if source.random() < weather.cancels else -1
        self._rounds = itertools.count()
        self._user = Random(f"{seed}/the user")
        self._resumes = 3
        self.inbox = ChaoticInbox(self.backend, clock.now)
        self.inbox.clock = self._odd
        if self._user.random() < weather.extends:
            self._extend(self.clock.now() + self._user.uniform(0.0, 1.5) * job.prediction.jct_s)
        self._adds = features.adds
        for asked in new_trials(job, self._user, clock.now()) if features.adds else ():
            self.inbox.ask(asked)
        for asked in caps(job, self._user, clock.now()) if is_capped else ():
            self.backend.inbox = self.inbox
            self.inbox.ask(asked)

    def _extend(self, at: float) -> None:
        """The user asks for more, so that it is known at `at`."""
        job = self.controller.job
        cap_usd = None if job.max_cost_usd is None else self._user.uniform(1.0, 2.0) * job.max_cost_usd
        deadline_s = None if job.deadline_s is None else self._user.uniform(1.0, 2.0) * job.deadline_s
        id = f"r-{self._user.getrandbits(32)}"
        self.inbox.ask(DriverRequest(id=id, kind="extend", asked_at=at, deadline_s=deadline_s, max_cost_usd=cap_usd))

    def _life(self) -> float:
        """Backend calls until the driver dies; a run makes some hundreds."""
        if not self.weather.deaths:
            return math.inf
        return 1.0 + math.floor(self._source.expovariate(self.weather.deaths / 500.0))

    def to_its_end(self) -> Finish | None:
        """Drive it; None if in the end no driver came back."""
        while True:
            self.controller = Controller(self.case.job)
            try:
                finish = drive(
                    self.controller,
                    self.backend,
                    self.journal,
                    observers=[self._observe],
                    cancelled=lambda: next(self._rounds) == self._cancel_at,
                    requests=self.inbox,
                    draw=self._draw if self.case.job.draws else None,
                    add=add,
                    explore=self._explore,
                )
            except DriverDied:
                if not self._comes_back():
                    return None
            except StoreAwayError:
                self.backend.close()
                self.clock.advance_to(self.clock.now() + self._user.expovariate(1 / 600.0))
                self._tell("the checkpoint store is back, and it is resumed")
            else:
                if finish.outcome == "budget" and self._user.random() < self.weather.extends:
                    self._go_on()
                elif self._is_given_another_target():
                    continue
                elif not (self._goes_on_with_trials() or self._is_resumed()):
                    return finish

    def _goes_on_with_trials(self) -> bool:
        """Whether the user resumes a search that is done, for trials that are added."""
        state = self.controller.state
        if not self._adds or state.outcome != "done":
            return False
        if self.inbox.next_at() == math.inf and not can_go_on(state):
            return False
        self.seen["trials added after its end"] += 1
        self.backend.close()
        self.clock.advance_to(max(self.clock.now(), min(self.inbox.next_at(), self.clock.now() + 1e9)))
        return True

    def _draw(
        self, state: State, drawn: Mapping[int, Mapping[str, Any]], trials: Sequence[int], now: Callable[[], float]
    ) -> TrialsDrawn:
        """Draw as a run does; the driver may die before or after it."""
        self.backend.count()
        event = together.draw(state, drawn, trials, now)
        self.seen["drawn at random" if event.reason.startswith("at random") else "drawn from results"] += 1
        self.backend.count()
        return event

    def _explore(self, lane: LaneState, now: Callable[[], float]) -> Sequence[TrialForked]:
        """Change configurations as a run does; the driver may die before or after it."""
        self.backend.count()
        events = together.explore(lane, now)
        self.seen["took over a checkpoint"] += len(events)
        self.backend.count()
        return events

    def _go_on(self) -> None:
        """The cap ended it; the user raises that, and resumes some time later."""
        self.seen["goes on with a larger cap"] += 1
        self.backend.close()
        self.clock.advance_to(self.clock.now() + self._user.expovariate(1 / 600.0))
        self._extend(self.clock.now())
        self._tell("it is extended, and resumed")

    def _is_given_another_target(self) -> bool:
        """Whether a trial has reached the target, and the user goes on with a harder one."""
        ended_by = self.controller.state.ended_by
        if ended_by is None or ended_by.rule != "target" or self._user.random() < 0.3:
            return False
        self.seen["goes on with a harder target"] += 1
        self.backend.close()
        self.clock.advance_to(self.clock.now() + self._user.expovariate(1 / 600.0))
        target = (self.controller.job.stop.target or 0.0) + self._user.uniform(0.0, 0.3)
        id = f"t-{self._user.getrandbits(32)}"
        self.inbox.ask(DriverRequest(id=id, kind="extend", asked_at=self.clock.now(), target=target))
        self._tell("it has another target, and is resumed")
        return True

    def _is_resumed(self) -> bool:
        """Whether the user resumes what has ended, until the pool has decided without instances."""
        state, odd = self.controller.state, self._odd
        if odd is None or self._resumes == 0 or not can_go_on(state) or odd.random() < 0.2:
            return False
        self._resumes -= 1
        self.seen["resumed after its end"] += 1
        self.backend.close()
        self.clock.advance_to(self.clock.now() + odd.expovariate(1 / 600.0))
        now, most = self.clock.now(), self.case.job.offer.max_instances
        granted = [(0, 0.0), (odd.randint(1, most), odd.choice([0.0, 1.0, 600.0]))]
        for max_instances, after_s in granted[odd.randint(0, 1) :]:
            id = f"resumed-{odd.getrandbits(32)}"
            asked = DriverRequest(id=id, kind="limit", asked_at=now + after_s, max_instances=max_instances)
            self.inbox.ask(asked)
        self._step_back()
        self._tell("it is resumed after its end")
        return True

    def _step_back(self) -> None:
        """The new driver's machine may have a clock that is behind."""
        if self._odd is not None and self._odd.random() < 0.5:
            self.seen["clock steps back"] += 1
            self.backend.behind_s = self._odd.uniform(0.0, 3600.0)

    def _comes_back(self) -> bool:
        self.seen["driver dies"] += 1
        self._tell("the driver dies")
        self.backend.forget()
        if self._source.random() < self.weather.gone_for_good:
            self.seen["driver never comes back"] += 1
            return False
        gap_s = self._source.choice([0.0, self._source.expovariate(1 / 60.0), self._source.expovariate(1 / 1200.0)])
        self.clock.advance_to(self.clock.now() + gap_s)
        self._step_back()
        self._tell("another one comes")
        self.backend.calls_left = self._life()
        return True

    def _tell(self, what: str) -> None:
        if self.backend.story is not None:
            self.story.append(f"{self.clock.now():10.1f} {what}")

    def _observe(self, event: Event, controller: Controller) -> None:
        self.num_events += 1
        self.seen["checkpoint lost"] += isinstance(event, CheckpointLost)
        if self.stop_watch is not None:
            self.stop_watch.saw(event, controller)
        if isinstance(event, (TrialReported, TrialEnded)) and controller.state.trials[event.trial].ended:
            self.seen["ended by itself"] += event.trial not in self.backend.ended
            self.backend.ended.add(event.trial)
        if isinstance(event, TrialForked):
            self.backend.ended.discard(event.trial)
        if self.backend.story is not None:
            self.story.append(f"{self.clock.now():10.1f} {event}")
        if isinstance(event, LimitsChanged):
            self._check_extension(controller, event.occurred_at)
        if controller.job.draws:
            bare = [
                t.trial
                for t in controller.state.trials
                if t.attempt and t.trial not in controller.state.sampled_configs
            ]
            assert not bare, f"trials {bare} started without a configuration"
        if (
            isinstance(event, TrialReported) and event.checkpoint is not None
        ):  # written anew, where what it had trained was lost
            self.backend.discarded.discard(event.checkpoint.url)
        if self.watch is not None:
            self.watch.saw(event, controller)
        if self.cap_watch is not None:
            self.cap_watch.saw(event, controller)
        if self.num_events % self._check_every == 0:
            validate(controller, is_informed=self.weather is CALM)
        assert self.num_events < MOST_EVENTS, "it does not end"

    def replayed(self) -> list[str]:
        """How the state differs that the journal alone gives; not looked at where speed is measured."""
        if self._check_every > MOST_EVENTS:
            return []
        again = Controller(self.case.job)
        replay(again, self.journal)
        snapshots = [_snapshot(controller) for controller in (self.controller, again)]
        return [] if snapshots[0] == snapshots[1] else [f"it ended {snapshots[0]}, and by its journal {snapshots[1]}"]

    def _check_extension(self, controller: Controller, at: float) -> None:
        """Until now the cap before it was kept, leases included: nothing that was granted just now is held yet."""
        granted = next(reversed(controller.state.history.of(LimitsExtended)), None)
        if granted is None or granted.at_s != controller.state.elapsed_s(at):
            return
        self.seen["extended"] += 1
        provider, cap_usd = self.backend.provider, granted.max_cost_before_usd
        unknown_usd = math.fsum(provider.cost_usd(instance) for instance in self.backend.given_up)
        billed_usd = provider.bill_usd(math.inf) - unknown_usd
        assert cap_usd is None or billed_usd <= cap_usd + 1e-6, f"{billed_usd} USD billed of {cap_usd}, then extended"


def _snapshot(controller: Controller) -> tuple[object, ...]:
    state = controller.state
    records = [(record.status, record.ended_at) for record in state.instances.values()]
    return (
        state.phase,
        state.outcome,
        [(t.status, t.iterations, t.ended) for t in state.trials],
        records,
        state.sampled_configs,
    )


def run_seed(
    seed: int,
    family: Family | Literal["together"] | None = None,
    *,
    check_every: int = 1,
    keeps_story: bool = False,
    **features: Any,
) -> Outcome:
    """Run one seed and judge it. `features`: those of `Features`; "together": they are drawn, and the family too."""
    drawn = all_together(seed) if family == "together" else Features(family=family, **features)
    run = Run(seed, drawn, check_every=check_every, keeps_story=keeps_story)
    wrong: list[str] = []
    finish: Finish | None = None
    try:
        finish = run.to_its_end()
    except AssertionError as error:
        wrong.append(str(error) or "an assertion failed")
    except Exception as error:
        wrong.append(f"{type(error).__name__}: {error}")
    if run.watch is not None:
        run.seen["planned again"] += run.watch.decisions
        wrong += run.watch.wrong
    if run.cap_watch is not None:
        run.seen.update(run.cap_watch.seen)
        wrong += run.cap_watch.wrong
    if run.stop_watch is not None:
        run.seen.update(run.stop_watch.seen)
        wrong += run.stop_watch.wrong
    if not wrong:
        wrong += after_the_end(run, finish)
    if finish is not None:
        run.backend.close()
    state = run.controller.state
    return Outcome(
        case=run.case,
        ended="broken" if wrong and finish is None else "abandoned" if finish is None else finish.outcome,
        reason="" if finish is None else finish.reason,
        num_events=run.num_events,
        num_instances=len(state.instances),
        bill_usd=run.backend.provider.bill_usd(math.inf),
        ledger_usd=bill_usd(state, state.now),
        cap_usd=run.controller.job.max_cost_usd,
        seen=run.seen,
        wrong=(*wrong, *judged_by_the_bill(run, finish)),
        story=run.story,
    )


def tell(seed: int, family: Family | Literal["together"] | None = None, **options: Any) -> None:
    """Tell the story of a seed; the options are those of `run_seed`."""
    outcome = run_seed(seed, family, keeps_story=True, **options)
    print(outcome.case)
    print("\n".join(outcome.story))
    print(f"{outcome.ended} {outcome.reason}: {outcome.num_events} events, {outcome.num_instances} instances")
    print(f"billed {outcome.bill_usd:.6f} USD, ledger {outcome.ledger_usd:.6f}, cap {outcome.cap_usd} in the end")
    print(dict(outcome.seen))
    for what in outcome.wrong:
        print(f"WRONG: {what}")
