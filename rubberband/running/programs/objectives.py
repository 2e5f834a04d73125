"""Reads an objective of Optuna, `rubberband init study.py:objective`: its space, and the study in its file."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rubberband.errors import InputError
from rubberband.integrations.optuna import domain_of
from rubberband.objective import LIMIT_S
from rubberband.running.first_file import MOST, TrialFindings, name_of
from rubberband.running.programs.source import PlainSource, arguments, called
from rubberband.running.programs.written import (
    EPOCHS,
    TO_THE_END,
    TPE,
    TRIALS,
    folder_remarks,
    is_whole,
    schedule_of,
    written,
)
from rubberband.spec.space import SubSpace, canonical, choice

_SAMPLERS = {
    "TPESampler": "optuna, sampler: tpe",
    "GPSampler": "optuna, sampler: gp",
    "CmaEsSampler": "optuna, sampler: cmaes",
    "NSGAIISampler": "optuna, sampler: nsgaii",
    "RandomSampler": "random",
    "QMCSampler": "quasi",
}
Run = Mapping[str, Any]
"""One call of the objective: what it asked for, the options that it got."""


def is_objective(text: str) -> bool:
    """Whether the text names a function of a file, `study.py:objective`, or one of a module that asks a trial of
    Optuna."""
    if (found := re.fullmatch(r"(.+\.py):(.+)", text)) is not None:
        return Path(found[1]).is_file()
    if (found := re.fullmatch(r"([\w.]+):(\w+)", text)) is None:
        return False
    path = Path(f"{found[1].replace('.', '/')}.py")
    function = _function(PlainSource(path).tree, found[2]) if path.is_file() else None
    return function is not None and ".suggest_" in ast.unparse(function)


def findings_of(text: str, path: Path) -> TrialFindings:
    """Read an objective and its study, for the file at `path`. Raises InputError for one that cannot be run so."""
    file, _, name = text.rpartition(":")
    script = Path(file if file.endswith(".py") else f"{file.replace('.', '/')}.py")
    source = PlainSource(script)
    if not re.fullmatch(r"\w+(\.\w+)*", name):
        raise InputError(f"{name} is no name of a function; write `def objective(trial): return {name}(trial)`")
    if "suggest_" not in source.text and "optuna" not in source.text:
        raise InputError(
            f"{name} asks no trial of Optuna for parameters; a trial in Python: rubberband init {script.stem}:{name}"
        )
    remarks = [
        f"study.{each} is left out: write search.points_to_evaluate"
        for each in ("add_trial", "enqueue_trial")
        if source.calls(each)
    ]
    study = _study(source, name, remarks)
    maximizes = ["--maximize"] if study.maximizes else []
    runs = _runs([*maximizes, "--space"], script, name)
    space = _space(runs, remarks)
    schedule = _schedule(study, runs, source, name, remarks)
    relative = os.path.relpath(script, path.absolute().parent)
    return TrialFindings(
        command=("python", "-m", "rubberband.objective", *maximizes, f"{relative}:{name}", "${args_json}"),
        metrics="report # trial.report, or the value that is returned",
        name=name_of(f"{script.stem}:{name}", path),
        space=written(space),
        metric="value",
        mode="max" if study.maximizes else "min",
        sampler=study.sampler,
        remarks=(*remarks, *(folder_remarks((), source.text) if schedule["most"] > 1 else ())),
        **schedule,
    )


# The study.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Study:
    """The study in the file of an objective, as far as its source says."""

    maximizes: bool = False
    trials: int = TRIALS
    sampler: str = TPE
    pruner: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the pruner that are numbers."""


def _function(tree: ast.Module, name: str) -> ast.FunctionDef | None:
    return next((node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name), None)


