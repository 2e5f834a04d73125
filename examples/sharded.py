"""A small GPT that does not fit one GPU, by a limit that stands for its memory: it trains on gangs of two or four.

It continues sequences such as 3, 8, 13, 18, …: the first two numbers say the step. Run it with `rubberband run
examples/sharded.yaml`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import rubberband

NUMBERS, LENGTH = 32, 16
MEMORY_BYTES = 1_000_000
"""Bytes of a worker for weights, gradients and the states of AdamW: 16 per parameter. The model needs 1.4 MB."""


def sequences(count: int, seed: int) -> TensorDataset:
    """Return sequences that count in a step from 1 to 5, and begin again after 31."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(NUMBERS, (count, 1), generator=generator)
    step = torch.randint(1, 6, (count, 1), generator=generator)
    return TensorDataset((first + step * torch.arange(LENGTH)) % NUMBERS)


class Block(nn.Module):
    """Attention to earlier numbers, and a network for each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        later = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        y = self.before(x)
        x = x + self.attention(y, y, y, attn_mask=later, is_causal=True, need_weights=False)[0]
        out: Tensor = x + self.network(self.after(x))
        return out


class GPT(nn.Module):
    """Numbers in, and the logits of the next ones out."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.numbers, self.places = nn.Embedding(NUMBERS, width), nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, NUMBERS)

    def forward(self, numbers: Tensor) -> Tensor:
        x = self.numbers(numbers) + self.places[: numbers.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class GPTTrial(rubberband.TorchTrial):
    """Configuration: `lr` and `weight_decay`."""

    sharding = "fsdp"
    batch_size = 64
    gradient_clip_norm = 1.0

    def build_model(self, config: Mapping[str, Any]) -> nn.Module:
        return GPT(width=48, layers=3)

    def build_optimizer(self, config: Mapping[str, Any], model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=config["lr"], weight_decay=config["weight_decay"])

    def train_dataset(self, config: Mapping[str, Any]) -> TensorDataset:
        return sequences(1024, seed=0)

    def eval_dataset(self, config: Mapping[str, Any]) -> TensorDataset:
        return sequences(256, seed=1)

    def on_iteration(self, model: nn.Module, iterations: int) -> None:
        bytes_here = 16 * sum(own(each).numel() for each in model.parameters())
        if bytes_here > MEMORY_BYTES:
            raise MemoryError(f"{bytes_here / 1e6:.1f} MB do not fit a worker; set resources.gpus_per_trial.min higher")

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        (numbers,) = batch
        logits, targets = model(numbers[:, :-1]), numbers[:, 1:]
        accuracy = (logits.argmax(-1) == targets).float().mean()
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()), {"accuracy": accuracy}


def own(weights: Any) -> Any:
    """Return what this worker has of a parameter."""
    return weights.to_local() if hasattr(weights, "to_local") else weights
