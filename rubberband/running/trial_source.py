"""Finds the parameters and the metrics of a trial in Python in its source."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rubberband.running.first_file import TrialFindings, is_maximised, name_of
from rubberband.running.ranges import REQUIRED, domain_of


def findings_of_code(trial: str, path: Path) -> TrialFindings:
    """Import a trial in Python and read its source, for the file at `path`. Raises EntrypointError."""
    from rubberband.executor.training.entrypoint import Entrypoint
    from rubberband.executor.training.torch_trial import TorchTrial

    target = Entrypoint.parse(trial, search_path=(path.absolute().parent, Path.cwd())).load()
    classes = inspect.getmro(target) if isinstance(target, type) else (target,)
    trees = [_tree(each) for each in classes if not each.__module__.startswith(("rubberband", "abc", "builtins"))]
    parameters = {name: default for tree in trees for name, default in parameters_in(tree)}
    reported = [name for tree in trees for name in _reported(tree)]
    if not reported:
        reported = ["loss"] if isinstance(target, type) and issubclass(target, TorchTrial) else ["score"]
    better = [name for name in reported if is_maximised(name)]
    return TrialFindings(
        entrypoint=trial,
        name=name_of(trial, path),
        space={name: domain_of(name, default) for name, default in sorted(parameters.items())},
        metric=(better or reported)[0],
    )


def _tree(target: Any) -> ast.AST:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(target)))
    except (OSError, TypeError, SyntaxError):
        return ast.Module(body=[], type_ignores=[])


def parameters_in(tree: ast.AST) -> Iterator[tuple[str, Any]]:
    """Iterate over the parameters that are read from the configuration, with their defaults."""
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(value=owner, slice=ast.Constant(value=str() as name)) if _is_config(owner):
                yield name, REQUIRED
            case ast.Call(
                func=ast.Attribute(value=owner, attr="get"), args=[ast.Constant(value=str() as name), *rest]
            ) if _is_config(owner):
                default = rest[0].value if rest and isinstance(rest[0], ast.Constant) else REQUIRED
                yield name, default


def _is_config(node: ast.AST) -> bool:
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name.strip("_") in ("config", "configuration", "cfg", "hparams", "params")


def _reported(tree: ast.AST) -> Iterator[str]:
    """Iterate over the metrics in the results of `iterate` and `evaluate`, and in calls of `report`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in ("iterate", "evaluate"):
            returned = (part.value for part in ast.walk(node) if isinstance(part, ast.Return))
            yield from (name for value in returned for name in _keys(value))
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "report":
            yield from (name for value in node.args[:1] for name in _keys(value))


def _keys(node: ast.AST | None) -> list[str]:
    keys = node.keys if isinstance(node, ast.Dict) else []
    return [key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
