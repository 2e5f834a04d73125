"""Reads an objective of Optuna, `rubberband init study.py:objective`: its space, and the study in its file."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from rubberband.errors import InputError
from rubberband.objective import LIMIT_S
from rubberband.running.first_file import MOST, TrialFindings, name_of
from rubberband.running.programs.written import EPOCHS, Schedule, schedule_of, written
from rubberband.spec.space import (
    SubSpace,
    canonical,
    choice,
    grid_index,
    lograndint,
    loguniform,
    qrandint,
    quniform,
    randint,
    uniform,
)

_TRIALS = 16
_SAMPLERS = {
    "TPESampler": "optuna, sampler: tpe",
    "GPSampler": "optuna, sampler: gp",
    "CmaEsSampler": "optuna, sampler: cmaes",
    "NSGAIISampler": "optuna, sampler: nsgaii",
    "RandomSampler": "random",
    "QMCSampler": "quasi",
}
_MANY = 1000
"""Values of a range whose steps begin elsewhere than at 0, which is written as a choice."""
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
    function = _function(_tree(path), found[2]) if path.is_file() else None
    return function is not None and ".suggest_" in ast.unparse(function)


def findings_of(text: str, path: Path) -> TrialFindings:
    """Read an objective and its study, for the file at `path`. Raises InputError for one that cannot be run so."""
    file, _, name = text.rpartition(":")
    source = Path(file if file.endswith(".py") else f"{file.replace('.', '/')}.py")
    tree = _tree(source)
    if not re.fullmatch(r"\w+(\.\w+)*", name):
        raise InputError(f"{name} is no name of a function; write `def objective(trial): return {name}(trial)`")
    if "suggest_" not in ast.unparse(tree) and "optuna" not in ast.unparse(tree):
        raise InputError(
            f"{name} asks no trial of Optuna for parameters; a trial in Python: rubberband init {source.stem}:{name}"
        )
    study, remarks = _study(tree, name)
    maximizes = ["--maximize"] if study.maximizes else []
    runs = list(_runs([*maximizes, "--space"], source, name))
    space = _space(runs, remarks)
    relative = os.path.relpath(source, path.absolute().parent)
    schedule = _schedule(study, runs, tree, name, remarks)
    text_of_source = source.read_text("utf-8-sig", "replace")
    if schedule.most > 1 and not re.search("RUBBERBAND_CHECKPOINT|get_checkpoint", text_of_source):
        remarks.append(
            f"{name} saves no checkpoint: each start trains from zero; load from and save to "
            'os.environ["RUBBERBAND_CHECKPOINT"] before trial.report'
        )
    return TrialFindings(
        command=("python", "-m", "rubberband.objective", *maximizes, f"{relative}:{name}", "${args_json}"),
        metrics="report # trial.report, or the value that is returned",
        name=name_of(f"{source.stem}:{name}", path),
        space={name: (written(domain), "") for name, domain in space.items()},
        metric="value",
        mode="max" if study.maximizes else "min",
        scheduler=schedule.line,
        sampler=study.sampler,
        most=schedule.most,
        trials=schedule.trials,
        work=schedule.work,
        remarks=tuple(remarks),
    )


# The study.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Study:
    """The study in the file of an objective, as far as its source says."""

    maximizes: bool = False
    trials: int | None = None
    sampler: str = "{type: optuna, sampler: tpe, seed: 1}"
    pruner: str = ""
    options: Mapping[str, Any] | None = None
    """Arguments of the pruner."""


def _tree(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_text("utf-8-sig", "replace"))
    except SyntaxError as error:
        raise InputError(f"{path}:{error.lineno}: {error.msg}") from None


def _function(tree: ast.Module, name: str) -> ast.FunctionDef | None:
    return next((node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name), None)


def _called(node: ast.AST) -> str:
    """Return the name of what a call calls; empty for something else."""
    function = node.func if isinstance(node, ast.Call) else None
    return str(getattr(function, "attr", getattr(function, "id", "")))


def _study(tree: ast.Module, name: str) -> tuple[_Study, list[str]]:
    """Return the study that optimizes an objective, and remarks on what has no counterpart."""
    constants = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    optimizations = [node for node in ast.walk(tree) if _called(node) == "optimize"]
    single = optimizations[0] if len(optimizations) == 1 else None  # maybe of a function that this one wraps
    optimize = next((node for node in optimizations if _is_about(node, name)), single)
    creations = [node for node in ast.walk(tree) if _called(node) == "create_study"]
    study = getattr(getattr(optimize, "func", None), "value", None)
    made = constants.get(study.id) if isinstance(study, ast.Name) else study
    creation = made if _called(made) == "create_study" else creations[0] if len(creations) == 1 else None  # type: ignore[arg-type]
    known = {_called(node) for node in ast.walk(tree)} & {"enqueue_trial", "add_trial"}
    remarks = [f"study.{each} is left out: write search.points_to_evaluate" for each in sorted(known)]
    if not isinstance(creation, ast.Call):
        remarks.append(f"the file creates no study for {name}: mode is min, as of a study without direction")
        return _Study(), remarks
    given = {each.arg: each.value for each in creation.keywords if each.arg}
    if "directions" in given:
        raise InputError(f"the study of {name} has several directions, and one metric ranks trials; return one value")
    direction = _text(given.get("direction"), constants) or "minimize"
    if direction.lower() not in ("minimize", "maximize"):
        raise InputError(f'create_study: direction={direction} is not plain; write direction="maximize" or "minimize"')
    trials = _trials(optimize, constants, remarks)
    pruner, options = _object(given.get("pruner"), constants)
    return (
        _Study(
            maximizes=direction.lower() == "maximize",
            trials=trials,
            sampler=_sampler(*_object(given.get("sampler"), constants), remarks),
            pruner=pruner,
            options=options,
        ),
        remarks,
    )


def _is_about(node: ast.AST, name: str) -> bool:
    """Whether a call names an objective, maybe within a lambda or a partial."""
    call = node.args[0] if isinstance(node, ast.Call) and node.args else None
    if call is None and isinstance(node, ast.Call):
        call = next((each.value for each in node.keywords if each.arg == "func"), None)
    return call is not None and any(getattr(each, "id", "") == name for each in ast.walk(call))


def _text(node: ast.AST | None, constants: Mapping[str, ast.AST]) -> str:
    """Return a constant's text, a member's name, or the source of something else; empty for nothing."""
    node = constants.get(node.id, node) if isinstance(node, ast.Name) else node
    if node is None:
        return ""
    if isinstance(node, ast.Attribute):
        return node.attr
    return str(node.value) if isinstance(node, ast.Constant) else ast.unparse(node)


def _object(node: ast.AST | None, constants: Mapping[str, ast.AST]) -> tuple[str, dict[str, Any]]:
    """Return the class of an object that the source makes, and its plain arguments."""
    node = constants.get(node.id, node) if isinstance(node, ast.Name) else node
    found = dict[str, Any]()
    for each in node.keywords if isinstance(node, ast.Call) else ():
        value = constants.get(each.value.id, each.value) if isinstance(each.value, ast.Name) else each.value
        if each.arg is not None and isinstance(value, ast.Constant):
            found[each.arg] = value.value
    return (_called(node) if node is not None else ""), found


def _trials(optimize: ast.AST | None, constants: Mapping[str, ast.AST], remarks: list[str]) -> int | None:
    given = optimize if isinstance(optimize, ast.Call) else None
    words = {each.arg: each.value for each in given.keywords} if given else {}
    node: Any = words.get("n_trials", given.args[1] if given and len(given.args) > 1 else None)
    text = _text(node, constants)
    if words.get("timeout") is not None:
        remarks.append("the study's timeout is constraints.deadline here: adapt it")
    if text.isdecimal():
        return int(text)
    remarks.append(
        f"n_trials {f'is {text}, which is' if text else 'is'} not known before it runs: num_samples is {_TRIALS}"
    )
    return None


def _sampler(kind: str, options: Mapping[str, Any], remarks: list[str]) -> str:
    if kind and kind not in _SAMPLERS:
        remarks.append(f"{kind} has no counterpart: the sampler is tpe")
    seed = options.get("seed")
    return f"{{type: {_SAMPLERS.get(kind, _SAMPLERS['TPESampler'])}, seed: {seed if isinstance(seed, int) else 1}}}"


def _schedule(study: _Study, runs: Sequence[Run], tree: ast.Module, name: str, remarks: list[str]) -> Schedule:
    """Return the scheduler for the study's pruner, or one that stops no trial."""
    reports, options = any(run["reports"] for run in runs), study.options or {}
    trials = study.trials or _TRIALS
    if not reports:
        words: dict[str, Any] = {"type": "none", "num_samples": trials, "max_t": 1}
        return schedule_of(words, "The objective reports once, at its end: no trial can be stopped early.")
    most = max((run["iterations"] for run in runs), default=0) or options.get("max_resource") or _epochs(tree)
    if not isinstance(most, int):
        most = MOST
        remarks.append(f"the number of reports of a trial is not known: max_t is {most}, and stops it then")
    if not _returns_its_last(_function(tree, name)):
        most += 1  # the value that it returns
    if study.pruner == "HyperbandPruner":
        eta = options.get("reduction_factor", 3)
        return schedule_of({"type": "hyperband", "max_t": most, "reduction_factor": eta, "num_samples": trials})
    if study.pruner in ("", "NopPruner", "None"):
        if not study.pruner:
            remarks.append(
                "a study without pruner prunes by the median; here each trial trains to its end: asha would stop some"
            )
        return schedule_of(
            {"type": "none", "num_samples": trials, "max_t": most}, "Each trial trains once, to its end."
        )
    if study.pruner != "SuccessiveHalvingPruner":
        remarks.append(f"{study.pruner} has no counterpart: asha stops the worse trials at its rungs")
    least = options.get("min_resource", options.get("n_warmup_steps"))
    words = {
        "type": "asha",
        "num_samples": trials,
        "grace_period": min(max(1, least if isinstance(least, int) else 1), most),
        "max_t": most,
        "reduction_factor": options.get("reduction_factor", 4),
    }
    return schedule_of(words, "The study's pruner: trials are compared at rungs, and no trial waits for others.")


