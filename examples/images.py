"""Image classifier with augmentation: 32 x 32 colour pictures of ten shapes, drawn here, and a small residual network.

One iteration is one epoch. Run it with `rubberband run examples/images.yaml`. Two lines change for CIFAR-10, which has
pictures of the same size in ten classes: see `train_dataset` and `eval_dataset`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, pad
from torch.utils.data import Dataset, TensorDataset

import rubberband


def shapes(size: int, seed: int) -> TensorDataset:
    """Return pictures (3 x 32 x 32, in [0, 1]) of shapes in ten classes, at any place, in any colours, with noise."""
    draws = torch.Generator().manual_seed(seed)  # the same pictures every time
    labels = torch.arange(size) % 10
    centre, radius = (
        10 + 12 * torch.rand(2, size, 1, 1, generator=draws),
        6 + 3 * torch.rand(size, 1, 1, generator=draws),
    )
    y = ((torch.arange(32.0)[:, None] - centre[0]) / radius).abs()
    x = ((torch.arange(32.0) - centre[1]) / radius).abs()
    # How far each pixel is from the centre of a disc, a square, a diamond, a cross and a saltire: inside below 1.
    distances = torch.stack(
        [
            (x**2 + y**2).sqrt(),
            torch.maximum(x, y),
            x + y,
            torch.maximum(torch.maximum(x, y), 2.5 * torch.minimum(x, y)),
            torch.maximum(torch.maximum(x, y), 2.5 * (x - y).abs()),
        ]
    )
    distance = distances[labels % 5, torch.arange(size)]
    seen = (distance < 1) & (
        (distance > 0.6) | (labels < 5)[:, None, None]
    )  # five classes are filled, five have a hole
    ground, colour = torch.rand(2, size, 3, 1, 1, generator=draws)
    pictures = torch.where(seen[:, None], 0.5 + colour / 2, ground / 2)
    pictures += 0.2 * torch.randn(pictures.shape, generator=draws)
    return TensorDataset(pictures.clamp(0, 1), labels)


class Augmented(Dataset):
    """Pictures of another dataset, mirrored half of the time and moved by up to `shift` pixels."""

    def __init__(self, pictures: Dataset, shift: int) -> None:
        self.pictures, self.shift = pictures, shift

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        picture, label = self.pictures[index]
        if torch.rand(()) < 0.5:
            picture = picture.flip(-1)
        top, left = torch.randint(2 * self.shift + 1, (2,)).tolist()
        wide = pad(picture, [self.shift] * 4, mode="reflect")
        return wide[:, top : top + 32, left : left + 32], label


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, channels: int, wider: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, wider, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(wider),
            nn.ReLU(),
            nn.Conv2d(wider, wider, 3, padding=1, bias=False),
            nn.BatchNorm2d(wider),
        )
        self.way = nn.Conv2d(channels, wider, 1, stride=2, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(images) + self.way(images))


class ImageTrial(rubberband.TorchTrial):
    """Configuration: `lr`, `weight_decay`, `width` (channels of the first layer) and `shift` (of the augmentation)."""

    batch_size = 64  # over the whole gang; one GPU or eight learn the same
    scheduler_step = "batch"

    def build_model(self, config: Mapping[str, Any]) -> nn.Module:
        if torch.cuda.is_available():  # mixed precision, and the layout that GPUs compute convolutions in
            self.precision, self.channels_last = "bf16", True
        width = config["width"]
        return nn.Sequential(
            nn.Conv2d(3, width, 3, stride=2, padding=1),
            nn.ReLU(),
            Block(width, 2 * width),
            Block(2 * width, 4 * width),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4 * width, 10),
        )

    def build_optimizer(self, config: Mapping[str, Any], model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=config["lr"], weight_decay=config["weight_decay"])

    def build_scheduler(
        self, config: Mapping[str, Any], optimizer: torch.optim.Optimizer, total_steps: int
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """Return one cycle over a whole trial, however many stages it trains in."""
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=config["lr"], total_steps=total_steps)

    def train_dataset(self, config: Mapping[str, Any]) -> Dataset:
        # CIFAR-10: Augmented(torchvision.datasets.CIFAR10("data", train=True, transform=ToTensor()), config["shift"])
        return Augmented(shapes(2000, seed=1), config["shift"])

    def eval_dataset(self, config: Mapping[str, Any]) -> Dataset:
        # CIFAR-10: torchvision.datasets.CIFAR10("data", train=False, transform=ToTensor())
        return shapes(500, seed=2)

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the mean loss of a batch, and its accuracy, which is reported too."""
        images, labels = batch
        scores = model(images)
        right = (scores.argmax(1) == labels).float().mean()
        return cross_entropy(scores, labels, label_smoothing=0.1 * model.training), {"accuracy": right}
