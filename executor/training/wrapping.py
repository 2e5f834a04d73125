"""The model on its device and in its gang: memory format, compilation, DDP, and its parameters by name."""

from __future__ import annotations

import gc
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from rubberband.executor.training.components import Component
from rubberband.executor.training.failures import refused
from rubberband.executor.training.gang import Gang
from rubberband.executor.training.sampler import GlobalBatch
from rubberband.executor.training.torch_trial import TorchTrial

if TYPE_CHECKING:
    from rubberband.executor.training.loop import TorchRunner

T = TypeVar("T")


def prepare(module: nn.Module, trial: TorchTrial, *, has_fixed_sizes: bool) -> None:
    """Bring the model, on its device, into the trial's memory format, and compile it at its first use.

    cuDNN looks for the fastest kernels as `cudnn_benchmark` says; the segment's end puts that back.
    It is the same object with the same names in `state_dict`. Compiled kernels are kept in torch's own folder of the
    machine (TORCHINDUCTOR_CACHE_DIR), for the next trials of the same model.
    """
    if trial.channels_last:
        for parameter in module.parameters():
            if parameter.dim() in (4, 5):
                layout = torch.channels_last if parameter.dim() == 4 else torch.channels_last_3d
                parameter.data = parameter.data.contiguous(memory_format=layout)
    searches, cudnn = trial.cudnn_benchmark, torch.backends.cudnn
    if (
        searches is None
        and has_fixed_sizes
        and not (cudnn.deterministic or torch.are_deterministic_algorithms_enabled())
    ):
        searches = True
    if searches is not None:
        cudnn.benchmark = searches
    if trial.compile:
        # What earlier trials of this process compiled counts towards a limit, beyond which nothing is compiled.
        torch.compiler.reset()
        _compile(module)


def _compile(module: nn.Module) -> None:
    """Compile the model as `module.compile()` does, which passes over those that are a torch.nn.Sequential."""

    def call(*args: Any, **kwargs: Any) -> Any:  # a frame outside torch, in whose own modules nothing is compiled
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    module._compiled_call_impl = torch.compile(call)


class Pass(nn.Module):
    """A pass of a step as a module, whose output is the loss, for what wraps it.

    So `loss` gets the user's own model. It may call methods and parts of it, and call it twice: the gang's exchange
    begins and ends with the loss.
    """

    def __init__(self, model: nn.Module, others: Iterable[Tensor] = ()) -> None:
        """`others` are trained beside those of the model."""
        super().__init__()
        self.model = model
        for number, each in enumerate(others):
            self._parameters[f"other_{number}"] = each  # type: ignore[assignment] # a leaf that need be no Parameter

    def forward(self, compute: Callable[[], T]) -> T:
        return compute()


def passed(wrapped: nn.Module, compute: Callable[[], tuple[Tensor, T]]) -> tuple[Tensor, T]:
    """Return the loss and more that `compute` returns, as a pass through what wraps a `Pass`."""
    more: list[T] = []

    def loss() -> Tensor:
        found, rest = compute()
        more.append(rest)
        return found

    return wrapped(loss), more[0]


class Exchange(ABC):
    """Averages the gradients of a gang's workers, as its model lies on them."""

    buffers: SharedBuffers
    in_step = False
    """Whether each pass is one of all workers, and exchanges its gradients, not only the last one of a step."""
    can_skip: bool
    """Whether a worker without samples may leave out its pass."""

    @property
    @abstractmethod
    def wrapped(self) -> nn.Module:
        """The model in what exchanges its gradients."""

    @abstractmethod
    def follow(self, *, is_thorough: bool = False) -> None:
        """Exchange what is trained now, after hooks that may have changed it; `is_thorough`: layers may be new."""

    @abstractmethod
    def run(self, compute: Callable[[], tuple[Tensor, T]]) -> tuple[Tensor, T]:
        """Return the loss and more that `compute` returns; its backward pass averages the gradients of the gang."""

    def skip(self) -> None:
        """Take part in the average of a step with gradients of 0, without a pass through the model."""
        raise NotImplementedError

    def finish(self) -> None:  # noqa: B027 - optional hook
        """See to the gradients after the passes of a step."""


