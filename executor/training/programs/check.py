"""Checks a program, or a distributed function, before anything is rented.

It trains iterations, keeps a checkpoint, starts a second time from it, and compares one worker with a gang of two.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rubberband.executor.checkpoints import CheckpointStore, open_store
from rubberband.executor.checkpoints.folders import read_manifest
from rubberband.executor.core.events import WITHOUT_CHECKPOINT, CheckpointRef
from rubberband.executor.training import restarts
from rubberband.executor.training.check_findings import CheckOrder, TrialCheck, TrialFault
from rubberband.executor.training.check_workers import failure_of, gang_of, train_side_by_side
from rubberband.executor.training.failures import TrainingEnded, TrialFailure
from rubberband.executor.training.programs import own_files
from rubberband.executor.training.programs.another_start import AnotherStart
from rubberband.executor.training.programs.runner import CommandRunner
from rubberband.executor.training.programs.values import SPARE_S, Outcome, ProgramValues, Trained
from rubberband.executor.training.run import close_all, make_runner, run_segment
from rubberband.executor.training.segment import Segment, SegmentReport
from rubberband.values.command import ProgramCommand
from rubberband.values.metric_lines import numbers_in

Metrics = Mapping[str, float]
_PROGRAM_S, _MOST_PROGRAM_S = 30.0, 75.0
"""More iterations are trained if the first one, with the program's start, took no longer than the first, or than a
quarter of the time of the check, up to the second: a large model is loaded in a minute."""
_ANSWER_S = 1.0
"""Least time between two answers of an iteration that goes on."""
_EPOCH_S = 60.0
"""The longest time for which later lines of an epoch are looked at."""
_LOOK_ON_S = 1.0
"""Least time for which later lines are looked at."""
_UNTIL_SAVED = 4
"""Iterations until a program that prints its metrics has shown whether it saves before it prints."""
_GANG_LIMIT_S = 60.0
_SAME = 1e-3
"""Relative difference of the metric that rounding may make in one iteration."""
_NOISE = 3.0
"""Times the difference between two runs on one worker that two workers may differ by."""
_TWICE = 0.02
_FIXED = "; let a start load what any number of workers saved, or give resources.gpus_per_trial one number"


class ProgramCheck:
    """Goes through the steps of a program, and adds to the findings."""

    _first: Trained
    _before: Mapping[str, int] | None
    _after_first: Mapping[str, int] | None

    def __init__(
        self,
        order: CheckOrder,
        found: TrialCheck,
        step: Callable[[str], AbstractContextManager[None]],
        answer: Callable[[], None],
        until: float,
    ) -> None:
        """`step`: times a step of that name; a failure in it is a problem, and ends the check.

        `answer`: sends the findings so far, which are all if the time is over, at the monotonic time `until`.
        """
        self._order, self._entrypoint, self._until = order, order.entrypoint, until
        self._found, self._step, self._answer = found, step, answer
        self._most_s = min(max(_PROGRAM_S, (until - time.monotonic()) / 4.0), _MOST_PROGRAM_S)

    def run(self) -> None:
        """Train until the program has saved, and one iteration more; then one by another start, from the checkpoint.

        That iteration is trained on two workers too, if a trial may have as many.
        """
        segment, folder = self._order.segment, Path(self._entrypoint.search_path[0])
        self._before = own_files.files_in(folder)
        try:
            with tempfile.TemporaryDirectory(prefix="rubberband-") as place:
                store = open_store(place)
                seen, checkpoint, saved = self._started(segment, store)
                if self._order.only_memory:
                    return
                self._after_first = own_files.files_in(folder)
                later = replace(segment, from_iterations=saved, until_iterations=saved + 1, checkpoint=checkpoint)
                again = self._restarted(later, store, seen) if checkpoint is not None else seen[0]
                if checkpoint is None and segment.max_iterations != 1:
                    self._afresh(seen)
                    self._found.resumes, self._found.restart = False, restarts.AGAIN
                if again and self._order.max_gpus > 1 and not self._found.problems:
                    self._compare(later, store, seen, again)
            if not self._found.problems and self._entrypoint.command and self._took_s <= self._most_s:
                with self._step("values"), _silenced():
                    ProgramValues(self._order, self._found, self._first, self._trained, self._until).run()
        finally:
            if self._found.kind == "program":
                self._tidy(folder)

    @property
    def _took_s(self) -> float:
        return self._found.seconds["set-up"] + self._found.seconds["iteration"]

    def _tidy(self, folder: Path) -> None:
        """Remove models that the check's starts have left in the program's folder; name what else they wrote there."""
        new = own_files.written(self._before, own_files.files_in(folder))
        assert self._before is not None or not new
        left = own_files.told(new)
        removed = [path for path in own_files.models(left) if path not in (self._before or ())]
        for path in removed:
            with suppress(OSError):
                (folder / path).unlink()
        for path in reversed([path for path in new if path.endswith("/")]):
            with suppress(OSError):  # it is not empty
                (folder / path).rmdir()
        if left:
            again = f"; the check has removed {own_files.shown(removed)}" if removed else ""
            self._found.remarks.append(
                f"the program wrote {own_files.shown(left)} into its folder, which all trials share; below "
                f"${{checkpoint}}, save what a trial loads again and others must not overwrite{again}"
            )

    def _started(self, segment: Segment, store: CheckpointStore) -> tuple[list[Metrics], CheckpointRef | None, int]:
        """Return the metrics of the first iterations, the checkpoint, and the iterations in it; None if it has none."""
        resources: list[Any] = []
        try:
            with self._step("set-up"):
                runner = self._made(segment, resources)
            with self._step("iteration"):
                seen = [self._iterated(runner)]
            self._found.metrics, self._found.line, seconds = dict(seen[0]), runner.line, self._found.seconds
            if runner.memory is not None and segment.most_per_gpu is None:
                self._found.begun_bytes, self._found.peak_bytes, self._found.takes_parts = runner.memory
            if self._order.only_memory:
                return seen, None, 0
            self._first = Trained(seen[:], runner.printed(), runner.counting.first.numbers)
            goes_on = seconds["iteration"] <= self._most_s
            while goes_on and runner.saved_iterations(len(seen)) == 0 and len(seen) < _UNTIL_SAVED:
                goes_on = self._next(runner, segment, seen)
            done, saved = len(seen), runner.saved_iterations(len(seen))
            checkpoint = None
            with self._step("save"):
                payload = runner.dump(done, seen[-1], is_last=True)
                if saved > 0:
                    checkpoint = store.save(segment.trial, done, payload)
                    self._found.checkpoint_bytes = checkpoint.total_bytes
            if goes_on and (done == 1 or saved == done):
                goes_on = self._next(runner, segment, seen)
            command = self._entrypoint.command
            if goes_on and command and command.metrics.source == "stdout" and command.metrics.pattern is None:
                self._look_on(runner, len(seen))
            if "next" in seconds:
                start_s = max(0.0, seconds["iteration"] - seconds["next"])
                seconds["set-up"] += start_s
                seconds["iteration"] -= start_s
                self._found.first_extra_s = self._found.cold_extra_s = start_s
            if saved == 0 and segment.max_iterations != 1:
                is_function = self._found.kind == "function"
                self._found.unsaved = WITHOUT_CHECKPOINT if is_function else f"{runner.unsaved()} (docs/commands.md)"
                self._found.remarks.append(f"the {self._found.kind} {self._found.unsaved}")
            runner.part()
            return seen, checkpoint, saved
        finally:
            close_all(resources, segment)

    def _iterated(self, runner: CommandRunner) -> Metrics:
        """Train the first iteration, and answer now and then what it waits for."""
        steps, answered_at = runner.steps(1), time.monotonic()
        while True:
            try:
                next(steps)
            except StopIteration as end:
                metrics: Metrics = end.value
                return metrics
            if time.monotonic() - answered_at > _ANSWER_S and (waits := runner.waits()) != self._found.waits:
                self._found.waits, answered_at = waits, time.monotonic()
                self._answer()

    def _next(self, runner: CommandRunner, segment: Segment, seen: list[Metrics]) -> bool:
        """Train one more iteration, if there is one; return whether there was."""
        if len(seen) == segment.max_iterations or (runner.ended and self._found.kind == "function"):
            return False
        before = len(seen)
        with self._step("next"), suppress(TrainingEnded):
            seen.append(runner.iterate(len(seen) + 1))
        if len(seen) == before == 1:
            self._found.seconds.pop("next")
            self._found.is_once = True
            self._found.remarks.append(
                f"the {self._found.kind} ended after one report: an iteration is a whole training, and stopping it "
                "early saves nothing; report after each epoch, or write scheduler: {type: none}"
            )
        return len(seen) > before

    def _look_on(self, runner: CommandRunner, done: int) -> None:
        """Let the program go on for as long again, as a line of another kind may come: a test after many batches."""
        began, took_s = time.monotonic(), sum(self._found.seconds[name] for name in ("set-up", "iteration", "next"))
        until = began + min(max(_LOOK_ON_S, took_s), (self._until - began) / 4)
        epoch = numbers_in(runner.line).get("epoch")
        if epoch is not None and epoch == self._first.numbers.get("epoch"):  # of batches: a line may follow the last
            until = max(until, began + min((self._until - began) / 3, _EPOCH_S))
        with self._step("later lines"), suppress(TrainingEnded):
            while not runner.ended and time.monotonic() < until:
                done += 1
                for _ in runner.steps(done):
                    if time.monotonic() >= until:
                        return
                if epoch is not None and numbers_in(runner.line).get("epoch") != epoch:
                    return

    def _restarted(self, segment: Segment, store: CheckpointStore, seen: Sequence[Metrics]) -> Metrics | None:
        """Return the metrics of the iteration after the checkpoint, by a second start; None if it has none.

        A program that does not load its checkpoint repeats its first iteration, for which there is a remark.
        """
        resources: list[Any] = []
        found: Metrics | None = None
        assert segment.checkpoint is not None
        try:
            with self._step("restore"), store.file(segment.checkpoint) as path:
                runner = self._made(segment, resources, path)
            if self._found.seconds["set-up"] + self._found.seconds["iteration"] <= self._most_s:
                with self._step("continue"), suppress(TrainingEnded):
                    found = runner.iterate(segment.until_iterations)
        finally:
            close_all(resources, segment)
        if found and self._found.first_extra_s is not None:
            self._found.first_extra_s = max(0.0, self._found.seconds["continue"] - self._found.seconds["next"])
        if "continue" in self._found.seconds:
            self._judge(runner, segment, seen, found)
        return found

    def _judge(self, runner: CommandRunner, segment: Segment, seen: Sequence[Metrics], found: Metrics | None) -> None:
        """Compare the second start with the unbroken run, and with a third one that has no checkpoint."""
        counting, saved, metric = runner.counting, segment.from_iterations, segment.metric
        is_exact = found is not None and saved < len(seen) and found[metric] == seen[saved][metric]
        judged = restarts.of_restart(
            metric,
            self._found.kind,
            seen,
            saved,
            found,
            how=counting.restart,
            at_start=counting.start.metrics or None,
            is_sure=counting.goes_on or counting.restart in ("numbers", "evaluates"),
            fresh=self._afresh(seen, is_needed=not is_exact),
        )
        self._found.resumes, self._found.restart = judged.resumes, judged.line
        if judged.problem:
            self._found.problems.append(TrialFault(line=f"continue: {judged.problem}"))
        if judged.remark:
            self._found.remarks.append(judged.remark)

    def _afresh(self, seen: Sequence[Metrics], *, is_needed: bool = False) -> Metrics | None:
        """Return the first iteration of another start without a checkpoint, as another trial has; None without one.

        It is tried where the program has written into its folder, or `is_needed`.
        """
        folder, is_program = Path(self._entrypoint.search_path[0]), self._found.kind == "program"
        new = own_files.written(self._before, self._after_first) if is_program else []
        if not (new or is_needed) or time.monotonic() + 2.0 * self._took_s + SPARE_S > self._until:
            return None
        config, until = self._order.segment.config, self._until - SPARE_S
        with self._step("another start"), _silenced():
            start = AnotherStart(folder, self._before or (), new, lambda: self._trained(None, config, 1, until))
            other = start.outcome
            if fault := start.fault(self._first, len(seen), self._order.segment.metric):
                self._found.problems.append(TrialFault(line=f"another start: {fault}"))
        return other.metrics[0] if isinstance(other, Trained) else None

    def _trained(self, command: ProgramCommand | None, config: Mapping[str, Any], number: int, until: float) -> Outcome:
        """Return the first iterations of a start, or its failure; None if they last too long."""
        segment, resources, seen = replace(self._order.segment, config=config), list[Any](), list[Metrics]()
        try:
            runner = self._made(segment, resources, command=command)
            for iteration in range(1, number + 1):
                if (metrics := _until(runner.steps(iteration), until)) is None:
                    return None
                seen.append(metrics)
        except TrainingEnded:
            pass
        except TrialFailure as failure:
            return failure
        finally:
            close_all(resources, segment)
        return Trained(seen, runner.printed(), runner.counting.first.numbers)

    def _compare(self, segment: Segment, store: CheckpointStore, seen: Sequence[Metrics], one: Metrics) -> None:
        """Train the iteration on two workers, and compare its metric with that of one worker."""
        if segment.device != "cpu":
            self._found.remarks.append("a gang of two workers was not compared with one: the check has one GPU")
            return
        saved, metric, remark = segment.from_iterations, segment.metric, None
        with self._step("gang"):
            reports = self._gang(segment, store, 2, "on two workers")
        if reports is None:
            return
        if not reports:
            remark = f"a gang of two workers was not compared with one: it takes more than {_GANG_LIMIT_S:g} s"
        else:
            before = seen[saved].get(metric) if 0 < saved < len(seen) else None
            remark = _of_gang(metric, one[metric], reports[0].metrics[metric], before)
            self._resize(segment, store, reports[0])
        if remark is not None:
            self._found.remarks.append(remark)
            self._found.seconds.pop("gang")

    def _resize(self, segment: Segment, store: CheckpointStore, saved: SegmentReport) -> None:
        """Go on from a checkpoint that each of two workers has a part of, on one worker and on two.

        Where worker 0 saves all, it is as what one worker saves, which was tried.
        """
        assert segment.checkpoint is not None
        parts = _names(store, saved.checkpoint) - _names(store, segment.checkpoint)
        if not parts or saved.checkpoint is None or saved.iterations == segment.max_iterations:
            return
        done = saved.iterations
        later = replace(segment, from_iterations=done, until_iterations=done + 1, checkpoint=saved.checkpoint)
        found = []
        for size, words in ((1, "one worker"), (2, "two workers")):
            with self._step("parts"):
                reports = self._gang(later, store, size, f"{words} from what two saved", _FIXED if size == 1 else "")
            if not reports:
                return
            found.append(reports[0].metrics[segment.metric])
        if _relative(*found) > _SAME:
            self._found.remarks.append(
                f"from what two workers saved, one reports {segment.metric}={found[0]:.6g} and two {found[1]:.6g}: "
                "divide the batch by WORLD_SIZE, and load what all of them saved"
            )

    def _gang(
        self, segment: Segment, store: CheckpointStore, size: int, words: str, remedy: str = ""
    ) -> list[SegmentReport] | None:
        """Return the reports of a gang; None if it failed, which is a problem."""
        train = partial(run_segment, self._entrypoint, store=store)
        runs = train_side_by_side(train, gang_of(segment, size), limit_s=_GANG_LIMIT_S)
        if (failure := failure_of(runs)) is not None:
            self._found.problems.append(TrialFault(line=f"gang: {words}, {failure.message}{remedy}"))
            return None
        return [item for item in runs[0].items if isinstance(item, SegmentReport)]

    def _made(
        self,
        segment: Segment,
        resources: list[Any],
        checkpoint: Path | None = None,
        command: ProgramCommand | None = None,
    ) -> CommandRunner:
        entrypoint = self._entrypoint if command is None else replace(self._entrypoint, command=command)
        if segment.max_iterations is not None and segment.max_iterations > 1:
            # After the last iteration of a stage a program may train on for a while: what is timed here is all of it.
            segment = replace(segment, until_iterations=_NO_END)
        runner = make_runner(entrypoint, segment, resources)
        assert isinstance(runner, CommandRunner), "it runs every command"
        resources.append(runner)
        runner.begin(checkpoint)
        return runner


_NO_END = 2**31


def _until(steps: Iterator[None], until: float) -> Metrics | None:
    """Return what an iteration reports; None if it lasts longer."""
    while time.monotonic() < until:
        try:
            next(steps)
        except StopIteration as end:
            metrics: Metrics = end.value
            return metrics
    return None


@contextmanager
def _silenced() -> Iterator[None]:
    """Let the output of programs go nowhere."""
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def _names(store: CheckpointStore, checkpoint: CheckpointRef | None) -> set[str]:
    """Return the files of a program's checkpoint; none without one."""
    if checkpoint is None:
        return set()
    with store.file(checkpoint) as path:
        return {file["path"] for file in read_manifest(path)["files"]}


