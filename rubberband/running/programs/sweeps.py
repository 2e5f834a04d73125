"""Reads a sweep of Weights & Biases, `rubberband init sweep.yaml`: its program, its parameters and how it searches."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from rubberband.errors import InputError
from rubberband.running.first_file import MOST, TrialFindings, name_of
from rubberband.running.programs.options import ProgramFindings, program_of
from rubberband.running.programs.source import sources_of
from rubberband.running.programs.starters import seen_from
from rubberband.running.programs.written import EPOCHS, OUTPUT, Schedule, flow, schedule_of, written
from rubberband.spec.fields import name_like
from rubberband.spec.samplers import MAX_GRID, grid_size
from rubberband.spec.space import (
    Domain,
    choice,
    grid_search,
    loguniform,
    qlograndint,
    qloguniform,
    qrandint,
    qrandn,
    quniform,
    randint,
    randn,
    uniform,
)
from rubberband.units import shown
from rubberband.values.command import PLACES, ProgramCommand, launcher_of, line_of, script_of

_PAGE = "docs/wandb-sweeps"
_MACROS = {
    "${args}": "--{name}={value}",
    "${args_no_boolean_flags}": "--{name}={value}",
    "${args_no_hyphens}": "{name}={value}",
    "${args_no_equals}": "--{name} {value}",
    "${args_json}": "",
}
"""Words of a sweep that stand for all parameters -> what each is written as."""
_KNOWN = {"program", "command", "method", "metric", "parameters", "early_terminate", "run_cap", "name", "project"}
_KNOWN |= {"entity", "description"}
_TRIALS = 16
_PLACE = re.compile(r"\$\{(checkpoint|max_t|seed)\}")


def is_sweep(text: str) -> bool:
    """Whether the text names a sweep's file."""
    if not text.endswith((".yaml", ".yml", ".json")) or not Path(text).is_file():
        return False
    with suppress(yaml.YAMLError, UnicodeDecodeError, OSError):
        found = _read(Path(text))
        return isinstance(found, dict) and "parameters" in found and bool({"method", "program", "command"} & {*found})
    return False


class _Loader(yaml.SafeLoader):
    """Reads YAML as W&B does, and `1e-4` as the number that is meant."""


_Loader.yaml_implicit_resolvers = {first: [*each] for first, each in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+\Z"), list("-+.0123456789")
)


def _read(path: Path) -> Any:
    return yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)


def findings_of(text: str, path: Path) -> TrialFindings:
    """Read a sweep, and look at its program, for the file at `path`. Raises InputError for what has no counterpart."""
    sweep = _read(Path(text))
    if not isinstance(sweep["parameters"], dict) or not sweep["parameters"]:
        raise InputError(f"{text} has no parameters; write them below parameters:")
    remarks = [f"the sweep's {key} has no counterpart, and is left out" for key in sweep if key not in _KNOWN]
    space = _Space(sweep["parameters"], sweep.get("method"), remarks)
    words = _command(sweep, text, space, remarks)
    folder = path.absolute().parent
    first, places = _first(space.domains), {"max_t": str(space.epochs or 4), "checkpoint": "${checkpoint}"}

    def filled(words: Sequence[str]) -> list[str]:
        return ProgramCommand(words=tuple(words), booleans=space.style).line(first, places)

    start = filled(words)
    found = program_of(line_of(start), Path.cwd(), is_chosen=True)
    command = _with_places(words, start, found)
    source = "\n".join(sources_of(words, Path.cwd()))
    if "${checkpoint}" not in "".join(command) and not re.search("RUBBERBAND_CHECKPOINT|get_checkpoint", source):
        remarks.append(
            'the program gets no folder for its checkpoints: let it save to os.environ["RUBBERBAND_CHECKPOINT"], and '
            "load from there when it starts"
        )
    metric, mode, metrics = _metric(sweep, found, remarks)
    if _is_followed(words, source):
        if not metric:
            raise InputError("the sweep names no metric; write the one that wandb.log has: metric: {name: val_loss}")
        followed = _followed(metric, space)
        at = next(at for at, word in enumerate(words) if word == "-m" or word.endswith(".py"))
        command, start = [*words[:at], *followed, *command[at:]], filled([*words[:at], *followed, *words[at:]])
        metrics = "report # each log to W&B with the metric is an iteration"
    elif not any(name in "".join(words) for name in ("${", "{'")) and "RUBBERBAND_CONFIG" not in source:
        raise InputError(
            'command has no ${args}; write it, or let the program read json.loads(os.environ["RUBBERBAND_CONFIG"])'
        )
    schedule = _schedule(sweep, space, found.epochs, remarks)
    project = {key: str(sweep[key]) for key in ("project", "entity") if sweep.get(key)}
    track, env = _tracking(script_of(command), project, remarks)
    return TrialFindings(
        command=seen_from(folder, command),
        start=seen_from(folder, start),
        metrics=metrics,
        booleans="" if space.style == "true/false" else space.style,
        name=name_like(str(sweep.get("name") or "")) or name_of(Path(script_of(command) or "sweep").stem, path),
        space={name: (written(domain), space.comments.get(name, "")) for name, domain in space.domains.items()},
        metric=metric,
        mode=mode,
        scheduler=schedule.line,
        sampler=_sampler(sweep, space),
        env=env,
        track=track,
        most=schedule.most,
        trials=schedule.trials,
        work=schedule.work,
        remarks=tuple(remarks),
    )


