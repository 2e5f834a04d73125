"""The driver's presence on an instance that is another machine: a small actor there, and the thread that asks it.

Every beat extends the machine's lease, and returns the cloud's notice of an interruption and the new output of trials.
A failed beat changes nothing: an instance that cannot be reached is not dead, and its lease is long enough.
"""

from __future__ import annotations

import logging
import math
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError

from rubberband.cloud.node import extend_lease, interruption
from rubberband.cloud.provider import INSTANCE_LABEL
from rubberband.executor.logs.trial_log import Appender, TrialLog, left_out_line, printed_bytes, read
from rubberband.executor.ray import connection
from rubberband.executor.ray.connection import ray_nodes
from rubberband.executor.ray.slot_worker import logs_folder

_log = logging.getLogger(__name__)

_PATIENCE_S = 20.0
"""The longest wait for the answer to a beat; then the next one is sent."""
_SILENT_BEATS = 3
"""After this many beats without an answer another actor is started."""
_NOTICED_INTERVAL_S = 0.5
"""Between beats once the instance is about to be reclaimed, so that few log lines are lost with it."""
_COLLECT_S = 20.0
"""The longest wait of a release for the last lines of the logs: a busy machine answers late, and they exist only there.

The margin of a release in `rubberband.values.kinds` covers it."""


_PART_BYTES = 2**18
_PARTS_BYTES = 2**20
_NAME = re.compile(r"[A-Za-z0-9_-]+\.log")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPart:
    """A stretch of a log file."""

    name: str
    offset: int
    content: bytes
    left_out: int = 0
    """Bytes before it that the driver does not get."""

    @property
    def end(self) -> int:
        """Offset at which the next part begins."""
        return self.offset + len(self.content)