class GradientExchange(Exchange):
    """Averages the gradients of a gang's workers by DistributedDataParallel; idle for one worker.

    DDP is made for a fixed set of parameters. Where hooks change what is trained, all workers make it anew.
    """

    def __init__(
        self,
        trial: TorchTrial,
        gang: Gang,
        module: nn.Module,
        optimizer: Optimizer,
        *,
        is_adaptive: bool,
        is_one_pass: bool,
    ) -> None:
        """With adaptive batches gradients are no views of DDP's buckets: the noise scale observes them all at once.

        A static graph holds only if the first step `is_one_pass`: DDP would average the gradients of its first one
        alone.
        """
        self._trial, self._gang, self._module, self._optimizer = trial, gang, module, optimizer
        self._are_views = not is_adaptive
        self._is_static = trial.static_graph and is_one_pass and not is_adaptive
        self.ddp: DistributedDataParallel | None = None
        self.buffers = SharedBuffers(module, gang)
        self._all: dict[str, Tensor] = {}
        self._trained: dict[str, Tensor] = {}
        self._seen: tuple[list[bool], int] | None = None
        self.follow(is_thorough=True)

    def follow(self, *, is_thorough: bool = False) -> None:
        """Make DDP anew if other parameters are trained than before.

        Unless it `is_thorough`, it looks for frozen and thawed parameters and for new groups, not for new layers.
        Raises TrialFailure if not all workers train the same.
        """
        if self._gang.num_workers == 1 or (not is_thorough and self._seen == self._look()):
            return
        known, before = self._all, self._trained
        self._all = parameters_of(self._module, [self._optimizer])
        self._trained = {name: each for name, each in self._all.items() if each.requires_grad}
        self._seen = self._look()
        if is_thorough:
            self.buffers.find()
        if before.keys() == self._trained.keys() and all(before[name] is each for name, each in self._trained.items()):
            return
        check_dense(self._module)
        agree_on(self._gang, self._trained, before)
        old = {id(each) for each in known.values()}
        new = [each.detach() for each in self._all.values() if known and id(each) not in old]
        self._gang.copy(new)  # workers draw different numbers in hooks
        self._wrap(is_first=not known)

    def _look(self) -> tuple[list[bool], int]:
        given = sum(len(group["params"]) for group in self._optimizer.param_groups)
        return [each.requires_grad for each in self._all.values()], given

    def _wrap(self, *, is_first: bool) -> None:
        if not is_first:
            self.ddp = None
            gc.collect()  # it must be gone before the gang parts: see Gang.close
        if not self._trained:
            return
        of_model = {id(each) for each in self._module.parameters()}
        wanted = Pass(self._module, [each for each in self._all.values() if id(each) not in of_model])
        buffers = [name for name, _ in wanted.named_buffers()]
        ignore = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
        ignore(wanted, buffers)  # type: ignore[no-untyped-call] # see `SharedBuffers`
        self.ddp = DistributedDataParallel(
            wanted,
            init_sync=is_first,
            find_unused_parameters=self._trial.find_unused_parameters,
            gradient_as_bucket_view=self._are_views,
            static_graph=self._is_static,
        )
        if self._trial.gradient_compression == "bf16":
            compress(self.ddp)

    def run(self, compute: Callable[[], tuple[Tensor, T]]) -> tuple[Tensor, T]:
        return compute() if self.ddp is None else passed(self.ddp, compute)

    @property
    def wrapped(self) -> nn.Module:
        return self.ddp or self._module

    @property
    def can_skip(self) -> bool:  # type: ignore[override]
        """Whether a worker without samples may leave out its pass.

        It may not where its pass shows DDP which parameters are used, or where layers communicate.
        """
        if self.ddp is None or self.ddp.find_unused_parameters or self.ddp.static_graph:
            return False
        return not any(isinstance(each, nn.SyncBatchNorm) for each in self._module.modules())

    def skip(self) -> None:
        assert self.ddp is not None
        self.ddp(lambda: None)
        parameters = list(self._trained.values())
        torch.autograd.backward(parameters, [torch.zeros_like(parameter) for parameter in parameters])


def compress(wrapped: DistributedDataParallel) -> None:
    """Let the workers exchange their gradients in bfloat16."""
    # DDP refuses torch's hook, by its name, where there is no NCCL; gloo adds bfloat16 as well.
    wrapped.register_comm_hook(None, lambda group, bucket: bf16_compress_hook(group, bucket))


def exchange_flat(tensors: Iterable[Tensor], exchange: Callable[[Tensor], Tensor]) -> None:
    """Overwrite tensors with what `exchange` makes of them; those of one type and device go to it in one piece."""
    by_kind: dict[Any, list[Tensor]] = {}
    for each in tensors:
        by_kind.setdefault((each.dtype, each.device), []).append(each)
    for alike in by_kind.values():
        flat = exchange(torch.cat([each.flatten() for each in alike]))
        parts = torch.split(flat, [each.numel() for each in alike])
        torch._foreach_copy_(alike, [part.view_as(each) for part, each in zip(parts, alike, strict=True)])


