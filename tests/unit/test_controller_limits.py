"""More time or money for an experiment that runs, or that its cap has ended: one story a test."""

from __future__ import annotations

import dataclasses

import pytest

from rubberband.executor import (
    CancelRequested,
    Controller,
    DriverResumed,
    Job,
    LaunchInstance,
    LimitsChanged,
    LimitsExtended,
    Phase,
    Started,
    StartTrial,
    Tick,
    decode_event,
    encode_event,
)
from rubberband.executor.core.limits import can_go_on
from tests.builders.jobs import JOB
from tests.builders.stories import Story, begun, kinds

CAPPED = dataclasses.replace(JOB, deadline_s=60.0, max_cost_usd=0.15, release_margin_s=3.0)
"""Two instances of 0.001 USD a second each, billed for a minute at least."""


def extend(story: Story, request: str = "r-1", **limits: float | None) -> None:
    job = story.controller.job
    fields = {"deadline_s": job.deadline_s, "max_cost_usd": job.max_cost_usd, **limits}
    assert story.tell(LimitsChanged, request=request, **fields) == []


def ended_by_budget(job: Job = CAPPED) -> Story:
    story = begun(job)
    story.report(0, 0.1)
    story.at = (story.controller.wake_at() or 0.0) - 1.0
    assert "ReleaseInstance" in kinds(story.tell(Tick))
    assert kinds(story.released("i-001", "i-002")) == ["Finish"]
    assert story.state.outcome == "budget"
    return story


@pytest.mark.parametrize(("started_at", "left_s"), [(100.0, 20.0), (130.0, 0.0)])
def test_a_deadline_that_is_an_instant_does_not_wait_for_the_start(started_at: float, left_s: float) -> None:
    planned = dataclasses.replace(JOB, deadline_s=30.0, deadline_at=120.0)
    controller = Controller(planned)
    controller.handle(Started(occurred_at=started_at))
    assert controller.job.deadline_s == left_s
    controller.handle(LimitsChanged(occurred_at=started_at, request="r", deadline_s=50.0, max_cost_usd=None))
    assert controller.job.deadline_s == 50.0


@pytest.mark.parametrize(
    ("has", "asked", "gets"),
    [(1.0, 2.0, 2.0), (2.0, 1.0, 2.0), (1.0, None, None), (None, 1.0, None), (None, None, None)],
)
def test_a_limit_is_raised_or_lifted_and_never_lowered_or_made(
    has: float | None, asked: float | None, gets: float | None
) -> None:
    story = Story(dataclasses.replace(JOB, deadline_s=has, max_cost_usd=has))
    extend(story, deadline_s=asked, max_cost_usd=asked)
    assert (story.controller.job.deadline_s, story.controller.job.max_cost_usd) == (gets, gets)
    assert len(story.state.history.of(LimitsExtended)) == (gets != has)


def test_more_money_delays_the_stop_and_the_end_of_held_instances() -> None:
    story = begun(CAPPED)
    stop_at, hold_until = story.controller.wake_at(), story.controller.hold_until()
    assert stop_at is not None
    extend(story, max_cost_usd=0.17)
    assert story.controller.wake_at() == pytest.approx(stop_at + 10.0)
    assert story.controller.hold_until() == pytest.approx(hold_until + 10.0)
    story.at = stop_at
    assert story.tell(Tick) == []


def test_without_a_cap_any_more_nothing_stops_it() -> None:
    story = begun(CAPPED)
    extend(story, max_cost_usd=None)
    assert story.controller.hold_until() == float("inf")
    story.at += 250.0
    assert story.report(0, 0.5) == []


def test_a_request_that_was_seen_counts_no_more() -> None:
    story = begun(CAPPED)
    extend(story, "r-1", deadline_s=80.0)
    extend(story, "r-1", deadline_s=90.0)
    extend(story, "r-2", deadline_s=80.0)
    assert story.controller.job.deadline_s == 80.0
    assert len(story.state.history.of(LimitsExtended)) == 1


def test_a_request_to_end_that_was_seen_does_not_end_it_again_after_its_resume() -> None:
    story = begun()
    story.tell(CancelRequested, request="c-1")
    story.released("i-001", "i-002")
    story.tell(DriverResumed, live=(), ended=())
    assert story.tell(CancelRequested, request="c-1") == []
    assert story.state.phase is Phase.SCALING
    assert kinds(story.tell(CancelRequested, request="c-2"))[-1] == "ReleaseInstance"


def test_a_run_that_its_cap_ended_resumes_with_a_larger_one_and_repeats_nothing() -> None:
    story = ended_by_budget()
    assert story.controller.is_over
    extend(story, max_cost_usd=0.5)
    assert not story.controller.is_over
    assert story.tell(DriverResumed, live=(), ended=()) == [LaunchInstance(instance=f"i-00{n}") for n in (3, 4)]
    assert story.state.outcome is None
    started = [command for command in story.ready("i-003", "i-004") if isinstance(command, StartTrial)]
    assert [(start.trial, start.from_iterations) for start in started] == [(1, 0), (2, 0), (3, 0)]


def test_a_run_that_its_cap_ended_stays_ended_with_a_later_deadline_alone() -> None:
    story = ended_by_budget()
    extend(story, deadline_s=500.0)
    assert story.controller.is_over
    assert kinds(story.tell(DriverResumed, live=(), ended=())) == ["Finish"]


def test_ended_by_its_cap_again_it_needs_a_still_larger_one() -> None:
    story = ended_by_budget()
    extend(story, max_cost_usd=0.15 + 1e-7)
    assert kinds(story.tell(DriverResumed, live=(), ended=())) == ["Finish"]
    assert (story.state.outcome, story.controller.is_over) == ("budget", True)
    extend(story, "r-2", max_cost_usd=0.5)
    assert kinds(story.tell(DriverResumed, live=(), ended=())) == ["LaunchInstance"] * 2


def test_raised_while_it_is_being_ended_the_cap_counts_from_the_resume_on() -> None:
    story = begun(CAPPED)
    story.at = (story.controller.wake_at() or 0.0) - 1.0
    story.tell(Tick)
    extend(story, max_cost_usd=0.5)
    assert story.state.phase is Phase.ENDING
    story.tell(DriverResumed, live=(), ended=())
    assert story.state.phase is Phase.SCALING


def test_before_a_resume_it_counts_and_nothing_is_taken_to_hang_or_to_be_over_budget_for_it() -> None:
    story = begun(CAPPED)
    story.at += 10_000.0
    extend(story, max_cost_usd=0.5)
    assert len(story.state.running()) == 4
    assert can_go_on(story.state) is False
    assert story.state.outcome is None


def test_a_journal_of_a_version_that_knew_no_requests_reads_as_it_did() -> None:
    assert decode_event("CancelRequested", '{"occurred_at": 4.0}') == CancelRequested(occurred_at=4.0)
    event = LimitsChanged(occurred_at=4.0, request="r-1", deadline_s=None, max_cost_usd=2.5)
    assert decode_event(*encode_event(event)) == event
