"""Programs with the parsers that people use become commands: each option has a parameter, a place, or is left out."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml

from rubberband.running.first_file import TrialFindings, text_of
from rubberband.running.programs.options import ProgramFindings, program_of
from rubberband.running.ranges import middle_of
from rubberband.spec.loading import parse_experiment
from rubberband.values.command import ProgramCommand
from tests.builders.tables import cases


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of a user's own, where python is the one of the tests."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    yield tmp_path
    assert not Path("trained").exists(), "a program that is read does not train"


def found_in(files: Mapping[str, str], text: str) -> ProgramFindings:
    for name, content in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(content)
    return program_of(text, Path.cwd())


def accepted(words: tuple[str, ...], found: ProgramFindings) -> None:
    """Run the command with a configuration, which the program parses."""
    values = {name: middle_of(yaml.safe_load(domain)) for name, (domain, _) in found.space.items()}
    command = ProgramCommand(words=words, booleans=found.booleans or "true/false")
    places = {"checkpoint": str(Path("made").absolute()), "max_t": "2", "seed": "7"}
    done = subprocess.run(command.line(values, places), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    Path("trained").unlink(missing_ok=True)


@cases("library", "files", "text", "command", "start", "space", "others", "booleans")
def test_the_options_of_a_parser_are_parameters_places_and_words(
    library: str,
    files: Mapping[str, str],
    text: str,
    command: str,
    start: str,
    space: Mapping[str, str],
    others: list[str],
    booleans: str,
) -> None:
    found = found_in(files, text)
    assert " ".join(found.words) == command
    assert " ".join(found.start) == start
    assert {name: domain for name, (domain, _) in found.space.items()} == space
    assert [*found.others] == others
    assert found.booleans == booleans
    seen = TrialFindings(
        command=found.words, metrics="stdout", name="x", space=found.space, others=found.others, metric="loss"
    )
    read = parse_experiment(text_of(seen, Path("x.yaml")), source="x.yaml")
    assert set(read.search.space) == set(space)
    accepted(found.words, found)
    accepted(found.start, found)
