"""Demands of experiments, the capacity of a pool, and allocations: the plain values of a policy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Allocation = Mapping[int, int]
"""GPUs of one experiment: number of the instance, from 0 -> GPUs there, at least 1 each."""
Allocations = Mapping[str, Allocation]
"""Name of a demand -> its GPUs. A demand without GPUs is absent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Instances that policies divide, all alike."""

    instances: int
    gpus_per_instance: int

    def __post_init__(self) -> None:
        if self.instances < 0 or self.gpus_per_instance < 1:
            raise ValueError(
                f"a capacity of {self.instances} instances with {self.gpus_per_instance} GPUs each cannot be divided; "
                "give at least 0 instances and 1 GPU per instance"
            )

    @property
    def gpus(self) -> int:
        """GPUs of all instances."""
        return self.instances * self.gpus_per_instance


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Use that one experiment has for GPUs, as of now.

    Raises ValueError for a value that no experiment can have.
    """

    name: str
    arrived_at: float
    """Instant of the submission; all instants of a policy are of one clock."""
    seconds_left: Sequence[float]
    """Seconds to its end with 1, 2, … GPUs on as few instances as hold them; inf where it cannot run.

    GPUs beyond the last one are of no use. More GPUs may take longer: a policy leaves out those that do not help.
    """
    delta_s: float = 0.0
    """Seconds that a change of its GPUs costs it (Pollux: delta)."""
    moves: int = 0
    """Changes of its GPUs so far, the start excluded (Pollux: R)."""
    deadline_s: float | None = None
    """Seconds from the submission to its deadline."""
    weight: float = 1.0
    """Its share of the pool relative to others."""
    min_gpus: int = 1
    """Fewer GPUs than these are of no use to it."""
    max_gpus: int | None = None
    """Most GPUs that it takes. None: as many as `seconds_left` has."""
    promised_gpus: int = 0
    """GPUs that it holds a promise for at this instant: every policy allocates at least these."""
    started_gpus: int = 0
    """GPUs that it began with, 0 before: moldable policies never change them."""
    attained_gpu_s: float = 0.0
    """GPU seconds that it has held so far."""
    progress: float = 0.0
    """Share of its work that is done, from 0 to 1."""

    def __post_init__(self) -> None:
        seconds = self.seconds_left
        if not len(seconds) or not min(seconds) >= 0.0 or math.isnan(sum(seconds)):
            raise ValueError(
                f"seconds_left of {self.name!r} must be one number >= 0 or more; give inf where it cannot run"
            )
        if not math.isfinite(self.arrived_at):
            raise ValueError(f"arrived_at={self.arrived_at} of {self.name!r} is not an instant; give finite seconds")
        for field in ("delta_s", "moves", "promised_gpus", "started_gpus", "attained_gpu_s", "progress"):
            if not getattr(self, field) >= 0:
                raise ValueError(f"{field}={getattr(self, field)} of {self.name!r} is negative; give 0 or more")
        if not self.weight > 0.0 or self.min_gpus < 1:
            raise ValueError(
                f"{self.name!r} has weight={self.weight} and min_gpus={self.min_gpus}; give a weight above 0 and at "
                "least 1 GPU"
            )

    @property
    def most_gpus(self) -> int:
        """Most GPUs that are of use to it."""
        known = len(self.seconds_left)
        return known if self.max_gpus is None else min(known, self.max_gpus)


class Policy(Protocol):
    """Rule that divides a pool. Pure: equal arguments give equal allocations."""

    def allocate(
        self, demands: Sequence[Demand], capacity: Capacity, current: Allocations, now_s: float
    ) -> dict[str, dict[int, int]]:
        """Return the GPUs of every demand that gets some, from `now_s` on; `current` are those before.

        Never more than the capacity. A demand whose GPUs are in `current` unchanged need not move.
        """
        ...


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
    def of(cls, demands: Sequence[Demand], capacity: Capacity, current: Allocations, now_s: float) -> Table:
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

    def hull_s(self) -> Floats:
        """(J, G + 1) Convex hull of S(w), from below: S itself where each GPU more saves less than the one before."""
        found = self.seconds.copy()
        with np.errstate(invalid="ignore"):
            bent = (np.diff(self.seconds, 2, axis=1) < -1e-12 * self.seconds[:, 2:]).any(axis=1)
        for row in np.flatnonzero(bent):
            line = self.seconds[row]
            corners = [int(np.argmax(np.isfinite(line)))]
            while len(rest := line[corners[-1] + 1 :]):
                slopes = (rest - line[corners[-1]]) / np.arange(1, len(rest) + 1)
                corners.append(corners[-1] + 1 + int(np.argmin(slopes)))
            found[row, corners[0] :] = np.interp(np.arange(corners[0], len(line)), corners, line[corners])
        return found

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
        below = np.maximum(np.maximum.accumulate(np.where(possible, sizes, 0), axis=1)[rows, counts], self.floor)
        above = np.minimum.accumulate(np.where(possible, sizes, self.gpus + 1)[:, ::-1], axis=1)[:, ::-1]
        free = self.gpus - int(below.sum())
        cut = np.flatnonzero(below < counts)
        for row in cut[np.argsort(above[cut, counts[cut]] - below[cut], kind="stable")].tolist():
            more = int(above[row, counts[row]] - below[row])
            if more <= free:
                below[row] += more
                free -= more
        return below

    def _possible(self) -> Bools:
        """(J, G + 1) Counts from what is promised to what is of use: 1, 2, 4, … GPUs of an instance, or whole ones.

        Then gangs seldom find their GPUs scattered, or must move. The least that a demand needs is possible, too.
        """
        sizes = np.arange(self.gpus + 1)
        inside = (sizes >= self.floor[:, None]) & (sizes <= self.most[:, None])
        useless = (sizes > self.floor[:, None]) & ~np.isfinite(self.seconds)
        least = np.maximum(self.floor, np.argmax(np.isfinite(self.seconds), axis=1))[:, None]
        slices = (sizes < self.gpus_per_instance) & (sizes & (sizes - 1) == 0)
        whole = slices | (sizes % self.gpus_per_instance == 0) | (sizes == least) | (sizes == self.floor[:, None])
        return np.asarray(inside & ~useless & whole)
