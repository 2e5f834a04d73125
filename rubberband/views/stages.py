"""Stages of a result in time and in words, for charts, tables and pages. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rubberband.executor.result.result import Result, StageResult


def stage_of(view: Mapping[str, Any]) -> StageResult:
    """Return a stage of the answer of `GET /v1/experiments/NAME`, which may have more than this version knows."""
    return StageResult(**{name: view[name] for name in StageResult.__dataclass_fields__ if name in view})


def cells(stage: StageResult) -> tuple[str, ...]:
    """Return the first cells of a stage's row: name, trials, iterations, instances held and planned, GPUs per trial."""
    held = "-" if stage.actual_s is None else stage.instances
    instances = f"{held} / {stage.planned_instances}"
    return stage.name, str(stage.trials), str(stage.iterations), instances, str(stage.gpus_per_trial)


def stage_spans(result: Result) -> Iterator[tuple[StageResult, float, float]]:
    """Iterate over the stages that have begun, with start and end (or now) in seconds from the start of the run.

    Between two of them is the time from a SYNC until a driver continued.
    """
    at_s = 0.0
    for stage in result.stages:
        if stage.actual_s is None:
            continue
        start_s = at_s if stage.start_s is None else stage.start_s
        at_s = start_s + stage.actual_s
        yield stage, start_s, at_s


def planned_spans(stages: Sequence[StageResult]) -> list[tuple[StageResult, float, float]]:
    """Return the stages with start and end by the first plan, in seconds from the start: those of a lane in a row."""
    ends_s, found = dict[int, float](), list[tuple[StageResult, float, float]]()
    for stage in stages:
        start_s = ends_s.get(stage.lane, 0.0)
        ends_s[stage.lane] = start_s + stage.planned_s
        found.append((stage, start_s, ends_s[stage.lane]))
    return found


def is_last_of_bracket(stages: Sequence[StageResult], stage: StageResult) -> bool:
    """Whether no stage of its bracket follows."""
    return stage.stage + 1 == len(stages) or stages[stage.stage + 1].bracket != stage.bracket
