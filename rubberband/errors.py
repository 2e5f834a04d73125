"""Errors for users: one line with the value, the limit and the remedy.

RubberbandError                 exit 1: something failed while working
├── InputError                  exit 2: wrong usage or input; nothing was started
│   ├── EntrypointError         the entry point does not import or is not a trial
│   ├── ProfileMissingError     planning needs a profile and there is none
│   └── NameTakenError          another experiment has this name
├── InfeasibleError             exit 3: no plan meets the constraints; carries the nearest one
├── Cancelled                   exit 130: the user asked for an end
├── ProviderError               the cloud (or this machine as one) refused or broke
│   └── NoCapacityError         the market that was asked has no such instance for this account now
├── ServiceError                the service does not answer, or failed
├── CheckpointError             a checkpoint could not be written, or read back whole
│   ├── CheckpointLostError     it is gone or damaged
│   └── StoreAwayError          the checkpoint store is missing, is not the earlier one, or cannot be written
└── JournalError                the journal could not be read or written
    └── DamagedJournalError     it was cut off, events are missing, or some are broken
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import ClassVar, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")
_IMPORTLIB = os.path.dirname(importlib.__file__)
_OURS = os.path.dirname(os.path.abspath(__file__))


def briefly(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let `function` raise errors for users without the frames of this package, in which their cause is not found."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except RubberbandError as error:
            if (cause := error.__cause__) is not None:
                cause.__traceback__ = _of_the_user(cause.__traceback__)
            raise error.with_traceback(None)  # noqa: B904 - it keeps its cause

    return call


def _of_the_user(trace: TracebackType | None) -> TracebackType | None:
    """Return what follows the first frames of a trace-back, which are of this package and of importlib."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith((_OURS, "<frozen importlib", _IMPORTLIB)):
        trace = trace.tb_next
    return trace


class RubberbandError(Exception):
    """Base of every error that rubberband raises on purpose.

    Examples:
        >>> try:
        ...     rubberband.load_result("nosuch")
        ... except rubberband.RubberbandError as error:
        ...     print(error.exit_code)
        2
    """

    exit_code: ClassVar[int] = 1
    spent_usd: float = 0.0
    """At most what was spent on measuring a profile before it was raised."""


class InputError(RubberbandError):
    """Wrong usage or input; nothing was started and nothing was lost.

    Examples:
        >>> try:
        ...     rubberband.load_experiment("experment.yaml")
        ... except rubberband.InputError as error:
        ...     print(error)
        there is no experiment file 'experment.yaml'; did you mean 'experiment.yaml'?
    """

    exit_code = 2


class EntrypointError(InputError):
    """The entry point does not import, or what it names is not a trial.

    Examples:
        >>> misspelt = ["resources.provider=local", "entrypoint=trials:trian"]
        >>> experiment = rubberband.load_experiment("experiment.yaml", misspelt)
        >>> try:
        ...     rubberband.tune(experiment=experiment, new=True, verbose=0)
        ... except rubberband.EntrypointError as error:
        ...     print(str(error).partition("; ")[2])
        did you mean 'train'?
    """


class ProfileMissingError(InputError):
    """Planning needs a profile and the experiment has none.

    Examples:
        >>> experiment = rubberband.load_experiment("experiment.yaml", ["profile=null"])
        >>> try:
        ...     rubberband.estimate(experiment=experiment)
        ... except rubberband.ProfileMissingError:
        ...     print("measure one: rubberband profile experiment.yaml")
        measure one: rubberband profile experiment.yaml
    """


