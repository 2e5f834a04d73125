"""Trials on samples of many lengths that pretend to run out of memory, as those on a GPU do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import Dataset

import rubberband

WIDTH = 400
"""Of a layer: its weights fill a bucket of DistributedDataParallel, so that a model has several."""
SHORTEST, LONGEST = 4, 40


class Memory:
    """Limit of the elements that the worker of one rank can hold; `at` says in which part of a pass they count."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.elements = config.get("memory", 10**9)
        self.at = config.get("at", "loss")
        self.rank = config.get("rank", 0)
        self.most = 0

    def take(self, elements: int, at: str) -> None:
        """Raises torch.OutOfMemoryError if there are too many."""
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        if at != self.at or rank != self.rank:
            return
        if elements > self.elements:
            raise torch.OutOfMemoryError("CUDA out of memory (pretended)")
        self.most = max(self.most, elements)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, memory: Memory, elements: int) -> torch.Tensor:
        ctx.memory, ctx.elements = memory, elements
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.memory.take(ctx.elements, "backward")
        return gradient, None, None


class Model(torch.nn.Module):
    """Three wide layers on the mean of a sequence; out of memory between the last two, if at all."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self.memory = memory
        self.first = torch.nn.Linear(1, WIDTH)
        self.second = torch.nn.Linear(WIDTH, WIDTH)
        self.third = torch.nn.Linear(WIDTH, WIDTH)
        self.last = torch.nn.Linear(WIDTH, 1)

    def forward(self, sequences: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(sequences.mean(1, keepdim=True)))
        self.memory.take(sequences.numel(), "forward")
        hidden = torch.tanh(self.second(hidden))
        if self.memory.at == "backward":
            hidden = _Backward.apply(hidden, self.memory, sequences.numel())
        result: torch.Tensor = self.last(torch.tanh(self.third(hidden)))
        return result


class Sequences(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Sequences whose length grows with their index."""

    def __init__(self, num: int) -> None:
        self.values = torch.randn(num, LONGEST, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        length = SHORTEST + index * (LONGEST - SHORTEST) // (len(self) - 1)
        sequence = self.values[index, :length]
        return sequence, sequence.mean().sin() + 0.5 * self.values[index, -1]


class Growing(rubberband.TorchTrial):
    """A regression on these sequences, padded to the longest of a micro-batch."""

    batch_size = 16
    num_workers = 0

    def build_model(self, config: Mapping[str, Any]) -> torch.nn.Module:
        self.memory = Memory(config)
        return Model(self.memory).double()

    def build_optimizer(self, config: Mapping[str, Any], model: torch.nn.Module) -> torch.optim.Optimizer:
        if config.get("optimizer") == "adam":
            return torch.optim.AdamW(model.parameters(), lr=1e-3)
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def train_dataset(self, config: Mapping[str, Any]) -> Dataset[Any]:
        return Sequences(config.get("samples", 48))

    def collate(self, samples: list[Any]) -> Any:
        # The mean over a padded sequence would depend on the others in its micro-batch.
        longest = max(len(sequence) for sequence, _ in samples)
        rows = [sequence.mean().expand(longest) for sequence, _ in samples]
        return torch.stack(rows), torch.stack([target for _, target in samples])

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        sequences, targets = batch
        self.memory.take(sequences.numel(), "before")
        found = model(sequences).squeeze(1)
        self.memory.take(sequences.numel(), "loss")
        return torch.nn.functional.mse_loss(found, targets)


class Narrow(Growing):
    """The same in micro-batches of at most four samples."""

    max_batch_size_per_gpu = 4


class Counting(Growing):
    """The mean over what the samples count, which is unequal; with a metric."""

    def loss(self, model: torch.nn.Module, batch: Any) -> Any:
        sequences, targets = batch
        self.memory.take(sequences.numel(), "before")
        squares = (model(sequences).squeeze(1) - targets).square()
        loss = (squares * targets.abs()).sum() / targets.abs().sum()
        self.memory.take(sequences.numel(), "loss")
        return loss, {"twice": 2.0 * loss}

    def weight(self, batch: Any) -> torch.Tensor:
        targets: torch.Tensor = batch[1]
        return targets.abs().sum()


class Partly(Growing):
    """The same with a layer that the loss does not use."""

    find_unused_parameters = True

    def build_model(self, config: Mapping[str, Any]) -> torch.nn.Module:
        model = super().build_model(config)
        model.idle = torch.nn.Linear(WIDTH, 1).double()
        return model
