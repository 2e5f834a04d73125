"""A program as a trial: a process of its own for each segment, which reports through a socket or by what it prints."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rubberband.errors import CheckpointError
from rubberband.executor.checkpoints import Payload, copy_of
from rubberband.executor.checkpoints.folders import join, pack, read_manifest, unpack
from rubberband.executor.checkpoints.scratch import Scratch
from rubberband.executor.core.events import CheckpointRef
from rubberband.executor.training.distributed import GANGS
from rubberband.executor.training.entrypoint import Entrypoint
from rubberband.executor.training.failures import (
    TrainingEnded,
    TrialFailure,
    UnclearMetric,
    WorkerTrace,
    error_in,
    refused,
)
from rubberband.executor.training.guard import NOT_STARTED
from rubberband.executor.training.guarded_process import GuardedProcess
from rubberband.executor.training.programs.counting import WHY, Counting, ReadFiles, Seen
from rubberband.executor.training.programs.gang import ProgramGang
from rubberband.executor.training.programs.printed import (
    BESIDE_S,
    SHORTEST_S,
    MetricLine,
    Printed,
    Signature,
    last_checkpoint,
    newest,
    signature,
)
from rubberband.executor.training.programs.report_socket import LOOK_S, Reports
from rubberband.executor.training.programs.saves import Saves
from rubberband.executor.training.reported import clean_metrics
from rubberband.executor.training.reporting import CHECKPOINT, CONFIG, LINE
from rubberband.executor.training.runner import Runner, Steps
from rubberband.executor.training.segment import Segment
from rubberband.units import counted, shown
from rubberband.values.command import Metrics, ProgramCommand
from rubberband.values.environment import Environment
from rubberband.values.metric_lines import numbers_in

_MOST_SHOWN = 300
"""Characters of the last lines in a failure's message; its details have them whole."""
_MOST_LINES = 20
"""Lines of an iteration's output that are compared with those of another start."""
LONG_S = 30.0
"""An iteration that is ended after more seconds has a line in the trial's log: it may have hung."""
_FORMED_LOOK_S = 0.1
_LATE = 0.1
"""Part of an iteration in which a save belongs to the one before."""
_EXIT_S = 2.0
"""The longest wait for the exit of a program after the last line of its segment; where the trial may go on, it costs no
more than `_EXIT_PART` of an iteration."""
_EXIT_PART = 0.1
_LEAST_EXIT_S = 0.2
_WORD_S = 3.0
"""The longest wait for another worker's word, of which the end of this one's program may be a consequence."""
_OF_PEERS = re.compile(
    r"connection (reset|closed|refused)|broken pipe|gloo|nccl|processgroup|dist\w*error", re.IGNORECASE
)
"""In the last lines of a program whose collective broke."""


WITHOUT_GPU = {"ACCELERATE_USE_CPU": "true"}
"""Without it, Accelerate and the Trainer of Hugging Face train each worker on its own where there is no GPU."""
WITHOUT_SANITY_CHECK = {"PL_TRAINER_NUM_SANITY_VAL_STEPS": "0"}
"""Without it, Lightning validates a few batches before it trains, and what is printed there looks like an epoch."""


def make_runner(entrypoint: Entrypoint, target: ProgramCommand, segment: Segment, resources: list[Any]) -> Runner:
    """Return the runner of a program; what is to be closed is added to `resources`."""
    scratch = Scratch()  # that of a killed worker goes with the next one
    resources.append(gang := ProgramGang.join(segment, scratch.path))
    return CommandRunner(target, segment, entrypoint.search_path[0], gang, entrypoint.environment, scratch)


