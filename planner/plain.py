"""Plans and predictions as plain JSON values and back, for the journal and for plans that users write.

What is written is read back equal. Unknown and missing keys are refused, with the place named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, get_args

from rubberband.errors import InputError
from rubberband.plan import Distribution, Market, Plan, Prediction, StagePlan, StagePrediction

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
