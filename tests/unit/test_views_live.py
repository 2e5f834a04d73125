"""The live view: what is told after a resume, and pictures of the table that do not change with the state."""

from __future__ import annotations

import io
import itertools
from typing import get_args

import pytest
from rich.console import Console

from rubberband.executor import (
    Controller,
    DriverResumed,
    Event,
    Forecast,
    Job,
    Journal,
    Phase,
    Started,
    State,
    Tick,
    TrialReported,
    VirtualBackend,
    drive,
    forecast,
)
from rubberband.executor.core.history import Record
from rubberband.executor.result.summary import stage_results
from rubberband.units import duration
from rubberband.values.profile import Profile
from rubberband.views.live import view as live
from rubberband.views.live.narration import Narrator
from rubberband.views.live.view import Progress, TerminalView, observe, open_view, summary
from tests.builders.filled import filled
from tests.builders.results import FAULTS, a_job
from tests.builders.stories import begun
from tests.builders.watching import pictures, watch


def test_a_rehearsal_shows_the_time_left_and_no_time_of_day() -> None:
    now, progress = pictures(a_job())[5]
    (time,) = (line for line in summary(progress, now, is_rehearsal=True) if line.startswith("time "))
    assert time.endswith(f"; ends in {duration(117.0 - now)}, 18m3s to spare; planned 1m57s")


def test_after_a_resume_only_what_is_new_is_reported() -> None:
    job = a_job()
    controller, backend = Controller(job), VirtualBackend("digits", a_job().offer, a_job().profile, metric="score")
    journal = Journal("sqlite://", job.name, create=True)
    seen: list[Event] = []

    def die(event: Event, _controller: Controller) -> None:
        seen.append(event)
        if sum(isinstance(past, TrialReported) for past in seen) == 13:
            raise KeyboardInterrupt

    try:
        drive(controller, backend, journal, observers=[die])
    except KeyboardInterrupt:
        stream = io.StringIO()
        again = Controller(job)
        with open_view(job, backend.now, stream, is_terminal=False) as view:
            drive(again, backend, journal, observers=[view])
    finally:
        journal.close()
    lines = [line.strip() for line in stream.getvalue().splitlines()]
    assert lines[0] == "1m22s  resuming digits: 2 instances held, 4 trials to continue, 0.0180 USD spent"
    assert not any("SYNC 0" in line or "stage 0" in line or "launching" in line for line in lines)
    assert any("SYNC 1" in line for line in lines)


@pytest.mark.parametrize("kind", get_args(Record))
def test_a_record_of_an_earlier_driver_is_not_reported_again(kind: type[Record]) -> None:
    job = a_job()
    controller = Controller(job)
    controller.handle(Started(occurred_at=0.0))
    earlier = filled(kind, at_s=1.0, **({"trial": 0} if hasattr(kind, "trial") else {}))
    controller.state.history.add(earlier)
    narrator, resumed = Narrator(job), DriverResumed(occurred_at=5.0, live=(), ended=())
    controller.handle(resumed)
    first = narrator.lines(resumed, controller)
    assert len(first) == 1
    assert first[0].startswith("resuming digits: ")
    controller.handle(Tick(occurred_at=6.0))
    assert narrator.lines(Tick(occurred_at=6.0), controller) == []


def test_a_resume_shows_the_remaining_limits() -> None:
    job = a_job()
    journal = Journal("sqlite://", job.name, create=True)
    stream = io.StringIO()
    try:
        turns = iter([False] * 5)
        backend = VirtualBackend("digits", job.offer, job.profile, metric="score")
        drive(Controller(job), backend, journal, cancelled=lambda: next(turns, True))
        with open_view(job, backend.now, stream, is_terminal=False) as view:
            drive(Controller(job), backend, journal, observers=[view])
    finally:
        journal.close()
    lines = [line.strip().split("  ")[1] for line in stream.getvalue().splitlines()]
    assert lines[0].startswith("resuming digits: 0 instances held, 4 trials to continue")
    assert any("launching 2: 0 -> 2 instances" in line for line in lines[1:])


