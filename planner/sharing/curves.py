"""Jobs whose time on every number of GPUs is known: those of a workload file, and of the queueing papers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rubberband.planner.sharing.demand import Demand
from rubberband.planner.sharing.table import Floats

_DONE = 1e-9
"""Share of a job that is rounding only."""


@dataclass(slots=True, kw_only=True)
class CurveJob:
    """Job of fixed size; resizing stops it for a while."""

    name: str
    submitted_at: float
    kind: str
    seconds: Sequence[float]
    """Seconds of the whole job with 1, 2, … GPUs; inf where it cannot run."""
    resize_s: float = 0.0
    """Seconds without training after each change of its GPUs, the start included."""
    min_gpus: int = 1
    max_gpus: int | None = None
    weight: float = 1.0
    done_at: float | None = None
    moves: int = -1
    attained_gpu_s: float = 0.0
    gpus: int = 0
    started_gpus: int = 0
    left: float = 1.0
    """Share of the job that is not done."""
    resizing_s: float = 0.0
    _curve: Floats = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._curve = np.asarray(self.seconds, dtype=np.float64)

    def resize(self, placement: tuple[int, ...]) -> None:
        """Give it other GPUs, as counts of instance after instance; none at all stops it."""
        self.gpus = sum(placement)
        if self.gpus:
            self.started_gpus = self.started_gpus or self.gpus
            self.resizing_s = self.resize_s
            self.moves += 1

    def _whole_s(self) -> float:
        usable = min(self.gpus, len(self.seconds), self.max_gpus or self.gpus)
        return self.seconds[usable - 1] if usable else math.inf

    def ends_in_s(self) -> float:
        """Return the seconds until its end if nothing changes; inf without GPUs."""
        return self.resizing_s + self.left * self._whole_s() if self.gpus else math.inf

    def alone_s(self, gpus: int) -> float:
        """Return the seconds from its start to its end with at most `gpus` GPUs of its own; inf if it cannot run.

        It has at least `min_gpus`.
        """
        most = min(max(gpus, self.min_gpus), self.max_gpus or len(self.seconds), len(self.seconds))
        return self.resize_s + float(self._curve[self.min_gpus - 1 : most].min(initial=math.inf))

    def advance(self, seconds: float, now_s: float) -> None:
        """Train for `seconds`, from `now_s` on."""
        if not self.gpus or self.done_at is not None:
            return
        end_s = self.ends_in_s()
        waited_s = min(self.resizing_s, seconds)
        self.resizing_s -= waited_s
        self.left -= (seconds - waited_s) / self._whole_s()
        self.attained_gpu_s += min(seconds, end_s) * self.gpus
        if self.left <= _DONE:
            self.left = 0.0
            self.done_at = now_s + min(seconds, end_s)

    def demand(self, now_s: float, gpus: int) -> Demand:
        """Return its demand on a pool of `gpus` GPUs."""
        return Demand(
            name=self.name,
            arrived_at=self.submitted_at,
            seconds_left=(self.left * self._curve[:gpus]).tolist(),
            delta_s=self.resize_s,
            moves=max(0, self.moves),
            weight=self.weight,
            min_gpus=self.min_gpus,
            max_gpus=self.max_gpus,
            started_gpus=self.started_gpus,
            attained_gpu_s=self.attained_gpu_s,
            progress=1.0 - self.left,
        )
