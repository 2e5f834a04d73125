"""Deadlines are shown as they were written: from the submission, from the start, or as an instant."""

from __future__ import annotations

import dataclasses
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from rubberband.executor import ExperimentFolder, HostedRun, Job, read_order
from rubberband.executor.core.controller import Controller
from rubberband.executor.core.events import LimitsChanged
from rubberband.executor.core.history import LimitsExtended
from rubberband.executor.run.follower import open_journal
from rubberband.planning.feasible import PlanningOptions, PricesAndQuotas, planned
from rubberband.running.hosted import run_patiently
from rubberband.running.job import job_of
from rubberband.spec.experiment import Experiment
from rubberband.states import ExperimentState
from rubberband.units import format_instant
from rubberband.values.plan import Spent
from rubberband.views.formatting import local_times, timed
from rubberband.views.story import sentence
from tests.builders.clocks import MID_MONTH
from tests.builders.journalled_runs import words
from tests.builders.results import a_job
from tests.builders.service_runs import House, experiment

SUBMITTED_AT, AT = MID_MONTH, MID_MONTH + 240.0
STARTED_AT = SUBMITTED_AT + 16.0
SUBMITTED = {"submitted_at": SUBMITTED_AT, "deadline_at": AT, "deadline_s": 224.0}


def instant(at: float) -> str:
    return format_instant(datetime.fromtimestamp(at, UTC))


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ({"deadline_s": None}, ""),
        ({"deadline_s": 300.0}, "5m"),
        ({"deadline_s": 300.0 - 31.0, "profiling_s": 31.0}, "5m"),
        ({"deadline_s": 224.0, "deadline_at": AT}, instant(AT)),
        (SUBMITTED, f"{instant(AT)} (4m after its submission)"),
        ({"deadline_s": 224.0, "submitted_at": -16.0}, "4m"),  # a rehearsal
    ],
)
def test_a_deadline_is_the_one_that_was_written(written: dict[str, Any], text: str) -> None:
    assert a_job(**written).deadline == text


def extended(job: Job, deadline_s: float) -> Job:
    return job.granted(LimitsChanged(occurred_at=0.0, request="r", deadline_s=deadline_s, max_cost_usd=None))


def test_a_later_deadline_counts_from_the_submission_too() -> None:
    job = a_job(**SUBMITTED).begun(STARTED_AT)
    later = extended(job, 2400.0 - 16.0)
    assert later.deadline == f"{instant(SUBMITTED_AT + 2400.0)} (40m after its submission)"
    assert later.begun(STARTED_AT).deadline_s == later.deadline_s
    assert extended(later, 60.0) == later
    assert extended(a_job(deadline_s=224.0, submitted_at=-16.0), 2384.0).deadline == "40m"
    assert extended(a_job(deadline_s=224.0, deadline_at=AT), 2400.0).deadline == "40m"


def test_the_story_of_an_extension_has_both_as_they_were_written() -> None:
    controller = Controller(a_job(**SUBMITTED))
    controller.handle(LimitsChanged(occurred_at=0.0, request="r", deadline_s=2384.0, max_cost_usd=1.0))
    (granted,) = controller.state.history.of(LimitsExtended)
    later, before = instant(SUBMITTED_AT + 2400.0), instant(AT)
    assert sentence(granted) == (
        f"deadline {later} (40m after its submission) instead of {before} (4m after its submission)"
    )


@pytest.mark.parametrize("provider", ["virtual", "local"])
def test_a_submission_that_waited_has_the_deadline_of_its_file(provider: str) -> None:
    resources = {"provider": provider, "max_instances": 8, "slots": 4}
    said = words(constraints={"deadline": instant(SUBMITTED_AT + 3600.0)})
    said["resources"] = said["resources"] if provider == "virtual" else resources
    asked = Experiment(**said)
    profile = asked.loaded_profiles()
    assert profile is not None
    found = planned(asked, profile, PricesAndQuotas(), PlanningOptions(now=STARTED_AT - 0.7))
    job = job_of(found, Spent(), SUBMITTED_AT)
    job = job.begun(0.0 if provider == "virtual" else STARTED_AT)
    after = "1h" if provider == "virtual" else f"{instant(SUBMITTED_AT + 3600.0)} (1h after its submission)"
    assert job.deadline == after
    assert dataclasses.replace(job_of(found, Spent()), deadline_at=None).submitted_at is None


def test_a_service_hands_its_process_the_time_of_the_submission(house: House) -> None:
    house.tell(one="hold")
    with house.open() as runs:
        runs.submit(experiment())
        row = house.wait("one", ExperimentState.RUNNING)
        assert read_order(house.folder()).submitted_at == row.created_at
        house.go()
        house.wait("one", ExperimentState.DONE)


def test_the_process_of_a_submission_keeps_its_deadline(tmp_path: Path) -> None:
    submitted_at = time.time() - 120.0
    said = words(name="asked", constraints={"deadline": instant(submitted_at + 3600.0)})
    folder = ExperimentFolder(home=tmp_path, name="asked")
    run_patiently(folder, HostedRun(attempt=1, resume=False, words=said, submitted_at=submitted_at), lambda _: None)
    journal, header = open_journal(folder)
    journal.close()
    assert header.job.deadline == "1h"


def test_instants_are_local_on_a_terminal_and_marked_on_a_page() -> None:
    text = "deadline 2026-11-21T20:17:00Z (4m after its submission)"
    now = 1795291200.0  # 20:00 UTC; tests run at +05:45
    assert local_times(text, now) == "deadline 02:02 (4m after its submission)"
    assert local_times(text, now + 86400.0) == "deadline Nov 22 02:02 (4m after its submission)"
    assert timed(f"<b>{text}") == (
        '&lt;b&gt;deadline <time datetime="2026-11-21T20:17:00Z" data-clock>20:17 UTC</time> (4m after its submission)'
    )
