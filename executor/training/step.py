"""One optimizer step of one worker: micro-batches, weights, gradients, and what fits into memory."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd import Variable
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from rubberband.executor.training.clocks import ComputeTimer
from rubberband.executor.training.data import Feed
from rubberband.executor.training.failures import (
    LacksMemory,
    RanOut,
    TrialFailure,
    is_out_of_memory,
    one_line,
    refused,
    release,
)
from rubberband.executor.training.gang import Gang
from rubberband.executor.training.metrics import Means, Weighed, Weighing, Weight, loss_and_metrics
from rubberband.executor.training.options import Group, Precision
from rubberband.executor.training.reported import to_float
from rubberband.executor.training.sampler import Batching, GlobalBatch, Indices
from rubberband.executor.training.segment import Segment
from rubberband.executor.training.torch_trial import FIXED, TorchTrial, override_of
from rubberband.executor.training.wrapping import (
    Exchange,
    SharedBuffers,
    agree_on,
    check_dense,
    exchange_flat,
    least_samples,
    parameters_of,
    uncounted,
)
from rubberband.units import counted


class Step(ABC):
    """Takes the optimizer steps of one worker; `batching` is set before the first."""

    batching: Batching
    precision: Precision
    can_skip: bool
    """Whether a worker without a share takes no pass."""
    wrapped: nn.Module
    """The model, or DistributedDataParallel with it."""

    def __init__(self, trial: TorchTrial, segment: Segment, gang: Gang, module: nn.Module, feed: Feed) -> None:
        self._trial, self._segment, self._gang = trial, segment, gang
        self._module, self._feed, self._device = module, feed, feed.device
        self.begun = 0
        self.has_stepped = True
        self._train_mode = override_of(trial, "train_mode")
        self._weighing = Weighing(trial, gang, feed)
        self._set_mode()

    def _set_mode(self) -> None:
        self._module.train()
        if self._train_mode is not None:
            self._train_mode(self._module)
        self.least = least_samples(self._module)
        """The fewest samples that go through the model at once."""

    def begin(self) -> Means:
        """Begin an iteration: put the model into its training mode; return the sums that its steps add to."""
        self._set_mode()
        return Means(self._device)

    @abstractmethod
    def follow(self) -> None:
        """Exchange what is trained now, after hooks that may have changed it."""

    @abstractmethod
    def parts(self, batch: GlobalBatch, steps_ahead: int = 0) -> tuple[list[Indices], list[int]]:
        """Return this worker's micro-batches of the next step, or of one `steps_ahead` of it, and how many count."""

    @abstractmethod
    def take(self, batch: GlobalBatch, means: Means) -> None:
        """Take one optimizer step, and add the losses and metrics of this worker's samples to `means`."""

    def close(self) -> None:  # noqa: B027 - optional hook
        """Remove what hooks of the model or the optimizer call."""


