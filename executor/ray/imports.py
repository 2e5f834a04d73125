"""What a module finds in its process while it is imported: may the process of another environment be forked from it?"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterator, Mapping
from tempfile import TemporaryDirectory
from typing import Any, Self

_INTERPRETER = ("GLIBC_", "GOMP_", "KMP_", "LD_", "MALLOC_", "MKL_", "OPENBLAS_", "PYTHON")
"""Beginnings of variables that count before any import."""
_AS_GIVEN = {"PYTHONBREAKPOINT", "PYTHONUNBUFFERED", "PYTORCH_NVML_BASED_CUDA_CHECK"}
"""Variables that are read later, whose effect this process has in any case, or that change nothing else."""
_THREADS, _GPUS, _COMPILERS = "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "TORCHINDUCTOR_COMPILE_THREADS"
_OF_PREFIX = {"fsspec.config", "tqdm.utils"}
"""Modules that go through all variables for those that begin with their own name."""
_RANKS = {
    "lightning.fabric.utilities.rank_zero": "RANK",
    "lightning_fabric.utilities.rank_zero": "RANK",
    "torchmetrics.utilities.prints": "LOCAL_RANK",
}
"""Modules that take the rank of `rank_zero_only` from a variable at their import, which can be put later."""
_VIEWS = {"_collections_abc", "collections.abc", "os"}


class Imports:
    """Notes the variables that imports read and set while it is entered, and what else binds them to this process."""

    def __init__(self) -> None:
        self._before = dict(os.environ)
        self._read = set[str]()
        self._set: dict[str, str] = {}
        self._binding = ""
        """Why no function's process may be forked."""
        self._said = set[str]()

    def __enter__(self) -> Self:
        self._files = _open_files()
        read = self._read

        class Noting(os._Environ):  # type: ignore[type-arg]
            def __getitem__(self, name: str) -> str:
                if _reader() not in {*_OF_PREFIX, *_RANKS}:
                    read.add(name)
                found: str = super().__getitem__(name)
                return found

            def __iter__(self) -> Iterator[str]:
                if _reader() not in _OF_PREFIX:
                    read.add("")
                return super().__iter__()

        os.environ.__class__ = Noting
        return self

    def __exit__(self, *_: object) -> None:
        os.environ.__class__ = os._Environ
        self._set = {name: value for name, value in os.environ.items() if self._before.get(name) != value}
        if "" in self._read:
            self._binding = "its module goes through all variables at its import"
        elif _open_files() - self._files:
            self._binding = "its module leaves a file open"
        elif any(_is_temporary(each) for each in weakref.finalize._registry.values()):  # type: ignore[attr-defined]
            self._binding = "its module makes a temporary folder"

    def suit(self, environment: Mapping[str, str]) -> bool:
        """Whether the imports would have found the same in a process of that environment; says once why not."""
        why = self._binding or self._difference(environment)
        if why and why not in self._said:
            self._said.add(why)
            print(f"a function starts on its own: {why}")
        return not why

    def _difference(self, environment: Mapping[str, str]) -> str:
        names = {name for name in {*self._before, *environment} if name.startswith(_INTERPRETER)}
        for name in sorted((self._read | names) - _AS_GIVEN - {_THREADS, _COMPILERS}):
            before, there = self._before.get(name), environment.get(name)
            if name == _GPUS and before and there and before.count(",") == there.count(","):
                continue
            if there != before and (there is None or there != self._set.get(name)):
                return f"{name} differs, which counts at its import"
        return "" if environment.get(_THREADS, "1").isdecimal() else f"{_THREADS} is no number"

    def added_to(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return an environment with the variables that the imports have set."""
        return {**environment, **self._set}

    def go_on(self) -> None:
        """Put in a forked process what the imports have taken from variables that it has otherwise."""
        torch: Any = sys.modules.get("torch")
        threads = os.environ.get(_THREADS, "1")
        if torch is not None and threads != self._before.get(_THREADS):
            torch.set_num_threads(int(threads))
        inductor: Any = sys.modules.get("torch._inductor.config")
        compilers = os.environ.get(_COMPILERS, "")
        if inductor is not None and compilers.isdecimal():
            inductor.compile_threads = int(compilers)
        for name, variable in _RANKS.items():
            module: Any = sys.modules.get(name)
            if module is not None:
                module.rank_zero_only.rank = int(os.environ.get(variable, "0"))


def _reader() -> str:
    """Return the name of the module that reads a variable."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") in _VIEWS:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__"))


def _open_files() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def _is_temporary(info: Any) -> bool:
    return getattr(info.func, "__self__", None) is TemporaryDirectory
