"""An independent simulation of runs: the judge of what the planner tells. It shares no code with it.

It does what the executor does on a virtual clock, event by event, for many runs side by side (a row each): instances
are asked for, get ready, are taken away and replaced; trials wait by number, train iteration by iteration, go on from
their checkpoints; a SYNC keeps the best. `tests.judge.virtual` compares it with the executor itself. It leaves out
replanning, faults, caps, and on-demand instances in place of spot ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.judge.cluster import TIE_S, Bools, Cluster, Floats, Ints, factors
from tests.judge.terms import Noise, Step, Terms, Work

_SCALING, _TRAINING, _OVER = 0, 1, 2
_OUT, _WAITS, _RUNS = 0, 1, 2
_MOST_DRAWN = 4_000_000
"""Factors of iterations that are drawn at once."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Time and cost of every run, shape (runs,)."""

    time_s: Floats
    cost_usd: Floats
    taken: Ints
    """Instances that the spot market took away."""
    needed_usd: Floats
    """The least cap with which the run goes through as without one: what is kept back is on top of the bill."""


def simulate(
    work: Work, terms: Terms, noise: Noise | None = None, *, draws: int = 20_000, seed: int = 0, money: bool = False
) -> Outcome:
    """Return `draws` runs of a job with its plan; `money`: with the cap that each needs (else its cost)."""
    runs = _Runs(work, terms, noise or Noise(), draws, np.random.default_rng(seed), money)
    runs.to_end()
    cluster = runs.cluster
    needed_usd = np.maximum(runs.needed_usd, cluster.cost_usd)
    return Outcome(cluster.now, cluster.cost_usd, cluster.taken.astype(np.int64), needed_usd)


