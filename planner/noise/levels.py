"""Random factors with mean 1: 16 random bits choose one of as many equally likely levels of a law."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from rubberband.planner.exact.table import Floats
from rubberband.planner.noise.makespan import Seconds
from rubberband.values.profile import Law, Spread

LEVELS = 2**16
FEW_NUMBERS = 100_000
"""Up to this size, random numbers are kept from one job to the next."""


@lru_cache(maxsize=1)
def normal_levels() -> Seconds:
    """Return the means of 2**16 equally likely parts of the standard normal law, in order."""
    fine = np.linspace(-7.0, 7.0, 200_001)
    density = np.exp(-fine * fine / 2.0) / math.sqrt(2.0 * math.pi)
    below = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2.0)]) * (fine[1] - fine[0])
    edges = np.interp(np.arange(1, LEVELS) / LEVELS, below, fine)
    density = np.concatenate([[0.0], np.exp(-edges * edges / 2.0) / math.sqrt(2.0 * math.pi), [0.0]])
    levels: Seconds = ((density[:-1] - density[1:]) * LEVELS).astype(np.float32)
    return levels


def factors(cv: float, law: Law, seed: tuple[int, ...], size: int) -> Seconds:
    """(size,) Draw factors with mean 1."""
    bits = bits_of(seed, size)
    return factor_levels(cv, law).take(bits) if 4 * size >= LEVELS else noisy(cv, law, normal_levels().take(bits))


@lru_cache(maxsize=32)
def factor_levels(cv: float, law: Law) -> Seconds:
    """Return factors for all levels: where many are drawn, each is computed once."""
    return noisy(cv, law, normal_levels())


def noisy(cv: float, law: Law, normals: Seconds) -> Seconds:
    """Return factors with mean 1."""
    if law == "normal":
        factors: Seconds = np.maximum(np.float32(0.0), np.float32(1.0) + np.float32(cv) * normals)
        return factors
    return lognormal(cv, normals)


def normals_of(seed: tuple[int, ...], shape: tuple[int, int]) -> Seconds:
    """Return standard normal numbers."""
    return normal_levels().take(bits_drawn(seed, shape[0] * shape[1])).reshape(shape)


def bits_drawn(seed: tuple[int, ...], size: int) -> npt.NDArray[np.uint16]:
    """Draw levels by 16 random bits each: four from one random number."""
    drawn = np.random.PCG64(seed).random_raw(-(-size // 4)).view(np.uint16)[:size]
    drawn.flags.writeable = False
    return drawn


# Successive plans are mostly of similar jobs, whose samples begin with the same seed.
_few_bits = lru_cache(maxsize=128)(bits_drawn)


def bits_of(seed: tuple[int, ...], size: int) -> npt.NDArray[np.uint16]:
    """Return random levels: the same array for the same seed, if it is small."""
    return (_few_bits if size <= FEW_NUMBERS else bits_drawn)(seed, size)


@lru_cache(maxsize=1)
def exponential_levels() -> Seconds:
    """Return the means of 2**16 equally likely parts of the exponential law with mean 1, in order."""
    beyond = np.arange(LEVELS, -1, -1.0) / LEVELS
    above = beyond - np.append(beyond[:-1] * np.log(beyond[:-1]), 0.0)
    levels: Seconds = (-np.diff(above) * LEVELS).astype(np.float32)
    return levels


@lru_cache(maxsize=8)
def spread_levels(spread: Spread) -> Seconds:
    """Return factors for all levels."""
    if spread.samples:
        return np.array(spread.samples, np.float32)[np.arange(LEVELS) * len(spread.samples) // LEVELS]
    return factor_levels(spread.cv, "lognormal")


def lognormal(cv: float, normals: Seconds) -> Seconds:
    """Return lognormal factors with mean 1."""
    variance = math.log1p(cv * cv)
    factors: Seconds = np.exp(normals.dtype.type(math.sqrt(variance)) * normals - normals.dtype.type(variance / 2.0))
    return factors


def spread_factors(spread: Spread, rng: np.random.Generator, size: int) -> Floats:
    """Draw factors on a mean, shape (size,): from the spread's samples, else lognormal with mean 1."""
    if spread.samples:
        return rng.choice(np.array(spread.samples), size)
    return lognormal(spread.cv, rng.standard_normal(size))
