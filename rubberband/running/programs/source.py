"""The source of a program: which of its lines print or report metrics, and whether it is a trial or a search itself."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from rubberband.executor.training.entrypoint import Entrypoint, files_named, files_of
from rubberband.values.metric_lines import metrics_in


def sources_of(words: Sequence[str], folder: Path) -> list[str]:
    """Return the source of the program's script, and of the user's modules that it imports."""
    script = next((path for path in files_named(words, folder) if path.suffix == ".py"), None)
    if script is None:
        return []
    places = (str(script.parent), str(folder))
    files = files_of(Entrypoint(module=script.stem, attribute="", search_path=places))
    return [Path(file).read_text("utf-8-sig", "replace") for file in dict.fromkeys([str(script), *files])]


def trial_in(source: str) -> str | None:
    """Return the name of a class or function that is a trial, in a module that is no program; None: it has none."""
    if "ArgumentParser" in source or "__main__" in source:
        return None
    with suppress(SyntaxError, ValueError):
        for node in ast.parse(source).body:
            match node:
                case ast.ClassDef(name=name, bases=bases) if any(_name_of(base).endswith("Trial") for base in bases):
                    return name
                case ast.FunctionDef(name=name, args=ast.arguments(args=[_])) if any(
                    isinstance(part, ast.Call) and _name_of(part.func) == "report" for part in ast.walk(node)
                ):
                    return name
    return None


_NO_METRIC = re.compile(
    r"(.*[_ ])?(epochs?|steps?|iter|iters|iterations?|time|seconds|sec|lr|eta|batch|rank|gpu|size)", re.I
)


def printed_metrics(sources: Sequence[str]) -> tuple[list[str], bool]:
    """Return the metrics that are reported, or else printed, and whether they are printed."""
    trees = list[ast.AST]()
    for text in sources:
        with suppress(SyntaxError, ValueError):
            trees.append(ast.parse(text))
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    reported = [
        key for call in calls if _name_of(call.func) == "report" for part in call.args[:1] for key in _keys(part)
    ]
    if reported:
        return list(dict.fromkeys(reported)), False
    if any(_name_of(call.func) in ("Trainer", "Seq2SeqTrainer", "HfArgumentParser") for call in calls) and any(
        re.search(r"^\s*(from|import) transformers\b", text, re.MULTILINE) for text in sources
    ):
        evaluates = any("eval_dataset" in text for text in sources)
        return ["eval_loss" if evaluates else "loss"], True  # which the Trainer prints after each epoch
    printed = [
        name
        for call in calls
        if _name_of(call.func) in ("print", "info", "log", "write", "warning")
        for name in metrics_in(" ".join(_text(part) for part in call.args))
        if not _NO_METRIC.fullmatch(name)
    ]
    return list(dict.fromkeys(printed)), bool(printed)


def _name_of(node: ast.AST) -> str:
    return str(getattr(node, "attr", getattr(node, "id", "")))


def _keys(node: ast.AST) -> Iterator[str]:
    keys = node.keys if isinstance(node, ast.Dict) else []
    return (key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str))


_PERCENT = re.compile(r"%[-+ 0#]*\d*(?:\.\d+)?[dfgesir]")
_BRACES = re.compile(r"\{[^{}]*\}")


def _text(node: ast.AST) -> str:
    """Return what an argument of `print` prints, with 1 for each value."""
    match node:
        case ast.Constant(value=value):
            return str(value)
        case ast.JoinedStr(values=parts):
            return "".join(_text(part) for part in parts)
        case ast.BinOp(left=left, op=ast.Mod()):
            return _PERCENT.sub("1", _text(left))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text(left) + _text(right)
        case ast.Call(func=ast.Attribute(value=ast.Constant(value=str() as text), attr="format")):
            return _BRACES.sub("1", text)
        case ast.Call(func=ast.Attribute(attr="dumps"), args=[ast.Dict() as content]):
            return json.dumps(dict.fromkeys(_keys(content), 1))
        case ast.Dict():
            return json.dumps(dict.fromkeys(_keys(node), 1))
    return "1"


_SEARCHES = (
    (r"\bcreate_study\(", "Optuna's create_study", "optuna"),
    (r"\bwandb\.(agent|sweep)\(", "wandb.agent", "wandb-sweeps"),
    (r"\bHyperparameterTuner\(", "SageMaker's HyperparameterTuner", "sagemaker"),
    (r"\b(tune\.(run|Tuner|run_experiments)|(?<!\.)Tuner)\((?s:.*)", "Ray Tune", "ray-tune"),
    (r"\.(hyperparameter_search|hp_search)\(", "the Trainer's hyperparameter_search", "optuna"),
)
"""Calls of a program that searches itself, what they are called, and the page that moves it."""


def search_in(sources: Sequence[str]) -> tuple[str, str, str] | None:
    """Return the search that a program is itself: its name, its page, and the function that is its objective."""
    for text in sources:
        code = re.sub(r"(?m)^\s*#.*$", "", text)
        for pattern, name, page in _SEARCHES:
            is_ray = page != "ray-tune" or re.search(r"^\s*(from|import) ray\b", code, re.MULTILINE)
            if re.search(pattern, code) and is_ray:
                objective = re.search(r"\.optimize\(\s*(\w+)", code)
                return name, page, objective[1] if objective and page == "optuna" else ""
    return None


def saved_file(sources: Sequence[str]) -> str | None:
    """Return the name of the file that a program saves its state to; None unless its source has a single one."""
    found = set[str]()
    for text in sources:
        found |= {name for _, name in re.findall(r"(['\"])(?:[\w./-]*/)?([\w-]+\.(?:pt|pth|ckpt|tar))\1", text)}
    return found.pop() if len(found) == 1 else None
