"""The live view: a whole run as plain lines, and as a table that shows every stage while the cluster shrinks."""

from __future__ import annotations

import io
import itertools
import re
from itertools import pairwise
from typing import get_args

import pytest
from rich.console import Console

from rubberband.executor import (
    Controller,
    DriverResumed,
    Event,
    Faults,
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
from rubberband.units import duration
from rubberband.values.profile import Profile
from rubberband.views.live import view as live
from rubberband.views.live.narration import Narrator
from rubberband.views.live.view import Progress, TerminalView, observe, open_view, stage_table, summary
from tests.builders.filled import filled
from tests.builders.results import FAULTS, a_job
from tests.builders.watching import narration, pictures, watch

WHOLE_RUN = """\
0s  digits: 12 trials in 3 stages, planned 1m57s and 0.0202 USD; deadline 20m; max_cost 1.00 USD
0s  stage 0: 12 trials x 1 iteration; launching 3: 0 -> 3 instances
47s  i-001 ready after 47s (1 of 3 instances)
47s  i-002 ready after 47s (2 of 3 instances)
47s  i-003 ready after 47s (3 of 3 instances)
47s  stage 0: training 12 trials on 3 instances x 2 GPUs, 1 GPU per trial, 6 at once
1m10s  SYNC 0: best score=0.5 (trial 0); promoted 4 of 12 (trials 0, 1, 2, 3); stopped 8; spent 0.0180 USD; \
forecast 1m57s, 0.0202 USD
1m10s  stage 1: 4 trials x 2 iterations; 3 -> 2 instances, releasing i-001
1m10s  stage 1: training 4 trials on 2 instances x 2 GPUs, 1 GPU per trial, 4 at once
1m10s  i-001 released; 2 instances held
1m32s  SYNC 1: best score=0.75 (trial 0); promoted 1 of 4 (trial 0); stopped 3; spent 0.0180 USD; \
forecast 1m57s, 0.0202 USD
1m32s  stage 2: 1 trial x 4 iterations; 2 -> 1 instance, releasing i-002
1m32s  stage 2: training 1 trial on 1 instance x 2 GPUs, 2 GPUs per trial, 1 at once
1m32s  i-002 released; 1 instance held
1m57s  SYNC 2: best score=0.875 (trial 0); spent 0.0202 USD
1m57s  ending: 1 -> 0 instances, releasing i-003
1m57s  i-003 released; 0 instances held
1m57s  done: best score=0.875 (trial 0, 7 iterations); 1m57s, 0.0202 USD
"""


def test_a_whole_run_in_plain_lines() -> None:
    assert narration() == WHOLE_RUN


def test_each_decision_of_a_replan_is_reported_in_one_line() -> None:
    lines = narration(a_job(replan=True, deadline_s=130.0)).splitlines()
    at_sync = [line for line in lines if line.startswith("1m10s")]
    assert "promoted 4 of 12 (trials 0, 1, 2, 3); stopped 8" in at_sync[0]
    assert "forecast" not in at_sync[0]  # the plan that follows has the newer one
    assert at_sync[1:3] == [
        "1m10s  plan unchanged: 13s to spare; forecast 1m57s, 0.0202 USD",
        "1m10s  stage 1: 4 trials x 2 iterations; 3 -> 2 instances, releasing i-001",
    ]
    assert sum("plan unchanged" in line for line in lines) == 2


def test_a_rehearsal_shows_the_time_left_and_no_time_of_day() -> None:
    now, progress = pictures(a_job())[5]
    (time,) = (line.plain for line in summary(progress, now, is_rehearsal=True) if line.plain.startswith("time "))
    assert time.endswith(f"; ends in {duration(117.0 - now)}, 18m3s to spare; planned 1m57s")


def test_failures_say_why_and_what_follows() -> None:
    lines = narration(faults=FAULTS).splitlines()
    assert [line for line in lines if " failed, " in line] == [
        "58s  trial 2 failed, raised: fault; retrying (1 of 1)",
        "1m10s  trial 7 failed, not a number: fault; given up",
        "1m10s  trial 2 failed, died: fault; given up after 2 failures",
        "2m28s  trial 5 failed, hung: no report for 100 s (rubberband logs digits 5); retrying (1 of 1)",
    ]
    assert any("stopped 6; 2 failed; spent" in line for line in lines)


def test_a_lost_instance_is_reported_with_its_trials_and_its_replacement() -> None:
    text = narration(faults=Faults(lost_after_s={"i-002": 20.0}))
    assert re.search(
        r"55s  i-002 lost \(.+\): 3 -> 2 instances; trials 2, 3 will resume from the last checkpoint\n"
        r"55s  launching 1: 2 -> 3 instances\n",
        text,
    )


def test_a_refused_instance_is_reported_with_what_follows() -> None:
    text = narration(faults=Faults(refused={"i-003"}))
    assert "i-003 refused: no capacity for i-003; retrying in 10s\n10s  launching 1: 2 -> 3 instances\n" in text
    text = narration(faults=Faults(refused={f"i-{number:03d}" for number in range(3, 30)}))
    assert "; continuing with 2 instances\n" in text
    assert "stage 0: training 12 trials on 2 instances x 2 GPUs" in text


def test_an_early_end_says_why_and_gives_everything_back() -> None:
    turns = iter([False] * 4 + [True] * 9)
    text = narration(cancelled=lambda: next(turns, True))
    assert "ending (cancelled by the user): 3 -> 0 instances, releasing i-001, i-002, i-003\n" in text
    assert text.splitlines()[-1].split("  ")[1].startswith("cancelled: best score=0.5 (trial 0, 1 iteration)")
    assert "stopped to keep the budget: best" in narration(a_job(max_cost_usd=0.02))
    nowhere = narration(faults=Faults(refused={f"i-{number:03d}" for number in range(30)}))
    assert "failed: no trial reported" in nowhere


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


def test_instances_are_held_until_they_are_gone() -> None:
    turns = iter([False] * 4)
    text = narration(cancelled=lambda: next(turns, True))
    ends = re.findall(r"i-\d+ released; (\d) instances? held", text)
    assert ends == ["2", "1", "0"]


def test_an_event_of_an_unknown_past_is_reported_too() -> None:
    job = a_job()
    controller = Controller(job)
    event = DriverResumed(occurred_at=5.0, live=(), ended=())
    controller.handle(event)
    assert Narrator(job).lines(event, controller)[0].startswith("digits: 12 trials in 3 stages")


def drawn(progress: Progress, now: float, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    with console.capture() as capture:
        console.print(stage_table(progress, now, width), *summary(progress, now), sep="\n")
    return capture.get()


def test_the_table_shows_every_stage_at_every_moment_within_80_columns() -> None:
    for now, progress in pictures(a_job(), FAULTS):
        text = drawn(progress, now)
        assert "…" not in text
        assert "0.0" in text
        assert "time " in text
    assert [stage.phase for stage in progress.stages] == ["done", "done", "done"]
    assert [(stage.done, stage.failed) for stage in progress.stages] == [(10, 2), (4, 0), (1, 0)]
    assert [stage.instances for stage in progress.stages] == [3, 2, 1]


def test_the_stages_money_adds_up_to_what_is_spent() -> None:
    for now, progress in pictures(a_job(), FAULTS):
        begun = [stage for stage in progress.stages if stage.started_s is not None]
        for before, after in pairwise(begun):
            assert before.ended_usd == after.before_usd
        assert begun[0].before_usd == 0.0
        assert progress.spent_usd(now) >= begun[-1].before_usd


def test_time_and_money_continue_between_events_and_stop_at_the_end() -> None:
    taken = pictures(a_job())
    now, training = next((now, p) for now, p in taken if p.stages[1].running)
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
    assert first.stages[0].phase == "current"
    assert first.spent_usd(now) == 0.0
    assert first.elapsed_s(now) == 0.0


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
