"""Loader workers: processes that load the next batches while the present one is trained. torch's DataLoader runs them.

They are asked for one part after another (a part goes through the model at once), as far ahead as they have room. If
something else comes next, as after a change of the batch size, all that is under way is given up: a worker ends the
part that it is at, leaves out the others, and goes on with the batch that is due. So nothing is skipped or repeated,
and no position but that of the last trained batch has to be kept.

They are forked, as is torch's own habit on Linux: a dataset need not be picklable, and its memory is shared.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import dataclasses
import faulthandler
import math
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import IO, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from rubberband.executor.training.failures import TrialFailure, WorkerTrace, one_line, refused
from rubberband.executor.training.sampler import Indices
from rubberband.units import shown

MOST_BY_DEFAULT = 8
"""The most loader workers of a GPU where the trial does not say how many."""
_SET_PDEATHSIG = 1
_FAREWELL_S = 1.0
"""A loader worker that is not gone by then is killed."""
_ENDING_S = 10.0
"""The longest wait for the end of a loader worker whose connection is cut."""
_LOOK_S = 0.5
"""Seconds between two looks whether all loader workers are there, while a batch is waited for."""
_DUMP = signal.SIGUSR1
"""Makes a loader worker write down where it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSettings:
    """Wishes of a trial for its loader workers, and what the machine has for them."""

    num_workers: int | None
    """None: as many as there are CPUs for each GPU, but for one, which trains."""
    prefetch_factor: int
    """Parts of a batch that each of them has in hand."""
    timeout_s: float
    """The longest wait for a part."""
    cpus: int
    """CPUs for one GPU."""
    start: Callable[[int, Any], None]
    """Called with (worker, dataset) in each."""
    changes: Callable[[], int] = int
    """Returns how often the trial has called `reload_data`."""

    def __post_init__(self) -> None:
        if self.num_workers is not None:
            _check_least("num_workers", self.num_workers, 0)
        _check_least("prefetch_factor", self.prefetch_factor, 1)
        timeout_s: Any = self.timeout_s
        if not (isinstance(timeout_s, (int, float)) and 0.0 < timeout_s < math.inf):
            raise refused(f"loader_timeout_s={shown(timeout_s)} is no positive number; use seconds")

    def count(self, most: int | None = None) -> int:
        """Return how many loader workers to start; `most` that are of use, unless the trial asks for some."""
        if self.num_workers is not None:
            return self.num_workers
        return max(0, min(MOST_BY_DEFAULT if most is None else most, MOST_BY_DEFAULT, self.cpus - 1))


