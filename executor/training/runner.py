"""One trial on one worker for one segment, whatever its kind; and the runner of plain `Trial`s."""

from __future__ import annotations

import difflib
import io
import math
import pickle
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from numbers import Number
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from rubberband.errors import CheckpointError, CheckpointLostError, InputError
from rubberband.executor.checkpoints import Payload
from rubberband.executor.core.events import FailureKind
from rubberband.executor.training import cuda_errors
from rubberband.executor.training.sampler import reseed
from rubberband.executor.training.segment import BatchReport, Segment, SegmentFailure
from rubberband.executor.training.trial import Trial, TrialContext
from rubberband.units import counted, shown

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


class LacksMemory(TrialFailure):
    """This machine has too little memory; another one may have enough."""


class RanOut(TrialFailure):
    """A worker of a gang ran out of memory: its segment begins again, with fewer samples at once."""

    def __init__(self, message: str, most_per_gpu: int) -> None:
        super().__init__("raised", message)
        self.most_per_gpu = most_per_gpu


class WorkerTrace(Exception):
    """The trace-back of an exception in a loader worker, as the cause of the same exception here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class TrainingEnded(Exception):
    """The trial has ended by itself, before the iteration that was asked for."""


class GangBroken(Exception):
    """Another worker of the gang failed, and not this one."""


class Peers(ABC):
    """The other workers of a gang."""

    @property
    @abstractmethod
    def broken(self) -> str:
        """How the gang lost one of them, in one line; empty while it has all."""

    @abstractmethod
    def fail(self, line: str) -> None:
        """Report to them that this worker failed, and why."""


def describe(error: BaseException, *, in_gang: bool, broken: str = "") -> SegmentFailure:
    """Return the failure to report; `in_gang`: whether the workers depend on each other's collectives.

    `broken` says how the gang lost another worker before: then any error may follow from that.
    """
    details = _kept(printable("".join(traceback.format_exception(error))))
    if broken and not isinstance(error, CheckpointError):
        return SegmentFailure(kind="raised", message=printable(broken), details=details, secondary=True)
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
    secondary = in_gang and is_broken_collective(error) and not _lacks_memory(error)
    message = f"{one_line(error)}{_remedy(error)}"
    kind: FailureKind = "gpu" if cuda_errors.is_of_machine(error) else "raised"
    return SegmentFailure(kind=kind, message=message, details=details, secondary=secondary)


def _remedy(error: BaseException) -> str:
    """Return the fix for failures that many models have in common."""
    if cuda_errors.is_of_machine(error):
        return cuda_errors.MACHINE
    if _lacks_memory(error):
        return "; train on fewer samples at once: batch.max_per_gpu, or the trial's max_batch_size_per_gpu"
    if isinstance(error, RuntimeError) and "Expected to have finished reduction" in str(error):
        return "; the loss leaves parameters out: set find_unused_parameters = True"
    if isinstance(error, RuntimeError) and "No CUDA GPUs are available" in str(error):
        return "; this process has no GPU: leave the model on the CPU in build_model(), or use context.device elsewhere"
    if isinstance(error, ValueError) and "more than 1 value per channel" in str(error):
        return "; BatchNorm cannot train on a batch of one: use a larger batch, or another number of samples"
    if cuda_errors.is_of_cuda(error):
        return cuda_errors.remedy(error)
    return ""


def _lacks_memory(error: BaseException) -> bool:
    if "torch" not in sys.modules:
        return False
    from rubberband.executor.training.memory import lacks_memory

    return lacks_memory(error)


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


def one_line(error: BaseException) -> str:
    """Return `Type: text`, in one line of at most 300 characters."""
    text = str(error)
    if cuda_errors.is_of_cuda(error):  # general advice follows
        text = text.partition("\n")[0]
    text = printable(" ".join(text.split()))
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return line if len(line) <= 300 else line[:299] + "…"


def is_broken_collective(error: BaseException) -> bool:
    """Whether a collective broke because another worker went away: gloo, nccl or the store lost its peer."""
    if isinstance(error, GangBroken):
        return True
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and isinstance(error, torch.distributed.DistError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(name in text for name in ("gloo", "Gloo", "NCCL", "ProcessGroup"))


MAX_METRICS = 1000
"""Per report."""
MAX_NAME_LENGTH = 200
"""Characters in the name of a metric."""
MOST_TOLD = 20
"""Metrics that an error names."""


def clean_metrics(reported: Any, metric: str) -> dict[str, float]:
    """Return the numbers among the reported metrics as floats; `metric` must be one of them, and finite.

    Booleans, integers and scalars of NumPy and torch count as numbers, but `metric` is no boolean, by which most trials
    would be equal. Other values, and other metrics that are not finite, are left out: only `metric` decides.

    Raises TrialFailure: no_metric, not_a_number (also if too large for a float), or raised (too many metrics, or a
    name that is too long).
    """
    if not isinstance(reported, Mapping):
        raise TrialFailure(
            "no_metric", f"the trial reported {_kind(reported)} where a mapping of metric names to numbers is needed"
        )
    _check_names(reported)
    if metric not in reported:
        raise TrialFailure("no_metric", _missing(metric, [str(name) for name in reported]))
    floats = {printable(str(name)): _named_float(str(name), value) for name, value in reported.items()}
    value = floats[printable(metric)]
    if value is None:
        raise TrialFailure("no_metric", f"the metric {metric!r} is {_kind(reported[metric])}, which is not a number")
    if _is_boolean(reported[metric]):
        raise TrialFailure(
            "no_metric",
            f"the metric {metric!r} is {reported[metric]}, a boolean, which ranks no trials; report a number",
        )
    if not math.isfinite(value):
        raise TrialFailure("not_a_number", f"the metric {metric!r} is {value}")
    return {name: number for name, number in floats.items() if number is not None and math.isfinite(number)}


def _is_boolean(value: Any) -> bool:
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")


def _check_names(reported: Mapping[Any, Any]) -> None:
    for count, name in enumerate(map(str, reported), start=1):
        if len(name) > MAX_NAME_LENGTH:
            raise refused(
                f"the metric {shown(name)} has a name of {len(name):,} characters; {MAX_NAME_LENGTH} are allowed: "
                f"shorten it",
            )
        if count > MAX_METRICS:
            raise refused(
                f"the trial reported {len(reported):,} metrics, {shown(name)} among them; {MAX_METRICS:,} are allowed "
                f"in a report: leave some out",
            )


def _named_float(name: str, value: Any) -> float | None:
    """Return the value if it is a number. Raises TrialFailure for one that no float can hold."""
    try:
        return to_float(value)
    except OverflowError:
        raise TrialFailure(
            "not_a_number",
            f"the metric {shown(name)} is too large for a float ({sys.float_info.max:.1e} at most); leave it out, or "
            f"report its logarithm",
        ) from None
    except (ArithmeticError, TypeError, ValueError, RuntimeError) as error:
        raise TrialFailure(
            "not_a_number", f"the metric {shown(name)} cannot be made a float ({one_line(error)}); leave it out"
        ) from error


def to_float(value: Any) -> float | None:
    """Return a number, or a NumPy or torch value that holds one, as a float; None for anything else.

    Raises OverflowError, and every error of `float`.
    """
    if hasattr(value, "item") and getattr(value, "size", None) is not None:
        try:
            value = value.item()
        except (ValueError, RuntimeError):
            return None
    if isinstance(value, complex) or not isinstance(value, Number):
        return None
    original: Any = value
    number = float(original)
    if math.isinf(number) and original != number:  # decimals and long doubles do not raise it
        raise OverflowError
    return number


def _missing(metric: str, reported: list[str]) -> str:
    names = ", ".join(repr(name) for name in sorted(reported)[:MOST_TOLD]) or "no metrics"
    names += f" and {len(reported) - MOST_TOLD:,} more" if len(reported) > MOST_TOLD else ""
    nearest = difflib.get_close_matches(metric, reported, n=1, cutoff=0.5)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return f"the metric {metric!r} is missing; the trial reported {names}{hint}"


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a value of type {type(value).__name__}"


FORMAT = 1
"""Version of the checkpoints' layout."""


