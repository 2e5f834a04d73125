"""The process of an experiment that the service started: `python -m rubberband.running.hosted HOME NAME`.

It runs or resumes the experiment as `order.json` of its folder says, like `rubberband run`, and needs no server: a
restarted server finds it by its lock. It prints the lines of `rubberband run` on stderr. SIGTERM cancels it.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rubberband.errors import Cancelled, InputError, JournalError, RubberbandError, StoreAwayError
from rubberband.executor.journal.database import PATIENCE_S, was_lost
from rubberband.executor.journal.folder import ExperimentFolder, open_folder
from rubberband.executor.journal.inbox import Ending, HostedRun, HostMark, holding, read_order, write_ending, write_mark
from rubberband.features import parts
from rubberband.interrupts import ENDS, AtOnce
from rubberband.values.kinds import kind_in

if TYPE_CHECKING:
    from rubberband.executor.journal.journal import Header
    from rubberband.executor.result.result import Result
    from rubberband.executor.run.driver import Observer

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""Between looks at a checkpoint store that is unavailable; doubled each time."""
LOOK_S = 0.5
AT_WORK = 75
"""Exit code: another process is running the experiment. Nothing was done."""


def main(arguments: Sequence[str]) -> int:
    """Run the order of HOME NAME and return the exit code. A third argument is the inherited lock."""
    folder = open_folder(arguments[1], Path(arguments[0]))
    with nullcontext(int(arguments[2])) if arguments[2:] else holding(folder) as lock:
        if lock is None:
            _say(f"another process is running experiment {folder.name!r}")
            return AT_WORK
        os.set_inheritable(lock, False)
        try:
            order = read_order(folder)
        except RubberbandError as error:
            return _failed(error)[0]
        mark = HostMark(pid=os.getpid(), attempt=order.attempt, started_at=time.time())
        write_mark(lock, mark)
        exit_code, error_line, spent_usd = _outcome(
            folder, order, lambda what: write_mark(lock, replace(mark, waits_for=what))
        )
        ending = Ending(
            attempt=order.attempt, exit_code=exit_code, error=error_line, at=time.time(), spent_usd=spent_usd
        )
        with suppress(OSError):
            write_ending(folder, ending)
        return exit_code


def _outcome(folder: ExperimentFolder, order: HostedRun, wait_for: Callable[[str], None]) -> tuple[int, str, float]:
    """Return the exit code, the error in one line, and the money that it cost before the run.

    `wait_for` is called with what it waits for.
    """
    # Until the experiment handles signals itself, nothing is rented, and the first one ends it at once.
    AtOnce(Cancelled("cancelled before it started; nothing was spent")).handle(ENDS)
    try:
        result = run_patiently(folder, order, wait_for)
    except RubberbandError as error:
        return _failed(error)
    except KeyboardInterrupt:
        return 130, "interrupted", 0.0
    except Exception as error:
        traceback.print_exc()
        return 1, f"rubberband failed: {_one_line(error)}; the trace-back is in {folder.process_log}", 0.0
    finally:
        for number in ENDS:
            signal.signal(number, signal.SIG_IGN)
    return result.exit_code, result.reason, 0.0


def run_patiently(folder: ExperimentFolder, order: HostedRun, wait_for: Callable[[str], None]) -> Result:
    """Run it, and begin anew where the database of its journal restarts at its start; later, its driver waits itself.

    A profile that was measured on rented instances is not paid for twice: then JournalError is raised.
    """
    until, again = time.monotonic() + PATIENCE_S, False
    rents_a_profile = not order.resume and kind_in(order.words).is_rented and not order.words.get("profile")
    while True:
        try:
            return _run(folder, replace(order, resume=order.resume or (again and folder.exists)), wait_for)
        except JournalError as error:
            if time.monotonic() > until or folder.store is None or not was_lost(error) or rents_a_profile:
                raise
            _say(f"waiting for the database: {_one_line(error)}")
            again = True
            time.sleep(LOOK_S)


