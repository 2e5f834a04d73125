"""Rented instances of many runs at once: asked for, running, ready, taken away, released, and billed.

Arrays have one row per run and one column per place for an instance; a place is used again once its instance is gone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tests.judge.terms import Law, Terms

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[Any]
Bools = npt.NDArray[np.bool_]

TIE_S = 1e-7
"""Instants this near are one: sums of times are no more exact."""


def factors(law: Law, rng: np.random.Generator, shape: Any) -> Floats:
    """Draw factors with mean 1."""
    if law.samples:
        return rng.choice(np.array(law.samples), shape)
    if law.cv == 0.0:
        return np.ones(shape)
    if law.is_normal:
        return np.maximum(0.0, rng.normal(1.0, law.cv, shape))
    variance = np.log1p(law.cv * law.cv)
    return rng.lognormal(-variance / 2.0, np.sqrt(variance), shape)


class Cluster:
    """The instances of `draws` runs."""

    def __init__(self, terms: Terms, draws: int, places: int, rng: np.random.Generator) -> None:
        self.terms, self._rng = terms, rng
        shape = (draws, places)
        self.now = np.zeros(draws)
        """Instant of each run."""
        self.cost_usd = np.zeros(draws)
        self.lane = np.full(shape, -1, np.int8)
        """Who holds the instance; -1: none is there."""
        self.ready = np.zeros(shape, bool)
        self.on_spot = np.zeros(shape, bool)
        self.asked_at, self.runs_at = np.full(shape, np.inf), np.full(shape, np.inf)
        self.turns_ready_at, self.dies_at = np.full(shape, np.inf), np.full(shape, np.inf)
        self.order = np.zeros(shape, np.int32)
        """In which they were asked for."""
        self.started = np.zeros(draws, np.int32)
        self.taken = np.zeros(draws, np.int32)
        """How many the spot market took away."""
        self._asked_at = np.full(draws, -1.0)
        self._queue = np.ones(draws)
        """Factor of the provider's queue for all that is asked for at that instant."""

    def price_usd_per_s(self, spot: Any) -> Any:
        """Price of an instance on a market."""
        return np.where(spot, self.terms.spot_price, self.terms.price) / 3600.0

    def live(self, runs: Ints, lane: int) -> Bools:
        """(runs, places) Which instances a lane holds, or waits for."""
        found: Bools = self.lane[runs] == lane
        return found

    def launch(self, runs: Ints, lane: int, spot: bool, counts: Ints) -> None:
        """Ask for `counts` instances in each of the runs."""
        runs, counts = runs[counts > 0], counts[counts > 0]
        if not len(runs):
            return
        terms, rng = self.terms, self._rng
        first = runs[self._asked_at[runs] != self.now[runs]]
        self._queue[first], self._asked_at[first] = factors(terms.provision, rng, len(first)), self.now[first]
        for number in range(int(counts.max())):
            more = runs[counts > number]
            place = (self.lane[more] < 0).argmax(axis=1)
            assert (self.lane[more, place] < 0).all(), "there is a place for every instance"
            runs_at = self.now[more] + terms.provision_s * self._queue[more]
            self.lane[more, place], self.on_spot[more, place] = lane, spot
            self.asked_at[more, place], self.runs_at[more, place] = self.now[more], runs_at
            self.turns_ready_at[more, place] = runs_at + terms.init_s * factors(terms.init, rng, len(more))
            if spot and terms.interruptions_per_hour:
                lives_s = rng.exponential(3600.0 / terms.interruptions_per_hour, len(more))
                self.dies_at[more, place] = runs_at + lives_s
            self.order[more, place] = self.started[more]
            self.started[more] += 1

    def end(self, runs: Ints, places: Ints) -> None:
        """Instances are gone now, taken away or given back: bill them. One that never ran costs nothing."""
        terms, now = self.terms, self.now[runs]
        held_s = now - self.runs_at[runs, places]
        billed_s = 0.0 if terms.per_function else np.maximum(held_s, terms.minimum_s)
        usd = terms.once_usd + self.price_usd_per_s(self.on_spot[runs, places]) * billed_s
        np.add.at(self.cost_usd, runs, np.where(held_s >= 0.0, usd, 0.0))
        self.lane[runs, places], self.ready[runs, places] = -1, False
        for instants in (self.asked_at, self.runs_at, self.turns_ready_at, self.dies_at):
            instants[runs, places] = np.inf

    def surplus(self, runs: Ints, lane: int, spot: bool, wanted: int) -> Floats:
        """(runs, places) In which order a stage's surplus is given back; infinite for what stays.

        All of another market, then what does not run yet, then those that have run longest.
        """
        live = self.live(runs, lane)
        ours = live & (self.on_spot[runs] == spot)
        runs_at, now = self.runs_at[runs], self.now[runs][:, None]
        key = np.where(runs_at > now, -1e12 + self.order[runs], runs_at + 1e-9 * self.order[runs])
        rank = np.where(ours, key, np.inf).argsort(axis=1, kind="stable").argsort(axis=1, kind="stable")
        excess = np.maximum(0, ours.sum(axis=1) - wanted)[:, None]
        order = np.where(ours & (rank < excess), 1000.0 + rank, np.inf)
        return np.where(live & ~ours, self.order[runs].astype(float) / 1e6, order)

    def give_back(self, runs: Ints, spare: Bools) -> None:
        """Release the marked instances."""
        rows, places = np.nonzero(spare)
        self.end(runs[rows], places)

    def kept_back_usd(self, runs: Ints, ahead_s: float, more: Ints, *, reserves: bool) -> Floats:
        """What is on the bill now, and what has to be left to hold all for `ahead_s` more, and `more` new instances.

        Instances cost their own price while they are held, or with `reserves` what is reserved for them. What is asked
        for may begin to run at any moment. Without functions and the head.
        """
        terms, now = self.terms, self.now[runs][:, None]
        held, runs_at = self.lane[runs] >= 0, self.runs_at[runs]
        ran = held & (runs_at <= now)
        reserved = 0.0 if terms.per_function else max(terms.reserved_price, terms.price) / 3600.0
        price = np.zeros(runs_at.shape) if terms.per_function else self.price_usd_per_s(self.on_spot[runs])
        paid_s = np.maximum(now - runs_at, terms.minimum_s)
        left_s = np.maximum(0.0, ahead_s - (paid_s - (now - runs_at)))
        surcharge = 0.0 if reserves else (reserved - price) * max(ahead_s, 2.0)
        later = (reserved if reserves else price) * left_s + surcharge
        coming = (held & ~ran).sum(axis=1) + more
        usd = np.where(ran, terms.once_usd + price * np.where(ran, paid_s, 0.0) + np.where(ran, later, 0.0), 0.0)
        new_usd = reserved * max(terms.minimum_s, ahead_s) + terms.once_usd
        return self.cost_usd[runs] + usd.sum(axis=1) + coming * new_usd

    def hand_on(self, runs: Ints, order: Floats, lane: int, spot: bool, planned: Ints, waiting_since: Floats) -> Bools:
        """Give what `order` offers (infinite: nothing) to a lane that lacks it; return which runs' lane got some.

        The lane gives up what it has asked for instead and does not run yet. One that waits to begin (`waiting_since`:
        the begin of its stage; infinite: it trains) takes them only where it lacks no more, or where waiting with them
        costs no more than the data of new ones. `order` is changed.
        """
        terms, now = self.terms, self.now[runs][:, None]
        live = self.live(runs, lane)
        coming = live & (self.runs_at[runs] > now)
        costless = coming & (self.asked_at[runs] + terms.provision_s > now)
        lacking = planned - live.sum(axis=1) + costless.sum(axis=1)
        offered = (order < np.inf) & self.ready[runs] & (self.on_spot[runs] == spot)
        taken = np.clip(np.minimum(lacking, offered.sum(axis=1)), 0, None)
        asked_at = np.where(coming, self.asked_at[runs], -np.inf).max(axis=1)
        asked_at = np.where(asked_at == -np.inf, waiting_since, asked_at)
        waits_s = np.maximum(0.0, asked_at + terms.provision_s - now[:, 0])
        waits_usd = self.price_usd_per_s(spot) * np.where(np.isfinite(waits_s), waits_s, 0.0)
        agrees = (waiting_since == np.inf) | (taken == lacking) | (waits_usd <= terms.once_usd) | terms.per_function
        taken = np.where(agrees, taken, 0)
        for number in range(int(taken.max(initial=0))):
            rows = np.flatnonzero(taken > number)
            place = np.where(offered[rows], order[rows], np.inf).argmin(axis=1)
            self.lane[runs[rows], place] = lane
            offered[rows, place], order[rows, place] = False, np.inf
        excess = np.maximum(0, self.live(runs, lane).sum(axis=1) - planned)
        rank = np.where(costless, self.order[runs], 10**9).argsort(axis=1).argsort(axis=1)
        self.give_back(runs, costless & (rank < np.where(taken > 0, excess, 0)[:, None]))
        got: Bools = taken > 0
        return got