class NameTakenError(InputError):
    """Another experiment has this name.

    Examples:
        >>> experiment = rubberband.load_experiment("experiment.yaml")
        >>> try:
        ...     result = rubberband.tune(experiment=experiment)
        ... except rubberband.NameTakenError:
        ...     result = rubberband.load_result(experiment.name)
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Another value in the experiment file."""

    key: str
    """Its path, such as `resources.max_instances`."""
    value: int | float | str
    """In the file's words."""
    was: int | float | str | None
    """The value in force, given or by default, in the same words; None if there was none."""

    @property
    def setting(self) -> str:
        """`key=value`, as `-s` on the command line takes it."""
        value = self.value
        cents = isinstance(value, float) and round(value, 2) == value
        return f"{self.key}={value:.2f}" if cents else f"{self.key}={value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """The least change of its kind that makes an experiment feasible, and the figures of its plan."""

    changes: tuple[Change, ...]
    """One, or two where none suffices alone."""
    jct_s: float
    """Time of the plan; the mean if times vary."""
    cost_usd: float
    later_s: float = 0.0
    """Extension of the deadline."""
    extra_usd: float = 0.0
    """Increase of the budget."""


class InfeasibleError(RubberbandError):
    """No plan meets the constraints.

    `shortest_jct_s` is the shortest job completion time of any plan, `cheapest_usd` the lowest cost. `remedies` would
    make it feasible, the cheapest first; empty if they were not searched for.

    Examples:
        >>> experiment = rubberband.load_experiment("experiment.yaml", ["constraints.max_cost=0.01"])
        >>> try:
        ...     rubberband.tune(experiment=experiment, new=True, verbose=0)
        ... except rubberband.InfeasibleError as error:
        ...     print(error.remedies[0].changes[0].key)
        constraints.max_cost
    """

    exit_code = 3

    def __init__(
        self,
        obstacle: str,
        *,
        shortest_jct_s: float,
        cheapest_usd: float,
        advice: str = "",
        remedies: Sequence[Remedy] = (),
    ) -> None:
        """`obstacle` is the limit that is out of reach, `advice` the fix."""
        super().__init__(f"{obstacle}; {advice}" if advice else obstacle)
        self.obstacle = obstacle
        self.remedies = tuple(remedies)
        self.shortest_jct_s = shortest_jct_s
        self.cheapest_usd = cheapest_usd


class Cancelled(RubberbandError):
    """The user asked for an end before there was a result."""

    exit_code = 130


class ProviderError(RubberbandError):
    """The provider refused a request or broke while serving it.

    Examples:
        >>> experiment = rubberband.load_experiment("experiment.yaml")
        >>> try:
        ...     result = rubberband.tune(experiment=experiment, new=True, verbose=0)
        ... except rubberband.ProviderError as error:
        ...     print(f"{error}; continue with rubberband resume {experiment.name}")
    """


class NoCapacityError(ProviderError):
    """The market has no such instance for this account now, in no zone; another market may."""


class ServiceError(RubberbandError):
    """The service does not answer, or failed while it did; `status` is that of its answer, None if there was none.

    Examples:
        >>> try:
        ...     rubberband.Client("http://127.0.0.1:1", sleep=lambda pause_s: None).experiment("first")
        ... except rubberband.ServiceError as error:
        ...     print(error.status)
        None
    """

    def __init__(self, message: str, *, status: int | None) -> None:
        super().__init__(message)
        self.status = status


class CheckpointError(RubberbandError):
    """A checkpoint could not be written, or reads back damaged.

    Examples:
        >>> try:
        ...     result = rubberband.load_result("first")
        ... except rubberband.CheckpointError as error:
        ...     print(f"{error}; mount the store, then rubberband resume first")
    """


class CheckpointLostError(CheckpointError):
    """The store works, but this checkpoint is gone or damaged; trials go back to the one before."""


class StoreAwayError(CheckpointError):
    """The checkpoint store is missing, is not the earlier one, or cannot be written.

    No trial has failed: once the store is back, the experiment can be resumed.
    """


class JournalError(RubberbandError):
    """The journal could not be read or written.

    Examples:
        >>> try:
        ...     result = rubberband.load_result("first")
        ... except rubberband.JournalError as error:
        ...     print(f"{error}; rubberband restore FOLDER reads a backup")
    """


class DamagedJournalError(JournalError):
    """The journal is damaged: it was cut off, events are missing, or some are broken."""
