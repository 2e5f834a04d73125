"""`rubberband estimate --compare-to`: what is different from an estimate that was saved before."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rubberband.errors import InputError, ProfileMissingError
from rubberband.spec.experiment import Experiment
from rubberband.values.plan import Distribution, Market, Plan, Prediction, StagePlan, StagePrediction
from rubberband.values.profile import Profile

# Plans and predictions as plain JSON values and back, for the journal and for plans that users write.
#
# What is written is read back equal. Unknown and missing keys are refused, with the place named.


Json = dict[str, Any]


def plan_to_json(plan: Plan) -> Json:
    """`{"stages": [{"instances": …, "gpus_per_trial": …, "market": …}, …]}`: what `plan_from_json` reads."""
    return {"stages": [asdict(choice) for choice in plan.stages]}


def plan_from_json(data: object) -> Plan:
    """The plan in `{"stages": [{"instances": …, "gpus_per_trial": …}, …]}`; a stage may name its market.

    Raises InputError if `data` is anything else; whether the plan fits a job is for `predict` to say.
    """
    stages = _keys(data, "the plan", ("stages",))["stages"]
    if not isinstance(stages, Sequence) or isinstance(stages, str):
        raise InputError("stages of the plan is not a list; write stages: [{instances: 4, gpus_per_trial: 1}, …]")
    return Plan(stages=tuple(_stage_plan(f"stage {index} of the plan", stage) for index, stage in enumerate(stages)))


def prediction_to_json(prediction: Prediction) -> Json:
    """The fields of a prediction under their own names; lists for tuples."""
    data = asdict(prediction)
    return data | {"stages": list(data["stages"]), "extrapolated": list(prediction.extrapolated)}


def prediction_from_json(data: object) -> Prediction:
    """The prediction that `prediction_to_json` wrote. Raises InputError if `data` is anything else."""
    values = _keys(data, "the prediction", tuple(field.name for field in fields(Prediction)))
    stage_names = tuple(field.name for field in fields(StagePrediction))
    stages = [
        _keys(stage, f"stage {index} of the prediction", stage_names) for index, stage in enumerate(values["stages"])
    ]
    return Prediction(
        jct_s=values["jct_s"],
        cost_usd=values["cost_usd"],
        stages=tuple(StagePrediction(**stage) for stage in stages),
        extrapolated=tuple(values["extrapolated"]),
        jct=_distribution(values["jct"]),
        cost=_distribution(values["cost"]),
        num_samples=values["num_samples"],
    )


def _distribution(data: object) -> Distribution | None:
    if data is None:
        return None
    return Distribution(**_keys(data, "a distribution", tuple(field.name for field in fields(Distribution))))


def _stage_plan(where: str, data: object) -> StagePlan:
    values = _keys(data, where, ("instances", "gpus_per_trial"), ("market",))
    market = values.setdefault("market", "on_demand")
    if market not in get_args(Market):
        raise InputError(f"{where} has market={market!r}; write one of {', '.join(get_args(Market))}")
    for name in ("instances", "gpus_per_trial"):
        value = values[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f"{where} has {name}={value!r}; write a whole number from 1 up")
    return StagePlan(**values)


def _keys(data: object, where: str, names: tuple[str, ...], optional: tuple[str, ...] = ()) -> Json:
    """`data` as a mapping with exactly these keys, and perhaps the `optional` ones."""
    if not isinstance(data, Mapping):
        raise InputError(f"{where} is {type(data).__name__}, not an object; it has the keys {', '.join(names)}")
    missing, unknown = set(names) - set(data), set(data) - set(names) - set(optional)
    if missing or unknown:
        what = f"lacks {min(missing)!r}" if missing else f"has the unknown key {min(map(str, unknown))!r}"
        raise InputError(f"{where} {what}; its keys are {', '.join((*names, *optional))}")
    return dict(data)


# What `rubberband estimate` reads besides the experiment file: its profile, and a plan of the user's.


MAX_BYTES = 64 << 20
"""Largest JSON file that is read."""


def profiles_of(experiment: Experiment, file: Path) -> Profile | dict[str, Profile]:
    """The experiment's profile, or instance type -> profile. Raises ProfileMissingError with the remedy."""
    remedy = f"measure one with `rubberband profile {file}`, or write profile: {{seconds_per_iteration: {{1: 60}}}}"
    try:
        profiles = experiment.loaded_profiles()
    except ProfileMissingError as error:
        raise ProfileMissingError(f"{str(error).partition(';')[0]}; {remedy}") from None
    if profiles is None:
        raise ProfileMissingError(f"{file} has no profile; {remedy}")
    return profiles


def read_plan(path: Path) -> Plan:
    """The plan that a user wrote. Raises InputError if the file holds none."""
    document = read_json(path, "a plan", 'write {"stages": [{"instances": 4, "gpus_per_trial": 1}]}')
    try:
        return plan_from_json(document)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def read_json(path: Path, what: str, remedy: str) -> Any:
    """What a JSON file holds. Raises InputError, with the remedy, if it cannot be read or is none."""
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path} cannot be read as {what} ({error.strerror}); give a readable file") from None
    if len(content) > MAX_BYTES:
        raise InputError(f"{path} is larger than {MAX_BYTES >> 20} MiB and cannot be {what}; {remedy}")
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise InputError(f"{path} is not a JSON file; {remedy}") from None


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
