"""Comparison of fixed and adaptive batches: the same trials twice, and their times to the same accuracy.

    python examples/goodput.py                        # the digits model, two workers, three seeds; about two minutes
    python examples/goodput.py --workers 1 --seeds 5
    python examples/goodput.py --model resnet18       # ResNet-18 on synthetic CIFAR-shaped data; the default on a GPU

Only `batch` of the experiment differs; the user code is the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import torch
from digits import DigitsTrial
from side_by_side import courses, show, train
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
    results = [
        train(trial, workers=asked.workers, trials=asked.seeds, iterations=asked.epochs, batch={"policy": policy})
        for policy in ("fixed", "goodput")
    ]
    show(dict(zip((f"batch of {trial.batch_size}", "adaptive"), map(courses, results), strict=True)))
    sizes = [stretch.batch_size for found in results[1].trials for stretch in found.batches]
    print(f"{'adaptive batches':<18}{min(sizes)} to {max(sizes)} samples")


if __name__ == "__main__":
    main()
