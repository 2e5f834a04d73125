"""Trials for the tests of backends: quick, without torch, and ill-behaved when the configuration says so."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Mapping
from typing import Any

from rubberband.executor.training.trial import Trial, TrialContext


class Counter(Trial):
    """Counts iterations; `fault` happens on rank `rank` (default 0) in its second iteration of a segment."""

    def setup(self, config: Mapping[str, Any], context: TrialContext) -> None:
        self.config = config
        self.context = context
        self.iterations = context.iterations
        print(f"setup of trial {context.trial}, rank {context.rank}")

    def iterate(self) -> Mapping[str, float]:
        """Sleep for `sleep_s`, and report the process that did."""
        self.iterations += 1
        subprocess.run(["head", "-c", str(self.config.get("print_bytes", 0)), "/dev/zero"], check=True)
        print(f"\niteration {self.iterations}")
        time.sleep(self.config.get("sleep_s", 0.0))  # something can happen amid it
        if self.iterations >= self.context.iterations + 2 and self.context.rank == self.config.get("rank", 0):
            self._fault()
        return {"loss": 1.0 / self.iterations, "pid": float(os.getpid())}

    def _fault(self) -> None:
        match self.config.get("fault"):
            case "exit":
                os._exit(3)
            case "raise":
                raise ValueError("boom")
            case "end":
                self.ended = True
            case "hang":
                threading.Event().wait()

    def save(self) -> Any:
        return self.iterations

    def load(self, state: Any) -> None:
        assert state == self.iterations
