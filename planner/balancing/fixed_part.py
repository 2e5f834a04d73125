"""The part of a CPU worker's step that does not depend on its share, as a number of samples x0: t = (x0 + x) / v.

The paper has x0 = 0 (LB-BSP §3.2.1). The optimizer's step and what a framework does once per step make it more. It is
the same for all workers: one with half of the CPUs is slower at both parts.

Only looks between which a share changed say something: then log t changes as log(x0 + x) does. A change of the worker
itself looks the other way round: its time changes, and its share a look later. So consecutive looks are compared, for
every candidate of x0, and the candidate with the least errors is taken.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rubberband.planner.balancing.predictors import Floats

CANDIDATES = np.array([0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0])
"""x0 in units of an even share at the first look."""
MOVED = 0.02
"""Least change of the logarithm of a share."""
FORGETTING = 0.95
FAR = 0.3
"""An error of the logarithm beyond this counts as this much."""
PRIOR = 1e-4
"""Error by which a candidate must be better than the one below it, before any look."""


class FixedPart:
    """Finds x0 of a gang."""

    def __init__(self) -> None:
        self._unit = 0.0
        self._errors: Floats = PRIOR * np.arange(len(CANDIDATES), dtype=np.float64)
        self._last: tuple[Floats, Floats] | None = None

    @property
    def samples(self) -> float:
        """Return x0; 0 until looks say otherwise."""
        return self._unit * float(CANDIDATES[int(self._errors.argmin())])

    def observe(self, shares: Floats, times_s: Floats, log_gains: Floats) -> None:
        """Take in a look; times may be nan.

        `log_gains` are the logarithms of the speeds over those of the look before, as far as resources explain them.
        """
        if self._unit == 0.0:
            self._unit = float(shares.mean())
        if self._last is not None:
            old_shares, old_times_s = self._last
            both = ~np.isnan(times_s) & ~np.isnan(old_times_s) & (shares > 0.0) & (old_shares > 0.0)
            both[both] = np.abs(np.log(shares[both] / old_shares[both])) > MOVED
            if both.any():
                x0 = self._unit * CANDIDATES
                expected = np.log((x0 + shares[both, None]) / (x0 + old_shares[both, None]))
                found = np.log(times_s[both] / old_times_s[both]) + log_gains[both]
                errors = np.clip(expected - found[:, None], -FAR, FAR)
                self._errors = FORGETTING * self._errors + np.square(errors).sum(axis=0)
        self._last = shares, times_s

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, in plain values."""
        last = None if self._last is None else [array.tolist() for array in self._last]
        return {"unit": self._unit, "errors": self._errors.tolist(), "last": last}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken."""
        self._unit, self._errors = state["unit"], np.asarray(state["errors"], dtype=np.float64)
        if state["last"] is not None:
            shares, times_s = (np.asarray(array, dtype=np.float64) for array in state["last"])
            self._last = shares, times_s
