"""Learning curves of small networks that are really trained, all trials of a search at once. Not a program of its own.

A search is a table (trials, iterations) of the metric on held-out data: each trial is trained to the end, so that any
scheduler's course can be read off it. An iteration is an epoch. A seed draws the data, the configurations and the
first weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """All curves of a search."""

    family: str
    mode: Literal["max", "min"]
    curves: Floats
    """(trials, iterations); not finite after a trial has diverged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Data:
    train: tuple[torch.Tensor, torch.Tensor]
    test: tuple[torch.Tensor, torch.Tensor]
    classes: int
    """0: the target is a number."""


def searched(family: str, seed: int, *, trials: int = 27, iterations: int = 81) -> Searched:
    """Train a search of a family."""
    mode, make = FAMILIES[family]
    torch.manual_seed(seed)
    return Searched(family=family, mode=mode, curves=make(np.random.default_rng(seed), trials, iterations))


def _scaling(rng: np.random.Generator, trials: int, iterations: int) -> Floats:
    """The curves of examples/scaling.py."""
    floor, decay = rng.uniform(0.0, 0.5, (trials, 1)), rng.uniform(0.3, 1.0, (trials, 1))
    return np.asarray(floor + np.arange(1.0, iterations + 1.0) ** -decay)


def _conv_digits(rng: np.random.Generator, trials: int, iterations: int) -> Floats:
    """The network and the space of examples/digits.py, one epoch an iteration."""
    from examples.digits import DigitsTrial, load_splits

    train, test = (split.tensors for split in load_splits())
    trial, found = DigitsTrial(), np.full((trials, iterations), np.nan)
    for number in range(trials):
        config = {
            "lr": _log(rng, 1e-3, 0.3), "momentum": rng.uniform(0.5, 0.95), "weight_decay": _log(rng, 1e-6, 1e-3)
        }  # fmt: skip
        model = trial.build_model({**config, "width": 6})
        optimizer = trial.build_optimizer(config, model)
        for at in range(iterations):
            for batch in torch.randperm(len(train[0])).split(64):
                optimizer.zero_grad()
                trial.loss(model, (train[0][batch], train[1][batch])).backward()
                optimizer.step()
            with torch.no_grad():
                found[number, at] = (model(test[0]).argmax(1) == test[1]).double().mean()
    return found


def _log(rng: np.random.Generator, low: float, high: float) -> float:
    return float(np.exp(rng.uniform(math.log(low), math.log(high))))


def _networks(
    data_of: Callable[[np.random.Generator], _Data], metric: str, *, decays: bool = False
) -> Callable[[np.random.Generator, int, int], Floats]:
    """Networks of one hidden layer: all trials in one batch of matrices. `decays`: the learning rate is a cosine's."""

    def make(rng: np.random.Generator, trials: int, iterations: int) -> Floats:
        data = data_of(rng)
        (x, y), most = data.train, 64
        out = max(1, data.classes)
        lr = torch.tensor([_log(rng, 3e-3, 1.0) for _ in range(trials)]).view(-1, 1, 1)
        momentum = torch.tensor(rng.uniform(0.5, 0.95, trials), dtype=torch.float32).view(-1, 1, 1)
        decay = torch.tensor([_log(rng, 1e-6, 1e-2) for _ in range(trials)]).view(-1, 1, 1)
        width = torch.tensor([int(_log(rng, 4, most)) for _ in range(trials)])
        mask = (torch.arange(most) < width.view(-1, 1)).float().unsqueeze(1)
        shapes = [(x.shape[1], most), (1, most), (most, out), (1, out)]
        weights = [torch.randn(trials, *shape) * shape[0] ** -0.5 for shape in shapes]
        weights[1].zero_(), weights[3].zero_()
        speeds = [torch.zeros_like(weight) for weight in weights]
        found = np.full((trials, iterations), np.nan)
        for at in range(iterations):
            rate = lr * (0.5 + 0.5 * math.cos(math.pi * at / iterations)) if decays else lr
            for batch in torch.randperm(len(x)).split(64):
                for weight in weights:
                    weight.requires_grad_(True)
                loss = _losses(_scores(weights, x[batch], mask), y[batch], data.classes).sum()
                slopes = torch.autograd.grad(loss, weights)
                with torch.no_grad():
                    for weight, speed, slope in zip(weights, speeds, slopes, strict=True):
                        speed.mul_(momentum).add_(slope + decay * weight)
                        weight.requires_grad_(False).sub_(rate * speed)
            with torch.no_grad():
                found[:, at] = _metrics(_scores(weights, data.test[0], mask), data.test[1], metric, data.classes)
        return found

    return make


