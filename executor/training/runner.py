"""One trial on one worker for one segment, whatever its kind; and the runner of plain `Trial`s."""

from __future__ import annotations

import copyreg
import io
import itertools
import pickle
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rubberband.errors import CheckpointError, InputError
from rubberband.executor.checkpoints import Payload
from rubberband.executor.checkpoints.folders import FORMAT, FolderCheckpoint, is_archive, read_manifest, write_archive
from rubberband.executor.checkpoints.folders import unpack as unpack_archive
from rubberband.executor.checkpoints.scratch import Scratch
from rubberband.executor.core.events import WITHOUT_CHECKPOINT
from rubberband.executor.training.failures import TrainingEnded, one_line, refused
from rubberband.executor.training.reported import clean_metrics
from rubberband.executor.training.reporting import current_session, in_functions
from rubberband.executor.training.sampler import reseed
from rubberband.executor.training.segment import BatchReport, Segment
from rubberband.executor.training.trial import TrainFunction, Trial, TrialContext, flat, tune_session
from rubberband.executor.training.waits import Waited
from rubberband.executor.training.worker_process import ThreadSwitches, release_port
from rubberband.units import counted

if TYPE_CHECKING:
    from rubberband.executor.core.events import CheckpointRef
    from rubberband.executor.training.entrypoint import Entrypoint


Steps = Generator[None, None, Mapping[str, float]]
"""An iteration in parts, with its metrics in the end."""


class Runner(ABC):
    """Takes one trial through one segment."""

    checkpoint_every: int = 1
    pauses: ClassVar[bool] = True
    """Whether `steps` pauses while it trains, so that reports need not leave before the next iteration."""
    maps: ClassVar[bool] = False
    """Whether `restore` takes a file with the checkpoint too, and keeps no more than it needs of it in memory."""
    by_path: ClassVar[bool] = False
    """Whether it is given a file even where no other worker needs it: the checkpoint may be a folder of any size."""
    may_wait: ClassVar[bool] = False
    """Whether a checkpoint may wait while the one before is written, and is left out if a later one comes first."""
    parts_held: Sequence[bytes | Path] = ()
    """Files of the parts of the checkpoint that `begin` continues from, which other workers saved."""
    save: Callable[[int, Payload], CheckpointRef]
    """Saves a part of the checkpoint after some iterations, on other ranks than 0. Raises CheckpointError."""
    ended: bool = False
    """Whether the trial has ended by itself with its latest iteration; the same on every rank of a gang."""
    waited: Waited = {}  # noqa: RUF012 - no runner changes it
    """The waits that its loop measures, from `begin` on."""
    repeated: int = 0
    """Iterations that were trained again, beside those that the checkpoint does not hold."""
    compiles: bool = False
    """Whether the first step compiles the model, so that it belongs to the start: it may take minutes."""

    def begin(self, payload: bytes | Path | None) -> int:
        """Begin from a `dump`, or afresh, before the first iteration; return the iterations that are done by then."""
        return 0 if payload is None else self.restore(payload)

    @abstractmethod
    def restore(self, payload: Any) -> int:
        """Continue from a `dump`, on any number of workers; return the iterations that it holds.

        Called by `begin`, or not at all.
        """

    def saved_iterations(self, iterations: int) -> int:
        """Return how many of the `iterations` done the next checkpoint holds."""
        return iterations

    def saves_after(self, iterations: int) -> bool:
        """Return whether a checkpoint is saved after that iteration; the same on every rank. The last one always is."""
        return iterations % self.checkpoint_every == 0

    @abstractmethod
    def steps(self, iterations: int) -> Steps:
        """Do the iteration after which `iterations` are done, with pauses in which reports may leave.

        Rank 0's metrics are clean; the others' do not count. Raises TrainingEnded if the trial has ended before it.
        """

    def iterate(self, iterations: int) -> Mapping[str, float]:
        """Do that iteration without pauses."""
        steps = self.steps(iterations)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                metrics: Mapping[str, float] = end.value
                return metrics

    def batch_report(self) -> BatchReport:
        return BatchReport()

    @abstractmethod
    def dump(self, iterations: int, metrics: Mapping[str, float], *, is_last: bool = False) -> Payload:
        """Return the checkpoint after that iteration, called on rank 0; unless it `is_last`, training goes on.

        It may be written by another thread, before the next `dump`.
        """

    def dump_part(self, iterations: int, *, is_last: bool = False) -> None:  # noqa: B027 - optional hook
        """Save this worker's part of the checkpoint, called on the other ranks while rank 0 calls `dump`."""

    def parts(self) -> tuple[CheckpointRef, ...]:
        """Return what the other ranks saved of the latest `dump`, once they have; asked by the thread that writes it.

        Raises CheckpointError, and GangBroken if one of them is lost.
        """
        return ()

    def meet(self) -> None:  # noqa: B027 - optional hook
        """Wait for rank 0 after a checkpoint: it may have waited for the store."""

    def part(self) -> None:  # noqa: B027 - optional hook
        """Leave the other workers in order, after the last iteration is saved."""

    @abstractmethod
    def close(self) -> None:
        """Release everything, also after a failure; the process stays warm."""


