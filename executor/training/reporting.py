"""`rubberband.report` and `rubberband.get_checkpoint`, in functions and in programs.

Only the standard library is imported: a program imports this file into its own environment.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

LINE, CHECKPOINT, CONFIG = "RUBBERBAND_LINE", "RUBBERBAND_CHECKPOINT", "RUBBERBAND_CONFIG"
"""Variables of a program: the socket of its reports, the folder of its checkpoint, its configuration as JSON."""
ARTIFACTS = "RUBBERBAND_ARTIFACTS"
"""Variable of every trial: the folder whose files are kept with it, if it is that of rank 0."""
DRAFT = ".rubberband-draft-"
"""Beginning of the name of a file that is not whole yet."""
GO_ON = b"g"
BEGUN = {"begun": True}
"""Line of a process whose start is over."""

_connections: dict[int, socket.socket] = {}
"""By process: a forked one has its own."""


class Session(Protocol):
    """The runner of a function trial, for `report` and `get_checkpoint`."""

    ended: bool
    """Set before a report that is the trial's last."""

    @property
    def iteration(self) -> int:
        """The number of the iteration that the function reports next, from 1."""

    @property
    def most_at_once(self) -> int | None:
        """How many samples fit into memory at once, as earlier attempts have found; None: that is not known."""

    def report(self, metrics: Mapping[str, Any], checkpoint: Any) -> None:
        """Hand over one iteration and wait until the next is requested."""

    def checkpoint(self) -> Any:
        """Return the function's last checkpoint, or None."""


current_session: ContextVar[Session] = ContextVar("rubberband function trial")
"""Set in the thread of a function trial only."""
in_functions: set[Session] = set()
"""The function trials of this process that run."""


def report(metrics: Mapping[str, float], *, checkpoint: Any = None) -> None:
    """Report one iteration of a trial that is a function or a program, and wait until the next one is requested.

    `checkpoint` is any picklable object from which a function can resume (see `get_checkpoint`); of a program, the path
    of a folder, which is by default the one of `${checkpoint}`. A promoted trial resumes from it; iterations reported
    after the last checkpoint are repeated then, and not counted again. A trial that never passes one starts from zero
    after every stage, and whenever it moves: that works, with a warning, and costs time that no estimate includes.

    The experiment's metric is among `metrics`. After the last iteration of a stage the call does not return. It ends a
    function by an exception that is no `Exception`, so that `finally` blocks and context managers run; a program gets
    SIGTERM. A function that returns, or a program that exits, before that ends its trial: the latest metrics count at
    every later SYNC, and the trial trains no more. In a gang every rank may call it, and rank 0's call counts.

    Outside a search it prints the metrics.

    Args:
        metrics: At most 1,000 numbers, with names of at most 200 characters.
        checkpoint: The object, or the folder's path, from which `get_checkpoint` continues.

    Raises:
        RuntimeError: In another thread than that of a function trial.

    Examples:
        >>> rubberband.report({"loss": 0.25, "accuracy": 0.9}, checkpoint={"epoch": 1})
        loss=0.25 accuracy=0.9
    """
    session = _session("report")
    if session is not None:
        session.report(metrics, checkpoint)
    elif LINE not in os.environ:
        print(" ".join(f"{name}={_plain(value)}" for name, value in metrics.items()), flush=True)
    else:
        report_to_worker(metrics, checkpoint)


def get_checkpoint() -> Any:
    """Return the checkpoint from which this trial resumes, or None when it starts from the beginning.

    In a program that is the path of a folder.

    Returns:
        The object, or the folder's path, of the last report with a checkpoint; outside a search, None.

    Raises:
        RuntimeError: In another thread than that of a function trial.

    Examples:
        >>> state = rubberband.get_checkpoint() or {"epoch": 0}
        >>> state["epoch"]
        0
    """
    session = _session("get_checkpoint")
    if session is not None:
        return session.checkpoint()
    folder = os.environ.get(CHECKPOINT)
    return folder if folder is not None and os.path.isdir(folder) and os.listdir(folder) else None


