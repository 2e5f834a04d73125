"""The world of the crash points: a fake account, the machines in it, and what drivers leave on theirs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from rubberband.cloud.aws.boot import resolve
from rubberband.cloud.aws.calls import name_in
from rubberband.cloud.aws.guards import Schedules
from rubberband.cloud.aws.preflight import preflight
from rubberband.cloud.aws.provider import AwsProvider
from rubberband.cloud.catalogue import boot_timeouts
from rubberband.cloud.provider import Head
from rubberband.cloud.virtual import VirtualClock
from rubberband.executor import Job, TrialEnd
from tests.builders.aws_account import START_AT, Account, boot_times
from tests.builders.fake_ec2 import Killed as Killed
from tests.ec2.billing import BillLine
from tests.ec2.instance import Instance

LEASE_S = 600.0
STEP_S = 5.0
"""The world moves on in steps of at most so long."""
ORPHANED_S = 30.0
"""So long after its head has gone an instance shuts down, as its boot script says."""
TYPE = "g5.xlarge"
BOOT_LEASE_S = boot_timeouts([TYPE]).lease_s


def name_of(one: Instance | BillLine) -> str:
    return name_in(one.tags, one.launch_index)


class StubHead:
    """A Ray head on the driver's machine; it ends with its lease."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._until = -math.inf
        self._number = 0
        self.has_driver = True

    @property
    def address(self) -> str:
        return f"172.31.16.4:{6379 + self._number}"

    def living(self) -> Head | None:
        if self._now() > self._until:
            return None
        return Head(address=self.address, temp_dir=None, environment={})

    def ensure(self) -> Head:
        head = self.living()
        if head is None:
            self._number += 1
            self._until = self._now() + LEASE_S
            head = self.living()
        assert head is not None
        return head

    def renew_lease(self, until: float) -> None:
        """A head that is dead stays so."""
        if self.living() is not None:
            self._until = until

    def close(self) -> None:
        """It ends, if there is a driver to end it."""
        if self.has_driver:
            self.die()

    def die(self) -> None:
        self._until = -math.inf


class World(Account):
    """The account, what really happens in it, and what drivers leave on their machine."""

    def __init__(self, folder: Path, job: Job, *, boot_s: float, together: bool, ends: Mapping[int, TrialEnd]) -> None:
        """Machines take `boot_s` from when they run, and are billed, until they arm their lease and join.

        `together`: all of them are to be in one zone. `ends`: how trials end by themselves.
        """
        super().__init__(reads=boot_times, validates=False, boot_s=boot_s)
        self.boot_s, self.together, self.ends = boot_s, together, ends
        self.clock = VirtualClock(START_AT)
        self.fake.clock = self.clock.now
        self.directory, self.job = folder / "instances", job
        self.token_path = folder / "token"
        self.directory.mkdir(parents=True)
        self.head = StubHead(self.clock.now)
        self.while_asleep: Callable[[], None] | None = None
        """What a driver's other threads do while one of them sleeps."""
        self.threads: list[Callable[[], object]] = []
        """What a driver is about to ask for, each in a thread of its own."""
        self._orphaned_at: dict[str, float] = {}
        self.hung: set[str] = set()
        """Ids of machines whose guest does nothing any more: no lease of theirs ends them."""
        self.at_each_step: Callable[[], None] = lambda: None
        """What happens to machines, whoever is awake."""

    def sleep(self, seconds: float) -> None:
        until = self.clock.now() + seconds
        while self.clock.now() < until:
            self.advance_to(min(until, self.clock.now() + STEP_S))
            if self.while_asleep is not None:
                self.while_asleep()

    def advance_to(self, instant: float) -> None:
        """Time passes; machines whose head is gone shut down."""
        while self.clock.now() < instant:
            self.clock.advance_to(min(instant, self.clock.now() + STEP_S))
            self.at_each_step()
            for machine in self.fake.living:
                self._shut_down_if_orphaned(machine)

    def hang(self, machine: Instance) -> None:
        """Its guest stops, or never runs its boot script."""
        self.hung.add(machine.instance_id)
        machine.lease_until = machine.hard_stop_at = None

    def _shut_down_if_orphaned(self, machine: Instance) -> None:
        now = self.clock.now()
        if machine.instance_id in self.hung:
            return
        if now < machine.running_at + self.boot_s or self.has_joined(machine):
            return
        since = self._orphaned_at.setdefault(machine.instance_id, now)
        if now - since >= ORPHANED_S:
            self.fake.power_off(machine.instance_id)

    def has_joined(self, machine: Instance) -> bool:
        """Whether the head that it was told of lives."""
        return self.head.living() is not None and self.head.address in machine.user_data

    def works(self, name: str) -> bool:
        now = self.clock.now()
        return any(
            now >= one.running_at + self.boot_s and self.has_joined(one) and one.instance_id not in self.hung
            for one in self.named(name)
        )

    def is_hung(self, name: str) -> bool:
        return any(one.instance_id in self.hung for one in self.named(name))

    def is_noticed(self, name: str) -> bool:
        """Whether the metadata service of an instance tells that EC2 takes it away."""
        return any(one.notice_at is not None for one in self.named(name))

    def beat(self, name: str, until: float) -> None:
        """What the driver's worker on an instance does."""
        for machine in self.named(name):
            if self.has_joined(machine):
                self.fake.extend_lease(machine.instance_id, until)

    def named(self, name: str) -> list[Instance]:
        return [one for one in self.fake.living if name_of(one) == name]

    def check(self) -> None:
        """What is looked at before an experiment begins. Raises InputError."""
        preflight(self.resources(), [self.job.offer], session=self.session, place=self.place)

    def provider(self) -> AwsProvider:
        """As `rubberband.cloud.aws.provider` opens it. Raises InputError, ProviderError."""
        words = self.resources()
        machines = resolve(
            self.session,
            words.aws,
            TYPE,
            checkpoints=words.checkpoints,
            place=self.place,
            token_path=self.token_path,
            sleep=self.sleep,
        )
        offer = self.job.offer
        return AwsProvider(
            self.job.name,
            self.directory,
            self.session,
            machines,
            self.head,
            run="run-1",
            offers=[replace(offer, instance_type=TYPE)],
            gpus=offer.gpus,
            lease_s=LEASE_S,
            together=self.together,
            at_once=1,  # so that calls have one order
            guards=Schedules(self.session, "rubberband-guard", clock=self.clock.now, begin=lambda work: work()),
            clock=self.clock.now,
            sleep=self.sleep,
        )
