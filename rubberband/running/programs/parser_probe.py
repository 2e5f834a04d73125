"""Runs a program until it parses its arguments, writes down its options, and ends it there.

`parsers.py` starts this file with the program's own Python: only the standard library is imported, and that by
versions of Python that this package does not support. The first argument is the file of the answer, the others are the
program and its arguments, as Python takes them: `train.py --data d`, `-m package.train`.
"""

from __future__ import annotations

import argparse
import atexit
import importlib.util
import json
import linecache
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
    _hooks().install(sys.modules[__name__])
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


def _hooks() -> Any:
    """Return the module of the other parsers, which is no module of the program's folder."""
    place = os.path.join(os.path.dirname(os.path.abspath(__file__)), "probe_hooks.py")
    spec: Any = importlib.util.spec_from_file_location("rubberband_probe_hooks", place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def one_of(names: list[str]) -> dict[str, Any]:
    """Return a subcommand that has to be given, as a required option."""
    return {"name": "one of " + ", ".join(names), "required": True, "kind": "other", "choices": names}


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
        if _library() != "hydra":
            _require_command_line(args)
        if _library() != "hydra" and type(parser).parse_known_args is base.parse_known_args:
            _stop_parser(parser, first)
        final.append(parser)  # it adds options as it parses
        return parse(parser, args, namespace)

    def parse_known_args(parser: Any, args: Any = None, namespace: Any = None, **more: Any) -> Any:
        if _library() == "hydra":  # its words are those of a configuration
            return known(parser, args, namespace, **more)
        _require_command_line(args)
        if parser in final or len(parser._actions) > _SMALL or not _is_another(parser):
            _stop_parser(parser, first)
        if not first:
            first.extend(options_of(parser, 0)[0])
            late = threading.Timer(_SECOND_S, lambda: stop(first))
            late.daemon = True
            late.start()
            atexit.register(stop, first)  # it ends, without another parser
        return known(parser, args, namespace, **more)

    base.parse_args = base.parse_intermixed_args = parse_args
    base.parse_known_args = base.parse_known_intermixed_args = parse_known_args


def _caller() -> Any:
    """Return the frame of the program, or of a library, that asks a parser."""
    frame: Any = sys._getframe(2)
    while frame is not None and os.path.basename(frame.f_code.co_filename) in ("argparse.py", "parser_probe.py"):
        frame = frame.f_back
    return frame


def _library() -> str:
    return str(getattr(_caller(), "f_globals", {}).get("__name__", "")).partition(".")[0]


def _require_command_line(args: Any) -> None:
    """Stop at a parser of words that are written in the program, as `parse_args([])`: it has no command line."""
    line = linecache.getline(_caller().f_code.co_filename, _caller().f_lineno) if _caller() is not None else ""
    is_written = re.search(r"parse_\w*args\w*\(\s*(args\s*=\s*)?(\[|['\"]+\.split)", line) is not None
    if args is not None and (is_written or [word for word in args if word not in sys.argv]):
        stop([], fault="its parser gets words of its own in place of the command line: call parse_args() without them")


def _is_another(parser: Any) -> bool:
    """Whether the program that calls it asks a parser in several places."""
    try:
        with open(_caller().f_code.co_filename, encoding="utf-8", errors="replace") as file:
            return len(re.findall(r"\.parse_\w*args\w*\(", file.read())) > 1
    except (AttributeError, OSError):
        return True


def _stop_parser(parser: Any, before: list[dict[str, Any]]) -> NoReturn:
    options, commands = options_of(parser, 0)
    names = {option["name"] for option in options}
    stop([option for option in before if option["name"] not in names] + options, commands)


def options_of(parser: Any, level: int, read: Any = None) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the options of the parser and of the subparsers that the words name, and the names of these."""
    found: list[dict[str, Any]] = []
    commands: list[str] = []
    subparsers: Any = None
    excluded = [action for group in parser._mutually_exclusive_groups for action in _excluded(group)]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            subparsers = action
        elif not isinstance(action, (argparse._HelpAction, argparse._VersionAction)) and action not in excluded:
            found.append(dict((read or option_of)(action, parser), level=level))
    if subparsers is not None:
        name = chosen(sys.argv[1:], list(subparsers.choices))
        if name is None and subparsers.required:
            found.append(one_of(list(subparsers.choices)))
        elif name is not None:
            options, commands = options_of(subparsers.choices[name], level + 1, read)
            return found + options, [name, *commands]
    return found, commands


def _excluded(group: Any) -> list[Any]:
    """Return the actions of a group that may not stand beside the one that the words have, or else beside the first."""
    actions = list(group._group_actions)
    given = [action for action in actions if any(_given(flag) for flag in action.option_strings)]
    kept = given or actions[:1]
    if group.required and not given:
        kept[0].required = True
    return [action for action in actions if action not in kept]


_KINDS = {"StoreAction": "value", "StoreTrueAction": "switch", "BooleanOptionalAction": "pair"}


def option_of(action: Any, parser: Any) -> dict[str, Any]:
    """Return an action as plain values."""
    kind = _KINDS.get(type(action).__name__.strip("_"), "other")
    flags = list(action.option_strings)
    ons = {re.sub("^--no-?", "--", flag) for flag in flags} & set(flags)
    off = next((flag for flag in flags if flag not in ons), "") if kind == "pair" else ""
    name = action.dest
    if "." in name and flags and not any("." in flag for flag in flags):  # of a dataclass in a namespace
        name = max((flag for flag in flags if flag != off), key=len).lstrip("-")
    return {
        "name": name.replace("-", "_"),
        "flags": flags,
        "kind": kind if kind != "pair" or off else "other",
        "off": off,
        "type": getattr(action.type, "__name__", None) if action.type is not None else None,
        "default": _default(action),
        "choices": list(action.choices) if action.choices is not None else None,
        "takes_one": action.nargs in (None, "?") or kind != "value",
        "required": bool(action.required) and action.nargs not in ("*", "..."),  # none is enough for these
        "booleans": _booleans(action, kind),
        "help": action.help if isinstance(action.help, str) else "",
    }


def _default(action: Any) -> Any:
    """Return the default, of a text for a number that number."""
    if isinstance(action.default, str) and action.type in (int, float):
        try:
            return action.type(action.default)
        except ValueError:
            return None
    return None if action.default == argparse.SUPPRESS else action.default


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
        except (Exception, SystemExit):  # it refuses words that it does not know
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
