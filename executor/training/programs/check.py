"""Checks a program, or a distributed function, before anything is rented.

It trains iterations, keeps a checkpoint, starts a second time from it, and compares one worker with a gang of two.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from rubberband.executor.checkpoints import CheckpointStore, open_store
from rubberband.executor.core.events import WITHOUT_CHECKPOINT, CheckpointRef
from rubberband.executor.training.check_findings import CheckOrder, TrialCheck, TrialFault, brief, read_alike
from rubberband.executor.training.check_workers import failure_of, gang_of, train_side_by_side
from rubberband.executor.training.failures import TrainingEnded, TrialFailure
from rubberband.executor.training.programs.runner import CommandRunner
from rubberband.executor.training.run import close_all, make_runner, run_segment
from rubberband.executor.training.segment import Segment, SegmentReport
from rubberband.units import counted
from rubberband.values.command import Booleans, ProgramCommand, switch_of, text_of

Metrics = Mapping[str, float]
_PROGRAM_S = 30.0
"""More iterations are trained if the first one, with the program's start, took no longer than this."""
_ANSWER_S = 1.0
"""Least time between two answers of an iteration that goes on."""
_MOST_FILES = 20_000
_TIMES_AS_LONG = 2.0
"""The longest iteration with other values, in times of the first one."""
_SPARE_S = 2.0
"""Time of the check that is left for its answer."""
_OF_PARSER = re.compile(r"^\S+: error: (argument|unrecognized|ambiguous|the following) ")
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


