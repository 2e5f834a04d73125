"""Starts the processes of experiments, each at most once. Nothing here depends on being their parent."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from rubberband.errors import InputError, RubberbandError
from rubberband.executor.folder import ExperimentFolder
from rubberband.executor.hosting import Order, holding, write_order

HOSTED: Sequence[str] = (sys.executable, "-P", "-m", "rubberband.hosted")
"""What is started; HOME, NAME and the descriptor of the lock follow. Its folder must not come before its modules."""

_LAST_S = 0.5
"""A process that ends just now is waited for, or a start would come to nothing."""


class NotStartedError(RubberbandError):
    """A process could not be started."""


class Processes:
    """The processes that this server started. They go on without it."""

    def __init__(self, command: Sequence[str] = HOSTED) -> None:
        self._command = command
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, folder: ExperimentFolder, order: Order) -> bool:
        """Start one that carries out `order`; False if one is at work already.

        It has the lock before it exists, so that whoever does not see the lock held knows that there is none. Raises
        NotStartedError.
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

    def _spawn(self, folder: ExperimentFolder, order: Order, lock: int) -> None:
        log = os.open(folder.process_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self._children[folder.name] = subprocess.Popen(
                [*self._command, str(folder.home), folder.name, str(lock)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(order.store),
                cwd=next((path for path in order.code if os.path.isdir(path)), folder.path),
                start_new_session=True,
                pass_fds=(lock,),
            )
        finally:
            os.close(log)

    def reap(self) -> None:
        """Let those go that have ended, so that none is left as a zombie."""
        self._children = {name: child for name, child in self._children.items() if child.poll() is None}

    def let_go(self) -> None:
        """Be their parent no longer; they go on."""
        self.reap()
        for child in self._children.values():
            child.returncode = 0  # nobody waits for it here: Popen would warn that it still runs
        self._children = {}


def _environment(store: str | None) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "RUBBERBAND_STORE"}
    return kept if store is None else kept | {"RUBBERBAND_STORE": store}