def make_trial_runner(entrypoint: Entrypoint, target: type[Trial], segment: Segment, resources: list[Any]) -> Runner:
    """Make the runner of a plain `Trial`, which may listen at the gang's port itself."""
    release_port()
    return TrialRunner(target, segment)


class TrialRunner(Runner):
    """Runs a plain `Trial`. The workers of a gang run side by side, not in lockstep; rank 0's word counts."""

    pauses = False
    by_path = True

    def __init__(self, trial_class: type[Trial], segment: Segment) -> None:
        self._segment = segment
        self._trial = trial_class()
        self.checkpoint_every = positive("checkpoint_every", self._trial.checkpoint_every)

    def begin(self, payload: bytes | Path | None) -> int:
        if payload is not None:
            return self.restore(payload)
        self._set_up(0)
        return 0

    def restore(self, payload: Any) -> int:
        content = unpack(payload, "trial", self._segment.from_iterations, place_of(self._segment.device))
        held: int = content["iterations"]
        self._set_up(held)
        self._trial.load(content["state"])
        return held

    def _set_up(self, iterations: int) -> None:
        segment = self._segment
        context = TrialContext(
            trial=segment.trial,
            rank=segment.rank,
            num_workers=segment.num_workers,
            seed=segment.seed,
            device=segment.device,
            iterations=iterations,
            rendezvous=segment.rendezvous,
        )
        reseed("setup", segment.seed)
        self._trial.setup(dict(segment.config), context)

    def steps(self, iterations: int) -> Steps:
        yield
        reseed("train", self._segment.seed, iterations, self._segment.rank)
        reported = self._trial.iterate()
        self.ended = self._trial.ended
        is_last = iterations == self._segment.max_iterations
        return clean_metrics(reported, self._segment.metric, is_last=is_last) if self._segment.rank == 0 else {}

    def dump(self, iterations: int, metrics: Mapping[str, float], *, is_last: bool = False) -> Payload:
        return pack("trial", iterations, {"state": self._trial.save(), "metrics": dict(metrics)})

    def close(self) -> None:
        self._trial.close()


_STATE = "state.pickle"
"""The file of the pickled content in a checkpoint with folders; those are beside it, named by their numbers."""


def pack(kind: str, iterations: int, content: Mapping[str, Any]) -> Payload:
    """Return a pickled checkpoint; with folders in it, which are kept by path, one that writes an archive.

    Raises CheckpointError if the content cannot be pickled.
    """
    state, folders = pickled({"format": FORMAT, "kind": kind, "iterations": iterations, **content})
    if not folders:
        return state

    def write(to: Path) -> str:
        sources: dict[str, bytes | Path] = {
            _STATE: state,
            **{str(number): each.path for number, each in enumerate(folders)},
        }
        digest = write_archive(sources, to, kind=kind, iterations=iterations)
        for folder in folders:
            folder.verify()
        return digest

    return write


