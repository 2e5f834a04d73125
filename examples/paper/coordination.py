"""A small real training on unequal workers under BSP, ASP, SSP and LB-BSP: time is virtual, gradients are not.

Each worker takes as long as its GPU's line says. Handwritten digits stand for the paper's images, and a network of one
hidden layer for its own.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

import numpy as np

from rubberband.planner.balancing import Look, ShareLimits, make_balancer
from rubberband.planner.balancing.speed_balancer import Floats
from rubberband.values.balance import Balance, BalancePolicy

Scheme = Literal["BSP", "SSP", "ASP", "LB-BSP"]
SCHEMES: tuple[Scheme, ...] = ("BSP", "SSP", "ASP", "LB-BSP")
HIDDEN, RATE, MOMENTUM = 32, 0.015, 0.9
"""Units, the learning rate of one worker's gradient (a step of all adds up theirs), and the momentum of the server."""
TRAINED = 1400
"""Images to train on; the other 397 are for tests."""
SSP_BOUND = 5


@dataclass(frozen=True, slots=True)
class Gpu:
    """t = a + b max(x, s), as the curves of Figure 4 are drawn."""

    name: str
    base_s: float
    per_sample_s: float
    saturation: int

    def time_s(self, share: float) -> float:
        """Return the seconds of a batch."""
        return self.base_s + self.per_sample_s * max(share, self.saturation)


class Step(NamedTuple):
    """Batch sizes of the workers, and the seconds that each takes; the step takes as long as the slowest."""

    shares: tuple[int, ...]
    times_s: tuple[float, ...]


def balanced(
    policy: BalancePolicy, gpus: Callable[[int], Sequence[Gpu]], batch_size: int, noise: float = 0.0
) -> Iterator[Step]:
    """Yield the steps of one of the product's balancers, which sees times with this relative noise."""
    random, workers = np.random.default_rng(1), len(gpus(0))
    balancer, limits = make_balancer(Balance(policy=policy), "cuda", workers), ShareLimits(caps=(batch_size,) * workers)
    for number in itertools.count():
        shares = balancer.shares(batch_size, limits)
        times_s = tuple(gpu.time_s(share) for gpu, share in zip(gpus(number), shares, strict=True))
        yield Step(shares, times_s)
        seen_s = np.asarray(times_s) * np.exp(noise * random.normal(size=workers))
        balancer.observe(Look(shares=shares, compute_s=tuple(seen_s.tolist())))


class Point(NamedTuple):
    """Accuracy on the test images after a number of updates (gradients of workers)."""

    updates: float
    seconds: float
    accuracy: float


def first(course: Sequence[Point], accuracy: float) -> Point:
    """Return when an accuracy is reached; infinite if it is not."""
    return next((each for each in course if each.accuracy >= accuracy), Point(np.inf, np.inf, accuracy))


@cache
def digits() -> tuple[Floats, Floats]:
    """Return the images, with a 1 for the bias, and the labels (one-hot)."""
    from sklearn.datasets import load_digits  # slow to import

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    return np.column_stack([images[order] / 16.0, np.ones(len(images))]), np.eye(10)[labels[order]]


class Model:
    """Parameters in one vector, their gradient on a batch, and their accuracy."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)
        self.parameters = self._random.normal(scale=0.1, size=(64 + 1) * HIDDEN + (HIDDEN + 1) * 10)
        self._velocity = np.zeros_like(self.parameters)
        self._order, self._at = self._random.permutation(TRAINED), 0

    def step(self, gradient: Floats) -> None:
        """Apply a gradient."""
        self._velocity = MOMENTUM * self._velocity + gradient
        self.parameters = self.parameters - RATE * self._velocity

    @staticmethod
    def _forward(parameters: Floats, inputs: Floats) -> tuple[Floats, Floats, Floats]:
        """Return the hidden units, with a 1 for the bias, the weights behind them, and the scores."""
        cut = (64 + 1) * HIDDEN
        first, second = parameters[:cut].reshape(65, HIDDEN), parameters[cut:].reshape(HIDDEN + 1, 10)
        hidden = np.column_stack([np.tanh(inputs @ first), np.ones(len(inputs))])
        return hidden, second, hidden @ second

    def gradient(self, parameters: Floats, size: int) -> Floats:
        """Return the gradient of the mean cross-entropy on the next samples of one order for all workers."""
        if self._at + size > TRAINED:
            self._order, self._at = self._random.permutation(TRAINED), 0
        self._at += size
        inputs, targets = (each[self._order[self._at - size : self._at]] for each in digits())
        hidden, second, scores = self._forward(parameters, inputs)
        shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        error = (shares / shares.sum(axis=1, keepdims=True) - targets) / size
        active = hidden[:, :-1]
        behind = (error @ second[:-1].T) * (1.0 - active * active)
        return np.concatenate([(inputs.T @ behind).ravel(), (hidden.T @ error).ravel()])

    def after(self, updates: int, seconds: float) -> Point:
        """Return the share of test images that are classified correctly."""
        inputs, targets = (each[TRAINED:] for each in digits())
        scores = self._forward(self.parameters, inputs)[2]
        return Point(updates, seconds, float((scores.argmax(axis=1) == targets.argmax(axis=1)).mean()))


def train(scheme: Scheme, gpus: Sequence[Gpu], batch: int, updates: int) -> list[Point]:
    """Train until this number of gradients is applied; each worker begins with `batch` samples."""
    if scheme in ("ASP", "SSP"):
        return _stale(gpus, batch, updates, SSP_BOUND if scheme == "SSP" else updates)
    model, seconds, found = Model(), 0.0, list[Point]()
    steps = balanced("auto" if scheme == "LB-BSP" else "equal", lambda step: gpus, batch * len(gpus))
    for done in range(len(gpus), updates + 1, len(gpus)):
        shares, times_s = next(steps)
        model.step(sum(size / batch * model.gradient(model.parameters, size) for size in shares if size))
        seconds += max(times_s)
        found.append(model.after(done, seconds))
    return found


def _stale(gpus: Sequence[Gpu], batch: int, updates: int, bound: int) -> list[Point]:
    """Apply each gradient when it is there, to parameters that have moved on since the worker took its copy."""
    model, found = Model(), list[Point]()
    copies, done, waiting = [model.parameters] * len(gpus), [0] * len(gpus), list[int]()
    queue = [(gpu.time_s(batch), worker) for worker, gpu in enumerate(gpus)]
    heapq.heapify(queue)
    for update in range(1, updates + 1):
        seconds, worker = heapq.heappop(queue)
        model.step(model.gradient(copies[worker], batch))
        done[worker] += 1
        waiting.append(worker)
        for each in [one for one in waiting if done[one] - min(done) < bound]:
            waiting.remove(each)
            copies[each] = model.parameters
            heapq.heappush(queue, (seconds + gpus[each].time_s(batch), each))
        if update % len(gpus) == 0:
            found.append(model.after(update, seconds))
    return found
