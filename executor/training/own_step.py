"""Steps that a trial takes by its own `step` method: several optimizers, closures, anything.

The trial writes plain PyTorch for one process. After every `backward()`, the gradients that it reached are averaged
over the gang, by what each worker's samples count, as DistributedDataParallel does for a single loss: a hook of each
parameter weights what comes in, and at the end of the pass the average of all workers replaces `.grad`. The part of it
that was there before stays as it is, since it is the same on every worker. A closure's loss is averaged too, so that
all workers search the same line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch.autograd import Variable
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from rubberband.executor.training.batch_norm import least_samples
from rubberband.executor.training.batching import Batching
from rubberband.executor.training.data import Feed
from rubberband.executor.training.gang import Gang
from rubberband.executor.training.hooks import FIXED, override_of
from rubberband.executor.training.means import Means, Weight, loss_and_metrics
from rubberband.executor.training.memory import is_out_of_memory
from rubberband.executor.training.precision import Precision
from rubberband.executor.training.runner import TrialFailure, one_line, to_float
from rubberband.executor.training.sampler import GlobalBatch, Indices
from rubberband.executor.training.segment import Segment
from rubberband.executor.training.torch_trial import TorchTrial
from rubberband.executor.training.weighing import Weighing

T = TypeVar("T")


class Group(Generic[T]):
    """An object that `build_optimizer` or `build_scheduler` returned, or several in a list, tuple or mapping."""

    def __init__(self, built: Any) -> None:
        self.built = built
        self._several: Mapping[Any, T] | None = None
        if isinstance(built, Mapping):
            self._several = dict(built)
        elif isinstance(built, (list, tuple)):
            self._several = dict(enumerate(built))
        self.members: list[T] = [built] if self._several is None else list(self._several.values())

    def state_dict(self) -> Any:
        """Return the state of the object, or those of several by name or number."""
        if self._several is None:
            return self.built.state_dict()
        return {name: each.state_dict() for name, each in self._several.items()}  # type: ignore[attr-defined]

    def load_state_dict(self, state: Any) -> None:
        """Restore what `state_dict` returned. Raises ValueError for that of other objects."""
        if self._several is None:
            self.built.load_state_dict(state)
            return
        if state.keys() != self._several.keys():
            raise ValueError(f"it has the states of {list(state)}, and the trial builds {list(self._several)}")
        for name, each in self._several.items():
            each.load_state_dict(state[name])  # type: ignore[attr-defined]


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
        raise TrialFailure("raised", f"{type(trial).__name__} {FIXED}")
    for name, remedy in _REMEDIES.items():
        if getattr(trial, name) != getattr(TorchTrial, name):
            raise TrialFailure("raised", f"{name} has no effect on an own step(); {remedy}")


class OwnStep:
    """Takes the optimizer steps of one worker by the trial's own method; `batching` is set before the first."""

    batching: Batching

    def __init__(
        self,
        trial: TorchTrial,
        segment: Segment,
        gang: Gang,
        *,
        module: torch.nn.Module,
        optimizers: Group[Optimizer],
        feed: Feed,
        device: torch.device,
    ) -> None:
        step = override_of(trial, "step")
        assert step is not None
        self._step = step
        self._rank = segment.rank
        self._optimizers = optimizers
        self._device = device
        self.begun = 0
        """Steps that were begun."""
        self.has_stepped = True
        self.least = least_samples(module)
        """The fewest samples of a worker that has any."""
        self.can_skip = False
        """A worker without a share takes two samples: the trial's step shows what it computes."""
        self.wrapped: torch.nn.Module = module
        self.precision = Precision("32", device, optimizers.members[0], None)
        self._feed = feed
        self._weighing = Weighing(trial, gang, device, feed.load)
        self._train_mode = override_of(trial, "train_mode")
        self._averaging = _Averaging(trial, gang, module, optimizers.members) if gang.num_workers > 1 else None

    def begin(self) -> Means:
        """Begin an iteration: put the model into its training mode; return the sums that its steps add to."""
        self.wrapped.train()
        if self._train_mode is not None:
            self._train_mode(self.wrapped)
        self.least = least_samples(self.wrapped)
        return Means(self._device)

    def take(self, batch: GlobalBatch, means: Means) -> None:
        """Take one step, and add the loss and metrics of this worker's samples to `means`."""
        parts, sizes = self.parts(batch)
        self._feed.expect(parts, batch.epoch)
        self.begun += 1
        self._weighing.begin_step()
        weighed = self._weighing.of(parts, sizes, batch.size)
        if self._averaging is not None:
            self._averaging.factor = weighed.factor(0)
        try:
            returned = self._step(self.wrapped, self._optimizers.built, weighed.load(0))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise TrialFailure(
                "raised",
                f"{one_line(error)}; step() takes {len(parts[0])} samples at once: use a smaller batch_size, or divide "
                "the batch in step()",
            ) from error
        means.add(weighed.weights[0], *loss_and_metrics(self._as_tensors(returned), "step()"))

    def _as_tensors(self, returned: Any) -> Any:
        """Return what `step` returned, with a loss that is a number as a tensor."""
        loss, *metrics = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned,)
        number = None if isinstance(loss, torch.Tensor) else to_float(loss)
        if number is not None:
            loss = torch.tensor(number, dtype=torch.float64, device=self._device)
        return (loss, *metrics) if metrics else loss

    def parts(self, batch: GlobalBatch, steps_ahead: int = 0) -> tuple[list[Indices], list[int]]:
        """Return this worker's samples of a step, and how many of them count: none, without a share."""
        mine = batch.of(self._rank)
        return [mine if len(mine) else batch.indices[:2]], [len(mine)]

    def close(self) -> None:
        """Drop model and optimizers."""
        if self._averaging is not None:
            self._averaging.close()
        self.precision.close()


class _Averaging:
    """Averages gradients over the gang at the end of every backward pass, and the losses of closures."""

    factor: Weight
    """n w_i / W of the present step."""

    def __init__(self, trial: TorchTrial, gang: Gang, module: torch.nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._gang = gang
        self._may_differ = trial.find_unused_parameters
        own = (each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"])
        self._parameters = list(dict.fromkeys([*module.parameters(), *own]))
        self._reached: set[int] = set()
        self._handles: list[RemovableHandle] = []
        gang.copy_from_first([tensor.detach() for tensor in (*self._parameters, *module.buffers())])
        for number, parameter in enumerate(self._parameters):
            self._watch(number, parameter)
        for optimizer in optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._with_agreed_closure))

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
        by_kind: dict[Any, list[torch.Tensor]] = {}
        for number in numbers:
            parameter = self._parameters[number]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            by_kind.setdefault((parameter.grad.dtype, parameter.grad.device), []).append(parameter.grad)
        for gradients in by_kind.values():
            flat = self._gang.sum(torch.cat([each.flatten() for each in gradients]).div_(self._gang.num_workers))
            parts = torch.split(flat, [each.numel() for each in gradients])
            torch._foreach_copy_(gradients, [part.view_as(each) for part, each in zip(parts, gradients, strict=True)])

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