class TrainStep(Step):
    """Gives the gradient of the trial's `loss`, over the gang, to its optimizer."""

    def __init__(
        self,
        trial: TorchTrial,
        segment: Segment,
        gang: Gang,
        module: nn.Module,
        feed: Feed,
        *,
        optimizer: Optimizer,
        timer: ComputeTimer,
        exchange: Exchange,
    ) -> None:
        super().__init__(trial, segment, gang, module, feed)
        self._timer = timer
        self._optimizer = optimizer
        self._exchange = exchange
        self._has_hook = override_of(trial, "on_step") is not None
        self.precision = Precision(trial.precision, self._device, optimizer, trial.gradient_clip_norm)
        self._metrics: Mapping[str, float] | None = None
        """The names of the trial's metrics, once a pass has shown them."""

    @property
    def wrapped(self) -> nn.Module:  # type: ignore[override] # DDP is made anew where hooks change what is trained
        return self._exchange.wrapped

    @property
    def can_skip(self) -> bool:  # type: ignore[override]
        return self._exchange.can_skip

    def follow(self, *, is_thorough: bool = True) -> None:
        self._exchange.follow(is_thorough=is_thorough)

    def take(self, batch: GlobalBatch, means: Means) -> None:
        """Take one step, as `Step` says.

        Where a pass runs out of memory it raises RanOut: the segment begins again in smaller ones, with the same
        gradient. Raises TrialFailure if the fewest samples do not fit.
        """
        self.follow(is_thorough=self._has_hook)
        self._optimizer.zero_grad()
        parts, sizes = self.parts(batch)
        self._feed.expect(parts, batch.epoch)
        self.batching.before_step(batch, sizes)
        self.begun += 1
        try:
            found = self._passes(batch, parts, sizes)
        except RuntimeError as error:
            if not parts or not is_out_of_memory(error):
                raise
            raise self._lacks_memory(batch, parts, one_line(error)) from error
        self._exchange.buffers.share(batch.first)
        self.has_stepped = self.batching.update(self._optimizer, self.precision.step)
        means.join(found)

    def parts(self, batch: GlobalBatch, steps_ahead: int = 0) -> tuple[list[Indices], list[int]]:
        parts, sizes = self._parts(batch, self.batching.per_gpu)
        if len(parts) == 1 and self.batching.wants_halves(sizes[0], steps_ahead):
            parts = np.array_split(parts[0], 2)
            sizes = [len(part) for part in parts]
        return parts, sizes

    def _parts(self, batch: GlobalBatch, per_gpu: int) -> tuple[list[Indices], list[int]]:
        """Return this worker's parts of at most `per_gpu` samples, and how many of each count.

        A worker without a share takes no pass if it can skip it, and the names of its metrics are known. Otherwise it
        takes two samples, because of BatchNorm, and they count nothing. Workers in step all take as many passes as the
        one with the most, which each of them knows from the shares.
        """
        mine = batch.of(self._segment.rank)
        parts = micro_batches(mine, per_gpu, self.least)
        if self._exchange.in_step:
            passes = max(passes_of(share, per_gpu, self.least) for share in batch.shares)
            if len(mine) >= passes * self.least:
                parts = np.array_split(mine, passes)
            spare = passes - len(parts)
            return [*parts, *[batch.indices[: min(2, per_gpu)]] * spare], [*map(len, parts), *[0] * spare]
        if not parts and self.can_skip and self._metrics is not None:
            return [], []
        return parts or [batch.indices[: min(2, per_gpu)]], [len(part) for part in parts] or [0]

    def _passes(self, batch: GlobalBatch, parts: Sequence[Indices], sizes: Sequence[int]) -> Means:
        """Compute the gradients of the micro-batches, over the gang in the last one; return their losses."""
        found, weighed = Means(self._device), self._weighing.of(parts, sizes, batch.size, self.batching.weigh)
        if not parts:
            return self._skip_pass(found)
        with nullcontext() if any(sizes) else uncounted(self._module):
            self._take_passes(weighed, found)
        self._exchange.finish()
        self._timer.averaged()
        return found

    def _take_passes(self, weighed: Weighed, found: Means) -> None:
        for at, weight in enumerate(weighed.weights):
            is_last = at == len(weighed.weights) - 1
            if is_last or self._exchange.in_step:
                loss, metrics = self._exchange.run(partial(self._loss, weighed.load(at)))
            else:  # DistributedDataParallel averages the sum of all passes in the last one
                loss, metrics = self._loss(weighed.load(at))
            counted = loss * weighed.factor(at)
            if is_last:
                self._timer.watch(counted)
            self.precision.backward(counted)
            self.batching.after_part()
            found.add(weight, loss, metrics)
        self._metrics = dict.fromkeys(metrics, 0.0)

    def _skip_pass(self, found: Means) -> Means:
        """Take part in the gang's average with a gradient of 0; return losses that count nothing."""
        nothing = torch.zeros((), device=self._device)
        self.precision.scaled(nothing)  # a scale for losses is made when it is used first
        self._timer.computed()
        self._exchange.skip()
        self._timer.averaged()
        found.add(0.0, nothing, self._metrics or {})
        return found

    def _lacks_memory(self, batch: GlobalBatch, parts: Sequence[Indices], line: str) -> TrialFailure:
        """Return the failure where a pass ran out of memory: RanOut, unless no fewer samples can be taken at once.

        The step cannot be done again at once, as DDP may have summed some of its gradients already.
        """
        most = max(map(len, parts))
        smaller = max(self.least, (most + 1) // 2)
        if self._feed.leave_device():  # a set that the GPU holds goes first
            smaller = most
        elif max(len(part) for part in self._parts(batch, smaller)[0]) >= most:
            larger = "an instance with more memory"
            if self._trial.sharding:
                larger = "larger gangs (resources.gpus_per_trial.min)"
            return LacksMemory.with_least(most, larger)
        again = f"the trial begins again from its checkpoint, with at most {counted(smaller, 'sample')} at once"
        print(f"rubberband: a step ran out of memory; {again}", flush=True)
        return RanOut(line, smaller)

    def _loss(self, samples: Any) -> tuple[torch.Tensor, Mapping[str, Any]]:
        with self.precision.autocast():
            return loss_and_metrics(self._trial.loss(self._module, samples))

    def fits(self, per_gpu: int) -> bool:
        """Whether every worker has the memory to take `per_gpu` samples through the model; nothing else changes.

        The model is used without its DDP, whose collectives would leave the others waiting if one worker runs out of
        memory. Gradients of earlier passes and vectors that the noise scale keeps are reserved. A tenth more samples
        are used: others may be larger, and memory is fragmented.
        """
        part = np.arange(per_gpu + per_gpu // 10) % self._feed.num_samples
        with unchanged(self._module, self._device):
            suffices = self._suffices(part) or (self._feed.leave_device() and self._suffices(part))
        return self._gang.sum(torch.full((), 1.0 - suffices, device=self._device)).item() == 0.0

    def _suffices(self, part: Indices) -> bool:
        """Return whether this worker has the memory for that part."""
        suffices = True
        try:
            self._try(part)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            suffices = False
        self._optimizer.zero_grad()
        if not suffices:
            release(self._device)
        return suffices

    def _try(self, part: Indices) -> None:
        held = self.batching.held_gradients()
        reserved = [torch.empty_like(each) for each in self._module.parameters() for _ in range(held)]
        with torch.compiler.set_stance("force_eager"):  # compiling for each size would take longer than the steps
            loss, _ = self._loss(self._feed.load(part))
        loss.backward()  # type: ignore[no-untyped-call]
        del reserved


def micro_batches(indices: Indices, limit: int, least: int) -> list[Indices]:
    """Split into as few parts of `least` to `limit` samples as possible, of about equal size.

    With a limit of 2 and a least of 2 there is no way to divide 3: they stay together.
    """
    return np.array_split(indices, passes_of(len(indices), limit, least)) if len(indices) else []


def passes_of(samples: int, limit: int, least: int) -> int:
    """Return how many parts `micro_batches` makes of that many samples."""
    return min(math.ceil(samples / limit), max(1, samples // min(least, limit)))


@contextmanager
def unchanged(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore the model's buffers (BatchNorm) and torch's random states after the block."""
    saved = [(buffer, buffer.clone()) for buffer in module.buffers()]
    random, cuda_random = torch.get_rng_state(), torch.cuda.get_rng_state() if device.type == "cuda" else None
    yield
    with torch.no_grad():
        for buffer, before in saved:
            buffer.copy_(before)
    torch.set_rng_state(random)
    if cuda_random is not None:
        torch.cuda.set_rng_state(cuda_random)


# Steps that a trial takes by its own `step` method: several optimizers, closures, anything.
#
# The trial writes plain PyTorch for one process. After every `backward()`, the gradients that it reached are averaged
# over the gang, by what each worker's samples count, as DistributedDataParallel does for a single loss: a hook of each
# parameter weights what comes in, and at the end of the pass the average of all workers replaces `.grad`. The part of
# it that was there before stays as it is, since it is the same on every worker. A closure's loss is averaged too, so
# that all workers search the same line.

_REMEDIES = {
    "max_batch_size_per_gpu": "leave it out, and divide the batch in step()",
    "precision": "leave it out, and compute under torch.autocast in step()",
    "gradient_clip_norm": "leave it out, and clip in step() after backward(), where gradients are those of all workers",
    "gradient_compression": "leave it out",
    "static_graph": "leave it out",
}


def check_own_step(trial: TorchTrial, segment: Segment) -> None:
    """Raise TrialFailure for words that a trial with its own `step` cannot have."""
    if segment.batch is not None:
        raise refused(f"{type(trial).__name__} {FIXED}")
    for name, remedy in _REMEDIES.items():
        if getattr(trial, name) != getattr(TorchTrial, name):
            raise refused(f"{name} has no effect on an own step(); {remedy}")


class OwnStep(Step):
    """Takes the optimizer steps of one worker by the trial's own method."""

    can_skip = False
    """A worker without a share takes two samples: the trial's step shows what it computes."""

    def __init__(
        self,
        trial: TorchTrial,
        segment: Segment,
        gang: Gang,
        module: nn.Module,
        feed: Feed,
        *,
        optimizers: Group[Optimizer],
    ) -> None:
        super().__init__(trial, segment, gang, module, feed)
        step = override_of(trial, "step")
        assert step is not None
        self._step = step
        self._optimizers = optimizers
        self.wrapped = module
        self.precision = Precision("32", self._device, optimizers.members[0], None)
        self._buffers = SharedBuffers(module, gang)
        self._averaging = _Averaging(trial, gang, module, optimizers.members) if gang.num_workers > 1 else None

    def follow(self) -> None:
        self._buffers.find()

    def take(self, batch: GlobalBatch, means: Means) -> None:
        parts, sizes = self.parts(batch)
        self._feed.expect(parts, batch.epoch)
        self.begun += 1
        weighed = self._weighing.of(parts, sizes, batch.size)
        if self._averaging is not None:
            self._averaging.follow()
            self._averaging.factor = weighed.factor(0)
        try:
            with nullcontext() if any(sizes) else uncounted(self.wrapped):
                returned = self._step(self.wrapped, self._optimizers.built, weighed.load(0))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise refused(
                f"{one_line(error)}; step() takes {len(parts[0])} samples at once: use a smaller batch_size, or divide "
                "the batch in step()"
            ) from error
        self._buffers.share(batch.first)
        means.add(weighed.weights[0], *loss_and_metrics(self._as_tensors(returned), "step()"))

    def _as_tensors(self, returned: Any) -> Any:
        """Return what `step` returned, with a loss that is a number as a tensor."""
        loss, *metrics = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned,)
        number = None if isinstance(loss, torch.Tensor) else to_float(loss)
        if number is not None:
            loss = torch.tensor(number, dtype=torch.float64, device=self._device)
        return (loss, *metrics) if metrics else loss

    def parts(self, batch: GlobalBatch, steps_ahead: int = 0) -> tuple[list[Indices], list[int]]:
        mine = batch.of(self._segment.rank)
        return [mine if len(mine) else batch.indices[:2]], [len(mine)]

    def close(self) -> None:
        if self._averaging is not None:
            self._averaging.close()


class _Averaging:
    """Averages gradients over the gang at the end of every backward pass, and the losses of closures."""

    factor: Weight
    """n w_i / W of the present step."""

    def __init__(self, trial: TorchTrial, gang: Gang, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._gang, self._module, self._optimizers = gang, module, optimizers
        self._may_differ = trial.find_unused_parameters
        self._parameters: list[torch.Tensor] = []
        self._known: set[int] = set()
        self._reached: set[int] = set()
        self._handles: list[RemovableHandle] = []
        check_dense(module)
        self.follow()
        for optimizer in optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._with_agreed_closure))

    def follow(self) -> None:
        """Watch parameters that are new, which begin as on rank 0. Raises TrialFailure if not all workers have them."""
        named = parameters_of(self._module, self._optimizers)
        new = {name: each for name, each in named.items() if id(each) not in self._known}
        if not new:
            return
        agree_on(self._gang, new, {})
        self._gang.copy([each.detach() for each in new.values()])
        for each in new.values():
            self._known.add(id(each))
            self._parameters.append(each)
            self._watch(len(self._parameters) - 1, each)

    def _watch(self, number: int, parameter: torch.Tensor) -> None:
        is_trained = parameter.requires_grad
        parameter.requires_grad_(True)  # hooks of a frozen one stay, for steps that thaw it
        self._handles.append(parameter.register_hook(self._weighted))  # type: ignore[no-untyped-call]
        self._handles.append(
            parameter.register_post_accumulate_grad_hook(lambda _: self._note(number))  # type: ignore[no-untyped-call]
        )
        parameter.requires_grad_(is_trained)

    def _weighted(self, gradient: torch.Tensor) -> torch.Tensor:
        if isinstance(self.factor, torch.Tensor):
            return gradient * self.factor.to(gradient.dtype)
        return gradient if self.factor == 1.0 else gradient * self.factor

    def _note(self, number: int) -> None:
        if not self._reached:
            Variable._execution_engine.queue_callback(self._average)
        self._reached.add(number)

    @torch.no_grad()
    def _average(self) -> None:
        numbers, self._reached = sorted(self._reached), set()
        if self._may_differ:
            reached = torch.zeros(len(self._parameters), device=self._parameters[0].device)
            reached[numbers] = 1.0
            numbers = self._gang.sum(reached).nonzero().flatten().tolist()
        gradients = []
        for number in numbers:
            parameter = self._parameters[number]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        exchange_flat(gradients, lambda flat: self._gang.sum(flat.div_(self._gang.num_workers)))

    def _with_agreed_closure(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let the closure of `optimizer.step(closure)` return the loss of all workers."""
        given = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(given):
            return None
        closure: Callable[[], Any] = given

        def agreed() -> torch.Tensor:
            loss = torch.as_tensor(closure()).detach().double()
            return self._gang.sum(loss * self.factor / self._gang.num_workers)

        if len(args) > 1:
            return (args[0], agreed, *args[2:]), kwargs
        return args, {**kwargs, "closure": agreed}

    def close(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
