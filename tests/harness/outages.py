"""Outages: a run on EC2 in hours when parts of AWS, its machines and its driver fail at random; one seed is one run."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from random import Random

from botocore.exceptions import CredentialRetrievalError

from rubberband.cloud.aws.fleet import SHUTDOWN_S, VISIBILITY_S
from rubberband.cloud.aws.guards import LEAST_SLACK_S
from rubberband.executor import Controller, Event, InstanceLost, InstanceRefused, Job, Phase
from tests.builders.aws_account import START_AT
from tests.ec2 import FakeCall, FakeError, Fault
from tests.ec2.instance import USER_INITIATED, Instance
from tests.harness.chaos_verdict import ranked_otherwise
from tests.harness.crash_cases import AFTERWARDS, GAPS_S, Point, job_of, undisturbed
from tests.harness.crash_points import folder
from tests.harness.crash_story import ENDS, Outcome, Story
from tests.harness.crash_world import LEASE_S, STEP_S, name_of

STALE_S = 60.0
OUTAGES: dict[str, Fault] = {
    **{
        f"scheduler {code}": Fault(error=FakeError(code, "No."))
        for code in (
            "ThrottlingException",
            "ConflictException",
            "AccessDeniedException",
            "ExpiredTokenException",
            "ValidationException",
            "ServiceQuotaExceededException",
        )
    },
    "scheduler silent": Fault.timeout(took_effect=False),
    "scheduler deaf": Fault.timeout(took_effect=True),
    "describe throttled": Fault.throttled(),
    "describe denied": Fault(error=FakeError("UnauthorizedOperation", "No.", 403)),
    "describe silent": Fault.timeout(took_effect=False),
    "describe empty": Fault.stale(1e9),
    "describe stale": Fault.stale(STALE_S),
    "credentials": Fault(error=CredentialRetrievalError(provider="iam-role", error_msg="no answer")),
    "late capacity": Fault(),
}
"""What a stretch of time may be like. In one of late capacity EC2 ends what it launches in the first zone."""
SOLD_OUT = "Server.InsufficientInstanceCapacity"
_UNANSWERED = "EC2 does not list the instances"
"""The launch of an instance got no answer, and so it is given back."""
LENGTHS_S = (5.0, 10_000.0)
ITERATIONS_S = (20.0, 300.0, 1900.0)
IMPATIENT_S = (10.0, 600.0)
RETRIED_S = 130.0
"""A guard that could not be moved is moved so long after the scheduler answers again: one refusal, one pause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """One outage, in seconds from the start of the experiment."""

    kind: str
    begins_s: float
    ends_s: float

    def __str__(self) -> str:
        return f"{self.kind} {self.begins_s:.0f}-{self.ends_s:.0f}"

    def meets(self, call: FakeCall) -> bool:
        what = self.kind.partition(" ")[0]
        if what == "describe":
            return call.operation == "DescribeInstances"
        return what == "credentials" or (what == "scheduler" and call.service == "scheduler")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    point: Point
    iteration_s: float
    stretches: tuple[Stretch, ...]
    taken_s: tuple[float, ...]
    """When EC2 takes a spot instance away, with a notice or, every third time, without."""
    sick_s: tuple[float, ...]
    """When the guest of a machine stops."""
    never_boots: float
    """The share of machines whose guest never runs."""


