"""The kinds of trials: what an entry point may be, and what runs a segment of it.

A runner is named as `module:function`, so that only what a trial needs is imported. The function takes the entry point,
its target, the segment, and a list that gets what must be closed after the runner.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rubberband.executor.training.distributed import is_distributed
from rubberband.executor.training.torch_trial import TorchTrial
from rubberband.values.command import ProgramCommand

if TYPE_CHECKING:
    from rubberband.executor.training.entrypoint import Entrypoint
    from rubberband.executor.training.runner import Runner
    from rubberband.executor.training.segment import Segment

_TRAINING = "rubberband.executor.training"


@dataclass(frozen=True, slots=True)
class TrialKind:
    """One kind."""

    name: str
    """Name of the kind in what `check` says."""
    is_of: Callable[[Any], bool]
    """Whether a target that is of none of the kinds before is of this one."""
    runner: str

    def make_runner(self, entrypoint: Entrypoint, target: Any, segment: Segment, resources: list[Any]) -> Runner:
        """Make the trial for a segment; `resources` gets what must be closed after it, beside the runner itself."""
        runner: Runner = pkgutil.resolve_name(self.runner)(entrypoint, target, segment, resources)
        return runner


KINDS = (
    TrialKind("program", lambda target: isinstance(target, ProgramCommand), f"{_TRAINING}.programs.runner:make_runner"),
    TrialKind("function", is_distributed, f"{_TRAINING}.programs.functions:make_runner"),
    TrialKind("function", lambda target: not isinstance(target, type), f"{_TRAINING}.runner:make_function_runner"),
    TrialKind("TorchTrial", lambda target: issubclass(target, TorchTrial), f"{_TRAINING}.loop:make_runner"),
    TrialKind("Trial", lambda target: True, f"{_TRAINING}.runner:make_trial_runner"),
)


def kind_of(target: Any) -> TrialKind:
    """Return the kind of trial that an entry point's object is."""
    return next(kind for kind in KINDS if kind.is_of(target))
