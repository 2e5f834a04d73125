"""The failures of a trial: their kinds, how one is described in a line with its fix, lack of memory, errors of CUDA.

No torch is imported here. Most errors of CUDA are final for a process: every later call fails with the same error, so
only a new process can use the GPU.
"""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from linecache import getline
from typing import TYPE_CHECKING, Any

from rubberband.errors import CheckpointError, CheckpointLostError
from rubberband.units import counted, did_you_mean
from rubberband.values.environment import Environment

if TYPE_CHECKING:
    import torch

    from rubberband.executor.core.events import FailureKind
    from rubberband.executor.training.segment import SegmentFailure

MOST_DETAILS = 20_000
"""Characters of a trace-back that the journal keeps."""


class TrialFailure(Exception):
    """A failure that training itself found, with its kind; the message is one line for the user."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind

    def __reduce__(self) -> tuple[type[TrialFailure], tuple[FailureKind, str]]:
        return type(self), (self.kind, str(self))


def refused(line: str) -> TrialFailure:
    """Return the failure of a trial that cannot be trained as it is written, in one line with the fix."""
    return TrialFailure("raised", line)


class UnclearMetric(TrialFailure):
    """A program prints its metric so that it is not clear which number counts; it has to be said."""

    def __init__(self, message: str) -> None:
        super().__init__("no_metric", message)

    def __reduce__(self) -> tuple[type[UnclearMetric], tuple[str]]:  # type: ignore[override]
        return type(self), (str(self),)


class LacksMemory(TrialFailure):
    """This machine has too little memory; another one may have enough."""

    @classmethod
    def with_least(cls, samples: int, larger: str = "an instance with more memory") -> LacksMemory:
        """Return the failure of a trial whose fewest samples do not fit: another try would only repeat it."""
        at_once = f"out of memory with {counted(samples, 'sample')} at once"
        return cls("memory", f"{at_once}; use a smaller model, or {larger}")


class RanOut(TrialFailure):
    """A step ran out of memory: its segment begins again from its checkpoint, with fewer samples at once."""

    def __init__(self, message: str, most_per_gpu: int) -> None:
        super().__init__("raised", message)
        self.most_per_gpu = most_per_gpu


class FailedInProcess(Exception):
    """The failure of a trial in a process of its own, which has described it there."""

    def __init__(self, failure: SegmentFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class WorkerTrace(Exception):
    """The trace-back of an exception in a loader worker, or the last lines of a program, as the cause of one here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class TrainingEnded(Exception):
    """The trial has ended by itself, before the iteration that was asked for."""


class GangBroken(Exception):
    """Another worker of the gang failed, and not this one."""


def describe(
    error: BaseException, *, in_gang: bool, broken: str = "", environment: Environment | None = None
) -> SegmentFailure:
    """Return the failure to report; `in_gang`: whether the workers depend on each other's collectives.

    `broken` says how the gang lost another worker before: then any error may follow from that. The secrets of
    `environment` are masked before a text is cut: what is left of one would not be found later.
    """
    from rubberband.executor.training.segment import SegmentFailure

    masked = (environment or Environment()).masked
    details = _kept(masked(printable("".join(traceback.format_exception(error)))))
    if broken and not isinstance(error, CheckpointError):
        return SegmentFailure(kind="raised", message=printable(broken), details=details, secondary=True)
    if isinstance(error, FailedInProcess):
        return error.failure
    if isinstance(error, TrialFailure):
        return SegmentFailure(
            kind=error.kind,
            message=printable(str(error)),
            details=details,
            secondary=False,
            most_per_gpu=error.most_per_gpu if isinstance(error, RanOut) else None,
        )
    if isinstance(error, CheckpointError):
        lost = isinstance(error, CheckpointLostError)
        return SegmentFailure(
            kind="checkpoint", message=printable(str(error)), details=details, secondary=False, lost=lost
        )
    secondary = in_gang and is_broken_collective(error) and not lacks_memory(error)
    message = f"{one_line(error, masked)}{_remedy(error)}"
    kind: FailureKind = "gpu" if is_of_machine(error) else "raised"
    return SegmentFailure(kind=kind, message=message, details=details, secondary=secondary)


ELEMENTWISE = "use an optimizer that treats each element alone, such as AdamW or SGD"