def artifact(path: str | os.PathLike[str], *, name: str | None = None) -> None:
    """Keep a file with this trial, such as a plot or a table: it is copied now, and saved at the next report.

    It is listed and downloaded on the trial's page, by REST and by `rubberband artifacts`. The latest of several files
    of one name is kept. In a gang, those of rank 0 are kept, and the trial's log names one of another rank. Outside a
    search, nothing is.

    Args:
        path: The file.
        name: Its name among the trial's, such as `plots/roc.png`; by default its own.

    Raises:
        FileNotFoundError: For a path that is no file.
        ValueError: For a name that leaves the trial's folder.

    Examples:
        >>> from pathlib import Path
        >>> _ = Path("notes.txt").write_text("kept with the trial")
        >>> rubberband.artifact("notes.txt")
    """
    source = os.fspath(path)
    if not os.path.isfile(source):
        raise FileNotFoundError(f"rubberband.artifact: {source} is no file; give the path of a file")
    named = os.path.basename(source) if name is None else name
    parts = named.replace("\\", "/").split("/")
    if any(part in ("", ".", "..") for part in parts) or parts[-1].startswith(DRAFT) or "\0" in named:
        raise ValueError(
            f"rubberband.artifact: {named!r} is no name below the trial's folder; give one such as plots/a.png"
        )
    folder = os.environ.get(ARTIFACTS)
    if not folder:
        return
    if LINE in os.environ and (rank := os.environ.get("RANK", "0")) != "0":  # torchrun's have one folder
        if not _left_out:
            why = f"rank {rank} of a gang gave it, and the files of rank 0 are"
            print(f"rubberband: artifact {named} is not kept: {why}", file=sys.stderr, flush=True)
        _left_out.append(named)
        return
    target = os.path.join(folder, *parts)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    draft = os.path.join(os.path.dirname(target), f"{DRAFT}{os.getpid()}-{threading.get_ident()}")
    shutil.copyfile(source, draft)
    os.replace(draft, target)


def _session(caller: str) -> Session | None:
    session = current_session.get(None)
    if session is None and in_functions:
        raise RuntimeError(
            f"rubberband.{caller}() works inside a function trial that rubberband runs, in the thread that it was "
            f"called in"
        )
    return session


_left_out: list[str] = []
"""Artifacts that this process, of another rank than 0, gave in vain."""
begins_again = False
"""Whether the segment of this process begins again where its function raises RanOut, as that of a program does not."""
most_at_once: int | None = None
"""How many samples fit into the memory of this process at once, as its gang has found; None: that is not known."""
read_memory: Callable[[], Any] | None = None
"""Returns the memory of this process, which goes with its reports; None: it is not measured."""
has_reported = False
"""Whether this process has handed an iteration over."""


def begin() -> None:
    """Say to the worker that the start of this process is over: its modules are imported."""
    _connection().sendall(json.dumps(BEGUN).encode() + b"\n")


def report_to_worker(metrics: Mapping[str, Any], checkpoint: Any, *, ended: bool = False, is_new: bool = False) -> None:
    """Hand an iteration over on rank 0, and wait until the next one is wanted.

    `ended`: it is the trial's last. `is_new`: it is a new iteration, whatever numbers are among its metrics.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    global has_reported
    has_reported = True
    folder = None if checkpoint is None else os.path.abspath(checkpoint)
    connection = _connection()
    content = {"metrics": dict(metrics), "checkpoint": folder, "ended": ended, "is_new": is_new}
    if read_memory is not None:
        content["memory"] = read_memory()
    connection.sendall(json.dumps(content, default=_plain).encode() + b"\n")
    if connection.recv(1) != GO_ON:
        raise SystemExit("rubberband: the segment of this trial is over")


_LONGEST = 103


@contextmanager
def short(path: str) -> Iterator[str]:
    """Yield a name of a socket's path with at most 103 bytes, the most that macOS allows: TMPDIR may have more."""
    if len(os.fsencode(path)) <= _LONGEST:
        yield path
        return
    folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{os.path.basename(path)}"
    finally:
        os.close(folder)


def _connection() -> socket.socket:
    connection = _connections.get(os.getpid())
    if connection is None:
        with short(os.environ[LINE]) as path:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(path)
            except OSError:
                connection.close()
                raise
        _connections[os.getpid()] = connection
    return connection


def _plain(value: Any) -> Any:
    """Return a number of NumPy or torch as one of Python; else its text, which counts as no number."""
    try:
        return value.item()
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return str(value)