def _check_least(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise refused(f"{name}={shown(value)} is no integer of at least {least}; use one")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Samples of one epoch that go through the model at once."""

    indices: Indices
    epoch: int

    def equals(self, other: Part) -> bool:
        return self.epoch == other.epoch and np.array_equal(self.indices, other.indices)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    series: int
    part: Part


@dataclass(slots=True)
class _Loaded:
    series: int
    batch: Any = None
    failure: _Failure | None = None

    def pin_memory(self) -> _Loaded:
        """Called by torch's thread."""
        return _Loaded(self.series, pinned(self.batch), self.failure)


@dataclass(slots=True)
class _Failure:
    """An exception in a loader worker, on its way to the trial."""

    pickled: bytes | None
    line: str
    trace: str

    @classmethod
    def of(cls, error: BaseException) -> _Failure:
        trace = "".join(traceback.format_exception(error))
        pickled = None
        if isinstance(error, Exception):
            with contextlib.suppress(Exception):
                pickled = pickle.dumps(error)
                pickle.loads(pickled)  # some can be pickled and not read back
        return cls(pickled, one_line(error), trace)

    def error(self) -> Exception:
        """Return the exception, with the worker's own trace as its cause."""
        found = None
        if self.pickled is not None:
            with contextlib.suppress(Exception):
                found = pickle.loads(self.pickled)
        error = found if isinstance(found, Exception) else TrialFailure("raised", self.line)
        error.__cause__ = WorkerTrace(self.trace)
        return error


class _Work(Dataset[Any]):
    """Dataset for torch's loader, with an order instead of a position."""

    def __init__(self, load: Callable[[Part], Any], series: torch.Tensor) -> None:
        self._load, self._series = load, series
        self.failure: _Failure | None = None
        """The start of this loader worker failed."""

    def __getitem__(self, order: _Order) -> _Loaded:
        if order.series != self._series.item():
            return _Loaded(order.series)
        if self.failure is not None:
            return _Loaded(order.series, failure=self.failure)
        try:
            return _Loaded(order.series, self._load(order.part))
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            return _Loaded(order.series, failure=_Failure.of(error))


def _same(loaded: Any) -> Any:
    return loaded


class LoaderWorkers:
    """The loader workers of one worker of a gang; they start when the first part is expected."""

    def __init__(
        self,
        load: Callable[[Part], Any],
        dataset: Any,
        settings: LoaderSettings,
        *,
        num_workers: int,
        pin: bool,
        are_numbered: bool = True,
    ) -> None:
        """`load` makes a batch of a part, in the loader worker; `pin`: it is then copied to page-locked memory.

        `are_numbered`: whether torch's `get_worker_info` gives their numbers. A dataset that divides
        itself by that must not do so where each of them reads it from front to end.
        """
        self._settings, self._dataset, self._pin = settings, dataset, pin
        self._are_numbered = are_numbered
        self._num_workers = num_workers
        self._parent = os.getpid()
        self._series = torch.zeros((), dtype=torch.int64, device="cpu").share_memory_()  # type: ignore[no-untyped-call]
        """Counts the changes of what comes next; orders of an earlier series are not loaded any more."""
        self._work = _Work(load, self._series)
        self._due: deque[Part] = deque()
        """Next parts, as far as they are foreseen; the first `_num_ordered` are ordered."""
        self._num_ordered = 0
        self._further: Iterator[Part] = iter(())
        self._iterator: Any = None
        self._processes: list[BaseProcess] = []
        self._traces: list[IO[bytes]] = []
        """A file per loader worker, for where it is: in one file, their lines would mix."""

    @property
    def parts_ahead(self) -> int:
        """Parts that are in hand beside the present one."""
        return self._num_workers * self._settings.prefetch_factor

    def expect(self, parts: Sequence[Part], ahead: Callable[[], Iterator[Part]]) -> None:
        """Let `parts` be loaded next, and `ahead()` after them unless that was foreseen already."""
        if all(self._foresees(place, part) for place, part in enumerate(parts)):
            return
        self._series += 1
        self._due, self._num_ordered = deque(parts), 0
        self._further = ahead()
        if self._iterator is None:
            self._start()

    def follow(self) -> bool:
        """End the loader workers if the dataset, of which they have copies, has changed; return whether it has.

        It has if one of its attributes has a new value, or the trial has called `reload_data`. Others start with the
        next part that is expected.
        """
        if self._iterator is None or self._copied.holds(self._dataset, self._settings.changes()):
            return False
        self.close()
        self._due.clear()
        self._num_ordered = 0
        self._further = iter(())
        return True

    def has(self, part: Part) -> bool:
        """Whether the part is the next one."""
        return self._foresees(0, part)

    def take(self) -> Any:
        """Return the next part's batch. Raises what loading it raised, and TrialFailure if a loader worker is gone."""
        series = int(self._series.item())
        while (loaded := self._received()).series != series:
            pass
        self._due.popleft()
        self._num_ordered -= 1
        if loaded.failure is not None:
            raise loaded.failure.error()
        return loaded.batch

    def close(self) -> None:
        """End the loader workers; one that does not end by itself is killed."""
        iterator, self._iterator = self._iterator, None
        if iterator is None:
            return
        self._series.fill_(-1)
        killer = threading.Timer(_FAREWELL_S, self._kill)
        killer.start()
        try:
            iterator._shutdown_workers()
        finally:
            killer.cancel()
            self._kill()
            for process in self._processes:
                process.join()
            for trace in self._traces:
                trace.close()

    def _foresees(self, place: int, part: Part) -> bool:
        while len(self._due) <= place:
            further = next(self._further, None)
            if further is None:
                return False
            self._due.append(further)
        return self._due[place].equals(part)

    def _orders(self) -> Iterator[_Order]:
        """Yield what is ordered next; torch asks whenever a loader worker has room."""
        while True:
            if self._num_ordered == len(self._due):
                self._due.append(next(self._further))
            part = self._due[self._num_ordered]
            self._num_ordered += 1
            yield _Order(series=int(self._series.item()), part=part)

    def _received(self) -> _Loaded:
        """Return what comes next from the loader workers, stale or not. Raises TrialFailure if one is gone or hangs."""
        until_s = time.monotonic() + self._settings.timeout_s
        while True:
            try:
                loaded: _Loaded = next(self._iterator)
            except Exception as error:  # of many kinds: a batch of a dead worker cannot be received either
                if not str(error).startswith("DataLoader timed out"):
                    raise self._explained(error) from error
                self._look(until_s)
            else:
                return loaded

    def _look(self, until_s: float) -> None:
        if any(process.exitcode is not None for process in self._processes):
            raise self._explained(RuntimeError("a loader worker ended"))
        if time.monotonic() >= until_s:
            self._print_traces()
            raise TrialFailure(
                "hung",
                f"loader workers gave no batch in loader_timeout_s={self._settings.timeout_s:g} s; the trial's log "
                "shows where each of them is. Raise loader_timeout_s if a batch takes that long to load",
            )

    def _explained(self, error: Exception) -> Exception:
        """Return the end of a loader worker as the trial's failure; without one, the error itself."""
        is_cut = isinstance(error, ConnectionError | EOFError)  # one is ending, which takes a busy machine seconds
        wait([process.sentinel for process in self._processes], _ENDING_S if is_cut else _FAREWELL_S)
        codes = (process.exitcode for process in self._processes)
        code = next((code for code in codes if code is not None), None)
        return error if code is None else TrialFailure("died", f"a loader worker {_ended(code)}")

    def _start(self) -> None:
        sys.stdout.flush()  # the processes would print it again
        sys.stderr.flush()
        self._copied = _Copied(_attributes(self._dataset), self._settings.changes())
        self._traces = [tempfile.TemporaryFile() for _ in range(self._num_workers)]  # noqa: SIM115
        before = set(multiprocessing.active_children())
        context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
        self._watched = context.Event()
        # The forked processes take over the default device, and cannot use a GPU. To set it costs time in every call.
        is_cpu = torch.get_default_device().type == "cpu"
        with warnings.catch_warnings(), contextlib.nullcontext() if is_cpu else torch.device("cpu"):
            # More workers than CPUs were asked for; and that a fork with threads may hang, which torch's workers avoid.
            warnings.simplefilter("ignore")
            loader: DataLoader[Any] = DataLoader(
                self._work,
                batch_size=None,
                sampler=self._orders(),
                num_workers=self._num_workers,
                collate_fn=_same,
                pin_memory=self._pin,
                timeout=min(_LOOK_S, self._settings.timeout_s),
                worker_init_fn=self._begin,
                multiprocessing_context=context,
                prefetch_factor=self._settings.prefetch_factor,
                persistent_workers=True,
                generator=torch.Generator(),  # the loader draws a seed, which must not change the trial's own draws
            )
            self._iterator = iter(loader)
        # torch's own watch raises from a signal handler, wherever the trial is at the time; `_look` sees as much.
        # Until torch's watch is off, the loader workers run none of the trial's code, which might end them.
        torch._C._remove_worker_pids(id(self._iterator))
        self._iterator._worker_pids_set = False
        self._processes = [child for child in multiprocessing.active_children() if child not in before]
        self._watched.set()

    def _begin(self, worker: int) -> None:
        """Prepare this process as a loader worker."""
        _end_with(self._parent)
        self._watched.wait()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Ray's handler would end the wrong thing
        faulthandler.enable(file=2)
        faulthandler.register(_DUMP, file=self._traces[worker])
        try:
            self._settings.start(worker, self._dataset)
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            self._work.failure = _Failure.of(error)
        if not self._are_numbered:
            torch.utils.data._utils.worker._worker_info = None

    def _print_traces(self) -> None:
        """Print where every loader worker is, one after another; they are ended by it."""
        for process in self._processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, _DUMP)
        traces, self._traces = self._traces, []
        self.close()  # first: what a process that has ended wrote is whole
        for number, trace in enumerate(traces):
            with trace:
                trace.seek(0)
                where = trace.read().decode(errors="replace")
            print(f"loader worker {number} is at:\n{where}", file=sys.stderr, flush=True)

    def _kill(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()


def _end_with(parent: int) -> None:
    """Let the kernel kill this process when its parent is gone, however that ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _ended(code: int) -> str:
    """Return how a loader worker ended, and the fix."""
    if code >= 0:
        return f"ended with exit code {code}; raise an exception instead"
    if code == -signal.SIGKILL:
        return "was killed, as where memory runs out; use fewer of them (num_workers), or smaller batches"
    if code == -signal.SIGBUS:
        return "ran out of shared memory (SIGBUS); enlarge /dev/shm, or use fewer of them (num_workers)"
    return f"was ended by {signal.Signals(-code).name}; see the trial's log"


# Batches on their way to the device: every tensor in them is pinned, or moved, wherever it is.
#
# A batch is what `collate` made: tensors in lists, tuples, mappings and dataclasses, nested, or objects that move
# themselves by a method of their own (`PackedSequence`, a graph, a `BatchEncoding`).


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch on `device`; from pinned memory, the copy does not wait for the device."""
    if device.type == "cpu":
        return batch
    return _changed(batch, lambda part: _moved(part, device), "to")


def pinned(batch: Any) -> Any:
    """Return the batch in page-locked memory, from which a GPU copies while the CPU goes on."""
    return _changed(batch, lambda part: part.pin_memory(), "pin_memory")


def _moved(part: Any, device: torch.device) -> Any:
    if isinstance(part, torch.Tensor):
        return part.to(device, non_blocking=True)
    try:
        return part.to(device, non_blocking=True)
    except TypeError:  # its own method knows no such argument
        return part.to(device)


def _changed(batch: Any, change: Callable[[Any], Any], method: str) -> Any:
    """Apply `change` to every part that has the `method`; what has neither that nor parts stays as it is."""
    if isinstance(batch, torch.Tensor) or (not isinstance(batch, type) and callable(getattr(batch, method, None))):
        return change(batch)
    if isinstance(batch, Mapping):
        return _mapping(batch, {name: _changed(value, change, method) for name, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_changed(value, change, method) for value in batch))
    if isinstance(batch, (list, tuple)):
        return _sequence(batch, [_changed(value, change, method) for value in batch])
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        # Not dataclasses.replace: it runs __init__ and __post_init__ again, and refuses fields without init.
        found = copy.copy(batch)
        for field in dataclasses.fields(batch):
            if hasattr(batch, field.name):
                object.__setattr__(found, field.name, _changed(getattr(batch, field.name), change, method))
        return found
    return batch


def _mapping(batch: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    if isinstance(batch, MutableMapping):
        found = copy.copy(batch)  # keeps a default factory, and attributes of a subclass
        found.update(values)
        return found
    try:
        return type(batch)(values)  # type: ignore[call-arg]
    except TypeError:  # such as a read-only view, whose class cannot be called
        return values


def _sequence(batch: Sequence[Any], values: list[Any]) -> Any:
    try:
        return type(batch)(values)  # type: ignore[call-arg]
    except TypeError:
        return values


@dataclass(frozen=True, slots=True)
class _Copied:
    """The state that loader workers have copies of: attributes of the dataset, and how often it was reloaded."""

    attributes: list[tuple[str, Any]]
    changes: int

    def holds(self, dataset: Any, changes: int) -> bool:
        """Return whether that is so still. A change within a value is not seen; `reload_data` says so."""
        now = _attributes(dataset)
        return changes == self.changes and len(now) == len(self.attributes) and all(map(_is_same, now, self.attributes))


def _attributes(dataset: Any) -> list[tuple[str, Any]]:
    """Return the attributes of a dataset, and of those that it wraps, as `Subset` does."""
    own = list(getattr(dataset, "__dict__", {}).items())
    inner = getattr(dataset, "dataset", None)
    return own if inner is None or inner is dataset else own + _attributes(inner)


def _is_same(now: tuple[str, Any], before: tuple[str, Any]) -> bool:
    (name, value), (name_before, value_before) = now, before
    is_plain = isinstance(value, (bool, int, float, str)) and type(value) is type(value_before)
    return name == name_before and (value is value_before or (is_plain and value == value_before))