def _remedy(error: BaseException) -> str:
    """Return the fix for failures that many models have in common."""
    if is_of_machine(error):
        return MACHINE
    if lacks_memory(error):
        return "; train on fewer samples at once: batch.max_per_gpu, or the trial's max_batch_size_per_gpu"
    if isinstance(error, RuntimeError) and "Expected to have finished reduction" in str(error):
        return "; the loss leaves parameters out: set find_unused_parameters = True"
    if isinstance(error, RuntimeError) and "No CUDA GPUs are available" in str(error):
        return "; this process has no GPU: leave the model on the CPU in build_model(), or use context.device elsewhere"
    if "placement changes" in str(error):
        return f"; torch cannot do this with divided weights; {ELEMENTWISE}"
    if "mixed torch.Tensor and DTensor" in str(error):
        return (
            "; weights of a part are divided outside its call: call the part, and not its forward() or a layer of it, "
            "use the optimizer's weight_decay and no weights in the loss, or write shard() with other parts"
        )
    if "invalid python storage" in str(error):
        return (
            "; a divided model cannot be copied: make its copy, such as an average of weights, in build_model() as a "
            "layer of the model, or keep copies of single parameters"
        )
    if "is a view and is being modified inplace" in str(error):
        return (
            '; a part of a model with sharding = "fsdp" changes its input in place: set inplace=False, or write '
            "x = x + y in place of x += y"
        )
    if "InvalidCxxCompiler" in str(error) or "Python.h" in str(error):
        return "; torch.compile needs them: install g++ and python3-dev, or set compile = False"
    if isinstance(error, ValueError) and "more than 1 value per channel" in str(error):
        return "; BatchNorm cannot train on a batch of one: use a larger batch, or another number of samples"
    if is_of_cuda(error):
        return cuda_remedy(error)
    return _of_configuration(error) if isinstance(error, KeyError) else ""