class SharedBuffers:
    """The model's buffers, which are the same on all workers between steps; but for BatchNorm: `RunningStatistics`."""

    def __init__(self, module: nn.Module, gang: Gang) -> None:
        self._module, self._gang = module, gang
        self._places: list[tuple[nn.Module, str]] = []

    def find(self) -> None:
        """Look for the buffers that the model has now, before an iteration; all are those of rank 0."""
        own = {id(each) for each in statistics_in(self._module)}
        self._places = [
            (part, name)
            for part in self._module.modules()
            for name, each in part._buffers.items()
            if each is not None and id(each) not in own
        ]
        self.share(0)

    @torch.no_grad()
    def share(self, source: int) -> None:
        """Overwrite the buffers with those of the `source`, a worker that had samples in the step."""
        if self._gang.num_workers == 1 or not self._places:
            return
        buffers = [part._buffers.get(name) for part, name in self._places]  # a model may replace them by new tensors

        def share_one(flat: Tensor) -> Tensor:
            self._gang.copy([flat], source)
            return flat

        exchange_flat([each for each in buffers if each is not None], share_one)


# BatchNorm in a gang: the fewest samples of a pass, and running statistics of what all workers saw.
#
# Each worker's layers follow its own samples. At the end of an iteration, the running statistics become the mean over
# the workers, each counted by its samples; so they are the same whatever the shares, up to the noise of smaller
# batches.

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def least_samples(module: nn.Module) -> int:
    """Return the fewest samples of a pass: 2 if a BatchNorm takes its statistics from the batch, 1 otherwise."""
    norms = [each for each in module.modules() if isinstance(each, _BatchNorm)]
    return 2 if any(norm.training or norm.running_mean is None for norm in norms) else 1


def statistics_in(module: nn.Module) -> list[Tensor]:
    """Return all running statistics."""
    return [value for each in module.modules() if isinstance(each, _BatchNorm) for value in _statistics(each)]


def _statistics(norm: _BatchNorm) -> list[Tensor]:
    return [value for name in STATISTICS if (value := getattr(norm, name)) is not None]


