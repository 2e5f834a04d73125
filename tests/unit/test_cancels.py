"""Requests to a driver by hand: cancels that wait while a command begins or resumes a run, limits beside a pool."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rubberband.cli import app
from rubberband.errors import InputError
from rubberband.executor.journal.folder import ExperimentFolder
from rubberband.executor.journal.hosting import HostedRun, write_order
from rubberband.executor.journal.inbox import DriverRequest, Inbox
from tests.builders.service_runs import cut_off, experiment, template

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
        told = "experiment 'template' is running: pool team allots its instances; change its weight instead"
        assert str(done.exception) == told
