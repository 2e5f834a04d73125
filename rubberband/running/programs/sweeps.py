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
from rubberband.running.programs.source import sources_of
from rubberband.running.programs.starters import seen_from, without_launcher
from rubberband.running.programs.written import (
    EPOCHS,
    TO_THE_END,
    TPE,
    TRIALS,
    filled,
    flow,
    folder_remarks,
    is_whole,
    looked_at,
    name_in_space,
    schedule_of,
    written,
)
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
from rubberband.values.command import PLACES, launcher_of, script_of

_MACROS = {
    "${args}": "--{name}={value}",
    "${args_no_boolean_flags}": "--{name}={value}",
    "${args_no_hyphens}": "{name}={value}",
    "${args_no_equals}": "--{name} {value}",
    "${args_json}": "",
}
"""Words of a sweep that stand for all parameters -> the form of one."""
_KNOWN = {"program", "command", "method", "metric", "parameters", "early_terminate", "run_cap", "name", "project"}
_KNOWN |= {"entity", "description"}
_OUTPUT = re.compile(
    r"(.*[._-])?((out|output|save|work|log|ckpt|checkpoint)s?[_-]?(dir|folder|path)|out|outf|output|workdir)",
    re.IGNORECASE,
)
"""Names of parameters with the folder into which a trial writes."""


def is_sweep(text: str) -> bool:
    """Whether the text names a sweep's file."""
    if not text.endswith((".yaml", ".yml", ".json")) or not Path(text).is_file():
        return False
    with suppress(yaml.YAMLError, UnicodeDecodeError, OSError):
        found = _read(text)
        return isinstance(found, dict) and "parameters" in found and bool({"method", "program", "command"} & {*found})
    return False


class _Loader(yaml.SafeLoader):
    """Reads YAML as W&B does, and `1e-4` as the number that is meant."""


_Loader.yaml_implicit_resolvers = {first: [*each] for first, each in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+\Z"), list("-+.0123456789")
)


def _read(file: str) -> Any:
    return yaml.load(Path(file).read_text(encoding="utf-8"), Loader=_Loader)


def findings_of(text: str, path: Path) -> TrialFindings:
    """Read a sweep, and look at its program, for the file at `path`. Raises InputError for what has no counterpart."""
    sweep = _read(text)
    remarks = [f"the sweep's {key} has no counterpart, and is left out" for key in sweep if key not in _KNOWN]
    space = _Space(sweep, remarks)
    words = _command(sweep, text, space, remarks)
    given = (space.domains, space.booleans, space.epochs or 4)
    command, found = looked_at(words, *given)
    start, source = list(found.start), "\n".join(sources_of(words, Path.cwd()))
    remarks += folder_remarks(command, source)
    metric, mode = _metric(sweep, remarks)
    metrics = "report # rubberband.report({...})" if found.reports else "stdout"
    if _is_followed(words, source):
        if not metric:
            raise InputError("the sweep names no metric; write the one that wandb.log has: metric: {name: val_loss}")
        at = next(at for at, word in enumerate(words) if word == "-m" or word.endswith(".py"))
        followed = ["-m", "rubberband.wandb_run", metric, space.literal(is_json=space.booleans != "True/False")]
        command[at:at], start[at:at] = followed, filled(followed, *given)
        metrics = "report # each log to W&B with the metric is an iteration"
    elif not any(name in "".join(words) for name in ("${", "{'")) and "RUBBERBAND_CONFIG" not in source:
        raise InputError(
            'command has no ${args}; write it, or let the program read json.loads(os.environ["RUBBERBAND_CONFIG"])'
        )
    schedule = _schedule(sweep, space, found.epochs, remarks)
    project = {key: str(sweep[key]) for key in ("project", "entity") if sweep.get(key)}
    has_runs = "wandb" in source
    if project and has_runs:
        remarks.append(f"its wandb.init makes a run of W&B at each start, in {project.get('project', 'its project')}")
    folder, is_grid = path.absolute().parent, space.grid > 0
    learning = TPE if sweep["method"] == "bayes" else "{type: random, seed: 1}"
    return TrialFindings(
        command=seen_from(folder, command),
        start=seen_from(folder, start),
        metrics=metrics,
        booleans="" if space.booleans == "true/false" else space.booleans,
        name=name_like(str(sweep.get("name") or "")) or name_of(Path(script_of(command) or "sweep").stem, path),
        space=written(space.domains),
        metric=metric,
        mode=mode,
        sampler="{type: grid}" if is_grid else learning,
        env={f"WANDB_{key.upper()}": value for key, value in project.items()} if has_runs else {},
        track=flow([{"type": "wandb", **project}]) if project and not has_runs else "",
        remarks=tuple(remarks),
        **schedule,
    )


# The parameters.


