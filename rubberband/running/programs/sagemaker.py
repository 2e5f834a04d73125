"""Reads SageMaker: the variables of a script in script mode, and a tuning job, as JSON or by `HyperparameterTuner`."""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rubberband.errors import InputError
from rubberband.running.first_file import MOST, TrialFindings, name_of
from rubberband.running.programs.source import PlainSource, UnknownValue, arguments, called, sources_of
from rubberband.running.programs.starters import seen_from
from rubberband.running.programs.written import (
    EPOCHS,
    TO_THE_END,
    TPE,
    flow,
    folder_remarks,
    is_whole,
    looked_at,
    name_in_space,
    schedule_of,
    written,
)
from rubberband.spec.fields import name_like
from rubberband.spec.samplers import grid_size
from rubberband.spec.space import Domain, between, choice, grid_search
from rubberband.values.command import CHECKPOINT_PLACE, ProgramCommand
from rubberband.values.environment import Environment

_VARIABLES = {
    "SM_MODEL_DIR": CHECKPOINT_PLACE,
    "SM_OUTPUT_DATA_DIR": CHECKPOINT_PLACE,
    "SM_OUTPUT_DIR": CHECKPOINT_PLACE,
    "SM_OUTPUT_INTERMEDIATE_DIR": CHECKPOINT_PLACE,
    "SM_NUM_GPUS": "${gpus}",
    "SM_NUM_CPUS": str(os.cpu_count() or 1),
    "SM_NUM_NEURONS": "0",
    "SM_HOSTS": '["algo-1"]',
    "SM_CURRENT_HOST": "algo-1",
    "SM_MASTER_ADDR": "algo-1",
    "SM_HOST_COUNT": "1",
    "SM_NETWORK_INTERFACE_NAME": "lo",
    "SM_RESOURCE_CONFIG": '{"current_host": "algo-1", "hosts": ["algo-1"]}',
    "SM_HPS": "${args_json}",
    "SM_LOG_LEVEL": "20",
    "SM_FRAMEWORK_PARAMS": "{}",
    "SM_CURRENT_INSTANCE_TYPE": "local",
}
"""Variable of a container of SageMaker -> its value in a trial."""
_LOOK = {"checkpoint": "model", "gpus": "1", "workers": "1", "args_json": "{}", "max_t": "1", "seed": "1"}
"""Places of variables while the program's parser is looked at."""
_SAMPLERS = dict.fromkeys(("Random", "Hyperband"), "{type: random, seed: 1}") | {"Grid": "{type: grid}"}


