"""The content of an entry point: the source that it is made of, and the packages that this imports.

Findings about a trial (that it works, how fast it is) are kept by this content, so that a change of the code is seen.
Nothing is imported here: the modules are found and their import statements read. Data files are not looked at.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FunctionType
from typing import Any

import rubberband
from rubberband.executor.training.entrypoint import Entrypoint
from rubberband.spec.experiment import Experiment


def digest(*parts: Any) -> str:
    """Return the digest of JSON values, in any order of their keys."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def content_of(entrypoint: Entrypoint) -> Mapping[str, str] | None:
    """Return module -> digest of its source, for the user's own, and package -> version, for those that they import.

    None if that does not say what the trial is: it is defined in a notebook or in a function, or cannot be found.
    """
    first = _first_file(entrypoint)
    if "<" in entrypoint.attribute or first is None:
        return None
    found = {"python": ".".join(map(str, sys.version_info[:2])), "rubberband": rubberband.__version__}
    return found | _walk(entrypoint.module, first, _Places(entrypoint.search_path), {})


def with_trial(experiment: Experiment, search_path: Sequence[str | os.PathLike[str]] = ()) -> Experiment:
    """Return the experiment as one of a function if its trial is one: then a trial has one GPU by default."""
    trial = experiment.entrypoint
    if trial is None or experiment.resources.kind.is_simulated:
        return experiment
    if isinstance(trial, str):
        found = is_function(Entrypoint.parse(trial, search_path or (os.getcwd(),)))
    else:
        found = isinstance(trial, FunctionType)
    return experiment.of_function() if found else experiment


_MOST_IMPORTS = 8
"""Modules that may pass a trial on by their imports."""


def is_function(entrypoint: Entrypoint) -> bool:
    """Return whether its source says that it is a function; False where the source does not say, or cannot be read."""
    path, module, name = _first_file(entrypoint), entrypoint.module, entrypoint.attribute
    places = _Places(entrypoint.search_path)
    for _ in range(_MOST_IMPORTS):
        if path is None:
            break
        bound = _bound(path, name)
        if not isinstance(bound, ast.ImportFrom):
            return isinstance(bound, ast.FunctionDef)
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        name = next(alias.name for alias in bound.names if name == (alias.asname or alias.name))
        module = _base(bound, package)
        path = places.file_of(module)
    return False


def _bound(path: Path, name: str) -> ast.stmt | None:
    """Return the last statement of a module that defines or imports a name, or assigns to it."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None

    def binds(node: ast.stmt) -> bool:
        match node:
            case ast.FunctionDef() | ast.ClassDef() | ast.AsyncFunctionDef():
                return node.name == name
            case ast.ImportFrom():
                return any(name == (alias.asname or alias.name) for alias in node.names)
            case ast.Assign():
                return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
        return False

    return next((node for node in reversed(tree.body) if binds(node)), None)


def _base(node: ast.ImportFrom, package: str) -> str:
    """Return the module that names are imported from, in a module of `package`."""
    above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
    return ".".join([*above, *([node.module] if node.module else [])])


def files_of(entrypoint: Entrypoint) -> dict[str, str]:
    """Return path -> digest of the user's files that it is made of, but for the one that it was pickled from.

    A resume takes those as they are then, and what was pickled as it was.
    """
    first, files = _first_file(entrypoint), dict[str, str]()
    if first is not None:
        _walk(entrypoint.module, first, _Places(entrypoint.search_path), files)
        if entrypoint.pickled is not None:
            del files[str(first.absolute())]
    return files


def changed_files(files: Mapping[str, str]) -> list[str]:
    """Return those of the `files_of` an entry point that are not as they were, by their paths."""
    return [path for path, before in sorted(files.items()) if _digest_of(Path(path)) != before]


def _digest_of(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def _first_file(entrypoint: Entrypoint) -> Path | None:
    if entrypoint.module == "__main__":
        script = getattr(sys.modules.get("__main__"), "__file__", None)
        first = None if script is None else Path(script)
    else:
        first = _Places(entrypoint.search_path).file_of(entrypoint.module)
    return first if first is not None and first.is_file() else None


def _walk(name: str, first: Path, places: _Places, files: dict[str, str]) -> dict[str, str]:
    """Return the content of a module's file, and of all that it imports; put the digests of the files into `files`."""
    found: dict[str, str] = {}
    waiting = [(name, first)]
    while waiting:
        name, path = waiting.pop()
        if name in found:
            continue
        source = path.read_bytes()
        found[name] = files[str(path.absolute())] = hashlib.sha256(source).hexdigest()
        for imported in _imports(source, name, is_package=path.name == "__init__.py"):
            top = imported.partition(".")[0]
            if top in sys.stdlib_module_names or top == "rubberband" or imported in found:
                continue
            if places.is_installed(top):
                found.setdefault(top, places.version(top))
            elif (file := places.file_of(imported)) is not None:
                waiting.append((imported, file))
    return found


def _imports(source: bytes, name: str, *, is_package: bool) -> Iterator[str]:
    """Iterate over the modules that a source may import; some are attributes of modules instead."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    package = name if is_package else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _base(node, package)
            modules = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        else:
            continue
        for module in modules:
            parts = module.split(".")
            yield from (".".join(parts[:length]) for length in range(1, len(parts) + 1) if all(parts))


class _Places:
    """The places of modules, of which none is imported."""

    def __init__(self, search_path: Sequence[str]) -> None:
        self._path = [*search_path, *sys.path]
        self._specs: dict[str, ModuleSpec | None] = {}

    def _spec(self, top: str) -> ModuleSpec | None:
        if top not in self._specs:
            try:
                found = PathFinder.find_spec(top, self._path) or importlib.util.find_spec(top)
            except (ImportError, ValueError, AttributeError):
                found = None
            self._specs[top] = found
        return self._specs[top]

    def _folders(self, top: str) -> list[Path]:
        spec = self._spec(top)
        return [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []

    def is_installed(self, top: str) -> bool:
        """Whether a module belongs to an installed package, whose version stands for its source."""
        spec = self._spec(top)
        places = [Path(spec.origin)] if spec is not None and spec.origin else self._folders(top)
        return any(_is_installed(place) for place in places)

    def version(self, top: str) -> str:
        """Return the version of an installed module, or when it was installed if its package has another name."""
        try:
            return importlib.metadata.version(top)
        except importlib.metadata.PackageNotFoundError:
            spec = self._spec(top)
            # Which package a module is from takes seconds to find out.
            origin = Path(spec.origin) if spec is not None and spec.origin else None
            return f"{origin.stat().st_mtime:.0f}" if origin is not None and origin.is_file() else ""

    def file_of(self, name: str) -> Path | None:
        """Return the source of a module; None if it has none, or is an attribute of a module."""
        top, _, rest = name.partition(".")
        spec = self._spec(top)
        if not rest:
            return Path(spec.origin) if spec is not None and spec.origin and spec.origin.endswith(".py") else None
        for folder in self._folders(top):
            below = folder.joinpath(*rest.split("."))
            for path in (below / "__init__.py", below.with_name(f"{below.name}.py")):
                if path.is_file():
                    return path
        return None


def _is_installed(place: Path) -> bool:
    if {"site-packages", "dist-packages"} & set(place.parts):
        return True
    return any(place.is_relative_to(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))
