"""The source of a program: whether it calls rubberband.report, and whether it is a trial itself."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rubberband.executor.training.entrypoint import Entrypoint, files_named, files_of


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


def calls_report(sources: Sequence[str]) -> bool:
    """Return whether a program calls rubberband.report."""
    for text in (text for text in sources if re.search(r"^\s*(from|import)\b.*\brubberband\b", text, re.MULTILINE)):
        with suppress(SyntaxError, ValueError):
            calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
            if any(_name_of(call.func) == "report" for call in calls):
                return True
    return False


def _name_of(node: ast.AST) -> str:
    return str(getattr(node, "attr", getattr(node, "id", "")))


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
