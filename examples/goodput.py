"""Comparison of fixed and adaptive batches: the same trials twice, and their times to the same accuracy.

    python examples/goodput.py                        # the digits model, two workers, three seeds; about two minutes
    python examples/goodput.py --workers 1 --seeds 5
    python examples/goodput.py --model resnet18       # ResNet-18 on synthetic CIFAR-shaped data; the default on a GPU

Only `batch` of the experiment differs; the user code is the same.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import torch
from digits import DigitsTrial
from torch import nn
from torch.utils.data import TensorDataset

import rubberband


class PlainDigits(DigitsTrial):
    """Digits model with one fixed configuration; an iteration is one epoch."""

    batch_size = 16
    samples_per_iteration = 1437

    def build_model(self, config: Mapping[str, Any]) -> nn.Module:
        return super().build_model({"width": 8})

    def build_optimizer(self, config: Mapping[str, Any], model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)


class Block(nn.Module):
    """Two convolutions and a shortcut (He et al. 2016)."""

    def __init__(self, before: int, channels: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, channels, 3, stride, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, 1, 1, bias=False),
            nn.BatchNorm2d(channels),
        )
        same = stride == 1 and before == channels
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(before, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(images) + self.shortcut(images))


class ResNetTrial(rubberband.TorchTrial):
    """ResNet-18 for images of 32 x 32, on noisy copies of one random image per class."""

    batch_size = 128
    num_images = 16384

    def build_model(self, config: Mapping[str, Any]) -> nn.Module:
        widths = [64, 64, 128, 128, 256, 256, 512, 512]
        blocks = [
            Block(before, width, 2 if width != before else 1)
            for before, width in zip([64, *widths], widths, strict=False)
        ]
        stem = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
        return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))

    def build_optimizer(self, config: Mapping[str, Any], model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)

    def train_dataset(self, config: Mapping[str, Any]) -> TensorDataset:
        return synthetic_images(self.num_images, seed=0)

    def eval_dataset(self, config: Mapping[str, Any]) -> TensorDataset:
        return synthetic_images(2048, seed=1)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(model(images), labels)

    def evaluate(self, model: nn.Module, loader: Any) -> dict[str, float]:
        """Return the share of test images that are classified correctly."""
        correct = sum((model(images).argmax(1) == labels).sum().item() for images, labels in loader)
        return {"accuracy": correct / sum(loader.sizes)}


def synthetic_images(num_images: int, seed: int) -> TensorDataset:
    """Return images of 3 x 32 x 32 in ten classes: the image of the class plus noise of three times its size."""
    classes = torch.randn(10, 3, 32, 32, generator=torch.Generator().manual_seed(7))
    generator = torch.Generator().manual_seed(100 + seed)
    labels = torch.randint(10, (num_images,), generator=generator)
    return TensorDataset(classes[labels] + 3.0 * torch.randn(num_images, 3, 32, 32, generator=generator), labels)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Training time and accuracy of a trial after each iteration, and its batch sizes."""

    seconds: Sequence[float]
    accuracy: Sequence[float]
    batches: Sequence[int]

    def seconds_to(self, accuracy: float) -> float:
        """Return the time at which it first reached `accuracy`."""
        return next(s for s, found in zip(self.seconds, self.accuracy, strict=True) if found >= accuracy)


def train(
    trial: type[rubberband.TorchTrial], batch: Mapping[str, Any], *, workers: int, seeds: int, epochs: int
) -> list[Curve]:
    """Train one trial per seed, one after another, on gangs of `workers` workers."""
    with tempfile.TemporaryDirectory() as home:
        result = rubberband.tune(
            trial,
            home=home,
            name=f"goodput-{batch['policy']}",
            search={
                "space": {"constant": 0},
                "scheduler": {"type": "stages", "stages": [{"trials": seeds, "iterations": epochs}]},
                "metric": "accuracy",
                "mode": "max",
            },
            resources={
                "provider": "local",
                "gpus_per_instance": workers,
                "price_per_hour": 0,
                "max_instances": 1,
                "gpus_per_trial": {"min": workers, "max": workers},
            },
            profile={"seconds_per_iteration": {workers: 1.0}},
            batch=dict(batch),
        )
    return [curve(result, trial) for trial in result.trials if trial.curve]


