"""The process of a worker: its environment, and the state that a segment may leave behind in it.

That state is put back or away before the next trial trains there: the folder, the environment, global settings of
Python and of PyTorch, process groups, objects that only a collection frees, and the memory that they held on a GPU. A
context of CUDA that is lost for good is no such thing (`failures.py`).
"""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from rubberband.executor.training.trial import Device

_log = logging.getLogger(__name__)
_UNKNOWN = object()


class Leftovers:
    """The state of this process when a segment begins, after the import of the trial's module."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._folder = os.getcwd()
        self._environment = dict(os.environ)
        self.settings: Mapping[str, Any] = {name: get() for name, (get, _) in _SETTINGS.items()}
        self.switches: Mapping[str, Any] = _noted(_SWITCHES)
        """PyTorch's, by their dotted names or by what they are."""

    def close(self) -> None:
        """Put everything back, after all else of the segment is closed and nothing refers to its objects."""
        puts = (self._put_folder, self._put_environment, self._put_settings, self._leave_groups, self._put_switches)
        for put in (*puts, self._collect):
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

    def _put_settings(self) -> None:
        for name, value in self.settings.items():
            get, put = _SETTINGS[name]
            if get() != value:
                put(value)

    def _leave_groups(self) -> None:
        c10d = sys.modules.get("torch.distributed.distributed_c10d")
        if c10d is not None and c10d.is_initialized():
            from rubberband.executor.training.gang import leave_group

            leave_group(self._device, in_order=False)

    def _put_switches(self) -> None:
        _put(self.switches)

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


# Python's settings


def _filter_warnings(filters: list[Any]) -> None:
    warnings.resetwarnings()
    warnings.filters[:] = filters  # type: ignore[index]


def _log_to(state: tuple[int, int, list[logging.Handler]]) -> None:
    logging.disable(state[0])
    logging.root.setLevel(state[1])
    logging.root.handlers[:] = state[2]


def _handlers() -> dict[signal.Signals, Any]:
    """Return the handlers of signals that Python code can put back; none in a thread that may not."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    found = {each: signal.getsignal(each) for each in _SIGNALS}
    return {each: handler for each, handler in found.items() if handler is not None}


def _handle(handlers: Mapping[signal.Signals, Any]) -> None:
    for each, handler in handlers.items():
        signal.signal(each, handler)


_SIGNALS = (signal.SIGALRM, signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    # A second `set_start_method` fails, also where another trial made the first one.
    "start method": (
        lambda: multiprocessing.get_start_method(allow_none=True),
        lambda value: multiprocessing.set_start_method(value, force=True),
    ),
    "warnings": (lambda: list(warnings.filters), _filter_warnings),
    "logging": (lambda: (logging.root.manager.disable, logging.root.level, list(logging.root.handlers)), _log_to),
    "alarm": (  # before its handler: without one it ends the process
        lambda: signal.getitimer(signal.ITIMER_REAL) != (0.0, 0.0),
        lambda is_set: is_set or signal.setitimer(signal.ITIMER_REAL, 0.0),
    ),
    "signals": (_handlers, _handle),
    "timeout of sockets": (socket.getdefaulttimeout, socket.setdefaulttimeout),
}


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
    except (AttributeError, KeyError, RuntimeError):  # another version; or its old and new names were mixed
        return _UNKNOWN


def _put(noted: Mapping[str, Any]) -> None:
    """Put values back, in the order of the table: later ones are parts of earlier ones."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return
    for name, value in noted.items():
        if value is not _UNKNOWN and _value(torch, _SWITCHES[name]) != value:
            _SWITCHES[name].put(torch, value)


def _calls(
    get: str, put: str, fresh: Any = _UNKNOWN, *, arguments: tuple[Any, ...] = (), of_thread: bool = False
) -> _Switch:
    """Return a switch that one function of torch reads and another one sets, by their dotted names."""
    return _Switch(
        lambda torch: attrgetter(get)(torch)(*arguments),
        lambda torch, value: attrgetter(put)(torch)(*arguments, value),
        fresh,
        of_thread,
    )


