"""State that a segment may leave behind in its process: it is put back or away before the next trial trains there.

That is the folder, the environment, PyTorch's global switches and process groups, objects that only a collection frees,
and the memory that they held on a GPU. A context of CUDA that is lost for good is no such thing (`cuda_errors.py`).
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

_log = logging.getLogger(__name__)
_UNKNOWN = object()


class Leftovers:
    """The state of this process when a segment begins, after the import of the trial's module."""

    def __init__(self, device: Literal["cpu", "cuda"]) -> None:
        self._device = device
        self._folder = os.getcwd()
        self._environment = dict(os.environ)
        self._switches = _noted(_SWITCHES)

    def close(self) -> None:
        """Put everything back, after all else of the segment is closed and nothing refers to its objects."""
        for put in (self._put_folder, self._put_environment, self._leave_groups, self._put_switches, self._collect):
            try:
                put()
            except Exception:  # what is put back after it matters too
                _log.warning("the process is not quite as before the segment", exc_info=True)

    def _put_folder(self) -> None:
        with contextlib.suppress(OSError):  # it may be gone
            os.chdir(self._folder)

    def _put_environment(self) -> None:
        for name in os.environ.keys() - self._environment.keys():
            del os.environ[name]
        for name, value in self._environment.items():
            if os.environ.get(name) != value:
                os.environ[name] = value

    def _leave_groups(self) -> None:
        c10d = sys.modules.get("torch.distributed.distributed_c10d")
        if c10d is not None and c10d.is_initialized():
            from rubberband.executor.training.gang import leave_group

            leave_group(self._device, in_order=False)

    def _put_switches(self) -> None:
        _put(self._switches)

    def _collect(self) -> None:
        gc.collect()
        torch: Any = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.empty_cache()


class ThreadSwitches:
    """PyTorch's switches that a new thread does not inherit, as they are in this one."""

    def __init__(self) -> None:
        self._noted = _noted({name: switch for name, switch in _SWITCHES.items() if switch.of_thread})

    def put(self) -> None:
        """Set them in the thread that calls it."""
        _put(self._noted)


# PyTorch's switches


@dataclass(frozen=True, slots=True)
class _Switch:
    get: Callable[[Any], Any]
    put: Callable[[Any, Any], object]
    fresh: Any = _UNKNOWN
    """Its value when torch has just been imported, if that is the same on every machine."""
    of_thread: bool = False


def _noted(switches: Mapping[str, _Switch]) -> dict[str, Any]:
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return {name: switch.fresh for name, switch in switches.items()}
    return {name: _value(torch, switch) for name, switch in switches.items()}


def _value(torch: Any, switch: _Switch) -> Any:
    try:
        return switch.get(torch)
    except (AttributeError, RuntimeError):  # another version; or its old and new names were mixed
        return _UNKNOWN


