"""ResNet-18 for 32 x 32 images and a small GPT, each as a trial and as a plain PyTorch loop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import rubberband
from rubberband.executor import Segment, TorchRunner
from rubberband.executor import WorkerGang as Gang

CLASSES = 10


class Block(nn.Module):
    """Two convolutions beside a shortcut (He et al. 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, images: Tensor) -> Tensor:
        found = functional.relu(self.first_norm(self.first(images)))
        return functional.relu(self.second_norm(self.second(found)) + self.shortcut(images))


class ResNet18(nn.Module):
    """For images of 32 x 32; 64 channels in its first blocks where `width` is 64."""

    def __init__(self, width: int) -> None:
        super().__init__()
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.blocks = nn.Sequential(
            *(
                Block(widths[at + second], widths[at + 1], 1 if second or at == 0 else 2)
                for at in range(4)
                for second in (0, 1)
            )
        )
        self.head = nn.Linear(widths[-1], CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images)).mean(dim=(2, 3)))


class Layer(nn.Module):
    """Causal self-attention and a perceptron, each after a norm (GPT-2)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, tokens: Tensor) -> Tensor:
        batch, length, width = tokens.shape
        parts = self.attention(self.attention_norm(tokens)).reshape(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        tokens = tokens + self.out(found.transpose(1, 2).reshape(batch, length, width))
        return tokens + self.perceptron(self.norm(tokens))


class Gpt(nn.Module):
    """A small GPT over `letters`."""

    def __init__(self, letters: int, length: int, width: int, layers: int) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(letters, width), nn.Embedding(length, width)
        self.layers = nn.Sequential(*(Layer(width, max(1, width // 64)) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, letters, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        return self.head(self.norm(self.layers(self.letters(text) + self.places(places))))


class ImagesTrial(rubberband.TorchTrial):
    """ResNet-18 on random images."""

    scheduler_step = "batch"

    def build_model(self, config: Mapping[str, Any]) -> nn.Module:
        for word, value in config["words"].items():
            setattr(self, word, value)
        return ResNet18(config["width"])

    def build_optimizer(self, config: Mapping[str, Any], model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

    def build_scheduler(self, config: Mapping[str, Any], optimizer: torch.optim.Optimizer, *, total_steps: int) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=total_steps)

    def train_dataset(self, config: Mapping[str, Any]) -> TensorDataset:
        size = config["batch"] * config["steps"]
        return TensorDataset(torch.randn(size, 3, 32, 32), torch.randint(CLASSES, (size,)))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        images, classes = batch
        return functional.cross_entropy(model(images), classes)

    def global_batch_size(self, config: Mapping[str, Any]) -> int:
        return int(config["batch"])


class TextTrial(ImagesTrial):
    """A small GPT on random text."""

    def build_model(self, config: Mapping[str, Any]) -> nn.Module:
        for word, value in config["words"].items():
            setattr(self, word, value)
        return Gpt(256, config["length"], config["width"], config["layers"])

    def build_optimizer(self, config: Mapping[str, Any], model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=3e-4)

    def build_scheduler(self, config: Mapping[str, Any], optimizer: torch.optim.Optimizer, *, total_steps: int) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-4, total_steps=total_steps)

    def train_dataset(self, config: Mapping[str, Any]) -> TensorDataset:
        return TensorDataset(torch.randint(256, (config["batch"] * config["steps"], config["length"] + 1)))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        (text,) = batch
        return functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def clock_of(device: str) -> Callable[[], float]:
    """Return the wall clock; on a CPU, whose other users would disturb it, the time that this process computes."""
    return time.perf_counter if device == "cuda" else time.process_time


def ours(kind: type[ImagesTrial], config: Mapping[str, Any], device: Any, iterations: int) -> Callable[[], float]:
    """Return a function that trains an iteration in this process, and returns its seconds."""
    clock = clock_of(device)
    segment = Segment(
        trial=0,
        attempt=1,
        config=config,
        seed=0,
        data_seed=0,
        metric="train_loss",
        rank=0,
        num_workers=1,
        rendezvous=None,
        device=device,
        from_iterations=0,
        until_iterations=iterations,
        checkpoint=None,
    )
    gang = Gang.join(rank=0, num_workers=1, rendezvous=None, device=device)
    runner, done = TorchRunner(kind(), segment, gang), 0

    def iterate() -> float:
        nonlocal done
        done += 1
        began_at = clock()
        assert math.isfinite(runner.iterate(done)["train_loss"])
        return clock() - began_at

    return iterate


def plain(kind: type[ImagesTrial], config: Mapping[str, Any], device: str, iterations: int) -> Callable[[], float]:
    """Return the same as a loop that an engineer would write without us."""
    trial, words, clock = kind(), config["words"], clock_of(device)
    model = trial.build_model(config).to(device)
    if words.get("channels_last"):
        model = model.to(memory_format=torch.channels_last)
    optimizer = trial.build_optimizer(config, model)
    scheduler = trial.build_scheduler(config, optimizer, total_steps=iterations * config["steps"])
    model = torch.compile(model) if words.get("compile") else model
    tensors, batch = trial.train_dataset(config).tensors, config["batch"]
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(words.get("precision"))
    scaler = torch.amp.GradScaler(device, enabled=dtype == torch.float16)

    def iterate() -> float:
        began_at = clock()
        loss_sum = torch.zeros((), device=device)
        model.train()
        for indices in torch.randperm(len(tensors[0])).split(batch):
            rows = [tensor[indices] for tensor in tensors]
            rows = [(row.pin_memory() if device == "cuda" else row).to(device, non_blocking=True) for row in rows]
            with torch.autocast(device, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                loss = trial.loss(model, rows)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            if words.get("gradient_clip_norm"):
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), words["gradient_clip_norm"])
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            loss_sum += loss.detach()
        assert math.isfinite(loss_sum.item())
        return clock() - began_at

    return iterate
