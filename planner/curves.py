"""Distribution of the best final metric of a search that goes on, from its learning curves.

A curve is continued from its level and its slope at the latest report. Both are those of a fit with weights t^3, in
effect of its last half. A gain goes on as `slope * (1 - t/T)`, of the family 1/t that Domhan et al. (2015, table 1)
extrapolate with others; a loss as `slope * log(T/t)`, as of a trial that overfits. The same fit on the first halves of
this search's curves shows how much of its gain a curve keeps. Then the scheduler's rounds are played with draws of all
curves, since each round keeps the best. The metric is the reported one, with its noise: the best trial so far was
lucky, which is hard to beat, and luck may beat it. A trial that is still to begin is as good as a random one of those
that have begun: it is better than all n of them in one case of n + 1.

The constants are those that suit the curves of tests/bench/bench_worth.py best. numpy only. The same curves give the
same result, in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import NormalDist
from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]

LEAST_REPORTS = 4
"""Reports of a curve below which it is not continued."""
LEAST_CURVES = 3
"""Such curves below which nothing is known."""
_DRAWS = 512
_MOST_CURVES = 64
"""Curves that are drawn in one chain, the best ones: the others hardly ever win."""
_MOST_FITTED = 256
"""Curves that are fitted, the best ones."""
_MOST_NEW = 32
"""Likewise the best of the trials that are still to begin."""
_MOST_REPORTS = 256
"""Latest reports of a curve that are fitted."""

_KEPT, _KEPT_COUNT = 0.7, 4.0
"""Share of its expected gain that a curve keeps, before any is known, and the number of curves that this counts as."""
_MOST_KEPT = 2.0
_KEPT_DEVIATION = 0.3
_MOST_COUNT = 4.0
"""The number of curves that those of the search count as, at most: they are alike."""
_LOSSES = 1.5
"""A falling curve loses this times its slope and the logarithm of the ratio of iterations."""
_NOISE = 1.5
"""Standard deviation of the reported metric over that of the fit's residuals."""
_EXCESS = 0.5
"""Mean distance of a better new trial from the best one, over the one that follows from the gaps of the best ones."""
_DRIFT, _WALK = 0.3, 0.3
"""Expected loss of level per e-fold of iterations, and its standard deviation, over the noise's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The reports of one trial, oriented so that higher is better; all are finite."""

    iterations: Sequence[int]
    """Increasing; those without the metric are left out."""
    values: Sequence[float]
    is_over: bool = False
    """Whether it has ended before its time: its latest value still competes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Trials that compete: the best ones of each round go on to the next, and the best of the last one may win."""

    rounds: tuple[tuple[int, int], ...]
    """The trials that take part in each round, and the iterations that each has done in all at its end."""
    curves: tuple[int, ...] = ()
    """The trials that may go on, as indexes into the curves."""
    new: int = 0
    """Trials of which nothing is known yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """The distribution of what the best metric gains if the search goes on to its end."""

    gains: Floats = field(repr=False)
    """Equally likely gains, sorted; negative where the best ends worse than it is now."""

    def chance(self, more_than: float) -> float:
        """Return the probability that the best improves by more than that."""
        return float(np.mean(self.gains > more_than))

    def quantile(self, share: float) -> float:
        """Return the gain that is not exceeded with that probability."""
        return float(self.gains[min(len(self.gains) - 1, int(share * len(self.gains)))])

    @property
    def worse(self) -> float:
        """The probability that the best ends worse than it is now."""
        return float(np.mean(self.gains < 0.0))

    @property
    def expected(self) -> float:
        """The expected improvement; one that ends worse is none."""
        return float(np.mean(np.maximum(self.gains, 0.0)))


def rest_of(
    curves: Sequence[Curve], chains: Sequence[Chain], best: float, *, ended: float | None = None, given_up: int = 0
) -> Rest | None:
    """Return what the rest brings beyond `best`; None where too little is known.

    `ended`: the best final metric of the trials that have been trained to the end, and may still win; None: none.
    `given_up`: trials that have begun and are worse than all with a curve; a new trial may be as bad as they were.
    """
    known = [at for at, curve in enumerate(curves) if len(curve.values) >= LEAST_REPORTS]
    if len(known) < LEAST_CURVES or not {at for chain in chains for at in chain.curves} <= set(known):
        return None
    fitted = sorted(known, key=lambda at: -curves[at].values[-1])[:_MOST_FITTED]
    fitted.sort(key=lambda at: (-curves[at].values[-1], *_identity(curves[at])))
    row_of = {at: row for row, at in enumerate(fitted)}
    model, begun = _Model([curves[at] for at in fitted]), len(known) + given_up
    final = np.full(_DRAWS, -np.inf if ended is None else ended)
    for number, chain in enumerate(chains):
        rows = sorted(row_of[at] for at in chain.curves if at in row_of)[:_MOST_CURVES]
        final = np.maximum(final, _played(model, chain, np.array(rows, dtype=int), begun, number))
    if np.isneginf(final).any():
        return None
    gains = np.sort(final - best)
    rounding = 1e-9 * float(np.abs(model.y).max())
    return Rest(gains=np.where(np.abs(gains) <= rounding, 0.0, gains))


def _identity(curve: Curve) -> tuple[Any, ...]:
    """Return what the model sees of a curve, to order those with the same latest value."""
    return tuple(curve.values[-_MOST_REPORTS:]), tuple(curve.iterations[-_MOST_REPORTS:]), curve.is_over


@cache
def _normals(name: str, columns: int) -> Floats:
    """Draws of standard normal variables, always the same ones: each column has the quantiles of the distribution."""
    quantiles = np.array([NormalDist().inv_cdf((at + 0.5) / _DRAWS) for at in range(_DRAWS)])
    chance = np.random.default_rng(list(name.encode()))
    return np.stack([quantiles[chance.permutation(_DRAWS)] for _ in range(columns)], axis=1)


class _Model:
    """Levels and slopes of curves, by their latest value, and draws of their continuations."""

    def __init__(self, curves: Sequence[Curve]) -> None:
        counts = [min(len(curve.values), _MOST_REPORTS) for curve in curves]
        self.t, self.y = np.zeros((len(curves), max(counts))), np.zeros((len(curves), max(counts)))
        for row, (curve, count) in enumerate(zip(curves, counts, strict=True)):
            self.t[row, :count], self.y[row, :count] = curve.iterations[-count:], curve.values[-count:]
        self.ends = self.t.max(axis=1)
        """The iterations of the latest reports."""
        self.known_until = np.where([curve.is_over for curve in curves], np.inf, self.ends)
        self.level, self.slope, squared, self.level_error = _fitted(self.t, self.y, self.ends)
        weights = (self.ends / self.ends.max()) ** 2
        self.noise = _NOISE * float(np.sqrt(_median(squared, weights)))
        self.kept = self._kept(weights, self.noise)

    def _kept(self, weights: Floats, noise: float) -> float:
        """Return the share of the expected gains that was seen from the curves' first halves to their ends."""
        half = np.floor(self.ends / 2.0)
        known = np.where((self.t > 0) & (self.t <= half[:, None]), self.t, 0.0).max(axis=1)
        has_half = known > 0
        level, slope, _, _ = _fitted(self.t, self.y, np.where(has_half, known, self.ends))
        expected = np.where(has_half & (slope > 0), slope * (1.0 - known / self.ends), 0.0)
        last = np.take_along_axis(self.y, self.t.argmax(axis=1)[:, None], axis=1)[:, 0]
        size = np.maximum(expected**2, _median(expected**2, weights) + noise**2 + 1e-300)
        count = min(_MOST_COUNT, float(weights.sum() ** 2 / (weights**2).sum())) / float(weights.sum())
        seen = count * float((weights * (last - level) * expected / size).sum())
        most = count * float((weights * expected**2 / size).sum())
        return float(np.clip((_KEPT_COUNT * _KEPT + seen) / (_KEPT_COUNT + most), 0.0, _MOST_KEPT))

    def drawn(self, rows: Any, at: int, round_: int) -> Floats:
        """Return draws (draws, rows) of the metric after `at` iterations; it is as reported where a curve is longer."""
        columns = len(rows)
        ends, slope = self.ends[rows], self.slope[rows]
        ahead = np.maximum(1.0, at / ends)
        share = self.kept + _KEPT_DEVIATION * (
            (_normals("own", _MOST_CURVES)[:, :columns] + _normals("common", 1)) / np.sqrt(2.0)
        )
        change = np.where(slope > 0, share * slope * (1.0 - 1.0 / ahead), _LOSSES * slope * np.log(ahead))
        error = self.level_error[rows] * _normals("level", _MOST_CURVES)[:, :columns]
        error = error + _normals(f"round {round_}", _MOST_CURVES)[:, :columns]
        error = error + np.log(ahead) * -_DRIFT + np.sqrt(np.log(ahead)) * _WALK * _normals("walk", 1)
        reported = np.array([_at(self.t[row], self.y[row], at) for row in rows])
        return np.where(self.known_until[rows] >= at, reported, self.level[rows] + change + self.noise * error)


