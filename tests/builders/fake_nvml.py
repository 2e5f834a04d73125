# ruff: noqa: N802 - the names are those of NVML
"""A stand-in for pynvml with NVML's own function names: GPUs by number and by id, and drivers that fail."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from rubberband.executor.training import metering


class NVMLError(Exception):
    """NVML's error."""


@dataclass
class FakeNvml:
    """The driver of a machine; `busy_percent` is what its GPUs do."""

    ids: tuple[str, ...] = ("GPU-aa", "GPU-bb", "MIG-cc")
    busy_percent: float = 63
    power_mw: int = 231_000
    fails: str = ""
    """The function that fails."""
    asked: list[str] = field(default_factory=list)

    def nvmlInit(self) -> None:
        self._note("nvmlInit")

    def nvmlDeviceGetHandleByIndex(self, number: int) -> str:
        self._note("nvmlDeviceGetHandleByIndex")
        return self.ids[number]

    def nvmlDeviceGetHandleByUUID(self, name: str) -> str:
        self._note("nvmlDeviceGetHandleByUUID")
        if name not in self.ids:
            raise NVMLError("Not Found")
        return name

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:
        self._note(f"nvmlDeviceGetUtilizationRates {handle}")
        if handle.startswith("MIG-"):
            raise NVMLError("Not Supported")
        return SimpleNamespace(gpu=self.busy_percent, memory=5)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        self._note("nvmlDeviceGetMemoryInfo")
        return SimpleNamespace(total=80 * 10**9, free=40 * 10**9, used=40 * 10**9)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        self._note("nvmlDeviceGetPowerUsage")
        if handle.startswith("MIG-"):
            raise NVMLError("Not Supported")
        return self.power_mw

    def _note(self, asked: str) -> None:
        self.asked.append(asked)
        if self.fails and asked.startswith(self.fails):
            raise NVMLError("Driver/library version mismatch")

    def put(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
        """Be what metering finds; return what makes it look anew."""
        monkeypatch.setattr(metering, "_BINDINGS", ("fake_pynvml",))
        monkeypatch.setitem(sys.modules, "fake_pynvml", self)  # type: ignore[arg-type]
        metering._nvml.cache_clear()
        return metering._nvml.cache_clear
