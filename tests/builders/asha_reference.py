"""One run of asha in plain Python, trial by trial: `rubberband.planner.noise.asha_runs` simulates many at once."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from rubberband.planner.noise.asha_runs import Draw, most_losses
from rubberband.values.offer import Offer
from rubberband.values.plan import Rungs, Stage, StagePlan
from rubberband.values.profile import Profile

_DIGITS = 6
"""Instants that are the same when they are rounded to so many digits are one."""


@dataclass(slots=True)
class Instance:
    runs_at: float
    ready_at: float
    dies_at: float
    is_ready: bool = False


@dataclass(slots=True)
class Training:
    """A trial on a slot."""

    trial: int
    begins_at: float
    trains_at: float
    iteration_s: float
    ends_at: float


@dataclass(slots=True)
class PlainRun:
    """A run of one plan in one sample."""

    stage: Stage
    choice: StagePlan
    profile: Profile
    offer: Offer
    draw: Draw
    sample: int
    now: float = 0.0
    launched: int = 0
    ran: int = 0
    billed_s: float = 0.0
    busy_s: float = 0.0
    fresh: int = 0
    instances: dict[int, Instance] = field(default_factory=dict)
    running: dict[int, Training] = field(default_factory=dict)
    """By slot."""
    waiting: set[int] = field(default_factory=set)
    slot_of: dict[int, int] = field(default_factory=dict)
    rung: dict[int, int] = field(default_factory=dict)
    saved: dict[int, int] = field(default_factory=dict)
    rungs: Rungs = field(init=False)

    def __post_init__(self) -> None:
        assert self.stage.ladder is not None
        self.rungs = Rungs(self.stage.ladder)

    @property
    def wide(self) -> int:
        return max(1, self.choice.gpus_per_trial // self.offer.slots)

    @property
    def per(self) -> int:
        return max(1, self.offer.slots // self.choice.gpus_per_trial)

    @property
    def hosts(self) -> int:
        """Instances, or as many of them as a gang needs; those too few for another gang are of no use."""
        return self.choice.instances // self.wide

    @property
    def is_lost(self) -> bool:
        return self.choice.market == "spot" and self.draw.launches is not None

    def to_end(self) -> None:
        for number in range(self.choice.instances):
            self.launch(number)
        while True:
            self.now = max(instance.ready_at for instance in self.instances.values())
            lost = [number for number, instance in self.instances.items() if instance.dies_at < self.now]
            if not lost:
                break
            self.now = self.instances[min(lost)].dies_at
            self.give_up(min(lost))
            self.launch(min(lost))
        for instance in self.instances.values():
            instance.is_ready = True
        self.settle()
        while self.running or self.waiting:
            self.step()
        for number in list(self.instances):
            self.give_up(number)

    def launch(self, number: int) -> None:
        draw, launches = self.draw, self.draw.launches
        provision_s, lives_s = float(draw.provision_s[self.sample]), math.inf
        if self.is_lost:
            assert launches is not None
            at = launches.place(self.launched, self.sample)
            is_again = self.launched >= self.choice.instances
            provision_s = float(launches.provision_s.take(at)) if is_again else provision_s
            init_s = max(0.0, float(launches.init_s.take(at)) + (launches.longer_s if is_again else 0.0))
            if self.launched < self.choice.instances + most_losses(self.stage.trials):
                lives_s = float(launches.lives_s.take(at))
        else:
            init_s = float(draw.slowest_s(np.array([self.choice.instances]), np.array([self.sample]))[0])
        runs_at = self.now + provision_s
        self.instances[number] = Instance(runs_at, runs_at + init_s, runs_at + lives_s)
        self.launched += 1

    def give_up(self, number: int) -> None:
        held_s = self.now - self.instances.pop(number).runs_at
        if held_s >= 0.0:
            self.ran += 1
            self.billed_s += max(held_s, self.offer.minimum_billed_s)

    def step(self) -> None:
        ends = [(round(each.ends_at, _DIGITS), each.trial, slot) for slot, each in self.running.items()]
        changes = [
            (round(each.dies_at if each.is_ready else min(each.ready_at, each.dies_at), _DIGITS), 10**6, number)
            for number, each in self.instances.items()
            if not each.is_ready or each.dies_at < math.inf
        ]
        _, code, which = min(ends + changes)
        if code < self.stage.trials:
            training = self.running.pop(which)
            self.now = training.ends_at
            self.busy_s += self.now - training.begins_at
            rung = self.rung[training.trial]
            self.rungs.record(rung, self.merit(rung, training.trial), training.trial)
        else:
            self.change(which)
        self.settle()

    def merit(self, rung: int, trial: int) -> int:
        ranks = self.draw.ranks
        return int(ranks[min(rung, len(ranks) - 1), self.sample, trial])

    def change(self, number: int) -> None:
        """An instance is lost, or ready."""
        instance = self.instances[number]
        if not instance.is_ready and instance.ready_at <= instance.dies_at:
            self.now, instance.is_ready = instance.ready_at, True
            return
        self.now = instance.dies_at
        host = number // self.wide
        for slot in range(host * self.per, (host + 1) * self.per):
            if slot in self.running:
                self.interrupt(self.running.pop(slot))
        trials = len(self.running) + len(self.waiting) + self.stage.trials - self.fresh
        live = {other // self.wide for other in self.instances if other // self.wide < self.hosts}
        if host < self.hosts and len(live) <= -(-trials // self.per):
            self.give_up(number)
            self.launch(number)
        else:
            for other in [other for other in self.instances if other // self.wide == host]:
                self.give_up(other)

    def interrupt(self, training: Training) -> None:
        assert self.stage.ladder is not None
        assert self.offer.spot is not None
        trial, every = training.trial, self.offer.spot.checkpoint_iterations
        gain = self.stage.ladder.gains[self.rung[trial]]
        before = self.stage.ladder.totals[self.rung[trial]] - gain
        trained = math.floor(max(0.0, self.now - training.trains_at) / training.iteration_s + 1e-5)
        kept = (before + self.saved[trial] + trained) // every * every - before
        self.saved[trial] = min(max(kept, self.saved[trial]), gain)
        self.busy_s += self.now - training.begins_at
        self.waiting.add(trial)

    def settle(self) -> None:
        while (slots := self.free()) and (trial := self.next()) is not None:
            self.start(trial, slots)
        if self.running and not self.waiting and self.fresh == self.stage.trials and self.rungs.promotable() is None:
            hosts = {slot // self.per for slot in self.running}
            for number in [number for number in self.instances if number // self.wide not in hosts]:
                self.give_up(number)

    def free(self) -> list[int]:
        """Return the free slots."""
        ready = [number for number, instance in self.instances.items() if instance.is_ready]
        hosts = [host for host in range(self.hosts) if self.has(host, ready)]
        slots = [host * self.per + part for host in hosts for part in range(self.per)]
        return [slot for slot in slots if slot not in self.running]

    def has(self, host: int, ready: list[int]) -> bool:
        return all(host * self.wide + part in ready for part in range(self.wide))

    def next(self) -> int | None:
        if self.waiting:
            trial = min(self.waiting)
            self.waiting.remove(trial)
            return trial
        if (found := self.rungs.promotable()) is not None:
            trial = self.rungs.promote(found[0])
            self.rung[trial], self.saved[trial] = found[0] + 1, 0
            return trial
        if self.fresh < self.stage.trials:
            self.fresh += 1
            self.rung[self.fresh - 1] = self.saved[self.fresh - 1] = 0
            return self.fresh - 1
        return None

    def start(self, trial: int, slots: list[int]) -> None:
        slot = self.slot_of.get(trial, -1)
        if slot not in slots:
            free = [slot // self.per for slot in slots]
            host = min(free, key=lambda host: (free.count(host), host))
            slot = min(slot for slot in slots if slot // self.per == host)
        self.slot_of[trial], rung = slot, self.rung[trial]
        assert self.stage.ladder is not None
        draw, cell = self.draw, np.array([self.sample * self.stage.trials + trial])
        lost = self.launched if self.is_lost else 0
        startup = 1.0 if draw.startup is None else float(draw.startup.of(cell, np.array([rung + lost]))[0])
        iteration_s = self.profile.iteration_s(self.choice.gpus_per_trial)
        iteration_s *= 1.0 if draw.own is None else float(draw.own[cell[0]])
        iteration_s *= 1.0 if draw.noise is None else float(draw.noise.of(cell, np.array([rung]))[0])
        trains_at = self.now + startup * self.profile.trial_startup_s
        left = self.stage.ladder.gains[rung] - self.saved[trial]
        self.running[slot] = Training(trial, self.now, trains_at, iteration_s, trains_at + left * iteration_s)

    def cost_usd(self) -> float:
        offer = self.offer
        price = offer.market_price_usd_per_s(self.choice.market)
        fixed_usd = offer.head_cost_usd(self.now) + self.ran * offer.once_usd_per_instance
        if offer.billing == "per_function":
            return fixed_usd + price * self.choice.gpus_per_trial / offer.slots * self.busy_s
        return fixed_usd + price * self.billed_s