def _of_configuration(error: KeyError) -> str:
    """Return the fix for a parameter that the configuration lacks, where `config[...]` failed."""
    if (last := error.__traceback__) is None or not error.args:
        return ""
    while last.tb_next is not None:
        last = last.tb_next
    config, code = last.tb_frame.f_locals.get("config"), last.tb_frame.f_code
    line, end, start, _ = next(islice(code.co_positions(), last.tb_lasti // 2, None))
    failed = getline(code.co_filename, line or 0).encode()[start or 0 :]
    if line != end or not failed.startswith(b"config[") or not isinstance(config, Mapping) or error.args[0] in config:
        return ""
    known = [str(key) for key in config]
    has = did_you_mean(str(error.args[0]), known) or f"; it has {', '.join(known) or 'nothing'}"
    return f" is not in the configuration, which search.space gives{has}"


def printable(text: str) -> str:
    """Return `text` without the lone surrogates of file names that are no UTF-8: no journal accepts them."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _kept(details: str) -> str:
    """Return the beginning and the end of a trace-back: an error's message may hold a whole data set."""
    left_out = len(details) - MOST_DETAILS
    if left_out <= 0:
        return details
    half = MOST_DETAILS // 2
    return f"{details[:half]}\n[{left_out:,} characters are left out here]\n{details[-half:]}"


def one_line(error: BaseException, masked: Callable[[str], str] = str) -> str:
    """Return `Type: text`, in one line of at most 300 characters."""
    text = masked(str(error))
    if is_of_cuda(error):  # general advice follows
        text = text.partition("\n")[0]
    text = printable(" ".join(text.split()))
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return line if len(line) <= 300 else line[:299] + "…"


def is_broken_collective(error: BaseException) -> bool:
    """Whether a collective broke because another worker went away: gloo, nccl or the store lost its peer."""
    if isinstance(error, GangBroken) or _is_of_collective(error):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(name in text for name in ("gloo", "Gloo", "NCCL", "ProcessGroup"))


MACHINE = "; the GPU is at fault, not the trial, which is tried again: an instance whose GPU fails twice is replaced"
_OF_MACHINES = {
    46: "device(s) is/are busy or unavailable",
    214: "uncorrectable ECC error",
    802: "system not yet initialized",
}
"""CUDA's numbers, and their texts (cudaGetErrorString), which is all that torch has before 2.8."""
_OF_EITHER = {719: "unspecified launch failure", 999: "unknown error"}
"""These are a machine's if the driver has an Xid of hardware for them."""
_OUT_OF_MEMORY = 2
_XIDS = frozenset({48, 61, 62, 63, 64, 74, 79, 92, 94, 95, 110, 119, 120, 140, 143})
"""Xid numbers of hardware and its firmware, not of the application (13, 31, 43, 45).
Source: NVIDIA, "XID Errors" (GPU deployment and management)."""
_XID = re.compile(r"\[\s*(\d+\.\d+)\].*NVRM: Xid \(.*?\): (\d+)")
_RECENT_S = 600.0
_DMESG_S = 5.0
_DONE_S = 5.0
"""The longest wait for kernels that are under way."""
_LOOK_S = 0.002


def is_of_cuda(error: BaseException) -> bool:
    """Whether it comes from CUDA, other than for lack of memory."""
    if not isinstance(error, RuntimeError) or getattr(error, "error_code", None) == _OUT_OF_MEMORY:
        return False
    line = _cuda_line(error)
    return line != "" and not line.startswith("out of memory")


def _cuda_line(error: BaseException) -> str:
    """Return the text of CUDA, without the general advice on device-side assertions and more that torch adds."""
    return str(error).partition("CUDA error: ")[2].partition("\n")[0]


def is_of_machine(error: BaseException) -> bool:
    """Whether it is a fault of the GPU or its driver, so that the trial may train well on another one."""
    if not is_of_cuda(error):
        return False
    return _is(error, _OF_MACHINES) or (_is(error, _OF_EITHER) and _hardware_failed())


def _is(error: BaseException, known: dict[int, str]) -> bool:
    return getattr(error, "error_code", None) in known or any(each in _cuda_line(error) for each in known.values())


def _hardware_failed() -> bool:
    """Whether the kernel's log, where it can be read, has a recent Xid of hardware."""
    try:
        log = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=_DMESG_S, check=False).stdout
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return False
    since = time.monotonic() - _RECENT_S
    return any(float(at) >= since and int(number) in _XIDS for at, number in _XID.findall(log))


def cuda_remedy(error: BaseException) -> str:
    """Return the fix for an error of CUDA, to follow the message."""
    line = _cuda_line(error)
    if "no kernel image" in line:
        return "; this build of torch has no code for the GPU: install one for it, or use another instance_type"
    if "device-side assert" in line:
        return (
            "; a label or index is probably out of range: train it on the CPU, or with CUDA_LAUNCH_BLOCKING=1, to see "
            "the line"
        )
    return "; CUDA reports errors late: train it on the CPU, or with CUDA_LAUNCH_BLOCKING=1, to see the line"


def context_is_lost() -> bool:
    """Whether this process can use its GPU no more; False as well if the GPU is still busy after a few seconds."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        deadline = time.monotonic() + _DONE_S
        while not torch.cuda.current_stream().query():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOOK_S)
        torch.zeros(1, device="cuda").add_(1).item()
        torch.cuda.synchronize()
    except RuntimeError as error:
        return is_of_cuda(error)
    return False


_SIGNS = (
    "CUDA error: out of memory",  # outside of torch's allocator: page-locked memory, kernels that are loaded
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
)
"""In messages of errors that lack of memory causes, beside torch's own."""


_DOUBTFUL_SIGNS = (
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "Unable to find a valid cuDNN algorithm",
    "FIND was unable to find an engine",
    "CUDNN_STATUS_NOT_SUPPORTED",
    "CUDNN_STATUS_INTERNAL_ERROR",
)
"""In messages of libraries that find no memory for themselves on a full GPU; on others, the cause is another one."""


_NCCL_SIGNS = ("out of memory", "Failed to CUDA calloc", "Failed to CUDA malloc")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error comes from a lack of memory on the device, or of the process.

    A collective that failed for want of memory does not count: it cannot be repeated by one worker.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or not isinstance(error, RuntimeError) or _is_of_collective(error):
        return False
    text = str(error)
    return (
        isinstance(error, torch.OutOfMemoryError)
        or any(sign in text for sign in _SIGNS)
        or (any(sign in text for sign in _DOUBTFUL_SIGNS) and _is_full(torch))
    )


def lacks_memory(error: BaseException) -> bool:
    """Return whether the error comes from a lack of memory, in a collective too."""
    in_collective = _is_of_collective(error) and any(sign in str(error) for sign in _NCCL_SIGNS)
    return in_collective or is_out_of_memory(error)


def _is_of_collective(error: BaseException) -> bool:
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available():
        return False
    return isinstance(error, torch.distributed.DistError)


def _is_full(torch: Any) -> bool:
    """Return whether the GPU has less than half of its memory free; False if it does not answer any more."""
    if not torch.cuda.is_initialized():
        return True
    try:
        free, total = torch.cuda.mem_get_info()
    except RuntimeError:
        return False
    return bool(free < total / 2)


def release(device: torch.device) -> None:
    """Give back memory that nothing uses any more, to be called when the error is gone: it holds the failed pass."""
    if device.type == "cuda":
        gc.collect()
        sys.modules["torch"].cuda.empty_cache()


_OF_RANK = re.compile(r"^\[rank\d+\]:\s?")
_FRAME = re.compile(r"Traceback \(most recent call last\)|  File \"")
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(:|$)")
_OF_LAUNCHERS = re.compile(r"[\w.]*(ChildFailedError|CalledProcessError)\b")
"""Exceptions of torchrun and of accelerate, which follow from that of the program."""
_ERROR = re.compile(r"([^\s:]+: )?(fatal )?error: \S", re.IGNORECASE)
"""The last line of a parser of options: `train.py: error: …`, `Error: …`."""


def error_in(lines: Sequence[str]) -> str:
    """Return the line of the last exception in the last lines of a program, or of an error; empty without any."""
    error, is_trace = "", False
    for line in (_OF_RANK.sub("", each.rstrip()) for each in lines):
        if _FRAME.match(line):
            is_trace = True
        elif is_trace and _EXCEPTION.match(line):
            is_trace = False
            error = error if error and _OF_LAUNCHERS.match(line) else line
        elif not is_trace and _ERROR.match(line):
            error = line
    return error
