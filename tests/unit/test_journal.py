"""The journal: what was appended comes back, in order, whatever the event; bad records are refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sql

from rubberband.errors import JournalError, NameTakenError
from rubberband.executor import events
from rubberband.executor.codec import decode_event, decode_job, encode_event, encode_job
from rubberband.executor.events import (
    CheckpointLost,
    CheckpointRef,
    DriverResumed,
    DriverStopped,
    EndedInstance,
    Event,
    InstanceRunning,
    LiveInstance,
    RestPlanned,
    Started,
    TrialFailed,
    TrialReported,
)
from rubberband.executor.journal import Journal, sqlite_url
from rubberband.executor.own_speeds import OwnSpeed
from rubberband.executor.state import Job
from rubberband.executor.training.failures import describe
from rubberband.offer import Offer
from rubberband.plan import Plan, Stage, StagePlan
from rubberband.planner.model import predict
from rubberband.profile import Profile

OFFER = Offer(instance_type="test", gpus=2, price_usd_per_hour=3.6, max_instances=4)
PROFILE = Profile(seconds_per_iteration={1: 10.0, 2: 6.0})
STAGES = (Stage(trials=4, iterations=1), Stage(trials=2, iterations=2))
PLAN = Plan(stages=(StagePlan(instances=2, gpus_per_trial=1), StagePlan(instances=1, gpus_per_trial=1)))
JOB = Job(
    name="test",
    stages=STAGES,
    plan=PLAN,
    prediction=predict(STAGES, PLAN, PROFILE, OFFER),
    offer=OFFER,
    profile=PROFILE,
    metric="score",
    mode="max",
    replan=False,
)
CHECKPOINT = CheckpointRef(url="file:///tmp/x", digest="ab", size_bytes=3)
EVENTS: list[Event] = [
    Started(occurred_at=1.5),
    InstanceRunning(occurred_at=2.0, instance="i-001", running_at=1.9),
    TrialReported(
        occurred_at=3.0, trial=2, attempt=1, iterations=1, metrics={"score": 0.1 + 0.2}, checkpoint=CHECKPOINT
    ),
    TrialFailed(occurred_at=4.0, trial=1, attempt=1, kind="died", message="exit code 7", details="…\n"),
    CheckpointLost(occurred_at=5.0, trial=1, attempt=2, message="the checkpoint is gone"),
    DriverStopped(occurred_at=6.0, reason="the checkpoint store is away"),
    DriverResumed(
        occurred_at=9.0,
        live=(LiveInstance(instance="i-001", running_at=None),),
        ended=(EndedInstance(instance="i-002", running_at=1.0, ended_at=8.0),),
    ),
    RestPlanned(
        occurred_at=10.0,
        stage=1,
        plan=PLAN,
        predicted=JOB.prediction.stages[1:],
        profile=PROFILE,
        changed=False,
        reason="1m40s to spare",
        present_jct_s=1.0,
        present_cost_usd=2.0,
        jct_s=3.0,
        cost_usd=4.0,
        own={2: OwnSpeed(factor=1.25, error=0.1)},
    ),
]


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    opened = Journal(sqlite_url(tmp_path / "journal.db"), "test", create=True)
    yield opened
    opened.close()


def test_events_come_back_as_they_were(journal: Journal) -> None:
    journal.create(created_at=1.0, job=JOB, setup={"entrypoint": "a:b"})
    journal.append(EVENTS[:2])
    journal.append(EVENTS[2:])
    assert [event for _, event in journal.events()] == EVENTS
    assert [seq for seq, _ in journal.events(after=2)] == [3, 4, 5, 6, 7]


def test_a_decision_of_an_older_version_knows_of_no_trials_own_speed() -> None:
    kind, body = encode_event(EVENTS[-1])
    older = {name: value for name, value in json.loads(body).items() if name != "own"}
    decision = decode_event(kind, json.dumps(older))
    assert isinstance(decision, RestPlanned)
    assert decision.own == {}


def test_any_path_will_do(tmp_path: Path) -> None:
    for name in ("a b", "a?b", "a%20b", "a#b"):
        (tmp_path / name).mkdir()
        Journal(sqlite_url(tmp_path / name / "journal.db"), "test", create=True).close()
        assert (tmp_path / name / "journal.db").exists()


def test_a_second_writer_goes_on_where_the_first_stopped(journal: Journal, tmp_path: Path) -> None:
    journal.create(created_at=1.0, job=JOB, setup={})
    journal.append(EVENTS[:3])
    other = Journal(sqlite_url(tmp_path / "journal.db"), "test")
    other.append(EVENTS[3:])
    assert [event for _, event in other.events()] == EVENTS
    header = other.header()
    assert header is not None
    assert header.job == JOB
    other.close()


def test_a_writer_that_lost_its_place_is_refused_and_loses_nothing(journal: Journal, tmp_path: Path) -> None:
    journal.create(created_at=1.0, job=JOB, setup={})
    other = Journal(sqlite_url(tmp_path / "journal.db"), "test")
    journal.append(EVENTS[:1])
    with pytest.raises(JournalError, match="cannot be written"):
        other.append(EVENTS[1:])
    assert [event for _, event in journal.events()] == EVENTS[:1]
    other.close()


def test_a_taken_name_is_refused_with_the_ways_out(journal: Journal) -> None:
    journal.create(created_at=1.0, job=JOB, setup={})
    with pytest.raises(NameTakenError, match=r"rubberband resume test.*-s name=test-2"):
        journal.create(created_at=2.0, job=JOB, setup={})


def test_an_unwritable_place_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match="cannot be opened"):
        Journal(sqlite_url(tmp_path / "file" / "journal.db"), "test", create=True)


def test_a_reader_creates_nothing(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="cannot be opened"):
        Journal(sqlite_url(tmp_path / "journal.db"), "test")
    assert list(tmp_path.iterdir()) == []


def test_broken_and_unknown_records_are_refused(journal: Journal) -> None:
    with pytest.raises(JournalError, match="does not know"):
        decode_event("FromTheFuture", "{}")
    with pytest.raises(JournalError, match=r"broken InstanceRunning: instance: "):
        decode_event("InstanceRunning", '{"occurred_at": 1.0}')


def test_every_kind_of_event_can_be_journalled() -> None:
    kinds = {kind for kind in vars(events).values() if isinstance(kind, type) and issubclass(kind, Event)}
    for event in EVENTS:
        assert decode_event(*encode_event(event)) == event
    assert {kind.__name__ for kind in kinds - {Event}} == {kind.__name__ for kind in Event.__subclasses__()}


def test_a_job_comes_back_as_it_was() -> None:
    assert decode_job(encode_job(JOB)) == JOB


def test_sqlite_survives_a_crash_of_the_machine(journal: Journal) -> None:
    with journal._database.writing() as connection:
        assert connection.execute(sql.text("PRAGMA journal_mode")).scalar() == "wal"
        assert connection.execute(sql.text("PRAGMA synchronous")).scalar() == 2


def test_what_utf_8_cannot_hold_is_made_printable_before_it_gets_here() -> None:
    failure = describe(ValueError("cannot decode picture-\udcff.png"), in_gang=False)
    event = TrialFailed(
        occurred_at=1.0, trial=0, attempt=1, kind="raised", message=failure.message, details=failure.details
    )
    assert decode_event(*encode_event(event)) == event
    assert "picture-\\udcff.png" in failure.message


def test_a_job_of_a_version_that_did_not_replan_is_not_replanned() -> None:
    words = encode_job(dataclasses.replace(JOB, replan=True))
    assert decode_job(words).replan
    assert not decode_job(words.replace('"replan":true,', "")).replan
