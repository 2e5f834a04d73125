"""Failures of a trial, from the exception to what the backend is told."""

from __future__ import annotations

import sys
import traceback

from rubberband.errors import CheckpointError, CheckpointLostError
from rubberband.executor.events import FailureKind
from rubberband.executor.training.segment import SegmentFailure

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
