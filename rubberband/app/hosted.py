"""The process of an experiment that the service started: `python -m rubberband.app.hosted HOME NAME`.

It runs or resumes what `order.json` of the experiment's folder says, as `rubberband run` would, and needs no server:
one that is restarted finds it by its lock. What it prints is what `rubberband run` prints on stderr. SIGTERM ends the
experiment cleanly.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rubberband.errors import Cancelled, InputError, RubberbandError, StoreAwayError
from rubberband.executor.journal.folder import ExperimentFolder, open_folder
from rubberband.executor.journal.hosting import Ending, HostedRun, Mark, holding, read_order, write_ending, write_mark
from rubberband.interrupts import AtOnce

if TYPE_CHECKING:
    from rubberband.executor.core.state import Job
    from rubberband.executor.driver import Observer
    from rubberband.executor.result import Result

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""Between looks at a checkpoint store that is away; doubled each time."""
LOOK_S = 0.5
AT_WORK = 75
"""Exit code: another process is at work on the experiment. Nothing was done."""


def main(arguments: Sequence[str]) -> int:
    """Run the order of HOME NAME, and exit as `rubberband run` would. A third argument is the lock, inherited."""
    folder = open_folder(arguments[1], Path(arguments[0]))
    with _lock(folder, arguments[2:]) as lock:
        if lock is None:
            _say(f"another process is running experiment {folder.name!r}")
            return AT_WORK
        try:
            order = read_order(folder)
        except RubberbandError as error:
            return _failed(error)[0]
        # The server of an earlier version, which runs until it is restarted, has written the store there.
        folder = replace(folder, store=order.store or folder.store)
        mark = Mark(pid=os.getpid(), attempt=order.attempt, started_at=time.time())
        write_mark(lock, mark)
        exit_code, error_line = _told(folder, order, lambda what: write_mark(lock, replace(mark, waits_for=what)))
        ending = Ending(attempt=order.attempt, exit_code=exit_code, error=error_line, at=time.time())
        with suppress(OSError):
            write_ending(folder, ending)
        return exit_code


@contextmanager
def _inherited(lock: int) -> Iterator[int]:
    os.set_inheritable(lock, False)
    yield lock


def _lock(folder: ExperimentFolder, inherited: Sequence[str]) -> AbstractContextManager[int | None]:
    return _inherited(int(inherited[0])) if inherited else holding(folder)


def _told(folder: ExperimentFolder, order: HostedRun, wait_for: Callable[[str], None]) -> tuple[int, str]:
    """How it ended: the exit code, and what went wrong in one line. `wait_for` is told what it waits for."""
    # Before the experiment sees to signals itself, nothing is rented yet, and the first one ends it at once.
    AtOnce(Cancelled("cancelled before it started; nothing was spent")).handle((signal.SIGINT, signal.SIGTERM))
    try:
        result = _run(folder, order, wait_for)
    except RubberbandError as error:
        return _failed(error)
    except KeyboardInterrupt:
        return 130, "interrupted"
    except Exception as error:
        traceback.print_exc()
        return 1, f"rubberband failed: {_one_line(error)}; the trace-back is in {folder.process_log}"
    finally:
        _ignore_signals()
    return result.exit_code, result.reason


def _run(folder: ExperimentFolder, order: HostedRun, wait_for: Callable[[str], None]) -> Result:
    try:
        return _resumed(folder) if order.resume else _begun(folder, order)
    except StoreAwayError as error:
        if not order.waits:
            raise
        return _once_the_store_is_back(folder, error, wait_for)


def _begun(folder: ExperimentFolder, order: HostedRun) -> Result:
    from rubberband.app.run import run_experiment
    from rubberband.spec.experiment import Experiment

    experiment = Experiment.kept(order.words)
    if not experiment.resources.kind.is_simulated:
        _require_own(experiment.entrypoint, order)
    return run_experiment(
        experiment,
        folder,
        search_path=order.code,
        policy=order.policy,
        most_usd=order.most_usd,
        announce=_say,
        view=_plain_view,
    )


def _resumed(folder: ExperimentFolder) -> Result:
    from rubberband.executor import session

    with session.cancel_on_signals() as cancelled:
        return session.run(folder, view=_plain_view, cancelled=cancelled)


def _once_the_store_is_back(folder: ExperimentFolder, away: StoreAwayError, wait_for: Callable[[str], None]) -> Result:
    """Go on whenever its checkpoint store is back; nothing is held meanwhile. Raises Cancelled if asked to end."""
    from rubberband.app.run import asked_to_end
    from rubberband.executor import session

    pause_s = SHORTEST_PAUSE_S

    def view(job: Job, clock: Callable[[], float], stack: ExitStack) -> Sequence[Observer]:
        nonlocal pause_s
        pause_s = SHORTEST_PAUSE_S
        wait_for("")
        return _plain_view(job, clock, stack)

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
    """Raise InputError where `module:*` is allowed, and what is named is not the module's: it only imports that.

    What modules import, such as `subprocess.run`, could make a command of a configuration.
    """
    module, _, attribute = str(entrypoint).partition(":")
    if entrypoint in order.entrypoints or f"{module}:*" not in order.entrypoints:
        return
    from rubberband.executor.training.entrypoint import Entrypoint

    found = Entrypoint.parse(str(entrypoint), order.code).load()
    if not f"{found.__module__}.".startswith(f"{module}."):
        raise InputError(
            f"entrypoint {entrypoint}: {attribute} is defined in {found.__module__}, and {module}:* allows what "
            f"{module} itself defines; let the operator allow it by its name"
        )


def _plain_view(job: Job, _clock: Callable[[], float], stack: ExitStack) -> Sequence[Observer]:
    from rubberband.views.live import PlainView

    return [stack.enter_context(PlainView(job, sys.stderr))]


def _ignore_signals() -> None:
    """All is over but for telling so."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _failed(error: RubberbandError) -> tuple[int, str]:
    line = _one_line(error)
    _say(f"error: {line}")
    return error.exit_code, line


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    faulthandler.enable()
    sys.exit(main(sys.argv[1:]))