class CommandRunner(Runner):
    """Runs a command; every report, or every line with the metric, is one iteration. Rank 0's count."""

    maps = by_path = may_wait = True
    announces = False
    """Whether the process says when its start is over; it counts as over at once otherwise."""
    forks = False
    """Whether it may be forked off a process that has its imports."""

    def __init__(
        self,
        command: ProgramCommand,
        segment: Segment,
        folder: str,
        gang: ProgramGang,
        environment: Environment,
        scratch: Scratch,
    ) -> None:
        """`folder`: that of its process; `environment`: its secrets are masked in failures; `scratch`: its files."""
        self._command, self._segment, self._folder, self._gang = command, segment, folder, gang
        self._masked = environment.masked
        self._variables = {name: value for name, value in environment.variables.items() if "${" in value}
        """Variables that are filled when the program starts."""
        self._scratch, self._place = scratch, scratch.path
        self._checkpoint = Path(gang.place.folder) / "checkpoint"
        """Folder of all programs of the gang on this machine."""
        self._is_first_here = gang.place.local_rank == 0
        self._packed = self._place / "packed"
        """The checkpoint with which this segment began."""
        self._saves = Saves(gang, self._checkpoint, scratch)
        self._state_iterations = 0
        """Iterations that the files of the latest checkpoint hold."""
        self.counting = Counting(segment.metric)
        self._started_with = 0
        """Iterations in the files with which the program is started."""
        self._has_read: Callable[[], bool | None] = lambda: None
        self._said = {""}
        """Kinds of starts and lines that the trial's log has."""
        self._took_s = 0.0
        """Duration of an iteration before, as far as it is known."""
        self._has_news = False
        """Whether they are newer than the checkpoint that was saved last."""
        self.memory: tuple[int, int, bool] | None = None
        """The memory of its process, as `Peak.read` returns it; None: it is not measured."""
        self._signature: Signature = ()
        self._changed_at = math.inf
        self._is_late = False
        """Whether it has saved after a report, not before."""
        self._iteration = 0
        self._waits_since = math.inf
        """Begin of the iteration that goes on."""
        self.line = ""
        self._line_at = 0.0
        """Time of the line with the metric before, in seconds since the epoch."""
        self._words: list[str] = []
        self._program: GuardedProcess | None = None
        self._printed: Printed | None = None
        self._reports = Reports(self._place / "line")
        self._has_formed = segment.num_workers == 1 or command.launch == "machine"
        self._formed_look_at = 0.0

    def begin(self, payload: bytes | Path | None) -> int:
        if payload is None and self._is_first_here:
            self._checkpoint.mkdir()
            pack(self._checkpoint, self._packed, iterations=0, metrics={})
        held = super().begin(payload)
        while not self._checkpoint.is_dir():  # the machine's first worker unpacks the files
            self._gang.check()
            time.sleep(LOOK_S)
        if self._is_first_here:
            self._saves.begin()
        return held

    def restore(self, payload: bytes | Path) -> int:
        """Unpack the program's folder; return the iterations that it holds."""
        if self._segment.rank == 0:
            self._keep(payload)
        here = self._is_first_here
        manifest = unpack(payload, self._checkpoint, self.parts_held) if here else read_manifest(payload)
        held: int = manifest["iterations"]
        if held > self._segment.from_iterations:
            raise CheckpointError(
                f"the checkpoint holds {counted(held, 'iteration')}, not {self._segment.from_iterations}"
            )
        self._state_iterations = self._started_with = self._iteration = held
        if held and "counting" in manifest:
            self.counting.restore(manifest["counting"])
            self._took_s = manifest["took_s"]
        return held

    def _keep(self, payload: bytes | Path) -> None:
        """Keep the checkpoint with which this segment begins, for a segment in which the program saves nothing."""
        if isinstance(payload, bytes):
            self._packed.write_bytes(payload)
        elif self.parts_held:
            join(payload, self.parts_held, self._packed)
        else:
            shutil.copyfile(payload, self._packed)

    def saved_iterations(self, iterations: int) -> int:
        return self._state_iterations

    def saves_after(self, iterations: int) -> bool:
        return self._has_news

    def steps(self, iterations: int) -> Steps:
        self._iteration, self._waits_since = self._iteration + 1, time.monotonic()
        if self._program is None and (self._command.launch == "worker" or self._gang.place.local_rank == 0):
            self._start()
        if self._segment.rank > 0:
            yield from self._follow()
            self._waits_since = math.inf
            return {}
        found = yield from (self._reported() if self._command.metrics.source == "report" else self._read())
        self._waits_since = math.inf
        self._require_group()
        is_last = self._iteration == self._segment.max_iterations
        return clean_metrics(found, self._segment.metric, is_last=is_last)

    def _follow(self) -> Iterator[None]:
        """Wait until rank 0 ends the segment, and end this worker's program then."""
        while not self._gang.is_over:
            self._gang.check()
            self._saves.answer(self.save)
            code = None if self._program is None else self._program.poll()
            if code:
                failure = self._failure(code)
                if self._gang.is_over:  # rank 0 has ended, and this worker's program was in a collective with its
                    break
                raise failure
            yield
            time.sleep(LOOK_S)
        if self._program is not None:
            self._program.end()

    def _reported(self) -> Steps:
        """Wait for a report; the program waits for the next step then."""
        while True:
            began, self._changed_at = time.time(), math.inf
            self._reports.go_on()
            while (found := self._reports.wait()) is None:
                self._require_life()
                if self._changed_at == math.inf and (now := signature(self._checkpoint)) != self._signature:
                    self._changed_at = newest(now)
                if self._reports.has_begun or not self.announces:
                    yield
            words = " ".join(f"{name}={value}" for name, value in found["metrics"].items())
            if found["is_new"]:  # a Trainer has its own count
                self.counting.goes_on = self._started_with > 0
                break
            if self._is_new(Seen(_numbers_of(found["metrics"]), numbers_in(words))) or found["ended"]:
                break
            self._has_new_files()  # they are not those of the next one
            yield
        self.ended, metrics, given = found["ended"], found["metrics"], found["checkpoint"]
        self.memory = found.get("memory")
        if given is not None or (self._has_new_files() and not self._saved_late(began)):
            self._take(self._iteration, metrics, self._checkpoint if given is None else Path(self._folder, given))
        return metrics  # type: ignore[no-any-return]

    def _saved_late(self, began: float) -> bool:
        """Whether the program has saved right after the report before.

        Its files are of that one's iteration then, and not of the one that `began` at that time.
        """
        took, first = time.time() - began, min(self._changed_at, newest(self._signature))
        is_first = self._iteration == self._segment.from_iterations + 1
        late = not is_first and took > SHORTEST_S and first < began + took * _LATE
        self._is_late = self._is_late or late
        return late

    def _has_new_files(self) -> bool:
        before, self._signature = self._signature, signature(self._checkpoint)
        return before != self._signature

    def _read(self) -> Steps:
        """Wait for a line with the metric."""
        assert self._printed is not None
        self._printed.go_on()
        while True:
            while (line := self._printed.wait()) is None:
                self._require_life()
                yield
            self._require_one_printer(line)
            if self._is_new(Seen(line.metrics, self._printed.numbers_in(line))):
                break
            self._printed.skip(line)
            yield
        self.line = self._masked(line.text.strip())
        take = partial(self._take, self._iteration, line.metrics, self._checkpoint)
        yield from self._printed.settle(line, take)
        if self._iteration == self._segment.until_iterations:
            yield from self._await_exit(take)
        return line.metrics

    def _await_exit(self, take: Callable[[], None]) -> Iterator[None]:
        """Let a program that has trained its last iteration end by itself, with what it saves then.

        One that goes on is stopped soon. Its trial is not started again if it has ended before its last iteration.
        """
        assert self._program is not None
        assert self._printed is not None
        is_over = self._iteration == (self._segment.max_iterations or self._iteration)
        took_s = self._printed.took_s or time.monotonic() - self._program.began
        wait_s = _EXIT_S if is_over else min(_EXIT_S, max(_LEAST_EXIT_S, _EXIT_PART * took_s))
        until = time.monotonic() + wait_s
        self._printed.go_on()
        while (code := self._program.wait(LOOK_S)) is None and time.monotonic() < until:
            if self._has_new_line():
                return
            self._printed.go_on()
            yield
        if code != 0:
            return
        self._printed.finish()
        if not self._has_new_line():
            if not is_over:
                self._require_number()
            self._printed.keep(take)
            self.ended = not is_over

    def _has_new_line(self) -> bool:
        """Whether a line has come that is a new iteration, or may be one of a trial that goes on; it is taken in."""
        assert self._printed is not None
        with contextlib.suppress(UnclearMetric):
            while self._printed.has_lines and (line := self._printed.wait()) is not None:
                if self._is_new(Seen(line.metrics, self._printed.numbers_in(line))):
                    return True
        return self._printed.has_lines and self._iteration != self._segment.max_iterations

    def _is_new(self, seen: Seen) -> bool:
        """Whether a line or report is a new iteration; the trial's log says once why one is not."""
        is_new = self.counting.is_new(seen, self._started_with, self._has_read)
        self.repeated += not is_new and self.counting.restart == "again"
        if (why := self.counting.restart or ("" if is_new else "number")) not in self._said:
            self._said.add(why)
            print(f"rubberband: {self._command} {WHY[why]}", file=sys.stderr, flush=True)
        return is_new

    def _require_one_printer(self, line: MetricLine) -> None:
        """Raise TrialFailure where each process that a launcher starts prints the metric: every line would count."""
        before, self._line_at = self._line_at, line.at
        by_launcher = self._command.launch == "machine" and self._gang.place.local_size > 1
        if by_launcher and self._command.metrics.file is None and line.at - before < BESIDE_S:
            raise refused(
                f"{self._command} prints {self._segment.metric} twice within {BESIDE_S:g} s, as each of its "
                f"{self._gang.place.local_size} processes does: let rank 0 alone print it (torchrun "
                "--local-ranks-filter 0), or call rubberband.report"
            )

    def _take(self, iteration: int, metrics: Mapping[str, Any], folder: Path) -> None:
        """Keep the files of a folder as the checkpoint after an iteration."""
        took_s = 0.0 if self._printed is None else self._printed.took_s
        kept = {"counting": self.counting.kept(), "took_s": took_s}
        self._saves.take(folder, kind="program", iterations=iteration, metrics=_numbers_of(metrics), **kept)
        self._state_iterations, self._has_news = iteration, True

    def dump(self, iterations: int, metrics: Mapping[str, float], *, is_last: bool = False) -> Payload:
        if is_last and self._state_iterations == 0 and self._segment.max_iterations != 1:
            print(f"rubberband: {self._command} {self.unsaved()}", file=sys.stderr, flush=True)
        self._has_news = False
        return self._saves.payload() or copy_of(self._packed)

    def parts(self) -> tuple[CheckpointRef, ...]:
        return self._saves.parts()

    def unsaved(self) -> str:
        """Return why its trial would begin again after a pause: the rest of a sentence about the program."""
        if not any(self._checkpoint.iterdir()):
            return "saved nothing in ${checkpoint}; without it, trials are trained from zero after every stage"
        if self._is_late:
            return (
                "saves after it has called rubberband.report, so that the files of an iteration come too late: "
                "trials are trained from zero after every stage; save first, then report"
            )
        if self._printed is not None and self._printed.is_too_fast:
            return (
                f"printed {self._segment.metric} twice within {SHORTEST_S:g} s, so that its files may be those of "
                "either iteration: trials are trained from zero after every stage; train longer before each line, or "
                "call rubberband.report"
            )
        beside_s = BESIDE_S if self._printed is None else self._printed.beside_s()
        return (
            f"saved its files more than {beside_s:.2g} s before or after it printed {self._segment.metric}, so their "
            "iteration is not known: trials are trained from zero after every stage; print right after saving, "
            "or call rubberband.report"
        )

    def part(self) -> None:
        self._gang.leave()

    def close(self) -> None:
        if self._program is not None:
            is_open = self._program.poll() is None or self._segment.rank > 0
            if is_open and time.monotonic() - self._waits_since > LONG_S:
                print(f"rubberband: worker {self._segment.rank}: {self.waits()}", file=sys.stderr, flush=True)
            self._program.end()
        if self._printed is not None:
            self._printed.finish()
        self._reports.close()
        self._saves.close()
        self._scratch.close()

    def _start(self) -> None:
        self._signature = signature(self._checkpoint)
        segment, place, command = self._segment, self._gang.place, self._command
        by_worker, alone = command.launch == "worker", place.size == 1 and not command.rank
        places = {
            "checkpoint": str(self._checkpoint),
            "last_checkpoint": str(last_checkpoint(self._checkpoint)),
            "iterations": str(self._state_iterations),
            "max_t": str(segment.max_iterations or segment.until_iterations),
            "seed": str(segment.seed),
            **place.words(),
        }
        run = f"rubberband-{segment.trial}-{segment.attempt}"
        filled = {name: command.filled(value, segment.config, places) for name, value in self._variables.items()}
        environment = {
            **WITHOUT_SANITY_CHECK,
            **(WITHOUT_GPU if segment.device == "cpu" else {}),
            **(place.lightning_defaults() if by_worker and place.size > 1 else {}),
            **os.environ,
            **filled,
            **({} if alone else place.variables(run) if by_worker else place.address_variables()),
            **({} if place.gpus is None else {"CUDA_VISIBLE_DEVICES": place.gpus}),
            "PYTHONUNBUFFERED": "1",
            LINE: str(self._place / "line"),
            CHECKPOINT: str(self._checkpoint),
            CONFIG: json.dumps(dict(segment.config)),
        }
        given = (*command.words, *command.resume, *self._variables.values())
        saves = any(place in word for word in given for place in ("${checkpoint}", "${last_checkpoint}"))
        metrics = command.metrics if segment.rank == 0 else Metrics()  # a line that is not awaited would stop it
        numbered = any("${last_checkpoint}" in word for word in given)
        self._printed = Printed(
            metrics, segment.metric, self._checkpoint, saves=saves, numbered=numbered, took_s=self._took_s
        )
        if self._started_with and not any("${iterations}" in word for word in given):
            self._has_read = ReadFiles(self._checkpoint, self._place / "links", self._printed.file)
        for workers in filter(None, os.environ.get(GANGS, "").split(",")):  # of a check: each that a trial may get
            command.line(segment.config, {**places, "workers": workers}, resumes=self._started_with > 0)
        self._words = command.line(segment.config, places, resumes=self._started_with > 0)
        (output, printing), (errors, complaining) = os.pipe(), os.pipe()
        self._program = GuardedProcess(self._words, environment, self._folder, printing, complaining, forks=self.forks)
        self._printed.watch(self._program, (output, errors))

    def _require_group(self) -> None:
        """Raise TrialFailure if the programs of the gang train each on its own: at the first report, none has met."""
        assert self._program is not None
        if not self._has_formed and not self._looks_formed() and self._program.poll() is None:
            size = self._segment.num_workers
            raise refused(
                f"{size} workers trained each on its own: call torch.distributed.init_process_group() in the program, "
                "at the MASTER_ADDR and MASTER_PORT of its environment, or set resources.gpus_per_trial.max to 1"
            )
        self._has_formed = True

    def _looks_formed(self) -> bool:
        self._has_formed = self._has_formed or self._gang.has_formed()
        return self._has_formed

    def _require_life(self) -> None:
        """Raise what the program's end means, once all that it has reported is taken in."""
        self._gang.check()
        assert self._program is not None
        assert self._printed is not None
        if not self._has_formed and time.monotonic() >= self._formed_look_at:
            self._formed_look_at = time.monotonic() + _FORMED_LOOK_S
            self._looks_formed()
        code = self._program.poll()
        if code is None:
            return
        self._printed.finish()
        if self._printed.has_lines or self._reports.has_more():
            return
        if code == 0:
            self._require_number()
        if code == 0 and self._iteration > 1:
            raise TrainingEnded
        raise self._failure(code)

    def _require_number(self) -> None:
        """Raise TrialFailure for a program whose last line has `null` and the like for its metric."""
        assert self._printed is not None
        if self._printed.unread:
            line = self._masked(self._printed.unread.strip())
            raise TrialFailure(
                "not_a_number",
                f"{self._command} ended, and its last line with {self._segment.metric} has no number: {shown(line)}",
            )

    def _failure(self, code: int) -> Exception:
        """Return why a program has ended too early: another worker's failure, if it follows from that."""
        assert self._program is not None
        assert self._printed is not None
        seconds = time.monotonic() - self._program.began
        self._printed.finish()
        if self._segment.num_workers > 1 and any(_OF_PEERS.search(line) for line in self._printed.last):
            self._await_failure_of_peer()
        instance = self._segment.instance
        after = f"after {seconds:.1f} s{f' on {instance}' if instance else ''}"
        last = tuple(self._printed.last)
        if why := self._not_started(code):
            line = why
        elif code == 0:
            line = (
                f"{self._command} ended {after}, without a report of {self._segment.metric}; call rubberband.report, "
                f"or say in entrypoint.metrics where its metrics are{self._last_lines()}"
            )
        elif error := self._masked(error_in(last)):
            error = error if len(error) <= _MOST_SHOWN else f"{error[:_MOST_SHOWN]}…"
            line = f"{error} ({self._command} ended with exit code {code} {after})"
        else:
            line = f"{self._command} ended with exit code {code} {after}{self._last_lines()}"
        failure = refused(line)
        failure.__cause__ = WorkerTrace("\n".join(last))
        return failure

    def _last_lines(self) -> str:
        """Return the rest of a sentence, with the last lines of the program's output; empty without any."""
        assert self._printed is not None
        last = self._masked(" | ".join(line.strip() for line in tuple(self._printed.last)))  # before it is cut
        return last and f"; its last lines: {last if len(last) <= _MOST_SHOWN else f'…{last[-_MOST_SHOWN:]}'}"

    def printed(self) -> list[str]:
        """Return the last lines of the program's output, up to that of the metric; none where it is in a file."""
        if self._printed is None or self._command.metrics.file is not None:
            return []
        lines = [self._masked(line.strip()) for line in tuple(self._printed.last)]
        end = len(lines) - lines[::-1].index(self.line) if self.line in lines else len(lines)
        return lines[:end][-_MOST_LINES:]

    def waits(self) -> str:
        """Return what it waits for, in a sentence without its end: no report has come; empty where none is due."""
        if self._program is None:
            return ""
        since = f"since iteration {self._iteration - 1}" if self._iteration > 1 else "yet"
        code = self._program.poll()
        state = "goes on" if code is None else f"has ended with exit code {code}"
        if self._segment.rank > 0:
            return f"its program {state}, and rank 0's iteration is not over{self._last_lines()}"
        if self._command.metrics.source == "report":
            return f"{self._command} has not called rubberband.report {since}{self._last_lines()}"
        where = self._command.metrics.file or "its output"
        return f"no line of {where} has had {self._segment.metric} {since}{self._last_lines()}"

    def _await_failure_of_peer(self) -> None:
        """Wait for another worker's failure or end, of which this one's may come. Raises GangBroken if it failed."""
        deadline = time.monotonic() + _WORD_S
        while not self._gang.broken and not self._gang.is_over and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        self._gang.check()

    def _not_started(self, code: int) -> str:
        """Return why the guard could not start the program, with the remedy; empty if it started."""
        assert self._printed is not None
        begin = f"{self._words[0]}: "
        if code != NOT_STARTED or not self._printed.last or not self._printed.last[-1].startswith(begin):
            return ""
        reason = self._printed.last[-1].removeprefix(begin).strip()
        name, place = self._words[0], self._segment.instance or "this machine"
        if (Path(self._folder) / name).is_file():
            return f"{place} cannot start {name} ({reason}): make it executable (chmod +x), and see its first line (#!)"
        remedy = "install it, or give its path"
        if self._segment.instance:
            remedy = "install it there (resources.aws.install or setup), or put it into the experiment's folder"
        return f"{name} is not on {place} ({reason}): {remedy}"


def _numbers_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if isinstance(value, int | float)}
