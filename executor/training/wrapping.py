"""The model as its device and its gang take it: memory format, compilation, DistributedDataParallel."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from rubberband.executor.training.batch_norm import statistics_of
from rubberband.executor.training.runner import TrialFailure
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
        raise TrialFailure(
            "raised", "compile = True needs a C++ compiler and there is none; install g++, or use compile = False"
        ) from None
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        raise TrialFailure(
            "raised",
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