def _at(iterations: Floats, values: Floats, at: int) -> float:
    """Return the value after `at` iterations, or the first one since; the latest one if there is none."""
    since = np.where(iterations >= at, iterations, np.inf)
    return float(values[int(since.argmin() if np.isfinite(since).any() else iterations.argmax())])


def _fitted(t: Floats, y: Floats, ends: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Return level and slope per e-fold of curves at their ends, the variance of their noise, and the level's error.

    Weighted least squares of `level + slope * (1 - end/t)`; the error is in standard deviations of the noise.
    """
    weights = np.where((t > 0) & (t <= ends[:, None]), (t / ends[:, None]) ** 3, 0.0)
    x = np.where(weights > 0, 1.0 - ends[:, None] / np.maximum(t, 1.0), 0.0)
    w, wx, wxx = weights.sum(axis=1), (weights * x).sum(axis=1), (weights * x * x).sum(axis=1)
    wy, wxy = (weights * y).sum(axis=1), (weights * x * y).sum(axis=1)
    is_line = (determinant := w * wxx - wx * wx) > 1e-9 * w * wxx
    divisor = np.where(is_line, determinant, 1.0)
    level = np.where(is_line, (wxx * wy - wx * wxy) / divisor, wy / w)
    slope = np.where(is_line, (w * wxy - wx * wy) / divisor, 0.0)
    of_line = weights * (wxx[:, None] - wx[:, None] * x) / divisor[:, None]
    parts = np.where(is_line[:, None], of_line, weights / w[:, None])
    rest = np.where(weights > 0, y - level[:, None] - slope[:, None] * x, 0.0)
    count = w**2 / (weights**2).sum(axis=1)
    variance = (weights * rest**2).sum(axis=1) / w * count / np.maximum(count - 2.0, 0.5)
    return level, slope, variance, np.sqrt((parts**2).sum(axis=1))


def _median(values: Floats, weights: Floats) -> float:
    order = np.argsort(values, kind="stable")
    summed = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(summed, summed[-1] / 2.0)])


def _played(model: _Model, chain: Chain, rows: Any, begun: int, number: int) -> Floats:
    """Return draws of the best metric at the end of a chain; -inf where no trial gets there."""
    rank, beyond = _ranks(begun, chain.new, number)
    known = np.arange(min(len(model.ends), _MOST_CURVES)) if chain.new else rows[:0]
    beyond *= _spacing(model, chain.rounds[-1][1]) if chain.new else 0.0
    count = len(rows) + rank.shape[1]
    stays, values = np.ones((_DRAWS, count), dtype=bool), np.empty((_DRAWS, count))
    for index, (_, at) in enumerate(chain.rounds):
        alike = np.concatenate([model.drawn(known, at, index), np.full((_DRAWS, 1), -np.inf)], axis=1)
        new = np.take_along_axis(alike, np.minimum(rank, len(known)), axis=1) + beyond
        values[:, : len(rows)], values[:, len(rows) :] = model.drawn(rows, at, index), new
        values[~stays] = -np.inf
        go_on = chain.rounds[index + 1][0] if index + 1 < len(chain.rounds) else 1
        if go_on < count:
            stays &= values >= -np.partition(-values, go_on - 1, axis=1)[:, go_on - 1 : go_on]
    best: Floats = values.max(axis=1, initial=-np.inf)
    return best


def _ranks(begun: int, new: int, number: int) -> tuple[Any, Floats]:
    """Return draws of the trials, best first, that the best new ones are as good as, and of how far they are beyond.

    All are random ones of the same kind: the quantiles of both, one after another, are uniform order statistics, by
    Renyi's representation. Beyond the best one, the excess is exponential, in units of its mean.
    """
    if not new:
        return np.empty((_DRAWS, 0), dtype=int), np.empty((_DRAWS, 0))
    chance = np.random.default_rng([number, begun, new])
    ours = _order_statistics(chance, begun, min(begun, _MOST_CURVES + 1))
    theirs = _order_statistics(chance, new, min(new, _MOST_NEW))
    better = (ours[:, None, :] < theirs[:, :, None]).sum(axis=2)
    beyond = np.where(better == 0, np.log(ours[:, :1] / theirs), 0.0)
    return np.maximum(better - 1, 0), beyond


def _order_statistics(chance: np.random.Generator, total: int, lowest: int) -> Floats:
    """Return draws (draws, lowest) of the lowest ones of `total` uniform quantities."""
    steps = chance.exponential(size=(_DRAWS, lowest)) / (total - np.arange(lowest))
    return -np.expm1(-np.cumsum(steps, axis=1))


def _spacing(model: _Model, at: int) -> float:
    """Return how much better the best of more trials is on average, if it is better: from the gaps of the best ones."""
    drawn = model.drawn(np.arange(min(len(model.ends), _MOST_CURVES)), at, 0)
    values = np.sort(np.median(drawn, axis=0))[::-1]
    count = max(1, min(len(values) - 1, max(2, len(values) // 3)))
    return _EXCESS * float(np.mean(np.arange(1, count + 1) * (values[:count] - values[1 : count + 1])))
