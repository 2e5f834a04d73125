"""The model as its device and its gang take it: memory format, compilation, DistributedDataParallel."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from rubberband.executor.training.gang import Gang
from rubberband.executor.training.runner import refused
from rubberband.executor.training.torch_trial import TorchTrial


def prepare(module: nn.Module, trial: TorchTrial) -> None:
    """Bring the model, on its device, into the trial's memory format, and compile it at its first use.

    It is the same object with the same names in `state_dict`. Compiled kernels are kept in torch's own folder of the
    machine (TORCHINDUCTOR_CACHE_DIR), for the next trials of the same model. Raises TrialFailure without a compiler.
    """
    if trial.channels_last:
        for parameter in module.parameters():
            if parameter.dim() in (4, 5):
                layout = torch.channels_last if parameter.dim() == 4 else torch.channels_last_3d
                parameter.data = parameter.data.contiguous(memory_format=layout)
    if trial.compile:
        _check_compiler()
        # What earlier trials of this process compiled counts towards a limit, beyond which nothing is compiled.
        torch.compiler.reset()
        _compile(module)


def _compile(module: nn.Module) -> None:
    """Compile the model as `module.compile()` does, which passes over those that are a torch.nn.Sequential."""

    def call(*args: Any, **kwargs: Any) -> Any:  # a frame outside torch, in whose own modules nothing is compiled
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    module._compiled_call_impl = torch.compile(call)


def _check_compiler() -> None:
    from torch._dynamo import config
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    if config.disable:  # TORCHDYNAMO_DISABLE=1: nothing is compiled
        return
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise refused(
            "compile = True needs a C++ compiler and there is none; install g++, or use compile = False"
        ) from None
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        raise refused(
            "compile = True needs Python's headers and there are none; install python3-dev, or use compile = False",
        )


def wrap(
    module: nn.Module, trial: TorchTrial, device: torch.device, *, is_adaptive: bool, is_one_pass: bool
) -> nn.Module:
    """Return the model in its DistributedDataParallel.

    With adaptive batches gradients are no views of DDP's buckets: the noise scale then observes them all at once. A
    static graph holds only if the first step `is_one_pass`: DDP would average the gradients of its first one alone.
    DDP leaves the running statistics of BatchNorm alone: see `batch_norm`.
    """
    ignore = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignore(module, statistics_of(module))  # type: ignore[no-untyped-call]
    wrapped = DistributedDataParallel(
        module,
        device_ids=[0] if device.type == "cuda" else None,
        find_unused_parameters=trial.find_unused_parameters,
        gradient_as_bucket_view=not is_adaptive,
        static_graph=trial.static_graph and is_one_pass and not is_adaptive,
    )
    if trial.gradient_compression == "bf16":
        compress(wrapped)
    return wrapped


def compress(wrapped: DistributedDataParallel) -> None:
    """Let the workers exchange their gradients in bfloat16."""
    # DDP refuses torch's hook, by its name, where there is no NCCL; gloo adds bfloat16 as well.
    wrapped.register_comm_hook(None, lambda group, bucket: bf16_compress_hook(group, bucket))


def can_skip_passes(wrapped: nn.Module) -> bool:
    """Return whether a worker without samples may leave out its pass.

    It may not where its pass shows DDP which parameters are used, or where layers communicate.
    """
    if not isinstance(wrapped, DistributedDataParallel) or wrapped.find_unused_parameters or wrapped.static_graph:
        return False
    return not any(isinstance(each, nn.SyncBatchNorm) for each in wrapped.modules())


def skip_pass(wrapped: nn.Module) -> None:
    """Take part in DDP's average of a step with gradients of 0, without a pass through the model."""
    assert isinstance(wrapped, DistributedDataParallel)
    parameters = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
    wrapped._pre_forward(None)  # type: ignore[no-untyped-call]
    wrapped._post_forward(None)  # type: ignore[no-untyped-call]
    torch.autograd.backward(parameters, [torch.zeros_like(parameter) for parameter in parameters])


# BatchNorm in a gang: the fewest samples of a pass, and running statistics of what all workers saw.
#
# Each worker's layers follow its own samples. At the end of an iteration, the running statistics become the mean over
# the workers, each counted by its samples; so they are the same whatever the shares, up to the noise of smaller
# batches.

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def least_samples(module: nn.Module) -> int:
    """Return the fewest samples of a pass: 2 if a BatchNorm takes its statistics from the batch, 1 otherwise."""
    norms = [each for each in module.modules() if isinstance(each, _BatchNorm)]
    return 2 if any(norm.training or norm.running_mean is None for norm in norms) else 1


def statistics_of(module: nn.Module) -> list[str]:
    """Return the names of all running statistics, as in `state_dict`."""
    return [
        f"{path}.{name}" if path else name
        for path, each in module.named_modules()
        if isinstance(each, _BatchNorm)
        for name in _STATISTICS
        if getattr(each, name) is not None
    ]


class RunningStatistics:
    """The running statistics of one worker's model, which are averaged over its gang after each iteration."""

    def __init__(self, module: nn.Module, gang: Gang) -> None:
        self._module = module
        self._gang = gang
        self._samples = 0

    def add(self, samples: int) -> None:
        """Note that `samples` of this worker went through the model in training."""
        self._samples += samples

    @torch.no_grad()
    def average(self) -> None:
        """Replace the statistics that training changed by their means over the gang, on all workers."""
        samples, self._samples = self._samples, 0
        norms = [each for each in self._module.modules() if isinstance(each, _BatchNorm) and each.training]
        found = [value for each in norms for name in _STATISTICS if (value := getattr(each, name)) is not None]
        if self._gang.num_workers == 1 or not found:
            return
        sums = torch.cat([value.flatten().double() for value in found] + [found[0].new_ones(1).double()]) * samples
        *means, _ = torch.split((sums := self._gang.sum(sums)) / sums[-1], [each.numel() for each in found] + [1])
        for value, mean in zip(found, means, strict=True):
            value.copy_((mean if value.is_floating_point() else mean.round()).view_as(value))