Steps = Generator[None, None, Mapping[str, float]]
"""An iteration in parts, with its metrics in the end."""


class Runner(ABC):
    """Takes one trial through one segment."""

    checkpoint_every: int = 1
    """Iterations from one checkpoint to the next."""
    pauses: ClassVar[bool] = True
    """Whether `steps` pauses while it trains, so that reports need not leave before the next iteration."""
    maps: ClassVar[bool] = False
    """Whether `restore` takes a file with the checkpoint too, and keeps no more than it needs of it in memory."""
    ended: bool = False
    """Whether the trial has ended by itself with its latest iteration; the same on every rank of a gang."""
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
        """Return what to report of the batches of the latest iteration."""
        return BatchReport()

    @abstractmethod
    def dump(self, iterations: int, metrics: Mapping[str, float], *, is_last: bool = False) -> Payload:
        """Return the checkpoint after that iteration, called on rank 0; unless it `is_last`, training goes on.

        It may be written by another thread, before the next `dump`.
        """

    def meet(self) -> None:  # noqa: B027 - optional hook
        """Wait for rank 0 after a checkpoint: it may have waited for the store."""

    def part(self) -> None:  # noqa: B027 - optional hook
        """Leave the other workers in order, after the last iteration is saved."""

    @abstractmethod
    def close(self) -> None:
        """Release everything, also after a failure; the process stays warm."""