def _scores(weights: list[torch.Tensor], x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    hidden = torch.relu(x @ weights[0] + weights[1]) * mask
    return torch.baddbmm(weights[3], hidden, weights[2])


def _losses(scores: torch.Tensor, y: torch.Tensor, classes: int) -> torch.Tensor:
    """The mean loss of each trial."""
    if not classes:
        return ((scores.squeeze(2) - y) ** 2).mean(1)
    labels = y.expand(scores.shape[0], -1)
    return nn.functional.cross_entropy(scores.transpose(1, 2), labels, reduction="none").mean(1)


def _metrics(scores: torch.Tensor, y: torch.Tensor, metric: str, classes: int) -> Floats:
    found = (scores.argmax(2) == y).double().mean(1) if metric == "accuracy" else _losses(scores, y, classes)
    bad = ~torch.isfinite(scores).all(2).all(1)
    return np.where(bad.numpy(), np.nan, found.double().numpy())


def _split(rng: np.random.Generator, x: Floats, y: Any, classes: int, noise: float = 0.0) -> _Data:
    """A random third is held out; of the labels in training a share of `noise` is drawn at random."""
    x = (x - x.mean(0)) / (x.std(0) + 1e-9)
    order = rng.permutation(len(x))[:1200]
    cut = len(order) // 3
    target = np.array(y)
    if noise:
        wrong = rng.random(len(target)) < noise
        wrong[order[:cut]] = False
        target[wrong] = rng.integers(0, classes, wrong.sum())
    kind = torch.long if classes else torch.float32

    def part(rows: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor(x[rows], dtype=torch.float32), torch.tensor(target[rows], dtype=kind)

    return _Data(train=part(order[cut:]), test=part(order[:cut]), classes=classes)


def _digits(noise: float = 0.0) -> Callable[[np.random.Generator], _Data]:
    def make(rng: np.random.Generator) -> _Data:
        from sklearn.datasets import load_digits

        return _split(rng, *load_digits(return_X_y=True), classes=10, noise=noise)

    return make


def _cancer(rng: np.random.Generator) -> _Data:
    from sklearn.datasets import load_breast_cancer

    return _split(rng, *load_breast_cancer(return_X_y=True), classes=2)


def _teacher(rng: np.random.Generator) -> _Data:
    """A target that a wide random network computes, with noise."""
    x = rng.normal(size=(900, 16))
    y = np.maximum(0.0, x @ rng.normal(size=(16, 24)) / 4.0) @ rng.normal(size=24)
    return _split(rng, x, y / y.std() + 0.1 * rng.normal(size=900), classes=0)


def _blobs(rng: np.random.Generator) -> _Data:
    from sklearn.datasets import make_classification

    x, y = make_classification(
        1200,
        20,
        n_informative=12,
        n_classes=4,
        n_clusters_per_class=3,
        flip_y=0.02,
        random_state=int(rng.integers(1e6)),
    )
    return _split(rng, x, y, classes=4)


FAMILIES: Mapping[str, tuple[Literal["max", "min"], Callable[[np.random.Generator, int, int], Floats]]] = {
    "digits": ("max", _conv_digits),
    "scaling": ("min", _scaling),
    "digits loss": ("min", _networks(_digits(), "loss")),
    "noisy labels": ("max", _networks(_digits(0.3), "accuracy")),
    "blobs": ("max", _networks(_blobs, "accuracy")),
    "blobs cosine": ("max", _networks(_blobs, "accuracy", decays=True)),
    "cancer": ("min", _networks(_cancer, "loss")),
    "teacher": ("min", _networks(_teacher, "loss")),
}
"""Family -> the metric's mode, and how its curves are made from (chance, trials, iterations)."""
