"""A machine with GPUs, as nvidia-smi and torch tell of it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

_NVIDIA_SMI = """#!/bin/sh
if [ "$1" = -L ]; then cat '{listing}'; else cat '{used}'; fi
exit {status}
"""
_TORCH = """
import os, types
from types import SimpleNamespace

__version__ = {version!r}
version = SimpleNamespace(cuda={cuda!r})
open({asked!r}, "a").write(os.environ.get("CUDA_VISIBLE_DEVICES", "all") + "\\n")

def init():
    if not {ids!r}:
        raise RuntimeError({error!r})

cuda = SimpleNamespace(
    init=init,
    device_count=lambda: len({ids!r}),
    get_device_properties=lambda index: SimpleNamespace(uuid={ids!r}[index].removeprefix("GPU-")),
)
"""


class FakeGpus:
    """Puts an nvidia-smi on PATH and a torch where processes find it first; locks are in a folder of the test."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._bin, self._python = folder / "fake-bin", folder / "fake-python"
        self._bin.mkdir()
        (self._python / "torch").mkdir(parents=True)
        self._asked = folder / "asked"
        temporary = folder / "tmp"
        temporary.mkdir()
        for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("PATH", f"{self._bin}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("PYTHONPATH", f"{self._python}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        monkeypatch.setenv("TMPDIR", str(temporary))
        monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    def listed(self, *lines: str, status: int = 0) -> None:
        """What `nvidia-smi -L` prints, and its exit status."""
        (self._bin / "listing").write_text("".join(f"{line}\n" for line in lines))
        script = self._bin / "nvidia-smi"
        script.write_text(_NVIDIA_SMI.format(listing=self._bin / "listing", used=self._bin / "used", status=status))
        script.chmod(0o755)

    def plain(self, count: int) -> tuple[str, ...]:
        """So many GPUs, which torch can use; return their ids."""
        ids = tuple(f"GPU-0000000{index}-aaaa-bbbb-cccc-dddddddddddd" for index in range(count))
        self.listed(*(f"GPU {index}: NVIDIA A100-SXM4-40GB (UUID: {gpu})" for index, gpu in enumerate(ids)))
        self.used(*((gpu, 3) for gpu in ids))
        self.torch(*ids)
        return ids

    def used(self, *pairs: tuple[str, int]) -> None:
        """The memory in use (MiB) by id."""
        (self._bin / "used").write_text("".join(f"{gpu}, {mib}\n" for gpu, mib in pairs))

    def torch(self, *ids: str, version: str = "2.11.0+cu130", cuda: str | None = "13.0", error: str = "") -> None:
        source = _TORCH.format(version=version, cuda=cuda, asked=str(self._asked), ids=ids, error=error)
        (self._python / "torch" / "__init__.py").write_text(source)

    def times_asked(self) -> int:
        return len(self._asked.read_text().splitlines()) if self._asked.exists() else 0