# The parameters.


class _Space:
    """The parameters of a sweep: domains and constants by name, with a dot between those of a nested one."""

    def __init__(self, parameters: Mapping[str, Any], method: Any, remarks: list[str]) -> None:
        if method not in ("grid", "random", "bayes"):
            raise InputError(f"method: {shown(method)} is not grid, random or bayes; write one")
        self.domains: dict[str, Any] = {}
        self.comments: dict[str, str] = {}
        self.style = "true/false"
        """How booleans are written."""
        self.epochs = 0
        """The number of epochs, if it is a constant."""
        self.places: dict[str, str] = {}
        """Parameter -> the place that fills it."""
        self.tree = self._read(parameters, "", method == "grid", remarks)
        if not any(isinstance(domain, Domain) for domain in self.domains.values()):
            raise InputError(
                "parameters: all of them are constants, so there is nothing to search; give one some values"
            )

    def _read(self, parameters: Mapping[str, Any], within: str, is_grid: bool, remarks: list[str]) -> dict[str, Any]:
        """Read the parameters of one level; return name -> its name in the space, or those of a nested one."""
        tree = dict[str, Any]()
        for key, words in parameters.items():
            name = f"{within}{key}"
            if not isinstance(words, dict):
                raise InputError(f"parameters.{name}: {shown(words)} is no mapping; write {{value: {shown(words)}}}")
            if isinstance(words.get("parameters"), dict):
                tree[str(key)] = self._read(words["parameters"], f"{name}.", is_grid, remarks)
                continue
            try:
                domain = _domain(words, is_grid)
            except InputError as error:
                raise InputError(f"parameters.{name}: {error}") from None
            tree[str(key)] = name
            if not self._is_role(name, domain, within, remarks):
                if name in PLACES:
                    remarks.append(f"{name} is called {name}_ in the space: ${{{name}}} is {PLACES[name]}")
                    tree[str(key)] = name = f"{name}_"
                self.domains[name] = domain
            if words.get("probabilities"):
                remarks.append(f"{name} has probabilities, which are left out: each of its values is as likely")
        return tree

    def _is_role(self, name: str, domain: Any, within: str, remarks: list[str]) -> bool:
        """Whether a place fills a constant: the number of epochs, a folder that all trials would write into."""
        if within:
            return False
        if EPOCHS.fullmatch(name) and isinstance(domain, int) and not isinstance(domain, bool) and domain > 0:
            self.epochs, self.places[name] = domain, "${max_t}"
        elif OUTPUT.fullmatch(name) and isinstance(domain, str):
            self.places[name] = "${checkpoint}"
            remarks.append(f"{name} is ${{checkpoint}} now: all trials would write into {domain}")
        elif name in PLACES and _is_whole(domain):
            self.places[name] = str(domain)
        return name in self.places


