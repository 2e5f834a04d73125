"""Plans that users write, saved estimates, and the differences between two estimates, for `rubberband estimate`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rubberband.errors import InputError, ProfileMissingError
from rubberband.spec.experiment import Experiment
from rubberband.units import counted, format_duration, format_usd
from rubberband.values.plan import Market, Plan, StagePlan
from rubberband.values.profile import Profile
from rubberband.views.tables import Row, TextTable
from rubberband.views.words import difference


def plan_from_json(data: object) -> Plan:
    """Return the plan in `{"stages": [{"instances": …, "gpus_per_trial": …}, …]}`; a stage may name its market.

    Raises InputError if `data` is anything else. `predict` checks whether the plan fits a job.
    """
    stages = _keys(data, "the plan", ("stages",))["stages"]
    if not isinstance(stages, Sequence) or isinstance(stages, str):
        raise InputError("stages of the plan is not a list; write stages: [{instances: 4, gpus_per_trial: 1}, …]")
    return Plan(stages=tuple(_stage_plan(f"stage {index} of the plan", stage) for index, stage in enumerate(stages)))


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


def _keys(data: object, where: str, names: tuple[str, ...], optional: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return `data` as a mapping with these keys, and possibly the `optional` ones. Raises InputError otherwise."""
    if not isinstance(data, Mapping):
        raise InputError(f"{where} is {type(data).__name__}, not an object; it has the keys {', '.join(names)}")
    missing, unknown = set(names) - set(data), set(data) - set(names) - set(optional)
    if missing or unknown:
        what = f"lacks {min(missing)!r}" if missing else f"has the unknown key {min(map(str, unknown))!r}"
        raise InputError(f"{where} {what}; its keys are {', '.join((*names, *optional))}")
    return dict(data)


MAX_BYTES = 64 << 20
"""Size limit of a JSON file."""


def profiles_of(experiment: Experiment, file: Path, overrides: Sequence[str] = ()) -> Profile | dict[str, Profile]:
    """Return the experiment's profile, or instance type -> profile. Raises ProfileMissingError with the remedy."""
    remedy = f"measure one with `rubberband profile {file}`, or write profile: {{seconds_per_iteration: {{1: 60}}}}"
    from rubberband.app.kept import profiles_to_plan
    from rubberband.executor.training.entrypoint import Entrypoint
    from rubberband.installation import default_home
    from rubberband.spec.loading import default_profile_path, names_no_profile

    entrypoint = None
    if isinstance(experiment.entrypoint, str):
        entrypoint = Entrypoint.parse(experiment.entrypoint, search_path=(file.absolute().parent, Path.cwd()))
    try:
        home = default_home()
    except InputError:  # this user has no home
        home = None
    found_at = default_profile_path(file) if names_no_profile(file, overrides) else None
    try:
        found = profiles_to_plan(experiment, entrypoint, home, found_at, lambda line: print(line, file=sys.stderr))
    except ProfileMissingError as error:
        raise ProfileMissingError(f"{str(error).partition(';')[0]}; {remedy}") from None
    if found is None:
        raise ProfileMissingError(f"{file} has no profile; {remedy}")
    return found


def read_plan(path: Path) -> Plan:
    """Return the plan in a file of the user's. Raises InputError if it has none."""
    document = read_json(path, "a plan", 'write {"stages": [{"instances": 4, "gpus_per_trial": 1}]}')
    try:
        return plan_from_json(document)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def read_json(path: Path, what: str, remedy: str) -> Any:
    """Return the contents of a JSON file. Raises InputError, with the remedy, if it cannot be read as JSON."""
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
    """Base of the models of a saved estimate; only the values to compare are read."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class _Mean(_Values):
    mean: float


class _Prediction(_Values):
    jct_s: _Mean
    cost_usd: _Mean
    p_both: float | None = None


class SavedStage(_Values):
    """Stage of a saved estimate."""

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
    """Estimate as `-o json` prints it."""

    schema_name: str = Field(alias="schema", pattern="^rubberband.estimate/1$")
    experiment: str
    policy: str
    batch: str = "fixed"
    feasible: bool
    plan: _Plan | None
    prediction: _Prediction | None = None
    constraints: _Limits = Field(default_factory=_Limits)


def read_saved(path: Path) -> Saved:
    """Return the estimate in a file. Raises InputError if it has none."""
    return saved(read_json(path, "an estimate", _REMEDY), path)


def saved(document: Any, path: Path | str = "the estimate") -> Saved:
    """Return the values to compare of an estimate's JSON. Raises InputError if it is not an estimate."""
    try:
        return Saved.model_validate(document)
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(str(part) for part in fault["loc"])
        what = f"{where}: {fault['msg']}" if where else fault["msg"]
        raise InputError(f"{path} is not an estimate ({what}); {_REMEDY}") from None


