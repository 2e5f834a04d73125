"""`rubberband run --new`: a run under the next free name."""

from __future__ import annotations

import json
import re
import traceback
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import rubberband
from rubberband import cli
from rubberband.cli import app
from rubberband.errors import EntrypointError, InputError, NameTakenError
from rubberband.executor import DriverRequest, ExperimentFolder, HostedRun, Inbox, open_folder, write_order
from tests.builders.service_runs import cut_off, experiment, template

WORDS: dict[str, Any] = {
    "verbose": 0,
    "search": {
        "space": {"x": 1},
        "scheduler": {"type": "sha", "num_samples": 4, "max_t": 4, "reduction_factor": 2},
        "metric": "loss",
        "mode": "min",
    },
    "constraints": {"deadline": "2h"},
    "resources": {"provider": "virtual", "instance_type": "p3.2xlarge", "max_instances": 2},
    "profile": {"seconds_per_iteration": {1: 10}, "trial_startup": "1s"},
}
SCALING = str(Path(__file__).parents[2] / "examples/scaling.yaml")


def test_the_next_free_name_is_used_and_said(home: Path) -> None:
    arguments = ["run", SCALING, "-s", "resources.provider=virtual"]
    for name in ("scaling", "scaling-2", "scaling-3"):
        done = CliRunner().invoke(cli.app, [*arguments, "--new"])
        assert done.exit_code == 0, done.output
        assert f"{name}: done in " in done.stdout
        assert ("taken: this run is" in done.stderr) == (name != "scaling")
        assert open_folder(name).exists
    refused = CliRunner().invoke(cli.app, arguments)
    assert isinstance(refused.exception, NameTakenError)
    assert "--new" in str(refused.exception)


def train(config: dict[str, Any]) -> None:
    rubberband.report({"loss": 1.0})


def test_a_call_without_a_name_has_that_of_its_trial_and_the_time(home: Path) -> None:
    first, second = rubberband.tune(train, **WORDS), rubberband.tune("digits:DigitsTrial", **WORDS)
    assert re.fullmatch(r"train-\d{8}-\d{4}", first.name)
    assert re.fullmatch(r"digits-\d{8}-\d{4}", second.name)
    again = {rubberband.tune(train, **WORDS).name for _ in range(2)}
    assert len({first.name, *again}) == 3


def test_a_cell_that_is_run_again_gets_advice_for_python(home: Path) -> None:
    assert [rubberband.tune(train, name="cell", new=True, **WORDS).name for _ in range(2)] == ["cell", "cell-2"]
    with pytest.raises(NameTakenError, match=r"'cell' is taken [^/]*, or pass new=True, which") as refused:
        rubberband.tune(train, name="cell", **WORDS)
    assert "--new" not in str(refused.value)
    ours = [frame for frame in traceback.extract_tb(refused.value.__traceback__) if frame.filename != __file__]
    assert len(ours) == 1, "frames of rubberband hide the line that counts"


def test_the_trace_of_a_trial_that_does_not_import_begins_in_it(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "broken_trial.py").write_text("def f():\n    return nothing\nf()\n")
    monkeypatch.syspath_prepend(home)
    words = {**WORDS, "resources": {**WORDS["resources"], "provider": "local"}}
    with pytest.raises(EntrypointError, match="nothing") as refused:
        rubberband.tune("broken_trial:f", **words)
    assert refused.value.__cause__ is not None
    names = [Path(frame.filename).name for frame in traceback.extract_tb(refused.value.__cause__.__traceback__)]
    assert names == ["broken_trial.py"] * 2


def test_a_folder_without_an_experiment_is_left_alone_and_long_names_stay_names(home: Path) -> None:
    long = ExperimentFolder(home=home, name="a" * 63)
    long.path.mkdir(parents=True)
    assert long.next_free() == long
    long.journal.touch()
    assert long.next_free().name == "a" * 61 + "-2"
    long.next_free().path.mkdir()
    assert long.next_free().name == "a" * 61 + "-3"


CANCEL = DriverRequest(id="c-1", kind="cancel", asked_at=1.0)


def test_a_cancel_of_an_earlier_try_does_not_end_a_new_run(home: Path) -> None:
    """As one that came while `rubberband run` planned, and was refused a plan."""
    inbox = Inbox(ExperimentFolder(home=home, name="one").inbox)
    inbox.put(CANCEL)
    (home / "one.yaml").write_text(json.dumps(experiment().to_words()))  # which YAML includes
    done = CliRunner().invoke(app, ["run", str(home / "one.yaml")])
    assert (done.exit_code, inbox.pending()) == (0, []), done.output
    assert "one: done in " in done.stdout


def test_a_cancel_of_an_earlier_run_does_not_end_its_resume(home: Path) -> None:
    cut_off(template(home), at=3)
    inbox = Inbox(ExperimentFolder(home=home, name="template").inbox)
    inbox.put(CANCEL)
    done = CliRunner().invoke(app, ["resume", "template"])
    assert (done.exit_code, inbox.pending()) == (0, []), done.output
    assert "template: done in " in done.stdout


def test_a_resume_of_a_run_that_goes_on_is_refused_and_leaves_the_cancel_to_it(home: Path) -> None:
    cut_off(template(home), at=3)
    folder = ExperimentFolder(home=home, name="template")
    with folder.driving():
        Inbox(folder.inbox).put(CANCEL)
        refused = CliRunner().invoke(app, ["resume", "template"])
    assert isinstance(refused.exception, InputError)
    assert "another driver is running experiment 'template'" in str(refused.exception)
    assert Inbox(folder.inbox).pending() == [CANCEL]


@pytest.mark.parametrize("pool", [None, "team"])
def test_a_limit_by_hand_is_refused_where_a_pool_allots_the_instances(home: Path, pool: str | None) -> None:
    cut_off(template(home), at=3)
    folder = ExperimentFolder(home=home, name="template")
    path = None if pool is None else str(home / "pools" / pool)
    write_order(folder, HostedRun(attempt=1, resume=True, words={}, pool=path))
    with folder.driving():
        done = CliRunner().invoke(app, ["scale", "template", "--max-instances", "none"])
    assert len(Inbox(folder.inbox).pending()) == (pool is None)
    if pool is None:
        assert done.exit_code == 0, done.output
    else:
        assert isinstance(done.exception, InputError)
        text = "experiment 'template' is running: pool team allots its instances; change its weight instead"
        assert str(done.exception) == text
