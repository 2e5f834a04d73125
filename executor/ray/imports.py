"""What a module finds in its process while it is imported: may other processes be forked from that one?

Forked processes share what the imports have drawn or opened: a generator, a name, a place in a file. Processes with
imports of their own do not, so none is forked there (`binding`). The process of a function has an environment of its
own as well, which its imports may have read (`suit`).
"""

from __future__ import annotations

import os
import random
import stat
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, Self

from rubberband.executor.training.entrypoint import is_installed

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
_SEED = random.Random.seed
_DRAWS = {"numpy", "random", "secrets", "tempfile", "uuid"}
"""Packages that draw for the module that calls them."""


class Imports:
    """Notes the variables that imports read and set while it is entered, and what else binds them to this process."""

    def __init__(self, own: str = "") -> None:
        """`own`: the trial's module."""
        self._own = own.partition(".")[0]
        self._before = dict(os.environ)
        self._read = set[str]()
        self._set: dict[str, str] = {}
        self.binding = ""
        """Why no process may be forked."""
        self._draws = False
        self._said = set[str]()

    def __enter__(self) -> Self:
        self._files, self._folder = _open_files(), os.getcwd()
        read = self._read
        tempfile.gettempdir()  # which draws a name once
        self._undrawn = [
            (place, name, getattr(place, name))
            for place, name in ((os, "urandom"), (os, "getpid"), (random, "_urandom"), (random.Random, "seed"))
        ]
        for place, name, drawn in self._undrawn:
            setattr(place, name, self._noted(drawn))

        class Noting(os._Environ):  # type: ignore[type-arg]
            def __getitem__(self, name: str) -> str:
                if _reader() not in {*_OF_PREFIX, *_RANKS}:
                    read.add(name)
                return str(super().__getitem__(name))

            def __iter__(self) -> Iterator[str]:
                if _reader() not in _OF_PREFIX:
                    read.add("")
                return super().__iter__()

        os.environ.__class__ = Noting
        return self

    def __exit__(self, *_: object) -> None:
        os.environ.__class__ = os._Environ
        for place, name, drawn in self._undrawn:
            setattr(place, name, drawn)
        self._set = {name: value for name, value in os.environ.items() if self._before.get(name) != value}
        finalizers: Any = weakref.finalize
        if _open_files() - self._files:
            self.binding = "a module leaves a file open at its import"
        elif any(getattr(info.func, "__self__", None) is TemporaryDirectory for info in finalizers._registry.values()):
            self.binding = "a module makes a temporary folder at its import"
        elif os.getcwd() != self._folder:
            self.binding = "a module changes the current folder at its import"
        elif self._draws:
            self.binding = "a module draws random numbers, or takes its process's number, at its import"

    def _noted(self, drawn: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that notes where the trial's own source draws what another process would not have."""

        @wraps(drawn)
        def noting(*args: Any, **named: Any) -> Any:
            is_seeded = drawn is _SEED and any(value is not None for value in (*args[1:], *named.values()))
            self._draws = self._draws or (not is_seeded and self._is_own(sys._getframe(1)))
            return drawn(*args, **named)

        return noting

    def _is_own(self, frame: FrameType | None) -> bool:
        while frame is not None:
            top = str(frame.f_globals.get("__name__")).partition(".")[0]
            if top not in _DRAWS:
                path = Path(frame.f_code.co_filename)
                return top == self._own or (top != "rubberband" and path.is_absolute() and not is_installed(path))
            frame = frame.f_back
        return False

    def suit(self, environment: Mapping[str, str]) -> bool:
        """Whether the imports would have found the same in a process of that environment; says once why not."""
        why = self._difference(environment)
        if why and why not in self._said:
            self._said.add(why)
            print(f"a function starts on its own: {why}")
        return not why

    def _difference(self, environment: Mapping[str, str]) -> str:
        if "" in self._read:
            return "its module goes through all variables at its import"
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
    """Return the numbers of open files that have a place or another end, which devices have not."""
    found = set[str]()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the folder itself
            if not stat.S_ISCHR(os.fstat(int(number)).st_mode):
                found.add(number)
    return found
