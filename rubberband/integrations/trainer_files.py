"""The files that a Trainer of another library resumes from and reports, on one worker or on each of a gang.

In a function on one worker they are a `FolderCheckpoint`; in a process of its own (`rubberband.distributed`, a program)
they are a folder.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import rubberband
from rubberband.executor.checkpoints.folders import FolderCheckpoint
from rubberband.executor.training import reporting
from rubberband.executor.training.failures import TrialFailure
from rubberband.executor.training.reporting import current_session


def in_function() -> bool:
    """Whether this is the thread of a function that trains on one worker."""
    return current_session.get(None) is not None


def in_trial() -> bool:
    """Whether a search runs this process or thread; otherwise the user does."""
    return in_function() or reporting.LINE in os.environ


def may_begin_again() -> bool:
    """Whether the segment begins again where this says so by RanOut, as that of a program does not."""
    return in_function() or reporting.begins_again


def most_at_once() -> int | None:
    """Return how many samples fit into memory at once, as the gang has found; None: that is not known."""
    session = current_session.get(None)
    return reporting.most_at_once if session is None else session.most_at_once


def resumed_in(folder: Path) -> Path | None:
    """Return a folder with the files of the trial's checkpoint, made for this process; None if it has none.

    Files may be added to it, but those in it must not be changed: they may be links.
    """
    checkpoint = rubberband.get_checkpoint()
    if checkpoint is None:
        return None
    if isinstance(checkpoint, FolderCheckpoint):
        return checkpoint.to_directory(folder)
    for path in Path(checkpoint).rglob("*"):
        if path.is_file():
            link = folder / path.relative_to(checkpoint)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path.resolve())
    return folder


def report(metrics: Mapping[str, Any], folder: Path, *, is_last: bool = False) -> None:
    """Report an iteration, with the files of a folder as its checkpoint; the folder is no longer there then.

    `is_last`: the trial has ended by itself.
    """
    session = current_session.get(None)
    if session is None:
        reporting.report_to_worker(metrics, folder, ended=is_last, is_new=True)
        shutil.rmtree(folder, ignore_errors=True)  # other workers may share it
    else:
        session.ended = is_last
        session.report(metrics, FolderCheckpoint.taking(folder))


def require_finite(model: Any) -> None:
    """Raise TrialFailure for a model that has diverged: a metric such as its accuracy is a number all the same."""
    for name, weights in model.named_parameters():
        if weights.requires_grad and not bool(weights.isfinite().all()):
            raise TrialFailure("not_a_number", f"the weights of {name} are not finite: training has diverged")


def gathered(content: Any) -> list[Any]:
    """Return what each worker of torch's process group has, by rank, on all of them."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return [content]
    contents: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(contents, content)
    return contents


def remark(line: str) -> None:
    """Print a line about what is done otherwise than written, once for the gang."""
    if os.environ.get("RANK", "0") == "0":
        print(f"rubberband: {line}", file=sys.stderr, flush=True)
