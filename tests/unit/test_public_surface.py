"""The public surface, written down: what changes it here changes it on purpose."""

from __future__ import annotations

import pytest
import typer

import rubberband
from rubberband.cli import app

NAMES = [
    "CheckpointError",
    "EntrypointError",
    "Experiment",
    "InfeasibleError",
    "InputError",
    "JournalError",
    "NameTakenError",
    "ProfileMissingError",
    "ProviderError",
    "Result",
    "RubberbandError",
    "TorchTrial",
    "Trial",
    "TrialContext",
    "__version__",
    "choice",
    "get_checkpoint",
    "grid_search",
    "load_experiment",
    "lograndint",
    "loguniform",
    "qlograndint",
    "qloguniform",
    "qrandint",
    "qrandn",
    "quniform",
    "randint",
    "randn",
    "report",
    "tune",
    "uniform",
]

COMMANDS = {
    "estimate": {
        "file",
        "--compare-to",
        "--frontier",
        "--html",
        "--output",
        "-o",
        "--plan",
        "--policy",
        "--seed",
        "--set",
        "-s",
    },
    "plan": {
        "file",
        "--compare-to",
        "--frontier",
        "--html",
        "--output",
        "-o",
        "--plan",
        "--policy",
        "--seed",
        "--set",
        "-s",
    },
    "prices": {"types", "--output", "-o", "--refresh", "--region", "-r"},
    "profile": {"file", "--iterations", "--output", "-o", "--set", "-s"},
    "run": {"file", "--policy", "--set", "-s"},
    "resume": {"name"},
    "report": {"name", "--html", "--output", "-o"},
    "ps": {"--output", "-o"},
    "logs": {"name", "trial"},
    "sweep": {"name"},
    "up": {"file", "--set", "-s"},
    "down": {"file", "--owner", "--region", "-r", "--yes", "-y"},
}
"""Command -> its arguments and options."""


def test_names() -> None:
    assert sorted(rubberband.__all__) == sorted(NAMES)
    assert set(NAMES) <= set(dir(rubberband))


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_there(name: str) -> None:
    assert getattr(rubberband, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = rubberband.nothing


def test_commands_and_flags() -> None:
    group = typer.main.get_command(app)
    commands = {
        name: {word for parameter in command.params for word in parameter.opts}
        for name, command in group.commands.items()  # type: ignore[attr-defined]
    }
    assert commands == COMMANDS