class _Runs:
    """Arrays of runs by trials (numbered lane by lane, in the order of the brackets), and of runs by lanes."""

    def __init__(
        self, work: Work, terms: Terms, noise: Noise, draws: int, rng: np.random.Generator, money: bool
    ) -> None:
        self.work, self.terms, self.noise, self.rng = work, terms, noise, rng
        self.money, self.needed_usd = money, np.zeros(draws)
        self.cluster = Cluster(terms, draws, sum(work.most), rng)
        self.columns = _columns(work)
        self.lane_of = np.repeat(
            np.arange(len(work.lanes)), [sum(step.trials for step in lane if step.begins) for lane in work.lanes]
        )
        steps = [step for lane in work.lanes for step in lane]
        self.is_risky = terms.interruptions_per_hour > 0.0 and any(step.spot for step in steps)
        self.places = _Places(self.cluster, work, len(self.lane_of)) if self.is_risky or work.rungs else None
        shape, lanes = (draws, len(self.lane_of)), (draws, len(work.lanes))
        self.state, self.in_stage = np.zeros(shape, np.int8), np.zeros(shape, bool)
        own = factors(noise.trial, rng, shape)
        self.pace = own * factors(noise.mean, rng, (draws, 1))
        self.merit = self._merits(own)
        self.began_at, self.trains_at = np.zeros(shape), np.zeros(shape)
        self.ends_at, self.iteration_s = np.full(shape, np.inf), np.zeros(shape)
        self.saved = np.zeros(shape, np.int32)
        """Iterations of the stage (or rung) that a checkpoint holds."""
        self.length = np.zeros(shape)
        """Length of the stage's iterations, in iterations of mean length; 0: not drawn yet."""
        longest = max([step.iterations for step in steps] + list(work.rungs))
        keeps = self.is_risky and noise.iteration.cv > 0.0
        self.reached = np.full((*shape, longest), np.inf, np.float32) if keeps else None
        """The same after each iteration."""
        self.stage, self.phase = np.zeros(lanes, np.int8), np.zeros(lanes, np.int8)
        self.stage_at = np.zeros(lanes)
        self.waiting, self.running = np.zeros(lanes, np.int32), np.zeros(lanes, np.int32)
        self.needs = np.full(lanes, 10**6)
        self.news = np.zeros(lanes, bool)
        self.ladder = _Ladder(work, draws, shape[1]) if work.rungs else None

    def _merits(self, own: Floats) -> Floats:
        """The lower, the better: at random, or by speed as well."""
        chance = self.rng.standard_normal(own.shape)
        share = self.noise.slow_is_good
        if share == 0.0:
            return chance
        slow = np.log(np.maximum(own, 1e-9))
        slow = (slow - slow.mean(axis=1, keepdims=True)) / slow.std(axis=1, keepdims=True)
        return -(share * slow + np.sqrt(1.0 - share * share) * chance)

    def to_end(self) -> None:
        """Run all of them."""
        alive = np.arange(len(self.state))
        for lane in range(len(self.work.lanes)):
            self._begin(lane, 0, alive)
        while len(alive):
            self._settle(alive)
            alive = alive[(self.phase[alive] != _OVER).any(axis=1)]
            if len(alive):
                self._next(alive)
        jct_s = self.cluster.now
        self.cluster.cost_usd += self.terms.head_price / 3600.0 * jct_s

    def _next(self, alive: Ints) -> None:
        """Go to the next instant of each run, and let happen what happens then."""
        cluster = self.cluster
        ends_at, turns_ready_at = self.ends_at[alive], cluster.turns_ready_at[alive]
        now = np.minimum(ends_at.min(axis=1), turns_ready_at.min(axis=1))
        if self.is_risky:
            now = np.minimum(now, cluster.dies_at[alive].min(axis=1))
        assert np.isfinite(now).all(), "something comes next in every run"
        cluster.now[alive] = now
        if self.money:
            self._need(alive, self.terms.margin_s, np.zeros(len(alive)), reserves=False)
        late = now[:, None] + TIE_S
        if self.is_risky:
            self._take_away(alive, *np.nonzero(cluster.dies_at[alive] <= now[:, None]))
        rows, places = np.nonzero(turns_ready_at <= late)
        kept = cluster.lane[alive[rows], places] >= 0
        cluster.ready[alive[rows[kept]], places[kept]] = True
        cluster.turns_ready_at[alive[rows], places] = np.inf
        ended = self.ends_at[alive] <= late
        if self.ladder is not None:  # each result counts before the next one
            ended &= np.cumsum(ended, axis=1) == 1
        rows, trials = np.nonzero(ended)
        self._stop(alive[rows], trials)
        if self.ladder is not None:
            self.ladder.record(alive[rows], trials)

    def _stop(self, runs: Ints, trials: Ints) -> None:
        """Trials run no more: they have ended their stage."""
        lanes = self.lane_of[trials]
        if self.terms.per_function:
            for lane, steps in enumerate(self.work.lanes):
                for stage, step in enumerate(steps):
                    here = (lanes == lane) & (self.stage[runs, lane] == stage)
                    busy_s = self.cluster.now[runs[here]] - self.began_at[runs[here], trials[here]]
                    usd_per_s = self.cluster.price_usd_per_s(step.spot) * step.gpus / self.terms.gpus
                    np.add.at(self.cluster.cost_usd, runs[here], usd_per_s * busy_s)
        self.state[runs, trials], self.ends_at[runs, trials] = _OUT, np.inf
        np.subtract.at(self.running, (runs, lanes), 1)
        if self.places is not None:
            self.places.leave(runs, trials)

    def _take_away(self, alive: Ints, rows: Ints, places: Ints) -> None:
        """The spot market takes instances: their trials wait, and go on from their latest checkpoints."""
        assert self.places is not None, "it is known who trains where"
        runs = alive[rows]
        for block in range(self.places.width):
            trials = self.places.held_by[runs, places * self.places.width + block]
            struck = trials >= 0
            self._interrupt(runs[struck], trials[struck].astype(np.int64))
        self.cluster.end(runs, places)
        np.add.at(self.cluster.taken, runs, 1)

    def _interrupt(self, runs: Ints, trials: Ints) -> None:
        saved = self.saved[runs, trials]
        trained = (self.cluster.now[runs] - self.trains_at[runs, trials]) / self.iteration_s[runs, trials]
        if self.reached is None:
            done = saved + np.floor(np.maximum(0.0, trained) + 1e-9).astype(np.int32)
        else:
            since = self._reached_by(runs, trials, saved)
            done = (self.reached[runs, trials] <= (since + trained)[:, None]).sum(axis=1)
            done = np.where(trained > 0.0, done, saved)
        before, every = self._done_before(runs, trials), self.terms.checkpoint_iterations
        self.saved[runs, trials] = np.maximum(saved, (before + done) // every * every - before)
        self._stop(runs, trials)
        self.state[runs, trials] = _WAITS
        np.add.at(self.waiting, (runs, self.lane_of[trials]), 1)

    def _done_before(self, runs: Ints, trials: Ints) -> Ints:
        """Iterations before the stage or rung."""
        if self.ladder is not None:
            return self.ladder.done_before(runs, trials)
        before = np.zeros(len(runs), np.int64)
        for lane, steps in enumerate(self.work.lanes):
            here = self.lane_of[trials] == lane
            sums = np.array([_done_before(steps, stage) for stage in range(len(steps))])
            before[here] = sums[self.stage[runs[here], lane]]
        return before

    def _reached_by(self, runs: Ints, trials: Ints, done: Ints) -> Floats:
        assert self.reached is not None, "iterations are kept"
        reached = self.reached[runs, trials, np.maximum(0, done - 1)]
        return np.where(done > 0, reached, 0.0).astype(np.float64)

    def _need(self, runs: Ints, ahead_s: float, more: Floats | Ints, *, reserves: bool) -> None:
        """Take in what must be there now: the bill, and what is kept back to hold all for `ahead_s` more."""
        needed_usd = self.cluster.kept_back_usd(runs, ahead_s, more, reserves=reserves)
        until = self.cluster.now[runs] + ahead_s
        needed_usd += self.terms.head_price / 3600.0 * until
        if self.terms.per_function:
            for lane, steps in enumerate(self.work.lanes):
                for stage, step in enumerate(steps):
                    first, end = self.columns[lane][stage]
                    running = (self.state[runs, first:end] == _RUNS) & (self.stage[runs, lane] == stage)[:, None]
                    busy_s = np.where(running, until[:, None] - self.began_at[runs, first:end], 0.0).sum(axis=1)
                    needed_usd += self.cluster.price_usd_per_s(step.spot) * step.gpus / self.terms.gpus * busy_s
        self.needed_usd[runs] = np.maximum(self.needed_usd[runs], needed_usd)

    # Lanes

    def _settle(self, alive: Ints) -> None:
        """Do all that can be done now."""
        self.news[alive] = True
        while self.news[alive].any():
            for lane in range(len(self.work.lanes)):
                runs = alive[self.news[alive, lane]]
                self.news[runs, lane] = False
                self._advance(lane, runs)

    def _advance(self, lane: int, runs: Ints) -> None:
        while len(runs):
            runs, over = runs[self.phase[runs, lane] != _OVER], []
            stages = self.stage[runs, lane]
            for stage in np.unique(stages).tolist():
                over.append(self._go_on(lane, stage, runs[stages == stage]))
            runs = np.concatenate(over) if over else runs[:0]

    def _go_on(self, lane: int, stage: int, runs: Ints) -> Ints:
        """Buy what a stage lacks, begin to train, start trials; return the runs that went on to the next stage."""
        cluster, step = self.cluster, self.work.lanes[lane][stage]
        live = cluster.live(runs, lane)
        wanted = np.minimum(step.instances, self.needs[runs, lane])
        missing = np.maximum(0, wanted - live.sum(axis=1))
        if self.money and missing.any():
            ahead_s = self.terms.margin_s + max(0.01, self.terms.init_s)
            self._need(runs[missing > 0], ahead_s, missing[missing > 0], reserves=True)
        cluster.launch(runs, lane, step.spot, missing)
        live = cluster.live(runs, lane)
        is_ready = (live == (live & cluster.ready[runs])).all(axis=1)
        self.phase[runs[is_ready], lane] = np.maximum(_TRAINING, self.phase[runs[is_ready], lane])
        runs = runs[self.phase[runs, lane] == _TRAINING]
        if self.ladder is not None:
            self.ladder.promote(self, runs)
        self._start_waiting(lane, stage, runs)
        if self.ladder is not None:
            self._release_idle(step, runs[self.running[runs, 0] > 0])
        runs = runs[(self.running[runs, lane] == 0) & (self.waiting[runs, lane] == 0)]
        if stage + 1 < len(self.work.lanes[lane]):
            self._begin(lane, stage + 1, runs)
        else:
            self.phase[runs, lane] = _OVER
            self._give_up(lane, runs, np.where(cluster.live(runs, lane), cluster.runs_at[runs], np.inf))
        return runs

    def _begin(self, lane: int, stage: int, runs: Ints) -> None:
        """A stage begins: with new trials, or with the best of the one before."""
        if not len(runs):
            return
        step, (first, end) = self.work.lanes[lane][stage], self.columns[lane][stage]
        here = np.zeros((len(runs), end - first), bool)
        if step.begins:
            here[:, : step.trials] = True
        else:
            merit = np.where(self.in_stage[runs, first:end], self.merit[runs, first:end], np.inf)
            here = merit <= np.partition(merit, step.trials - 1, axis=1)[:, step.trials - 1 : step.trials]
        self.in_stage[runs, first:end], self.state[runs, first:end] = here, here * _WAITS
        self.saved[runs, first:end], self.length[runs, first:end] = 0, 0.0
        self.stage[runs, lane], self.phase[runs, lane] = stage, _SCALING
        self.waiting[runs, lane], self.stage_at[runs, lane] = step.trials, self.cluster.now[runs]
        self._give_up(lane, runs, self.cluster.surplus(runs, lane, step.spot, step.instances))

    def _give_up(self, lane: int, runs: Ints, order: Floats) -> None:
        """Hand instances on to other lanes that lack them, and give back the others (`order` is infinite: it stays)."""
        if not len(runs):
            return
        spare = order < np.inf
        for other, steps in enumerate(self.work.lanes):
            if other == lane:
                continue
            for stage, step in enumerate(steps):
                here = (self.stage[runs, other] == stage) & (self.phase[runs, other] != _OVER)
                rows = np.flatnonzero(here & spare.any(axis=1))
                if not len(rows):
                    continue
                since = np.where(self.phase[runs[rows], other] == _SCALING, self.stage_at[runs[rows], other], np.inf)
                planned, offered = np.full(len(rows), step.instances), order[rows]
                got = self.cluster.hand_on(runs[rows], offered, other, step.spot, planned, since)
                order[rows], spare[rows] = offered, spare[rows] & (offered < np.inf)
                self.news[runs[rows[got]], other] = True
        self.cluster.give_back(runs, spare)

    def _release_idle(self, step: Step, runs: Ints) -> None:
        """Without a SYNC: give back what no trial will need any more."""
        assert self.ladder is not None, "its trials climb"
        assert self.places is not None, "it is known who trains where"
        trials = self.running[runs, 0] + self.waiting[runs, 0]
        self.needs[runs, 0] = _least_instances(trials, step, self.terms.gpus)
        runs = runs[(self.waiting[runs, 0] == 0) & ~self.ladder.may_promote(runs, self.merit[runs])]
        self._give_up(0, runs, np.where(self.places.idle(runs) & self.cluster.live(runs, 0), 0.0, np.inf))

    # Trials

    def room(self, step: Step, lane: int, runs: Ints) -> Ints:
        """How many more trials can start."""
        ready = (self.cluster.live(runs, lane) & self.cluster.ready[runs]).sum(axis=1)
        free: Ints = _slots(ready, step.gpus, self.terms.gpus) - self.running[runs, lane]
        return free

    def _start_waiting(self, lane: int, stage: int, runs: Ints) -> None:
        step, (first, end) = self.work.lanes[lane][stage], self.columns[lane][stage]
        count = np.minimum(self.room(step, lane, runs), self.waiting[runs, lane])
        for number in range(int(count.max(initial=0))):
            more = runs[count > number]
            self._start(more, first + (self.state[more, first:end] == _WAITS).argmax(axis=1), lane, step)

    def _start(self, runs: Ints, trials: Ints, lane: int, step: Step) -> None:
        """Start a trial in each of the runs."""
        self.state[runs, trials] = _RUNS
        self.waiting[runs, lane] -= 1
        self.running[runs, lane] += 1
        if self.places is not None:
            self.places.take(runs, trials, lane, step)
        fresh = self.length[runs, trials] == 0.0
        self._draw(runs[fresh], trials[fresh], step)
        startup_s = self.work.startup_s * factors(self.noise.startup, self.rng, len(runs))
        now, iteration_s = self.cluster.now[runs], step.iteration_s * self.pace[runs, trials]
        done, length = self.saved[runs, trials], self.length[runs, trials]
        left = length - done if self.reached is None else length - self._reached_by(runs, trials, done)
        self.began_at[runs, trials], self.trains_at[runs, trials] = now, now + startup_s
        self.iteration_s[runs, trials] = iteration_s
        self.ends_at[runs, trials] = now + startup_s + iteration_s * left

    def _draw(self, runs: Ints, trials: Ints, step: Step) -> None:
        """Draw the iterations of the stage, or of the rung."""
        count = np.full(len(runs), step.iterations)
        if self.ladder is not None:
            count = self.ladder.gains[self.ladder.rung[runs, trials]]
        if self.noise.iteration.cv == 0.0 or not len(runs):
            self.length[runs, trials] = count
            return
        most = int(count.max())
        at_once = max(1, _MOST_DRAWN // most)
        for begin in range(0, len(runs), at_once):
            part = slice(begin, begin + at_once)
            drawn = factors(self.noise.iteration, self.rng, (len(runs[part]), most))
            reached = np.cumsum(drawn, axis=1)
            self.length[runs[part], trials[part]] = reached[np.arange(len(reached)), count[part] - 1]
            if self.reached is not None:
                beyond = np.arange(most) >= count[part][:, None]
                self.reached[runs[part], trials[part]] = np.inf
                self.reached[runs[part], trials[part], :most] = np.where(beyond, np.inf, reached)


class _Places:
    """Which trial trains on which part of which instance: blocks of the width of the stage's trials."""

    def __init__(self, cluster: Cluster, work: Work, trials: int) -> None:
        steps = [step for lane in work.lanes for step in lane]
        gpus, draws = cluster.terms.gpus, len(cluster.now)
        self.cluster = cluster
        self.width = max(max(1, gpus // step.gpus) for step in steps)
        """Most blocks of an instance."""
        self._spans = max(max(1, step.gpus // gpus) for step in steps)
        """Most instances of a trial."""
        self.held_by = np.full((draws, cluster.lane.shape[1] * self.width), -1, np.int16)
        self.gang = np.full((draws, trials, self._spans), -1, np.int32)
        """Blocks of each trial, now or at its latest start."""
        self._order = np.zeros((draws, trials, self._spans), np.int32)
        """The instances that they were on."""
        self._gpus = np.zeros((draws, trials), np.int32)

    def leave(self, runs: Ints, trials: Ints) -> None:
        for part in range(self._spans):
            block = self.gang[runs, trials, part]
            there = block >= 0
            self.held_by[runs[there], block[there]] = -1

    def idle(self, runs: Ints) -> Bools:
        """(runs, places) Where no trial trains."""
        found: Bools = (self._blocks(runs) < 0).all(axis=2)
        return found

    def _blocks(self, runs: Ints) -> Ints:
        return self.held_by[runs].reshape(len(runs), self.cluster.lane.shape[1], self.width).astype(np.int64)

    def take(self, runs: Ints, trials: Ints, lane: int, step: Step) -> None:
        """Each trial stays where it was, or takes a block of the fullest instance, or the first free instances."""
        gpus = self.cluster.terms.gpus
        blocks, spans = max(1, gpus // step.gpus), max(1, step.gpus // gpus)
        usable = self.cluster.live(runs, lane) & self.cluster.ready[runs]
        used = (self._blocks(runs) >= 0).sum(axis=2)
        kept = self._kept(runs, trials, usable, step, spans)
        if spans == 1:
            free = np.where(usable & (used < blocks), blocks - used, 10**4)
            place = (free * 10**5 + self.cluster.order[runs]).argmin(axis=1)
            within = (self._blocks(runs)[np.arange(len(runs)), place] < 0).argmax(axis=1)
            chosen = (place * self.width + within)[:, None]
        else:
            order = np.where(usable & (used == 0), self.cluster.order[runs], 10**8)
            chosen = order.argsort(axis=1, kind="stable")[:, :spans] * self.width
        chosen = np.where(kept[:, None], self.gang[runs, trials, :spans], chosen)
        self.gang[runs, trials] = -1
        self.gang[runs, trials, :spans], self._gpus[runs, trials] = chosen, step.gpus
        for part in range(spans):
            assert (self.held_by[runs, chosen[:, part]] < 0).all(), "a block is taken once"
            self.held_by[runs, chosen[:, part]] = trials
            self._order[runs, trials, part] = self.cluster.order[runs, chosen[:, part] // self.width]

    def _kept(self, runs: Ints, trials: Ints, usable: Bools, step: Step, spans: int) -> Bools:
        """Whether a trial's blocks of before are there, and free."""
        kept = self._gpus[runs, trials] == step.gpus
        rows = np.arange(len(runs))
        for part in range(spans):
            block = np.maximum(0, self.gang[runs, trials, part])
            place = block // self.width
            same = self.cluster.order[runs, place] == self._order[runs, trials, part]
            kept &= usable[rows, place] & same & (self.held_by[runs, block] < 0)
        return kept


class _Ladder:
    """Results in the rungs of asha, and who was promoted."""

    def __init__(self, work: Work, draws: int, trials: int) -> None:
        self.gains, self._eta = np.array(work.rungs), work.reduction
        self.rung = np.zeros((draws, trials), np.int64)
        self._has_run = np.zeros((draws, trials), bool)
        shape = (len(work.rungs), draws, trials)
        self._recorded, self._promoted = np.zeros(shape, bool), np.zeros(shape, bool)

    def done_before(self, runs: Ints, trials: Ints) -> Ints:
        """Iterations before a trial's rung."""
        found: Ints = np.concatenate([[0], np.cumsum(self.gains)])[self.rung[runs, trials]]
        return found

    def record(self, runs: Ints, trials: Ints) -> None:
        """Trials have ended their rungs."""
        self._recorded[self.rung[runs, trials], runs, trials] = True

    def _candidate(self, rung: int, runs: Ints, merit: Floats) -> tuple[Ints, Bools, Bools]:
        """The best that was not promoted, whether there is one, and whether it is among the best 1/eta."""
        recorded = self._recorded[rung, runs]
        left = recorded & ~self._promoted[rung, runs]
        best = np.where(left, merit, np.inf).argmin(axis=1)
        value = merit[np.arange(len(runs)), best][:, None]
        better = (recorded & (merit < value)).sum(axis=1)
        is_any = left.any(axis=1)
        return best, is_any, is_any & (better < recorded.sum(axis=1) // self._eta)

    def may_promote(self, runs: Ints, merit: Floats) -> Bools:
        """Whether a trial may go on."""
        found = np.zeros(len(runs), bool)
        for rung in range(len(self.gains) - 1):
            found |= self._candidate(rung, runs, merit)[2]
        return found

    def promote(self, simulation: _Runs, runs: Ints) -> None:
        """Queue the trials that go on, as many as there is room for."""
        step = simulation.work.lanes[0][0]
        room = simulation.room(step, 0, runs)
        room = np.where(simulation.running[runs, 0] == 0, np.maximum(1, room), room)
        again = ((simulation.state[runs] == _WAITS) & (simulation.length[runs] > 0.0)).sum(axis=1)
        runs = runs[again < room]
        left = (room - again)[again < room]
        while len(runs):
            merit, done = simulation.merit[runs], np.zeros(len(runs), bool)
            for rung in range(len(self.gains) - 2, -1, -1):
                best, _, may = self._candidate(rung, runs, merit)
                self._go_on(simulation, runs, best, rung, may & ~done)
                done |= may
            done |= self._last_hope(simulation, runs, merit, ~done)
            left = left - 1
            runs, left = runs[done & (left > 0)], left[done & (left > 0)]

    def _last_hope(self, simulation: _Runs, runs: Ints, merit: Floats, none: Bools) -> Bools:
        """Where nothing runs or waits and no trial has reached the top, the best of the highest rung goes on."""
        none = none & (simulation.running[runs, 0] == 0) & (simulation.waiting[runs, 0] == 0)
        none &= ~self._recorded[-1, runs].any(axis=1)
        done = np.zeros(len(runs), bool)
        for rung in range(len(self.gains) - 2, -1, -1):
            best, is_any, _ = self._candidate(rung, runs, merit)
            self._go_on(simulation, runs, best, rung, none & is_any & ~done)
            done |= none & is_any
        return done

    def _go_on(self, simulation: _Runs, runs: Ints, trials: Ints, rung: int, which: Bools) -> None:
        runs, trials = runs[which], trials[which]
        self._promoted[rung, runs, trials] = True
        self.rung[runs, trials] = rung + 1
        simulation.state[runs, trials] = _WAITS
        simulation.saved[runs, trials], simulation.length[runs, trials] = 0, 0.0
        simulation.waiting[runs, 0] += 1


def _columns(work: Work) -> list[list[tuple[int, int]]]:
    """[lane][stage] The trials of its bracket: from, and up to."""
    found, end = [], 0
    for lane in work.lanes:
        assert lane[0].begins, "a lane begins with new trials"
        columns: list[tuple[int, int]] = []
        for step in lane:
            columns.append((end, end + step.trials) if step.begins else columns[-1])
            end = columns[-1][1]
        found.append(columns)
    return found


def _done_before(steps: tuple[Step, ...], stage: int) -> int:
    """Iterations of the stages of a bracket before one of them."""
    first = max(at for at in range(stage + 1) if steps[at].begins)
    return sum(step.iterations for step in steps[first:stage])


def _slots(instances: Ints, gpus_per_trial: int, gpus: int) -> Ints:
    if gpus_per_trial <= gpus:
        return instances * (gpus // gpus_per_trial)
    return instances // (gpus_per_trial // gpus)


def _least_instances(trials: Ints, step: Step, gpus: int) -> Ints:
    if step.gpus <= gpus:
        return -(-trials // (gpus // step.gpus))
    return trials * (step.gpus // gpus)
