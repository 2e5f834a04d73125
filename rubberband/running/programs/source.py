"""The source of a program: whether it calls rubberband.report, and whether it is a trial itself."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rubberband.errors import InputError
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
                case ast.ClassDef(name=name, bases=bases) if any(last_name(base).endswith("Trial") for base in bases):
                    return name
                case ast.FunctionDef(name=name, args=ast.arguments(args=[_])) if any(
                    called(part) == "report" for part in ast.walk(node)
                ):
                    return name
    return None


def calls_report(sources: Sequence[str]) -> bool:
    """Return whether a program calls rubberband.report."""
    for text in (text for text in sources if re.search(r"^\s*(from|import)\b.*\brubberband\b", text, re.MULTILINE)):
        with suppress(SyntaxError, ValueError):
            if any(called(node) == "report" for node in ast.walk(ast.parse(text))):
                return True
    return False


def last_name(node: Any) -> str:
    """Return the last name of a function or a value: `report` of `rubberband.report`; empty: it has none."""
    return str(getattr(node, "attr", getattr(node, "id", "")))


def called(node: ast.AST | None) -> str:
    """Return the name of the function or class that an expression calls; empty for one that is no call."""
    return last_name(node.func) if isinstance(node, ast.Call) else ""


def arguments(call: ast.AST | None, names: Sequence[str] = ()) -> dict[str, ast.expr]:
    """Return the arguments of a call; `names` are those of its positional ones."""
    if not isinstance(call, ast.Call):
        return {}
    return {**dict(zip(names, call.args, strict=False)), **{each.arg: each.value for each in call.keywords if each.arg}}


class UnknownValue(Exception):
    """An expression whose value the source does not say."""


class PlainSource:
    """The source of a script, and the plain values in it. Raises InputError for one that Python cannot parse."""

    def __init__(self, path: Path) -> None:
        self.text = path.read_text("utf-8-sig", "replace")
        try:
            self.tree = ast.parse(self.text)
        except SyntaxError as error:
            raise InputError(f"{path}:{error.lineno}: {error.msg}") from None
        self.named: dict[str, ast.expr] = {
            target.id: node.value
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        """Name -> the expression that it gets."""

    def calls(self, name: str, within: ast.AST | None = None) -> list[ast.Call]:
        """Return the calls of a function or class."""
        return [node for node in ast.walk(within or self.tree) if isinstance(node, ast.Call) and called(node) == name]

    def found(self, node: ast.AST | None) -> ast.AST | None:
        """Return the expression that a name gets, or another expression as it is."""
        return self.named.get(node.id, node) if isinstance(node, ast.Name) else node

    def plain(self, node: ast.AST | None, default: Any = None) -> Any:
        """Return the value of an expression, or its text where that is not known."""
        try:
            return default if node is None else self.value(node)
        except UnknownValue as unknown:
            return str(unknown)

    def value(self, node: ast.AST, of_call: Callable[[str, ast.Call], Any] | None = None, name: str = "") -> Any:
        """Return the value of an expression of plain values; `of_call` that of a call that is the value of `name`.

        Raises UnknownValue for others.
        """
        known = self.found(node)
        match known:
            case ast.Dict(keys=keys, values=values) if None not in keys:
                names = [self.value(key) for key in keys if key is not None]
                return {key: self.value(each, of_call, str(key)) for key, each in zip(names, values, strict=True)}
            case ast.List(elts=parts) | ast.Tuple(elts=parts):
                return [self.value(part, of_call) for part in parts]
            case ast.Call(func=ast.Name(id="dict"), args=[]):
                return {key: self.value(each, of_call, key) for key, each in arguments(known).items()}
            case ast.Call() if of_call is not None and name:
                return of_call(name, known)
        with suppress(ValueError, SyntaxError, TypeError):
            return ast.literal_eval(known)  # type: ignore[arg-type]
        raise UnknownValue(ast.unparse(node))


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