class _Space:
    """The parameters of a sweep: domains and constants by name, with a dot between those of a nested one."""

    def __init__(self, sweep: Mapping[str, Any], remarks: list[str]) -> None:
        method, parameters = sweep.get("method"), sweep["parameters"]
        if method not in ("grid", "random", "bayes"):
            raise InputError(f"method: {shown(method)} is not grid, random or bayes; write one")
        if not isinstance(parameters, dict) or not parameters:
            raise InputError("the sweep has no parameters; write them below parameters:")
        self.domains: dict[str, Any] = {}
        self.booleans = "true/false"
        """How booleans are written."""
        self.epochs = 0
        """The number of epochs, if it is a constant."""
        self.places: dict[str, str] = {}
        """Parameter -> the place that fills it."""
        self._is_grid, self._remarks = method == "grid", remarks
        self.tree = self._read(parameters, "")
        """Parameter -> its name in `domains` or `places`, or those of a nested one."""
        if not any(isinstance(domain, Domain) for domain in self.domains.values()):
            raise InputError(
                "parameters: all of them are constants, so there is nothing to search; give one some values"
            )

    @property
    def grid(self) -> int:
        """The number of configurations of a grid; 0 where none is walked."""
        is_grid = any(isinstance(domain, Domain) and domain.kind == "grid" for domain in self.domains.values())
        return grid_size(self.domains) if is_grid else 0

    @property
    def is_plain(self) -> bool:
        """Whether each parameter is in the space under its own name."""
        return not self.places and all(name == each for name, each in self.tree.items())

    def _read(self, parameters: Mapping[str, Any], within: str) -> dict[str, Any]:
        tree = dict[str, Any]()
        for key, words in parameters.items():
            name = f"{within}{key}"
            if not isinstance(words, dict):
                raise InputError(f"parameters.{name}: {shown(words)} is no mapping; write {{value: {shown(words)}}}")
            if isinstance(words.get("parameters"), dict):
                tree[str(key)] = self._read(words["parameters"], f"{name}.")
                continue
            try:
                domain = _domain(words, self._is_grid)
            except InputError as error:
                raise InputError(f"parameters.{name}: {error}") from None
            tree[str(key)] = name
            if within or not self._is_place(name, domain):
                tree[str(key)] = name_in_space(name)
                self.domains[name_in_space(name)] = domain
                if name in PLACES:
                    self._remarks.append(f"{name} is called {name}_ in the space: ${{{name}}} is {PLACES[name]}")
            if words.get("probabilities"):
                self._remarks.append(f"{name} has probabilities, which are left out: each of its values is as likely")
        return tree

    def _is_place(self, name: str, domain: Any) -> bool:
        """Whether a place fills a constant: the number of epochs, a folder that all trials would write into."""
        if EPOCHS.fullmatch(name) and is_whole(domain) and domain > 0:
            self.epochs, self.places[name] = domain, "${max_t}"
        elif _OUTPUT.fullmatch(name) and isinstance(domain, str):
            self.places[name] = "${checkpoint}"
            self._remarks.append(f"{name} is ${{checkpoint}} now: all trials would write into {domain}")
        elif name in PLACES and is_whole(domain):
            self.places[name] = str(domain)
        return name in self.places

    def words(self, macro: str) -> list[str]:
        """Return the words that a macro stands for; a nested parameter is one word, as W&B writes it."""
        if macro == "${args_json}":
            return [self.literal(is_json=True)]
        if macro == "${args_no_boolean_flags}":
            if any(isinstance(value, bool) for domain in self.domains.values() for value in _values(domain)):
                self.domains = {name: _texts(domain) for name, domain in self.domains.items()}
                self.booleans = "flag"
            macro = "${args}"
        form = _MACROS[macro].split(" ")
        values = {name: self._value(each) for name, each in self.tree.items()}
        is_short = macro != "${args_no_equals}" and all(
            name == each for name, each in self.tree.items() if name not in self.places
        )
        if is_short:
            values = {name: values[name] for name in self.places}
        words = [part.format(name=name, value=value) for name, value in values.items() for part in form]
        return [*words, macro] if is_short and self.domains else words

    def _value(self, each: Any) -> str:
        """Return the word of a parameter's value: a place, or a literal of Python for a nested one."""
        return self.literal(each) if isinstance(each, dict) else self.places.get(each, f"${{{each}}}")

    def literal(self, tree: Mapping[str, Any] | None = None, *, is_json: bool = False) -> str:
        """Return parameters, without a `tree` all of them, as a literal of Python or as JSON, with places in it."""
        if tree is None and self.is_plain:
            return "${args_json}"
        quote, parts = '"' if is_json else "'", list[str]()
        for name, each in (self.tree if tree is None else tree).items():
            value = self.literal(each, is_json=is_json) if isinstance(each, dict) else self._value(each)
            texts = (
                [value] if value == "${checkpoint}" else () if value != f"${{{each}}}" else _values(self.domains[each])
            )
            if any(isinstance(text, str) for text in texts):
                value = f"{quote}{value}{quote}"
                if not all(isinstance(text, str) and not re.search(r"['\"\\]", text) for text in texts):
                    raise InputError(
                        f"parameters.{each}: its values are texts and others, or have quotes; write plain texts"
                    )
            parts.append(f"{quote}{name}{quote}: {value}")
        return f"{{{', '.join(parts)}}}"


