"""Asks a program's parser for its options: the program runs in a process of its own until it parses its arguments."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rubberband.running.programs import parser_probe
from rubberband.running.programs.roles import is_fixed
from rubberband.running.ranges import plain_name, rank_of
from rubberband.values.command import PLACES

LIMIT_S = 60.0
"""Time until a program parses its arguments; its imports may take long."""
_BOOL_OF_TRAINER = "string_to_bool"
"""Name of the type that HfArgumentParser gives to its options that are true or false."""
_PARSERS = re.compile(
    r"ArgumentParser|ArgParser|argparse|parse_args|Parser\(|\b(click|typer|fire|absl|simple_parsing|tap|jsonargparse|tyro|"
    r"flags|hydra|omegaconf|optparse|configargparse|pyrallis|draccus|LightningCLI|HfArgumentParser|TrlParser)\b"
)
"""Traces of a parser in a source: a program without them is not started."""
_UNKNOWN = 100
"""Rank of a parameter of an unusual name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramOption:
    """An option of a program."""

    name: str
    flags: tuple[str, ...] = ()
    """Empty for a positional argument."""
    kind: str = "value"
    """`value`, `switch` (there or not), `pair` (a flag for true and one for false), or `other`."""
    form: str = "space"
    """`space`: `--lr 0.1`; `=`: `--lr=0.1`, and `lr=0.1` for a flag without hyphens; `env`: a variable, `LR=0.1`."""
    off: str = ""
    """The flag for false of a `pair`."""
    type: str | None = None
    default: Any = None
    choices: tuple[Any, ...] | None = None
    takes_one: bool = True
    required: bool = False
    booleans: tuple[str, ...] | None = None
    """Words for true and false that its type distinguishes; None: it is not known."""
    help: str = ""
    level: int = 0
    """Number of subcommands before which it stands."""

    @property
    def flag(self) -> str:
        """The flag that is written: the longest; empty for a positional argument."""
        return max((flag for flag in self.flags if flag != self.off), key=len, default="")

    @property
    def is_boolean(self) -> bool:
        """Whether it is true or false."""
        return self.kind in ("switch", "pair") or self.booleans is not None or isinstance(self.default, bool)

    @property
    def is_of_trainer(self) -> bool:
        """Whether HfArgumentParser made it."""
        return self.type == _BOOL_OF_TRAINER

    @property
    def is_tunable(self) -> bool:
        """Whether it is one value that a search may change, as far as its name says."""
        if not self.takes_one or self.name in PLACES or self.kind == "other" or is_fixed(self.name):
            return False
        if not self.flags and not self.required:
            return False
        if self.kind == "switch":
            return self.default in (False, None) and not re.match("--?no[-_]", self.flag)
        if self.is_boolean:
            is_usual = not self.is_of_trainer or self.known is not None
            return self.default is not None and is_usual and (self.kind == "pair" or bool(self.booleans))
        if self.choices is not None:
            return 1 < len(self.choices) <= 8
        is_number = isinstance(self.default, int | float) or self.type in ("int", "float")
        if isinstance(self.default, float) and not math.isfinite(self.default):
            return False
        if plain_name(self.name) == "channels" and self.default in (1, 3, 4):  # of an image
            return False
        return is_number and (self.known is not None or (self.default or 0) > 0)

    @property
    def is_worth_a_search(self) -> bool:
        """Whether it may be searched without being asked for: a known parameter, or a number."""
        return self.known is not None or not (self.is_boolean or self.choices)

    @property
    def known(self) -> int | None:
        """Return its place among the parameters that people search; None: its name is unusual."""
        return rank_of(self.name, is_boolean=self.is_boolean)

    @property
    def rank(self) -> int:
        """Return its place among the parameters, the best known first, and else numbers that are no counts."""
        return (
            self.known if self.known is not None else _UNKNOWN + (self.type == "int" or isinstance(self.default, int))
        )

    def words(self, value: str) -> list[str]:
        """Return the words that give it a value."""
        if not self.flags or self.kind == "pair":
            return [value]
        is_negative = isinstance(self.default, int | float) and self.default < 0  # -1e-05 would be an option
        return [f"{self.flag}={value}"] if self.form != "space" or is_negative else [self.flag, value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parser:
    """A program's parser."""

    options: tuple[ProgramOption, ...] = ()
    commands: tuple[str, ...] = ()
    """Subcommands, outermost first."""
    begin: int = 0
    """Index of the first word that the program reads."""
    given: tuple[str, ...] = ()
    """Words that a shell script gives it besides those of the command."""
    was_asked: bool = True
    """Whether the program was started for it."""
    fault: str = ""
    """Why it was not read."""


def parser_of(words: Sequence[str], folder: Path, sources: Sequence[str]) -> Parser:
    """Run the program until it parses its arguments."""
    at = next((at for at, word in enumerate(words) if word.endswith(".py") or word == "-m"), None)
    if at is None:
        return Parser(was_asked=False, fault="it starts no Python script, so its options are not known")
    begin = at + 1 + (words[at] == "-m")
    if sources and not any(_PARSERS.search(text) for text in sources):
        return Parser(was_asked=False, begin=begin, fault="it has no parser of arguments that is known")
    python = any(re.match(r"python[\d.]*$", Path(word).name) for word in words[:at])
    with tempfile.TemporaryDirectory() as place:
        answer = Path(place, "answer")
        process = subprocess.Popen(
            [*words[:at], *([] if python else ["python"]), parser_probe.__file__, str(answer), *words[at:]],
            cwd=folder,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            _, printed = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return Parser(fault=f"it parsed no arguments within {LIMIT_S:g} s")
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stderr is not None
            process.stderr.close()
        return _answered(answer.read_bytes() if answer.exists() else b"", printed, begin)


def _answered(content: bytes, printed: bytes, begin: int) -> Parser:
    if not content:
        lines = printed.decode("utf-8", "replace").strip().splitlines()
        raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit)\b", line)]
        why = f" ({(raised or lines)[-1].strip()})" if lines else ""
        return Parser(fault=f"it ended before it parsed any arguments{why}")
    plain = json.loads(content)
    return Parser(
        options=tuple({each["name"]: _option(each) for each in plain["options"]}.values()),
        commands=tuple(plain["commands"]),
        begin=begin,
        fault=plain.get("fault", ""),
    )


def _option(plain: Mapping[str, Any]) -> ProgramOption:
    values: dict[str, Any] = {
        name: tuple(value) if name in ("flags", "choices", "booleans") and value is not None else value
        for name, value in plain.items()
    }
    return ProgramOption(**values)
