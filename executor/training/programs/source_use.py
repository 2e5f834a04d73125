"""Whether a program's Python source uses an option."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Literal

Use = Literal["nothing", "unread", "read", "unknown"]
"""`nothing`: it reads no arguments at all; `unread`: it has the option, and never reads it."""

_READS = re.compile(
    r"argv|environ|getenv|pars(e|ing)|click|typer|\bfire\b|flags|hydra|omegaconf|tyro|absl|\bgin\b|sacred|cli\b|"
    r"docopt|getopt|config|stdin|\binput\(|rubberband|wandb|optuna"
)
"""Words of a program that may read its arguments."""
_WITHOUT_ARGUMENTS = re.compile(
    r"PIL|datasets|evaluate|flax|gymnasium|jax|keras|lightgbm|lightning|matplotlib|numpy|optax|pandas|scipy|seaborn|"
    r"pytorch_lightning|sklearn|tensorflow|torch|torchaudio|torchmetrics|torchvision|tqdm|transformers|xgboost"
)
"""Packages that read no arguments of a program."""
_AS_A_WHOLE = re.compile(
    r"\bvars\(|__dict__|asdict|locals\(|globals\(|setattr\(|\*\*\s*(args|config|cfg|conf|opts?|options|hparams|params|"
    r"hyperparameters)\b"
)
_SHOWS = re.compile(r"print|pprint|log|info|debug|warning|write|update|add_hparams|format")
"""Names of functions that only show what they get."""


def use_of(names: Collection[str], files: Iterable[Path]) -> Use:
    """Return what is known of the use of an option of these names, in the files of a program and its imports."""
    paths = [path for path in files if path.suffix == ".py" and path.is_file()]
    texts = [path.read_text(errors="replace") for path in paths]
    try:
        trees = [ast.parse(text) for text in texts]
    except (SyntaxError, ValueError):
        return "unknown"
    if not trees:
        return "unknown"
    nodes = [node for tree in trees for node in ast.walk(tree)]
    if not any(map(_READS.search, texts)):
        own = {path.stem for path in paths} | {path.parent.name for path in paths}
        others = _imports(nodes) - own - sys.stdlib_module_names
        return "nothing" if all(map(_WITHOUT_ARGUMENTS.fullmatch, others)) else "unknown"
    options = {name.replace("-", "_") for name in names}
    adding = [node for node in nodes if isinstance(node, ast.Call) and options & set(_options(node))]
    for call in adding:
        options |= set(_options(call))
        options |= {
            str(ast.literal_eval(key.value)) for key in call.keywords if key.arg == "dest" and _is_text(key.value)
        }
    aside = {id(part) for call in adding for part in ast.walk(call)}
    if any(_reads(node, options) for node in nodes if id(node) not in aside | _shown(nodes)):
        return "read"
    if not adding or any(map(_AS_A_WHOLE.search, texts)) or _goes_on(nodes):
        return "unknown"
    return "unread"


def reads_configuration(file: Path) -> bool:
    """Whether a file of a program may read the configuration that it is given beside its command line."""
    return "RUBBERBAND_CONFIG" in file.read_text(errors="replace")


def _imports(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the top packages that are imported, without the program's own modules, which are among its files."""
    found = set[str]()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def _options(call: ast.Call) -> Iterator[str]:
    """Iterate over the options that a call declares, without their dashes."""
    for value in call.args:
        if isinstance(value, ast.Constant) and isinstance(value.value, str) and value.value.startswith("-"):
            yield value.value.lstrip("-").replace("-", "_")


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _reads(node: ast.AST, names: Collection[str]) -> bool:
    if isinstance(node, ast.Attribute | ast.Name):
        name = node.attr if isinstance(node, ast.Attribute) else node.id
        return name in names and isinstance(node.ctx, ast.Load)
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.replace("-", "_") in names


def _shown(nodes: Iterable[ast.AST]) -> set[int]:
    """Return the nodes in calls that only show them."""
    calls = (node for node in nodes if isinstance(node, ast.Call) and _SHOWS.fullmatch(_name(node.func)))
    return {id(part) for call in calls for part in ast.walk(call)}


def _name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _goes_on(nodes: Collection[ast.AST]) -> bool:
    """Whether the parsed arguments go as a whole to a function that is not among the program's own."""
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    parsed = {
        _name(target)
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and "parse" in _name(node.value.func)
        for target in node.targets
    } | {"args", "opt", "config", "cfg", "hparams"}
    for node in nodes:
        if isinstance(node, ast.Call) and _name(node.func) not in own and not _SHOWS.fullmatch(_name(node.func)):
            given = [*node.args, *(key.value for key in node.keywords)]
            if any(isinstance(each, ast.Name) and each.id in parsed for each in given):
                return True
    return False
