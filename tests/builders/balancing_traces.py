"""Synthetic speeds of shared CPU workers over time, after LB-BSP Figs. 2 and 10: v = base g(c) h(m) noise.

g is concave in the CPUs that are available, h falls where memory gets short (Fig. 2): neither is a power law. `shifts`
change c and m of one worker now and then, `spikes` slow one worker for a step or two without any change of c and m.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

KINDS = ("steady", "shifts", "spikes", "both")
CORES = (2.0, 4.0, 8.0, 16.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Arrays of (steps, workers)."""

    speeds: Floats
    """Samples/s."""
    cpu: Floats
    """CPUs available."""
    memory: Floats
    """Fraction of memory available."""


def trace(
    kind: str, seed: int, *, workers: int = 8, steps: int = 1500, noise: float = 0.05, every: float = 60.0
) -> Trace:
    """Return a trace; resources of a worker shift `every` steps on average, and 2 % of its steps begin a spike."""
    random = np.random.default_rng(seed)
    cores = random.choice(CORES, size=workers)
    base = 10.0 * np.exp(0.2 * random.normal(size=workers))
    shifting = kind in ("shifts", "both")
    cpu = _levels(random, steps, workers, every, 0.15, shifting)
    memory = _levels(random, steps, workers, 3.0 * every, 0.05, shifting)
    speeds = base * cores * cpu**0.9 * np.minimum(1.0, 0.4 + 3.0 * memory)
    speeds *= np.exp(noise * random.normal(size=speeds.shape))
    if kind in ("spikes", "both"):
        begins = random.random(speeds.shape) < 0.02
        lasts_two = np.roll(begins & (random.random(speeds.shape) < 0.5), 1, axis=0)
        speeds *= np.where(begins | lasts_two, random.uniform(0.3, 0.7, size=speeds.shape), 1.0)
    return Trace(speeds=speeds, cpu=cores * cpu, memory=memory)


def _levels(
    random: np.random.Generator, steps: int, workers: int, every: float, least: float, shifting: bool
) -> Floats:
    """(steps, workers) Parts of a resource that are available, with 1 % of jitter."""
    fresh = random.uniform(least, 1.0, size=(steps, workers))
    moves = random.random((steps, workers)) < (1.0 / every if shifting else 0.0)
    moves[0] = True
    at = np.maximum.accumulate(np.where(moves, np.arange(steps)[:, None], 0), axis=0)
    levels = np.take_along_axis(fresh, at, axis=0)
    return np.asarray(np.clip(levels * np.exp(0.01 * random.normal(size=levels.shape)), 0.01, 1.0))