def unpack(payload: bytes | Path, kind: str, iterations: int, device: str | None) -> dict[str, Any]:
    """Return the content given to `pack`; `device` as in `unpickled`.

    Raises CheckpointError if it cannot be read, or is of another segment.
    """
    try:
        if not is_archive(payload):
            content = payload.read_bytes() if isinstance(payload, Path) else payload
            return expect(unpickled(content, device), kind, iterations)
        expect(read_manifest(payload), kind, iterations)
        scratch = Scratch()
        folder = scratch.path / "checkpoint"
        unpack_archive(payload, folder)
        state = (folder / _STATE).read_bytes()
    except OSError as error:
        raise CheckpointError(f"the checkpoint cannot be read: {error.strerror or error}") from error
    places = itertools.takewhile(Path.is_dir, (folder / str(number) for number in itertools.count()))
    folders = [FolderCheckpoint(path, scratch) for path in places]
    return expect(unpickled(state, device, folders), kind, iterations)


def pickled(content: Any) -> tuple[bytes, list[FolderCheckpoint]]:
    """Return an object pickled, without the files of folders in it, and the folders.

    Raises CheckpointError if it cannot be pickled.
    """
    file, folders = io.BytesIO(), list[FolderCheckpoint]()

    def number(folder: FolderCheckpoint) -> tuple[Any, ...]:
        folders.append(folder)
        return _folder, (len(folders) - 1,)

    pickler = pickle.Pickler(file)
    pickler.dispatch_table = {**copyreg.dispatch_table, FolderCheckpoint: number}
    try:
        pickler.dump(content)
    except Exception as error:
        raise CheckpointError(f"the checkpoint cannot be pickled: {type(error).__name__}: {error}") from error
    return file.getvalue(), folders


def _folder(number: int) -> FolderCheckpoint:
    """Mark the place of a folder, which is beside the pickled checkpoint."""
    raise CheckpointError(f"the folder {number} of the checkpoint is not beside it")


def unpickled(content: bytes, device: str | None, folders: Sequence[FolderCheckpoint] = ()) -> Any:
    """Return a pickled checkpoint or a part of it, with the tensors on `device`; None: where they were.

    Raises CheckpointError if it cannot be read, InputError if it has tensors and the device is not there.
    """
    # Unpickling runs code, but only our own: the store compared the bytes with the digest in the journal.
    try:
        return _Unpickler(content, device, folders).load()
    except InputError:
        raise
    except Exception as error:
        raise CheckpointError(f"the checkpoint cannot be unpickled: {type(error).__name__}: {error}") from error


def place_of(device: str) -> str | None:
    """Return where a worker with that device reads checkpoints: with a GPU, where their tensors were."""
    return None if device == "cuda" else device


def check_device(device: str) -> None:
    """Raise InputError for a device that torch cannot use here."""
    import torch

    try:
        torch.empty(0, device=device)
    except Exception as error:
        raise InputError(
            f"device={device!r} cannot be used here ({one_line(error)}); leave it out to load on the CPU"
        ) from error


class _Unpickler(pickle.Unpickler):
    """Reads tensors of a GPU where there is none: torch pickles a storage with its device."""

    def __init__(self, content: bytes, device: str | None, folders: Sequence[FolderCheckpoint]) -> None:
        super().__init__(io.BytesIO(content))
        self._device, self._folders = device, folders

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (__name__, _folder.__name__):
            return self._folders.__getitem__
        if self._device is not None and (module, name) == ("torch.storage", "_load_from_bytes"):
            return self._storage
        if self._device is not None and (module, name) == ("torch._C", "Generator"):
            return self._generator
        return super().find_class(module, name)

    def _storage(self, content: bytes) -> Any:
        import torch

        assert self._device is not None
        check_device(self._device)
        return torch.load(io.BytesIO(content), map_location=self._device, weights_only=False)

    def _generator(self, device: Any) -> Any:
        """Return one to set the state of; for a GPU's, one of the CPU with its seed: its state means nothing there."""
        import torch

        assert self._device is not None
        if torch.device(device).type in ("cpu", torch.device(self._device).type):
            return torch.Generator(device)

        class Seeded(torch.Generator):
            def __setstate__(self, state: Any) -> None:
                self.manual_seed(state[0])

        return Seeded()