def _values(domain: Any) -> Sequence[Any]:
    return domain.options if isinstance(domain, Domain) else (domain,)


def _texts(domain: Any) -> Any:
    """Return a domain with null and lists as the texts that W&B writes for them, where booleans are flags."""
    texts = [str(value) if value is None or isinstance(value, list | Mapping) else value for value in _values(domain)]
    if not isinstance(domain, Domain):
        return texts[0]
    return Domain(domain.kind, {"values": texts}) if texts else domain


def _domain(words: Mapping[str, Any], is_grid: bool) -> Any:
    """Return the domain, or the constant, of a parameter. Raises InputError for one without counterpart."""
    kind = str(words.get("distribution") or _kind(words))
    if kind == "constant":
        value = _given(words, "value", kind)
        return choice([value]) if isinstance(value, Mapping) else value
    if kind in ("categorical", "categorical_w_probabilities"):
        values = _given(words, "values", kind, list)
        return grid_search(values) if is_grid and len(values) > 1 else choice(values)
    q, is_log = words.get("q", 1), "log_" in kind
    if is_grid:
        return grid_search(_steps(kind, words, q))
    if kind in ("normal", "q_normal"):
        mean, sd = words.get("mu", 0.0), words.get("sigma", 1.0)
        return randn(mean, sd) if kind == "normal" else qrandn(mean, sd, q)
    if not re.fullmatch(r"(q_)?uniform|int_uniform|(q_|inv_)?log_uniform(_values)?", kind):
        raise InputError(f"distribution {kind} has no counterpart; write log_uniform_values or normal, or its values")
    low, high = (_given(words, key, kind, int | float) for key in ("min", "max"))
    if kind.endswith("log_uniform"):  # the bounds are exponents of e
        low, high = (math.exp(-high), math.exp(-low)) if kind.startswith("inv") else (math.exp(low), math.exp(high))
    if kind == "int_uniform":
        return randint(math.ceil(low), math.floor(high) + 1)
    if not kind.startswith("q_"):
        return (loguniform if is_log else uniform)(low, high)
    if not is_whole(q):
        return (qloguniform if is_log else quniform)(low, high, q)
    low, high = math.ceil(low), math.floor(high)
    return qlograndint(max(1, low), high, q) if is_log else qrandint(low, high, q)


def _kind(words: Mapping[str, Any]) -> str:
    """Return the distribution that W&B takes where none is named."""
    if "values" not in words and {"min", "max"} & {*words}:
        return "int_uniform" if is_whole(words.get("min")) and is_whole(words.get("max")) else "uniform"
    kinds = {"values": "categorical", "value": "constant", "mu": "normal", "sigma": "normal"}
    kind = next((kinds[key] for key in kinds if key in words), None)
    if kind is None:
        raise InputError("has no value or values; write it")
    return kind


def _given(words: Mapping[str, Any], key: str, kind: str, type_: Any = object) -> Any:
    if key not in words or not isinstance(words[key], type_):
        what = {list: "list", object: "value"}.get(type_, "number")
        raise InputError(f"{key}: {shown(words.get(key))} is no {what}, which {kind} needs; write one")
    return words[key]


def _steps(kind: str, words: Mapping[str, Any], q: Any) -> list[Any]:
    """Return the values of a range that has an end, which a grid walks."""
    if kind not in ("int_uniform", "q_uniform"):
        raise InputError(f"a grid cannot walk {kind}; write its values, or method: random")
    low, high = (_given(words, key, kind, int | float) for key in ("min", "max"))
    if not (high - low) / q < MAX_GRID:
        raise InputError(f"a grid of more than {MAX_GRID:,} values is refused; raise q, or write method: random")
    return [q * number for number in range(math.ceil(low / q), math.floor(high / q) + 1)]


# The command.