def _study(source: PlainSource, name: str, remarks: list[str]) -> _Study:
    """Return the study that optimizes an objective."""
    optimizations, creations = source.calls("optimize"), source.calls("create_study")
    single = optimizations[0] if len(optimizations) == 1 else None  # maybe of a function that this one wraps
    optimize = next((call for call in optimizations if _is_about(call, name)), single)
    made = source.found(optimize.func.value) if optimize and isinstance(optimize.func, ast.Attribute) else None
    creation = made if made in creations else creations[0] if len(creations) == 1 else None
    if creation is None:
        remarks.append(f"the file creates no study for {name}: mode is min, as of a study without direction")
        return _Study()
    given = arguments(creation)
    if "directions" in given:
        raise InputError(f"the study of {name} has several directions, and one metric ranks trials; return one value")
    direction = str(source.plain(given.get("direction")) or "minimize")
    if (goal := direction.rpartition(".")[2].lower()) not in ("minimize", "maximize"):
        raise InputError(f'create_study: direction={direction} is not plain; write direction="maximize" or "minimize"')
    words = arguments(optimize, ("func", "n_trials", "timeout"))
    if "timeout" in words:
        remarks.append("the study's timeout is constraints.deadline here: adapt it")
    trials = source.plain(words.get("n_trials"))
    if not is_whole(trials):
        which = f"is {trials}, which is" if trials is not None else "is"
        remarks.append(f"n_trials {which} not known before it runs: num_samples is {TRIALS}")
    sampler, options = _made(given.get("sampler"), source)
    if sampler and sampler not in _SAMPLERS:
        remarks.append(f"{sampler} has no counterpart: the sampler is tpe")
    pruner, of_pruner = _made(given.get("pruner"), source)
    return _Study(
        maximizes=goal == "maximize",
        trials=trials if is_whole(trials) else TRIALS,
        sampler=f"{{type: {_SAMPLERS.get(sampler, _SAMPLERS['TPESampler'])}, seed: {options.get('seed', 1)}}}",
        pruner=pruner,
        options=of_pruner,
    )


def _is_about(call: ast.Call, name: str) -> bool:
    """Whether a call of `optimize` names an objective, maybe within a lambda or a partial."""
    function = arguments(call, ("func",)).get("func")
    return function is not None and any(getattr(each, "id", "") == name for each in ast.walk(function))


def _made(node: ast.AST | None, source: PlainSource) -> tuple[str, dict[str, Any]]:
    """Return the class of an object that the source makes, and those of its arguments that are whole numbers."""
    call = source.found(node)
    options = {name: source.plain(each) for name, each in arguments(call).items()}
    return called(call), {name: value for name, value in options.items() if is_whole(value)}


def _schedule(study: _Study, runs: Sequence[Run], source: PlainSource, name: str, remarks: list[str]) -> dict[str, Any]:
    """Return the scheduler for the study's pruner, or one that stops no trial."""
    options, size = study.options, {"num_samples": study.trials}
    if not any(run["reports"] for run in runs):
        comment = "The objective reports once, at its end: no trial can be stopped early."
        return schedule_of({"type": "none", **size, "max_t": 1}, comment)
    epochs = (source.plain(value) for each, value in source.named.items() if EPOCHS.fullmatch(each))
    most = max(run["iterations"] for run in runs) or options.get("max_resource") or next(filter(is_whole, epochs), 0)
    if not most:
        most = MOST
        remarks.append(f"the number of reports of a trial is not known: max_t is {most}, and stops it then")
    if not _returns_its_last(_function(source.tree, name), source):
        most += 1  # the value that it returns
    if study.pruner == "HyperbandPruner":
        eta = options.get("reduction_factor", 3)
        return schedule_of({"type": "hyperband", "max_t": most, "reduction_factor": eta, **size})
    if study.pruner in ("", "NopPruner"):
        if not study.pruner:
            remarks.append(
                "a study without pruner prunes by the median; here each trial trains to its end: asha would stop some"
            )
        return schedule_of({"type": "none", **size, "max_t": most}, TO_THE_END)
    if study.pruner != "SuccessiveHalvingPruner":
        remarks.append(f"{study.pruner} has no counterpart: asha stops the worse trials at its rungs")
    least, eta = options.get("min_resource", options.get("n_warmup_steps", 1)), options.get("reduction_factor", 4)
    words = {"type": "asha", **size, "grace_period": min(max(1, least), most), "max_t": most, "reduction_factor": eta}
    return schedule_of(words, "The study's pruner: trials are compared at rungs, and no trial waits for others.")


def _returns_its_last(function: ast.FunctionDef | None, source: PlainSource) -> bool:
    """Whether an objective returns what it reported last, by the names in its source."""
    if function is None or not (reports := [call for call in source.calls("report", function) if call.args]):
        return False
    nodes, last = list(ast.walk(function)), max(call.lineno for call in reports)
    returned = [node.value for node in nodes if isinstance(node, ast.Return)]
    names = {getattr(each, "id", None) for each in [*returned, *(call.args[0] for call in reports)]}
    is_changed = any(
        isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in names and node.lineno > last
        for node in nodes
    )
    return len(names) == 1 and None not in names and not is_changed


# The space.


