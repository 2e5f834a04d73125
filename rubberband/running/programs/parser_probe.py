"""Runs a program until it parses its arguments, writes down its options, and ends it there.

`parsers.py` starts this file with the program's own Python: only the standard library is imported, and that by
versions of Python that this package does not support. The first argument is the file of the answer, the others are the
program and its arguments, as Python takes them: `train.py --data d`, `-m package.train`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import sys
import threading
from typing import Any, NoReturn

_SMALL = 3
"""A parser of so few options that is asked for the ones it knows may read a configuration file before another one."""
_SECOND_S = 10.0
"""Time in which that other one has to be asked."""
_COMMANDS = ("train", "fit", "run", "main")
"""Subcommands that are chosen where the words name none."""

ANSWER = ""
"""File of the answer."""


def main() -> None:
    """Run the program; it ends in `stop`, or by itself."""
    global ANSWER
    ANSWER, program = os.path.abspath(sys.argv[1]), sys.argv[2:]
    _patch_argparse()
    if program[0] == "-m":
        sys.argv = program[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = program
    sys.path[0] = os.path.dirname(os.path.abspath(program[0]))
    runpy.run_path(program[0], run_name="__main__")


def stop(options: list[dict[str, Any]], commands: list[str] | None = None, **more: Any) -> NoReturn:
    """Write the options down, and end the program."""
    text = json.dumps({"options": options, "commands": commands or [], **more}, default=repr)
    with open(ANSWER + ".part", "w") as file:
        file.write(text)
    os.rename(ANSWER + ".part", ANSWER)
    os._exit(0)


def chosen(words: list[str], names: list[str]) -> str | None:
    """Return the subcommand that the words name, or else the one that trains; None: it is not known."""
    found = next((word for word in words if word in names), None)
    if found is None and not any(word in names for word in words):
        found = next((name for name in _COMMANDS if name in names), None)
    return found if found is not None or len(names) != 1 else names[0]


# argparse, and all that is made of it: ConfigArgParse, simple-parsing, HfArgumentParser, jsonargparse.


def _patch_argparse() -> None:
    base: Any = argparse.ArgumentParser
    parse, known = base.parse_args, base.parse_known_args
    final: list[Any] = []
    first: list[dict[str, Any]] = []

    def parse_args(parser: Any, args: Any = None, namespace: Any = None) -> Any:
        if type(parser).parse_known_args is base.parse_known_args:
            _stop_parser(parser, first)
        final.append(parser)  # it adds options as it parses
        return parse(parser, args, namespace)

    def parse_known_args(parser: Any, args: Any = None, namespace: Any = None, **more: Any) -> Any:
        if parser in final or len(parser._actions) > _SMALL or not _is_another(parser):
            _stop_parser(parser, first)
        if not first:
            first.extend(_options(parser, 0)[0])
            late = threading.Timer(_SECOND_S, lambda: stop(first))
            late.daemon = True
            late.start()
        return known(parser, args, namespace, **more)

    base.parse_args = base.parse_intermixed_args = parse_args
    base.parse_known_args = base.parse_known_intermixed_args = parse_known_args


def _is_another(parser: Any) -> bool:
    """Whether the program that calls it asks a parser in several places."""
    frame: Any = sys._getframe(2)
    while frame is not None and os.path.basename(frame.f_code.co_filename) in ("argparse.py", "parser_probe.py"):
        frame = frame.f_back
    try:
        with open(frame.f_code.co_filename, encoding="utf-8", errors="replace") as file:
            return len(re.findall(r"\.parse_\w*args\w*\(", file.read())) > 1
    except (AttributeError, OSError):
        return True


def _stop_parser(parser: Any, before: list[dict[str, Any]]) -> NoReturn:
    options, commands = _options(parser, 0)
    names = {option["name"] for option in options}
    stop([option for option in before if option["name"] not in names] + options, commands)


def _options(parser: Any, level: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the options of the parser and of the subparsers that the words name, and the names of these."""
    found: list[dict[str, Any]] = []
    commands: list[str] = []
    subparsers: Any = None
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            subparsers = action
        elif not isinstance(action, (argparse._HelpAction, argparse._VersionAction)):
            found.append(dict(_option(action), level=level))
    if subparsers is not None:
        name = chosen(sys.argv[1:], list(subparsers.choices))
        if name is None and subparsers.required:
            found.append({"name": "one of " + ", ".join(subparsers.choices), "required": True, "kind": "other"})
        elif name is not None:
            options, commands = _options(subparsers.choices[name], level + 1)
            return found + options, [name, *commands]
    return found, commands


_KINDS = {"StoreAction": "value", "StoreTrueAction": "switch", "BooleanOptionalAction": "pair"}


def _option(action: Any) -> dict[str, Any]:
    kind = _KINDS.get(type(action).__name__.strip("_"), "other")
    flags = list(action.option_strings)
    off = next((flag for flag in flags if flag.startswith("--no-")), "") if kind == "pair" else ""
    return {
        "name": action.dest,
        "flags": flags,
        "kind": kind if kind != "pair" or off else "other",
        "off": off,
        "type": getattr(action.type, "__name__", None) if action.type is not None else None,
        "default": None if action.default == argparse.SUPPRESS else action.default,
        "choices": list(action.choices) if action.choices is not None else None,
        "takes_one": action.nargs in (None, "?") or kind != "value",
        "required": bool(action.required),
        "booleans": _booleans(action, kind),
        "help": action.help if isinstance(action.help, str) else "",
    }


def _booleans(action: Any, kind: str) -> list[str] | None:
    """Return the words for true and false that the option's type distinguishes; None for a text, or another option.

    Only the type of an option that is true or false, or was given such a word, is called: others may open files.
    """
    given = {word.lower() for flag in action.option_strings for word in _given(flag)}
    if action.type in (None, str) or not callable(action.type) or kind != "value":
        return None
    if not (given & {"true", "false"} or isinstance(action.default, bool)):
        return None
    return styles(action.type)


def styles(read: Any) -> list[str]:
    """Return the words for true and false that a function distinguishes."""
    found = []
    for words in ("true/false", "True/False", "1/0"):
        try:
            one, other = (read(word) for word in words.split("/"))
        except BaseException:  # it refuses words that it does not know
            continue
        if one != other:
            found.append(words)
    return found


def _given(flag: str) -> list[str]:
    words = [*sys.argv[1:], ""]
    return [
        words[at + 1] if word == flag else word[len(flag) + 1 :]
        for at, word in enumerate(words)
        if word == flag or word.startswith(flag + "=")
    ]


if __name__ == "__main__":
    main()
