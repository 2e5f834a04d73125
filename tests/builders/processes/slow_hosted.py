"""`rubberband.running.hosted` on a virtual clock that stands still soon after the first reports until HOME/go exists.

It goes on as well to end what was cancelled. And it is not resumed without its checkpoint store, as no real run is.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from rubberband.executor import (
    ExperimentFolder,
    JournalFollower,
    ReleaseInstance,
    Result,
    RunSpec,
    StopTrial,
    VirtualBackend,
    inbox,
    session,
)
from rubberband.executor.checkpoints import reopen_store
from rubberband.running.hosted import main

PAUSE_S = 0.05
BEGINNING = 5
"""So often it brings what happens next: a trial has reported by then, and the first stage is not over."""

LONGEST_S = 300.0
"""A test that failed lets nothing go on: then this does by itself."""


class SlowBackend(VirtualBackend):
    """Brings nothing that its driver waits for."""

    brought = 0
    is_ending = False
    began_at = time.monotonic()

    def execute(self, command: Any) -> None:
        self.is_ending |= isinstance(command, ReleaseInstance | StopTrial)
        super().execute(command)

    def next_events(self, wake_at: float | None) -> Any:
        self.brought += 1
        if self.brought > BEGINNING and not self.is_ending and not self._may_go():
            time.sleep(PAUSE_S)  # its driver hears of requests meanwhile, so it is given back soon
            return ()
        return super().next_events(wake_at)

    def _may_go(self) -> bool:
        return (Path(sys.argv[1]) / "go").exists() or time.monotonic() > self.began_at + LONGEST_S


run = session.run


def run_with_its_store(folder: ExperimentFolder, **how: Any) -> Result:
    """`session.run` of a virtual experiment that needs its checkpoint store."""
    follower = JournalFollower(folder)
    spec = RunSpec.from_json(follower.header.setup)
    follower.close()
    reopen_store(spec.checkpoints, spec.store_mark, [])
    return run(folder, **how)


if __name__ == "__main__":
    session.run = run_with_its_store
    inbox.POLL_S = 0.0  # on the clock that stands still
    session.VirtualBackend = SlowBackend  # type: ignore[misc]
    sys.exit(main(sys.argv[1:]))