def read_new(folder: Path, taken: Mapping[str, int], *, is_last: bool = False) -> Sequence[LogPart]:
    """Return the logs beyond what the driver has `taken` (name -> bytes), 1 MiB at most; finally, the end of each.

    The bytes that a driver has taken are noted beside the log, for the next driver.
    """
    parts: list[LogPart] = []
    room = _PARTS_BYTES
    paths = sorted(folder.glob("*.log"))
    most_bytes = min(_PART_BYTES, _PARTS_BYTES // max(1, len(paths))) if is_last else _PART_BYTES
    for path in paths:
        note = path.with_suffix(".taken")
        offset = taken.get(path.name)
        if offset is None:
            offset = _noted(note)
        elif offset != _noted(note):
            note.write_text(str(offset))
        begin = max(offset, printed_bytes(path) - most_bytes) if is_last else offset
        new = read(path, begin, min(most_bytes, room))
        if new.content:
            left_out = new.begin - offset
            parts.append(LogPart(name=path.name, offset=new.begin, content=new.content, left_out=left_out))
            room -= len(new.content)
        if room <= 0:
            break
    return parts


def _noted(note: Path) -> int:
    with suppress(OSError, ValueError):
        return int(note.read_text())
    return 0


def append(folder: Path, part: LogPart, limit_bytes: int) -> None:
    """Add a part to the driver's log of that name, of which `limit_bytes` are kept. Raises OSError."""
    if _NAME.fullmatch(part.name) is None:
        return
    missing = f"\n{left_out_line(part.left_out)}\n".encode() if part.left_out else b""
    with closing(Appender(TrialLog(path=folder / part.name, limit_bytes=limit_bytes))) as log:
        log.write(missing + part.content)


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """Answer of an instance."""

    interruption: float | None
    """Unix time at which the cloud reclaims it; None without a notice."""
    logs: Sequence[LogPart]


class AgentActor:
    """Runs on the instance."""

    def __init__(self, instance: str) -> None:
        self._instance = instance

    def beat(self, until: float | None, taken: Mapping[str, int], is_last: bool = False) -> Beat:
        """Extend the lease to `until` (None: leave it), and return what is new; `taken`: log -> bytes the driver has.

        The last beat returns the end of each log, even if that leaves a gap, and removes the logs: the machine may be
        lent on.
        """
        if until is not None:
            extend_lease(until)
        folder = logs_folder(self._instance)
        found = Beat(interruption=interruption(), logs=read_new(folder, taken, is_last=is_last))
        if is_last:
            shutil.rmtree(folder, ignore_errors=True)
        return found


@dataclass(eq=False)
class RemoteAgent:
    """The driver's side, for one instance. Any thread may call it."""

    instance: str
    until: Callable[[], float | None] = field(kw_only=True)
    """Gives the instant to which the lease is extended; None: it is left as it is."""
    interval_s: float = field(kw_only=True)
    logs: Path | None = field(kw_only=True)
    """The folder of the files to which the trials' output is added."""
    log_limit_bytes: int = field(kw_only=True)
    """Bytes of each file that are kept."""
    on_notice: Callable[[], None] = field(kw_only=True)
    """Called at every beat that reports an interruption."""
    on_answer: Callable[[], None] = field(default=lambda: None, kw_only=True)
    """Called at every beat that was answered."""
    node: Callable[[str], str] = field(default=lambda instance: instance, kw_only=True)
    """Gives the label of the Ray node that the instance is, or is a part of."""

    def __post_init__(self) -> None:
        self._taken: dict[str, int] = {}
        self._mutex = threading.Lock()
        """Held while parts of logs are taken, so that none is taken twice."""
        self._dismissed = False
        self._wake = threading.Event()
        self.reaches = -math.inf
        """The latest instant at which the machine may end itself, as far as it was given one."""
        self._actor: Any = None
        self._silent = 0

    def begin(self) -> None:
        """Start the actor once the instance has joined, and send beats until dismissed."""
        connection.start(self._run, f"agent-{self.instance}")

    def dismiss(self) -> None:
        """Stop extending the lease."""
        self._dismissed = True
        self._wake.set()

    def hurry(self) -> None:
        """Do not wait for the next beat."""
        self._wake.set()

    def collect(self) -> None:
        """Take the end of the logs, unless the instance is gone; the lease is left as it is."""
        with suppress(Exception):  # it does not answer
            actor = self._actor or self._post()
            if actor is not None:
                self._ask(actor, None, _COLLECT_S, is_last=True)

    def _run(self) -> None:
        while not self._dismissed:
            self._wake.clear()
            try:
                actor = self._actor or self._post()
                if actor is not None:
                    self._ask(actor, self.until(), _PATIENCE_S)
                    self._silent = 0
            except Exception as error:
                _log.debug("instance %s did not answer: %s: %s", self.instance, type(error).__name__, error)
                self._silent += 1
                if isinstance(error, RayActorError) or self._silent >= _SILENT_BEATS:
                    self._discard()
            if not self._dismissed:
                self._wake.wait(self.interval_s if self._actor is not None else min(1.0, self.interval_s))

    def _post(self) -> Any:
        """Start the actor if the instance has joined: one that waits for its node would keep the head busy."""
        node = self.node(self.instance)
        if not ray_nodes().get(node, False):
            return None
        # Ray orders an actor without needs from any node, even from one that has just ended, and waits until it notices
        # that. An actor with a need is ordered from the driver's node.
        label = {INSTANCE_LABEL: node}
        actor = ray.remote(AgentActor).options(num_cpus=0, memory=1, max_restarts=0, label_selector=label)
        self._actor = actor.remote(self.instance)
        return self._actor

    def _discard(self) -> None:
        actor, self._actor, self._silent = self._actor, None, 0
        with suppress(Exception):
            ray.kill(actor)

    def _ask(self, actor: Any, until: float | None, timeout_s: float, *, is_last: bool = False) -> None:
        give_up_at = time.monotonic() + timeout_s
        if not self._mutex.acquire(timeout=timeout_s):
            return
        try:
            if until is not None:
                self.reaches = max(self.reaches, until)
            asked = actor.beat.remote(until, dict(self._taken), is_last)
            beat: Beat = ray.get(asked, timeout=max(0.0, give_up_at - time.monotonic()))
            self.on_answer()
            if until is not None:
                self.reaches = until  # beats arrive in their order
            if beat.interruption is not None:
                self.interval_s = min(self.interval_s, _NOTICED_INTERVAL_S)
                self.on_notice()
            with suppress(OSError):  # a full disk; they are asked for again
                self._keep(beat.logs)
        finally:
            self._mutex.release()

    def _keep(self, parts: Sequence[LogPart]) -> None:
        for part in parts:
            if self.logs is not None:
                append(self.logs, part, self.log_limit_bytes)
            self._taken[part.name] = part.end
