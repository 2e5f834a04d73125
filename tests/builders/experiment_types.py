"""`python -m tests.builders.experiment_types` writes the JSON Schema of the file, and `rubberband/types.py` from it."""

from __future__ import annotations

import json
import keyword
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import rubberband
from rubberband.spec.loading import experiment_schema

PATH = Path(rubberband.__file__).resolve().with_name("types.py")

_HEAD = '''\
"""The keys of the experiment file as types, for `rubberband.tune`, `estimate`, `Experiment` and your annotations.

Made from the JSON Schema of the file by `python -m tests.builders.experiment_types`. Type checkers read it; a program
imports it only if you do: `search: rubberband.types.SearchDict = {...}` is a mapping with checked keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, Required, TypedDict

if TYPE_CHECKING:
    from rubberband.spec.experiment import Experiment
'''
_TUNE = '''

class TuneDict(ExperimentDict, total=False):
    """The keys of `rubberband.tune` and `rubberband.estimate`: those of the file, or a whole experiment."""

    experiment: Experiment
'''
_SCALARS = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"}
_SCALARS |= {"object": "Mapping[str, Any]"}
# What Python may give where a file has words only: objects of Ray Tune and Optuna in a space, too.
_PYTHON = {
    "entrypoint": "Any",
    "space": "Mapping[str, Any]",
    "deadline": "float | str | datetime | None",
    "secrets": "Sequence[str]",
}


def experiment_types() -> str:
    schema = json.loads(experiment_schema())
    text = _HEAD
    domains = {part["$ref"].rpartition("/")[2] for part in _space(schema)["oneOf"]}
    for name, definition in sorted(schema["$defs"].items()):
        if name not in domains:
            text += "\n\n" + _class(_named(name), definition)
    whole = schema | {"required": [], "description": "The keys of the experiment file; `name` and `search` are needed."}
    return text + "\n\n" + _class("ExperimentDict", whole) + _TUNE


def _space(schema: Mapping[str, Any]) -> Any:
    return schema["$defs"]["Search"]["properties"]["space"]["additionalProperties"]["anyOf"][0]


def _named(definition: str) -> str:
    return definition.removesuffix("Words") + "Dict"


def _class(name: str, definition: Mapping[str, Any]) -> str:
    if any(keyword.iskeyword(key) for key in definition["properties"]):  # such as `from`, which no class can have
        kinds = {key: " | ".join(dict.fromkeys(_kinds(value))) for key, value in definition["properties"].items()}
        words = ", ".join(f'"{key}": {kind}' for key, kind in kinds.items())
        text = re.sub(r"\s+", " ", definition.get("description", name))
        return f'{name} = TypedDict("{name}", {{{words}}}, total=False)\n"""{text}"""\n'
    lines = [f"class {name}(TypedDict, total=False):", *_docstring(definition.get("description", name)), ""]
    for key, value in definition["properties"].items():
        kind = _PYTHON.get(key) or " | ".join(dict.fromkeys(_kinds(value)))
        lines.append(f"    {key}: {f'Required[{kind}]' if key in definition.get('required', ()) else kind}")
        lines += _docstring(value.get("description", ""))
    return "\n".join(lines) + "\n"


def _docstring(text: str) -> list[str]:
    if not text:
        return []
    plain = re.sub(r"\s+", " ", text)
    return textwrap.wrap(f'"""{plain}"""', 116, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)


def _kinds(schema: Mapping[str, Any]) -> Iterator[str]:
    """The alternatives of a value, as annotations."""
    if "$ref" in schema:
        yield _named(schema["$ref"].rpartition("/")[2])
    elif "const" in schema or "enum" in schema:
        yield f"Literal[{', '.join(json.dumps(one) for one in schema.get('enum', [schema.get('const')]))}]"
    elif parts := [*schema.get("anyOf", ()), *schema.get("oneOf", ())]:
        for part in parts:
            yield from _kinds(part)
    elif schema.get("type") == "array":
        yield f"Sequence[{' | '.join(dict.fromkeys(_kinds(schema['items'])))}]"
    elif schema.get("type") == "object" and isinstance(schema.get("additionalProperties"), Mapping):
        values = " | ".join(dict.fromkeys(_kinds(schema["additionalProperties"])))
        keys = [key for example in schema.get("examples", ()) for key in example]
        # JSON has texts as keys only; counts of GPUs are numbers in Python.
        yield f"Mapping[str, {values}]"
        if keys and all(key.isdigit() for key in keys):
            yield f"Mapping[int, {values}]"
    else:
        yield _SCALARS.get(schema.get("type", ""), "Any")


def formatted() -> str:
    """Return the text as `ruff format` leaves it."""
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(PATH), "-"]
    return subprocess.run(command, input=experiment_types(), capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    PATH.with_name("experiment.schema.json").write_text(experiment_schema(), encoding="utf-8")
    PATH.write_text(formatted(), encoding="utf-8")
