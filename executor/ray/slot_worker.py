"""The processes of one slot: Ray actors that stay warm and run the segments of the slot's trials, or serve them.

A worker runs one thing at a time, on its main thread, so that user code may set signal handlers and the like.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from rubberband.cloud.node import machine_folder, memory_kills
from rubberband.executor.checkpoints import CheckpointStore
from rubberband.executor.logs import trial_log
from rubberband.executor.logs.trial_log import PIPE_BYTES, TrialLog
from rubberband.executor.ray.code import Code, install
from rubberband.executor.training.segment import (
    Segment,
    SegmentArtifact,
    SegmentEnded,
    SegmentFailure,
    SegmentRepeated,
    SegmentReport,
    SegmentStarted,
    SegmentUse,
)
from rubberband.executor.training.trial import Device
from rubberband.executor.training.worker_process import compute_with, cpus_per_slot, reserve_port, worker_settings
from rubberband.features import part
from rubberband.values.environment import Environment

if TYPE_CHECKING:
    from rubberband.executor.training.entrypoint import Entrypoint

SegmentItem = (
    SegmentStarted | SegmentRepeated | SegmentReport | SegmentUse | SegmentArtifact | SegmentEnded | SegmentFailure
)
"""Item of a worker's stream."""


def logs_folder(instance: str) -> Path:
    """Return the folder of an instance's logs on this machine, in one of its actors.

    Instances of several experiments may be on one machine, which a pool lends to them; each has a namespace of its own.
    """
    import ray

    namespace: str = ray.get_runtime_context().namespace
    folder = machine_folder() / "logs" / namespace / instance
    folder.mkdir(parents=True, exist_ok=True)
    return folder


_LOG_PATIENCE_S = 5.0
"""The longest wait until output is in the log; a slower disk does not delay the trial."""


class LogPump:
    """The worker's end of `executor/logs/trial_log.py`'s process. It serves one log at a time, from one thread."""

    def __init__(self, masks: Sequence[str] = ()) -> None:
        """`masks`: texts that no log gets."""
        self._control: socket.socket | None = None
        self._masks = masks

    def start(self) -> None:
        """Start the process, unless it runs; it ends after the worker, once all is written."""
        if self._control is not None:
            return
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-I", "-S", trial_log.__file__, str(theirs.fileno())]
            nowhere = subprocess.DEVNULL
            subprocess.run(
                command,
                stdin=nowhere,
                stdout=nowhere,
                stderr=nowhere,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                check=False,
            )
        ours.settimeout(_LOG_PATIENCE_S)
        for text in self._masks:
            ours.sendall(trial_log.masking(text))
        self._control = ours

    def close(self) -> None:
        """Let the process end."""
        if self._control is not None:
            self._control.close()
            self._control = None

    @contextlib.contextmanager
    def redirected(self, log: TrialLog | None) -> Iterator[Callable[[], None]]:
        """Add the output of this process, its children and C libraries to `log` while in the block.

        Yields a function that waits until all output so far is there.
        """
        if log is None:
            yield lambda: None
            return
        pipe = self._open(log)
        streams = sys.stdout, sys.stderr
        _flush(*streams)
        kept = os.dup(1), os.dup(2)
        with open(pipe, "w", buffering=1, encoding="utf-8", errors="backslashreplace") as file:
            os.dup2(pipe, 1)
            os.dup2(pipe, 2)
            sys.stdout = sys.stderr = file
            try:
                yield lambda: self._drain(file)
            finally:
                self._drain(file)
                sys.stdout, sys.stderr = streams
                for number, original in zip((1, 2), kept, strict=True):
                    os.dup2(original, number)
                    os.close(original)

    def _open(self, log: TrialLog) -> int:
        """Open a pipe whose bytes are added to `log`."""
        reading, writing = os.pipe()
        with contextlib.suppress(OSError, AttributeError):  # the user's quota of large pipes is used up
            fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        try:
            self._send(trial_log.opening(log), [reading])
        finally:
            os.close(reading)
        return writing

    def _send(self, message: bytes, fds: list[int]) -> None:
        try:
            self.start()
            assert self._control is not None
            socket.send_fds(self._control, [message], fds)
        except OSError:  # its process was killed: retry with another one
            self.close()
            self.start()
            assert self._control is not None
            socket.send_fds(self._control, [message], fds)

    def _drain(self, file: io.TextIOBase) -> None:
        _flush(file)
        if self._control is None:
            return
        try:
            self._control.sendall(trial_log.draining())
            if not self._control.recv(1):
                raise ConnectionResetError
        except OSError:
            self.close()  # a late answer would be taken for that to another message


def _flush(*streams: io.TextIOBase | object) -> None:
    for stream in streams:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()  # type: ignore[union-attr]


Vitals = tuple[int, int]
"""Processes that a machine has killed for lack of memory, and bytes that a trial has printed there."""
DeathCause = Literal["memory", "hang", ""]
_WATCHDOGS = (b"Watchdog caught collective operation timeout", b"watchdog got stuck")
"""In the last lines of a process that torch ended as its GPUs stood still."""
_LAST_BYTES = 2**16
_DELIVERY_S = 3.0
"""How long the last item may take to the driver before the process ends."""


