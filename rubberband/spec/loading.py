"""Experiment files: YAML (1.2's core schema, no aliases, no tags) in, one clear error or an Experiment out.

The reader is strict because a slip costs money: duplicate keys, aliases, tags, unknown keys, NaN and infinity are
errors; `1e-4` is a number; `1:30` is a text. A word that people write for something else than a text, such as `no`,
`None`, `1_000` or `(3, 3)`, must be in quotes.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import Field, ValidationError
from yaml.events import AliasEvent, NodeEvent

from rubberband.errors import InputError
from rubberband.installation import default_home
from rubberband.spec.account import POLICY_FILE, AccountPolicy, fill
from rubberband.spec.experiment import Experiment
from rubberband.spec.fields import Count, DocumentError, Gpus, WordError, Words, dotted, name_like, word_error
from rubberband.spec.fields import Path as KeyPath
from rubberband.spec.key_examples import add_examples
from rubberband.spec.pool import PoolFile, on_pool
from rubberband.spec.profile_file import load_profile, save_profile
from rubberband.units import did_you_mean, shown
from rubberband.values.plan import Market, Plan, StagePlan

_Model = TypeVar("_Model", bound=Words)

# YAML as experiment files use it: the core schema of YAML 1.2, without its traps.
#
# No aliases, anchors, tags, duplicate keys or merge keys; only `true` and `false` are booleans, `1e-4` is a number,
# `1:30` and dates are not special, infinity and NaN are refused, and so are plain texts that YAML 1.1 or Python takes
# for something else.

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

_NUMBER = r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
_UNCLEAR = {
    r"yes|Yes|YES|on|On|ON": "may be meant as true; write true",
    r"no|No|NO|off|Off|OFF": "may be meant as false; write false",
    r"None": "may be meant as null; write null",
    r"[-+]?[0-9]*(?:[0-9]_[0-9]+)+(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?": "is no number; leave out the underscores",
    r"[-+]?0b[01]+": "is no number; write it in decimal digits",
    r"[-+]?(?:inf|Inf|INF|infinity|Infinity|nan|NaN|NAN)": "is not a finite number; write one that is",
    rf"{_NUMBER} ?(?:\*\*?|\^|/) ?{_NUMBER}": "is not computed; write the number",
    r"\([^()]*,[^()]*\)": "is not a list; write it in brackets, such as [3, 3]",
    r"[^()]*[()][^()]*": "has a lone parenthesis; write lists in brackets, such as [[3, 3], [5, 5]]",
}
"""Plain texts that are mostly meant as something else -> what is wrong, and what to write."""


class YamlError(Exception):
    """A fault in a text: its `reason` in one line, and its `line` (from 1)."""

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
for _each in (_Loader, Dumper):
    _each.add_implicit_resolver("unclear", re.compile(rf"(?:{'|'.join(_UNCLEAR)})\Z"), None)


def read_yaml(text: str) -> tuple[Any, dict[KeyPath, int]]:
    """Return the value of a text (None if empty), and the line (from 1) of every key and list item.

    Raises YamlError.
    """
    lines: dict[KeyPath, int] = {}
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
    """Return the parser's reason on one line, printable, and with the remedy."""
    line = " ".join(reason.split())
    return f"{line if line.isprintable() else ascii(line)}; check quotes, brackets and indentation"


def _value(node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int]) -> Any:
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, path, lines)
    if isinstance(node, yaml.SequenceNode):
        items = []
        for index, item in enumerate(node.value):
            lines[*path, index] = item.start_mark.line + 1
            items.append(_value(item, (*path, index), lines))
        return items
    return _scalar(node)


def _mapping(node: yaml.MappingNode, path: KeyPath, lines: dict[KeyPath, int]) -> dict[str | int, Any]:
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
        if value_node.tag.endswith(":null") and value_node.value == "":
            name, colon, after = str(key).partition(":")
            remedy = f"put a space after its colon: {name}: {after}" if colon else "write one, or null"
            raise YamlError(line, f"{shown(key)} has no value; {remedy}")
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
        case "unclear":
            reason = next(reason for pattern, reason in _UNCLEAR.items() if re.fullmatch(pattern, text))
            raise YamlError(line, f"{shown(text)} {reason}, or put it in quotes if the text is meant")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise YamlError(line, f"{shown(text)} holds half of a surrogate pair; write the character itself") from None
    return text


