"""Checks a trial before anything is rented: one iteration, a checkpoint, and a fresh instance that continues from it.

It runs in a process of its own, without Ray, which ends with all that the trial leaves behind: threads, CUDA contexts,
processes. `check` starts it and waits; `python -m rubberband.executor.training.checking` is it.
"""

from __future__ import annotations

import faulthandler
import io
import json
import math
import os
import pickle
import re
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

from rubberband.cloud.ray_head.worker_start import DIRECTORY_TAG, is_ready
from rubberband.executor.checkpoints import Payload
from rubberband.executor.core.events import WITHOUT_CHECKPOINT
from rubberband.executor.training import peak, restarts
from rubberband.executor.training.check_findings import CheckOrder, TrialCheck, TrialFault, difference
from rubberband.executor.training.check_workers import compile_nothing
from rubberband.executor.training.distributed import GANGS, is_distributed
from rubberband.executor.training.entrypoint import NotHereError, has_sets
from rubberband.executor.training.failures import (
    FailedInProcess,
    GangBroken,
    LacksMemory,
    RanOut,
    TrainingEnded,
    TrialFailure,
    UnclearMetric,
    WorkerTrace,
    describe,
    lacks_memory,
    refused,
)
from rubberband.executor.training.guarded_process import GuardedProcess
from rubberband.executor.training.kinds import kind_of
from rubberband.executor.training.own_time import own_time
from rubberband.executor.training.reporting import short
from rubberband.executor.training.run import close_all, make_runner
from rubberband.executor.training.runner import FunctionRunner, Runner
from rubberband.executor.training.segment import Segment
from rubberband.features import part
from rubberband.units import counted
from rubberband.values.environment import HASH_SEED

_CONTINUED_S = 5.0
"""A second iteration, after the restore, is trained if the first one took no longer than this."""
_REPEATED_S = 60.0
"""One worker is restarted in a fresh process if an import, three set-ups and an iteration take no longer than this, and
than half of the time that is left."""
_TIMED, _TIMED_S = 3, 0.6
"""Further iterations that are timed, and the seconds after which none begins."""
_LOOK_S = 0.2
_RAN_OUT = "memory: a step ran out of it on this machine"
_ADDRESS = "RUBBERBAND_CHECK_ORDER"
"""Variable: where the process that has the order listens."""
_FIXES = {
    "no_metric": "; report it, or set search.metric to one that is reported",
    "not_a_number": "; keep it finite, or narrow search.space",
    "checkpoint": "; save plain data, such as a state_dict()",
}
_NEEDS_GPU = re.compile(
    r"NVIDIA driver|not compiled with CUDA|No CUDA GPUs|CUDA driver|only supported with GPUs|"
    r"not implemented for '(Half|BFloat16)'",
    re.IGNORECASE,
)


