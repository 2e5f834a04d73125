"""A function that runs in every worker of a gang: its runner, and the process of its own in which it is called.

It is a program as any other (`runner.py`), whose command line is this module. The order lies beside the socket
of its reports, and so does the failure that it ends with.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rubberband.executor.checkpoints.scratch import Scratch
from rubberband.executor.training import peak, reporting
from rubberband.executor.training.entrypoint import Entrypoint
from rubberband.executor.training.failures import FailedInProcess, describe, refused
from rubberband.executor.training.programs.gang import ProgramGang
from rubberband.executor.training.programs.runner import CommandRunner
from rubberband.executor.training.sampler import reseed
from rubberband.executor.training.segment import Segment
from rubberband.executor.training.trial import flat
from rubberband.values.command import ProgramCommand
from rubberband.values.environment import Environment

_ORDER, _FAILURE = "order", "failure"


def make_runner(entrypoint: Entrypoint, target: Any, segment: Segment, resources: list[Any]) -> FunctionProcessRunner:
    """Return the runner of a function that has a process of its own; what is to be closed is added to `resources`."""
    scratch = Scratch()
    resources.append(gang := ProgramGang.join(segment, scratch.path))
    return FunctionProcessRunner(entrypoint, segment, gang, scratch)


class FunctionProcessRunner(CommandRunner):
    """Runs a function that `distributed` has marked; every report of rank 0 is one iteration."""

    announces = True
    forks = True

    def __init__(self, entrypoint: Entrypoint, segment: Segment, gang: ProgramGang, scratch: Scratch) -> None:
        words = (sys.executable, "-P", "-m", __name__)
        command = ProgramCommand(words=words, name=str(entrypoint))
        super().__init__(command, segment, os.getcwd(), gang, entrypoint.environment, scratch)
        # The values of secrets are in the process's environment, and in no file.
        order = (replace(entrypoint, environment=Environment()), segment, list(entrypoint.environment.secrets))
        (self._place / _ORDER).write_bytes(pickle.dumps(order))

    def _failure(self, code: int) -> Exception:
        """Return the exception of the function, as its process has described it."""
        file = self._place / _FAILURE
        if not file.exists():
            if code == 0:
                return refused(
                    f"{self._command} returned without a report; call rubberband.report"
                    f"({{{self._segment.metric!r}: ...}}) once per iteration"
                )
            return super()._failure(code)
        found = FailedInProcess(pickle.loads(file.read_bytes()))
        if found.failure.secondary:
            self._await_failure_of_peer()
        return found


def main() -> None:
    """Call the function of the order, as its process does."""
    place = Path(os.environ[reporting.LINE]).parent
    entrypoint, segment, names = pickle.loads((place / _ORDER).read_bytes())
    try:
        reporting.begins_again, reporting.most_at_once = True, segment.most_per_gpu
        function = entrypoint.load()
        reporting.read_memory = peak.begin().read
        reporting.begin()
        reseed("train", segment.seed, 0, 0)  # as in FunctionRunner, and the same on each worker
        returned = function(dict(segment.config))
        if isinstance(returned, Mapping) and not reporting.has_reported:
            reporting.report_to_worker(flat(returned), None, ended=True)
    except BaseException as error:
        environment = Environment(secrets={name: os.environ[name] for name in names if os.environ.get(name)})
        failure = describe(error, in_gang=segment.num_workers > 1, environment=environment)
        (place / _FAILURE).write_bytes(pickle.dumps(failure))
        if failure.most_per_gpu is None:  # else the trial begins again, and has said so
            print(failure.details, file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(1)  # a framework's threads do not matter any more
    finally:
        sys.stdout.flush()


if __name__ == "__main__":
    main()
