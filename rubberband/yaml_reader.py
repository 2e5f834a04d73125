"""YAML as experiment files use it: the core schema of YAML 1.2, without what surprises or bites.

No aliases, anchors, tags, duplicate keys or merge keys; only `true` and `false` are booleans, `1e-4` is a number,
`0777`, `1:30`, dates, `on` and `no` are not special, infinity and NaN are refused. Knows nothing of experiments.
"""

from __future__ import annotations

import math
import re
from typing import Any

import yaml
from yaml.events import AliasEvent, NodeEvent

from rubberband.units import shown
from rubberband.words import Path as FieldPath

MAX_DEPTH = 32
"""Deepest nesting of mappings and lists."""

_CORE = {
    "tag:yaml.org,2002:null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "tag:yaml.org,2002:bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "tag:yaml.org,2002:int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    "tag:yaml.org,2002:float": (
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+0123456789."),
    ),
}


class YamlError(Exception):
    """What is wrong in a text, in one line, and in which `line` (from 1)."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(reason)
        self.line = line
        self.reason = reason


class _Loader(yaml.SafeLoader):
    """PyYAML's parser with the core schema; composes nodes one level at a time, never deeper than MAX_DEPTH."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012
    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        line = event.start_mark.line + 1
        if isinstance(event, AliasEvent) or (isinstance(event, NodeEvent) and event.anchor is not None):
            raise YamlError(line, f"aliases and anchors ({shown(event.anchor)}) are not read; write the value out")
        if getattr(event, "tag", None) is not None:
            raise YamlError(line, f"tags ({shown(event.tag)}) are not read; remove it")
        if self.depth >= MAX_DEPTH:
            raise YamlError(line, f"nested more than {MAX_DEPTH} deep; flatten it")
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1


class Dumper(yaml.SafeDumper):
    """Writes what `read_yaml` reads back: quotes texts that the core schema would take for something else."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012

    def ignore_aliases(self, data: Any) -> bool:
        return True


_LINE_BREAKS = re.compile("[\x85\u2028\u2029]")
"""Line breaks of YAML 1.1 that PyYAML writes as they are outside double quotes, and reads back as others."""


def _text_node(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = '"' if _LINE_BREAKS.search(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


Dumper.add_representer(str, _text_node)

for _tag, (_pattern, _first) in _CORE.items():
    _compiled = re.compile(rf"(?:{_pattern})\Z", re.ASCII)
    _Loader.add_implicit_resolver(_tag, _compiled, _first)
    Dumper.add_implicit_resolver(_tag, _compiled, _first)


def read_yaml(text: str) -> tuple[Any, dict[FieldPath, int]]:
    """The value of a text, and the line (from 1) of every key and list item. An empty text is None.

    Raises YamlError.
    """
    lines: dict[FieldPath, int] = {}
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return (None if node is None else _value(node, (), lines)), lines
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        reason = " ".join(str(error.problem or error.context).split())
        raise YamlError(mark.line + 1 if mark else 1, f"not YAML: {shown_reason(reason)}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlError(line, f"character {shown(chr(error.character))} is not allowed; remove it") from None
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        line = loader.line + 1 if loader else 1
        raise YamlError(line, f"not YAML: {shown_reason(str(error))}") from None
    finally:
        if loader is not None:
            loader.dispose()


def shown_reason(reason: str) -> str:
    """The parser's reason on one line, printable, and with the remedy."""
    line = " ".join(reason.split())
    return f"{line if line.isprintable() else ascii(line)}; check quotes, brackets and indentation"


def _value(node: yaml.Node, path: FieldPath, lines: dict[FieldPath, int]) -> Any:
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, path, lines)
    if isinstance(node, yaml.SequenceNode):
        items = []
        for index, item in enumerate(node.value):
            lines[*path, index] = item.start_mark.line + 1
            items.append(_value(item, (*path, index), lines))
        return items
    return _scalar(node)


def _mapping(node: yaml.MappingNode, path: FieldPath, lines: dict[FieldPath, int]) -> dict[str | int, Any]:
    mapping: dict[str | int, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise YamlError(line, "a list or mapping cannot be a key; write a text or a whole number")
        key = _scalar(key_node)
        if isinstance(key, bool) or not isinstance(key, str | int):
            raise YamlError(line, f"key {shown(key)} is neither a text nor a whole number; put it in quotes")
        if key in mapping:
            raise YamlError(line, f"key {shown(key)} occurs twice (first in line {lines[*path, key]}); remove one")
        lines[*path, key] = line
        mapping[key] = _value(value_node, (*path, key), lines)
    return mapping


def _scalar(node: yaml.Node) -> bool | int | float | str | None:
    text, line = str(node.value), node.start_mark.line + 1
    match node.tag.rpartition(":")[2]:
        case "null":
            return None
        case "bool":
            return text.lower() == "true"
        case "int":
            return _integer(text, line)
        case "float":
            return _float(text, line)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise YamlError(line, f"{shown(text)} holds half of a surrogate pair; write the character itself") from None
    return text


def _integer(text: str, line: int) -> int:
    if len(text) > 300:
        raise YamlError(line, f"{shown(text)} has too many digits; write a smaller number")
    base = {"0o": 8, "0x": 16}.get(text[:2], 10)
    return int(text[2:] if base != 10 else text, base)


def _float(text: str, line: int) -> float:
    number = math.inf if text[-1].isalpha() else float(text)
    if not math.isfinite(number):
        raise YamlError(line, f"{text if len(text) < 40 else shown(text)} is not a finite number; write one that is")
    return number