class SlotWorker:
    """Runs segments in this process; `Workers` makes it an actor."""

    def __init__(
        self,
        entrypoint: Entrypoint,
        store: CheckpointStore,
        *,
        instance: str = "",
        remote: bool = False,
        code: Code | None = None,
    ) -> None:
        """`remote`: `instance` is not the driver's machine, and `code` holds the driver's folders."""
        self._instance, self._remote = instance, remote
        self._entrypoint = entrypoint if code is None else install(code, entrypoint)
        self._store = store
        self._log_pump = LogPump(entrypoint.environment.masks())
        if remote:
            _speak_where_others_listen()

    def warm_up(self, device: Device, slots_on_machine: int) -> None:
        """Import everything that training needs, which is most of a cold start."""
        from rubberband.executor.training.run import warm_up

        del sys.argv[1:]  # Ray's, which a trial that parses arguments must not find
        self._entrypoint.environment.put()
        os.environ.update(worker_settings(os.environ, device, slots_on_machine))
        if device == "cuda" and "OMP_NUM_THREADS" not in self._entrypoint.environment.variables:
            compute_with(cpus_per_slot(slots_on_machine))
        end_forks_by_sigterm()
        self._log_pump.start()
        warm_up(self._entrypoint, device)

    def rendezvous(self) -> str:
        """Return where the gang meets if this worker is its rank 0: `tcp://host:port`."""
        import ray

        host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return f"tcp://{host}:{reserve_port()}"

    def vitals(self, log: TrialLog | None) -> Vitals:
        """Return the present counts of its machine."""
        return memory_kills(), 0 if log is None else trial_log.printed_bytes(self._placed(log).path)

    def death_cause(self, before: Vitals, log: TrialLog | None) -> DeathCause:
        """Return why a process of its machine died after the `before`; empty: that is not known."""
        kills, printed = self.vitals(log)
        if kills > before[0]:
            return "memory"
        if log is None:
            return ""
        begin = max(before[1], printed - _LAST_BYTES)
        last = trial_log.read(self._placed(log).path, begin, _LAST_BYTES).content if printed else b""
        return "hang" if any(sign in last for sign in _WATCHDOGS) else ""

    def _placed(self, log: TrialLog, rank: int | None = None) -> TrialLog:
        log = replace(log, rank=rank)
        return log if log.path.is_absolute() else replace(log, path=logs_folder(self._instance) / log.path)

    def run(self, segment: Segment, log: TrialLog | None) -> Iterator[SegmentItem]:
        """Train; output is added to `log` (a bare name is a file of this machine), before the item that follows it."""
        from rubberband.executor.training.failures import context_is_lost
        from rubberband.executor.training.run import run_segment
        from rubberband.executor.training.runner import function_runs_on

        if self._remote:
            segment = replace(segment, instance=self._instance)
        rank = segment.rank if segment.num_workers > 1 else None
        with (
            self._log_pump.redirected(log and self._placed(log, rank)) as drain,
            contextlib.closing(run_segment(self._entrypoint, segment, self._store)) as items,
        ):
            for item in items:
                drain()
                yield _masked(item, self._entrypoint.environment)
        if context_is_lost() or function_runs_on():
            time.sleep(_DELIVERY_S)  # the driver has the last item by then, and may have ended this process
            os._exit(1)


_Item = TypeVar("_Item", bound=SegmentItem)


def _masked(item: _Item, environment: Environment) -> _Item:
    """Return an item without the values of secrets, which an exception's message may have."""
    if not isinstance(item, SegmentFailure):
        return item
    return replace(item, message=environment.masked(item.message), details=environment.masked(item.details))


def end_forks_by_sigterm() -> None:
    """Let SIGTERM end processes that user code forks from now on, such as those of a multiprocessing.Pool.

    They inherit Ray's handler, which raises SystemExit. Right after a fork that is swallowed, and a pool never
    stops waiting for its process; so the signal waits until the handler is gone.
    """
    masks: dict[int, set[int]] = {}

    def before() -> None:
        masks[threading.get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def after() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop(threading.get_ident()))

    def in_child() -> None:
        if getattr(signal.getsignal(signal.SIGTERM), "__module__", "") == "ray._private.worker":
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        after()

    os.register_at_fork(before=before, after_in_parent=after, after_in_child=in_child)


def _speak_where_others_listen() -> None:
    """Let gloo and NCCL use the interface by which the instances know each other.

    By default they take that of the host's name, which may be the loopback, or any other (Docker's).
    """
    import psutil
    import ray

    address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    for interface, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # not a prefix: ens5 would be ens50 too


# The process of a parameter server: a Ray actor that stays warm and serves one segment after another.
#
# It is beside a slot's worker, on the same instance, and takes no GPU of its own; it outlives that worker.

_QUEUE = 128


class ServerProcess:
    """Serves segments in this process; `Workers` makes it an actor."""

    def __init__(self, entrypoint: Entrypoint, *, code: Code | None = None) -> None:
        """`code` holds the driver's folders, if this is not the driver's machine."""
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # it has none of the GPUs, and Ray lets it see all of them
        self._entrypoint = entrypoint if code is None else install(code, entrypoint)

    def warm_up(self) -> None:
        """Import everything that serving needs."""
        from rubberband.executor.training.run import warm_up

        end_forks_by_sigterm()
        self._entrypoint.environment.put()
        warm_up(self._entrypoint, "cpu")

    def run(self, segment: Segment, index: int) -> Iterator[str | SegmentFailure]:
        """Serve as server `index` of the segment; yield its `host:port`, and in the end why it failed, if it did."""
        import ray

        host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        listener = socket.create_server(("", 0), backlog=_QUEUE)
        yield f"{host}:{listener.getsockname()[1]}"
        failure = part("server")(self._entrypoint, segment, index, listener)
        if failure is not None:
            yield _masked(failure, self._entrypoint.environment)
