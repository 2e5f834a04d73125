"""The story of a crash point: drivers of one experiment, their deaths, who comes next, and what is judged in the end.

Controller, driver loop and AwsProvider are the real ones, on the fake EC2, which is the judge: by its bill nothing of
the run lives on, nothing was bought twice, and what was billed is what the ledger knows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

from rubberband.cloud.aws.calls import INSTANCE_TAG
from rubberband.cloud.aws.cleanup import clean_up, end_everything
from rubberband.cloud.aws.fleet import SHUTDOWN_S, VISIBILITY_S
from rubberband.cloud.aws.guards import SLACK_S
from rubberband.errors import RubberbandError
from rubberband.executor import Controller, Event, Job, Phase, bill_usd, drive, replay
from rubberband.executor.core.limits import can_go_on
from rubberband.executor.virtual.backend import by_trial
from tests.builders.additions import add
from tests.builders.aws_account import START_AT
from tests.builders.invariants import validate
from tests.builders.memory import MemoryJournal
from tests.ec2 import FakeCall, Fault
from tests.ec2.instance import Instance
from tests.ec2.spot_prices import HOUR_S
from tests.harness.chaos_stops import StopWatch, uneven
from tests.harness.crash_cases import BOOT_S, SWING, WEATHERS, Point, features_of, job_of, launches, trial_ends
from tests.harness.crash_cloud import CloudBackend
from tests.harness.crash_world import BOOT_LEASE_S, Killed, World, name_of
from tests.harness.together import LaterInbox, caps, draw, explore, new_trials

ENDS = ("done", "budget", "failed", "cancelled")
"""How a run ends whose driver always came back."""
SURE = ("ok", "no-connection", "throttled", "no-capacity", "partial", "5xx")
"""Weathers in which the driver knows where its instances are."""
MOST_DRIVERS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    point: Point
    ended: str
    drivers: int
    """And sweeps."""
    instances: int
    repriced: int
    """Spot instances that were billed for more than an hour, so at more than one price."""
    billed_usd: float
    ledger_usd: float
    wrong: Sequence[str]
    """What must not be; empty if all is well."""
    died_in: Sequence[str]
    """The calls that the drivers made when they died."""


@dataclass
class Story:
    """One point, told to its end."""

    point: Point
    here: str
    log: Callable[[str], None] = lambda line: None
    ended: str = ""
    reason: str = ""
    drivers: int = 0
    died_in: list[str] = field(default_factory=list)
    """What drivers and sweeps asked for when they died."""
    died_at: float = math.inf
    """The last time."""
    swept_from: int | None = None
    """The first call of a sweep."""
    found: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """An account in which nothing has happened."""
        point = self.point
        self.job = self._job()
        self.world = World(
            Path(self.here), self.job, boot_s=BOOT_S[point.cap], together=point.one_zone, ends=trial_ends(point.markets)
        )
        self.world.fake.fault = self.fault
        self.world.fake.world.spot.seed, self.world.fake.world.spot.swing = point.prices, SWING
        self.journal = MemoryJournal()
        self.features = features_of(point.markets)
        self.stop_watch = StopWatch(self.job) if self.features.stops else None
        user, now = Random(f"{point.markets} the user"), self.world.clock.now
        self.inbox = LaterInbox(now)
        for asked in new_trials(self.job, user, now()) if self.features.adds else ():
            self.inbox.ask(asked)
        for asked in caps(self.job, user, now()) if self.features.capped else ():
            self.inbox.ask(asked)
        self.kill_at, self.kills_after = point.kill_at, point.after
        self.kills_left = (point.kill_at >= 0) + (point.again >= 0)

    def _job(self) -> Job:
        return job_of(self.point.markets, self.point.cap)

    # The weather

    def fault(self, call: FakeCall) -> Fault | None:
        point = self.point
        if not self.world.head.has_driver:
            return self._last_word(call)
        met = self._met(call)
        fault = replace(met or Fault(), visible_after_s=point.hidden_s)
        dies = call.index == self.kill_at and self.kills_left > 0
        if dies:
            self.kills_left -= 1
            self.world.head.has_driver = False
            happens = self.kills_after and (met is None or met.error is None or met.took_effect)
            fault = replace(fault, error=Killed(), took_effect=happens)
            self.died_in.append(call.operation)
        self.note(f"{call.service} {call.operation} {_names(call)}{_shown(fault)}")
        return fault

    def _met(self, call: FakeCall) -> Fault | None:
        point = self.point
        begins_at = point.kill_at + point.offset
        met = WEATHERS[point.weather](call) if begins_at <= call.index < begins_at + point.lasts else None
        return met and replace(met, stale_s=min(met.stale_s, VISIBILITY_S - point.hidden_s))

    def _last_word(self, call: FakeCall) -> Fault:
        """What other threads of a driver were at when it was killed."""
        if call.operation == "DescribeSpotPriceHistory":
            return Fault()
        self.note(f"{call.service} {call.operation} {_names(call)}is a last word")
        return Fault(error=Killed(), took_effect=call.index % 2 == 0, visible_after_s=self.point.hidden_s)

    def note(self, what: str) -> None:
        self.log(f"{self.world.clock.now() - START_AT:8.1f} {len(self.world.fake.calls) - 1:4} {what}")

    def _note(self, event: Event, controller: Controller) -> None:
        self.note(f"  {event}")
        validate(controller, is_informed=False)
        if self.stop_watch is not None:
            self.stop_watch.saw(event, controller)

    # The drivers

    def tell(self) -> None:
        """To the end: finished, swept, or left alone until every lease is over."""
        while not self.ended:
            assert self.drivers < MOST_DRIVERS, "it does not end"
            self.drivers += 1
            try:
                self._live()
            except Killed:
                self._die()
            except RubberbandError as error:
                self.note(f"told the user: {error}")
                self._leave()
                self._wait()

    def _wait(self) -> None:
        self.world.sleep(10.0)

    def _live(self) -> None:
        if self.swept_from is not None and self.point.then == "down":
            self._down()
        elif self.swept_from is not None:
            self._sweep()
        elif self._is_over():
            self.ended = self.ended or "over"
        else:
            self._drive()

    def _drive(self) -> None:
        if not list(self.journal.events()):
            self.world.check()
        metric_of = uneven(self.point.markets) if self.features.stops else by_trial
        backend = CloudBackend(self.world, self.world.provider(), self.inbox, metric_of)
        try:
            controller = Controller(self.job)
            finish = drive(
                controller,
                backend,
                self.journal,
                observers=[self._note],
                cancelled=self._is_cancelled,
                requests=self.inbox,
                draw=draw if self.job.draws else None,
                explore=explore,
                add=add,
            )
        except RubberbandError:
            backend.close()
            raise
        try:
            backend.close()
        except RubberbandError as error:
            self.note(f"told the user: {error}")
            self.swept_from = len(self.world.fake.calls)
        else:
            if self.controller_now().state != controller.state:
                self.found.append("by its journal it ended otherwise")
            if self._is_over():
                self.ended, self.reason = finish.outcome, finish.reason
            else:
                self.note("trials are added after its end")
                self._leave()
                self.world.sleep(max(0.0, min(self.inbox.next_at() - self.world.clock.now(), 1e5)))

    def _is_cancelled(self) -> bool:
        """By the user, who wants to go on with it where the driver dies of all things then."""
        cancels_at = self.point.kill_at - self.point.cancelled
        return self.point.cancelled >= 0 and not self.died_in and len(self.world.fake.calls) > cancels_at

    def _is_over(self) -> bool:
        """Whether no driver resumes it, not even for trials that are added."""
        state = self.controller_now().state
        goes_on = self.features.adds and state.outcome == "done"
        if goes_on and (self.inbox.next_at() < math.inf or can_go_on(state)):
            return False
        return state.phase is Phase.FINISHED

    def controller_now(self) -> Controller:
        controller = Controller(self.job)
        replay(controller, self.journal)
        return controller

    def _die(self) -> None:
        self.note("the driver is dead")
        point, world = self.point, self.world
        self.died_at = world.clock.now()
        world.while_asleep = None
        if point.together:
            for work in [*world.threads]:
                with suppress(Killed):
                    work()
        self._leave()
        if point.head == "dies":
            world.head.die()
        if point.taken and (spot := [one for one in world.fake.living if one.market == "spot"]):
            world.fake.reclaim(spot[0].instance_id, notice_s=None)
        for machine in world.fake.living if point.hung else ():
            world.hang(machine)
        world.sleep(point.gap_s)
        world.head.has_driver = True
        self.kill_at, self.kills_after = len(world.fake.calls) + point.again, not point.after
        if point.then == "nobody":
            self.ended = "left alone"
            world.sleep(2.0 * BOOT_LEASE_S + bool(world.hung) * SLACK_S)
        elif point.then in ("sweep", "down") and self.swept_from is None:
            self.swept_from = len(world.fake.calls)

    def _leave(self) -> None:
        """What a driver had in memory is gone."""
        self.world.while_asleep = None
        self.world.threads.clear()

    def _sweep(self) -> None:
        world = self.world
        self._leave()
        self.note("sweep")
        cleaned = clean_up([world.directory], lambda _: world.session, clock=world.clock.now, sleep=world.sleep)
        self.note(str(cleaned))
        if cleaned.troubles:
            self._wait()
        else:
            self.ended = "cleaned up"

    def _down(self) -> None:
        world = self.world
        ended = end_everything(world.session, "rubberband", place=world.place, clock=world.clock.now, sleep=world.sleep)
        self.note(str(ended))
        self.ended = "down"

    # The judge

    def wrong(self) -> list[str]:
        return [
            *(self.stop_watch.wrong if self.stop_watch is not None else ()),
            *self._orphans(),
            *self._beyond_their_leases(),
            *self._bought_twice(),
            *self._in_several_zones(),
            *self._unknown_to_the_ledger(),
            *self._more_billed_than_known(),
            *self._beyond_the_cap(),
            *self._amiss_in_the_network(),
        ]

    def _orphans(self) -> Iterator[str]:
        for machine in self.world.fake.living:
            if machine.instance_id not in self.world.hung or machine.guard_at is not None:
                yield f"{name_of(machine)} lives on ({self.ended})"
        launched = [c for c in self.world.fake.calls[self.swept_from :] if launches(c)] if self.swept_from else []
        if launched:
            yield "a sweep launched"

    def _beyond_their_leases(self) -> Iterator[str]:
        for machine in self.world.fake.instances:
            begins_at = max(self.died_at, machine.running_at + self.world.boot_s)
            hung = machine.instance_id in self.world.hung
            if hung and machine.guard_at is None:  # its driver died before it knew the id
                continue
            most_s = BOOT_LEASE_S + hung * (SHUTDOWN_S + SLACK_S)
            if self.ended == "left alone" and (machine.ended_at or math.inf) > begins_at + most_s:
                yield f"{name_of(machine)} outlives its lease"
            if not hung and machine.ended_at is not None and machine.ended_at == machine.guard_at:
                yield from self._ended_by_its_guard(machine)

    def _ended_by_its_guard(self, machine: Instance) -> Iterator[str]:
        yield f"{name_of(machine)} was ended by its guard"

    def _bought_twice(self) -> Iterator[str]:
        bought = Counter(name_of(machine) for machine in self.world.fake.instances)
        for name, count in bought.items():
            if count > 1:
                yield f"{name} was bought {count} times"

    def _in_several_zones(self) -> Iterator[str]:
        for one in self.world.fake.instances if self.point.one_zone and self.point.weather in SURE else ():
            began, until = one.launched_at, math.inf if one.ended_at is None else one.ended_at
            for other in self.world.fake.instances:
                if other.zone != one.zone and began <= other.launched_at < until:
                    yield f"{name_of(one)} and {name_of(other)} are in two zones"

    def _unknown_to_the_ledger(self) -> Iterator[str]:
        state = self.controller_now().state
        billed = {name_of(line) for line in self.world.fake.bill().lines}
        known = {name for name, record in state.instances.items() if record.running_at is not None}
        if self.ended in ("cleaned up", "down", "left alone"):  # its ledger is not kept any more
            known |= set(state.instances)
        for name in sorted(billed - known):
            yield f"{name} is billed, and the ledger does not know it ran"

    def _more_billed_than_known(self) -> Iterator[str]:
        billed_usd, ledger_usd = self.world.fake.bill().total_usd, self.billed_by_the_ledger()
        is_seen = self.point.weather != "stale"  # stale answers show too late that an instance runs
        if is_seen and self.ended in ENDS and billed_usd > ledger_usd + 1e-9:
            yield f"{billed_usd:.6f} USD are billed, and the ledger says {ledger_usd:.6f}"

    def billed_by_the_ledger(self) -> float:
        return bill_usd(self.controller_now().state, self.world.clock.now())

    def _beyond_the_cap(self) -> Iterator[str]:
        cap_usd = self.job.max_cost_usd
        billed_usd = self.world.fake.bill().total_usd
        if not self.world.hung and cap_usd is not None and billed_usd > cap_usd + 1e-9:
            yield f"{billed_usd:.4f} USD are billed of max_cost={cap_usd:.4f}"

    def _amiss_in_the_network(self) -> Iterator[str]:
        groups = [group for group in self.world.fake.world.groups.values() if group.name == "rubberband"]
        wrong = len(groups) > 1
        if self.ended in ENDS:
            wrong = [len(group.ingress) for group in groups] != [1]
        elif self.ended == "down":
            wrong = bool(groups)
        if wrong:
            yield f"there are {len(groups)} security groups"
        if self.ended == "down" and self.world.fake.world.placement_groups:
            yield "there are placement groups"

    def outcome(self) -> Outcome:
        return Outcome(
            point=self.point,
            ended=self.ended,
            drivers=self.drivers,
            died_in=self.died_in,
            instances=len(self.world.fake.instances),
            repriced=sum(one.market == "spot" and one.billed_s > HOUR_S for one in self.world.fake.bill().lines),
            billed_usd=self.world.fake.bill().total_usd,
            ledger_usd=self.billed_by_the_ledger(),
            wrong=(*self.found, *self.wrong()),
        )


def _names(call: FakeCall) -> str:
    if launches(call):
        tags = {tag["Key"]: tag["Value"] for tag in call.params["TagSpecifications"][0]["Tags"]}
        return f"{tags[INSTANCE_TAG]} {call.params['SubnetId'][-4:]} {call.params['ClientToken'][:6]} "
    return " ".join(map(str, call.params.get("InstanceIds", ()))) + " "


def _shown(fault: Fault) -> str:
    if fault.error is None:
        return ""
    return f"-> {fault.error!r}{', took effect' if fault.took_effect else ''}"