def _domain(words: Mapping[str, Any], is_grid: bool) -> Any:
    """Return the domain, or the constant, of a parameter. Raises InputError for one without counterpart."""
    kind = words.get("distribution") or _kind(words)
    if kind == "constant":
        return _one(words["value"]) if "value" in words else _missing(kind, "value")
    if kind in ("categorical", "categorical_w_probabilities"):
        values = words["values"] if isinstance(words.get("values"), list) else _missing(kind, "values: [a, b]")
        return grid_search(values) if is_grid and len(values) > 1 else choice(values)
    if is_grid:
        return grid_search(_steps(kind, words))
    if kind in ("normal", "q_normal"):
        mean, sd = words.get("mu", 0.0), words.get("sigma", 1.0)
        return randn(mean, sd) if kind == "normal" else qrandn(mean, sd, words.get("q", 1))
    if kind not in _RANGES:
        raise InputError(f"distribution {kind} has no counterpart; write log_uniform_values or normal, or its values")
    low, high = _bounds(kind, words)
    if kind.removeprefix("q_") in ("log_uniform", "inv_log_uniform"):  # their bounds are exponents of e
        low, high = (math.exp(-high), math.exp(-low)) if kind.startswith("inv") else (math.exp(low), math.exp(high))
    return _RANGES[kind](low, high, words.get("q", 1))


def _kind(words: Mapping[str, Any]) -> str:
    """Return the distribution that W&B takes where none is named."""
    if "values" in words:
        return "categorical"
    if "min" in words or "max" in words:
        return "int_uniform" if all(_is_whole(words.get(key)) for key in ("min", "max")) else "uniform"
    return (
        "constant" if "value" in words else "normal" if {"mu", "sigma"} & {*words} else _missing("", "value or values")
    )


def _missing(kind: str, key: str) -> Any:
    raise InputError(f"has no {key}{f', which {kind} needs' if kind else ''}; write it")


def _one(value: Any) -> Any:
    return choice([value]) if isinstance(value, Mapping) else value


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _bounds(kind: str, words: Mapping[str, Any]) -> tuple[Any, Any]:
    for key in ("min", "max"):
        if not isinstance(words.get(key), int | float):
            raise InputError(f"{key}: {shown(words.get(key))} is no number, which {kind} needs; write one")
    return words["min"], words["max"]


def _whole_range(low: Any, high: Any, q: Any) -> Domain:
    return randint(math.ceil(low), math.floor(high) + 1)


def _stepped(low: Any, high: Any, q: Any) -> Domain:
    """Return multiples of q, which are whole numbers where q is one, as at W&B."""
    return qrandint(math.ceil(low), math.floor(high), q) if _is_whole(q) else quniform(low, high, q)


def _log_stepped(low: Any, high: Any, q: Any) -> Domain:
    if _is_whole(q):
        return qlograndint(max(1, math.ceil(low)), math.floor(high), q)
    return qloguniform(low, high, q)


_RANGES = {
    "uniform": lambda low, high, q: uniform(low, high),
    "int_uniform": _whole_range,
    "q_uniform": _stepped,
    "log_uniform": lambda low, high, q: loguniform(low, high),
    "log_uniform_values": lambda low, high, q: loguniform(low, high),
    "inv_log_uniform": lambda low, high, q: loguniform(low, high),
    "inv_log_uniform_values": lambda low, high, q: loguniform(low, high),
    "q_log_uniform": _log_stepped,
    "q_log_uniform_values": _log_stepped,
}
"""Distribution -> its domain, from the least to the largest value, with a step."""