class ProgramCheck:
    """Goes through the steps of a program, and adds to the findings."""

    _shard: str | None = None

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

    def run(self) -> None:
        """Train until the program has saved, and one iteration more; then one by another start, from the checkpoint.

        That iteration is trained on two workers too, if a trial may have as many.
        """
        segment, shared = self._order.segment, Path(self._entrypoint.search_path[0])
        before = _files(shared)
        with tempfile.TemporaryDirectory(prefix="rubberband-") as folder:
            store = open_store(folder)
            seen, checkpoint, saved = self._started(segment, store)
            later = replace(segment, from_iterations=saved, until_iterations=saved + 1, checkpoint=checkpoint)
            if self._shard is not None and self._order.max_gpus > 1:
                self._found.problems.append(TrialFault(line=f"the {self._found.kind} saves {self._shard}"))
            again = self._restarted(later, store, seen) if checkpoint is not None else seen[0]
            if again and self._order.max_gpus > 1 and not self._found.problems:
                self._compare(later, store, seen, again)
        if not self._found.problems:
            self._try_values(seen[0])
        written = sorted(set(_files(shared).items()) - set(before.items()))
        if written and self._found.kind == "program":
            names = ", ".join(name for name, _ in written[:3]) + (", …" if len(written) > 3 else "")
            self._found.remarks.append(
                f"the program wrote {names} into its folder, which all trials share; below ${{checkpoint}}, save what "
                "a trial loads again and others must not overwrite"
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
            goes_on = seconds["iteration"] <= _PROGRAM_S
            while goes_on and runner.saved_iterations(len(seen)) == 0 and len(seen) < _UNTIL_SAVED:
                goes_on = self._next(runner, segment, seen)
            done, saved = len(seen), runner.saved_iterations(len(seen))
            checkpoint = None
            with self._step("save"):
                payload = runner.dump(done, seen[-1], is_last=True)
                if saved > 0:
                    checkpoint = store.save(segment.trial, done, payload)
                    self._found.checkpoint_bytes = checkpoint.size_bytes
                    self._shard = runner.shard()
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
                why = WITHOUT_CHECKPOINT if is_function else f"{runner.unsaved()} (docs/commands.md)"
                self._found.remarks.append(f"the {self._found.kind} {why}")
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
            self._found.remarks.append(
                f"the {self._found.kind} ended after one report, so that a trial is one iteration, and no stage stops "
                "it early; report after each epoch"
            )
        return len(seen) > before

    def _look_on(self, runner: CommandRunner, done: int) -> None:
        """Let the program go on for as long again, as a line of another kind may come: a test after many batches."""
        began, took_s = time.monotonic(), sum(self._found.seconds[name] for name in ("set-up", "iteration", "next"))
        until = began + min(max(_LOOK_ON_S, took_s), (self._until - began) / 4)
        with self._step("later lines"), suppress(TrainingEnded):
            while not runner.ended and time.monotonic() < until:
                done += 1
                for _ in runner.steps(done):
                    if time.monotonic() >= until:
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
            if self._found.seconds["set-up"] + self._found.seconds["iteration"] <= _PROGRAM_S:
                with self._step("continue"), suppress(TrainingEnded):
                    found = runner.iterate(segment.until_iterations)
        finally:
            close_all(resources, segment)
        if found and self._found.first_extra_s is not None:
            self._found.first_extra_s = max(0.0, self._found.seconds["continue"] - self._found.seconds["next"])
        if found and runner.counting.restart == "again":
            self._found.remarks.append(
                f"started again from the checkpoint of {counted(segment.from_iterations, 'iteration')}, the "
                f"{self._found.kind} starts from zero at each stage, and repeats its iterations; load its checkpoint "
                "at the start (docs/commands.md)"
            )
        elif found and (remark := _of_restart(segment, seen, found, self._found.kind)) is not None:
            self._found.remarks.append(remark)
        return found

    def _compare(self, segment: Segment, store: CheckpointStore, seen: Sequence[Metrics], one: Metrics) -> None:
        """Train the iteration on two workers, and compare its metric with that of one worker."""
        if segment.device != "cpu":
            self._found.remarks.append("a gang of two workers was not compared with one: the check has one GPU")
            return
        saved, metric, remark = segment.from_iterations, segment.metric, None
        with self._step("gang"):
            train = partial(run_segment, self._entrypoint, store=store)
            runs = train_side_by_side(train, gang_of(segment, 2), limit_s=_GANG_LIMIT_S)
        if (failure := failure_of(runs)) is not None:
            self._found.problems.append(TrialFault(line=f"gang: on two workers, {failure.message}"))
            return
        two = next((item.metrics for item in runs[0].items if isinstance(item, SegmentReport)), None)
        if two is None:
            remark = f"a gang of two workers was not compared with one: it takes more than {_GANG_LIMIT_S:g} s"
        else:
            before = seen[saved].get(metric) if 0 < saved < len(seen) else None
            remark = _of_gang(metric, one[metric], two[metric], before)
        if remark is not None:
            self._found.remarks.append(remark)
            self._found.seconds.pop("gang")

    def _try_values(self, first: Metrics) -> None:
        """Train the first iteration with extreme values too, and with the other value of each boolean."""
        seconds, config, command = self._found.seconds, self._order.segment.config, self._entrypoint.command
        took_s = seconds["set-up"] + seconds["iteration"]
        if command is None or took_s > _PROGRAM_S:
            return
        booleans = [name for name in self._order.booleans if isinstance(config.get(name), bool)]
        self._found.to_try = len(self._order.extremes) + len(booleans)
        most_s = _TIMES_AS_LONG * took_s + _LOOK_ON_S

        def train(command: ProgramCommand, config: Mapping[str, Any]) -> Metrics | TrialFailure | None:
            return self._first_iteration(command, config, min(time.monotonic() + most_s, self._until - _SPARE_S))

        with self._step("values"), _silenced():
            for number in range(self._found.to_try):
                if time.monotonic() + _SPARE_S >= self._until:
                    return
                if number < len(self._order.extremes):
                    found = of_extremes(train, command, self._order.extremes[number])
                else:
                    found = of_boolean(train, command, config, booleans[number - len(self._order.extremes)], first)
                self._found.tried += 1
                if isinstance(found, TrialFault) and found not in self._found.problems:
                    self._found.problems.append(found)
                elif isinstance(found, str):
                    self._found.remarks.append(found)

    def _first_iteration(
        self, command: ProgramCommand, config: Mapping[str, Any], until: float
    ) -> Metrics | TrialFailure | None:
        """Return the metrics of the first iteration, or its failure; None if it lasts too long."""
        segment, resources = replace(self._order.segment, config=config), list[Any]()
        try:
            steps = self._made(segment, resources, command=command).steps(1)
            while time.monotonic() < until:
                next(steps)
        except StopIteration as end:
            metrics: Metrics = end.value
            return metrics
        except TrialFailure as failure:
            return failure
        finally:
            close_all(resources, segment)
        return None

    def _made(
        self,
        segment: Segment,
        resources: list[Any],
        checkpoint: Path | None = None,
        command: ProgramCommand | None = None,
    ) -> CommandRunner:
        entrypoint = self._entrypoint if command is None else replace(self._entrypoint, command=command)
        runner = make_runner(entrypoint, segment, resources)
        assert isinstance(runner, CommandRunner), "it runs every command"
        resources.append(runner)
        runner.begin(checkpoint)
        return runner


Train = Callable[[ProgramCommand, Mapping[str, Any]], Metrics | TrialFailure | None]
"""Trains the first iteration of a program by a command line and a configuration."""


def of_extremes(train: Train, command: ProgramCommand, config: Mapping[str, Any]) -> TrialFault | str | None:
    """Return what is wrong with extreme values, as a problem or a remark; None if nothing is known to be."""
    failure = train(command, config)
    if not _fails(failure):
        return None
    joined, words = list[str](), list[str]()
    for before, word in zip(("", *command.words), command.words, strict=False):
        name = word.removeprefix("${").removesuffix("}")
        if word == f"${{{name}}}" and text_of(config.get(name), command.booleans).startswith("-"):
            if switch_of(before, word) is not None:
                words.pop()
                joined.append(word := f"{before}={word}")
            elif "--" not in words:
                words.append("--")
                joined.append(f"-- {word}")
        words.append(word)
    if joined and not _fails(train(replace(command, words=tuple(words)), config)):
        why, _, _ = str(failure).partition(" (")
        return TrialFault(
            line=f"values: the program takes a value that begins with - for an option: {why}; write {' '.join(joined)} "
            "in entrypoint.command"
        )
    line = f"with {brief(config)} the program fails: {failure}"
    return TrialFault(line=f"values: {line}") if _OF_PARSER.search(str(failure)) else line


def of_boolean(
    train: Train, command: ProgramCommand, config: Mapping[str, Any], name: str, first: Metrics
) -> TrialFault | str | None:
    """Return what is wrong if a boolean's two values train the same: how the program reads them; None if they do not.

    `first`: the metrics by `config`. Another style of writing them may make a difference.
    """
    other = {**config, name: not config[name]}
    if train(command, other) != first:
        return None

    def differ(style: str) -> bool:
        styled = replace(command, booleans=style)
        one, two = train(styled, config), train(styled, other)
        return isinstance(one, Mapping) and isinstance(two, Mapping) and one != two

    for style in (each for each in get_args(Booleans) if each != command.booleans):
        if differ(style):
            return TrialFault(line=f"values: {read_alike(name, 'the program', command.booleans, style)}")
    if differ("1/"):
        return TrialFault(line=f"values: {read_alike(name, 'the program', command.booleans, None)}")
    return (
        f"true and false of {name} give the same metrics in the first iteration: it changes nothing there, or the "
        "program does not read it"
    )


def _fails(outcome: Metrics | TrialFailure | None) -> bool:
    """Whether the program fails by itself; training that diverges belongs to a search."""
    return isinstance(outcome, TrialFailure) and outcome.kind != "not_a_number"


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


def _of_restart(segment: Segment, seen: Sequence[Metrics], found: Metrics, kind: str) -> str | None:
    """Return what is wrong with the first metrics after a second start; None if nothing is known to be."""
    metric, saved = segment.metric, segment.from_iterations
    if saved >= len(seen) or found[metric] == seen[saved][metric]:
        return None
    begin = f"started again from the checkpoint of {counted(saved, 'iteration')}, the {kind} reports "
    if found[metric] == seen[0][metric]:
        advice = "load its checkpoint at the start"
        advice += ", and report no metric of what is loaded" if saved == 1 else ""
        return (
            f"{begin}{metric}={found[metric]:.6g} as in its first: it starts from zero at each stage; {advice} "
            "(docs/commands.md)"
        )
    if found[metric] == seen[saved - 1][metric]:
        return (
            f"{begin}{metric}={found[metric]:.6g} of the last of these once more, which counts as a new iteration; "
            "report no metric of what is loaded, and save before the report (docs/commands.md)"
        )
    return None


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


def _files(folder: Path) -> dict[str, int]:
    """Return path -> time of change of the files in a folder, without hidden ones; nothing where there are many."""
    found: dict[str, int] = {}
    for top, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith((".", "__pycache__"))]
        for name in names:
            path = Path(top, name)
            with suppress(OSError):
                found[str(path.relative_to(folder))] = path.stat().st_mtime_ns
        if len(found) > _MOST_FILES:
            return {}
    return found
