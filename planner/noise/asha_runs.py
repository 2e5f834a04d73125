"""Simulated runs of asynchronous successive halving (asha), many side by side: a row for each plan and sample.

A run is one number of instances and one gang. Slots take trials as `rubberband.values.schedulers` says, on instances
that `rubberband.executor.core.placement` chooses; at the end an instance without a trial is released, since no more
slots are ever needed than trials run then. A step takes every run to its next instant: a trial ends its rung, or a spot
instance is lost or ready. Trials of a lost instance go on from their last checkpoints, on a free slot or on the
replacement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rubberband.planner.exact.table import Floats, Ints
from rubberband.planner.noise.asha_draws import Draw
from rubberband.planner.noise.ladders import Ladders
from rubberband.values.offer import Offer
from rubberband.values.plan import Stage, StagePlan
from rubberband.values.profile import Profile

_NEVER = np.int64(2**63 - 1)
_LEAST_S = 1e-9
"""Least time of an iteration: the normal law allows trials that take no time."""
_TOO_FEW, _GONE = 1_000, 2_000
"""Instances that a host lacks that never has enough, or that is given up."""
_EPSILON = 1e-5
"""Share of an iteration below which one counts as done, as sums of times are no more exact."""


@dataclass(frozen=True, slots=True)
class SimulatedRuns:
    """The simulated runs of some plans, each (plans, samples); of one plan (samples,)."""

    starts_s: Floats
    """Instant at which its instances were ready."""
    jct_s: Floats
    cost_usd: Floats
    rungs: Ints
    """(…, trials) The highest rung that each trial entered."""


World = tuple[Profile, Offer]
"""The times of trials, and the prices of instances."""


def most_losses(trials: int) -> int:
    """Return the instances after which a run loses no more, as it would hardly come to its end."""
    return 100 + 10 * trials


def simulate(
    stage: Stage, choices: Sequence[StagePlan], profile: Profile, offer: Offer, draw: Draw, samples: range | None = None
) -> SimulatedRuns:
    """Return the runs of plans, which all buy on the same market, in some samples of a draw, or in all.

    Results at the same instant count in the order of the trials' numbers.
    """
    every = range(draw.ranks.shape[1]) if samples is None else samples
    found = simulate_some(stage, choices, profile, offer, draw, [every] * len(choices))
    parts = ((one.starts_s, one.jct_s, one.cost_usd, one.rungs) for one in found)
    return SimulatedRuns(*map(np.stack, zip(*parts, strict=True)))


def simulate_some(
    stage: Stage,
    choices: Sequence[StagePlan],
    profile: Profile,
    offer: Offer,
    draw: Draw,
    samples: Sequence[range],
    worlds: Sequence[World] = (),
) -> list[SimulatedRuns]:
    """Return the runs of `simulate` for each of the plans, which have their own samples, and may have their own worlds.

    Worlds differ from the profile and the offer in the times of trials and in prices only.
    """
    is_lost = draw.launches is not None and choices[0].market == "spot"
    each = worlds or [(profile, offer)] * len(choices)
    runs = (_SpotRuns if is_lost else _Runs)(stage, choices, each, draw, samples)
    runs.to_end()
    ends = np.cumsum([len(some) for some in samples])[:-1]
    rungs = runs.rung.reshape(-1, stage.trials)
    parts = (np.split(each, ends) for each in (runs.starts_s, runs.now, runs.cost_usd(), rungs))
    return [SimulatedRuns(*one) for one in zip(*parts, strict=True)]


class _Runs:
    """Runs on demand: an event is the end of a trial's rung."""

    extra_keys = 0
    """Keys beside those of slots, for each instance."""

    def __init__(
        self, stage: Stage, choices: Sequence[StagePlan], worlds: Sequence[World], draw: Draw, samples: Sequence[range]
    ) -> None:
        """`worlds` and `samples` are those of each plan."""
        (_, offer), market = worlds[0], choices[0].market
        self.draw, self.offer = draw, offer
        self.trials = stage.trials
        self.samples, self.rungs, self.saves = draw.ranks.shape[1], stage.rungs, stage.repeats is None
        self.columns, lengths = np.concatenate(samples), [len(some) for some in samples]
        self.rows = len(self.columns)

        def each(values: list[int] | list[float]) -> Any:
            return np.array(values).repeat(lengths)

        gangs = self.gangs = each([choice.gpus_per_trial for choice in choices])
        self.instances = each([choice.instances for choice in choices])
        timed = [(profile, choice.gpus_per_trial) for choice, (profile, _) in zip(choices, worlds, strict=True)]
        self.iteration_s = each([profile.iteration_s(gpus) for profile, gpus in timed])
        self.usual_startup_s = each([profile.startup_s(gpus) for profile, gpus in timed])
        self.once_usd = each([each_offer.once_usd_per_instance for _, each_offer in worlds])
        self.head_usd_per_s = each([each_offer.head_cost_usd(1.0) for _, each_offer in worlds])
        self.price_usd_per_s = each([each_offer.market_price_usd_per_s(market) for _, each_offer in worlds])
        self.wide, self.per = np.maximum(1, gangs // offer.slots), np.maximum(1, offer.slots // gangs)
        self.hosts = self.instances // self.wide
        """A host is an instance, or the instances of a wide gang."""
        self.is_wasteful = bool((self.instances % self.wide).any())
        """Whether instances are too few for another gang."""
        self.gains = np.array(stage.rung_work)
        """Iterations that a trial trains in each rung."""
        is_alike = draw.own is None and draw.noise is None and draw.startup is None
        self.alike_s = self.usual_startup_s + self.gains[:, None] * self.iteration_s if is_alike else None
        """(rungs, rows) Seconds of a trial in each rung, where all trials take as long."""
        self.in_order = not (self.extra_keys or self.rungs.promotes or self.rungs.repeats > 1)
        """Whether trials start by number, and no instance is released before the last one has."""
        self.first, self.cell = np.arange(self.rows) * stage.trials, self.columns * stage.trials
        self.ladders = Ladders(
            self.rungs, draw.ranks, self.columns, defers=bool(self.extra_keys) or self.rungs.repeats > 1
        )
        size = self.rows * stage.trials
        self.rung, self.slot = np.zeros(size, np.int64), np.full(size, -1)
        self.most_instances = int(self.instances.max())
        bits = (stage.trials + offer.max_instances).bit_length()  # the same whatever runs beside it
        self.mask, self.half, self.instant = np.int64((1 << bits) - 1), np.int64(1 << bits - 1), np.int64(-1 << bits)
        self.num_slots = int((self.hosts * self.per).max())
        self.keys = np.full((self.num_slots + self.extra_keys * self.most_instances, self.rows), _NEVER)
        """Instant of each event in its upper bits, its trial (or instance) in its lower ones: they are in order."""
        self.flat = self.keys.ravel()
        self.fresh = np.minimum(stage.trials, self.hosts * self.per)
        """Trials that have started; the next one is new."""
        self.idle = np.zeros((int((-(-self.instances // self.wide)).max()), self.rows), np.int16)
        """Free slots of each host."""
        self.room = np.zeros(self.rows, np.int64)
        """Free slots."""
        self.billed_s, self.busy_s = np.zeros(self.rows), np.zeros(self.rows)

    def to_end(self) -> None:
        """Run all of them."""
        self.begin()
        self.starts_s = self.now.copy()
        self.fill()
        while True:
            keys = self.keys.min(axis=0)
            at = (keys < _NEVER).nonzero()[0]
            if not len(at):
                break
            if len(at) < self.rows:
                keys = keys.take(at)
            codes = keys & self.mask
            self.now[at] = (keys - codes).view(np.float64)
            self.step(at, codes)

    def begin(self) -> None:
        """All instances are asked for, and get ready."""
        self.running_s = self.draw.provision_s.take(self.columns)
        self.now = self.running_s + self.draw.slowest_s(self.instances, self.columns)
        self.held, self.useless = self.hosts * self.wide, self.instances - self.hosts * self.wide

    def fill(self) -> None:
        """Start the first trials, and release the hosts that none needs."""
        slots, at = np.nonzero(np.arange(self.num_slots)[:, None] < self.fresh)
        used = -(-self.fresh // self.per)
        self.room = used * self.per - self.fresh
        self._start(at, slots + self._skip_waves().take(at), slots)
        number = np.arange(len(self.idle))[:, None]
        self.idle[used - 1, np.arange(self.rows)] = self.room
        self.all_begun_s = self.now.copy()
        hosts, at = ((used <= number) & (number < self.hosts)).nonzero()
        self.release(at, hosts)
        if self.in_order and self.alike_s is None:
            self._start_all()

    def _start_all(self) -> None:
        """Start one trial after another on the slot that is free first."""
        every, fresh = np.arange(len(self.slot)), self.fresh.copy()
        lasts_s = self.lasts_s(every // self.trials, every, every, every % self.trials)
        while len(at := (self.fresh < self.trials).nonzero()[0]):
            slots = (self.keys if len(at) == self.rows else self.keys[:, at]).argmin(axis=0)
            cells, trials = slots * self.rows + at, self.fresh.take(at)
            keys, places = self.flat.take(cells), self.first.take(at) + trials
            self.now[at] = now_s = (keys - (keys & self.mask)).view(np.float64)
            self.flat[cells] = self.key(now_s + lasts_s.take(places), trials)
            self.slot[places] = slots
            self.fresh[at] = trials + 1
        self.all_begun_s = self.now.copy()
        if self.offer.billing == "per_function":
            is_later = np.arange(self.trials) >= fresh[:, None]
            self.busy_s += (lasts_s.reshape(is_later.shape) * is_later).sum(axis=1)

    def _skip_waves(self) -> Ints:
        """Go to the last wave but one where all trials take as long and none climbs; return the trials before it."""
        if self.alike_s is None or not self.in_order:
            return np.zeros(self.rows, np.int64)
        waves = (self.trials - self.fresh) // self.fresh
        skipped: Ints = waves * self.fresh
        self.now += waves * self.alike_s[0]
        self.busy_s += skipped * self.alike_s[0]
        self.fresh += skipped
        return skipped

    def step(self, at: Ints, codes: Ints) -> None:
        """An event happens in each of the runs."""
        self.ended(at, codes)

    def ended(self, at: Ints, trials: Ints) -> None:
        """A trial of each of the runs has ended its rung: the next one takes its slot, or another free one."""
        places = self.first[at] + trials
        slots = self.slot.take(places)
        rungs = self.rung.take(places)
        if self.ladders.defers:
            self.ladders.record(at, rungs, trials)
            trials = self.next(at)
        else:
            trials = self.going(at, self.ladders.settle(at, rungs, trials), rungs)
        goes = trials >= 0
        is_direct = goes & (self.room.take(at) == 0)
        if is_direct.all():
            self._start(at, trials, slots)
            return
        direct, rest = is_direct.nonzero()[0], (~is_direct).nonzero()[0]
        self._start(at.take(direct), trials.take(direct), slots.take(direct))
        at, goes, trials, slots = at.take(rest), goes.take(rest), trials.take(rest), slots.take(rest)
        self.flat[slots * self.rows + at] = _NEVER
        self.room[at] += 1
        hosts = slots // self.per.take(at)
        self.idle[hosts, at] += 1
        if goes.any():
            self.place(at[goes], trials[goes])
        if self.rungs.repeats > 1:
            self.start_more(at)
        self.release_idle(at, hosts)

    def start_more(self, at: Ints) -> None:
        """Start trials on what is free in runs, as long as there are any."""
        some = at[self.room.take(at) > 0]
        while len(some):
            trials = self.next(some)
            some, trials = some[trials >= 0], trials[trials >= 0]
            self.place(some, trials)
            some = some[self.room.take(some) > 0]

    def next(self, at: Ints) -> Ints:
        """Return the trial that each of the runs starts next, and take it from its queue; -1 for none."""
        return self.going(at, *self.ladders.promote(at))

    def going(self, at: Ints, promoted: Ints, rungs: Ints) -> Ints:
        """Return the trials that start next: those promoted from some rungs, and new ones where there are none (-1)."""
        fresh = self.fresh.take(at)
        is_new = (promoted < 0) & (fresh < self.trials)
        trials = np.where(is_new, fresh, promoted)
        self.fresh[at] = fresh + is_new
        if self.is_wasteful:
            last = at[is_new & (fresh == self.trials - 1)]
            self.all_begun_s[last] = self.now[last]
        climbs = (promoted >= 0).nonzero()[0]
        if len(climbs):
            self.rung[self.first.take(at.take(climbs)) + promoted.take(climbs)] = rungs.take(climbs) + 1
        return trials

    def place(self, at: Ints, trials: Ints) -> None:
        """Start trials on free slots: the one that a trial had before, or one of the fullest host."""
        per, old = self.per[at], self.slot.take(self.first[at] + trials)
        is_kept = (old >= 0) & (self.flat.take(old * self.rows + at) == _NEVER) & (self.idle[old // per, at] > 0)
        idle, number = self.idle[:, at].astype(np.int64), np.arange(len(self.idle))[:, None]
        hosts = np.where(idle > 0, idle * len(idle) + number, _NEVER).min(axis=0) % len(idle)
        of_host = hosts * per + np.minimum(np.arange(per.max(initial=1))[:, None], per - 1)
        first = (self.flat.take(of_host * self.rows + at) == _NEVER).argmax(axis=0)
        slots = np.where(is_kept, old, of_host[first, np.arange(len(at))])
        self.idle[slots // per, at] -= 1
        self.room[at] -= 1
        self._start(at, trials, slots)

    def _start(self, at: Ints, trials: Ints, slots: Ints) -> None:
        places = self.first.take(at) + trials
        lasts_s = self.lasts_s(at, slots, places, trials)
        self.slot[places] = slots
        self.flat[slots * self.rows + at] = self.key(self.now.take(at) + lasts_s, trials)
        if self.offer.billing == "per_function":
            np.add.at(self.busy_s, at, lasts_s)

    def key(self, at_s: Floats, codes: Ints) -> Ints:
        """Return the keys of events; instants that differ by a rounding error are one."""
        key: Ints = ((at_s.view(np.int64) + self.half) & self.instant) | codes
        return key

    def lasts_s(self, at: Ints, slots: Ints, places: Ints, trials: Ints) -> Floats:
        """Return how long trials take to the end of their rungs."""
        rungs = self.rung.take(places)
        if self.alike_s is not None:
            alike_s: Floats = self.alike_s.take(rungs * self.rows + at)
            return alike_s
        cells = self.cell.take(at) + trials
        lasts_s: Floats = self.startup_s(at, cells, rungs) + self.gains.take(rungs) * self.pace_s(at, cells, rungs)
        return lasts_s

    def pace_s(self, at: Ints, cells: Ints, rungs: Ints) -> Floats:
        """Return the seconds of an iteration."""
        draw = self.draw
        pace_s: Floats = self.iteration_s[at]
        if draw.own is not None:
            pace_s = pace_s * draw.own.take(cells)
        if draw.noise is not None:
            pace_s = pace_s * draw.noise.of(cells, rungs)
        return pace_s

    def startup_s(self, at: Ints, cells: Ints, rungs: Ints) -> Any:
        """Return the seconds of a start-up."""
        startup_s = self.usual_startup_s[at]
        return startup_s if self.draw.startup is None else startup_s * self.draw.startup.of(cells, rungs)

    def release_idle(self, at: Ints, hosts: Ints) -> None:
        """Release hosts on which a trial has ended if none is on them now, unless repeats wait for each other."""
        if self.rungs.repeats > 1:
            at = at[(self.ladders.awaited.take(at) == 0) & (self.fresh.take(at) == self.trials)]
            hosts, which = np.nonzero(self.idle[:, at] == self.per[at])
            at = at[which]
        else:
            is_idle = self.idle[hosts, at] == self.per[at]
            at, hosts = at[is_idle], hosts[is_idle]
        self.idle[hosts, at] = 0
        self.room[at] -= self.per[at]
        self.release(at, hosts)

    def release(self, at: Ints, hosts: Ints) -> None:
        """Release idle hosts: all trials have begun."""
        self.held -= np.bincount(at, self.wide[at], self.rows).astype(np.int64)
        billed_s = np.maximum(self.offer.minimum_billed_s, self.now[at] - self.running_s[at])
        self.billed_s += np.bincount(at, self.wide[at] * billed_s, self.rows)

    def cost_usd(self) -> Floats:
        """Return the bills."""
        offer = self.offer
        cost_usd = self.head_usd_per_s * self.now + self.started() * self.once_usd
        held_s = self.gangs / offer.slots * self.busy_s if offer.billing == "per_function" else self.held_s()
        found: Floats = cost_usd + self.price_usd_per_s * held_s
        return found

    def started(self) -> Ints:
        """Return the instances that ran."""
        found: Ints = self.instances
        return found

    def held_s(self) -> Floats:
        """Return the seconds of all instances on the bill."""
        ends = [(self.held, self.now), (self.useless, self.all_begun_s)]
        minimum_s = self.offer.minimum_billed_s
        held_s: Floats = self.billed_s + sum(
            count * np.maximum(minimum_s, end_s - self.running_s) for count, end_s in ends
        )
        return held_s


class _SpotRuns(_Runs):
    """Runs on spot: losses of instances, and replacements that are ready, are events as well."""

    extra_keys = 1

    def begin(self) -> None:
        """Ask for all instances, and for those in place of lost ones, until all are ready at once."""
        shape = (self.most_instances, self.rows)
        self.runs_at, self.ready_at, self.dies_at = (np.full(shape, np.inf) for _ in range(3))
        self.is_ready, self.live = np.zeros(shape, bool), self.hosts.copy()
        self.launches, self.ran, self.running, self.waiting = (np.zeros(self.rows, np.int64) for _ in range(4))
        self.lacking = np.zeros(self.idle.shape, np.int16)
        """Instances of each host that are not ready."""
        self.lacking[np.arange(len(self.idle))[:, None] >= self.hosts] = _TOO_FEW
        self.waits = np.zeros((self.rows, self.trials), bool)
        self.saved = np.zeros(self.rows * self.trials, np.int64)
        """Iterations of its rung that a trial's checkpoint holds."""
        self.before = np.array(self.rungs.totals) - self.gains
        """Iterations before each rung; negative or 0 where a trial saves none."""
        self.trains_at, self.pace = np.zeros(self.num_slots * self.rows), np.ones(self.num_slots * self.rows)
        """Begin of the training on each slot, and the seconds of an iteration there."""
        self.running[:] = self.fresh
        self.now = np.zeros(self.rows)
        for number in range(self.most_instances):
            at = np.flatnonzero(number < self.instances)
            self._launch(at, np.full(len(at), number))
        while True:
            self.now = np.where(np.isfinite(self.ready_at), self.ready_at, 0.0).max(axis=0)
            instances, at = np.nonzero(self.dies_at < self.now)
            if not len(at):
                break
            at, firsts = np.unique(at, return_index=True)
            instances = instances[firsts]
            self.now[at] = self.dies_at[instances, at]
            self._bill(at, instances)
            self._launch(at, instances)
        instances, at = np.nonzero(np.isfinite(self.ready_at))
        self._is_ready(at, instances)

    def fill(self) -> None:
        """Start the first trials, and release the hosts that none needs."""
        super().fill()
        self._release_idle(np.flatnonzero(self.fresh == self.trials))

    def _launch(self, at: Ints, instances: Ints) -> None:
        """Ask for an instance in each of the runs."""
        draw, number = self.draw.launches, self.launches.take(at)
        assert draw is not None, "instances on spot are lost"
        self.launches[at] += 1
        columns, is_again = self.columns.take(at), number >= self.instances.take(at)
        cells = draw.place(number, columns)
        provision_s = np.where(is_again, draw.provision_s.take(cells), self.draw.provision_s.take(columns))
        runs_at = self.now[at] + provision_s
        init_s = np.maximum(0.0, draw.init_s.take(cells) + is_again * draw.longer_s)
        self.runs_at[instances, at], self.ready_at[instances, at] = runs_at, runs_at + init_s
        lives_s = np.where(
            number < self.instances.take(at) + most_losses(self.trials), draw.lives_s.take(cells), np.inf
        )
        self.dies_at[instances, at] = runs_at + lives_s
        self.is_ready[instances, at] = False
        self._await(at, instances)

    def _await(self, at: Ints, instances: Ints) -> None:
        """Wait for what happens next to instances."""
        coming_s = np.where(self.is_ready[instances, at], np.inf, self.ready_at[instances, at])
        next_s = np.minimum(coming_s, self.dies_at[instances, at])
        keys = np.where(next_s < np.inf, self.key(next_s, self.trials + instances), _NEVER)
        self.flat[(self.num_slots + instances) * self.rows + at] = keys

    def _is_ready(self, at: Ints, instances: Ints) -> None:
        self.is_ready[instances, at] = True
        self._await(at, instances)

    def step(self, at: Ints, codes: Ints) -> None:
        """An event happens in each of the runs."""
        is_end = codes < self.trials
        if is_end.any():
            self.running[at[is_end]] -= 1
            self.ended(at[is_end], codes[is_end])
        if not is_end.all():
            self._changed(at[~is_end], codes[~is_end] - self.trials)
        self._release_idle(at[self.fresh.take(at) == self.trials])

    def _changed(self, at: Ints, instances: Ints) -> None:
        """An instance of each of the runs is lost, or ready."""
        is_ready, ready_at = self.is_ready[instances, at], self.ready_at[instances, at]
        is_lost = is_ready | (self.dies_at[instances, at] < ready_at)
        self._lose(at[is_lost], instances[is_lost])
        new, instances = at[~is_lost], instances[~is_lost]
        self._is_ready(new, instances)
        hosts = instances // self.wide[new]
        self.lacking[hosts, new] -= 1
        usable = self.lacking[hosts, new] == 0
        new, hosts = new[usable], hosts[usable]
        self.idle[hosts, new] = self.per[new]
        self.room[new] += self.per[new]
        self.start_more(at)

    def _lose(self, at: Ints, instances: Ints) -> None:
        """Interrupt the trials of an instance of each of the runs, and replace it where they need it."""
        per, hosts = self.per[at], instances // self.wide[at]
        for part in range(int(per.max(initial=0))):
            keys = self.flat.take((hosts * per + np.minimum(part, per - 1)) * self.rows + at)
            busy = (keys < _NEVER) & (part < per) & (self.lacking[hosts, at] == 0)
            self._interrupt(at[busy], (hosts * per)[busy] + part, keys[busy] & self.mask)
        self.room[at] -= self.idle[hosts, at]
        self.idle[hosts, at] = 0
        self.lacking[hosts, at] += self.is_ready[instances, at]
        trials = self.running[at] + self.waiting[at] + self.trials - self.fresh[at]
        is_replaced = (self.live[at] <= -(-trials // per)) & (hosts < self.hosts[at])
        self._bill(at[is_replaced], instances[is_replaced])
        self._launch(at[is_replaced], instances[is_replaced])
        self.release(at[~is_replaced], hosts[~is_replaced])

    def _interrupt(self, at: Ints, slots: Ints, trials: Ints) -> None:
        """A trial of each of the runs waits, and goes on from its last checkpoint."""
        places, cells = self.first[at] + trials, slots * self.rows + at
        rungs = self.rung.take(places)
        saved, gains, before = self.saved.take(places), self.gains.take(rungs), self.before.take(rungs)
        trained_s = np.maximum(0.0, self.now[at] - self.trains_at.take(cells))
        trained = np.floor(trained_s / np.maximum(self.pace.take(cells), _LEAST_S) + _EPSILON).astype(np.int64)
        assert self.offer.spot is not None, "instances on spot are lost"
        every = self.offer.spot.checkpoint_iterations
        if self.saves:
            kept = (before + saved + trained) // every * every - before
            self.saved[places] = np.clip(kept, saved, gains)
        left_s = (self.flat.take(cells) - trials).view(np.float64) - self.now[at]
        self.busy_s[at] -= left_s
        self.flat[cells] = _NEVER
        self.waits[at, trials] = True
        self.waiting[at] += 1
        self.running[at] -= 1

    def next(self, at: Ints) -> Ints:
        """Return the trial that each of the runs starts next: one that was interrupted goes first."""
        trials = np.full(len(at), -1)
        is_waiting = self.waiting[at] > 0
        again, others = at[is_waiting], at[~is_waiting]
        trials[is_waiting] = first = self.waits[again].argmax(axis=1)
        self.waits[again, first] = False
        self.waiting[again] -= 1
        trials[~is_waiting] = found = super().next(others)
        self.saved[self.first[others[found >= 0]] + found[found >= 0]] = 0
        self.running[at] += trials >= 0
        return trials

    def lasts_s(self, at: Ints, slots: Ints, places: Ints, trials: Ints) -> Floats:
        """Return how long trials take to the end of their rungs, from their checkpoints on."""
        cells = self.cell.take(at) + trials
        rungs, where = self.rung.take(places), slots * self.rows + at
        startup_s = self.startup_s(at, cells, rungs + self.launches[at])
        self.pace[where] = pace_s = self.pace_s(at, cells, rungs)
        self.trains_at[where] = self.now[at] + startup_s
        lasts_s: Floats = startup_s + (self.gains.take(rungs) - self.saved.take(places)) * pace_s
        return lasts_s

    def release_idle(self, at: Ints, hosts: Ints) -> None:
        """Do it after all that happens in a step."""

    def _release_idle(self, at: Ints) -> None:
        """Release every host without a trial in runs in which no trial waits, or may wait: all have begun."""
        is_over = (self.waiting[at] == 0) & (self.ladders.due[at] == 0) & (self.ladders.awaited[at] == 0)
        self.keys[:, at[is_over & (self.running[at] == 0)]] = _NEVER
        at = at[is_over & (self.running[at] > 0)]
        lacking = self.lacking[:, at]
        is_idle = (self.idle[:, at] == self.per[at]) | ((lacking > 0) & (lacking < _GONE))
        hosts, which = np.nonzero(is_idle)
        self.release(at[which], hosts)

    def release(self, at: Ints, hosts: Ints) -> None:
        """Release idle hosts."""
        self.room -= np.bincount(at, self.idle[hosts, at], self.rows).astype(np.int64)
        self.idle[hosts, at] = 0
        for part in range(int(self.wide.max())):
            instances = hosts * self.wide[at] + part
            there = (part < self.wide[at]) & (instances < self.instances[at])
            there &= np.isfinite(self.runs_at[np.minimum(instances, self.most_instances - 1), at])
            rows, instances = at[there], instances[there]
            self._bill(rows, instances)
            self.runs_at[instances, rows] = np.inf
            self.flat[(self.num_slots + instances) * self.rows + rows] = _NEVER
        self.lacking[hosts, at] = _GONE
        self.live -= np.bincount(at, hosts < self.hosts[at], self.rows).astype(np.int64)

    def _bill(self, at: Ints, instances: Ints) -> None:
        """Bill instances that are gone now; one that never ran costs nothing."""
        held_s = self.now[at] - self.runs_at[instances, at]
        ran = held_s >= 0.0
        self.ran += np.bincount(at, ran, self.rows).astype(np.int64)
        billed_s = np.where(ran, np.maximum(self.offer.minimum_billed_s, held_s), 0.0)
        self.billed_s += np.bincount(at, billed_s, self.rows)

    def started(self) -> Ints:
        """Return the instances that ran."""
        instances, at = np.nonzero(np.isfinite(self.runs_at))
        self._bill(at, instances)
        return self.ran

    def held_s(self) -> Floats:
        """Return the seconds of all instances on the bill."""
        return self.billed_s