@contextmanager
def uncounted(module: nn.Module) -> Iterator[None]:
    """Keep a pass that counts nothing out of the statistics that SyncBatchNorm takes over the gang.

    Its layers get an empty input, which torch leaves out, and the pass goes on with zeros.
    """
    given: dict[nn.Module, Tensor] = {}

    def take(layer: nn.Module, args: tuple[Tensor]) -> tuple[Tensor] | None:
        if not layer.training:
            return None
        given[layer] = args[0]
        return (args[0][:0],)

    def give(layer: nn.Module, _: Any, output: Tensor) -> Tensor:
        if not layer.training:
            return output
        whole = given.pop(layer)
        nothing = whole.masked_fill(torch.ones((), dtype=torch.bool, device=whole.device), 0.0)
        own = sum((each.sum() * 0.0 for each in layer.parameters()), output.sum())
        return nothing.to(output.dtype) + own.to(output.dtype)  # this layer and all below get a gradient

    layers = [each for each in module.modules() if isinstance(each, nn.SyncBatchNorm)]
    handles = [each.register_forward_pre_hook(take) for each in layers]
    handles += [each.register_forward_hook(give) for each in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class RunningStatistics(Component):
    """The running statistics of one worker's model, which are averaged over its gang after each iteration."""

    def __init__(self, module: nn.Module, gang: Gang) -> None:
        self._module = module
        self._gang = gang
        self._samples = 0

    def after_step(self, batch: GlobalBatch, *, has_stepped: bool) -> None:
        self._samples += batch.shares[self._gang.rank]

    def end(self) -> Mapping[str, Any]:
        self._average()
        return {}

    @torch.no_grad()
    def _average(self) -> None:
        """Replace the statistics that training changed by their means over the gang, on all workers."""
        samples, self._samples = self._samples, 0
        norms = [each for each in self._module.modules() if isinstance(each, _BatchNorm) and each.training]
        found = [value for each in norms for value in _statistics(each)]
        if self._gang.num_workers == 1 or not found:
            return
        sums = torch.cat([value.flatten().double() for value in found] + [found[0].new_ones(1).double()]) * samples
        *means, _ = torch.split((sums := self._gang.sum(sums)) / sums[-1], [each.numel() for each in found] + [1])
        for value, mean in zip(found, means, strict=True):
            value.copy_((mean if value.is_floating_point() else mean.round()).view_as(value))


# The parameters of a trial by their names: which are trained, and on which workers.
#
# Hooks may freeze and thaw layers, add layers, and add groups to an optimizer. So what the workers train is compared.


def parameters_of(module: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """Return the parameters of the model, then those that only an optimizer has, by name."""
    named: dict[str, Tensor] = dict(module.named_parameters())
    known = {id(each) for each in named.values()}
    for number, optimizer in enumerate(optimizers):
        for at, group in enumerate(optimizer.param_groups):
            for place, each in enumerate(group["params"]):
                if id(each) not in known:
                    known.add(id(each))
                    own = "optimizer" if len(optimizers) == 1 else f"optimizer {number}"
                    named[f"{own}.param_groups[{at}]['params'][{place}]"] = each
    return named


def check_dense(module: nn.Module) -> None:
    """Raise TrialFailure for an embedding with sparse gradients, which the workers cannot add up."""
    for path, each in module.named_modules():
        if isinstance(each, (nn.Embedding, nn.EmbeddingBag)) and each.sparse:
            raise refused(
                f"the gradient of {path or type(each).__name__} is sparse, and a gang averages dense ones; build the "
                "embedding with sparse=False, or set resources.gpus_per_trial.max to 1"
            )


def lazy_names(module: nn.Module) -> list[str]:
    """Return the names of parameters and buffers whose shape is not known before a sample passes."""
    named = itertools.chain(module.named_parameters(), module.named_buffers())
    return [name for name, each in named if is_lazy(each)]


def agree_on(gang: Gang, trained: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> None:
    """Compare what the workers train now; it was `before`. Raises TrialFailure where they differ."""
    rule = "; on_iteration(), on_step() and train_mode() must do the same on every worker"
    mine = [f"{name} {tuple(each.shape)}" for name, each in trained.items()]
    found = gang.exchange("\n".join(mine))
    if found is None:
        changed = next((name for name in trained if name not in before), next(iter(before), "a parameter"))
        raise refused(f"worker {gang.rank} begins or ceases to train {changed}, and not every worker does{rule}")
    for rank, text in enumerate(found):
        name = min(set(mine) ^ set(text.splitlines()), default=None)
        if name is not None:
            where, other = (gang.rank, rank) if name in mine else (rank, gang.rank)
            raise refused(f"{name} is trained on worker {where} and not on worker {other}{rule}")


# Digests: whether all workers of a gang have the same weights.

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_TOLERANCE = 1e-4
"""Relative difference of a tensor's norm on GPUs of different types, which round differently."""

Digest = dict[str, tuple[int, float]]
"""Name -> sum of the bits, and norm."""


@torch.no_grad()
def digest_of(named: Mapping[str, Tensor]) -> Digest:
    """Return the digest of each tensor; it waits for the device once."""
    if not named:
        return {}
    sums, norms = [], []
    for each in named.values():
        own = torch.view_as_real(each) if each.is_complex() else each
        sums.append(own.view(_BITS[own.element_size()]).sum(dtype=torch.int64))
        norms.append(torch.linalg.vector_norm(own, dtype=torch.float64))
    bits, sizes = torch.stack(sums).tolist(), torch.stack(norms).tolist()
    return dict(zip(named, zip(bits, sizes, strict=True), strict=True))


class SameWeights(Component):
    """Compares the weights of all workers at the end of a segment, or of the trial."""

    def __init__(self, loop: TorchRunner) -> None:
        self._loop = loop

    def after_evaluation(self, iterations: int, metrics: Mapping[str, float]) -> None:
        loop = self._loop
        if loop.ended or iterations == loop.segment.until_iterations:
            check_same_weights(loop.gang, parameters_of(loop.module, loop.optimizers.members))


def check_same_weights(gang: Gang, named: Mapping[str, Tensor]) -> None:
    """Compare the weights of all workers, after a segment. Raises TrialFailure, on all of them, where they differ."""
    if gang.num_workers == 1:
        return
    device = next(iter(named.values())).device
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    found: list[tuple[str, Digest]] = gang.gather((kind, digest_of(named)))
    (first_kind, first), *others = found
    is_uniform = all(other == first_kind for other, _ in others)
    for rank, (_, digest) in enumerate(others, start=1):
        for name, (bits, norm) in first.items():
            own_bits, own_norm = digest.get(name, (None, float("nan")))
            is_near = not is_uniform and abs(own_norm - norm) <= _TOLERANCE * abs(norm)
            if own_bits != bits and not is_near:
                raise refused(
                    f"{name} differs between worker 0 (norm {norm:.9g}) and worker {rank} ({own_norm:.9g}); change "
                    "weights in the same way on every worker: no random draws in on_step() or the optimizer, nothing "
                    "that depends on the rank or on evaluate()"
                )
