"""Starts the guarding processes (see `instance`) of one directory's instances and head, and reaps them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from rubberband.cloud.local import instance as guard
from rubberband.cloud.local import ray_node
from rubberband.cloud.local.instance import Record
from rubberband.cloud.steady import SteadyClock
from rubberband.errors import ProviderError

_RELEASE_S = 3.0


class Guards:
    """The guarding processes that this one started. Every method may be called from any thread."""

    def __init__(self, experiment: str, directory: Path, token_path: Path, lease_s: float, clock: SteadyClock) -> None:
        """What it starts goes by `clock`.

        `lease_s`: how long an instance bears with a driver that slept with this machine, from when both woke.
        """
        self._experiment = experiment
        self._directory = directory
        self._token_path = token_path
        self._starts = token_path.parent / "starts"
        """Of one user on this machine, like the token: whose turn it is to start."""
        self._starts.mkdir(exist_ok=True)
        self._lease_s = lease_s
        self._clock = clock
        self._mutex = threading.Lock()
        self._closed = False
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def lease(self) -> Path:
        """The file whose modification time is the instant at which instances end."""
        return self._directory / "lease"

    def leased(self) -> bool:
        """Whether there is a lease that is not over."""
        return self.lease.exists() and self.lease.stat().st_mtime > self._clock()

    def renew_lease(self, until: float) -> None:
        """Put the end off, or bring it forward, to `until`."""
        if not self.lease.exists():
            self.lease.touch()
        os.utime(self.lease, (until, until))

    def write(
        self,
        path: Path,
        command: Sequence[str],
        temp_dir: str,
        address: str,
        devices: Sequence[str],
        *,
        first_lease_s: float | None = None,
    ) -> None:
        """Write down what is about to be started under the name of `path`."""
        now = self._clock()
        record = Record(
            name=path.stem,
            experiment=self._experiment,
            directory=str(self._directory),
            command=tuple(command),
            temp_dir=temp_dir,
            devices=tuple(devices),
            address=address,
            requested_at=now,
            lease_until=self.lease.stat().st_mtime,
            first_lease_s=first_lease_s,
        )
        guard.save(path, record, now)

    def spawn(self, path: Path) -> None:
        """Start the process of the record at `path`; where there is one already, the new one finds that, and goes.

        Raises ProviderError once this is closed.
        """
        record = guard.load(path)
        tags = {
            guard.EXPERIMENT_TAG: self._experiment,
            guard.DIRECTORY_TAG: str(self._directory),
            guard.INSTANCE_TAG: record.name,
        }
        with self._mutex:
            if self._closed:
                raise ProviderError(f"the provider of experiment {self._experiment} is closed; open a new one")
            self._processes.append(
                subprocess.Popen(
                    [
                        sys.executable,
                        "-P",
                        guard.__file__,
                        str(path),
                        str(self.lease),
                        str(self._lease_s),
                        repr(self._clock.booted_at),
                        str(self._starts),
                    ],
                    env=ray_node.environment(os.environ, self._token_path, tags, record.devices),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            )

    def reap(self) -> None:
        """Forget processes that ended, so that none stays a zombie."""
        with self._mutex:
            self._processes = [process for process in self._processes if process.poll() is None]

    def close(self) -> None:
        """Start nothing any more."""
        with self._mutex:
            self._closed = True

    def wait(self) -> None:
        """Wait for processes that were told to end; what they guarded has ended, and who is slow to go is killed."""
        for process in self._processes:
            try:
                process.wait(timeout=_RELEASE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.reap()