def _run(folder: ExperimentFolder, order: HostedRun, wait_for: Callable[[str], None]) -> Result:
    from rubberband.executor.run import session

    try:
        if not order.resume:
            return _begun(folder, order)
        with session.cancel_on_signals() as cancelled:
            return session.run(folder, view=_plain_view, cancelled=cancelled)
    except StoreAwayError as error:
        if not order.waits:
            raise
        return _once_the_store_is_back(folder, error, wait_for)


def _begun(folder: ExperimentFolder, order: HostedRun) -> Result:
    from rubberband.running.run import run_experiment
    from rubberband.running.starting import RunOptions
    from rubberband.spec.experiment import Experiment
    from rubberband.spec.pool import on_pool

    words = order.words
    with ExitStack() as starting:
        for around in parts("start"):
            starting.enter_context(around(folder, (), is_rehearsal=kind_in(words).is_simulated))
        if order.pool is not None:
            words = on_pool({**words, "resources": {**words.get("resources", {}), "pool": order.pool}}, folder.home)
        experiment = Experiment.kept(words)
        if not experiment.resources.kind.is_simulated:
            with experiment.resources.environment(os.environ).within():
                _require_own(experiment.entrypoint, order)
    options = RunOptions(
        search_path=order.code,
        policy=order.policy,
        most_usd=order.most_usd,
        is_admitted=order.pool is not None,
        submitted_at=order.submitted_at,
        announce=_say,
        view=_plain_view,
    )
    return run_experiment(experiment, folder, options)


def _once_the_store_is_back(folder: ExperimentFolder, away: StoreAwayError, wait_for: Callable[[str], None]) -> Result:
    """Resume whenever its checkpoint store is back; nothing is held meanwhile. Raises Cancelled if the user asks."""
    from rubberband.executor.run import session
    from rubberband.running.starting import asked_to_end

    pause_s = SHORTEST_PAUSE_S

    def view(header: Header, clock: Callable[[], float], stack: ExitStack) -> Sequence[Observer]:
        nonlocal pause_s
        pause_s = SHORTEST_PAUSE_S
        wait_for("")
        return _plain_view(header, clock, stack)

    with session.cancel_on_signals() as cancelled, asked_to_end(folder, cancelled) as asked:
        while True:
            why = _one_line(away.__cause__ if isinstance(away.__cause__, StoreAwayError) else away)
            _say(f"waiting: {why}")
            wait_for(f"it waits, and resumes automatically: {why}")
            _pause(pause_s, asked)
            pause_s = min(2.0 * pause_s, LONGEST_PAUSE_S)
            try:
                return session.run(folder, view=view, cancelled=cancelled)
            except StoreAwayError as error:
                away = error


def _pause(pause_s: float, asked: Callable[[], bool]) -> None:
    until = time.monotonic() + pause_s
    while (left_s := until - time.monotonic()) > 0.0:
        if asked():
            raise Cancelled("cancelled while it waited for its checkpoint store; resume it once that is back")
        time.sleep(min(LOOK_S, left_s))


def _require_own(entrypoint: object, order: HostedRun) -> None:
    """Raise InputError if `module:*` is allowed, and the entry point is one that the module only imports.

    An imported function, such as `subprocess.run`, could turn a configuration into a command.
    """
    if not isinstance(entrypoint, str):  # a command, which the service allowed as such
        return
    module, _, attribute = entrypoint.partition(":")
    if entrypoint in order.entrypoints or f"{module}:*" not in order.entrypoints:
        return
    from rubberband.executor.training.entrypoint import Entrypoint

    found = Entrypoint.parse(entrypoint, order.code).load()
    if not f"{found.__module__}.".startswith(f"{module}."):
        raise InputError(
            f"entrypoint {entrypoint}: {attribute} is defined in {found.__module__}, and {module}:* allows what "
            f"{module} itself defines; let the operator allow it by its name"
        )


def _plain_view(header: Header, _clock: Callable[[], float], stack: ExitStack) -> Sequence[Observer]:
    from rubberband.views.live.view import PlainView

    return [stack.enter_context(PlainView(header.job, sys.stderr))]


def _failed(error: RubberbandError) -> tuple[int, str, float]:
    line = _one_line(error)
    _say(f"error: {line}")
    return error.exit_code, line, error.spent_usd


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    faulthandler.enable()
    sys.exit(main(sys.argv[1:]))