def _attributes(fresh: Mapping[str, Any]) -> dict[str, _Switch]:
    """Return switches that are attributes, by their dotted names."""

    def switch(path: str) -> _Switch:
        owner, _, name = path.rpartition(".")
        return _Switch(
            attrgetter(path), lambda torch, value: setattr(attrgetter(owner)(torch), name, value), fresh[path]
        )

    return {path: switch(path) for path in fresh}


def _autocast(device: str) -> dict[str, _Switch]:
    return {
        f"autocast of {device}": _calls(
            "is_autocast_enabled", "set_autocast_enabled", False, arguments=(device,), of_thread=True
        ),
        f"autocast type of {device}": _calls(
            "get_autocast_dtype", "set_autocast_dtype", arguments=(device,), of_thread=True
        ),
    }


def _hooks(module: str) -> _Switch:
    """Return the hooks that are global in a module: they see the modules or optimizers of every trial."""

    def get(_: Any) -> dict[str, Any]:
        names = vars(sys.modules[module])
        return {name: copy.copy(value) for name, value in names.items() if name.startswith("_global_")}

    def put(_: Any, hooks: Mapping[str, Any]) -> None:
        for name, value in hooks.items():
            held = getattr(sys.modules[module], name)
            if isinstance(held, dict):  # others refer to it
                held.clear()
                held.update(value)
            else:
                setattr(sys.modules[module], name, value)

    return _Switch(get, put)


def _default_device(torch: Any) -> Any:
    return torch.get_default_device() if getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None) else None


def _modes(torch: Any) -> list[Any]:
    """Return the function modes that were entered, such as `torch.device`'s, without that of the default device."""
    default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return [mode for mode in torch.overrides._get_current_function_mode_stack() if mode is not default]


def _put_modes(torch: Any, modes: Sequence[Any]) -> None:
    for _ in torch.overrides._get_current_function_mode_stack():
        torch.overrides._pop_mode()
    default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    for mode in modes if default is None else (default, *modes):
        torch.overrides._push_mode(mode)


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


_SWITCHES: dict[str, _Switch] = {
    "dtype": _Switch(
        lambda torch: str(torch.get_default_dtype()),
        lambda torch, value: torch.set_default_dtype(getattr(torch, value.removeprefix("torch."))),
        "torch.float32",
    ),
    "modes": _Switch(_modes, _put_modes),  # the default device's is the lowest one
    "device": _Switch(_default_device, lambda torch, value: torch.set_default_device(value), None, of_thread=True),
    "deterministic algorithms": _Switch(
        lambda torch: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda torch, value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
        (False, False),
    ),
    "grad": _calls("is_grad_enabled", "set_grad_enabled", True, of_thread=True),
    "threads of autograd": _calls("_C._is_multithreading_enabled", "_C._set_multithreading_enabled", True),
    "anomalies": _Switch(
        lambda torch: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda torch, value: torch.autograd.set_detect_anomaly(*value),
        (False, True),
    ),
    **{f"hooks of {module}": _hooks(module) for module in ("torch.nn.modules.module", "torch.optim.optimizer")},
    "threads": _calls("get_num_threads", "set_num_threads"),
    **_autocast("cpu"),
    **_autocast("cuda"),
    "autocast cache": _calls("is_autocast_cache_enabled", "set_autocast_cache_enabled", True, of_thread=True),
    "autocast depth": _Switch(_autocast_depth, _put_autocast_depth, 0, of_thread=True),
    **{  # kernels of scaled dot product attention
        f"{kernel}_sdp": _calls(f"backends.cuda.{kernel}_sdp_enabled", f"backends.cuda.enable_{kernel}_sdp", True)
        for kernel in ("flash", "mem_efficient", "math", "cudnn")
    },
    **_attributes(
        {
            "backends.cudnn.enabled": True,
            "backends.cudnn.benchmark": False,
            "backends.cudnn.deterministic": False,
            "backends.cuda.matmul.allow_bf16_reduced_precision_reduction": True,
            "backends.cuda.matmul.allow_fp16_reduced_precision_reduction": True,
        }
    ),
    "matmul precision": _calls("get_float32_matmul_precision", "set_float32_matmul_precision", "highest"),
    **_attributes(
        {
            "backends.cudnn.allow_tf32": True,
            "backends.fp32_precision": "none",
            "backends.cuda.matmul.fp32_precision": "none",
            "backends.cudnn.fp32_precision": "none",
            "backends.cudnn.conv.fp32_precision": "tf32",
            "backends.cudnn.rnn.fp32_precision": "tf32",
            "backends.mkldnn.fp32_precision": "none",
            "backends.mkldnn.matmul.fp32_precision": "none",
            "backends.mkldnn.conv.fp32_precision": "none",
            "backends.mkldnn.rnn.fp32_precision": "none",
        }
    ),
}


