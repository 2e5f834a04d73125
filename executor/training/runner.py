"""One trial on one worker for one segment, whatever its kind; and the runner of plain `Trial`s."""

from __future__ import annotations

import difflib
import math
import pickle
import sys
import traceback
from collections.abc import Iterator, Mapping
from numbers import Number
from typing import Any, Protocol

from rubberband.errors import CheckpointError, CheckpointLostError
from rubberband.executor.core.events import FailureKind
from rubberband.executor.training.sampler import reseed
from rubberband.executor.training.segment import BatchReport, Segment, SegmentFailure
from rubberband.executor.training.trial import Trial, TrialContext
from rubberband.units import shown

# Failures of a trial, from the exception to what the backend is told.


MOST_DETAILS = 20_000
"""Characters of a trace-back that the journal keeps."""


class TrialFailure(Exception):
    """A failure that training itself found, with its kind; the message is a whole line for the user."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class GangBroken(Exception):
    """Another worker of the gang failed; this one only hears of it."""


def describe(error: BaseException, *, in_gang: bool) -> SegmentFailure:
    """What the backend is told of an exception; `in_gang`: whether the workers depend on each other's collectives."""
    details = _kept(printable("".join(traceback.format_exception(error))))
    if isinstance(error, TrialFailure):
        return SegmentFailure(kind=error.kind, message=printable(str(error)), details=details, secondary=False)
    if isinstance(error, CheckpointError):
        lost = isinstance(error, CheckpointLostError)
        return SegmentFailure(
            kind="checkpoint", message=printable(str(error)), details=details, secondary=False, lost=lost
        )
    secondary = in_gang and is_broken_collective(error)
    message = f"{one_line(error)}{_remedy(error)}"
    return SegmentFailure(kind="raised", message=message, details=details, secondary=secondary)


def _remedy(error: BaseException) -> str:
    """What to do about failures that many models have in common."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return "; train on fewer samples at once: batch.max_per_gpu, or the trial's max_batch_size_per_gpu"
    if isinstance(error, ValueError) and "more than 1 value per channel" in str(error):
        return "; BatchNorm cannot train on a batch of one: use a larger batch, or another number of samples"
    return ""


def printable(text: str) -> str:
    """`text` as UTF-8 can hold it: file names that are none come as lone surrogates, which no journal takes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _kept(details: str) -> str:
    """The beginning and the end of a trace-back: what is raised may carry a whole data set in its words."""
    left_out = len(details) - MOST_DETAILS
    if left_out <= 0:
        return details
    half = MOST_DETAILS // 2
    return f"{details[:half]}\n[{left_out:,} characters are left out here]\n{details[-half:]}"


def one_line(error: BaseException) -> str:
    """`Type: text`, in one line of at most 300 characters."""
    text = printable(" ".join(str(error).split()))
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


# From what user code calls metrics to finite floats.


MAX_METRICS = 1000
"""In a report."""
MAX_NAME_LENGTH = 200
"""Of a metric, in characters."""
MOST_TOLD = 20
"""Metrics that an error names."""


def clean_metrics(reported: Any, metric: str) -> dict[str, float]:
    """The numbers among the reported metrics, as floats; `metric` must be one of them, and finite.

    Booleans, integers and scalars of NumPy and torch count as numbers. Other values, and other metrics that are not
    finite, are left out: only `metric` decides about the trial.

    Raises TrialFailure: no_metric, not_a_number (one that is too large for a float, too), or raised (too many metrics,
    or too long a name).
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
    if not math.isfinite(value):
        raise TrialFailure("not_a_number", f"the metric {metric!r} is {value}")
    return {name: number for name, number in floats.items() if number is not None and math.isfinite(number)}


def _check_names(reported: Mapping[Any, Any]) -> None:
    for count, name in enumerate(map(str, reported), start=1):
        if len(name) > MAX_NAME_LENGTH:
            raise TrialFailure(
                "raised",
                f"the metric {shown(name)} has a name of {len(name):,} characters; {MAX_NAME_LENGTH} are allowed: "
                f"shorten it",
            )
        if count > MAX_METRICS:
            raise TrialFailure(
                "raised",
                f"the trial reported {len(reported):,} metrics, {shown(name)} among them; {MAX_METRICS:,} are allowed "
                f"in a report: leave some out",
            )


def _named_float(name: str, value: Any) -> float | None:
    """The number, if it is one. Raises TrialFailure, naming the metric, for one that no float can hold."""
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
    """A number, or a NumPy or torch value that holds a single one, as a float; None for anything else.

    Raises OverflowError, and whatever else `float` does.
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
    if math.isinf(number) and original != number:  # of decimals and long doubles, that is how it is told
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


