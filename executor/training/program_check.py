"""Checks a program before anything is rented: iterations, a checkpoint, and a second start that continues from it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rubberband.executor.training.check_findings import TrialCheck
from rubberband.executor.training.command_runner import CommandRunner
from rubberband.executor.training.entrypoint import Entrypoint
from rubberband.executor.training.failures import TrainingEnded
from rubberband.executor.training.run import make_runner
from rubberband.executor.training.segment import Segment
from rubberband.units import counted

_PROGRAM_S = 30.0
"""More iterations are trained if the first one, with the program's start, took no longer than this."""
_UNTIL_SAVED = 4
"""Iterations until a program that prints its metrics has shown whether it saves before it prints."""


class ProgramCheck:
    """Goes through the steps of a program, and adds to the findings."""

    def __init__(
        self, entrypoint: Entrypoint, found: TrialCheck, step: Callable[[str], AbstractContextManager[None]]
    ) -> None:
        """`step`: times a step of that name; a failure in it is a problem, and ends the check."""
        self._entrypoint, self._found, self._step = entrypoint, found, step

    def run(self, segment: Segment) -> None:
        """Train until the program has saved, and one iteration more; then one by another start, from the checkpoint."""
        with tempfile.TemporaryDirectory(prefix="rubberband-") as folder:
            path = Path(folder, "checkpoint")
            seen, done, saved = self._started(segment, path)
            if saved > 0:
                self._found.checkpoint_bytes = path.stat().st_size
                self._restarted(replace(segment, from_iterations=done, until_iterations=done + 1), path, seen, saved)

    def _started(self, segment: Segment, path: Path) -> tuple[list[Mapping[str, float]], int, int]:
        """Write a checkpoint to `path`; return all metrics, and the iterations done and saved by then."""
        resources: list[Any] = []
        try:
            with self._step("set-up"):
                runner = self._made(segment, resources)
            with self._step("iteration"):
                seen = [runner.iterate(1)]
            self._found.metrics, seconds = dict(seen[0]), self._found.seconds
            goes_on = seconds["iteration"] <= _PROGRAM_S
            while goes_on and runner.saved_iterations(len(seen)) == 0 and len(seen) < _UNTIL_SAVED:
                goes_on = self._next(runner, segment, seen)
            done, saved = len(seen), runner.saved_iterations(len(seen))
            with self._step("save"):
                payload = runner.dump(done, seen[-1], is_last=True)
                assert callable(payload), "it is a folder's"
                payload(path)
            if goes_on and (done == 1 or saved == done):
                self._next(runner, segment, seen)
            if "next" in seconds:
                start_s = max(0.0, seconds["iteration"] - seconds["next"])
                seconds["set-up"] += start_s
                seconds["iteration"] -= start_s
            if saved == 0 and segment.max_iterations != 1:
                self._found.remarks.append(f"the program {runner.unsaved()} (docs/commands.md)")
            runner.part()
            return seen, done, saved
        finally:
            _close(resources)

    def _next(self, runner: CommandRunner, segment: Segment, seen: list[Mapping[str, float]]) -> bool:
        """Train one more iteration, if there is one; return whether there was."""
        if len(seen) == segment.max_iterations:
            return False
        before = len(seen)
        with self._step("next"), suppress(TrainingEnded):
            seen.append(runner.iterate(len(seen) + 1))
        if len(seen) == before == 1:
            self._found.seconds.pop("next")
            self._found.remarks.append(
                "the program ended after one report, so that a trial is one iteration, and no stage stops it early; "
                "report after each epoch"
            )
        return len(seen) > before

    def _restarted(self, segment: Segment, path: Path, seen: Sequence[Mapping[str, float]], saved: int) -> None:
        """Remark on a program that does not load its checkpoint: it repeats its first iteration."""
        resources: list[Any] = []
        found: Mapping[str, float] | None = None
        try:
            with self._step("restore"):
                runner = self._made(segment, resources, path)
            if self._found.seconds["set-up"] + self._found.seconds["iteration"] <= _PROGRAM_S:
                with self._step("continue"), suppress(TrainingEnded):
                    found = runner.iterate(saved + 1)
        finally:
            _close(resources)
        metric = segment.metric
        if found and saved < len(seen) and found[metric] == seen[0][metric] != seen[saved][metric]:
            self._found.remarks.append(
                f"started again from the checkpoint of {counted(saved, 'iteration')}, the program reports "
                f"{metric}={found[metric]:.6g} as in its first: it starts from zero at each stage; load what is in "
                "${checkpoint} at the start (docs/commands.md)"
            )

    def _made(self, segment: Segment, resources: list[Any], checkpoint: Path | None = None) -> CommandRunner:
        runner = make_runner(self._entrypoint, segment, resources)
        assert isinstance(runner, CommandRunner), "it runs every command"
        resources.append(runner)
        runner.begin(checkpoint)
        return runner


def _close(resources: list[Any]) -> None:
    while resources:
        with suppress(Exception):
            resources.pop().close()
