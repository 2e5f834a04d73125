"""The place of the tools: a service (RUBBERBAND_SERVER), or this machine.

On this machine an experiment runs in a process of its own, as one of a service does, and goes on without the tools.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import anyio.to_thread

from rubberband.client.client import Client
from rubberband.commands.experiment import RemoteExperiment, open_experiment
from rubberband.commands.local_experiment import LocalExperiment, local_experiment
from rubberband.commands.run import require_rest
from rubberband.errors import InputError, RubberbandError
from rubberband.executor.journal.folder import ExperimentFolder, change_labels, open_folder, read_labels
from rubberband.executor.journal.inbox import (
    HostedRun,
    holding,
    is_hosted,
    read_ending,
    read_mark,
    read_order,
    write_order,
)
from rubberband.executor.result.result import Result
from rubberband.executor.run.follower import read
from rubberband.mcp.caps import TAG, Bill
from rubberband.spec.experiment import Experiment
from rubberband.states import ACTIVE, ExperimentState
from rubberband.values.submission import LabelChange, Summary

LOOK_S, START_S = 0.5, 20.0
"""Time between two looks, and the longest wait for the begin of an experiment."""
_HOSTED = (sys.executable, "-P", "-m", "rubberband.running.hosted")
_ESTIMATE = (sys.executable, "-P", "-m", "rubberband.cli", "estimate", "--output=json")
_OF_A_SERVICE = ("RUBBERBAND_SERVER", "RUBBERBAND_TOKEN")
"""Variables that a process on this machine does not need."""


class Place(ABC):
    """A service, or this machine."""

    server: str | None = None

    def open(self, name: str) -> AbstractContextManager[LocalExperiment | RemoteExperiment]:
        """Open an experiment. Raises InputError for one that does not exist."""
        return open_experiment(name, self.server)

    @abstractmethod
    async def plan(self, path: Path, overrides: Sequence[str]) -> dict[str, Any]:
        """Return what `rubberband estimate -o json` prints. Raises InputError if there is no plan."""

    @abstractmethod
    def start(self, experiment: Experiment, path: Path) -> None:
        """Start an experiment, which gets the tag of agents. Raises InputError."""

    @abstractmethod
    def resume(self, name: str) -> None:
        """Start one again that has stopped. Raises InputError."""

    @abstractmethod
    def starting(self, name: str) -> str:
        """Return what an experiment does that has no journal yet; empty once it has. Raises InputError if it failed."""

    @abstractmethod
    def bills(self) -> Iterator[Bill]:
        """Iterate over the experiments of agents. Raises InputError where a cost is not known."""

    @abstractmethod
    def result(self, name: str) -> Result:
        """Return the result of an experiment. Raises InputError for one that does not exist."""

    @abstractmethod
    def end(self) -> None:
        """End what the tools are doing; experiments go on."""


class Service(Place):
    """A service, which this process asks as the client of Python does."""

    def __init__(self, server: str) -> None:
        self.server = server
        self._client = Client(server)

    async def plan(self, path: Path, overrides: Sequence[str]) -> dict[str, Any]:
        """Ask the service."""

        def ask() -> dict[str, Any]:
            return self._client.plan(path, overrides=overrides)

        return await anyio.to_thread.run_sync(ask, abandon_on_cancel=True)

    def start(self, experiment: Experiment, path: Path) -> None:
        """Submit it."""
        self._client.submit(experiment)
        self._client.tag(experiment.name, TAG)

    def resume(self, name: str) -> None:
        """Ask the service to resume it."""
        self._client.resume(name)

    def starting(self, name: str) -> str:
        """Return nothing: the service knows what it has accepted."""
        return ""

    def bills(self) -> Iterator[Bill]:
        """Ask for those with the tag, archived ones too."""
        for archived in (False, True):
            for view in self._client.experiments(tags=[TAG], archived=archived):
                words: Any = view["summary"]
                if view["state"] in ACTIVE and words["max_cost_usd"] is None:
                    constraints = self._client.experiment(view["name"])["words"].get("constraints", {})
                    words = {**words, "max_cost_usd": constraints.get("max_cost")}
                yield _bill(view["name"], view["provider"], view["state"], words)

    def result(self, name: str) -> Result:
        """Ask for its report."""
        return Result.from_json(self._client.report(name))

    def end(self) -> None:
        """Do nothing: no process belongs to it."""


class Here(Place):
    """This machine."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._planning = set[subprocess.Popen[str]]()
        self._started = list[subprocess.Popen[bytes]]()

    async def plan(self, path: Path, overrides: Sequence[str]) -> dict[str, Any]:
        """Plan in a process of its own, which imports the trial as it is now."""
        words = [*_ESTIMATE, *(f"--set={each}" for each in overrides), str(path)]
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=_environment(),
        )
        self._planning.add(process)
        try:
            out, lines = await anyio.to_thread.run_sync(process.communicate, abandon_on_cancel=True)
        finally:
            process.kill()
            self._planning.discard(process)
        if process.returncode:
            told = [line.removeprefix("error: ") for line in lines.splitlines() if line.startswith(("error: ", "or: "))]
            raise InputError("; ".join(told) or f"planning ended with code {process.returncode}; see the server's log")
        answer: dict[str, Any] = json.loads(out)
        return answer

    def start(self, experiment: Experiment, path: Path) -> None:
        """Start a process that plans and runs it."""
        folder = self._folder(experiment.name)
        folder.require_free(f"submit it under another name: overrides=['name={experiment.name}-2']")
        code = (str(path.parent), os.getcwd())
        self._spawn(folder, HostedRun(attempt=1, resume=False, words=experiment.to_words(), code=code))

    def resume(self, name: str) -> None:
        """Start a process that resumes it, and wait until it has begun."""
        folder = self._folder(name)
        require_rest(folder, no_cap=False, yes=True)
        mark, before, until = read_mark(folder), read(folder).resumes, time.monotonic() + START_S
        order = HostedRun(attempt=1 if mark is None else mark.attempt + 1, resume=True, words={})
        process = self._spawn(folder, order)
        while time.monotonic() < until and read(folder).resumes == before:
            if process.poll() is not None:
                ending = read_ending(folder)
                raise InputError(f"experiment {name!r} does not go on: {ending.error if ending else 'it was killed'}")
            time.sleep(LOOK_S)

    def _spawn(self, folder: ExperimentFolder, order: HostedRun) -> subprocess.Popen[bytes]:
        self._started = [process for process in self._started if process.poll() is None]  # no zombie stays
        with holding(folder) as lock:
            if lock is None:
                raise InputError(f"experiment {folder.name!r} is at work; ask for its status")
            try:
                folder.ending.unlink(missing_ok=True)
                change_labels(folder, LabelChange(add_tags=(TAG,)))
                write_order(folder, order)
                with open(folder.process_log, "ab") as log:
                    process = subprocess.Popen(
                        [*_HOSTED, str(folder.home), folder.name, str(lock)],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        env=_environment(),
                        start_new_session=True,  # a Ctrl-C that ends the tools does not reach it
                        pass_fds=(lock,),
                    )
            except OSError as error:
                raise InputError(f"{folder.path} cannot be written ({error.strerror}); make room") from None
        self._started.append(process)
        return process

    def starting(self, name: str) -> str:
        """Look at its process."""
        folder = self._folder(name)
        if not folder.order.exists() or folder.exists:
            return ""
        if is_hosted(folder):
            return f"{name}: starting: it plans, or measures a profile first"
        ending = read_ending(folder)
        raise InputError(f"experiment {name!r} did not start: {(ending and ending.error) or 'its process was killed'}")

    def bills(self) -> Iterator[Bill]:
        """Read the journals of those with the tag."""
        for labels in sorted((self._home / "experiments").glob("*/labels.json")):
            folder = self._folder(labels.parent.name)
            if TAG not in read_labels(folder).tags:
                continue
            try:
                if folder.exists:
                    with local_experiment(folder.name) as found:
                        view = found.listed()
                    yield _bill(folder.name, view["provider"], view["state"], view["summary"])
                elif is_hosted(folder):
                    words = read_order(folder).words
                    most: Any = {"max_cost_usd": words.get("constraints", {}).get("max_cost")}
                    yield _bill(folder.name, words["resources"]["provider"], "starting", most)
            except RubberbandError as error:
                raise InputError(f"the cost of {folder.name} is not known ({error}); move {folder.path} away") from None

    def result(self, name: str) -> Result:
        """Read its journal."""
        folder = self._folder(name)
        folder.require()
        return read(folder)

    def end(self) -> None:
        """End the processes that plan."""
        for process in self._planning:
            process.kill()

    def _folder(self, name: str) -> ExperimentFolder:
        return open_folder(name, self._home)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _OF_A_SERVICE}


def _bill(name: str, provider: str | None, state: str, words: Any) -> Bill:
    """Return the bill of an answer; what a newer service adds to its summary is left out."""
    summary = Summary(**{key: words[key] for key in Summary.__dataclass_fields__ if key in words})
    return Bill(name=name, provider=provider or "", state=ExperimentState(state), summary=summary)