class Runner(Protocol):
    """Takes one trial through one segment; made ready to iterate, and closed in the end whatever happened."""

    def restore(self, payload: bytes) -> None:
        """Go on from what `dump` gave, on any number of workers. Called before the first iteration, or not at all."""
        ...

    def catch_up(self) -> Iterator[int]:
        """Do again, before the first iteration, what the checkpoint does not hold; gives what is done after each."""
        ...

    def saved_iterations(self, iterations: int) -> int:
        """Of so many iterations, those that the next checkpoint holds."""
        ...

    def iterate(self, iterations: int) -> Mapping[str, float]:
        """Do the iteration after which `iterations` are done; rank 0's metrics are clean, the others' do not count."""
        ...

    def batch_report(self) -> BatchReport:
        """What is to be told of the batches of the latest iteration."""
        ...

    def dump(self, iterations: int, metrics: Mapping[str, float]) -> bytes:
        """The checkpoint after that iteration; called on rank 0."""
        ...

    def part(self) -> None:
        """The last iteration is over and saved: part from the other workers in order."""
        ...

    def close(self) -> None:
        """Give everything back; the process stays warm."""
        ...


class TrialRunner:
    """Runs a plain `Trial`. The workers of a gang run side by side, not in lockstep; rank 0's word counts."""

    def __init__(self, trial_class: type[Trial], segment: Segment) -> None:
        self._segment = segment
        self._trial = trial_class()
        context = TrialContext(
            trial=segment.trial,
            rank=segment.rank,
            num_workers=segment.num_workers,
            seed=segment.seed,
            device=segment.device,
            iterations=segment.from_iterations,
            rendezvous=segment.rendezvous,
        )
        reseed("setup", segment.seed)
        try:
            self._trial.setup(dict(segment.config), context)
        except BaseException:
            self.close()
            raise

    def restore(self, payload: bytes) -> None:
        """Hand the saved state to the trial."""
        self._trial.load(unpack(payload, "trial", self._segment.from_iterations)["state"])

    def catch_up(self) -> Iterator[int]:
        """Nothing: a checkpoint holds all iterations."""
        return iter(())

    def saved_iterations(self, iterations: int) -> int:
        """All of them."""
        return iterations

    def iterate(self, iterations: int) -> Mapping[str, float]:
        """Call the trial's `iterate`."""
        reseed("train", self._segment.seed, iterations, self._segment.rank)
        reported = self._trial.iterate()
        return clean_metrics(reported, self._segment.metric) if self._segment.rank == 0 else {}

    def batch_report(self) -> BatchReport:
        """Nothing: batches are the trial's own matter."""
        return BatchReport()

    def dump(self, iterations: int, metrics: Mapping[str, float]) -> bytes:
        """Pickle what the trial's `save` returns."""
        state = self._trial.save()
        return pack("trial", iterations, {"state": state, "metrics": dict(metrics)})

    def part(self) -> None:
        """Nothing: the workers know nothing of each other."""

    def close(self) -> None:
        """Call the trial's `close`."""
        self._trial.close()


def pack(kind: str, iterations: int, content: Mapping[str, Any]) -> bytes:
    """A pickled checkpoint. Raises CheckpointError where the content cannot be pickled."""
    try:
        return pickle.dumps({"format": FORMAT, "kind": kind, "iterations": iterations, **content})
    except Exception as error:
        raise CheckpointError(f"the checkpoint cannot be pickled: {type(error).__name__}: {error}") from error


def unpack(payload: bytes, kind: str, iterations: int) -> dict[str, Any]:
    """What `pack` was given. Raises CheckpointError where it cannot be read, or is not what the segment expects."""
    # Unpickling runs code, but only our own: the store compared the bytes with the digest in the journal.
    try:
        content = pickle.loads(payload)
    except Exception as error:
        raise CheckpointError(f"the checkpoint cannot be unpickled: {type(error).__name__}: {error}") from error
    return expect(content, kind, iterations)


def expect(content: Any, kind: str, iterations: int) -> dict[str, Any]:
    """The content, if it is a checkpoint of that kind after that many iterations; otherwise CheckpointError."""
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise CheckpointError(f"the checkpoint has format {found}; this version reads format {FORMAT}")
    if content["kind"] != kind:
        raise CheckpointError(f"the checkpoint is of a {content['kind']} trial, and the entry point is a {kind} trial")
    if content["iterations"] != iterations:
        raise CheckpointError(f"the checkpoint holds {content['iterations']} iterations, not {iterations}")
    return content