# A worker's environment for CUDA, torch and OpenMP. Values of the user stay. torch and CUDA read it once: so the
# process that workers are forked from gets it as well, and nothing here imports torch.


_BEGAN_WITH = Path("/proc/self/environ")
"""The environment at this process's start: Ray sets OMP_NUM_THREADS to 1 later, where it is not set."""


def cpus_per_slot(slots: int) -> int:
    """Return the CPUs that this process may use, divided by the slots of its machine."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cpus // slots


def worker_settings(environment: Mapping[str, str], device: Device, slots: int) -> dict[str, str]:
    """Return variables to set in the `environment` of a worker on a machine of `slots` slots.

    Trials on the CPU see no GPU: Ray gives logical GPUs the ids of real ones.
    """
    chosen = {}
    if device == "cpu":
        chosen["CUDA_VISIBLE_DEVICES"] = ""
    elif not environment.keys() & {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}:
        # Trials of other widths, and shares that change, fragment fixed segments. Every torch reads this name, and
        # before the other one.
        chosen["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    if "TORCHINDUCTOR_COMPILE_THREADS" not in environment:  # by default one per CPU of the machine, up to 32
        chosen["TORCHINDUCTOR_COMPILE_THREADS"] = str(max(1, cpus_per_slot(slots)))
    return chosen


def compute_with(cpus: int) -> None:
    """Let torch compute with `cpus` threads on the CPU, now or once it is imported, unless OMP_NUM_THREADS is set."""
    if _names_threads():
        return
    os.environ["OMP_NUM_THREADS"] = str(max(1, cpus))
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(max(1, cpus))


def _names_threads() -> bool:
    """Whether the user, or the machine, has set OMP_NUM_THREADS."""
    try:
        return any(line.startswith(b"OMP_NUM_THREADS=") for line in _BEGAN_WITH.read_bytes().split(b"\0"))
    except OSError:
        return "OMP_NUM_THREADS" in os.environ


# The port of a gang. Rank 0's process listens there from the moment that it names it, so that it stays free.

_kept_ports: dict[int, socket.socket] = {}


_GANG_QUEUE = 1024


def reserve_port() -> int:
    """Return a port at which this process listens; the one before is given up."""
    release_port()
    listener = socket.create_server(("", 0), backlog=_GANG_QUEUE)
    port: int = listener.getsockname()[1]
    _kept_ports[port] = listener
    return port


def take_port(port: int) -> int | None:
    """Return the descriptor of the socket that listens at `port`, for its new owner; None if there is none."""
    listener = _kept_ports.pop(port, None)
    return None if listener is None else listener.detach()


def release_port() -> None:
    """Give the port up, to a trial that listens there itself."""
    while _kept_ports:
        _kept_ports.popitem()[1].close()
