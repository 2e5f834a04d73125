"""The process of an experiment waits for a database that restarts as it starts, and pays for nothing twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sql

from rubberband.errors import JournalError
from rubberband.executor import ExperimentFolder, HostedRun
from rubberband.executor.journal.database import parse_url
from rubberband.running import hosted

GONE = "postgresql://ann@127.0.0.1:1/none?connect_timeout=1"


def lost() -> JournalError:
    """As a store tells it that refuses connections."""
    try:
        sql.create_engine(parse_url(GONE)).connect()
    except sql.exc.OperationalError as error:
        refused = JournalError("the journal cannot be read: connection refused")
        refused.__cause__ = error
        return refused
    raise AssertionError("nothing listens there")


@pytest.mark.parametrize("exists", [False, True])
def test_a_process_starts_anew_once_the_database_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool
) -> None:
    asked: list[bool] = []

    def run(_folder: ExperimentFolder, order: HostedRun, _wait: object) -> Any:
        asked.append(order.resume)
        if len(asked) == 1:
            raise lost()
        return "done"

    monkeypatch.setattr(hosted, "_run", run)
    monkeypatch.setattr(hosted, "LOOK_S", 0.0)
    monkeypatch.setattr(ExperimentFolder, "exists", property(lambda _: exists))
    folder = ExperimentFolder(home=tmp_path, name="one", store=GONE)
    done: Any = hosted.run_patiently(folder, HostedRun(attempt=1, resume=False, words={}), lambda _: None)
    assert (done, asked) == ("done", [False, exists])


@pytest.mark.parametrize("profile", [None, {"seconds_per_iteration": {1: 10}}])
def test_a_profile_on_rented_instances_is_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profile: object
) -> None:
    tries: list[int] = []

    def run(*_: object) -> Any:
        tries.append(1)
        if len(tries) == 1:
            raise lost()
        return "done"

    monkeypatch.setattr(hosted, "_run", run)
    monkeypatch.setattr(hosted, "LOOK_S", 0.0)
    monkeypatch.setattr(ExperimentFolder, "exists", property(lambda _: False))
    folder = ExperimentFolder(home=tmp_path, name="one", store=GONE)
    words = {"resources": {"provider": "aws"}} | ({} if profile is None else {"profile": profile})
    order = HostedRun(attempt=1, resume=False, words=words)
    if profile is None:
        with pytest.raises(JournalError):
            hosted.run_patiently(folder, order, lambda _: None)
    assert len(tries) == (profile is None)
    if profile is not None:
        hosted.run_patiently(folder, order, lambda _: None)
        assert len(tries) == 2


def test_a_place_that_another_driver_took_is_not_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object) -> Any:
        raise JournalError("the journal cannot be written: another driver has it")

    monkeypatch.setattr(hosted, "_run", run)
    folder = ExperimentFolder(home=tmp_path, name="one", store=GONE)
    with pytest.raises(JournalError, match="another driver"):
        hosted.run_patiently(folder, HostedRun(attempt=2, resume=True, words={}), lambda _: None)