class TrialRunner(Runner):
    """Runs a plain `Trial`. The workers of a gang run side by side, not in lockstep; rank 0's word counts."""

    pauses = False

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
        return clean_metrics(reported, self._segment.metric) if self._segment.rank == 0 else {}

    def dump(self, iterations: int, metrics: Mapping[str, float], *, is_last: bool = False) -> bytes:
        return pack("trial", iterations, {"state": self._trial.save(), "metrics": dict(metrics)})

    def close(self) -> None:
        self._trial.close()


def pack(kind: str, iterations: int, content: Mapping[str, Any]) -> bytes:
    """Return a pickled checkpoint. Raises CheckpointError if the content cannot be pickled."""
    try:
        return pickle.dumps({"format": FORMAT, "kind": kind, "iterations": iterations, **content})
    except Exception as error:
        raise CheckpointError(f"the checkpoint cannot be pickled: {type(error).__name__}: {error}") from error


def unpack(payload: bytes, kind: str, iterations: int, device: str | None) -> dict[str, Any]:
    """Return the content given to `pack`; `device` as in `unpickled`.

    Raises CheckpointError if it cannot be read, or is of another segment.
    """
    return expect(unpickled(payload, device), kind, iterations)


def unpickled(content: bytes, device: str | None) -> Any:
    """Return a pickled checkpoint or a part of it, with the tensors on `device`; None: where they were.

    Raises CheckpointError if it cannot be read, InputError if it has tensors and the device is not there.
    """
    # Unpickling runs code, but only our own: the store compared the bytes with the digest in the journal.
    try:
        return _Unpickler(content, device).load()
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


_MOVED = {("rubberband.executor.training.folder", "FolderCheckpoint"): "rubberband.executor.training.trial"}
"""(module, class) in checkpoints of earlier versions -> its module today."""


class _Unpickler(pickle.Unpickler):
    """Reads tensors of a GPU where there is none: torch pickles a storage with its device."""

    def __init__(self, content: bytes, device: str | None) -> None:
        super().__init__(io.BytesIO(content))
        self._device = device

    def find_class(self, module: str, name: str) -> Any:
        module = _MOVED.get((module, name), module)
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
