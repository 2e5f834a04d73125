"""Demands of experiments, the capacity of a pool, and allotments: the plain values of a policy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

Allotment = Mapping[int, int]
"""GPUs of one experiment: number of the instance, from 0 -> GPUs there, at least 1 each."""
Allotments = Mapping[str, Allotment]
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
    """GPUs that it holds a promise for at this instant: every policy allots at least these."""
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
    """Rule that divides a pool. Pure: equal arguments give equal allotments."""

    def allot(
        self, demands: Sequence[Demand], capacity: Capacity, current: Allotments, now_s: float
    ) -> dict[str, dict[int, int]]:
        """Return the GPUs of every demand that gets some, from `now_s` on; `current` are those before.

        Never more than the capacity. A demand whose GPUs are in `current` unchanged need not move.
        """
        ...
