"""Experiment files: YAML (1.2's core schema, no aliases, no tags) in, one clear error or an Experiment out.

The reader is strict because a slip costs money: duplicate keys, aliases, tags, unknown keys, NaN and infinity are
errors; `1e-4` is a number; `on`, `no` and `1:30` are texts.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from rubberband.errors import InputError
from rubberband.experiment import Experiment
from rubberband.profile_file import load_profile, save_profile
from rubberband.units import shown
from rubberband.words import Path as KeyPath
from rubberband.words import WordError, dotted
from rubberband.yaml_reader import Dumper, YamlError, read_yaml

__all__ = [
    "default_profile_path",
    "dump_experiment",
    "experiment_of",
    "experiment_schema",
    "load_experiment",
    "load_profile",
    "parse_experiment",
    "save_profile",
]

MAX_BYTES = 256 << 10
"""Largest experiment file."""


def load_experiment(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Experiment:
    """Read an experiment file; `overrides` such as `constraints.deadline=30m` replace single values of it.

    A relative `profile` or `resources.catalogue` is taken from the file's folder. Without a profile, the file that
    `rubberband profile` writes by default (`default_profile_path`) is used if it exists.

    Raises InputError (one line, with file and line where they are known) for whatever does not fit.
    """
    where = Path(path)
    experiment_words, origins = _document(_read(where), where.name)
    for override in overrides:
        _override(experiment_words, origins, override, "-s")
    _locate(experiment_words, where)
    return _experiment(experiment_words, origins, where.name)


def parse_experiment(
    text: str | bytes, *, source: str = "experiment", overrides: Sequence[str] = (), option: str = "-s"
) -> Experiment:
    """An experiment from the text of its file; `source` is its name in errors, and `option` that of `overrides`.

    Nothing else is read: paths in it stay as they are. Raises InputError like the above.
    """
    experiment_words, origins = _document(
        text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text, source
    )
    for override in overrides:
        _override(experiment_words, origins, override, option)
    return _experiment(experiment_words, origins, source)


def experiment_of(experiment_words: dict[Any, Any], *, overrides: Sequence[str] = (), option: str = "-s") -> Experiment:
    """An experiment from its words, as JSON holds them; they are changed by the overrides. Raises InputError."""
    origins: dict[KeyPath, str] = {}
    for override in overrides:
        _override(experiment_words, origins, override, option)
    return _experiment(experiment_words, origins, "")


def dump_experiment(experiment: Experiment) -> str:
    """The text of an experiment file that reads back as `experiment` (an absolute deadline stays absolute)."""
    text = yaml.dump(experiment.to_words(), Dumper=Dumper, sort_keys=False, allow_unicode=True)
    return str(text)


def default_profile_path(path: str | os.PathLike[str]) -> Path:
    """Where `rubberband profile FILE` writes by default: `<stem>.profile.json` beside the experiment file."""
    return Path(path).with_name(f"{Path(path).stem}.profile.json")


def experiment_schema() -> str:
    """The JSON Schema of the experiment file, as it is published in rubberband/experiment.schema.json."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Experiment.model_json_schema(by_alias=True),
        "title": "RubberBand experiment, version 1",
    }
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def _read(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise InputError(f"there is no experiment file {shown(str(path))}; check the path") from None
    except IsADirectoryError:
        raise InputError(f"{shown(str(path))} is a folder; give the experiment file in it") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"{shown(str(path))} cannot be read ({reason}); give a readable file") from None
    return content


def _document(content: bytes, source: str) -> tuple[dict[Any, Any], dict[KeyPath, str]]:
    """What the text holds, and where each key stands (`file:line`)."""
    if len(content) > MAX_BYTES:
        raise InputError(f"{source} is larger than {MAX_BYTES >> 10} KiB: no experiment file; shorten it")
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
        raise InputError(f"{source} is empty; write an experiment: name, search, constraints, resources")
    if not isinstance(value, dict):
        raise InputError(f"{source}:1: {shown(value)} is not a mapping; write an experiment: name, search, ...")
    return value, {path: f"{source}:{line}" for path, line in lines.items()}


def _experiment(words: dict[Any, Any], origins: dict[KeyPath, str], source: str) -> Experiment:
    try:
        return Experiment.model_validate(words)
    except WordError as error:
        known = (error.path[:length] for length in range(len(error.path), 0, -1))
        origin = next((origins[path] for path in known if path in origins), source)
        raise InputError(f"{origin}: {error}" if origin else str(error)) from None


def _override(words: dict[Any, Any], origins: dict[KeyPath, str], override: str, option: str) -> None:
    key_text, equals, value_text = override.partition("=")
    keys = [_key(part) for part in key_text.split(".")]
    if not equals or not re.fullmatch(r"[^\s.=]+(\.[^\s.=]+)*", key_text):
        raise InputError(f"{option} {shown(override)} is not key=value; write it as {option} constraints.deadline=30m")
    try:
        value, _ = read_yaml(value_text)
    except YamlError as error:
        raise InputError(f"{option} {dotted(tuple(keys))}: {error.reason}") from None
    target = words
    for length, part in enumerate(keys[:-1], start=1):
        key = _spelt(part, target)
        if target.get(key) is None:
            target[key] = {}
        target = target[key]
        if not isinstance(target, dict):
            raise InputError(f"{option} {key_text}: {dotted(tuple(keys[:length]))} is no mapping; override all of it")
    target[_spelt(keys[-1], target)] = value
    origins[tuple(keys)] = option


def _spelt(key: str | int, target: dict[Any, Any]) -> str | int:
    """A key as a mapping spells it: JSON has whole numbers as texts."""
    return str(key) if str(key) in target else key


def _key(text: str) -> str | int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else text


def _locate(words: dict[Any, Any], path: Path) -> None:
    """Take the relative paths in an experiment file from the file's folder, and its default profile if it has none."""
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
