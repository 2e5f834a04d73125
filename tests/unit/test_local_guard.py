"""How long an instance of the local cloud lives without its driver, on a clock that jumps."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import pytest

from rubberband.cloud.local.instance import Record, _Guard, save

LEASE_S = 30.0


class Node:
    """A Ray node that lives."""

    returncode = None

    def poll(self) -> None:
        """It does."""


class Waiting(threading.Event):
    """Time passes while it is waited for, now and then much of it: the machine sleeps."""

    def __init__(self, sleeps: dict[float, float]) -> None:
        super().__init__()
        self.now = 1000.0
        self._sleeps = sleeps

    def wait(self, timeout: float | None = None) -> bool:
        """No time for others."""
        self.now += timeout or 0.0
        for at in [at for at in self._sleeps if at <= self.now]:
            self.now += self._sleeps.pop(at)
        return False


@pytest.mark.parametrize(
    ("sleeps", "ends_at"),
    [
        ({}, 1000.0 + LEASE_S),
        ({1010.0: 5.0}, 1000.0 + LEASE_S),
        ({1010.0: 500.0}, 1510.0 + LEASE_S),
        ({1010.0: 500.0, 1520.0: 500.0}, 2020.0 + LEASE_S),
    ],
)
def test_a_driver_that_slept_with_its_machine_has_a_lease_of_time_to_put_the_end_off(
    tmp_path: Path, sleeps: dict[float, float], ends_at: float
) -> None:
    path, lease = tmp_path / "a.json", tmp_path / "lease"
    lease.touch()
    os.utime(lease, (1000.0 + LEASE_S, 1000.0 + LEASE_S))
    record = Record(
        name="a",
        experiment="x",
        directory=str(tmp_path),
        command=(),
        temp_dir="",
        devices=(),
        address="",
        requested_at=1000.0,
        running_at=1000.0,
    )
    save(path, record, 1000.0)
    stop = Waiting(sleeps)
    node: subprocess.Popen[bytes] = Node()  # type: ignore[assignment]
    guard = _Guard(path, record, lease, LEASE_S, stop, lambda: stop.now)
    assert guard._watch(node) == "lease expired"
    assert stop.now == pytest.approx(ends_at, abs=2.0)