def case_of(seed: int) -> Case:
    source = Random(f"outages {seed}")
    iteration_s = source.choice(ITERATIONS_S)
    lasts_s = 3.0 * iteration_s + 120.0
    kinds = [*OUTAGES]
    stretches = []
    for _ in range(source.choice([0, 1, 1, 2, 2, 3, 4])):
        begins_s = source.uniform(-60.0, 1.2 * lasts_s)
        length_s = math.exp(source.uniform(*map(math.log, LENGTHS_S)))
        stretches.append(Stretch(kind=source.choice(kinds), begins_s=begins_s, ends_s=begins_s + length_s))
    markets = source.choice(["on_demand", "spot", "spot", "mixed"])
    then = source.choice(["resume", "resume", *AFTERWARDS])
    dies = source.random() < 0.6
    point = replace(
        undisturbed(markets, source.choice(["roomy", "roomy", "tight"])),
        kill_at=source.randrange(30 + int(lasts_s / 8.0)) if dies else -1,
        after=source.random() < 0.5,
        hidden_s=source.choice([0.0, 0.0, 5.0, 60.0, 300.0]),
        then=then,
        gap_s=source.choice(GAPS_S),
        head=source.choice(["stays", "stays", "dies"]),
        again=source.randrange(200) if dies and source.random() < 0.4 else -1,
        together=source.random() < 0.5,
        one_zone=source.random() < 0.2,
        hung=dies and then == "nobody" and source.random() < 0.5,
        prices=source.randrange(1000),
    )

    def some(share: float) -> tuple[float, ...]:
        return tuple(source.uniform(30.0, lasts_s) for _ in range(source.choice([1, 1, 2])) if source.random() < share)

    return Case(
        point=point,
        iteration_s=iteration_s,
        stretches=tuple(stretches),
        taken_s=some(0.3) if markets != "on_demand" else (),
        sick_s=some(0.1),
        never_boots=source.choice([0.0, 0.0, 0.0, 0.1]),
    )


