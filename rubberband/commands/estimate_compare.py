"""`rubberband estimate --compare-to`: what is different from an estimate that was saved before."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rubberband.commands.estimate_inputs import read_json
from rubberband.errors import InputError

_REMEDY = "save one with `rubberband estimate FILE -o json > FILE.json`"


class _Values(BaseModel):
    """Of a saved estimate only what is compared is read; the rest is let be."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class _Mean(_Values):
    mean: float


class _Prediction(_Values):
    jct_s: _Mean
    cost_usd: _Mean
    p_both: float | None = None


class SavedStage(_Values):
    """What two estimates may differ in of a stage."""

    stage: int
    bracket: int | None = None
    trials: int
    iterations: int
    instances: int
    gpus_per_trial: int
    instance_type: str
    market: str


class _Plan(_Values):
    stages: list[SavedStage]


class _Limits(_Values):
    deadline_s: float | None = None
    max_cost_usd: float | None = None
    confidence: float | None = None


class Saved(_Values):
    """An estimate as `-o json` prints it."""

    schema_name: str = Field(alias="schema", pattern="^rubberband.estimate/1$")
    experiment: str
    policy: str
    batch: str = "fixed"
    feasible: bool
    plan: _Plan | None
    prediction: _Prediction | None = None
    constraints: _Limits = Field(default_factory=_Limits)


def read_saved(path: Path) -> Saved:
    """The estimate in a file. Raises InputError if it holds none."""
    return saved(read_json(path, "an estimate", _REMEDY), path)


def saved(document: Any, path: Path | str = "the estimate") -> Saved:
    """The parts of an estimate's JSON object that are compared. Raises InputError if it is none."""
    try:
        return Saved.model_validate(document)
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(str(part) for part in fault["loc"])
        what = f"{where}: {fault['msg']}" if where else fault["msg"]
        raise InputError(f"{path} is not an estimate ({what}); {_REMEDY}") from None


def comparison(before: Saved, now: Saved) -> dict[str, Any]:
    """What is different now, as JSON values: figures before and now, and the limits and stages that changed."""
    return {
        "experiment": before.experiment,
        "policy": {"before": before.policy, "now": now.policy},
        "batch": {"before": before.batch, "now": now.batch},
        "feasible": {"before": before.feasible, "now": now.feasible},
        "jct_s": _figure(_mean(before, "jct_s"), _mean(now, "jct_s")),
        "cost_usd": _figure(_mean(before, "cost_usd"), _mean(now, "cost_usd")),
        "constraints": _changed(before.constraints.model_dump(), now.constraints.model_dump()),
        "stages": _stages(before, now),
    }


def _mean(estimate: Saved, name: str) -> float | None:
    if estimate.prediction is None:
        return None
    mean: _Mean = getattr(estimate.prediction, name)
    return mean.mean


def _figure(before: float | None, now: float | None) -> dict[str, float | None]:
    return {"before": before, "now": now, "change": None if before is None or now is None else now - before}


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    return {key: {"before": before.get(key), "now": now.get(key)} for key in keys}


def _stages(before: Saved, now: Saved) -> list[dict[str, Any]]:
    """A row for each stage that is new, gone, or different."""
    old, new = _numbered(before), _numbered(now)
    rows = []
    for key in sorted({*old, *new}):
        was, becomes = old.get(key), new.get(key)
        if was != becomes:
            place = {"stage": key[1]} if key[0] < 0 else {"bracket": key[0], "stage": key[1]}
            rows.append({**place, "before": _words(was), "now": _words(becomes)})
    return rows


def _numbered(estimate: Saved) -> dict[tuple[int, int], SavedStage]:
    stages = [] if estimate.plan is None else estimate.plan.stages
    return {(-1 if stage.bracket is None else stage.bracket, stage.stage): stage for stage in stages}


def _words(stage: SavedStage | None) -> dict[str, Any] | None:
    return None if stage is None else stage.model_dump(exclude={"stage", "bracket"})
