"""Options of programs that parse nothing: a configurator's variables, `sys.argv[1]`, variables of the environment."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rubberband.running.programs.parsers import ProgramOption
from rubberband.running.programs.source import last_name
from rubberband.running.ranges import REQUIRED, rank_of

_EXEC = re.compile(r"exec\(\s*open\(\s*(['\"])(.+?)\1")
_TYPES = ("float", "int")


def options_in(words: Sequence[str], folder: Path, sources: Sequence[str]) -> list[ProgramOption]:
    """Return the options that the program's source reads by itself; empty where these cannot be known."""
    with suppress(SyntaxError, ValueError, IndexError):
        tree = ast.parse(sources[0])
        return _configurator(tree, words, folder, sources) or _arguments(tree) or _variables(sources)
    return []


def _configurator(tree: ast.Module, words: Sequence[str], folder: Path, sources: Sequence[str]) -> list[ProgramOption]:
    """Return the top-level values of a script that lets `--name=value` replace them by `globals()`."""
    run = [folder / match[2] for match in _EXEC.finditer(sources[0])]
    texts = [sources[0], *(path.read_text("utf-8-sig", "replace") for path in run if path.is_file())]
    if not any("globals()" in text and "argv" in text for text in texts):
        return []
    ends = [node.lineno for node in tree.body if "exec" in ast.dump(node) or "argv" in ast.dump(node)]
    values = dict(_constants(tree, min(ends, default=10**9)))
    for word in words:
        if word.endswith(".py") and (folder / word).is_file():  # a file of values, as the script itself
            text = (folder / word).read_text("utf-8-sig", "replace")
            values |= {name: value for name, value in _constants(ast.parse(text), 10**9) if name in values}
    return [
        ProgramOption(
            name=name,
            flags=(f"--{name}",),
            form="=",
            type=type(value).__name__,
            default=value,
            booleans=("True/False",) if isinstance(value, bool) else None,
        )
        for name, value in values.items()
    ]


def _constants(tree: ast.Module, end: int) -> Iterator[tuple[str, Any]]:
    """Iterate over the names of the module that are given a number, a text, true or false before a line."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and node.lineno < end and isinstance(node.targets[0], ast.Name):
            with suppress(ValueError, SyntaxError):
                value = ast.literal_eval(node.value)
                if isinstance(value, bool | int | float | str) and not node.targets[0].id.startswith("_"):
                    yield node.targets[0].id, value


def _arguments(tree: ast.Module) -> list[ProgramOption]:
    """Return the positional arguments of `name = float(sys.argv[1])`; empty unless all of them are read so."""
    found = dict[int, ProgramOption]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            kind, inner = _converted(node.value)
            default = None
            if isinstance(node.value, ast.IfExp) and isinstance(node.value.orelse, ast.Constant):
                (kind, inner), default = _converted(node.value.body), node.value.orelse.value
            if (index := _index(inner)) is not None:
                name = node.targets[0].id.lower()
                found[index] = ProgramOption(name=name, type=kind, default=default, required=True)
    read = [index for node in ast.walk(tree) if (index := _index(node)) is not None]
    slices = [node for node in ast.walk(tree) if last_name(node) == "argv"]
    is_known = sorted(found) == list(range(1, len(found) + 1)) and set(read) == set(found)
    return [found[index] for index in sorted(found)] if is_known and len(slices) <= 2 * len(read) else []


def _converted(node: ast.AST) -> tuple[str, ast.AST]:
    """Return the type that a value is converted to, and the value."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _TYPES and node.args:
        inner = _converted(node.args[0])[1]
        return node.func.id, inner
    return "str", node


def _index(node: ast.AST) -> int | None:
    """Return the number in `sys.argv[1]`; None for the program's name and all else."""
    match node:
        case ast.Subscript(value=owner, slice=ast.Constant(value=int() as index)) if index > 0:
            return index if last_name(owner) == "argv" else None
    return None


def _variables(sources: Sequence[str]) -> list[ProgramOption]:
    """Return the variables of the environment that are read as numbers."""
    found = dict[str, ProgramOption]()
    for source in sources:
        with suppress(SyntaxError, ValueError):
            for node in ast.walk(ast.parse(source)):
                kind, inner = _converted(node)
                read = _variable(inner)
                if read is not None and (kind != "str" or read[0] not in found):
                    with suppress(ValueError, TypeError):
                        found[read[0]] = _of_variable(kind, *read)
    return list(found.values())


def _of_variable(kind: str, name: str, default: Any) -> ProgramOption:
    return ProgramOption(
        name=name.lower(),
        flags=(name,),
        form="env",
        level=-1,
        type=kind,
        default=None if default in (REQUIRED, None) else {"int": int, "float": float}.get(kind, str)(default),
        required=default is REQUIRED and rank_of(name) is not None,
    )


def _variable(node: ast.AST) -> tuple[str, Any] | None:
    """Return the name and the default of `os.environ["LR"]`, `os.environ.get("LR", "0.1")` and `os.getenv`."""
    match node:
        case ast.Subscript(value=owner, slice=ast.Constant(value=str() as name)) if last_name(owner) == "environ":
            return name, REQUIRED
        case ast.Call(func=function, args=[ast.Constant(value=str() as name), *rest]):
            gets = last_name(function) == "get" and last_name(getattr(function, "value", None)) == "environ"
            if gets or last_name(function) == "getenv":
                return name, rest[0].value if rest and isinstance(rest[0], ast.Constant) else None
    return None
