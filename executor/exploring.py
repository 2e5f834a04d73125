"""Configurations of a population by a model of what they have gained: PB2 (Parker-Holder et al. 2020), in NumPy.

A Gaussian process learns what a trial gains in an iteration, from the generation, the metric that it begins with, and
its numbers. Old generations count less (a time-varying kernel, section 3.2). A trial that takes over a checkpoint
gets the numbers with the highest upper confidence bound, where trials that go on, or were drawn before in the same
exchange, count as seen (section 3.3).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rubberband.executor.core.history import Fork
from rubberband.executor.core.state import LaneState
from rubberband.executor.core.trial_state import TrialState
from rubberband.spec.search import Search
from rubberband.spec.space import Domain

_MOST_STEPS = 300
"""Generations of trials that the model learns from, the latest ones."""
_CANDIDATES = 1000
_CONFIDENCE = 0.2
"""Standard deviations in an upper confidence bound. Those of the paper's theorem grow, and explore far more: they found
worse configurations on all of nine made-up schedules."""
_LENGTHS, _FORGETS, _NOISES = (0.1, 0.2, 0.4, 0.8), (0.0, 0.1, 0.3), (0.001, 0.01, 0.1)
"""Length scales, losses of correlation in a generation, and variances of noise: the likeliest ones are the model's."""

Array = NDArray[np.float64]
Configurations = Mapping[int, Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Gain of a trial in a generation."""

    stage: int
    before: float
    gain: float
    """In an iteration; more is better."""
    configuration: Mapping[str, Any]


def guided(
    search: Search,
    axes: Sequence[tuple[str, Domain]],
    lane: LaneState,
    first: Configurations,
    going_on: Configurations,
    parent: TrialState,
    seed: int,
) -> dict[str, Any]:
    """Return the numbers of a trial that takes over the checkpoint of `parent`; empty where too little is known yet.

    `axes` are the parameters to choose, numbers with bounds. `first` are the configurations with which trials began,
    `going_on` those that train in the next generation.
    """
    sign = -1.0 if search.mode == "min" else 1.0
    known = steps(search, lane, first)[-_MOST_STEPS:]
    stage, before = lane.stage.stage + 1, sign * parent.metrics.get(search.metric, math.nan)
    if len(known) < 2 + len(axes) or not math.isfinite(before):
        return {}
    rows = [(one.stage, one.before, *_place(axes, one.configuration)) for one in known]
    rows += [(stage, before, *_place(axes, configuration)) for configuration in going_on.values()]
    source = np.random.default_rng(seed)
    numbers = source.random((_CANDIDATES, len(axes)))
    rows += [(stage, before, *row) for row in numbers]
    inputs, stages = np.array(rows, dtype=float), np.array([row[0] for row in rows], dtype=float)
    inputs[:, 1] = _clipped(inputs[:, 1])
    for column in (0, 1):
        low, high = inputs[:, column].min(), inputs[:, column].max()
        inputs[:, column] = (inputs[:, column] - low) / (high - low or 1.0)
    gains = _clipped(np.array([one.gain for one in known]))
    gains = (gains - gains.mean()) / (gains.std() or 1.0)
    best = numbers[int(np.argmax(_bounds(inputs, stages, gains, len(known) + len(going_on))))]
    return {name: domain.draw(min(max(float(u), 1e-9), 1 - 1e-9)) for (name, domain), u in zip(axes, best, strict=True)}


def _clipped(values: Array) -> Array:
    """Return values without those far out, as of a trial that has diverged: the others would look all alike."""
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
    most = 3.0 * (high - low) or math.inf
    clipped: Array = np.clip(values, middle - most, middle + most)
    return clipped


def _place(axes: Sequence[tuple[str, Domain]], configuration: Mapping[str, Any]) -> list[float]:
    """Return a configuration's numbers as shares of their ranges, which are logarithmic where the domain is."""
    found = []
    for name, domain in axes:
        ends = float(domain.arguments["lower"]), float(domain.arguments["upper"])
        low, high, at = map(math.log if "base" in domain.arguments else float, (*ends, float(configuration[name])))
        found.append((at - low) / (high - low or 1.0))
    return found


def steps(search: Search, lane: LaneState, first: Configurations) -> list[Step]:
    """Return what trials gained, by generation; in the first one since their first report."""
    sign, numbers = -1.0 if search.mode == "min" else 1.0, lane.stages[0].trials
    forks = {number: [one for one in lane.state.history.of(Fork) if one.trial == number] for number in numbers}
    configs, begins, found = {number: first[number] for number in numbers}, dict[int, float](), list[Step]()
    for record in lane.stages:
        ends = dict[int, float]()
        for number in numbers:
            values = [
                sign * report.metrics[search.metric]
                for report in lane.state.trials[number].made
                if report.stage == record.stage and math.isfinite(report.metrics.get(search.metric, math.nan))
            ]
            if values and number not in begins:
                begins[number], values = values[0], values[1:]
            if values:
                ends[number] = values[-1]
                gain, now = (values[-1] - begins[number]) / len(values), configs[number]
                found.append(Step(stage=record.stage, before=begins[number], gain=gain, configuration=now))
        begins |= ends
        ended = dict(begins)
        for number in record.forked:
            if forks[number]:
                taken = forks[number].pop(0)
                configs[number] = taken.configuration
                if taken.parent in ended:
                    begins[number] = ended[taken.parent]
    return found


def _bounds(inputs: Array, stages: Array, gains: Array, seen: int) -> Array:
    """Return the upper confidence bounds of the inputs beyond the first `seen`; `gains` are those of the first ones."""
    known = len(gains)
    squares = ((inputs[:, None, :] - inputs[None, :seen, :]) ** 2).sum(axis=2)
    apart = np.abs(stages[:, None] - stages[None, :seen])

    def fit(length: float, forgets: float, noise: float) -> tuple[float, Array, float]:
        kernel = np.exp(-squares / (2 * length**2)) * (1 - forgets) ** (apart / 2)
        lower = np.linalg.cholesky(kernel[:known, :known] + noise * np.eye(known))
        weights = np.linalg.solve(lower, gains)
        return float(-0.5 * weights @ weights - np.log(np.diag(lower)).sum()), kernel, noise

    _, kernel, noise = max((fit(*chosen) for chosen in product(_LENGTHS, _FORGETS, _NOISES)), key=lambda one: one[0])
    mean = kernel[seen:, :known] @ np.linalg.solve(kernel[:known, :known] + noise * np.eye(known), gains)
    solved = np.linalg.solve(kernel[:seen, :seen] + noise * np.eye(seen), kernel[seen:, :seen].T)
    variance = np.maximum(1.0 - (kernel[seen:, :seen] * solved.T).sum(axis=1), 0.0)
    bounds: Array = mean + _CONFIDENCE * np.sqrt(variance)
    return bounds
