"""The table of waits: until the first trial trains, and from each SYNC until the next stage trains, by cause."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rubberband.executor.result.parts import StageResult
from rubberband.executor.result.result import Result
from rubberband.units import duration
from rubberband.views.formatting import TextTable

_SHORTEST_S = 0.005
"""Parts below it are left out."""


def waits(result: Result) -> TextTable:
    """Return the waits of a run that noted those before its start; no rows for others."""
    return TextTable(
        title="Waits",
        header=("", "time", "causes"),
        rows=tuple((name, duration(sum(parts.values())), _parts(parts)) for name, parts in parts_of(result)),
        words=frozenset({0, 2}),
        notes=(
            "Until the first trial of a stage trains. Start of the trial: its set-up and data, and from stage 1 on its "
            "checkpoint.",
        ),
    )


def parts_of(result: Result) -> list[tuple[str, Mapping[str, float]]]:
    """Return the name of each wait, and its seconds by cause; nothing of a run that noted none before its start."""
    return [("before the run", result.waited_s), *_between(result)] if result.waited_s else []


def _parts(parts: Mapping[str, float]) -> str:
    shown = sorted(((cause, s) for cause, s in parts.items() if s >= _SHORTEST_S), key=lambda part: -part[1])
    return ", ".join(f"{cause} {duration(seconds)}" for cause, seconds in shown)


def _between(result: Result) -> Iterator[tuple[str, dict[str, float]]]:
    for stage in result.stages:
        trains = [each for each in result.busy if each.stage == stage.stage and each.training_s is not None]
        if trains and stage.start_s is not None:
            first = min(trains, key=lambda each: each.training_s or 0.0)
            assert first.training_s is not None
            parts = _until_assigned(result, stage, first.start_s)
            yield stage.title, parts | {"start of the trial": first.training_s - first.start_s}


def _until_assigned(result: Result, stage: StageResult, assigned_s: float) -> dict[str, float]:
    """Return the parts of the wait until the first trial had its workers."""
    assert stage.start_s is not None
    new = [
        (each.ready_s, each.running_s)
        for each in result.instances
        if each.running_s is not None and each.ready_s is not None and stage.start_s < each.ready_s <= assigned_s
    ]
    if not new or any(each.requested_s < stage.start_s and each.ready_s is None for each in result.instances):
        return {"plan and workers": max(0.0, assigned_s - stage.start_s)}
    ready_s, running_s = min(new)
    running_s = max(stage.start_s, running_s)
    return {
        "instances": running_s - stage.start_s,
        "workers": ready_s - running_s,
        "plan and workers": max(0.0, assigned_s - ready_s),
    }
