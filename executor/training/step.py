"""One optimizer step of one worker: micro-batches, weights, gradients, and what fits into memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from rubberband.executor.training.batch_norm import least_samples
from rubberband.executor.training.batching import Batching
from rubberband.executor.training.compute_time import ComputeTimer
from rubberband.executor.training.data import Feed
from rubberband.executor.training.gang import Gang
from rubberband.executor.training.hooks import override_of
from rubberband.executor.training.means import Means, loss_and_metrics
from rubberband.executor.training.memory import Gradients, Summing, Undo, is_out_of_memory, release
from rubberband.executor.training.precision import Precision
from rubberband.executor.training.runner import TrialFailure, one_line
from rubberband.executor.training.sampler import GlobalBatch, Indices
from rubberband.executor.training.segment import Segment
from rubberband.executor.training.torch_trial import TorchTrial
from rubberband.executor.training.weighing import Weighed, Weighing
from rubberband.executor.training.wrapping import can_skip_passes, skip_pass, wrap


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
        timer: ComputeTimer,
        is_one_pass: bool,
    ) -> None:
        """`is_one_pass`: the share of a worker goes through the model at once, in the first step at least."""
        self._timer = timer
        self._trial = trial
        self._segment = segment
        self._gang = gang
        self._module = module
        self._optimizer = optimizer
        self._feed = feed
        self._device = device
        self.begun = 0
        """Steps that were begun."""
        self._train_mode = override_of(trial, "train_mode")
        self._set_mode(module)
        self._weighing = Weighing(trial, gang, device, feed.load)
        self.wrapped: torch.nn.Module = module
        """The model, in its DistributedDataParallel if there are several workers."""
        if segment.num_workers > 1:
            is_adaptive = segment.batch is not None
            self.wrapped = wrap(module, trial, device, is_adaptive=is_adaptive, is_one_pass=is_one_pass)
        self.precision = Precision(trial.precision, device, optimizer, trial.gradient_clip_norm)
        self.has_stepped = True
        """Whether the latest step was not skipped."""
        self.can_skip = can_skip_passes(self.wrapped)
        """Whether a worker without a share takes no pass."""
        self._metrics: Mapping[str, float] | None = None
        """The names of the trial's metrics, once a pass has shown them."""
        self._undo = Undo(module, device)
        self._summing = Summing(self.wrapped)

    def begin(self) -> Means:
        """Begin an iteration: put the model into its training mode; return the sums that its steps add to."""
        self._set_mode(self.wrapped)
        self._undo.begin()
        return Means(self._device)

    def _set_mode(self, model: torch.nn.Module) -> None:
        model.train()
        if self._train_mode is not None:
            self._train_mode(self._module)
        self.least = least_samples(self._module)
        """The fewest samples that go through the model at once."""

    def close(self) -> None:
        """Let go of model and optimizer."""
        self._summing.close()
        self.precision.close()

    def take(self, batch: GlobalBatch, means: Means) -> None:
        """Take one optimizer step, and add the losses and metrics of this worker's samples to `means`.

        A pass that runs out of memory is divided; the gradient is the same. Raises TrialFailure if the fewest samples
        do not fit.
        """
        self._optimizer.zero_grad()
        parts, sizes = self.parts(batch)
        self._feed.expect(parts, batch.epoch)
        self.batching.before_step(batch, sizes)
        self.begun += 1
        self._undo.save()
        self._weighing.begin_step()
        self._summing.begin_step()
        smaller = None
        try:
            found = self._passes(batch, parts, sizes)
        except RuntimeError as error:
            smaller = self._smaller(batch, parts, error)
        if smaller is not None:
            found = self._again(batch, smaller)
        self._summing.end_step()
        self.has_stepped = self.batching.update(self._optimizer, self.precision.step)
        means.join(found)

    def parts(self, batch: GlobalBatch, steps_ahead: int = 0) -> tuple[list[Indices], list[int]]:
        """Return this worker's micro-batches of the next step, or of one `steps_ahead` of it; and their samples."""
        parts, sizes = self._parts(batch, self.batching.per_gpu)
        if len(parts) == 1 and self.batching.wants_halves(sizes[0], steps_ahead):
            parts = np.array_split(parts[0], 2)
            sizes = [len(part) for part in parts]
        return parts, sizes

    def _parts(self, batch: GlobalBatch, per_gpu: int) -> tuple[list[Indices], list[int]]:
        """Return this worker's parts of at most `per_gpu` samples, and how many of each count.

        A worker without a share takes no pass if it can skip it, and the names of its metrics are known. Otherwise it
        takes two samples, because of BatchNorm, and they count nothing.
        """
        parts = _micro_batches(batch.of(self._segment.rank), per_gpu, self.least)
        if not parts and self.can_skip and self._metrics is not None:
            return [], []
        return parts or [batch.indices[: min(2, per_gpu)]], [len(part) for part in parts] or [0]

    def _passes(self, batch: GlobalBatch, parts: Sequence[Indices], sizes: Sequence[int]) -> Means:
        """Compute the gradients of the micro-batches, over the gang in the last one; return their losses."""
        found, weighed = Means(self._device), self._weighed(batch, parts, sizes)
        if not parts:
            return self._skip_pass(found)
        for at, weight in enumerate(weighed.weights):
            is_last = at == len(parts) - 1
            if is_last:
                self._summing.begin_last()
            with nullcontext() if is_last else self._accumulate():
                loss, metrics = self._loss(self.wrapped, weighed.load(at))
                counted = loss * weighed.factor(at)
                if is_last:
                    self._timer.watch(counted)
                self.precision.backward(counted)
            self.batching.after_part()
            found.add(weight, loss, metrics)
        self._timer.averaged()
        self._metrics = dict.fromkeys(metrics, 0.0)
        return found

    def _skip_pass(self, found: Means) -> Means:
        """Take part in the gang's average with a gradient of 0; return losses that count nothing."""
        nothing = torch.zeros((), device=self._device)
        self.precision.scaled(nothing)  # a scale for losses is made when it is used first
        self._timer.computed()
        skip_pass(self.wrapped)
        self._timer.averaged()
        found.add(0.0, nothing, self._metrics or {})
        return found

    def _smaller(self, batch: GlobalBatch, parts: Sequence[Indices], error: RuntimeError) -> int:
        """Return how many samples to take at once where a pass ran out of memory; raise the error if it is another."""
        most = max((len(part) for part in parts), default=0)
        smaller = max(self.least, (most + 1) // 2)
        if not parts or not is_out_of_memory(error) or self._summing.cannot_repeat:
            raise error
        if max(len(part) for part in self._parts(batch, smaller)[0]) >= most:
            raise TrialFailure(
                "raised",
                f"{one_line(error)}; no fewer than {most} samples can be taken at once: use a smaller model, or an "
                f"instance with more memory",
            ) from error
        return smaller

    def _again(self, batch: GlobalBatch, per_gpu: int) -> Means:
        """Do the step again in passes of at most `per_gpu` samples, or fewer, until they fit."""
        rest: list[torch.Tensor] | None = None
        while True:
            rest = self._summing.rest() if rest is None else rest
            release(self._device)
            self._undo.restore()
            parts, sizes = self._parts(batch, per_gpu)
            self.batching.ran_out(per_gpu, sizes)
            try:
                if rest is not None:
                    return self._complete(batch, parts, sizes, Gradients(rest))
                self._optimizer.zero_grad()
                with self._summing.repeated():
                    return self._passes(batch, parts, sizes)
            except RuntimeError as error:
                per_gpu = self._smaller(batch, parts, error)

    def _complete(
        self, batch: GlobalBatch, parts: Sequence[Indices], sizes: Sequence[int], gradients: Gradients
    ) -> Means:
        """Compute the gradients that the gang still waits for; return their losses."""
        found, weighed = Means(self._device), self._weighed(batch, parts, sizes)
        for at, weight in enumerate(weighed.weights):
            loss, metrics = self._loss(self._module, weighed.load(at))
            gradients.add(self.precision.scaled(loss * weighed.factor(at)))
            self.batching.after_part()
            found.add(weight, loss, metrics)
        self._timer.computed()
        gradients.give()
        self._timer.averaged()
        return found

    def _weighed(self, batch: GlobalBatch, parts: Sequence[Indices], sizes: Sequence[int]) -> Weighed:
        return self._weighing.of(parts, sizes, batch.size, self.batching.weigh)

    def _loss(self, model: torch.nn.Module, samples: Any) -> tuple[torch.Tensor, Mapping[str, Any]]:
        with self.precision.autocast():
            return loss_and_metrics(self._trial.loss(model, samples))

    def fits(self, per_gpu: int) -> bool:
        """Whether every worker has the memory to take `per_gpu` samples through the model; nothing else changes.

        The model is used without its DDP, whose collectives would leave the others waiting if one worker runs out of
        memory. Gradients of earlier passes and vectors that the noise scale keeps are reserved. A tenth more samples
        are used: others may be larger, and memory is fragmented.
        """
        part = np.arange(per_gpu + per_gpu // 10) % self._feed.num_samples
        self._undo.begin()
        self._undo.save()
        failed = torch.zeros((), device=self._device)
        try:
            self._try(part)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            failed += 1
        self._optimizer.zero_grad()
        if failed.item():
            release(self._device)
        self._undo.restore()
        return self._gang.sum(failed).item() == 0.0

    def _try(self, part: Indices) -> None:
        held = self.batching.held_gradients()
        reserved = [torch.empty_like(each) for each in self._module.parameters() for _ in range(held)]
        with torch.compiler.set_stance("force_eager"):  # compiling for each size would take longer than the steps
            loss, _ = self._loss(self._module, self._feed.load(part))
        loss.backward()  # type: ignore[no-untyped-call]
        del reserved

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