def check(
    order: CheckOrder,
    *,
    limit_s: float,
    output: IO[Any] | int | None,
    cancelled: Callable[[], bool] = lambda: False,
    fork_server: Path | None = None,
) -> TrialCheck:
    """Check a trial in a process of its own, for `limit_s` seconds at most; `output` is what the trial prints to.

    In a run it is forked from the fork server in the provider's folder `fork_server`, if that is possible: torch is
    imported once for the check and the workers. Else, and where the trial's own source has sets, it is a fresh process
    with another order of sets than a run, which the process that it is compared with has.
    """
    until, own = time.monotonic() + limit_s, order.entrypoint.environment
    forks = fork_server is not None and order.entrypoint.command is None and not has_sets(order.entrypoint)
    if forks and fork_server is not None:
        forks = is_ready(fork_server, lambda: time.monotonic() < until and not cancelled())
        if time.monotonic() >= until or cancelled():
            return TrialCheck()
    environment = {"WANDB_MODE": "disabled", **os.environ}  # else each start would be a run in the user's account
    environment.pop("RUBBERBAND_STORE", None)  # has a password
    environment |= {"CUDA_VISIBLE_DEVICES": order.device_id, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    environment |= {} if fork_server is None else {DIRECTORY_TAG: str(fork_server.resolve())}
    environment |= {**own.variables, **own.secrets} if forks else {}  # as the server has
    environment[HASH_SEED] = own.hash_seed if forks else "2" if own.hash_seed == "1" else "1"
    shown = (1, 2) if output is None else (output if isinstance(output, int) else output.fileno(),) * 2
    with tempfile.TemporaryDirectory(prefix="rubberband-") as folder, socket.socket(socket.AF_UNIX) as listener:
        with short(address := str(Path(folder, "check"))) as name:
            listener.bind(name)
        listener.listen()
        environment[_ADDRESS] = address
        process = GuardedProcess(
            [sys.executable, "-P", "-m", __name__],
            environment,
            os.getcwd(),
            *map(os.dup, shown),
            forks=forks,
            directory=fork_server,
        )
        try:
            while not select.select([listener], [], [], _LOOK_S)[0]:
                if process.poll() is not None or time.monotonic() >= until or cancelled():
                    return TrialCheck() if process.poll() is None else _cut_off(TrialCheck(), process)
            line, _ = listener.accept()
            with line, line.makefile("rb") as answers:
                with suppress(OSError):  # it has ended
                    line.sendall(pickle.dumps((order, max(0.0, until - time.monotonic()))))
                return _followed(answers, process, until, cancelled)
        finally:
            process.end()


def _followed(answers: IO[bytes], process: GuardedProcess, until: float, cancelled: Callable[[], bool]) -> TrialCheck:
    """Return the child's last answer, with its end as a problem if that came too early."""
    received, found = b"", TrialCheck()
    while time.monotonic() < until and not cancelled():
        if not select.select([answers], [], [], _LOOK_S)[0]:
            continue
        some = os.read(answers.fileno(), 1 << 16)
        received += some
        *lines, received = received.split(b"\n")
        if lines:
            content = json.loads(lines[-1])
            found = TrialCheck(**{**content, "problems": [TrialFault(**problem) for problem in content["problems"]]})
        if not some:
            return found if found.is_finished else _cut_off(found, process)
    return found


def _cut_off(found: TrialCheck, process: GuardedProcess) -> TrialCheck:
    end, was_killed = _end_of(process)
    found.problems.append(TrialFault(line=f"{found.step}: {end}", is_final=False, may_be_here=was_killed))
    return found


def _end_of(process: GuardedProcess) -> tuple[str, bool]:
    """Return how a process ended, and whether it was killed, as it is where memory runs out."""
    if (code := process.wait(_LOOK_S)) is None:
        return "the trial closed all files of its process; close only those that it opened", False
    if code < 128 or code - 128 not in {number.value for number in signal.Signals}:
        return f"the trial ended its process with exit code {code}; raise an exception instead", False
    name = signal.Signals(code - 128).name
    fix = "it may need less memory" if name == "SIGKILL" else "see its output"
    return f"the trial's process was ended by {name}; {fix}", name == "SIGKILL"


# The child.


class _Failed(Exception):
    """A step failed; the later ones cannot be done."""


class StepwiseCheck:
    """Goes through the steps, and answers after each."""

    def __init__(self, order: CheckOrder, answers: IO[str], until: float = math.inf) -> None:
        """`until`: the monotonic time at which the check is ended."""
        self._order, self._until, self._answers = order, until, answers
        self._found = TrialCheck()
        self._servers: Any = None
        self._may_be_divided = False

    def run(self) -> None:
        """Go through all steps; the last answer is finished."""
        with suppress(_Failed):
            self._steps()
        self._found.is_finished = True
        self._answer()

    def _steps(self) -> None:
        order, segment = self._order, self._order.segment
        with self._step("import"):
            adaptive, asynchronous = segment.batch is not None, segment.training is not None
            order.entrypoint.check(order.max_gpus, adaptive=adaptive, asynchronous=asynchronous)
            target = order.entrypoint.load()
        self._found.kind = kind_of(target).name
        is_whole_loop = self._found.kind == "program" or is_distributed(target)
        self._may_be_divided = is_whole_loop or getattr(target, "sharding", None) is not None
        if is_whole_loop:
            self._check_program(order)
            return
        if order.only_memory:
            self._train(segment)
            return
        with self._comparison() as compare:
            self._train(segment)
            if not self._found.problems:
                compare()

    def _check_program(self, order: CheckOrder) -> None:
        try:
            part("program check")(order, self._found, self._step, self._answer, self._until).run()
        except RanOut as error:
            self._check_program(replace(order, segment=self._smaller(order.segment, error)))

    @contextmanager
    def _comparison(self) -> Iterator[Callable[[], None]]:
        """Provide a function that compares short segments of a TorchTrial: after a restart, and on a gang."""
        order, segment, seconds = self._order, self._order.segment, self._found.seconds
        is_gang = order.max_gpus > 1 and segment.verify
        if self._found.kind != "TorchTrial" or segment.training or (segment.max_iterations == 1 and not is_gang):
            yield lambda: None
            return
        from rubberband.executor.training.comparing import LIMIT_S, Comparison

        name, left_s = "gang" if is_gang else "restart", self._until - time.monotonic()
        limit_s = LIMIT_S if is_gang else min(LIMIT_S, left_s / 5.0)
        comparison = Comparison(order.entrypoint, segment, is_gang=is_gang, limit_s=limit_s)

        def compare() -> None:
            expected_s = seconds["import"] + 3.0 * seconds["set-up"] + seconds["iteration"]
            if not is_gang and expected_s > min(_REPEATED_S, (self._until - time.monotonic()) / 2.0):
                return
            with self._step(name):
                found, remarks = comparison.run()
            self._found.remarks.extend(remarks)
            if remarks:
                seconds.pop(name)
            self._found.problems.extend(replace(each, line=f"{name}: {each.line}") for each in found)

        try:
            yield compare
        finally:
            comparison.close()

    def _train(self, segment: Segment) -> None:
        try:
            self._train_once(segment)
        except RanOut as error:
            self._train(self._smaller(segment, error))

    def _smaller(self, segment: Segment, error: RanOut) -> Segment:
        """Return a segment that begins again after it ran out of memory, with a remark on it."""
        at_once = counted(most := error.most_per_gpu, "sample")
        self._found.remarks = [each for each in self._found.remarks if not each.startswith(_RAN_OUT)]
        self._found.remarks.append(f"{_RAN_OUT}; it was trained with at most {at_once} at once, which takes longer")
        return replace(segment, most_per_gpu=most)

    def _train_once(self, segment: Segment) -> None:
        resources: list[Any] = []
        unbroken: Mapping[str, float] = {}
        try:
            memory = peak.begin()
            memory.takes_parts = self._found.kind == "TorchTrial"
            with self._step("set-up"):
                runner = self._made(segment, resources)
            if self._found.kind != "function":
                self._found.checkpoint_every = runner.checkpoint_every
            metrics = self._iterate(runner, segment)
            if not self._found.problems and segment.most_per_gpu is None:
                self._found.begun_bytes, self._found.peak_bytes, self._found.takes_parts = memory.read()
            if self._order.only_memory:
                return
            with self._step("save"):
                payload = _written(runner.dump(1, metrics, is_last=True))
                saved = runner.saved_iterations(1)
            is_short = self._found.seconds["iteration"] <= _CONTINUED_S
            if isinstance(runner, FunctionRunner) and segment.max_iterations != 1 and is_short and not runner.ended:
                with self._step("next"), suppress(TrainingEnded):
                    unbroken = runner.iterate(2)
                self._found.is_once = not unbroken
            runner.part()
        finally:
            close_all(resources, segment)
        self._found.checkpoint_bytes = len(payload)
        if runner.ended:
            return
        if saved == 0 and segment.max_iterations != 1:
            self._found.remarks.append(f"the function {WITHOUT_CHECKPOINT}")
            self._found.resumes, self._found.restart = False, restarts.AGAIN
        elif segment.max_iterations != 1:
            seen = [metrics, unbroken] if unbroken else [metrics]
            later = replace(segment, from_iterations=1, until_iterations=2)
            self._continue(later, payload, seen)
            for configuration in self._order.forks if not self._found.problems else ():
                self._fork(replace(later, config=configuration), payload)

    def _made(self, segment: Segment, resources: list[Any], payload: bytes | None = None) -> Runner:
        if segment.training is not None:
            self._servers = part("servers")(segment.training.servers)
            resources.append(self._servers)
            segment = self._servers.beside(segment, self._order.max_gpus)
        runner = make_runner(self._order.entrypoint, segment, resources)
        resources.append(runner)
        if self._servers is not None:
            target: Any = self._order.entrypoint.load()
            self._servers.start(target, segment)
        runner.begin(payload)
        return runner

    def _iterate(self, runner: Runner, segment: Segment) -> Mapping[str, float]:
        """Train one iteration; without its metric, the later steps are checked too."""
        metrics: Mapping[str, float] = {}
        with self._step("iteration", goes_on=True):
            metrics = runner.iterate(segment.until_iterations)
        if not self._found.metrics:
            self._found.metrics = dict(metrics)
        return metrics

    def _continue(self, segment: Segment, payload: bytes, seen: Sequence[Mapping[str, float]]) -> None:
        resources: list[Any] = []
        found: Mapping[str, float] | None = None
        try:
            with self._step("restore"):
                runner = self._made(segment, resources, payload)
                if self._found.kind == "TorchTrial":  # no other kind needs torch, whose import takes seconds
                    from rubberband.executor.training.loop import TorchRunner

                    assert isinstance(runner, TorchRunner), "it trains every TorchTrial"
                    _check_restored(payload, runner.own_state())
            is_function = self._found.kind == "function"  # it restores by itself, once it runs
            is_short = self._found.seconds["iteration"] <= _CONTINUED_S
            if not self._found.problems and (is_function or is_short):
                with self._step("continue"), suppress(TrainingEnded):
                    found = runner.iterate(2)
                if self._order.is_timed:
                    self._time(runner, segment)
        finally:
            close_all(resources, segment)
        if isinstance(runner, FunctionRunner) and "continue" in self._found.seconds:
            how = "" if runner.has_loaded else "again"
            judged = restarts.of_restart(segment.metric, "function", seen, 1, found, how=how)
            self._found.resumes, self._found.restart = judged.resumes, judged.line
            self._found.remarks += [judged.remark] if judged.remark else []
            self._found.problems += [TrialFault(line=f"continue: {judged.problem}")] if judged.problem else []

    def _time(self, runner: Runner, segment: Segment) -> None:
        """Train on as a run does, with checkpoints: what the run starts beside the check slows its first iterations."""
        took, until = list[tuple[float, float]](), time.monotonic() + _TIMED_S
        for iterations in range(3, 3 + _TIMED):
            if runner.ended or iterations > (segment.max_iterations or iterations) or time.monotonic() > until:
                break
            with self._step("continue"), suppress(TrainingEnded):
                metrics = runner.iterate(iterations)
                if runner.saves_after(iterations):
                    _written(runner.dump(iterations, metrics))
            took.append(self._found.own["continue"])
        if took:
            self._found.own["continue"] = sorted(took)[len(took) // 2]

    def _fork(self, segment: Segment, payload: bytes) -> None:
        """Continue from the checkpoint with another configuration, as a trial does that takes over another's."""
        resources: list[Any] = []
        before = self._order.segment.config
        changed = {name: (before.get(name), own) for name, own in segment.config.items() if before.get(name) != own}
        is_torch_trial = self._found.kind == "TorchTrial"  # its settings are set by itself
        try:
            with self._step("fork"), _steps_seen(is_wanted=not is_torch_trial) as seen:
                runner = self._made(segment, resources, payload)
                if not is_torch_trial and self._found.seconds["iteration"] <= _CONTINUED_S:
                    with suppress(TrainingEnded):
                        runner.iterate(2)
            if (kept := _kept_setting(seen, changed)) and kept not in self._found.remarks:
                self._found.remarks.append(kept)
        finally:
            close_all(resources, segment)

    @contextmanager
    def _step(self, name: str, *, goes_on: bool = False) -> Any:
        """Time a step. A failure is a problem, after which `_Failed` is raised unless it `goes_on` without metrics."""
        self._found.step, self._found.waits = name, ""
        self._answer()
        began_s, began = time.monotonic(), (own_time(), time.process_time())
        try:
            yield
        except RanOut:
            raise
        except (Exception, SystemExit, KeyboardInterrupt) as raised:
            error: BaseException = raised
            if isinstance(raised, FailedInProcess) and raised.failure.most_per_gpu is not None:
                raise RanOut(raised.failure.message, raised.failure.most_per_gpu) from None
            if self._servers is not None and isinstance(raised, GangBroken):
                error = self._servers.failure() or raised
            problem = _problem(name, error, self._order)
            if self._may_be_divided and _lacks_memory(error) and (least := min(self._order.gangs)) > 1:
                why = f"one worker has too little memory ({problem.line}), and a gang has at least {least}"
                self._found.remarks.append(f"the trial was not trained: {why}")
                raise _Failed from None
            self._found.problems.append(problem)
            if not (goes_on and isinstance(error, TrialFailure) and error.kind in ("no_metric", "not_a_number")):
                raise _Failed from None
        finally:
            self._found.seconds[name] = time.monotonic() - began_s
            self._found.own[name] = own_time() - began[0], time.process_time() - began[1]

    def _answer(self) -> None:
        masked = self._order.entrypoint.environment.masked
        problems = [
            replace(each, line=masked(each.line), details=masked(each.details)) for each in self._found.problems
        ]
        self._answers.write(json.dumps(asdict(replace(self._found, problems=problems))) + "\n")
        self._answers.flush()


@contextmanager
def _steps_seen(*, is_wanted: bool) -> Iterator[list[dict[str, float]]]:
    """Provide the settings of the optimizers of torch that step meanwhile, one for each group of each step."""
    seen: list[dict[str, float]] = []
    if not is_wanted or "torch" not in sys.modules:
        yield seen
        return
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    def look(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            seen.append({name: float(value) for name, value in group.items() if type(value) in (int, float)})

    hook = register_optimizer_step_pre_hook(look)
    try:
        yield seen
    finally:
        hook.remove()


def _kept_setting(seen: Sequence[Mapping[str, float]], changed: Mapping[str, tuple[Any, Any]]) -> str:
    """Return that an optimizer has the setting of the configuration that wrote a checkpoint; empty if none has."""
    values = {value for group in seen for value in group.values()}
    for name, (was, now) in changed.items():
        if type(was) is float and type(now) is float and was in values and now not in values:
            return (
                f"after a start with {name}={now:.6g} from a checkpoint of {name}={was:.6g}, an optimizer still has "
                f"{was:.6g}: load_state_dict() brings the settings of the checkpoint; set them from the configuration "
                "after loading, or changes of it have no effect"
            )
    return ""


def _written(payload: Payload) -> bytes:
    if isinstance(payload, bytes):
        return payload
    with tempfile.TemporaryDirectory(prefix="rubberband-") as folder:
        path = Path(folder, "checkpoint")
        payload(path)
        return path.read_bytes()


def _check_restored(payload: bytes, state: Any) -> None:
    """Raise TrialFailure if the trial's own state after its restore is not that of the checkpoint."""
    import torch

    again = io.BytesIO()
    torch.save({"trial": state}, again)
    one, other = (
        torch.load(file, map_location="cpu", weights_only=False).get("trial")
        for file in (io.BytesIO(payload), io.BytesIO(again.getvalue()))
    )
    place = difference(one, other, "state_dict()")
    if place is not None:
        raise refused(f"after load_state_dict(), {place} is not what was saved; restore it in load_state_dict()")


def _problem(step: str, error: BaseException, order: CheckOrder) -> TrialFault:
    failure = describe(error, in_gang=False)
    if not order.device_id and _NEEDS_GPU.search(failure.message):
        fix = "; use the device that the trial is given (context.device), or check it where there is a GPU"
        return TrialFault(
            line=f"{step}: it needs a GPU, and is checked on the CPU: {failure.message}{fix}", may_be_here=True
        )
    if step == "import":
        line, details = failure.message.removeprefix(f"{type(error).__name__}: "), _own_frames(error.__cause__)
        return TrialFault(line=line, details=details, may_be_here=isinstance(error, NotHereError))
    own = isinstance(error, TrialFailure)
    fix = "" if isinstance(error, UnclearMetric) or step == "fork" else _FIXES.get(failure.kind, "")
    line = f"{step}: {failure.message}{fix}"
    if isinstance(error.__cause__, WorkerTrace):
        details = str(error.__cause__).strip()
    else:
        details = "" if own else _own_frames(error)
    restores = step in ("restore", "continue", "fork")
    is_final = failure.kind == "no_metric" or (restores and failure.kind != "not_a_number")
    return TrialFault(line=line, details=details, is_final=is_final, may_be_here=_lacks_memory(error))


def _lacks_memory(error: BaseException) -> bool:
    of_program = isinstance(error, TrialFailure) and "OutOfMemoryError" in str(error)
    return isinstance(error, (MemoryError, LacksMemory)) or lacks_memory(error) or of_program


def _own_frames(error: BaseException | None) -> str:
    """Return the trace-back of an error without the frames before the user's code; empty if there are none of it."""
    if error is None:
        return ""
    trace = error.__traceback__
    while trace is not None and _is_ours(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    if trace is None and not isinstance(error, SyntaxError):
        return ""
    details = describe(error.with_traceback(trace), in_gang=False).details
    return details.rstrip()


def _is_ours(file: str) -> bool:
    """Whether a frame is of this package, or of Python's import."""
    machinery = ("<frozen importlib", f"{os.sep}importlib{os.sep}")
    own = (str(Path(__file__).parent), str(Path(__file__).parents[2] / "integrations"))
    return file.startswith(own) or any(part in file for part in machinery)


def main() -> None:
    """Check the trial of the order of the process that listens at `_ADDRESS`."""
    faulthandler.enable()
    compile_nothing()
    order: CheckOrder
    with socket.socket(socket.AF_UNIX) as line:
        with short(os.environ.pop(_ADDRESS)) as name:
            line.connect(name)
        with line.makefile("rb") as file:
            order, limit_s = pickle.load(file)
        until = time.monotonic() + limit_s
        order.entrypoint.environment.put()
        os.environ[GANGS] = ",".join(map(str, order.gangs))
        with line.makefile("w") as answers:
            StepwiseCheck(order, answers, until).run()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)  # the trial's threads do not matter any more


if __name__ == "__main__":
    main()