def test_an_event_of_an_unknown_past_is_reported_too() -> None:
    job = a_job()
    controller = Controller(job)
    event = DriverResumed(occurred_at=5.0, live=(), ended=())
    controller.handle(event)
    assert Narrator(job).lines(event, controller)[0].startswith("digits: 12 trials in 3 stages")


def test_the_stages_money_adds_up_to_the_bill() -> None:
    for now, progress in pictures(a_job(), FAULTS):
        stages = [stage.actual_cost_usd or 0.0 for stage in progress.stages(now)]
        assert sum(stages) == pytest.approx(progress.spent_usd(now))


def test_time_and_money_continue_between_events_and_stop_at_the_end() -> None:
    taken = pictures(a_job())
    now, training = next((now, p) for now, p in taken if p.stages(now)[1].running)
    assert training.elapsed_s(now + 7.0) == training.elapsed_s(now) + 7.0
    assert training.spent_usd(now + 3600.0) > training.spent_usd(now)
    assert training.expected(now + 3600.0).jct_s > 3600.0
    now, over = taken[-1]
    assert over.elapsed_s(now + 99.0) == over.elapsed_s(now)
    assert over.spent_usd(now + 99.0) == over.spent_usd(now)


def test_a_picture_forecasts_as_the_run_does_where_trials_have_their_own_speeds() -> None:
    """The redrawing of a table ended with an IndexError: it looked for reports and allocations that were left out."""
    noisy = Profile(seconds_per_iteration={1: 10.0, 2: 6.0}, trial_startup_s=1.5, trial_cv=0.2, iteration_cv=0.05)
    job = a_job(profile=noisy)
    seen: list[tuple[Forecast, Forecast]] = []

    def compare(event: Event, controller: Controller) -> None:
        now = event.occurred_at
        seen.append((observe(job, controller.state).expected(now), forecast(controller.state, now)))

    watch(job, [compare])
    assert [taken for taken, _ in seen] == [of_the_run for _, of_the_run in seen]
    assert len(seen) > 20


def test_a_picture_does_not_change_with_the_state() -> None:
    taken = pictures(a_job())
    now, first = taken[0]
    assert [stage.queued for stage in first.stages(now)] == [12, 0, 0]
    assert first.spent_usd(now) == 0.0
    assert first.elapsed_s(now) == 0.0


def test_a_failure_counts_in_the_stage_in_which_it_happened() -> None:
    story = begun()
    story.fail(1, "not_a_number")
    for trial in (0, 2, 3):
        story.report(trial, trial / 10)
    story.fail(3, "not_a_number")
    first, second = stage_results(story.state, story.at)
    assert (first.done, first.failed, first.running + first.queued) == (3, 1, 0)
    assert (second.done, second.failed, second.running + second.queued) == (0, 1, 1)


def test_pictures_that_take_long_are_taken_now_and_then_and_of_every_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    job, stream, taken = a_job(), io.StringIO(), list[Progress]()
    phases, events = list[Phase](), list[Event]()

    def picture(job: Job, state: State) -> Progress:
        taken.append(observe(job, state))
        return taken[-1]

    monkeypatch.setattr(live, "observe", picture)

    def note(event: Event, controller: Controller) -> None:
        events.append(event)
        if not phases or phases[-1] is not controller.state.phase:
            phases.append(controller.state.phase)

    ticks = itertools.count()
    with TerminalView(job, lambda: 117.0, stream, stopwatch=lambda: float(next(ticks))) as view:
        watch(job, [note, view])
    assert [phase for phase, _ in itertools.groupby(progress.phase for progress in taken)] == phases
    assert len(taken) < len(events) / 3
    assert taken[-1].state.ended_at is not None


def test_on_a_terminal_the_table_and_the_lines_are_shown() -> None:
    job, stream = a_job(), io.StringIO()
    console = Console(file=stream, width=100, force_terminal=True, color_system=None)
    with TerminalView(job, lambda: 117.0, stream, console) as view:
        watch(job, [view])
    text = stream.getvalue()
    assert "SYNC 0: best score=0.5 (trial 0)" in text
    assert "3 -> 2 instances, releasing i-001" in text
    assert "12/12" in text
    assert "best      score=0.875 (trial 0)" in text
