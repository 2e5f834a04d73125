"""One optimizer step of one worker: micro-batches, weights, gradients, and what fits into memory."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from rubberband.executor.training.batching import Batching
from rubberband.executor.training.data import Feed
from rubberband.executor.training.gang import Gang
from rubberband.executor.training.precision import Precision
from rubberband.executor.training.sampler import GlobalBatch, Indices
from rubberband.executor.training.segment import Segment
from rubberband.executor.training.torch_trial import TorchTrial
from rubberband.executor.training.wrapping import wrap


class TrainStep:
    """Takes the optimizer steps of one worker; `batching` is set before the first."""

    batching: Batching

    def __init__(
        self,
        trial: TorchTrial,
        segment: Segment,
        gang: Gang,
        *,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        feed: Feed,
        device: torch.device,
        is_one_pass: bool,
    ) -> None:
        """`is_one_pass`: the share of a worker goes through the model at once, in the first step at least."""
        self._trial = trial
        self._segment = segment
        self._gang = gang
        self._module = module
        self._optimizer = optimizer
        self._feed = feed
        self._device = device
        self.begun = 0
        """Steps that were begun."""
        has_batch_norm = any(isinstance(each, _BatchNorm) for each in module.modules())
        self.least = 2 if has_batch_norm else 1
        """The fewest samples that go through the model at once."""
        self.wrapped: torch.nn.Module = module
        """The model, in its DistributedDataParallel if there are several workers."""
        if segment.num_workers > 1:
            is_adaptive = segment.batch is not None
            self.wrapped = wrap(module, trial, device, is_adaptive=is_adaptive, is_one_pass=is_one_pass)
        self.precision = Precision(trial.precision, device, optimizer, trial.gradient_clip_norm)
        self.has_stepped = True
        """Whether the latest step was not skipped."""

    def take(self, batch: GlobalBatch) -> torch.Tensor:
        """Take one optimizer step; return the sum of the losses of this worker's samples."""
        self._optimizer.zero_grad()
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        parts, weights = self.parts(batch)
        self._feed.expect(batch, parts)
        self.batching.before_step(batch, weights)
        self.begun += 1
        for part, weight in zip(parts, weights, strict=True):
            with nullcontext() if part is parts[-1] else self._accumulate():
                loss = self._loss(self.wrapped, part)
                self.precision.backward(loss * (self._segment.num_workers * weight / batch.size))
            self.batching.after_part()
            loss_sum += loss.detach().double() * weight
        self.has_stepped = self.batching.update(self._optimizer, self.precision.step)
        return loss_sum

    def parts(self, batch: GlobalBatch, steps_ahead: int = 0) -> tuple[list[Indices], list[int]]:
        """Return this worker's micro-batches of the next step, or of one `steps_ahead` of it; and their weights.

        A worker without a share still contributes a gradient, of weight 0; two samples, because of BatchNorm.
        """
        mine = batch.of(self._segment.rank)
        parts = _micro_batches(mine, self.batching.per_gpu, self.least)
        if len(parts) == 1 and self.batching.wants_halves(len(mine), steps_ahead):
            parts = np.array_split(mine, 2)
        if not parts:
            return [batch.indices[: min(2, self.batching.per_gpu)]], [0]
        return parts, [len(part) for part in parts]

    def _loss(self, model: torch.nn.Module, part: Indices) -> torch.Tensor:
        batch = self._feed.load(part)
        with self.precision.autocast():
            return self._trial.loss(model, batch)

    def fits(self, per_gpu: int) -> bool:
        """Whether every worker has the memory to take `per_gpu` samples through the model; nothing else changes.

        The model is used without its DDP, whose collectives would leave the others waiting if one worker runs out of
        memory. As much memory as the parameters take is held meanwhile: the noise scale keeps Adam's P during a pass.
        A tenth more samples are used: others may be larger, and memory is fragmented.
        """
        part = np.arange(per_gpu + per_gpu // 10) % self._feed.num_samples
        buffers = [buffer.clone() for buffer in self._module.buffers()]
        failed = torch.zeros((), device=self._device)
        with torch.random.fork_rng(devices=[0] if self._device.type == "cuda" else []):
            try:
                spare = [torch.empty_like(parameter) for parameter in self._module.parameters()]
                self._loss(self._module, part).backward()  # type: ignore[no-untyped-call]
                del spare
            except torch.OutOfMemoryError:
                failed += 1
        self._optimizer.zero_grad()
        for buffer, saved in zip(self._module.buffers(), buffers, strict=True):
            buffer.copy_(saved)
        return self._gang.sum(failed).item() == 0.0

    def _accumulate(self) -> AbstractContextManager[None]:
        if isinstance(self.wrapped, DistributedDataParallel):
            return self.wrapped.no_sync()
        return nullcontext()


def _micro_batches(indices: Indices, limit: int, least: int) -> list[Indices]:
    """Split into as few parts of `least` to `limit` samples as possible, of about equal size.

    With a limit of 2 and a least of 2 there is no way to divide 3: they stay together.
    """
    parts = min(math.ceil(len(indices) / limit), max(1, len(indices) // min(least, limit)))
    return np.array_split(indices, parts) if len(indices) else []
