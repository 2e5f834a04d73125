"""The use of the machine by a worker while it trains: its CPUs, its memory and its GPU, and what it waits for.

A thread looks every few seconds. A row covers a minute, or the end of a segment, and leaves with the next report, so
nothing is sent or journalled for it alone. The thread spends at most a thousandth of a CPU: where a look takes long, as
on a machine with thousands of processes, it looks less often. The first look is the training thread's own: a thread
that begins beside a busy one may not get to it for a second.

The GPU is asked through NVML by its Python binding, pynvml. Without it, without a driver, or with one that fails, the
rest is measured all the same. It is asked in the thread alone, so a driver that hangs delays no trial.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from typing import Any

from rubberband.executor.training.segment import Segment
from rubberband.executor.training.waits import Cause, Waited
from rubberband.values.machine_use import MachineUse

FIRST_S, EVERY_S, ROW_S = 0.5, 5.0, 60.0
"""Seconds to the second look, the longest time between two by plan, and the length of a row."""
LOOKS_SHARE = 1e-3
"""Part of a CPU that looks may take."""
_PATIENCE_S = 1.0
"""How long the end of a segment waits for the last look: a driver may hang."""
_BINDINGS = ("ray._private.thirdparty.pynvml", "pynvml")
"""Modules with NVML's functions: the copy that is installed with the backend, and the package nvidia-ml-py."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The state at an instant. CPU time and waits are counted since some earlier one."""

    at_s: float
    cpu_s: float
    memory_bytes: int
    waited_s: dict[Cause, float] = field(default_factory=dict)
    gpu: float | None = None
    gpu_memory_bytes: int | None = None
    watts: float | None = None


class Rows:
    """Makes rows of looks, each from the end of the one before."""

    def __init__(self) -> None:
        self._looks: list[Look] = []
        """Looks of the present row, after the last one of the row before."""
        self._ready: list[tuple[float, MachineUse]] = []

    def add(self, look: Look, *, is_last: bool = False) -> None:
        """Take in a look; the row is over a minute after its beginning, and after the last look of a segment."""
        self._looks.append(look)
        first = self._looks[0]
        if look.at_s > first.at_s and (is_last or look.at_s - first.at_s >= ROW_S):
            self._ready.append((look.at_s, _row(self._looks)))
            self._looks = [look]

    def take(self, now_s: float) -> tuple[MachineUse, ...]:
        """Return the rows that are over since the last call."""
        ready, self._ready = self._ready, []
        return tuple(replace(row, ago_s=round(max(0.0, now_s - end_s), 1)) for end_s, row in ready)


def _row(looks: list[Look]) -> MachineUse:
    first, last = looks[0], looks[-1]
    seconds = last.at_s - first.at_s
    waits = {f"{cause}_s": round(max(0.0, last.waited_s[cause] - first.waited_s[cause]), 3) for cause in last.waited_s}
    taken = [look.gpu_memory_bytes for look in looks if look.gpu_memory_bytes is not None]
    return MachineUse(
        seconds=round(seconds, 3),
        ago_s=0.0,
        cpu=round(max(0.0, last.cpu_s - first.cpu_s) / seconds, 3),
        memory_bytes=max(look.memory_bytes for look in looks),
        gpu=_mean(looks, lambda look: look.gpu, 3),
        gpu_memory_bytes=max(taken, default=None),
        watts=_mean(looks, lambda look: look.watts, 1),
        **waits,
    )


def _mean(looks: list[Look], value: Callable[[Look], float | None], digits: int) -> float | None:
    """Return the mean of what each look found, weighted by the time since the look before; None if none found any."""
    found = [(seen, look.at_s - before.at_s) for before, look in pairwise(looks) if (seen := value(look)) is not None]
    total_s = math.fsum(seconds for _, seconds in found)
    return round(math.fsum(seen * seconds for seen, seconds in found) / total_s, digits) if total_s > 0.0 else None


class Processes:
    """This process and its children."""

    def __init__(self) -> None:
        import psutil

        self._own, self._errors = psutil.Process(), (psutil.Error, OSError)

    def read(self) -> tuple[float, int]:
        """Return their CPU seconds so far, those of children that have ended included, and their memory in bytes."""
        seconds, memory_bytes = 0.0, 0
        for each in (self._own, *self._own.children(recursive=True)):
            with suppress(*self._errors), each.oneshot():  # a child may just have ended
                times, memory = each.cpu_times(), each.memory_info()
                seconds += times.user + times.system + times.children_user + times.children_system
                memory_bytes += memory.rss
        return seconds, memory_bytes