def expect(content: Any, kind: str, iterations: int) -> dict[str, Any]:
    """Return the content; raise CheckpointError unless it is of that kind and after that many iterations at most."""
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise CheckpointError(f"the checkpoint has format {found}; this version reads format {FORMAT}")
    if content["kind"] != kind:
        raise CheckpointError(f"the checkpoint is of a {content['kind']} trial, and the entry point is a {kind} trial")
    if content["iterations"] > iterations:
        raise CheckpointError(f"the checkpoint holds {counted(content['iterations'], 'iteration')}, not {iterations}")
    return content


def positive(name: str, value: int) -> int:
    """Return a setting of the trial. Raises ValueError unless it is an integer of at least 1."""
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive integer, not {value!r}")
    return int(value)


END_TIMEOUT_S = 8.0
"""The longest time for a function to end once its segment is over; less than the driver's patience with the worker."""


_PAUSE_S = 0.02
"""While a function trains, reports leave at this interval."""


RUNS_ON = "goes on after its stop, so its process ends: catch Exception, not BaseException, and keep `finally` short"


class SegmentOver(BaseException):
    """Raised by `report` to end the function; not an Exception, so that `except Exception` lets it pass."""


@dataclass(frozen=True, slots=True)
class _Ended:
    error: BaseException | None


@dataclass(frozen=True, slots=True)
class _Reported:
    metrics: Mapping[str, Any]
    passed: tuple[bytes, Sequence[FolderCheckpoint]] | None
    """The checkpoint, pickled, with the folders in it."""


class _FunctionThread(Thread):
    """The thread of a function."""


def function_runs_on() -> bool:
    """Whether a function has not ended with its segment: no later trial may share this process with it."""
    return any(isinstance(thread, _FunctionThread) for thread in threading.enumerate())


def make_function_runner(
    entrypoint: Entrypoint, target: TrainFunction, segment: Segment, resources: list[Any]
) -> Runner:
    """Make the runner of a function. Raises ValueError for more than one worker."""
    if segment.num_workers > 1:
        raise ValueError(f"{entrypoint} is a function and trains on one worker, not {segment.num_workers}")
    return FunctionRunner(target, segment)