def _steps(kind: str, words: Mapping[str, Any]) -> list[Any]:
    """Return the values of a range that has an end, which a grid walks."""
    step = words.get("q", 1)
    if kind not in ("int_uniform", "q_uniform"):
        raise InputError(f"a grid cannot walk {kind}; write its values, or method: random")
    low, high = _bounds(kind, words)
    if not (high - low) / step < MAX_GRID:
        raise InputError(f"a grid of more than {MAX_GRID:,} values is refused; raise q, or write method: random")
    return [step * number for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _first(domains: Mapping[str, Any]) -> dict[str, Any]:
    return {name: domain.draw(0.5) if isinstance(domain, Domain) else domain for name, domain in domains.items()}


# The command.


def _command(sweep: Mapping[str, Any], text: str, space: _Space, remarks: list[str]) -> list[str]:
    """Return the command as an experiment's: with its macros filled."""
    given = sweep.get("command") or ["${env}", "${interpreter}", "${program}", "${args}"]
    words = given.split() if isinstance(given, str) else [str(word) for word in given]
    program = _program(sweep, text) if "${program}" in words else ""
    macros = [word for word in words if word in _MACROS]
    if len(macros) > 1:
        raise InputError(f"command has {' and '.join(macros)}; keep one of them")
    space.style = _style(macros[0] if macros else "", space)
    command = list[str]()
    for word in words:
        if word == "${env}":
            continue
        if word in _MACROS:
            command += _parameters(word, space)
            continue
        word = word.replace("${interpreter}", "python").replace("${program}", program)
        word = re.sub(r"\$\{envvar:(\w+)\}", lambda match: _variable(match[1], remarks), word)
        if "${args_json_file}" in word:
            raise InputError(
                "command: ${args_json_file} has no counterpart; write ${args_json}, or let the program read "
                'json.loads(os.environ["RUBBERBAND_CONFIG"])'
            )
        word = word.replace("${", "$${")  # hydra's, such as ${now:%H}: an agent leaves them too
        command.append(word)
    if (launcher := launcher_of(command)) is not None:
        at = next((at for at, word in enumerate(command) if word.endswith(".py")), None)
        if at is None:
            raise InputError(f"command: {launcher} starts no script; write python SCRIPT.py")
        command = ["python", *command[at:]]
        remarks.append(f"{launcher} is not needed: each worker starts the command once, with torchrun's variables")
    return command


def _program(sweep: Mapping[str, Any], text: str) -> str:
    program = sweep.get("program")
    if not program:
        raise InputError(
            f"{text} names no program: its agent calls a function; write `program: train.py`, a script that takes the "
            f"parameters as --name=value ({_PAGE})"
        )
    beside = Path(text).parent / str(program)
    return str(program) if Path(str(program)).is_file() or not beside.is_file() else str(beside)


def _variable(name: str, remarks: list[str]) -> str:
    """Return the value of a variable that the command names, as it is here now."""
    if re.search(r"KEY|TOKEN|SECRET|PASS", name) or not os.environ.get(name):
        raise InputError(
            f"command: ${{envvar:{name}}} is filled when the file is written; run `export {name}=…` first, or let the "
            "program read the variable itself, with its name in resources.env or secrets"
        )
    remarks.append(f"${{envvar:{name}}} is {os.environ[name]} in the command, as it is here now")
    return os.environ[name]


def _style(macro: str, space: _Space) -> str:
    if macro == "${args_json}":
        return "true/false"
    if macro == "${args_no_boolean_flags}" and any(map(_is_boolean, space.domains.values())):
        for name, domain in space.domains.items():
            space.domains[name] = _texts(domain)
        return "flag"
    return "True/False" if any(map(_is_pythons, space.domains.values())) else "true/false"


def _values(domain: Any) -> Sequence[Any]:
    return domain.options if isinstance(domain, Domain) else (domain,)


def _is_boolean(domain: Any) -> bool:
    return any(isinstance(value, bool) for value in _values(domain))


def _is_pythons(domain: Any) -> bool:
    """Whether Python writes one of the values otherwise than JSON."""
    return any(value is None or isinstance(value, bool | list | Mapping) for value in _values(domain))


def _texts(domain: Any) -> Any:
    """Return a domain with null and lists as the texts that W&B writes for them, where booleans are flags."""

    def text(value: Any) -> Any:
        return str(value) if value is None or isinstance(value, list | Mapping) else value

    if not isinstance(domain, Domain):
        return text(domain)
    return Domain(domain.kind, {"values": [*map(text, domain.options)]}) if domain.options else domain


def _parameters(macro: str, space: _Space) -> list[str]:
    """Return the words for all parameters; those of a nested one are one word, as W&B writes it."""
    if macro == "${args_json}":
        is_plain = not space.places and all(name == each for name, each in space.tree.items())
        return [macro if is_plain else _literal(space.tree, space, is_json=True)]
    form = _MACROS[macro]
    words = [word for name, place in space.places.items() for word in _formed(form, name, place)]
    is_plain = all(name == each for name, each in space.tree.items())
    if is_plain and macro != "${args_no_equals}":
        return [*words, macro.replace("_no_boolean_flags", "")] if space.domains else words
    for name, each in space.tree.items():
        if name not in space.places:
            words += _formed(form, name, _literal(each, space) if isinstance(each, dict) else f"${{{each}}}")
    return words


def _formed(form: str, name: str, value: str) -> list[str]:
    return [part.format(name=name, value=value) for part in form.split(" ")]


def _literal(tree: Mapping[str, Any], space: _Space, *, is_json: bool = False) -> str:
    """Return a nested parameter as a literal of Python, or as JSON, with its values' places."""
    quote = '"' if is_json else "'"
    parts = list[str]()
    for name, each in tree.items():
        if isinstance(each, dict):
            value = _literal(each, space, is_json=is_json)
        elif each in space.places:
            place = space.places[each]
            value = f"{quote}{place}{quote}" if place == "${checkpoint}" else place
        else:
            texts = [isinstance(value, str) for value in _values(space.domains[each])]
            if any(texts) and not all(texts):
                raise InputError(f"parameters.{each}: its values are texts and others; write them as texts")
            if any(isinstance(value, str) and re.search(r"['\"\\]", value) for value in _values(space.domains[each])):
                raise InputError(f"parameters.{each}: a text with a quote is within another one; leave the quote out")
            value = f"{quote}${{{each}}}{quote}" if any(texts) else f"${{{each}}}"
        parts.append(f"{quote}{name}{quote}: {value}")
    return f"{{{', '.join(parts)}}}"


def _with_places(command: Sequence[str], start: Sequence[str], found: ProgramFindings) -> list[str]:
    """Return the command with the options that the program has for its checkpoint, its epochs and its seed."""
    words = list(command)
    for before, word in zip(("", *found.words), found.words, strict=False):
        if _PLACE.search(word) and word not in start:
            if before in words:
                words[words.index(before) + 1] = word
                continue
            flag, is_one_word, _ = word.partition("=")
            at = next((at for at, each in enumerate(words) if is_one_word and each.startswith(f"{flag}=")), None)
            if at is not None:
                words[at] = word
            else:
                words += [before, word] if before.startswith("-") and not is_one_word else [word]
    return words


def _is_followed(words: Sequence[str], source: str) -> bool:
    """Whether a script of Python logs to W&B, and has no other words for its parameters and its metric."""
    is_python = words[0].rpartition("/")[2].startswith("python")
    has_script = any(word.endswith(".py") or word == "-m" for word in words)
    is_ours = re.search(r"RUBBERBAND_CONFIG|rubberband\.report", source) is not None
    return is_python and has_script and "wandb" in source.lower() and not is_ours


def _followed(metric: str, space: _Space) -> list[str]:
    """Return the words before a script that fill its `wandb.config`, and report what it logs."""
    is_plain = not space.places and all(name == each for name, each in space.tree.items())
    values = "${args_json}" if is_plain else _literal(space.tree, space, is_json=space.style != "True/False")
    return ["-m", "rubberband.wandb_run", metric, values]


def _source(script: str | None) -> str:
    return Path(script).read_text("utf-8-sig", "replace") if script and Path(script).is_file() else ""


# How it searches.


def _metric(sweep: Mapping[str, Any], found: ProgramFindings, remarks: list[str]) -> tuple[str, str, str]:
    """Return the metric, its mode, and where it is; a look at a run finds what is empty."""
    words = sweep.get("metric") or {}
    if not isinstance(words, dict) or (words and not words.get("name")):
        raise InputError(f"metric: {shown(words)} has no name; write {{name: val_loss, goal: minimize}}")
    if words.get("target") is not None:
        remarks.append("metric.target has no counterpart, and is left out: all trials are trained")
    given = str(words.get("goal") or "minimize")
    goal = {"min": "minimize", "max": "maximize"}.get(given, given)
    if goal not in ("minimize", "maximize"):
        raise InputError(f"metric.goal: {shown(goal)} is neither minimize nor maximize; write one")
    mode = "max" if goal == "maximize" else "min"
    metrics = "report # rubberband.report({...})" if found.reports else "stdout"
    return str(words.get("name") or ""), (mode if words else ""), metrics


def _schedule(sweep: Mapping[str, Any], space: _Space, default: int | None, remarks: list[str]) -> Schedule:
    """Return the scheduler for the sweep's early termination, or one that stops no trial."""
    early, cap = sweep.get("early_terminate") or {}, sweep.get("run_cap")
    if early and early.get("type") != "hyperband":
        remarks.append(f"early_terminate: {shown(early.get('type'))} has no counterpart, and is left out")
        early = {}
    if sweep["method"] == "grid" and cap and cap < grid_size(space.domains):
        remarks.append(f"run_cap {cap} is less than the grid: {cap} of its configurations are drawn at random")
        for name, domain in space.domains.items():
            space.domains[name] = choice(domain.options) if isinstance(domain, Domain) else domain
    is_grid = any(isinstance(domain, Domain) and domain.kind == "grid" for domain in space.domains.values())
    trials = grid_size(space.domains) if is_grid else int(cap or _TRIALS)
    if not is_grid and not cap:
        remarks.append(f"the sweep has no run_cap, and would not end: num_samples is {trials}")
    most, size = _most(early, space, default, remarks), {} if is_grid else {"num_samples": trials}
    if not early:
        words = {"type": "none", **size, "max_t": most}
        return schedule_of(words, "Each trial trains once, to its end, as in the sweep.", trials=trials)
    eta = int(early.get("eta", 3))
    grace = early.get("min_iter") or max(1, int(early["max_iter"]) // eta ** int(early.get("s", 1)))
    kind = "asha" if sweep["method"] == "bayes" else "sha"
    words = {"type": kind, **size, "grace_period": min(int(grace), most), "max_t": most, "reduction_factor": eta}
    return schedule_of(words, "The sweep's early_terminate: trials are compared at its brackets.", trials=trials)


def _most(early: Mapping[str, Any], space: _Space, default: int | None, remarks: list[str]) -> int:
    """Return the iterations of a trial that trains to its end."""
    if early and not early.get("min_iter") and not early.get("max_iter"):
        raise InputError("early_terminate has neither min_iter nor max_iter; write one")
    if space.epochs:
        return space.epochs
    searched = [
        max(_values(domain))
        for name, domain in space.domains.items()
        if EPOCHS.fullmatch(name)
        and isinstance(domain, Domain)
        and domain.options
        and all(map(_is_whole, domain.options))
    ]
    if searched:
        remarks.append("the number of epochs is a parameter: a trial with fewer of them ends by itself")
        return int(searched[0])
    if most := default or early.get("max_iter"):
        return int(most)
    most = max(MOST, int(early.get("min_iter", 1)) * int(early.get("eta", 3)) ** 2)
    remarks.append(f"the sweep does not say how many iterations a trial has: max_t is {most}, and stops it then")
    return most


def _sampler(sweep: Mapping[str, Any], space: _Space) -> str:
    if any(isinstance(domain, Domain) and domain.kind == "grid" for domain in space.domains.values()):
        return "{type: grid}"
    return "{type: optuna, sampler: tpe, seed: 1}" if sweep["method"] == "bayes" else "{type: random, seed: 1}"


def _tracking(script: str | None, project: Mapping[str, str], remarks: list[str]) -> tuple[str, Mapping[str, str]]:
    """Return `track`, or the variables by which a program that logs to W&B itself keeps to the sweep's project."""
    if not project:
        return "", {}
    if "wandb" not in _source(script):
        return flow([{"type": "wandb", **project}]), {}
    remarks.append(f"its wandb.init makes a run of W&B at each start, in {project.get('project', 'its project')}")
    return "", {f"WANDB_{key.upper()}": value for key, value in project.items()}
