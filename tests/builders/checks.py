"""A check of a trial in this process, which `rubberband check` starts another one for."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from rubberband.executor import Entrypoint, Segment
from rubberband.executor.training.check_findings import CheckOrder, TrialCheck, TrialFault
from rubberband.executor.training.checking import StepwiseCheck
from rubberband.executor.training.comparing import Comparison
from tests.builders import segments, trials

SEGMENT = replace(segments.SEGMENT, max_iterations=6)


def checked_here(
    entrypoint: Entrypoint, segment: Segment, max_gpus: int = 1
) -> tuple[list[TrialFault], dict[str, Any]]:
    """The problems, and all that was found."""
    found = _found(CheckOrder(entrypoint=entrypoint, segment=segment, max_gpus=max_gpus))
    return [TrialFault(**problem) for problem in found["problems"]], found


def check_here(order: CheckOrder, **_: Any) -> TrialCheck:
    """In place of `check`, without its process and its limit."""
    found = _found(order)
    return TrialCheck(**{**found, "problems": [TrialFault(**problem) for problem in found["problems"]]})


def _found(order: CheckOrder) -> dict[str, Any]:
    answers = io.StringIO()
    StepwiseCheck(order, answers).run()
    found: dict[str, Any] = json.loads(answers.getvalue().splitlines()[-1])
    assert found["is_finished"]
    return found


def compared(name: str, *, is_gang: bool, segment: Segment = SEGMENT) -> tuple[list[str], list[str]]:
    """What is wrong with a trial of `tests.builders.trials` after a restart or on a gang, and the remarks."""
    entrypoint = Entrypoint.parse(name, [trials.FOLDER, Path.cwd()])
    entrypoint.load()
    comparison = Comparison(entrypoint, segment, is_gang=is_gang)
    try:
        found, remarks = comparison.run()
    finally:
        comparison.close()
    return [each.line for each in found], remarks