def _runs(options: Sequence[str], script: Path, name: str) -> list[Run]:
    """Call the objective in a process of its own; return what each call asked for."""
    python = shutil.which("python") or shutil.which("python3")
    if python is None:
        raise InputError("python is not here; activate its environment")
    with tempfile.TemporaryFile() as answer, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [python, "-m", "rubberband.objective", *options, str(answer.fileno()), f"{script}:{name}"],
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
            pass_fds=[answer.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=2 * LIMIT_S)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        answer.seek(0), errors.seek(0)
        found = [json.loads(line) for line in answer.read().splitlines()]
        printed = errors.read().decode("utf-8", "replace").strip().splitlines()
    if asked := [run for run in found if run["asked"]]:
        return asked
    fault = next((run["fault"] for run in found if run["fault"]), printed[-1] if printed else "")
    raise InputError(
        f"{script}:{name} asked for no parameter{f' ({fault})' if fault else ''}; call trial.suggest_… in it"
    )


def _space(runs: Sequence[Run], remarks: list[str]) -> dict[str, Any]:
    """Return the space of an objective, with the parameters that only one option of a choice asks for below it."""
    first = runs[0]
    if any(
        run["asked"].keys() != first["asked"].keys()
        for run in runs[1:]
        if run["end"] == "high" and run["chosen"] == first["chosen"]
    ):
        raise InputError("the objective asks for other names each time; give its parameters names that stay")
    domains = dict[str, list[dict[str, Any]]]()
    for run in runs:
        for name, words in run["asked"].items():
            domains.setdefault(name, []).append(words)
    if any(run["fault"] for run in runs):
        remarks.append(f"a call of the objective failed: {next(run['fault'] for run in runs if run['fault'])}")
    if runs[-1]["left"]:
        remarks.append("not all choices were tried together: a parameter of two of them may be missing")
    low = next((run["asked"] for run in runs if run["end"] == "low"), first["asked"])
    if moved := next((name for name, words in low.items() if first["asked"].get(name, words) != words), None):
        raise InputError(f"{moved} has other bounds in other trials; give it the same ones in each suggest_…")
    space, loose = _below({}, list(domains), runs)
    loose += [name for name in first["asked"] if name not in low]
    if loose:
        remarks.append(f"{', '.join(dict.fromkeys(loose))}: not each trial reads them, and each configuration has them")
    return space


def _below(given: Mapping[str, int], names: Sequence[str], runs: Sequence[Run]) -> tuple[dict[str, Any], list[str]]:
    """Return the space of these names in the runs with the `given` options, and the names that no option explains."""
    runs = [run for run in runs if all(run["chosen"].get(name) == at for name, at in given.items())]
    high = [run for run in runs if run["end"] == "high"]
    seen = [name for name in names if any(name in run["asked"] for run in runs)]
    options = {name: next(run["asked"][name] for run in runs if name in run["asked"]) for name in seen}
    owners = dict[str, str]()
    loose = list[str]()
    for name in seen:
        if all(name in run["asked"] and run["asked"][name] == options[name] for run in high):
            continue
        owner = _owner(
            name, [each for each in seen if "values" in options[each] and each not in given and each != name], high
        )
        if owner is None:
            if len({canonical(run["asked"][name]) for run in runs if name in run["asked"]}) > 1:
                raise InputError(f"{name} has other bounds in other trials; give it the same ones in each suggest_…")
            loose.append(name)
        else:
            owners[name] = owner
    space = dict[str, Any]()
    for name in seen:
        if name in owners:
            continue
        below = [each for each, owner in owners.items() if owner == name]
        if not below:
            space[name] = domain_of(name, options[name])
            continue
        values = list[Any]()
        for at, value in enumerate(options[name]["values"]):
            inner, more = _below({**given, name: at}, _with_theirs(below, owners), runs)
            loose += more
            values.append(SubSpace(options[name]["texts"][at], inner) if inner else value)
        space[name] = choice(values)
    return space, list(dict.fromkeys(loose))


def _with_theirs(names: Sequence[str], owners: Mapping[str, str]) -> list[str]:
    """Return names with those that belong to one of them, in their order."""
    found = set(names)
    while more := {name for name, owner in owners.items() if owner in found} - found:
        found |= more
    return [name for name in owners if name in found]


def _owner(name: str, choices: Sequence[str], runs: Sequence[Run]) -> str | None:
    """Return the choice whose option decides whether a name is asked for, and with which range; None: there is none."""
    for other in choices:
        by_option = dict[Any, set[str]]()
        for run in runs:
            asked = canonical(run["asked"].get(name))
            by_option.setdefault(run["chosen"].get(other), set()).add(asked)
        if all(len(asked) == 1 for asked in by_option.values()) and len(set().union(*by_option.values())) > 1:
            return other
    return None