def variables_of(words: Sequence[str], folder: Path, inputs: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables of SageMaker that a program reads; `inputs`: channel -> where the job has its data.

    Raises InputError for a folder of data that is not known.
    """
    source = "\n".join(sources_of(words, folder))
    needed = set(re.findall(r"environ\s*\[\s*['\"](SM_\w+)['\"]\s*\]", source))
    if len(words) <= 2 or inputs:  # else its folders may be among the words
        needed |= set(re.findall(r"(?:environ\.get|getenv)\(\s*['\"](SM_CHANNEL_\w+)['\"]\s*\)", source))
    names = dict.fromkeys(re.findall(r"['\"](SM_[A-Z]\w*)['\"]", source))
    channels = {name: name.removeprefix("SM_CHANNEL_").lower() for name in names if name.startswith("SM_CHANNEL_")}
    known = {
        **_VARIABLES,
        "SM_CHANNELS": json.dumps(sorted(channels.values())),
        **{name: f"${{{name.removeprefix('SM_HP_').lower()}}}" for name in names if name.startswith("SM_HP_")},
        **os.environ,
    }
    if lacking := next((name for name in names if name in needed and name not in known), None):
        place = (inputs or {}).get(channels.get(lacking, ""))
        raise InputError(
            f"the program reads {lacking}, {f'the folder of {place} here' if place else 'which is not set'}; run "
            f"`export {lacking}=…` with its value on the machines that train, and then init again"
        )
    found = {name: known[name] for name in names if name in known}
    if "/opt/ml/" in source and not found:
        raise InputError(
            "the program has folders of SageMaker's containers in its source (/opt/ml/…); let it read "
            'os.environ["SM_MODEL_DIR"] and os.environ["SM_CHANNEL_TRAINING"]'
        )
    return found


def looking_with(variables: Mapping[str, str]) -> AbstractContextManager[None]:
    """Set the variables as they are while a program's parser is looked at."""
    command = ProgramCommand(words=("look",))
    known = {name: "1" for value in variables.values() for name in re.findall(r"\$\{(\w+)\}", value)}
    return Environment(
        variables={name: command.filled(each, known, _LOOK) for name, each in variables.items()}
    ).within()


# A tuning job.


@dataclass(kw_only=True)
class _Job:
    """A tuning job."""

    program: str
    ranges: dict[str, Any]
    """Hyperparameter -> its domain."""
    static: dict[str, Any]
    metric: str
    mode: str
    regexes: Mapping[str, str]
    strategy: str
    trials: int
    stops: bool
    most: int | None
    """Hyperband's largest resource."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Channel -> the place of its data."""
    env: Mapping[str, str] = field(default_factory=dict)
    name: str = ""


def is_job(text: str) -> bool:
    """Whether the text names the JSON of a tuning job, or a file of Python with a `HyperparameterTuner`."""
    if not text.endswith((".json", ".py")) or not Path(text).is_file():
        return False
    with suppress(UnicodeDecodeError, OSError):
        source = Path(text).read_text(encoding="utf-8-sig")
        return ("HyperParameterTuningJobConfig" if text.endswith(".json") else "HyperparameterTuner(") in source
    return False


def findings_of(text: str, path: Path) -> TrialFindings:
    """Read a tuning job, and look at its program, for the file at `path`. Raises InputError without counterpart."""
    remarks = ["the job's instances are not read: write resources.instance_type, max_instances and market"]
    job = _of_json(text, remarks) if text.endswith(".json") else _of_python(text, remarks)
    if not job.ranges:
        raise InputError(f"{text} has no ranges of hyperparameters, so there is nothing to search; write some")
    script = next((each for each in (Path(job.program), Path(text).parent / job.program) if each.is_file()), None)
    if script is None:
        raise InputError(f"{text}: its program {job.program} is not here; run init in the folder of the program")
    epochs = next((name for name, value in job.static.items() if EPOCHS.fullmatch(name) and is_whole(value)), "")
    most = int(job.static.get(epochs, 0)) or job.most
    given = {name: str(value) for name, value in job.static.items()} | ({epochs: "${max_t}"} if epochs else {})
    words = ["python", os.path.relpath(script)]
    for name, value in (given | {name: f"${{{name_in_space(name)}}}" for name in job.ranges}).items():
        words += [f"--{name}" if len(name) > 1 else f"-{name}", value]
    env = {**variables_of(words, Path.cwd(), job.inputs), **job.env}
    space = {name_in_space(name): domain for name, domain in job.ranges.items()}
    is_pythons = any(isinstance(value, bool) for domain in space.values() for value in domain.options)
    with looking_with(env):
        command, found = looked_at(words, space, "True/False" if is_pythons else "true/false", most or 1)
    source = "\n".join(sources_of(words, Path.cwd()))
    remarks += folder_remarks([*command, *env.values()], source)
    schedule, metric, folder = _schedule(job, space, most or found.epochs or MOST), _group(job), path.absolute().parent
    return TrialFindings(
        command=seen_from(folder, command),
        start=seen_from(folder, found.start),
        metrics=flow({"pattern": _pattern(job, metric, remarks)}),
        booleans="True/False" if is_pythons else "",
        name=name_like(job.name) or name_of(script.stem, path),
        space=written(space),
        metric=metric,
        mode=job.mode,
        sampler=_SAMPLERS.get(job.strategy, TPE),
        env=env,
        remarks=tuple(remarks),
        **schedule,
    )


def _group(job: _Job) -> str:
    """Return the name of the objective as a group of a pattern."""
    name = re.sub(r"\W+", "_", job.metric).strip("_")
    return name if name[:1].isalpha() else f"metric_{name}"


def _pattern(job: _Job, group: str, remarks: list[str]) -> str:
    """Return the regular expression of the objective, with a named group in place of its first group."""
    regex = job.regexes.get(job.metric)
    if regex is None:
        raise InputError(
            f"the objective {job.metric} has no metric definition, so an algorithm of SageMaker reports it; only a "
            "program of your own moves"
        )
    if others := [name for name in job.regexes if name != job.metric]:
        remarks.append(
            f"metric definitions of {', '.join(others)} are left out: an iteration is a line of the objective"
        )
    at = next((each.start() for each in re.finditer(r"\\.|\[\]?[^\]]*\]|\((?!\?)", regex) if each[0] == "("), None)
    return f"(?P<{group}>{regex})" if at is None else f"{regex[:at]}(?P<{group}>{regex[at + 1 :]}"


def _schedule(job: _Job, space: dict[str, Any], most: int) -> dict[str, Any]:
    size = {"num_samples": job.trials, "max_t": most}
    if job.strategy == "Grid":
        space |= {name: grid_search(domain.options) for name, domain in space.items() if domain.options}
        return schedule_of({"type": "none", "max_t": most}, trials=grid_size(space))
    if job.strategy == "Hyperband":
        return schedule_of({"type": "hyperband", **size, "reduction_factor": 3})
    if job.stops:
        comment = "Early stopping: trials are compared at rungs, and the better ones go on."
        return schedule_of({"type": "asha", **size, "reduction_factor": 3}, comment)
    return schedule_of({"type": "none", **size}, TO_THE_END)


def _domain(name: str, kind: str, low: Any, high: Any, scaling: str, remarks: list[str]) -> Domain:
    """Return the domain of a range between two numbers."""
    try:
        low, high = (int(each) if kind == "Integer" else float(each) for each in (low, high))
    except ValueError:
        raise InputError(f"hyperparameter {name}: {low} to {high} is no range; write numbers") from None
    if scaling == "ReverseLogarithmic":
        remarks.append(f"{name} is scaled by ReverseLogarithmic, which has no counterpart: it is uniform")
    is_log = scaling == "Logarithmic" or (scaling == "Auto" and low > 0 and high / low >= 100)
    return between(low, high, whole=kind == "Integer", log=is_log)


def _plain(text: Any) -> Any:
    """Return a hyperparameter, which a job keeps as a text of JSON or of the value."""
    with suppress(ValueError, TypeError):
        return json.loads(text)
    return text


def _of_json(text: str, remarks: list[str]) -> _Job:
    """Read the request or the description of a tuning job."""
    job = json.loads(Path(text).read_text(encoding="utf-8-sig"))
    config = job["HyperParameterTuningJobConfig"]
    trainings = job.get("TrainingJobDefinitions") or [job.get("TrainingJobDefinition")]
    if len(trainings) != 1 or not trainings[0]:
        raise InputError(f"{text} has {len(trainings)} training jobs, and one program is searched; keep one of them")
    training = trainings[0]
    static = {name: _plain(value) for name, value in (training.get("StaticHyperParameters") or {}).items()}
    if not isinstance(static.get("sagemaker_program"), str):
        raise InputError(f"{text} trains an algorithm or an image of SageMaker; only a program of your own moves")
    given, ranges = training.get("HyperParameterRanges") or config.get("ParameterRanges") or {}, dict[str, Any]()
    for kind in ("Integer", "Continuous"):
        for each in given.get(f"{kind}ParameterRanges") or ():
            bounds = (each["MinValue"], each["MaxValue"])
            ranges[each["Name"]] = _domain(each["Name"], kind, *bounds, each.get("ScalingType", "Auto"), remarks)
    for each in given.get("CategoricalParameterRanges") or ():
        ranges[each["Name"]] = choice([_plain(value) for value in each["Values"]])
    objective = training.get("TuningObjective") or config.get("HyperParameterTuningJobObjective") or {}
    definitions = (training.get("AlgorithmSpecification") or {}).get("MetricDefinitions") or []
    return _Job(
        program=static["sagemaker_program"],
        ranges=ranges,
        static={name: value for name, value in static.items() if not name.startswith(("sagemaker_", "_"))},
        metric=objective.get("MetricName", ""),
        mode="max" if objective.get("Type") == "Maximize" else "min",
        regexes={each["Name"]: each["Regex"] for each in definitions},
        strategy=config.get("Strategy", "Bayesian"),
        trials=int((config.get("ResourceLimits") or {}).get("MaxNumberOfTrainingJobs", 1)),
        stops=config.get("TrainingJobEarlyStoppingType") == "Auto",
        most=((config.get("StrategyConfig") or {}).get("HyperbandStrategyConfig") or {}).get("MaxResource"),
        inputs={
            each["ChannelName"]: str((each.get("DataSource") or {}).get("S3DataSource", {}).get("S3Uri", "its data"))
            for each in training.get("InputDataConfig") or ()
        },
        env=training.get("Environment") or {},
        name=str(job.get("HyperParameterTuningJobName") or ""),
    )


_POSITIONAL = ("estimator", "objective_metric_name", "hyperparameter_ranges", "metric_definitions", "strategy",
               "objective_type", "max_jobs", "max_parallel_jobs")  # fmt: skip


def _of_python(text: str, remarks: list[str]) -> _Job:
    """Read the call of `HyperparameterTuner` in a file, and that of its estimator."""
    source = PlainSource(Path(text))
    tuner = arguments(source.calls("HyperparameterTuner")[0], _POSITIONAL)
    estimator = arguments(source.found(tuner.get("estimator")))
    band = next(iter(source.calls("HyperbandStrategyConfig")), None)
    given = {**estimator, **tuner, **arguments(band, ("max_resource", "min_resource"))}

    def range_of(name: str, call: ast.Call) -> Domain:
        kind = called(call).removesuffix("Parameter")
        names = ("values",) if kind == "Categorical" else ("min_value", "max_value", "scaling_type")
        words = {key: source.value(each) for key, each in arguments(call, names).items()}
        if kind == "Categorical":
            return choice(words["values"] if isinstance(words["values"], list) else [words["values"]])
        return _domain(name, kind, words["min_value"], words["max_value"], words.get("scaling_type", "Auto"), remarks)

    def plain(name: str, default: Any) -> Any:
        try:
            return source.value(given[name], range_of) if name in given else default
        except UnknownValue as unknown:
            raise InputError(
                f"{text}: {name} is {unknown}, which its source does not say; write it plainly, or give its JSON: "
                "aws sagemaker describe-hyper-parameter-tuning-job --hyper-parameter-tuning-job-name NAME > job.json"
            ) from None

    program, folder, ranges = plain("entry_point", None), plain("source_dir", ""), plain("hyperparameter_ranges", {})
    if not isinstance(program, str):
        raise InputError(f"{text}: its estimator has no entry_point; only a program of your own moves")
    return _Job(
        program=f"{folder}/{program}" if folder and "://" not in folder else program,
        ranges=ranges,
        static={name: value for name, value in plain("hyperparameters", {}).items() if name not in ranges},
        metric=plain("objective_metric_name", ""),
        mode="max" if plain("objective_type", "Maximize") == "Maximize" else "min",
        regexes={each["Name"]: each["Regex"] for each in plain("metric_definitions", [])},
        strategy=plain("strategy", "Bayesian"),
        trials=int(plain("max_jobs", 1)),
        stops=plain("early_stopping_type", "Off") == "Auto",
        most=plain("max_resource", None),
        env=plain("environment", {}),
    )