@dataclass
class Outages(Story):
    """One case, told to its end."""

    case: Case = field(kw_only=True)
    seed: int = field(kw_only=True)

    def __post_init__(self) -> None:
        """An account in which nothing has happened."""
        super().__post_init__()
        self.random = Random(f"luck {self.seed}")
        self.seen: Counter[str] = Counter()
        self._taken, self._sick = sorted(self.case.taken_s), sorted(self.case.sick_s)
        self._known: set[str] = set()
        self._impatient_s = IMPATIENT_S[0]
        self._lived: list[tuple[float, float]] = []
        """From when until when there was a driver."""
        self._began_at = math.inf
        self._ran_until = -math.inf
        """No instance was given back for the end of the run until then."""
        self.world.at_each_step = self._happen
        self.world.fake.world.pending_s = lambda source: 20.0 * source.uniform(0.5, 3.0)

    def _job(self) -> Job:
        return job_of(self.point.markets, self.point.cap, self.case.iteration_s)

    # The weather

    def _wait(self) -> None:
        self.world.sleep(self._impatient_s)
        self._impatient_s = min(2.0 * self._impatient_s, IMPATIENT_S[1])

    def _during(self) -> Iterator[Stretch]:
        at = self.world.clock.now() - START_AT
        return (one for one in self.case.stretches if one.begins_s <= at < one.ends_s)

    def _met(self, call: FakeCall) -> Fault | None:
        for stretch in sorted(self._during(), key=lambda one: OUTAGES[one.kind].error is None):
            if stretch.meets(call):  # no answer comes before an old one
                self.seen[stretch.kind] += 1
                fault = OUTAGES[stretch.kind]
                if stretch.kind == "describe stale":  # together no later than EC2 shows anything
                    return replace(fault, stale_s=min(fault.stale_s, VISIBILITY_S - self.point.hidden_s))
                return fault
        return None

    def _happen(self) -> None:
        world, now = self.world, self.world.clock.now()
        late = any(stretch.kind == "late capacity" for stretch in self._during())
        living = world.fake.living
        for machine in living:
            if machine.instance_id not in self._known:
                self._known.add(machine.instance_id)
                if late and machine.zone == world.fake.world.zones[0]:
                    self._strike("late capacity", machine)
                    world.fake.break_down(machine.instance_id, SOLD_OUT)
                elif self.random.random() < self.case.never_boots:
                    self._strike("never boots", machine)
                    world.hang(machine)
        running = [one for one in living if one.state(now) == "running" and one.instance_id not in world.hung]
        while self._taken and START_AT + self._taken[0] <= now:
            del self._taken[0]
            if spot := [one for one in running if one.market == "spot" and one.notice_at is None]:
                chosen, notice_s = self.random.choice(spot), self.random.choice([120.0, 120.0, None])
                self._strike(f"spot taken, notice {notice_s}", chosen)
                world.fake.reclaim(chosen.instance_id, notice_s=notice_s)
        while self._sick and START_AT + self._sick[0] <= now:
            del self._sick[0]
            if well := [one for one in running if one.lives()]:
                chosen = self.random.choice(well)
                self._strike("sick", chosen)
                world.hang(chosen)

    def _strike(self, what: str, machine: Instance) -> None:
        self.seen[what] += 1
        self.note(f"{what}: {name_of(machine)} {machine.instance_id}")

    # The drivers

    def _drive(self) -> None:
        self._began_at = self.world.clock.now()
        super()._drive()
        self._leave()

    def _leave(self) -> None:
        self._lived.append((self._began_at, self.world.clock.now()))
        self._began_at = math.inf
        super()._leave()

    def _note(self, event: Event, controller: Controller) -> None:
        super()._note(event, controller)
        if controller.state.course == "running":
            self._ran_until = event.occurred_at
        if isinstance(event, InstanceLost | InstanceRefused):
            self.found += self._taken_for_lost(event)

    def _taken_for_lost(self, event: InstanceLost | InstanceRefused) -> Iterator[str]:
        """No instance is told as lost that is well, nor was ended by us before anybody gave it up."""
        for machine in [one for one in self.world.fake.instances if name_of(one) == event.instance][-1:]:
            well = machine.instance_id not in self.world.hung and machine.notice_at is None
            if well and machine.lives() and self.world.has_joined(machine):
                yield f"{event.instance} is well, and was told as lost: {event.reason}"
            if isinstance(event, InstanceRefused) and machine.state_reason == SOLD_OUT and not event.sold_out:
                yield f"{event.instance} found no room, and counts as a failed start: {event.reason}"
            by_us = machine.state_reason == USER_INITIATED and machine.ended_at != machine.guard_at
            unanswered = event.reason.startswith(_UNANSWERED) and not self.world.has_joined(machine)
            if well and by_us and not unanswered and event.reason != "the Ray head ended":
                yield f"{event.instance} was well, and we ended it: {event.reason}"

    # The judge

    def _beyond_the_cap(self) -> Iterator[str]:
        stale_usd = STALE_S * self.job.offer.price_usd_per_s * len(self.world.fake.instances)
        over_usd = self.world.fake.bill().total_usd - (self.job.max_cost_usd or 0.0)
        if not self.seen["describe stale"] or over_usd > stale_usd:  # an old look tells too late that one runs
            yield from super()._beyond_the_cap()

    def _more_billed_than_known(self) -> Iterator[str]:
        if not self.seen["describe stale"]:  # then it is told too late when an instance began to run
            yield from super()._more_billed_than_known()

    def wrong(self) -> list[str]:
        return [*super().wrong(), *self._left_behind(), *self._given_back_early(), *self._otherwise()]

    def _ended_by_its_guard(self, machine: Instance) -> Iterator[str]:
        """AWS may end a healthy instance only where its guard could not be moved in time."""
        assert machine.guard_at is not None
        at, free_s = machine.guard_at - LEASE_S - SHUTDOWN_S - LEAST_SLACK_S, 0.0
        while at < machine.guard_at:
            hindered = any(
                one.kind == "credentials" or one.kind.startswith("scheduler ")
                for one in self.case.stretches
                if one.begins_s <= at - START_AT < one.ends_s
            )
            driven = any(begins_at <= at < ends_at for begins_at, ends_at in self._lived)
            free_s = 0.0 if hindered or not driven else free_s + 1.0
            if free_s >= RETRIED_S:
                yield f"{name_of(machine)} was ended by its guard"
                return
            at += 1.0
        self.seen["ended by a guard that could not be moved"] += 1

    def _left_behind(self) -> Iterator[str]:
        self.world.fake.fault = None
        world = self.world.fake.world
        hindered = any(one.kind.startswith(("scheduler", "credentials")) for one in self.case.stretches)
        if self.ended in ENDS and not hindered and not self.died_in and (left := [*world.schedules]):
            yield f"schedules are left: {left}"
        self.world.sleep(8_000.0)
        self.world.fake.tick()
        if left := [name for name in world.schedules if name != "rubberband-preflight"]:
            yield f"schedules are left after hours: {left}"
        for machine in self.world.fake.instances:
            if machine.state(self.world.clock.now()) not in ("terminated", "running", "pending"):
                yield f"{name_of(machine)} is {machine.state(self.world.clock.now())}"

    def _given_back_early(self) -> Iterator[str]:
        """An instance that EC2 takes away in its first hour is free, if it is left to EC2."""
        for machine in self.world.fake.instances:
            noticed, ended_at = machine.notice_at, machine.ended_at or math.inf
            if noticed is None or machine.state_reason != USER_INITIATED or ended_at == machine.guard_at:
                continue
            first_hour = ended_at - machine.running_at < 3600.0 and ended_at < self._ran_until
            driven = any(begins_at < noticed - 60.0 and ended_at + 10.0 < ends_at for begins_at, ends_at in self._lived)
            heard = ended_at > noticed + STEP_S  # else it was given back at the same moment
            if heard and first_hour and driven and machine.instance_id not in self.world.hung:
                yield f"{name_of(machine)} was given back after its notice, and is charged"

    def _otherwise(self) -> Iterator[str]:
        state = self.controller_now().state
        if self.ended == "done":
            yield from ranked_otherwise(state)
        if self.ended in ENDS and state.phase is not Phase.FINISHED:
            yield f"it ended in phase {state.phase}"
        named = re.search(r"\(([\d.]+) USD spent\)", self.reason)
        if named and float(named[1]) > self.billed_by_the_ledger() + 0.01:
            yield f"it ended since {self.reason}, and the ledger says {self.billed_by_the_ledger():.4f}"
        ec2 = any(not one.kind.startswith("scheduler") for one in self.case.stretches)
        if self.ended in ENDS and not ec2 and not self.died_in and self.point.hidden_s <= 5.0:
            billed_usd, ledger_usd = self.world.fake.bill().total_usd, self.billed_by_the_ledger()
            most_usd = 0.003 * len(self.world.fake.instances)
            if abs(billed_usd - ledger_usd) > most_usd:
                yield f"{billed_usd:.4f} USD are billed, and the ledger says {ledger_usd:.4f}: more than looks apart"


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedOutcome:
    seed: int
    outcome: Outcome
    reason: str
    seen: Counter[str]


def run_seed(seed: int, log: Callable[[str], None] = lambda line: None) -> SeedOutcome:
    case = case_of(seed)
    with folder() as here:
        story = Outages(case.point, here, log, case=case, seed=seed)
        try:
            story.tell()
        except AssertionError as error:
            story.found.append(f"{error or 'an assertion failed'}")
            story.ended = "broken"
        except Exception as error:
            story.found.append(f"{type(error).__name__}: {error}")
            story.ended = "broken"
        return SeedOutcome(seed=seed, outcome=story.outcome(), reason=story.reason, seen=story.seen)


def tell(seed: int) -> None:
    case = case_of(seed)
    print(case.point, f"iterations of {case.iteration_s:g} s", *case.stretches, sep="\n")
    found = run_seed(seed, print)
    print(
        f"{found.outcome.ended} ({found.reason}): {found.outcome.drivers} drivers, {found.outcome.instances} instances"
    )
    print(f"billed {found.outcome.billed_usd:.6f} USD, ledger {found.outcome.ledger_usd:.6f}; {dict(found.seen)}")
    for what in found.outcome.wrong:
        print(f"WRONG: {what}")
