"""Handwritten digits: 1,797 images that come with scikit-learn, and a small convolutional network.

One iteration is three epochs of the training split. Run it with `rubberband run examples/digits.yaml`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import TensorDataset

import rubberband


def load_splits() -> tuple[TensorDataset, TensorDataset]:
    """Return 1,437 training and 360 test images of 8 x 8 pixels in [0, 1], always the same."""
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().div(16.0).unsqueeze(1)
    labels = torch.from_numpy(digits.target).long()
    train, test = train_test_split(range(len(labels)), test_size=0.2, random_state=0, stratify=digits.target)
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


class DigitsTrial(rubberband.TorchTrial):
    """Configuration: `lr`, `momentum`, `weight_decay`, and optionally `width` (channels of the first layer)."""

    batch_size = 64
    samples_per_iteration = 3 * 1437

    def build_model(self, config: Mapping[str, Any]) -> nn.Module:
        width = config.get("width", 12)
        return nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * width * 4 * 4, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )

    def build_optimizer(self, config: Mapping[str, Any], model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            model.parameters(), lr=config["lr"], momentum=config["momentum"], weight_decay=config["weight_decay"]
        )

    def train_dataset(self, config: Mapping[str, Any]) -> TensorDataset:
        return load_splits()[0]

    def eval_dataset(self, config: Mapping[str, Any]) -> TensorDataset:
        return load_splits()[1]

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(model(images), labels)

    def evaluate(self, model: nn.Module, loader: Any) -> dict[str, float]:
        """Return accuracy (share of test images, 0 to 1) and mean loss on the test split."""
        correct, loss = 0.0, 0.0
        for images, labels in loader:
            scores = model(images)
            correct += (scores.argmax(dim=1) == labels).sum().item()
            loss += nn.functional.cross_entropy(scores, labels, reduction="sum").item()
        total = sum(loader.sizes)
        return {"accuracy": correct / total, "loss": loss / total}