def _of_gang(metric: str, one: float, two: float, again: float | None) -> str | None:
    """Return a remark if an iteration on two workers reports another metric than on one; None if it does not.

    `again`: the metric of a second run on one worker, if there is one: it may differ by random draws.
    """
    noise = 0.0 if again is None else _relative(one, again)
    if _relative(one, two) <= max(_SAME, _NOISE * noise):
        return None
    ratio = two / one if one else float("inf")
    if abs(ratio - 2.0) < 2.0 * _TWICE or abs(ratio - 0.5) < 0.5 * _TWICE:
        times = "twice" if ratio > 1.0 else "half"
        return (
            f"two workers report {metric}={two:.6g}, {times} what one reports from the same checkpoint ({one:.6g}): "
            "average the metric over the workers, weighted by their samples, where it is added up or averaged once too "
            "often (a Trainer of transformers needs average_tokens_across_devices=False)"
        )
    more = "" if noise <= _SAME else f", and a second run on one {again:.6g}"
    return (
        f"two workers report {metric}={two:.6g}, and one {one:.6g} from the same checkpoint{more}: divide the batch by "
        "WORLD_SIZE, give each worker its own samples, and average the metric over the workers; or set "
        "resources.gpus_per_trial.max to 1"
    )


def _relative(one: float, other: float) -> float:
    return abs(one - other) / max(abs(one), abs(other), 1e-12)