def comparison(before: Saved, now: Saved) -> dict[str, Any]:
    """Return the differences as JSON values: figures before and now, and the limits and stages that changed."""
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
    """Return a row for each stage that is new, gone, or different."""
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


_LIMITS = {"deadline_s": "deadline", "max_cost_usd": "budget", "confidence": "confidence"}


def difference_table(compared: Mapping[str, Any], source: str) -> TextTable:
    """Return a row for each difference; `source` names the saved estimate."""
    rows: list[Row] = [_figure_row(compared, "jct_s", "time"), _figure_row(compared, "cost_usd", "cost")]
    for name in ("policy", "batch", "feasible"):
        before, now = compared[name]["before"], compared[name]["now"]
        if before != now:
            rows.append(("within the limits" if name == "feasible" else name, _yes(before), _yes(now), ""))
    for name, pair in compared["constraints"].items():
        rows.append((_LIMITS[name], _limit(name, pair["before"]), _limit(name, pair["now"]), ""))
    for stage in compared["stages"]:
        place = f"stage {stage['stage']}"
        place = f"bracket {stage['bracket']}, {place}" if "bracket" in stage else place
        rows.append((place, *_pair(stage["before"], stage["now"]), ""))
    notes = () if compared["stages"] else ("The plan is the same.",)
    return TextTable(
        title=f"Compared to {source} ({compared['experiment']})",
        header=("", "before", "now", "change"),
        rows=tuple(rows),
        words=frozenset({0, 1, 2}),
        notes=notes,
    )


def _figure_row(compared: Mapping[str, Any], key: str, name: str) -> Row:
    before, now, change = (compared[key][word] for word in ("before", "now", "change"))
    shown = format_duration if key == "jct_s" else format_usd
    words = tuple("no plan" if value is None else shown(value) for value in (before, now))
    if change is None:
        return (name, *words, "")
    share = difference(now, before)
    signed = "" if abs(change) < 1e-9 else f"{'+' if change > 0 else '-'}{shown(abs(change))}"
    return (name, *words, f"{signed} ({share})" if signed and share else signed or "0")


def _yes(value: object) -> str:
    return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def _limit(name: str, value: float | None) -> str:
    if value is None:
        return "none"
    if name == "deadline_s":
        return format_duration(value)
    return format_usd(value) if name == "max_cost_usd" else f"{value:g}"


def _pair(before: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> tuple[str, str]:
    """Return both stages in words; trials, iterations, type and market only if they differ."""
    pairs = (before, now)
    keys = ["instances", "gpus_per_trial"]
    if before is not None and now is not None:
        keys += [key for key in ("trials", "iterations", "instance_type", "market") if before[key] != now[key]]
    first, second = ("not there" if stage is None else _stage_words(stage, keys) for stage in pairs)
    return first, second


def _stage_words(stage: Mapping[str, Any], keys: list[str]) -> str:
    words = [f"{counted(stage['instances'], 'instance')}, {counted(stage['gpus_per_trial'], 'GPU')} per trial"]
    words += [f"{stage[key]} {key}" for key in ("trials", "iterations") if key in keys]
    words += [str(stage[key]).replace("_", " ") for key in ("instance_type", "market") if key in keys]
    return ", ".join(words)