def _put(noted: Mapping[str, Any]) -> None:
    """Put values back, in the order of the table: later ones are parts of earlier ones."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return
    for name, value in noted.items():
        if value is not _UNKNOWN and _value(torch, _SWITCHES[name]) != value:
            _SWITCHES[name].put(torch, value)


def _attribute(path: str, fresh: Any) -> tuple[str, _Switch]:
    *parents, name = path.split(".")

    def owner(torch: Any) -> Any:
        for parent in parents:
            torch = getattr(torch, parent)
        return torch

    return path, _Switch(
        lambda torch: getattr(owner(torch), name), lambda torch, value: setattr(owner(torch), name, value), fresh
    )


def _attention(name: str) -> tuple[str, _Switch]:
    """Return a kernel of scaled dot product attention."""
    return f"{name}_sdp", _Switch(
        lambda torch: getattr(torch.backends.cuda, f"{name}_sdp_enabled")(),
        lambda torch, value: getattr(torch.backends.cuda, f"enable_{name}_sdp")(value),
        True,
    )


def _autocast(device: str) -> Iterator[tuple[str, _Switch]]:
    yield (
        f"autocast of {device}",
        _Switch(
            lambda torch: torch.is_autocast_enabled(device),
            lambda torch, value: torch.set_autocast_enabled(device, value),
            False,
            of_thread=True,
        ),
    )
    yield (
        f"autocast type of {device}",
        _Switch(
            lambda torch: torch.get_autocast_dtype(device),
            lambda torch, value: torch.set_autocast_dtype(device, value),
            of_thread=True,
        ),
    )


def _default_device(torch: Any) -> Any:
    return torch.get_default_device() if getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None) else None


def _autocast_depth(torch: Any) -> int:
    depth: int = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth


def _put_autocast_depth(torch: Any, depth: int) -> None:
    """Leave autocasts that were entered: within one, weights that were cast once are taken for the present ones."""
    while _autocast_depth(torch) > depth:
        torch.autocast_decrement_nesting()
    while _autocast_depth(torch) < depth:
        torch.autocast_increment_nesting()
    torch.clear_autocast_cache()


_SWITCHES: dict[str, _Switch] = dict(
    [
        (
            "dtype",
            _Switch(
                lambda torch: str(torch.get_default_dtype()),
                lambda torch, value: torch.set_default_dtype(getattr(torch, value.removeprefix("torch."))),
                "torch.float32",
            ),
        ),
        (
            "device",
            _Switch(
                _default_device,
                lambda torch, value: torch.set_default_device(value),
                None,
                of_thread=True,
            ),
        ),
        (
            "deterministic algorithms",
            _Switch(
                lambda torch: (
                    torch.are_deterministic_algorithms_enabled(),
                    torch.is_deterministic_algorithms_warn_only_enabled(),
                ),
                lambda torch, value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
                (False, False),
            ),
        ),
        (
            "grad",
            _Switch(
                lambda torch: torch.is_grad_enabled(),
                lambda torch, value: torch.set_grad_enabled(value),
                True,
                of_thread=True,
            ),
        ),
        (
            "anomalies",
            _Switch(
                lambda torch: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
                lambda torch, value: torch.autograd.set_detect_anomaly(*value),
                (False, True),
            ),
        ),
        ("threads", _Switch(lambda torch: torch.get_num_threads(), lambda torch, value: torch.set_num_threads(value))),
        *_autocast("cpu"),
        *_autocast("cuda"),
        (
            "autocast cache",
            _Switch(
                lambda torch: torch.is_autocast_cache_enabled(),
                lambda torch, value: torch.set_autocast_cache_enabled(value),
                True,
                of_thread=True,
            ),
        ),
        ("autocast depth", _Switch(_autocast_depth, _put_autocast_depth, 0, of_thread=True)),
        *map(_attention, ("flash", "mem_efficient", "math", "cudnn")),
        _attribute("backends.cudnn.enabled", True),
        _attribute("backends.cudnn.benchmark", False),
        _attribute("backends.cudnn.deterministic", False),
        _attribute("backends.cuda.matmul.allow_bf16_reduced_precision_reduction", True),
        _attribute("backends.cuda.matmul.allow_fp16_reduced_precision_reduction", True),
        (
            "matmul precision",
            _Switch(
                lambda torch: torch.get_float32_matmul_precision(),
                lambda torch, value: torch.set_float32_matmul_precision(value),
                "highest",
            ),
        ),
        _attribute("backends.cudnn.allow_tf32", True),
        _attribute("backends.fp32_precision", "none"),
        _attribute("backends.cuda.matmul.fp32_precision", "none"),
        _attribute("backends.cudnn.fp32_precision", "none"),
        _attribute("backends.cudnn.conv.fp32_precision", "tf32"),
        _attribute("backends.cudnn.rnn.fp32_precision", "tf32"),
        _attribute("backends.mkldnn.fp32_precision", "none"),
        _attribute("backends.mkldnn.matmul.fp32_precision", "none"),
        _attribute("backends.mkldnn.conv.fp32_precision", "none"),
        _attribute("backends.mkldnn.rnn.fp32_precision", "none"),
    ]
)
