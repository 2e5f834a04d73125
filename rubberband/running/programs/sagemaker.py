"""Reads SageMaker: the variables of a script in script mode, and a tuning job, as JSON or by `HyperparameterTuner`."""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rubberband.errors import InputError
from rubberband.running.first_file import MOST, TrialFindings, name_of
from rubberband.running.programs.options import program_of
from rubberband.running.programs.source import sources_of
from rubberband.running.programs.starters import seen_from
from rubberband.running.programs.written import EPOCHS, Schedule, flow, schedule_of, written
from rubberband.spec.fields import name_like
from rubberband.spec.samplers import grid_size
from rubberband.spec.space import Domain, choice, grid_search, lograndint, loguniform, randint, uniform
from rubberband.values.command import CHECKPOINT_PLACE, PLACES, ProgramCommand, line_of
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
_LOOK = {"checkpoint": "model", "gpus": "1", "args_json": "{}", "max_t": "1", "seed": "1"}
"""Places of variables while the program's parser is looked at."""


def variables_of(words: Sequence[str], folder: Path, inputs: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables of SageMaker that a program reads; `inputs`: channel -> where the job has its data.

    Raises InputError for a folder of data that is not known.
    """
    source = "\n".join(sources_of(words, folder))
    needed = set(re.findall(r"environ\s*\[\s*['\"](SM_\w+)['\"]\s*\]", source))
    if len(words) <= 2 or inputs:  # else its folders may be among the words
        needed |= set(re.findall(r"(?:environ\.get|getenv)\(\s*['\"](SM_CHANNEL_\w+)['\"]\s*\)", source))
    found = dict[str, str]()
    for name in dict.fromkeys(re.findall(r"['\"](SM_[A-Z]\w*)['\"]", source)):
        channels = sorted(re.findall(r"['\"]SM_CHANNEL_(\w+)['\"]", source))
        if name in os.environ:
            found[name] = os.environ[name]
        elif name in _VARIABLES:
            found[name] = _VARIABLES[name]
        elif name == "SM_CHANNELS":
            found[name] = json.dumps([channel.lower() for channel in dict.fromkeys(channels)])
        elif name.startswith("SM_HP_"):
            found[name] = f"${{{name.removeprefix('SM_HP_').lower()}}}"
        elif name in needed:
            channel = name.removeprefix("SM_CHANNEL_").lower()
            place = (inputs or {}).get(channel)
            raise InputError(
                f"the program reads {name}, {f'the folder of {place} here' if place else 'which is not set'}; run "
                f"`export {name}=…` with its value on the machines that train, and then init again"
            )
    if "/opt/ml/" in source and not found:
        raise InputError(
            "the program has folders of SageMaker's containers in its source (/opt/ml/…); let it read "
            'os.environ["SM_MODEL_DIR"] and os.environ["SM_CHANNEL_TRAINING"]'
        )
    return found


def looked_at(variables: Mapping[str, str]) -> Environment:
    """Return the variables as they are while a program's parser is looked at."""
    command = ProgramCommand(words=("look",))
    known = {name: "1" for value in variables.values() for name in re.findall(r"\$\{(\w+)\}", value)}
    return Environment(variables={name: command.filled(each, known, _LOOK) for name, each in variables.items()})


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
    strategy: str = "Bayesian"
    trials: int = 1
    stops: bool = False
    most: int | None = None
    """Hyperband's largest resource."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Channel -> the place of its data."""
    env: Mapping[str, str] = field(default_factory=dict)
    name: str = ""
    remarks: list[str] = field(default_factory=list)


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
    source = Path(text).read_text(encoding="utf-8-sig")
    job = _of_json(json.loads(source), text) if text.endswith(".json") else _of_python(ast.parse(source), text)
    script, folder = _script(job, text), path.absolute().parent
    epochs = next((name for name, value in job.static.items() if EPOCHS.fullmatch(name) and _whole(value)), "")
    places = {epochs: "${max_t}"} if epochs else {}
    most = int(job.static.get(epochs, 0)) or job.most
    words = ["python", script]
    for name in (*job.static, *job.ranges):
        option = f"--{name}" if len(name) > 1 else f"-{name}"
        words += [option, places.get(name) or (f"${{{_key(name)}}}" if name in job.ranges else str(job.static[name]))]
    env = {**variables_of(words, Path.cwd(), job.inputs), **job.env}
    space = {_key(name): domain for name, domain in job.ranges.items()}
    style = (
        "True/False" if any(isinstance(each, bool) for one in space.values() for each in one.options) else "true/false"
    )
    with looked_at(env).within():
        first = {name: domain.draw(0.5) for name, domain in space.items()}
        start = ProgramCommand(words=tuple(words), booleans=style).line(first, {"max_t": str(most or 1)})
        found = program_of(line_of(start), Path.cwd(), is_chosen=True)
    for before, word in zip(("", *found.words), found.words, strict=False):
        is_place = re.search(r"\$\{(checkpoint|max_t|seed)\}", word) and before.startswith("-") and "=" not in word
        if is_place and before not in words and not (before == "--model-dir" and "SM_MODEL_DIR" in env):
            words += [before, word]
    if not most:
        most = found.epochs or MOST
    if CHECKPOINT_PLACE not in "".join([*words, *env.values()]):
        job.remarks.append(
            'the program gets no folder for its checkpoints: let it save to os.environ["RUBBERBAND_CHECKPOINT"]'
        )
    schedule = _schedule(job, space, most)
    return TrialFindings(
        command=seen_from(folder, words),
        start=seen_from(folder, start),
        metrics=flow({"pattern": _pattern(job)}),
        booleans="" if style == "true/false" else style,
        name=name_like(job.name) or name_of(Path(script).stem, path),
        space={name: (written(domain), "") for name, domain in space.items()},
        metric=_group(job.metric),
        mode=job.mode,
        scheduler=schedule.line,
        sampler=_sampler(job),
        env=env,
        most=schedule.most,
        trials=schedule.trials,
        work=schedule.work,
        remarks=tuple(job.remarks),
    )


def _key(name: str) -> str:
    """Return a hyperparameter's name in the space: places have theirs."""
    return f"{name}_" if name in PLACES else name


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _script(job: _Job, text: str) -> str:
    places = (Path(job.program), Path(text).parent / job.program)
    script = next((place for place in places if place.is_file()), None)
    if script is None:
        raise InputError(f"{text}: its program {job.program} is not here; run init in the folder of the program")
    return os.path.relpath(script)


def _group(metric: str) -> str:
    """Return a metric's name as a group of a pattern."""
    name = re.sub(r"\W+", "_", metric).strip("_")
    return name if name[:1].isalpha() else f"metric_{name}"


def _pattern(job: _Job) -> str:
    """Return the regular expression of the objective, with a named group in place of its first group."""
    regex = job.regexes.get(job.metric)
    if regex is None:
        raise InputError(
            f"the objective {job.metric} has no metric definition, so an algorithm of SageMaker reports it; only a "
            "program of your own moves"
        )
    others = [name for name in job.regexes if name != job.metric]
    if others:
        job.remarks.append(
            f"metric definitions of {', '.join(others)} are left out: an iteration is a line of the objective"
        )
    at = next((each.start() for each in re.finditer(r"\\.|\[\]?[^\]]*\]|\((?!\?)", regex) if each[0] == "("), None)
    if at is None:
        return f"(?P<{_group(job.metric)}>{regex})"
    return f"{regex[:at]}(?P<{_group(job.metric)}>{regex[at + 1 :]}"


def _schedule(job: _Job, space: dict[str, Any], most: int) -> Schedule:
    if job.strategy == "Grid":
        for name, domain in space.items():
            space[name] = grid_search(domain.options) if domain.options else domain
        return schedule_of({"type": "none", "max_t": most}, trials=grid_size(space))
    if job.strategy == "Hyperband":
        return schedule_of({"type": "hyperband", "max_t": most, "reduction_factor": 3, "num_samples": job.trials})
    if job.stops:
        job.remarks.append("early stopping is asha here: trials are compared at rungs, and the better ones go on")
        return schedule_of({"type": "asha", "num_samples": job.trials, "max_t": most, "reduction_factor": 3})
    words = {"type": "none", "num_samples": job.trials, "max_t": most}
    return schedule_of(words, "Each trial trains once, to its end, as in the tuning job.")


def _sampler(job: _Job) -> str:
    samplers = {"Grid": "{type: grid}", "Random": "{type: random, seed: 1}", "Hyperband": "{type: random, seed: 1}"}
    return samplers.get(job.strategy, "{type: optuna, sampler: tpe, seed: 1}")


def _domain(name: str, kind: str, low: Any, high: Any, scaling: str, remarks: list[str]) -> Domain:
    """Return the domain of a range between two numbers."""
    number = int if kind == "Integer" else float
    try:
        low, high = number(low), number(high)
    except ValueError:
        raise InputError(f"hyperparameter {name}: {low} to {high} is no range; write numbers") from None
    if scaling == "ReverseLogarithmic":
        remarks.append(f"{name} is scaled by ReverseLogarithmic, which has no counterpart: it is uniform")
    is_log = scaling == "Logarithmic" or (scaling == "Auto" and low > 0 and high / low >= 100)
    if kind == "Integer":
        return lograndint(low, high + 1) if is_log else randint(low, high + 1)
    return loguniform(low, high) if is_log else uniform(low, high)


def _plain(text: Any) -> Any:
    """Return a hyperparameter, which a job keeps as a text of JSON or of the value."""
    with suppress(ValueError, TypeError):
        return json.loads(text)
    return text


def _of_json(job: Mapping[str, Any], text: str) -> _Job:
    """Read the request or the description of a tuning job."""
    config = job["HyperParameterTuningJobConfig"]
    definitions = job.get("TrainingJobDefinitions") or [job.get("TrainingJobDefinition")]
    if len(definitions) != 1 or not definitions[0]:
        raise InputError(f"{text} has {len(definitions)} training jobs, and one program is searched; keep one of them")
    training = definitions[0]
    static = {name: _plain(value) for name, value in (training.get("StaticHyperParameters") or {}).items()}
    if not isinstance(static.get("sagemaker_program"), str):
        raise InputError(f"{text} trains an algorithm or an image of SageMaker; only a program of your own moves")
    remarks, ranges = list[str](), dict[str, Any]()
    given = training.get("HyperParameterRanges") or config.get("ParameterRanges") or {}
    for kind in ("Integer", "Continuous"):
        for each in given.get(f"{kind}ParameterRanges") or ():
            bounds = (each["MinValue"], each["MaxValue"])
            ranges[each["Name"]] = _domain(each["Name"], kind, *bounds, each.get("ScalingType", "Auto"), remarks)
    for each in given.get("CategoricalParameterRanges") or ():
        ranges[each["Name"]] = choice([_plain(value) for value in each["Values"]])
    objective = training.get("TuningObjective") or config.get("HyperParameterTuningJobObjective") or {}
    hyperband = ((config.get("StrategyConfig") or {}).get("HyperbandStrategyConfig")) or {}
    definitions = (training.get("AlgorithmSpecification") or {}).get("MetricDefinitions") or []
    channels = {
        each["ChannelName"]: str((each.get("DataSource") or {}).get("S3DataSource", {}).get("S3Uri", "its data"))
        for each in training.get("InputDataConfig") or ()
    }
    remarks += _left_out(
        (training.get("ResourceConfig") or {}).get("InstanceType"),
        (config.get("ResourceLimits") or {}).get("MaxParallelTrainingJobs"),
        bool(training.get("EnableManagedSpotTraining")),
    )
    return _Job(
        program=static["sagemaker_program"],
        ranges=_searched(ranges, text),
        static={name: value for name, value in static.items() if not name.startswith(("sagemaker_", "_"))},
        metric=objective.get("MetricName", ""),
        mode="max" if objective.get("Type") == "Maximize" else "min",
        regexes={each["Name"]: each["Regex"] for each in definitions},
        strategy=config.get("Strategy", "Bayesian"),
        trials=int((config.get("ResourceLimits") or {}).get("MaxNumberOfTrainingJobs", 1)),
        stops=config.get("TrainingJobEarlyStoppingType") == "Auto",
        most=hyperband.get("MaxResource"),
        inputs=channels,
        env=training.get("Environment") or {},
        name=str(job.get("HyperParameterTuningJobName") or ""),
        remarks=remarks,
    )


def _searched(ranges: dict[str, Any], text: str) -> dict[str, Any]:
    if not ranges:
        raise InputError(f"{text} has no ranges of hyperparameters, so there is nothing to search; write some")
    return ranges


def _left_out(instance: Any, parallel: Any, spot: bool) -> list[str]:
    """Return remarks on a job's resources, which the file's own replace."""
    found = list[str]()
    if instance:
        found.append(
            f"the job's instances were {instance}: resources.instance_type: {str(instance).removeprefix('ml.')} on aws"
        )
    if parallel:
        found.append(f"{parallel} jobs ran at once: resources.max_instances limits that")
    if spot:
        found.append("the job used spot instances: resources.market: spot on aws")
    return found


# The Python of a tuner.

_POSITIONAL = ("estimator", "objective_metric_name", "hyperparameter_ranges", "metric_definitions", "strategy",
               "objective_type", "max_jobs", "max_parallel_jobs")  # fmt: skip


class _Unknown(Exception):
    """A value that the source does not say."""


def _of_python(tree: ast.Module, text: str) -> _Job:
    """Read the call of `HyperparameterTuner` in a file, and that of its estimator."""
    constants = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    call = next(node for node in ast.walk(tree) if _called(node) == "HyperparameterTuner")
    given = _arguments(call, _POSITIONAL)
    estimator = given.get("estimator")
    estimator = constants.get(estimator.id, estimator) if isinstance(estimator, ast.Name) else estimator
    made = _arguments(estimator, ()) if isinstance(estimator, ast.Call) else {}
    remarks = list[str]()

    def plain(node: ast.AST | None, default: Any, what: str) -> Any:
        try:
            return default if node is None else _value(node, constants, remarks)
        except _Unknown as unknown:
            raise InputError(
                f"{text}: {what} is {unknown}, which its source does not say; write it plainly, or give its JSON: "
                "aws sagemaker describe-hyper-parameter-tuning-job --hyper-parameter-tuning-job-name NAME > job.json"
            ) from None

    program = plain(made.get("entry_point"), None, "entry_point")
    if not isinstance(program, str):
        raise InputError(f"{text}: its estimator has no entry_point; only a program of your own moves")
    folder = plain(made.get("source_dir"), "", "source_dir")
    source = f"{folder}/{program}" if folder and "://" not in folder else program
    definitions = plain(given.get("metric_definitions", made.get("metric_definitions")), [], "metric_definitions")
    band = given.get("strategy_config")
    resource = (
        next((node for node in ast.walk(band) if _called(node) == "HyperbandStrategyConfig"), None) if band else None
    )
    most = _arguments(resource, ("max_resource", "min_resource")).get("max_resource") if resource else None
    instance = (
        plain(made.get("instance_type"), None, "instance_type")
        if isinstance(made.get("instance_type"), ast.Constant)
        else None
    )
    parallel = plain(given.get("max_parallel_jobs"), None, "max_parallel_jobs")
    spot = getattr(made.get("use_spot_instances"), "value", False)
    remarks += _left_out(instance, parallel, bool(spot))
    ranges = plain(given.get("hyperparameter_ranges"), {}, "hyperparameter_ranges")
    static = plain(made.get("hyperparameters"), {}, "hyperparameters")
    return _Job(
        program=source,
        ranges=_searched(ranges, text),
        static={name: value for name, value in static.items() if name not in ranges},
        metric=plain(given.get("objective_metric_name"), "", "objective_metric_name"),
        mode="max" if plain(given.get("objective_type"), "Maximize", "objective_type") == "Maximize" else "min",
        regexes={each["Name"]: each["Regex"] for each in definitions},
        strategy=plain(given.get("strategy"), "Bayesian", "strategy"),
        trials=int(plain(given.get("max_jobs"), 1, "max_jobs")),
        stops=plain(given.get("early_stopping_type"), "Off", "early_stopping_type") == "Auto",
        most=plain(most, None, "max_resource"),
        env=plain(made.get("environment"), {}, "environment"),
        remarks=remarks,
    )


def _called(node: ast.AST | None) -> str:
    function = node.func if isinstance(node, ast.Call) else None
    return str(getattr(function, "attr", getattr(function, "id", "")))


def _arguments(call: Any, names: Sequence[str]) -> dict[str, ast.expr]:
    return {**dict(zip(names, call.args, strict=False)), **{each.arg: each.value for each in call.keywords if each.arg}}


def _value(node: ast.AST, constants: Mapping[str, ast.AST], remarks: list[str]) -> Any:
    """Return the value of an expression of plain values, names of them and ranges. Raises _Unknown for others."""
    match node:
        case ast.Name(id=name) if name in constants:
            return _value(constants[name], {key: each for key, each in constants.items() if key != name}, remarks)
        case ast.Dict(keys=keys, values=values) if None not in keys:
            names = [_value(key, constants, remarks) for key in keys if key is not None]
            return {
                name: _range(str(name), each, constants, remarks)
                if _called(each).endswith("Parameter")
                else _value(each, constants, remarks)
                for name, each in zip(names, values, strict=True)
            }
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [_value(part, constants, remarks) for part in parts]
        case ast.Call() if _called(node) == "dict" and not node.args:
            return _value(
                ast.Dict([ast.Constant(each.arg) for each in node.keywords], [each.value for each in node.keywords]),
                constants,
                remarks,
            )
    with suppress(ValueError, SyntaxError, TypeError):
        return ast.literal_eval(node)
    raise _Unknown(ast.unparse(node))


def _range(name: str, call: ast.AST, constants: Mapping[str, ast.AST], remarks: list[str]) -> Domain:
    kind = _called(call).removesuffix("Parameter")
    given = _arguments(call, ("values",) if kind == "Categorical" else ("min_value", "max_value", "scaling_type"))
    words = {key: _value(each, constants, remarks) for key, each in given.items()}
    if kind == "Categorical":
        values = words["values"]
        return choice(values if isinstance(values, list) else [values])
    return _domain(name, kind, words["min_value"], words["max_value"], words.get("scaling_type", "Auto"), remarks)
