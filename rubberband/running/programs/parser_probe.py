"""Runs a program until it parses its arguments, writes down its options, and ends it there.

`options.py` starts this file with the program's own Python: only the standard library is imported, and that by
versions of Python that this package does not support. The first argument is the pipe of the answer, the others are the
program and its arguments, as Python takes them: `train.py --data d`, `-m package.train`.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
from typing import Any, NoReturn

_SMALL = 3
"""A parser of so few options that is asked for the ones it knows reads a configuration file before the real parser."""


def main() -> None:
    """Run the program; it ends in `_stop`, or by itself."""
    answer, program = int(sys.argv[1]), sys.argv[2:]
    _patch(answer)
    if program[0] == "-m":
        sys.argv = program[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = program
    sys.path[0] = os.path.dirname(os.path.abspath(program[0]))
    runpy.run_path(program[0], run_name="__main__")


def _patch(answer: int) -> None:
    known = argparse.ArgumentParser.parse_known_args

    def stop(parser: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> NoReturn:
        _stop(answer, _chosen(parser, sys.argv[1:]))

    def maybe_stop(parser: argparse.ArgumentParser, args: Any = None, namespace: Any = None, **more: Any) -> Any:
        if len(parser._actions) > _SMALL:
            _stop(answer, _chosen(parser, sys.argv[1:]))
        return known(parser, args, namespace, **more)

    parser: Any = argparse.ArgumentParser
    parser.parse_args = parser.parse_intermixed_args = stop
    parser.parse_known_args = parser.parse_known_intermixed_args = maybe_stop


def _chosen(parser: argparse.ArgumentParser, words: list[str]) -> list[argparse.Action]:
    """Return the actions of the parser, and of the subparsers that the words name."""
    found: list[argparse.Action] = []
    subparsers: Any = None
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            subparsers = action
        elif not isinstance(action, (argparse._HelpAction, argparse._VersionAction)):
            found.append(action)
    if subparsers is not None:
        name = next((word for word in words if word in subparsers.choices), None)
        if name is not None:
            return found + _chosen(subparsers.choices[name], words)
        if subparsers.required:
            found.append(subparsers)
    return found


def _stop(answer: int, actions: list[argparse.Action]) -> NoReturn:
    with os.fdopen(answer, "w") as file:
        file.write(json.dumps([_option(action) for action in actions], default=repr))
    os._exit(0)


def _option(action: argparse.Action) -> dict[str, Any]:
    return {
        "name": action.dest,
        "flags": list(action.option_strings),
        "kind": type(action).__name__.strip("_"),
        "type": getattr(action.type, "__name__", None) if action.type is not None else None,
        "default": action.default,
        "choices": list(action.choices) if action.choices is not None else None,
        "takes_one": action.nargs in (None, "?"),
        "required": bool(action.required),
        "booleans": _booleans(action),
    }


def _booleans(action: argparse.Action) -> list[str] | None:
    """Return the words for true and false that the option's type distinguishes; None for a text, or another option.

    Only the type of an option that was given such a word is called: others may open files.
    """
    given = [word for flag in action.option_strings for word in _given(flag)]
    if (
        action.type in (None, str)
        or not callable(action.type)
        or not {word.lower() for word in given} & {"true", "false"}
    ):
        return None
    found = []
    for words in ("true/false", "True/False", "1/0"):
        try:
            one, other = (action.type(word) for word in words.split("/"))
        except Exception:  # a type refuses words that it does not know
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
