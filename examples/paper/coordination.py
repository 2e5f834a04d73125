"""A small real training on unequal workers under BSP, ASP, SSP and LB-BSP: time is virtual, gradients are not.

Each worker takes as long as its GPU's line says. Handwritten digits stand for the paper's images, and a network of one
hidden layer for its own.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from rubberband.planner.balancing import Look, ShareLimits, make_balancer
from rubberband.planner.balancing.speed_balancer import Floats
from rubberband.values.balance import Balance

Scheme = Literal["BSP", "SSP", "ASP", "LB-BSP"]
SCHEMES: tuple[Scheme, ...] = ("BSP", "SSP", "ASP", "LB-BSP")
HIDDEN, RATE, MOMENTUM = 32, 0.015, 0.9
"""Units, the learning rate of one worker's gradient (a step of all adds up theirs), and the momentum of the server."""
SSP_BOUND = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """t = a + b max(x, s), as the curves of Figure 4 are drawn."""

    name: str
    base_s: float
    per_sample_s: float
    saturation: int

    def time_s(self, share: float) -> float:
        """Return the seconds of a batch."""
        return self.base_s + self.per_sample_s * max(share, self.saturation)


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    """Accuracy on the test images after a number of updates (gradients of workers), and after a time in seconds."""

    updates: Sequence[int]
    seconds: Sequence[float]
    accuracy: Sequence[float]

    def first(self, target: float) -> tuple[float, float]:
        """Return updates and seconds until the target is reached; infinite if it is not."""
        for updates, seconds, accuracy in zip(self.updates, self.seconds, self.accuracy, strict=True):
            if accuracy >= target:
                return float(updates), seconds
        return float("inf"), float("inf")


@lru_cache
def digits() -> tuple[Floats, Floats, Floats, Floats]:
    """Return images and labels (one-hot) to train on, and to test with."""
    from sklearn.datasets import load_digits  # slow to import

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    inputs, targets = images[order] / 16.0, np.eye(10)[labels[order]]
    return inputs[:1400], targets[:1400], inputs[1400:], targets[1400:]


class Model:
    """Parameters in one vector, their gradient on a batch, and their accuracy."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.random = random
        self.parameters = random.normal(scale=0.1, size=(64 + 1) * HIDDEN + (HIDDEN + 1) * 10)
        self._velocity = np.zeros_like(self.parameters)
        self._order, self._at = random.permutation(1400), 0

    def step(self, gradient: Floats) -> None:
        """Apply a gradient."""
        self._velocity = MOMENTUM * self._velocity + gradient
        self.parameters = self.parameters - RATE * self._velocity

    def batch(self, size: int) -> np.ndarray:
        """Return the next samples of one order for all workers."""
        if self._at + size > len(self._order):
            self._order, self._at = self.random.permutation(1400), 0
        self._at += size
        return self._order[self._at - size : self._at]

    @staticmethod
    def _layers(parameters: Floats) -> tuple[Floats, Floats]:
        cut = (64 + 1) * HIDDEN
        return parameters[:cut].reshape(65, HIDDEN), parameters[cut:].reshape(HIDDEN + 1, 10)

    def gradient(self, parameters: Floats, rows: np.ndarray) -> Floats:
        """Return the gradient of the mean cross-entropy."""
        inputs, targets, _, _ = digits()
        first, second = self._layers(parameters)
        given = np.column_stack([inputs[rows], np.ones(len(rows))])
        active = np.tanh(given @ first)
        hidden = np.column_stack([active, np.ones(len(rows))])
        scores = hidden @ second
        shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        error = (shares / shares.sum(axis=1, keepdims=True) - targets[rows]) / len(rows)
        behind = (error @ second[:-1].T) * (1.0 - active * active)
        return np.concatenate([(given.T @ behind).ravel(), (hidden.T @ error).ravel()])

    def accuracy(self) -> float:
        """Return the share of test images that are classified correctly."""
        _, _, inputs, targets = digits()
        first, second = self._layers(self.parameters)
        active = np.tanh(np.column_stack([inputs, np.ones(len(inputs))]) @ first)
        scores = np.column_stack([active, np.ones(len(inputs))]) @ second
        return float((scores.argmax(axis=1) == targets.argmax(axis=1)).mean())


def train(scheme: Scheme, gpus: Sequence[Gpu], batch: int, updates: int, seed: int = 0) -> Learnt:
    """Train until this number of gradients is applied; each worker begins with `batch` samples."""
    if scheme in ("ASP", "SSP"):
        return _stale(gpus, batch, updates, SSP_BOUND if scheme == "SSP" else updates, seed)
    model, seconds, found = Model(seed), 0.0, Learnt(updates=[], seconds=[], accuracy=[])
    balancer = make_balancer(Balance(policy="auto"), "cuda", len(gpus))
    whole = batch * len(gpus)
    for step in range(updates // len(gpus)):
        shares = balancer.shares(whole, ShareLimits(caps=(whole,) * len(gpus)))
        shares = shares if scheme == "LB-BSP" else (batch,) * len(gpus)
        times_s = tuple(gpu.time_s(share) for gpu, share in zip(gpus, shares, strict=True))
        balancer.observe(Look(shares=shares, compute_s=times_s))
        parts = [(size / batch, model.gradient(model.parameters, model.batch(size))) for size in shares if size]
        model.step(sum(weight * each for weight, each in parts))
        seconds += max(times_s)
        _note(found, model, (step + 1) * len(gpus), seconds)
    return found


def _stale(gpus: Sequence[Gpu], batch: int, updates: int, bound: int, seed: int) -> Learnt:
    """Apply each gradient when it is there, to parameters that have moved on since the worker took its copy."""
    model, found = Model(seed), Learnt(updates=[], seconds=[], accuracy=[])
    copies, done = [model.parameters] * len(gpus), [0] * len(gpus)
    queue = [(gpu.time_s(batch), worker) for worker, gpu in enumerate(gpus)]
    heapq.heapify(queue)
    waiting: list[int] = []
    for update in range(1, updates + 1):
        seconds, worker = heapq.heappop(queue)
        model.step(model.gradient(copies[worker], model.batch(batch)))
        done[worker] += 1
        waiting.append(worker)
        for each in [one for one in waiting if done[one] - min(done) < bound]:
            waiting.remove(each)
            copies[each] = model.parameters
            heapq.heappush(queue, (seconds + gpus[each].time_s(batch), each))
        if update % len(gpus) == 0:
            _note(found, model, update, seconds)
    return found


def _note(found: Learnt, model: Model, updates: int, seconds: float) -> None:
    for values, value in zip(
        (found.updates, found.seconds, found.accuracy), (updates, seconds, model.accuracy()), strict=True
    ):
        values.append(value)  # type: ignore[attr-defined]
