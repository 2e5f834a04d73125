"""The public surface, written down, and what a shell completes of it."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import rubberband
from rubberband.cli import Promised, app
from rubberband.commands.examples import EXAMPLES
from rubberband.errors import InputError
from tests.builders.tables import cases, table

SURFACE = table("test_public_surface")
NAMES: list[str] = SURFACE["names"]
COMMANDS: dict[str, list[str]] = SURFACE["commands"]
INTEGRATIONS: dict[str, list[str]] = SURFACE["integrations"]


def test_names() -> None:
    assert sorted(rubberband.__all__) == sorted(NAMES)
    assert set(NAMES) <= set(dir(rubberband))


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_there(name: str) -> None:
    assert getattr(rubberband, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = rubberband.nothing


@pytest.mark.parametrize("name", INTEGRATIONS)
def test_names_of_integrations(name: str) -> None:
    module = importlib.import_module(f"rubberband.integrations.{name}")
    own = {each for each, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__}
    assert {each for each in own if not each.startswith("_")} == set(INTEGRATIONS[name])


def test_integrations_import_no_library() -> None:
    imports = "".join(f"import rubberband.integrations.{name}\n" for name in INTEGRATIONS)
    check = "assert not {'torch', 'lightning', 'pytorch_lightning', 'transformers', 'ray', 'pandas'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", f"import sys\n{imports}{check}"], check=True)


def test_commands_and_flags() -> None:
    assert dict(_commands(typer.main.get_command(app))) == {name: set(words) for name, words in COMMANDS.items()}


def test_the_list_of_commands_says_of_each_what_its_own_help_says() -> None:
    group: Any = typer.main.get_command(app)
    for name, promised in group.commands.items():
        itself = promised.made()
        assert (itself.name, itself.get_short_help_str(1000)) == (name, promised.get_short_help_str(1000))


def _each(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, below in group.commands.items():
        command = below.made() if isinstance(below, Promised) else below
        yield f"{path} {name}", command
        if hasattr(command, "commands"):
            yield from _each(command, f"{path} {name}")


def test_every_help_has_examples_that_the_command_takes_and_lists_no_line_that_is_cut() -> None:
    group: Any = typer.main.get_command(app)
    commands = dict(_each(group, "rubberband"))
    assert commands.keys() == EXAMPLES.keys()
    for path, command in commands.items():
        assert "..." not in command.get_short_help_str(45), f"{path}: its line in a list is longer than 45 characters"
        help_text = CliRunner().invoke(app, [*path.split()[1:], "--help"]).output
        for line in EXAMPLES[path]:
            assert f"\n    {line}\n" in help_text, f"{path}: its help lacks {line!r}, or breaks it"
            owner = next(each for each in sorted(commands, key=len, reverse=True) if f"{line} ".startswith(f"{each} "))
            words = shlex.split(line.removeprefix(owner))
            assert owner.startswith(path), line
            commands[owner].make_context(owner, words, resilient_parsing=False)


def test_the_commands_are_listed_in_four_panels() -> None:
    listed = CliRunner().invoke(app, ["--help"]).output
    assert re.findall(r"^(\w.*):$", listed, re.MULTILINE) == ["Options", "Plan", "Run", "Results", "Service and EC2"]
    group: Any = typer.main.get_command(app)
    assert [name for name in group.commands if f"\n  {name} " not in listed] == []
    assert "..." not in listed.partition("Plan:")[2]


@cases("words", "line")
def test_errors_of_usage_name_the_remedy(words: str, line: str) -> None:
    done = CliRunner().invoke(app, words.split())
    assert (done.exit_code, line in " ".join(done.output.split())) == (2, True), done.output


def test_a_word_of_other_programs_names_the_command() -> None:
    caught = CliRunner().invoke(app, ["run", "x.yaml", "--dry-run"]).exception
    assert str(caught).startswith("--dry-run is a command: rubberband estimate FILE predicts time and cost")


@cases("earlier", "now")
def test_earlier_words_of_a_command_work_and_stand_in_no_help(earlier: str, now: str) -> None:
    said = [CliRunner().invoke(app, [*words.split(), "--help"]) for words in (earlier, now)]
    assert (said[0].exit_code, said[0].output) == (0, said[1].output)
    assert f"rubberband {now} " in said[0].output
    assert f"\n  {earlier.split()[0]} " not in CliRunner().invoke(app, ["--help"]).output


@pytest.mark.parametrize("word", ["sweep", "cleanup"])
def test_cleanup_refuses_the_file_of_a_search(word: str) -> None:
    caught = CliRunner().invoke(app, [word, "digits.yaml"]).exception
    assert isinstance(caught, InputError)
    assert str(caught).endswith("takes the NAME of an experiment; to run a search: rubberband run digits.yaml")


def _commands(group: Any, above: str = "") -> Iterator[tuple[str, set[str]]]:
    for name, promised in group.commands.items():
        command = promised.made() if isinstance(promised, Promised) else promised
        if hasattr(command, "commands"):
            yield from _commands(command, f"{above}{name} ")
        else:
            yield f"{above}{name}", {word for parameter in command.params for word in parameter.opts}


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A folder with the program as `rubberband`, and a home with two experiments."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "rubberband").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m rubberband.cli "$@"\n')
    (folder / "rubberband").chmod(0o755)
    for name in ("digits-one", "scaling"):
        (tmp_path / "home/experiments" / name).mkdir(parents=True)
        (tmp_path / "home/experiments" / name / "journal.db").touch()
    return folder


def completed(program: Path, *words: str) -> list[str]:
    """What bash offers for the last of the `words` after the program's name."""
    line = shlex.join(["rubberband", *words])
    script = (
        'eval "$(_RUBBERBAND_COMPLETE=source_bash rubberband)"; '
        f"COMP_WORDS=({line}); COMP_CWORD={len(words)}; "
        "_rubberband_completion rubberband; printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    environment = {
        **os.environ,
        "PATH": f"{program}{os.pathsep}{os.environ['PATH']}",
        "RUBBERBAND_HOME": str(program.parent / "home"),
    }
    done = subprocess.run(
        ["bash", "--norc", "-c", script], env=environment, capture_output=True, text=True, check=True, cwd=program
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.by_default(2)
@cases("words", "offered")
def test_bash_completes(program: Path, words: list[str], offered: list[str]) -> None:
    assert completed(program, *words) == offered
