"""The gradient noise scale: bias, spread, response to a change, and cost per step. Prints figures, asserts none.

Run: python -m tests.bench.bench_noise_scale [seeds]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from rubberband.executor import GradientNoise, NoiseEstimate, NoiseReading, NoiseScale
from rubberband.executor.training.noise_scale import moments
from tests.bench.overhead import Case, measure

DIMENSIONS = 1000
GRADIENT = torch.full((DIMENSIONS,), 0.25 / DIMENSIONS**0.5, dtype=torch.float64)
SPREAD = torch.linspace(0.5, 1.5, DIMENSIONS, dtype=torch.float64) / DIMENSIONS**0.5
ESTIMATES = 200


def of_workers(sizes: Sequence[int], seed: int) -> tuple[float, float]:
    """Mean tr Sigma and |G|^2 of one seed, from gradients of `sizes` samples on as many workers."""
    random, weights = np.random.default_rng(seed), np.array(sizes) / sum(sizes)
    found = []
    for _ in range(ESTIMATES):
        noise = random.standard_normal((len(sizes), DIMENSIONS)) * SPREAD.numpy() / np.sqrt(np.array(sizes))[:, None]
        parts = noise + GRADIENT.numpy()
        mean_square, mean = float(weights @ (parts**2).sum(axis=1)), weights @ parts
        found.append(moments(mean_square, float(mean @ mean), num_parts=len(sizes), batch_size=sum(sizes)))
    trace, squared_norm = np.mean(found, axis=0)
    return float(trace), float(squared_norm)


def of_one_worker(parts: Sequence[int], kind: str, seed: int) -> tuple[float, float, float, float]:
    """The same through a real optimizer that stands still, and the truth under its P at the end."""
    torch.manual_seed(seed)
    weight = nn.Parameter(torch.zeros(DIMENSIONS, dtype=torch.float64))
    optimizer = getattr(torch.optim, kind)([weight], lr=0.0)
    rows: list[tuple[float, float]] = []

    def total(values: Tensor) -> Tensor:
        batch_size = sum(parts) * (2 if len(parts) == 1 else 1)
        for mean_square, square_of_mean in values.reshape(-1, 2).tolist():
            rows.append(moments(mean_square, square_of_mean, num_parts=2, batch_size=batch_size))
        return values

    noise = GradientNoise(optimizer, nn.Module(), rank=0, num_workers=1, initial_batch=sum(parts), total=total, every=2)
    for _ in range(2 * ESTIMATES):
        optimizer.zero_grad()
        noise.before_step([sum(parts)], parts)
        for size in parts:
            gradient = GRADIENT + SPREAD * torch.randn(DIMENSIONS, dtype=torch.float64) / size**0.5
            (gradient @ weight * (size / sum(parts))).backward()
            noise.after_part()
        noise.before_update()
        optimizer.step()
    noise.reading()
    late = np.array(rows)[len(rows) // 2 :] if kind == "Adam" else np.array(rows)
    scale = torch.ones(())
    if kind == "Adam":
        scale = 1 / (optimizer.state[weight]["exp_avg_sq"] / (1 - 0.999 ** (2 * ESTIMATES))).sqrt()
    trace, squared_norm = late.mean(axis=0)
    truth = (scale * SPREAD).square().sum(), (scale * GRADIENT).square().sum()
    return float(trace), float(squared_norm), float(truth[0]), float(truth[1])


def show_bias(seeds: int) -> None:
    """Means over seeds, relative to the truth."""
    print(f"bias: mean over {seeds} seeds of {ESTIMATES} estimates each, d = {DIMENSIONS}, relative to the truth")
    trace, squared_norm = float(SPREAD.square().sum()), float(GRADIENT.square().sum())
    for sizes in ((32, 32), (16,) * 4, (8,) * 8, (89, 21, 12, 6)):
        found = np.mean([of_workers(sizes, seed) for seed in range(seeds)], axis=0) / (trace, squared_norm)
        print(f"  {'workers ' + '/'.join(map(str, sizes)):<34} tr Sigma {found[0]:.4f}  |G|^2 {found[1]:.4f}")
    for name, parts, kind in (
        ("accumulation 16 x 4", (16,) * 4, "SGD"),
        ("accumulation 40/24", (40, 24), "SGD"),
        ("differenced 64", (64,), "SGD"),
        ("accumulation 16 x 4, Adam", (16,) * 4, "Adam"),
        ("differenced 64, Adam", (64,), "Adam"),
    ):
        ratios = [(a / c, b / d) for a, b, c, d in (of_one_worker(parts, kind, seed) for seed in range(seeds))]
        found = np.mean(ratios, axis=0)
        print(f"  {name:<34} tr Sigma {found[0]:.4f}  |G|^2 {found[1]:.4f}")


class Source:
    """Estimates of tr Sigma = 1 and |G|^2 = 1 / phi from normal gradients, by their exact distribution.

    M (A - B) is chi-squared with (n - 1) d degrees of freedom over d, and independent of the mean gradient.
    """

    def __init__(self, seed: int, *, dimensions: int, num_parts: int, batch_size: int) -> None:
        self._random = np.random.default_rng(seed)
        self._dimensions, self._num_parts, self._batch_size = dimensions, num_parts, batch_size

    def estimates(self, noise_scale: float, steps: int, every: int) -> Iterator[NoiseEstimate]:
        """Of that many steps; M0 is 64."""
        variance = 1.0 / (self._dimensions * self._batch_size)
        for _ in range(0, steps, every):
            along = noise_scale**-0.5 + variance**0.5 * self._random.standard_normal()
            square_of_mean = along**2 + variance * self._random.chisquare(self._dimensions - 1)
            beyond = variance * self._random.chisquare((self._num_parts - 1) * self._dimensions)
            trace, squared_norm = moments(
                square_of_mean + beyond, square_of_mean, num_parts=self._num_parts, batch_size=self._batch_size
            )
            yield NoiseEstimate(
                kind="workers",
                preconditioner="identity",
                steps=every * self._batch_size / 64,
                trace=trace,
                squared_norm=squared_norm,
            )


def final(noise_scale: float, every: int, source: Source) -> NoiseReading:
    """After 3,000 steps, read every 20 as the agent does."""
    scale = NoiseScale()
    for at, estimate in enumerate(source.estimates(noise_scale, 3000, every)):
        scale.add(estimate)
        if at % max(1, 20 // every) == 0:
            scale.reading()
    return scale.reading()


def show_spread(seeds: int) -> None:
    """Of phi after 3,000 steps: how far off it is (root mean square), and what uncertainty is told."""
    print(f"phi after 3,000 steps, {seeds} seeds")
    print(f"  {'phi':>5} {'d':>6} {'n x m':>7} {'every':>5} {'least':>7} {'mean':>7} {'most':>7}    off   told")
    for phi in (256.0, 6400.0):
        for dimensions in (1000, 10_000):
            for num_parts, batch_size, every in ((2, 64, 1), (8, 64, 1), (2, 64, 4), (8, 64, 4), (2, 32, 1)):
                sources = (
                    Source(seed, dimensions=dimensions, num_parts=num_parts, batch_size=batch_size)
                    for seed in range(seeds)
                )
                readings = [final(phi, every, source) for source in sources]
                found = np.array([reading.noise_scale for reading in readings])
                expected = np.mean([reading.uncertainty for reading in readings])
                off = np.sqrt(np.mean((found / phi - 1) ** 2))
                print(
                    f"  {phi:5.0f} {dimensions:6} {num_parts:3} x {batch_size // num_parts:<2} {every:5} "
                    f"{found.min():7.0f} {found.mean():7.0f} {found.max():7.0f} {off:7.1%} {expected:6.1%}"
                )


def show_response(seeds: int) -> None:
    """Steps until phi is within 15 % of a new value for good."""
    print("steps until phi has followed a change within 15 % for good (d = 10,000, 2 x 32, an estimate every 4 steps)")
    for before, after in ((100.0, 1000.0), (1000.0, 100.0), (100.0, 6400.0)):
        found = []
        for seed in range(seeds):
            source, scale, last = Source(seed, dimensions=10_000, num_parts=2, batch_size=64), NoiseScale(), 0
            for estimate in source.estimates(before, 3000, 4):
                scale.add(estimate)
            for at, estimate in enumerate(source.estimates(after, 4000, 4)):
                scale.add(estimate)
                phi = scale.reading().noise_scale
                if phi is None or abs(phi / after - 1) > 0.15:
                    last = 4 * (at + 1)
            found.append(last)
        print(f"  {before:.0f} -> {after:.0f}: median {np.median(found):.0f}, most {max(found)}")


def show_cost() -> None:
    """Per step of the digits model, beside plain training."""
    print("cost per step of the digits model, against plain training in the same run")
    for name, case, num_workers in (
        ("2 workers x 32, SGD", Case(optimizer="SGD", parts=(32,)), 2),
        ("2 workers x 32, Adam", Case(optimizer="Adam", parts=(32,)), 2),
        ("1 worker, 2 x 32, SGD", Case(optimizer="SGD", parts=(32, 32)), 1),
        ("2 workers x 32, SGD, + 100 ms", Case(optimizer="SGD", parts=(32,), extra_s=0.1, blocks=10), 2),
    ):
        plain_s, added_s = measure(case, num_workers)
        print(f"  {name:<30} {1e3 * plain_s:8.3f} ms {1e6 * added_s:+8.1f} us {added_s / plain_s:+7.2%}", flush=True)


def main() -> None:
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    torch.set_num_threads(1)
    show_bias(seeds)
    show_spread(seeds)
    show_response(seeds)
    show_cost()


if __name__ == "__main__":
    main()