class Gpu:
    """The GPU of this process, as NVML knows it."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle

    @classmethod
    def find(cls, visible: str) -> Gpu | None:
        """Return the first GPU of CUDA_VISIBLE_DEVICES=`visible`, a number or the id of a GPU or MIG instance.

        None without NVML, and where it does not answer.
        """
        name = visible.split(",")[0].strip()
        nvml = _nvml() if name else None
        if nvml is None:
            return None
        try:
            by_number = name.isdecimal()
            handle = nvml.nvmlDeviceGetHandleByIndex(int(name)) if by_number else nvml.nvmlDeviceGetHandleByUUID(name)
        except Exception as error:  # a driver may fail in any way
            _log.info("the use of GPU %s is not known: %s", name, error)
            return None
        return cls(nvml, handle)

    def read(self) -> dict[str, Any]:
        """Return `gpu`, `gpu_memory_bytes` and `watts`, as far as it has them: a MIG instance has only memory."""
        readings: dict[str, Callable[[], Any]] = {
            "gpu": lambda: self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100.0,
            "gpu_memory_bytes": lambda: int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used),
            "watts": lambda: self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3,
        }
        found = {}
        for name, read in readings.items():
            try:
                found[name] = read()
            except Exception as error:
                _log.debug("NVML has no %s: %s", name, error)
        return found


@cache
def _nvml() -> Any:
    """Return NVML's functions, ready for use; None without them or a driver that works."""
    for name in _BINDINGS:
        try:
            nvml = importlib.import_module(name)
            nvml.nvmlInit()
        except Exception as error:
            _log.info("the use of GPUs is not known by %s: %s", name, error)
        else:
            return nvml
    return None


class Meter:
    """Looks at this worker in a thread, from the beginning of its training to its end."""

    def __init__(
        self,
        waited: Waited,
        *,
        visible: str = "",
        clock: Callable[[], float] = time.monotonic,
        processes: Callable[[], Processes] = Processes,
    ) -> None:
        """`visible` is CUDA_VISIBLE_DEVICES; empty: it has no GPU."""
        self._waited, self._visible, self._clock = waited, visible, clock
        self._rows, self._mutex, self._over = Rows(), threading.Lock(), threading.Event()
        self._processes = processes()
        spent_s = self._look()
        self._thread = threading.Thread(target=self._follow, args=(spent_s,), name="rubberband meter", daemon=True)
        self._thread.start()

    def take(self, *, is_last: bool = False) -> tuple[MachineUse, ...]:
        """Return the rows since the last call; if it `is_last`, the looks end, and the last row ends now."""
        if is_last:
            self._over.set()
            self._thread.join(_PATIENCE_S)
        with self._mutex:
            return self._rows.take(self._clock())

    def close(self) -> None:
        """Let the looks end."""
        self._over.set()

    def _follow(self, spent_s: float) -> None:
        try:
            gpu, pause_s = Gpu.find(self._visible), FIRST_S
            while not self._over.wait(max(pause_s, spent_s / LOOKS_SHARE)):
                spent_s, pause_s = self._look(gpu), min(EVERY_S, 2.0 * pause_s)
            self._look(is_last=True)
        except Exception:  # training goes on without
            _log.warning("the use of this machine is not measured any more", exc_info=True)

    def _look(self, gpu: Gpu | None = None, *, is_last: bool = False) -> float:
        """Add a look; return the CPU seconds that it took.

        At the beginning and at the end the GPU is not asked, as it may have nothing to do yet, or any more.
        """
        began_s, at_s = time.thread_time(), self._clock()
        cpu_s, memory_bytes = self._processes.read()
        waited_s = {cause: seconds() for cause, seconds in self._waited.items()}
        found = {} if gpu is None else gpu.read()
        look = Look(at_s=at_s, cpu_s=cpu_s, memory_bytes=memory_bytes, waited_s=waited_s, **found)
        with self._mutex:
            self._rows.add(look, is_last=is_last)
        return time.thread_time() - began_s


def make_meter(segment: Segment, waited: Waited) -> Meter | None:
    """Return the meter of a worker; None where the processes of its machine cannot be seen."""
    try:
        return Meter(waited, visible=os.environ.get("CUDA_VISIBLE_DEVICES", "0") if segment.device == "cuda" else "")
    except Exception:
        _log.warning("the use of this machine is not measured", exc_info=True)
        return None