def curve(result: rubberband.Result, trial: Any) -> Curve:
    """Return the learning curve of a trial over its training time, without start-up."""
    began_s = min(use.training_s for use in result.busy if use.trial == trial.trial and use.training_s is not None)
    return Curve(
        seconds=[at_s - began_s for at_s, _, _ in trial.curve],
        accuracy=[metrics["accuracy"] for _, _, metrics in trial.curve],
        batches=[stretch.batch_size for stretch in trial.batches],
    )


def show(fixed: Sequence[Curve], adaptive: Sequence[Curve], initial: int) -> None:
    """Print the learning curves side by side (means over the seeds), and the time to the accuracy that all reach."""
    kinds = {f"fixed batch of {initial}": fixed, "adaptive batch": adaptive}
    print(" " * 9, *(f"{name:>22}" for name in kinds), sep=" | ")
    print("iteration", *[f"{'seconds':>10} {'accuracy':>11}"] * 2, sep=" | ")
    for at in range(len(fixed[0].seconds)):
        print(
            f"{at + 1:9}", *(f"{seconds_at(c, at):10.2f} {accuracy_at(c, at):11.4f}" for c in kinds.values()), sep=" | "
        )
    target = 0.995 * min(max(curve.accuracy) for curve in (*fixed, *adaptive))
    reached_s = [median(curve.seconds_to(target) for curve in curves) for curves in kinds.values()]
    whole_s, ends = ([of(curves, -1) for curves in kinds.values()] for of in (seconds_at, accuracy_at))
    sizes = [size for curve in adaptive for size in curve.batches]
    print(f"final accuracy    {ends[0]:.4f} fixed, {ends[1]:.4f} adaptive ({100 * (ends[1] - ends[0]):+.2f} points)")
    print(f"whole training    {versus(*whole_s)}")
    print(f"to {target:.3f} accuracy {versus(*reached_s)}, median of the seeds")
    print(f"adaptive batches  {min(sizes)} to {max(sizes)} samples")


def seconds_at(curves: Sequence[Curve], at: int) -> float:
    """Return the mean over the seeds."""
    return fmean(curve.seconds[at] for curve in curves)


def accuracy_at(curves: Sequence[Curve], at: int) -> float:
    """Return the mean over the seeds."""
    return fmean(curve.accuracy[at] for curve in curves)


def versus(fixed_s: float, adaptive_s: float) -> str:
    """Return two times and their ratio as a phrase."""
    return f"{fixed_s:.2f} s fixed, {adaptive_s:.2f} s adaptive ({fixed_s / adaptive_s:.2f} times as fast)"


def main() -> None:
    """Read the command line, train, and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    has_gpu = torch.cuda.is_available()
    parser.add_argument("--model", choices=["digits", "resnet18"], default="resnet18" if has_gpu else "digits")
    parser.add_argument("--workers", type=int, default=torch.cuda.device_count() or 2, help="workers (GPUs) of a trial")
    parser.add_argument("--seeds", type=int, default=3, help="trials of each kind, which differ in their seeds only")
    parser.add_argument("--epochs", type=int, default=20, help="statistical epochs of each trial")
    asked = parser.parse_args()
    trial = PlainDigits if asked.model == "digits" else ResNetTrial
    numbers = {"workers": asked.workers, "seeds": asked.seeds, "epochs": asked.epochs}
    fixed = train(trial, {"policy": "fixed"}, **numbers)
    adaptive = train(trial, {"policy": "goodput"}, **numbers)
    show(fixed, adaptive, trial.batch_size)


if __name__ == "__main__":
    main()