class FunctionRunner(Runner):
    """Runs `train(config)` on one worker, in a thread; every `report` is one iteration."""

    by_path = may_wait = True

    def __init__(self, function: TrainFunction, segment: Segment) -> None:
        self._function = function
        self.segment = segment
        self._state: bytes | None = None
        """The function's last checkpoint, pickled when it was passed, so that later changes do not affect it."""
        self._folders: Sequence[FolderCheckpoint] = ()
        self._state_iterations = 0
        self.iteration = 0
        """The function's present iteration; less than the segment's while it repeats some."""
        self.has_loaded = False
        """Whether the function has asked for its checkpoint."""
        self._over = False
        self._go: SimpleQueue[None] = SimpleQueue()
        self._answers: SimpleQueue[_Reported | _Ended] = SimpleQueue()
        self._thread: Thread | None = None
        self._switches = ThreadSwitches()

    def restore(self, payload: bytes | Path) -> int:
        """Continue from the function's last checkpoint; return its iterations, 0 if the function never passed one."""
        content = unpack(payload, "function", self.segment.from_iterations, place_of(self.segment.device))
        self._state, self._state_iterations = content["state"], content["state_iterations"]
        self._folders = content.get("folders", ())
        self.iteration = self._state_iterations
        return self._state_iterations

    def saved_iterations(self, iterations: int) -> int:
        return self._state_iterations

    def steps(self, iterations: int) -> Steps:
        self._go_on()
        while True:
            try:
                answer = self._answers.get(timeout=_PAUSE_S)
            except Empty:
                yield
            else:
                is_last = iterations == self.segment.max_iterations
                return clean_metrics(self._reported(answer), self.segment.metric, is_last=is_last)

    def dump(self, iterations: int, metrics: Mapping[str, float], *, is_last: bool = False) -> Payload:
        content: dict[str, Any] = {"state": self._state, "state_iterations": self._state_iterations}
        if self._folders:
            content["folders"] = self._folders
        return pack("function", iterations, {**content, "metrics": dict(metrics)})

    def close(self) -> None:
        """End the function: its `report` raises, now or when it is called next. See `function_runs_on`."""
        self._over = True
        self._go.put(None)
        if self._thread is not None:
            self._thread.join(END_TIMEOUT_S)
            if self._thread.is_alive():
                print(f"rubberband: {self._name}() {RUNS_ON}", file=sys.stderr, flush=True)

    @property
    def most_at_once(self) -> int | None:
        return self.segment.most_per_gpu

    def report(self, metrics: Mapping[str, Any], checkpoint: Any) -> None:
        """Hand over one iteration, and wait until the next is wanted. Called in the function's thread."""
        if self._over:
            raise SegmentOver
        passed = None if checkpoint is None else pickled(checkpoint)
        if passed is None and self._is_first and self.segment.max_iterations != 1 and not self.ended:
            print(f"rubberband: {self._name}() {WITHOUT_CHECKPOINT}", file=sys.stderr, flush=True)
        self._answers.put(_Reported(metrics, passed))
        self._go.get()
        if self._over:
            raise SegmentOver

    def checkpoint(self) -> Any:
        self.has_loaded = True
        return None if self._state is None else unpickled(self._state, place_of(self.segment.device), self._folders)

    @property
    def _name(self) -> str:
        return str(getattr(self._function, "__name__", "train"))

    @property
    def _is_first(self) -> bool:
        return self.iteration == 1 and self.segment.from_iterations == 0

    def _go_on(self) -> None:
        """Let the function train its next iteration."""
        self.iteration += 1
        if self._thread is None:
            self._thread = _FunctionThread(target=self._run, name=f"trial {self.segment.trial}", daemon=True)
            self._thread.start()
        else:
            self._go.put(None)

    def _reported(self, answer: _Reported | _Ended) -> Mapping[str, Any]:
        """Return the function's metrics. Raises what it raised; TrainingEnded if it returned after a report.

        Raises TrialFailure if it returned without any.
        """
        if not isinstance(answer, _Ended):
            if answer.passed is not None:
                self._state, self._folders = answer.passed
                self._state_iterations = self.iteration
            return answer.metrics
        if answer.error is not None:
            raise answer.error
        if not self._is_first:
            raise TrainingEnded
        metric = self.segment.metric
        raise refused(
            f"{self._name}() returned without a report; call rubberband.report({{{metric!r}: ...}}) once per "
            "iteration, or return its metrics in a dict if it trains in one go"
        )

    def _run(self) -> None:
        current_session.set(self)
        in_functions.add(self)
        self._switches.put()
        # The same in each segment, or a `random_split` at its start would hold out samples that it has trained on.
        reseed("train", self.segment.seed, 0, self.segment.rank)
        error: BaseException | None = None
        try:
            with tune_session(self, self.segment):
                returned = self._function(dict(self.segment.config))
                if isinstance(returned, Mapping) and self._is_first:  # Ray Tune takes it for a report too
                    self.ended = True
                    self.report(flat(returned), None)
        except SegmentOver:
            pass
        except BaseException as raised:
            error = raised
        in_functions.discard(self)
        self._answers.put(_Ended(error))
