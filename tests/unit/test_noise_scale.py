"""phi from estimates whose truth is known: exact enough, quick to follow, never infinite."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from rubberband.executor import NoiseEstimate, NoiseReading, NoiseScale
from rubberband.executor.training.goodput.noise_scale import moments

DIMENSIONS = 10_000


class Source:
    """Estimates of tr Sigma = 1 and |G|^2 = 1 / phi from normal gradients with `DIMENSIONS` equal dimensions.

    With n parts, M (A - B) is chi-squared with (n - 1) d degrees of freedom over d, whatever their sizes, and
    independent of the mean gradient, so that no vectors are needed.
    """

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def estimate(self, noise_scale: float, batch_size: int, num_parts: int, steps: float) -> NoiseEstimate:
        """One, of `num_parts` workers."""
        spread = (1.0 / (DIMENSIONS * batch_size)) ** 0.5
        along = noise_scale**-0.5 + spread * self._random.standard_normal()
        square_of_mean = along**2 + spread**2 * self._random.chisquare(DIMENSIONS - 1)
        beyond = spread**2 * self._random.chisquare((num_parts - 1) * DIMENSIONS)
        trace, squared_norm = moments(
            square_of_mean + beyond, square_of_mean, num_parts=num_parts, batch_size=batch_size
        )
        return plain(trace, squared_norm, steps=steps)

    def feed(
        self, scale: NoiseScale, noise_scale: float, batch_size: int, num_estimates: int, num_parts: int = 2
    ) -> NoiseReading:
        """One estimate per step; M0 is 64."""
        for _ in range(num_estimates):
            scale.add(self.estimate(noise_scale, batch_size, num_parts, batch_size / 64))
        return scale.reading()


def plain(trace: float, squared_norm: float, **changes: object) -> NoiseEstimate:
    values = {"kind": "workers", "preconditioner": "identity", "steps": 1.0} | changes
    return NoiseEstimate(trace=trace, squared_norm=squared_norm, **values)


def feed(scale: NoiseScale, values: Sequence[tuple[float, float]], **changes: object) -> NoiseReading:
    for trace, squared_norm in values:
        scale.add(plain(trace, squared_norm, **changes))
    return scale.reading()


def around(trace: float, squared_norm: float, spread: float, num: int) -> list[tuple[float, float]]:
    """Values of that mean, every other one above it."""
    return [(trace, squared_norm + (spread if at % 2 else -spread)) for at in range(num)]


@pytest.mark.parametrize("sizes", [(32, 32), (16,) * 4, (16,) * 8, (89, 21, 12, 6)])
def test_estimates_are_unbiased(sizes):
    random, weights, dimensions = np.random.default_rng(0), np.array(sizes) / sum(sizes), 1000
    found = []
    for _ in range(400):
        noise = random.standard_normal((len(sizes), dimensions)) / np.sqrt(np.array(sizes))[:, None]
        parts = (noise + 0.25) / dimensions**0.5
        mean_square, mean = float(weights @ (parts**2).sum(axis=1)), weights @ parts
        found.append(moments(mean_square, float(mean @ mean), num_parts=len(sizes), batch_size=sum(sizes)))
    assert np.mean(found, axis=0) == pytest.approx([1.0, 1 / 16], rel=0.02)


@pytest.mark.parametrize(("noise_scale", "tolerance"), [(256.0, 0.05), (6400.0, 0.15)])
@pytest.mark.parametrize("num_parts", [2, 8])
@pytest.mark.parametrize("seed", [1, 2])
def test_phi_after_3000_steps(noise_scale, tolerance, num_parts, seed):
    reading = Source(seed).feed(NoiseScale(), noise_scale, 64, 3000, num_parts)
    assert reading.noise_scale == pytest.approx(noise_scale, rel=tolerance)
    assert reading.uncertainty < tolerance


def test_the_uncertainty_is_that_of_phi():
    errors = []
    for seed in range(30):
        reading = Source(seed).feed(NoiseScale(), 1000.0, 64, 400)
        errors.append((reading.noise_scale / 1000.0 - 1.0) / reading.uncertainty)
    assert 0.6 < np.sqrt(np.mean(np.square(errors))) < 1.6


@pytest.mark.parametrize(("before", "after"), [(100.0, 1000.0), (1000.0, 100.0)])
def test_a_change_of_phi_is_followed_in_far_less_than_the_longest_window(before, after):
    source, scale = Source(3), NoiseScale()
    source.feed(scale, before, 64, 2000)
    assert source.feed(scale, after, 64, 200).noise_scale == pytest.approx(after, rel=0.2)


def test_a_change_of_the_batch_changes_nothing():
    source, scale = Source(4), NoiseScale()
    for batch_size in (64, 256, 1024, 64):
        assert source.feed(scale, 1000.0, batch_size, 300).noise_scale == pytest.approx(1000.0, rel=0.15)


def test_few_estimates_say_nothing():
    reading = feed(NoiseScale(), around(100.0, 1.0, 0.1, 4))
    assert (reading.noise_scale, reading.uncertainty, reading.estimates) == (None, np.inf, 4)


def test_a_significant_phi_is_the_ratio():
    reading = feed(NoiseScale(), around(100.0, 1.0, 0.1, 100))
    assert reading.noise_scale == pytest.approx(reading.trace / reading.squared_norm)
    assert reading.noise_scale == pytest.approx(100.0, rel=0.05)


def test_without_significance_phi_is_the_least_that_is_likely():
    reading = feed(NoiseScale(), around(100.0, -0.001, 1.0, 100))
    assert reading.squared_norm < 0.0
    assert 100.0 < reading.noise_scale < 100.0 / 0.1
    assert reading.uncertainty >= 0.5


def test_where_the_squared_norm_turns_negative_the_last_phi_is_kept():
    scale = NoiseScale()
    before = feed(scale, around(100.0, 1.0, 0.1, 100))
    after = feed(scale, around(100.0, -1.0, 20.0, 200))
    assert after.squared_norm < 0.0
    assert after.noise_scale == before.noise_scale
    assert after.uncertainty >= max(0.5, 2 * before.uncertainty)


@pytest.mark.parametrize("change", [{"kind": "accumulation"}, {"preconditioner": "adam"}])
def test_another_estimator_starts_anew_and_phi_is_kept_until_then(change):
    scale = NoiseScale()
    before = feed(scale, around(100.0, 1.0, 0.1, 500))
    reading = feed(scale, around(900.0, 1.0, 0.1, 3), **change)
    assert (reading.noise_scale, reading.estimates) == (before.noise_scale, 3)
    assert feed(scale, around(900.0, 1.0, 0.1, 20), **change).noise_scale == pytest.approx(900.0, rel=0.1)


@pytest.mark.parametrize(("trace", "squared_norm"), [(np.inf, 1.0), (1.0, np.nan)])
def test_infinite_values_are_dropped(trace, squared_norm):
    scale = NoiseScale()
    before = feed(scale, around(100.0, 1.0, 0.1, 100))
    assert feed(scale, [(trace, squared_norm)]) == before


@pytest.mark.parametrize(("trace", "squared_norm", "expected"), [(0.0, 1.0, 0.0), (0.0, 0.0, None), (5.0, 5.0, 1.0)])
def test_gradients_without_noise_or_without_anything(trace, squared_norm, expected):
    assert feed(NoiseScale(), [(trace, squared_norm)] * 30).noise_scale == expected
