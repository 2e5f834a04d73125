"""The demands as arrays: the shape in which every policy counts GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rubberband.planner.sharing.demand import Allotments, Capacity, Demand

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
_NEVER_S = 1e18
"""Work of a demand that cannot run on this pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """J demands and G GPUs; rows in the order of `demands`."""

    demands: Sequence[Demand]
    gpus: int
    """G."""
    seconds: Floats
    """(J, G + 1) S(w): seconds left with w GPUs, never rising; inf below a demand's least."""
    floor: Ints
    """(J,) GPUs that each gets in any case: those promised."""
    most: Ints
    """(J,) Most GPUs of use to each."""
    current: Ints
    """(J,) GPUs held now."""
    now_s: float
    gpus_per_instance: int

    @classmethod
    def of(cls, demands: Sequence[Demand], capacity: Capacity, current: Allotments, now_s: float) -> Table:
        """Read the demands. Raises ValueError for two of one name, or promises beyond the capacity."""
        if len({demand.name for demand in demands}) < len(demands):
            raise ValueError("two demands have one name; name each experiment once")
        gpus = capacity.gpus
        seconds = np.full((len(demands), gpus + 1), np.inf)
        for row, demand in zip(seconds, demands, strict=True):
            known = min(demand.most_gpus, gpus)
            row[demand.min_gpus : known + 1] = demand.seconds_left[demand.min_gpus - 1 : known]
        seconds = np.minimum.accumulate(seconds, axis=1)
        floor = np.asarray([demand.promised_gpus for demand in demands], dtype=np.int64)
        if floor.sum() > gpus:
            raise ValueError(f"{floor.sum()} GPUs are promised and the pool has {gpus}; withdraw a promise")
        most = np.argmin(seconds, axis=1) if len(demands) else np.zeros(0, dtype=np.int64)
        held = [sum(current.get(demand.name, {}).values()) for demand in demands]
        return cls(
            demands=demands,
            gpus=gpus,
            seconds=seconds,
            floor=floor,
            most=np.maximum(most, floor),
            current=np.asarray(held, dtype=np.int64),
            now_s=now_s,
            gpus_per_instance=capacity.gpus_per_instance,
        )

    def values(self, field: str) -> Floats:
        """(J,) A number of every demand."""
        return np.asarray([getattr(demand, field) for demand in self.demands], dtype=np.float64)

    def by_arrival(self) -> list[int]:
        """Return the rows in order of arrival, then of name."""
        return sorted(range(len(self.demands)), key=lambda row: (self.demands[row].arrived_at, self.demands[row].name))

    def single_s(self) -> Floats:
        """(J,) S(1): seconds with 1 GPU; where fewer than w GPUs are of no use, w S(w) in its place."""
        least = np.argmax(np.isfinite(self.seconds), axis=1)
        work_s = np.maximum(least, 1) * self.seconds[np.arange(len(least)), least]
        return np.asarray(np.minimum(work_s, _NEVER_S))

    def speedups(self) -> Floats:
        """(J, G + 1) SPEEDUP (Pollux, eq. 15): how much faster each is than with its fair share of the GPUs, by weight.

        0 without GPUs. A demand that cannot run on its fair share is compared with the fewest GPUs that it can.
        """
        weights = self.values("weight")
        shares = np.ceil(self.gpus * weights / weights.sum()).astype(np.int64)
        fair_s = np.empty(len(self.demands))
        for row, (demand, share) in enumerate(zip(self.demands, shares.tolist(), strict=True)):
            share = min(max(share, demand.min_gpus), len(demand.seconds_left))
            fair_s[row] = min(demand.seconds_left[demand.min_gpus - 1 : share], default=np.inf)
        with np.errstate(invalid="ignore", divide="ignore"):
            found = np.where(np.isfinite(self.seconds), fair_s[:, None] / self.seconds, 0.0)
        return np.where(np.isfinite(found), found, 1.0)

    def allowed(self, values: Floats) -> Floats:
        """(J, G + 1) `values`, -inf for the counts that a demand cannot have."""
        return np.where(self._possible(), values, -np.inf)

    def rounded(self, counts: Ints) -> Ints:
        """(J,) Counts that each demand can have, near `counts`: rounded down, and up again as far as GPUs are left."""
        possible, rows, sizes = self._possible(), np.arange(len(counts)), np.arange(self.gpus + 1)
        below = np.maximum.accumulate(np.where(possible, sizes, 0), axis=1)[rows, counts]
        above = np.minimum.accumulate(np.where(possible, sizes, self.gpus + 1)[:, ::-1], axis=1)[:, ::-1]
        free = self.gpus - int(below.sum())
        cut = np.flatnonzero(below < counts)
        for row in cut[np.argsort(above[cut, counts[cut]] - below[cut], kind="stable")].tolist():
            more = int(above[row, counts[row]] - below[row])
            if more <= free:
                below[row] += more
                free -= more
        return np.maximum(below, self.floor)

    def _possible(self) -> Bools:
        """(J, G + 1) Counts from what is promised to what is of use: 1, 2, 4, … GPUs of an instance, or whole ones.

        Then gangs seldom find their GPUs scattered, or must move. The least that a demand needs is possible, too.
        """
        sizes = np.arange(self.gpus + 1)
        inside = (sizes >= self.floor[:, None]) & (sizes <= self.most[:, None])
        useless = (sizes > self.floor[:, None]) & ~np.isfinite(self.seconds)
        least = np.maximum(self.floor, np.argmax(np.isfinite(self.seconds), axis=1))[:, None]
        slices = (sizes < self.gpus_per_instance) & (sizes & (sizes - 1) == 0)
        whole = slices | (sizes % self.gpus_per_instance == 0) | (sizes == least)
        return np.asarray(inside & ~useless & whole)