def _command(sweep: Mapping[str, Any], text: str, space: _Space, remarks: list[str]) -> list[str]:
    """Return the command as an experiment's: with its macros filled."""
    given = sweep.get("command") or ["${env}", "${interpreter}", "${program}", "${args}"]
    words = given.split() if isinstance(given, str) else [str(word) for word in given]
    macros = [word for word in words if word in _MACROS]
    if len(macros) > 1:
        raise InputError(f"command has {' and '.join(macros)}; keep one of them")
    values = [value for domain in space.domains.values() for value in _values(domain)]
    if macros != ["${args_json}"] and any(
        value is None or isinstance(value, bool | list | Mapping) for value in values
    ):
        space.booleans = "True/False"  # Python's words
    program, command = _program(sweep, text) if "${program}" in words else "", list[str]()
    for word in words:
        if word in _MACROS:
            command += space.words(word)
        elif word != "${env}":
            word = word.replace("${interpreter}", "python").replace("${program}", program)
            word = re.sub(r"\$\{envvar:(\w+)\}", _variable, word)
            if "${args_json_file}" in word:
                raise InputError("command: ${args_json_file} has no counterpart; write ${args_json}")
            command.append(word.replace("${", "$${"))  # hydra's, such as ${now:%H}: an agent leaves them too
    if (launcher := launcher_of(command)) is None:
        return command
    remarks.append(f"{launcher} is not needed: each worker starts the command once, with torchrun's variables")
    return without_launcher(command)


def _variable(named: re.Match[str]) -> str:
    """Return the value of a variable that the command names, as it is here now."""
    if re.search(r"KEY|TOKEN|SECRET|PASS", named[1]) or not os.environ.get(named[1]):
        raise InputError(
            f"command: {named[0]} is filled when the file is written; run `export {named[1]}=…` first, or let the "
            "program read the variable itself, with its name in resources.env or secrets"
        )
    return os.environ[named[1]]


def _program(sweep: Mapping[str, Any], text: str) -> str:
    program = sweep.get("program")
    if not program:
        raise InputError(
            f"{text} names no program: its agent calls a function; write `program: train.py`, a script that takes the "
            "parameters as --name=value (docs/wandb-sweeps)"
        )
    beside = Path(text).parent / str(program)
    return str(program) if Path(str(program)).is_file() or not beside.is_file() else str(beside)


def _is_followed(words: Sequence[str], source: str) -> bool:
    """Whether a script of Python logs to W&B, and has no other words for its parameters and its metric."""
    is_python = words[0].rpartition("/")[2].startswith("python")
    has_script = any(word.endswith(".py") or word == "-m" for word in words)
    is_ours = re.search(r"RUBBERBAND_CONFIG|rubberband\.report", source) is not None
    return is_python and has_script and "wandb" in source.lower() and not is_ours


# How it searches.


def _metric(sweep: Mapping[str, Any], remarks: list[str]) -> tuple[str, str]:
    """Return the metric and its mode; a look at a run finds what is empty."""
    words = sweep.get("metric") or {}
    if not isinstance(words, dict) or (words and not words.get("name")):
        raise InputError(f"metric: {shown(words)} has no name; write {{name: val_loss, goal: minimize}}")
    if words.get("target") is not None:
        remarks.append("metric.target has no counterpart, and is left out: all trials are trained")
    goal = str(words.get("goal") or "minimize")
    if goal not in ("min", "minimize", "max", "maximize"):
        raise InputError(f"metric.goal: {shown(goal)} is neither minimize nor maximize; write one")
    return str(words.get("name") or ""), goal[:3] if words else ""


def _schedule(sweep: Mapping[str, Any], space: _Space, default: int | None, remarks: list[str]) -> dict[str, Any]:
    """Return the scheduler for the sweep's early termination, or one that stops no trial."""
    early, cap = sweep.get("early_terminate") or {}, sweep.get("run_cap")
    if early and early.get("type") != "hyperband":
        remarks.append(f"early_terminate: {shown(early.get('type'))} has no counterpart, and is left out")
        early = {}
    if cap and cap < space.grid:
        remarks.append(f"run_cap {cap} is less than the grid: {cap} of its configurations are drawn at random")
        for name, domain in space.domains.items():
            space.domains[name] = choice(domain.options) if isinstance(domain, Domain) else domain
    trials = space.grid or int(cap or TRIALS)
    if not space.grid and not cap:
        remarks.append(f"the sweep has no run_cap, and would not end: num_samples is {trials}")
    most, size = _most(early, space, default, remarks), {} if space.grid else {"num_samples": trials}
    if not early:
        return schedule_of({"type": "none", **size, "max_t": most}, TO_THE_END, trials=trials)
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
    for name, domain in space.domains.items():
        values = _values(domain)
        if EPOCHS.fullmatch(name) and values and all(map(is_whole, values)):
            remarks.append("the number of epochs is a parameter: a trial with fewer of them ends by itself")
            return int(max(values))
    if most := default or early.get("max_iter"):
        return int(most)
    most = max(MOST, int(early.get("min_iter", 1)) * int(early.get("eta", 3)) ** 2)
    remarks.append(f"the sweep does not say how many iterations a trial has: max_t is {most}, and stops it then")
    return most