def _integer(text: str, line: int) -> int:
    if len(text) > 300:
        raise YamlError(line, f"{shown(text)} has too many digits; write a smaller number")
    digits = text.lstrip("-+")
    if digits[0] == "0" and digits.isdigit() and digits.strip("0"):
        raise YamlError(
            line, f"{text} has a leading zero, and YAML 1.1 counts it by 8; write {int(text)}, or put it in quotes"
        )
    base = {"0o": 8, "0x": 16}.get(text[:2], 10)
    return int(text[2:] if base != 10 else text, base)


def _float(text: str, line: int) -> float:
    number = math.inf if text[-1].isalpha() else float(text)
    if not math.isfinite(number):
        raise YamlError(line, f"{text if len(text) < 40 else shown(text)} is not a finite number; write one that is")
    return number


__all__ = [
    "default_profile_path",
    "dump_experiment",
    "experiment_of",
    "experiment_schema",
    "load_experiment",
    "load_pool",
    "load_profile",
    "names_no_profile",
    "parse_experiment",
    "save_profile",
]

MAX_BYTES = 256 << 10
"""Largest experiment file."""


def load_experiment(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Experiment:
    """Read an experiment file; `overrides` such as `constraints.deadline=30m` replace single values of it.

    On EC2, a bucket and a region that the file does not name are those of `rubberband aws setup`. A relative `profile`
    or `resources.catalogue` is taken from the file's folder. Without a profile, the file that `rubberband profile`
    writes by default (`default_profile_path`) is used if it exists.

    Args:
        path: The YAML or JSON file.
        overrides: Values that replace those of the file, as after `-s`.

    Returns:
        The experiment, for `rubberband.tune(experiment=...)` and `rubberband.estimate(experiment=...)`.

    Raises:
        InputError: In one line, with file and line where they are known, for what does not fit.

    Examples:
        >>> experiment = rubberband.load_experiment("experiment.yaml", ["constraints.deadline=30m"])
        >>> experiment.constraints.deadline
        1800.0
    """
    where = Path(path)
    words, origins = _document(_read(where), where.name)
    _override(words, origins, overrides, "-s")
    _locate(words, where)
    fill(words.get("resources"), words.get("name"), default_home())
    notes = list[str]()
    return _experiment(_on_pool(words, origins, where.name, notes.append), origins, where.name).with_notes(*notes)


def load_pool(path: str | os.PathLike[str]) -> PoolFile:
    """Read a pool file; a pool without a name takes that of the file. Raises InputError in one line."""
    where = Path(path)
    words, origins = _document(
        _read(where, "pool"), where.name, "pool", "a pool: instances, gpus_per_instance, provider"
    )
    if "search" in words:
        raise InputError(
            f"{where.name} is an experiment file; give the file of a pool: instances, gpus_per_instance, …"
        )
    words = {"name": name_like(where.stem) or "pool", **words}
    fill(words, words["name"], default_home())
    return _validated(PoolFile, words, origins, where.name)


class PlannedStage(Words):
    """A stage of a plan."""

    instances: Count
    gpus_per_trial: Gpus
    market: Market = "on_demand"


class PlanFile(Words):
    """A plan, as `rubberband estimate --plan` reads it."""

    stages: Annotated[tuple[PlannedStage, ...], Field(min_length=1)]


def load_plan(path: Path) -> Plan:
    """Read the file of a plan. Raises InputError in one line."""
    keys = '{"stages": [{"instances": 4, "gpus_per_trial": 1}]}'
    words, origins = _document(_read(path, "plan"), str(path), "plan", keys)
    stages = _validated(PlanFile, words, origins, str(path)).stages
    return Plan(stages=tuple(StagePlan(**dict(stage)) for stage in stages))


def load_policy(home: Path) -> AccountPolicy | None:
    """Return the policy of the account that a home rents with; None without one. Raises InputError in one line."""
    where = home / POLICY_FILE
    try:
        os.lstat(where)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:  # it may be there: reading it says what is wrong
        pass
    keys = f"limits: {', '.join(AccountPolicy.model_fields)}"
    words, origins = _document(_read(where, "policy"), where.name, "policy", keys)
    return _validated(AccountPolicy, words, origins, where.name)


def _validated(model: type[_Model], words: Mapping[Any, Any], origins: Mapping[KeyPath, str], source: str) -> _Model:
    """Return the words as a model. Raises InputError, with the place of the wrong one."""
    try:
        return model.model_validate(words)
    except ValidationError as error:
        raise _placed(word_error(error, words, model.model_validate), origins, source) from None


def _placed(error: WordError, origins: Mapping[KeyPath, str], source: str) -> InputError:
    """Return the error with the place of each fault, a line for each."""
    lines = []
    for each in error.each():
        known = (each.path[:length] for length in range(len(each.path), 0, -1))
        place = next((origins[path] for path in known if path in origins), source)
        lines.append(f"{place}: {each}" if place and each.path else str(each))
    return DocumentError(lines)


def parse_experiment(
    text: str | bytes, *, source: str = "experiment", overrides: Sequence[str] = (), option: str = "-s"
) -> Experiment:
    """Return the experiment in a text; errors name it `source`, and its overrides `option`.

    Paths in it stay as they are. Raises InputError like `load_experiment`.
    """
    words, origins = _document(text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text, source)
    _override(words, origins, overrides, option)
    return _experiment(words, origins, source)


def experiment_of(words: dict[Any, Any], *, overrides: Sequence[str] = (), option: str = "-s") -> Experiment:
    """Return the experiment in JSON values, which the overrides change in place. Raises InputError."""
    origins: dict[KeyPath, str] = {}
    _override(words, origins, overrides, option)
    return _experiment(words, origins, "")


def dump_experiment(experiment: Experiment) -> str:
    """Return the text of an experiment file that reads back as `experiment` (an absolute deadline stays absolute)."""
    return str(yaml.dump(experiment.to_words(), Dumper=Dumper, sort_keys=False, allow_unicode=True))


def default_profile_path(path: str | os.PathLike[str]) -> Path:
    """Return the default output of `rubberband profile FILE`: `<stem>.profile.json` beside the experiment file."""
    return Path(path).with_name(f"{Path(path).stem}.profile.json")


def names_no_profile(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> bool:
    """Whether an experiment file has no profile but the one that lies beside it, at `default_profile_path`."""
    words, origins = _document(_read(Path(path)), Path(path).name)
    _override(words, origins, overrides, "-s")
    return "profile" not in words and default_profile_path(path).is_file()


def experiment_schema() -> str:
    """Return the JSON Schema of the experiment file, as published in rubberband/experiment.schema.json."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Experiment.model_json_schema(by_alias=True),
        "title": "RubberBand experiment, version 1",
    }
    add_examples(schema)
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def _read(path: Path, kind: str = "experiment") -> bytes:
    is_line = " " in str(path).strip() and path.suffix not in (".yaml", ".yml", ".json") and not path.exists()
    is_script = path.suffix in (".py", ".sh") and path.is_file()
    if is_script or is_line or (re.fullmatch(r"[\w.]+:[\w.]+", path.name) and not path.exists()):
        trial = str(path) if is_script or is_line else path.name
        named = "a command line" if is_line else "a shell script" if path.suffix == ".sh" else "Python"
        raise InputError(
            f"{shown(str(path))} is {named}, and no {kind} file; write one with `rubberband init {shlex.quote(trial)}` "
            "(docs/commands.md, docs/write-a-trial.md)"
        )
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise InputError(
            f"there is no {kind} file {shown(str(path))}{_near_file(path) or '; check the path'}"
        ) from None
    except IsADirectoryError:
        raise InputError(f"{shown(str(path))} is a folder; give the {kind} file in it") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"{shown(str(path))} cannot be read ({reason}); give a readable file") from None
    return content


def _near_file(path: Path) -> str:
    beside = path.parent.glob("*") if path.parent.is_dir() else ()
    return did_you_mean(str(path), (str(file) for file in beside if file.suffix in (".yaml", ".yml", ".json")))


def _document(
    content: bytes,
    source: str,
    kind: str = "experiment",
    keys: str = "an experiment: name, search, constraints, resources",
) -> tuple[dict[Any, Any], dict[KeyPath, str]]:
    """Return the mapping in a text, and the place of each key (`file:line`)."""
    if len(content) > MAX_BYTES:
        raise InputError(f"{source} is larger than {MAX_BYTES >> 10} KiB: no {kind} file; shorten it")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(f"{source}:{line}: not UTF-8 (byte {error.start}); save the file as UTF-8") from None
    try:
        value, lines = read_yaml(text)
    except YamlError as error:
        raise InputError(f"{source}:{error.line}: {error.reason}") from None
    if value is None:
        raise InputError(f"{source} is empty; write {keys}")
    if not isinstance(value, dict):
        raise InputError(f"{source}:1: {shown(value)} is not a mapping; write {keys}")
    return value, {path: f"{source}:{line}" for path, line in lines.items()}


def _on_pool(
    words: dict[Any, Any], origins: dict[KeyPath, str], source: str, announce: Callable[[str], None]
) -> dict[Any, Any]:
    """Return the words with what their pool sets. Raises InputError."""
    try:
        return on_pool(words, default_home(), announce)
    except WordError as error:
        raise InputError(f"{origins.get(error.path, source)}: {error}") from None


def _experiment(words: dict[Any, Any], origins: dict[KeyPath, str], source: str) -> Experiment:
    try:
        return Experiment.model_validate(words)
    except WordError as error:
        raise _placed(error, origins, source) from None


def _override(words: dict[Any, Any], origins: dict[KeyPath, str], overrides: Sequence[str], option: str) -> None:
    for override in overrides:
        origins[_overridden(words, override, option)] = option


def _overridden(words: dict[Any, Any], override: str, option: str) -> KeyPath:
    """Set one value in `words`, and return its path."""
    key_text, equals, value_text = override.partition("=")
    keys = [int(part) if re.fullmatch("[0-9]{1,9}", part) else part for part in key_text.split(".")]
    if not equals or not re.fullmatch(r"[^\s.=]+(\.[^\s.=]+)*", key_text):
        raise InputError(f"{option} {shown(override)} is not key=value; write it as {option} constraints.deadline=30m")
    if keys == ["constraints", "max_cost"] and not value_text.strip():
        raise InputError(
            f"{option} {key_text}: no amount (a shell reads $5 as a variable, unless it is quoted); write "
            f"{key_text}=5 or '{key_text}=$5', or {key_text}=null for no cap"
        )
    try:
        value, _ = read_yaml(value_text)
    except YamlError as error:
        raise InputError(f"{option} {dotted(tuple(keys))}: {error.reason}") from None
    search = words.get("search")
    space = search.get("space") if isinstance(search, dict) else None
    if isinstance(space, dict) and key_text in space and key_text not in Experiment.model_fields:
        raise InputError(f"{option} {key_text}: unknown key; write {option} search.space.{override}")
    target = words
    for length, part in enumerate(keys[:-1], start=1):
        key = _spelt(part, target)
        if target.get(key) is None:
            target[key] = {}
        target = target[key]
        if not isinstance(target, dict):
            raise InputError(f"{option} {key_text}: {dotted(tuple(keys[:length]))} is no mapping; override all of it")
    target[_spelt(keys[-1], target)] = value
    return tuple(keys)


def _spelt(key: str | int, target: dict[Any, Any]) -> str | int:
    """Return a key as the mapping has it: JSON has whole numbers as texts."""
    return str(key) if str(key) in target else key


def _locate(words: dict[Any, Any], path: Path) -> None:
    """Resolve the relative paths in an experiment file from its folder, and add the default profile if it has none."""
    if "profile" not in words and default_profile_path(path).is_file():
        words["profile"] = default_profile_path(path).name
    profile = words.get("profile")
    by_type = profile.get("by_instance_type") if isinstance(profile, dict) else None
    _join(words, ("profile",), path)
    _join(by_type, tuple(by_type) if isinstance(by_type, dict) else (), path)
    _join(words.get("resources"), ("catalogue",), path)


def _join(holder: Any, keys: Sequence[Any], path: Path) -> None:
    for key in keys if isinstance(holder, dict) else ():
        if isinstance(holder.get(key), str):
            holder[key] = str(path.absolute().parent / holder[key])
