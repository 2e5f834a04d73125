"""The driver's presence on an instance that is another machine: a small actor there, and the thread that asks it.

With every beat the machine's lease is put off, and back comes what the cloud says of an interruption, and what trials
have printed. A beat that fails changes nothing: what cannot be reached is not dead, and its lease is long enough.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError

from rubberband.cloud.node import extend_lease, interruption
from rubberband.cloud.provider import INSTANCE_LABEL
from rubberband.executor.ray import connection
from rubberband.executor.ray.connection import ray_nodes
from rubberband.executor.ray.logs import LogPart, append, logs_folder, read_new

_log = logging.getLogger(__name__)

_PATIENCE_S = 20.0
"""For the answer to a beat; then the next one is sent."""
_SILENT_BEATS = 3
"""After so many beats without an answer another actor is posted."""
_NOTICED_INTERVAL_S = 0.5
"""Between beats once the instance is about to be taken away, so that few lines of the logs go with it."""
_COLLECT_S = 1.5
"""A release waits so long for the last lines of the logs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """What an instance answers."""

    interruption: float | None
    """When the cloud takes it away, if it has said so (Unix time)."""
    logs: Sequence[LogPart]


class WardenActor:
    """Runs on the instance."""

    def beat(self, until: float | None, taken: Mapping[str, int], is_last: bool = False) -> Beat:
        """Put the lease off to `until` (None: leave it), and tell what is new; `taken`: log -> bytes the driver has.

        The last time the end of each log is told, whatever lies before it.
        """
        if until is not None:
            extend_lease(until)
        return Beat(interruption=interruption(), logs=read_new(logs_folder(), taken, is_last=is_last))


class Warden:
    """The driver's side, for one instance. Any thread may call it."""

    def __init__(
        self,
        instance: str,
        *,
        until: Callable[[], float | None],
        interval_s: float,
        logs: Path | None,
        log_limit_bytes: int,
        on_notice: Callable[[], None],
    ) -> None:
        """`until` is what the lease is put off to (None: it is left as it is).

        What trials print is added to the files in `logs`, of each of which `log_limit_bytes` are kept.
        `on_notice` is called at every beat that tells of an interruption.
        """
        self.instance = instance
        self._until = until
        self._interval_s = interval_s
        self._logs = logs
        self._log_limit_bytes = log_limit_bytes
        self._on_notice = on_notice
        self._taken: dict[str, int] = {}
        self._mutex = threading.Lock()
        """Held while parts of logs are taken, so that none is taken twice."""
        self._dismissed = False
        self._wake = threading.Event()
        self.reaches = -math.inf
        """The latest instant at which the machine may end itself, as far as it was told one."""
        self._actor: Any = None
        self._silent = 0

    def begin(self) -> None:
        """Post the actor once the instance has joined, and go on asking it until dismissed."""
        connection.start(self._run, f"warden-{self.instance}")

    def dismiss(self) -> None:
        """The lease is not put off any more."""
        self._dismissed = True
        self._wake.set()

    def hurry(self) -> None:
        """Do not wait for the next beat."""
        self._wake.set()

    def collect(self) -> None:
        """Take the last of the logs, if that is quickly done; the lease is left as it is."""
        actor = self._actor
        if actor is not None:
            with suppress(Exception):  # it may be gone, and the release must not wait for it
                self._ask(actor, None, _COLLECT_S, is_last=True)

    def _run(self) -> None:
        while not self._dismissed:
            self._wake.clear()
            try:
                actor = self._actor or self._post()
                if actor is not None:
                    self._ask(actor, self._until(), _PATIENCE_S)
                    self._silent = 0
            except Exception as error:
                _log.debug("instance %s did not answer: %s: %s", self.instance, type(error).__name__, error)
                self._silent += 1
                if isinstance(error, RayActorError) or self._silent >= _SILENT_BEATS:
                    self._discard()
            if not self._dismissed:
                self._wake.wait(self._interval_s if self._actor is not None else min(1.0, self._interval_s))

    def _post(self) -> Any:
        """The actor, if the instance has joined: one that must wait for its node would keep the head busy."""
        if not ray_nodes().get(self.instance, False):
            return None
        where = {INSTANCE_LABEL: self.instance}
        self._actor = ray.remote(WardenActor).options(num_cpus=0, max_restarts=0, label_selector=where).remote()
        return self._actor

    def _discard(self) -> None:
        actor, self._actor, self._silent = self._actor, None, 0
        with suppress(Exception):
            ray.kill(actor)

    def _ask(self, actor: Any, until: float | None, timeout_s: float, *, is_last: bool = False) -> None:
        if not self._mutex.acquire(timeout=timeout_s):
            return
        try:
            if until is not None:
                self.reaches = max(self.reaches, until)
            beat: Beat = ray.get(actor.beat.remote(until, dict(self._taken), is_last), timeout=timeout_s)
            if until is not None:
                self.reaches = until  # beats arrive in their order
            if beat.interruption is not None:
                self._interval_s = min(self._interval_s, _NOTICED_INTERVAL_S)
                self._on_notice()
            with suppress(OSError):  # a full disk; they are asked for again
                self._keep(beat.logs)
        finally:
            self._mutex.release()

    def _keep(self, parts: Sequence[LogPart]) -> None:
        for part in parts:
            if self._logs is not None:
                append(self._logs, part, self._log_limit_bytes)
            self._taken[part.name] = part.end
