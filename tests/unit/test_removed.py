"""What was removed is refused with what to use instead; what earlier versions wrote is still read."""

from __future__ import annotations

from typing import Any

import pytest

from rubberband.cli import main
from rubberband.errors import InputError
from rubberband.spec.experiment import Experiment
from rubberband.spec.fields import REMOVED

WORDS: dict[str, Any] = {
    "name": "sha",
    "search": {
        "space": {"lr": {"type": "loguniform", "lower": 1e-4, "upper": 0.1}},
        "scheduler": {"type": "sha", "num_samples": 4, "max_t": 4},
        "metric": "accuracy",
        "mode": "max",
    },
    "constraints": {"deadline": "1h"},
    "resources": {"provider": "virtual", "instance_type": "p3.8xlarge", "max_instances": 2},
}


def with_key(path: str) -> dict[str, Any]:
    """The words of an experiment that has a key, whatever its value."""
    part, _, key = path.partition(".")
    return {**WORDS, part: {**WORDS.get(part, {}), key: "any"}}


FALSE = ',"is_added":false'
KEYS = [path for path in REMOVED if " " not in path]


@pytest.mark.parametrize("path", KEYS)
def test_a_removed_key_is_refused_with_what_to_use(path: str) -> None:
    with pytest.raises(InputError) as caught:
        Experiment(**with_key(path))
    assert str(caught.value) == f"{path}: {REMOVED[path]}"


@pytest.mark.parametrize("path", KEYS)
def test_an_experiment_that_was_accepted_with_one_is_still_read(path: str) -> None:
    assert Experiment.kept(with_key(path)) == Experiment(**WORDS).model_copy(update={"name": "sha"})


@pytest.mark.parametrize("option", [path for path in REMOVED if " -" in path])
def test_a_removed_option_is_refused_with_what_to_use(
    option: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command, _, name = option.partition(" ")
    for typed in ([name, "any"], [f"{name}=any"]):
        monkeypatch.setattr("sys.argv", ["rubberband", command, "any.yaml", *typed])
        with pytest.raises(SystemExit, match="2"):
            main()
        assert capsys.readouterr().err == f"error: {name} {REMOVED[option]}\n"