def _epochs(tree: ast.Module) -> int | None:
    """Return the number of epochs that a constant of the module names."""
    for node in tree.body:
        value = node.value if isinstance(node, ast.Assign) else None
        names = [target.id for target in getattr(node, "targets", ()) if isinstance(target, ast.Name)]
        if isinstance(value, ast.Constant) and isinstance(value.value, int) and any(map(EPOCHS.fullmatch, names)):
            return value.value
    return None


def _returns_its_last(function: ast.FunctionDef | None) -> bool:
    """Whether an objective returns what it reported last, by the names in its source."""
    nodes = list(ast.walk(function)) if function is not None else []
    reported = [node for node in nodes if _called(node) == "report" and isinstance(node, ast.Call) and node.args]
    returned = [node.value for node in nodes if isinstance(node, ast.Return)]
    names = {getattr(each, "id", None) for each in [*returned, *(call.args[0] for call in reported)]}
    if len(names) != 1 or None in names or not reported:
        return False
    last = max(call.lineno for call in reported)
    return not any(
        isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in names and node.lineno > last
        for node in nodes
    )


# The space.


def _runs(options: Sequence[str], source: Path, name: str) -> Iterator[Run]:
    """Call the objective in a process of its own; iterate over what each call asked for."""
    python = shutil.which("python") or shutil.which("python3")
    if python is None:
        raise InputError("python is not here; activate its environment")
    inbound, outbound = os.pipe()
    with os.fdopen(inbound, "rb") as answer:
        process = subprocess.Popen(
            [python, "-m", "rubberband.objective", *options, str(outbound), f"{source}:{name}"],
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
            pass_fds=[outbound],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        os.close(outbound)
        with suppress(subprocess.TimeoutExpired):
            _, printed = process.communicate(timeout=2 * LIMIT_S)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        found = [json.loads(line) for line in answer.read().splitlines()]
    asked = [run for run in found if run["asked"]]
    if not asked:
        last = "" if process.returncode == -signal.SIGKILL else printed.decode("utf-8", "replace").strip()
        fault = next((run["fault"] for run in found if run["fault"]), last.splitlines()[-1] if last else "")
        raise InputError(
            f"{source}:{name} asked for no parameter{f' ({fault})' if fault else ''}; call trial.suggest_… in it"
        )
    yield from asked


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
            space[name] = _domain(name, options[name])
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


def _domain(name: str, words: Mapping[str, Any]) -> Any:
    """Return the domain of a `suggest_…`, or a constant."""
    if words["kind"] == "choice":
        values = words["values"]
        if any(
            isinstance(value, str) and re.match(r"<.* at 0x[0-9a-f]+>|<(class|function|built-in)", value)
            for value in values
        ):
            raise InputError(
                f"suggest_categorical({name!r}) has values that are no plain ones; write texts, and look the objects up"
            )
        return choice(values) if len(values) > 1 else values[0]
    low, high, step = words["low"], words["high"], words["step"]
    if low == high:
        return low
    if words["log"]:
        return lograndint(low, high + 1) if words["kind"] == "int" else loguniform(low, high)
    if step is None or (words["kind"] == "int" and step == 1):
        return uniform(low, high) if words["kind"] == "float" else randint(low, high + 1)
    if float(grid_index(low, step)).is_integer():
        return qrandint(low, high, step) if words["kind"] == "int" else quniform(low, high, step)
    first, each = Decimal(repr(low)), Decimal(repr(step))
    count = int((Decimal(repr(high)) - first) / each) + 1
    if count > _MANY:
        raise InputError(
            f"{name}: steps of {step} from {low} have no counterpart; let the range begin at a multiple of {step}"
        )
    return choice([type(low)(first + at * each) for at in range(count)])
