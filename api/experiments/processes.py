"""Processes of experiments, each started at most once. Nothing here depends on being their parent."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from rubberband.api.settings import child_environment
from rubberband.errors import InputError, RubberbandError
from rubberband.executor.journal.folder import ExperimentFolder
from rubberband.executor.journal.hosting import HostedRun, holding, write_order

HOSTED: Sequence[str] = (sys.executable, "-P", "-m", "rubberband.running.hosted")
"""Command; HOME, NAME and the descriptor of the lock follow. -P: the current folder must not hide modules."""

_LAST_S = 0.5
"""Time for the previous process to end before a start fails."""


class NotStartedError(RubberbandError):
    """A process could not be started."""


class Processes:
    """Processes that this server started. They continue without it."""

    def __init__(self, command: Sequence[str] = HOSTED) -> None:
        self._command = command
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, folder: ExperimentFolder, order: HostedRun) -> bool:
        """Start a process with `order`; return False if one runs already. Raises NotStartedError.

        The process inherits the lock: as long as the lock is free, no process exists.
        """
        try:
            with holding(folder, wait_s=_LAST_S) as lock:
                if lock is None:
                    return False
                write_order(folder, order)
                self._spawn(folder, order, lock)
        except (OSError, InputError) as error:
            raise NotStartedError(f"its process could not be started: {error}") from None
        return True

    def _spawn(self, folder: ExperimentFolder, order: HostedRun, lock: int) -> None:
        log = os.open(folder.process_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self._children[folder.name] = subprocess.Popen(
                [*self._command, str(folder.home), folder.name, str(lock)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=child_environment(order.store),
                cwd=next((path for path in order.code if os.path.isdir(path)), folder.path),
                start_new_session=True,
                pass_fds=(lock,),
            )
        finally:
            os.close(log)

    def reap(self) -> None:
        """Collect processes that ended, so that no zombie stays."""
        self._children = {name: child for name, child in self._children.items() if child.poll() is None}

    def let_go(self) -> None:
        """Stop being their parent; they continue."""
        self.reap()
        for child in self._children.values():
            child.returncode = 0  # or Popen would warn that it still runs
        self._children = {}
