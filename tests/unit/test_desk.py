"""What is asked of a driver while it drives: taken in once, journalled before it is let go of. Virtual runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from rubberband.executor.core.controller import Controller
from rubberband.executor.core.events import CancelRequested, DriverResumed, Event, Finish, LimitsChanged, TrialReported
from rubberband.executor.core.history import Granted
from rubberband.executor.core.state import Job
from rubberband.executor.journal.folder import ExperimentFolder
from rubberband.executor.journal.inbox import DriverRequest, Inbox, Requests
from rubberband.executor.journal.reading import read
from rubberband.executor.run import session
from rubberband.executor.run.driver import Observer, drive
from rubberband.executor.virtual.backend import VirtualBackend
from rubberband.planner.exact.model import predict
from rubberband.values.profile import Profile
from tests.builders.invariants import validate
from tests.builders.jobs import JOB
from tests.builders.memory import MemoryInbox, MemoryJournal
from tests.builders.sessions import Killed, dying_after, run_spec
from tests.builders.timed_requests import TimedInbox, cancel, extend

SLOW = Profile(seconds_per_iteration={1: 100.0, 2: 60.0})
FREE = dataclasses.replace(JOB, profile=SLOW, prediction=predict(JOB.stages, JOB.plan, SLOW, JOB.offer))
"""It takes 300 s, and the second stage begins at 100 s."""
CAPPED = dataclasses.replace(FREE, max_cost_usd=0.7 * FREE.prediction.cost_usd, deadline_s=600.0)
"""Without more money it is stopped in its second stage."""
ENOUGH_USD = 2.0 * FREE.prediction.cost_usd


class Run:
    """A job on a virtual clock, over several drivers."""

    def __init__(self, job: Job, *requests: DriverRequest) -> None:
        self.job = job
        self.backend = VirtualBackend(job.name, job.offer, job.profile, metric=job.metric)
        self.journal = MemoryJournal()
        self.inbox: TimedInbox = TimedInbox(self.backend.now, *requests)
        self.controller = Controller(job)

    def drive(self, requests: Requests | None = None, observers: tuple[Observer, ...] = ()) -> Finish:
        self.controller = Controller(self.job)
        watching = [lambda _event, controller: validate(controller), *observers]
        return drive(self.controller, self.backend, self.journal, observers=watching, requests=requests or self.inbox)

    @property
    def events(self) -> list[Event]:
        return [event for _, event in self.journal.events()]

    def trained(self) -> list[tuple[int, int]]:
        reports = [event for event in self.events if isinstance(event, TrialReported)]
        return sorted((report.trial, report.iterations) for report in reports)


def whole() -> list[tuple[int, int]]:
    run = Run(FREE)
    run.drive()
    return run.trained()


def test_without_more_money_it_is_stopped_and_with_it_in_time_it_is_done() -> None:
    assert Run(CAPPED).drive().outcome == "budget"
    run = Run(CAPPED, extend(120.0, max_cost_usd=ENOUGH_USD))
    assert run.drive().outcome == "done"
    assert run.inbox.pending() == []
    assert run.trained() == whole()


def test_money_that_comes_at_the_very_instant_of_the_stop_is_in_time() -> None:
    stopped = Run(CAPPED)
    stopped.drive()
    ended_at = stopped.controller.state.ended_at
    assert ended_at is not None
    assert Run(CAPPED, extend(ended_at, max_cost_usd=ENOUGH_USD)).drive().outcome == "done"


def test_a_run_that_its_cap_ended_is_extended_resumed_and_repeats_nothing() -> None:
    run = Run(CAPPED)
    run.drive()
    run.backend.close()
    run.inbox.put(extend(0.0, max_cost_usd=ENOUGH_USD))
    assert run.drive().outcome == "done"
    assert run.trained() == whole()
    kinds = [type(event) for event in run.events]
    assert kinds.index(LimitsChanged) + 1 == kinds.index(DriverResumed)


def test_a_request_to_end_ends_it_and_a_resume_resumes() -> None:
    run = Run(FREE, cancel(120.0))
    assert run.drive().outcome == "cancelled"
    assert run.inbox.pending() == []
    run.backend.close()
    assert run.drive().outcome == "done"


def test_requests_to_end_that_came_too_late_are_let_go_of() -> None:
    run = Run(FREE, cancel(120.0), cancel(120.0, "c-2"))

    def ask_again(event: Event, _controller: Controller) -> None:
        if isinstance(event, CancelRequested):
            run.inbox.put(cancel(120.0, "c-3"))

    assert run.drive(observers=(ask_again,)).outcome == "cancelled"
    assert run.inbox.pending() == []


def test_the_same_request_from_two_sides_counts_once() -> None:
    run = Run(CAPPED, extend(5.0, max_cost_usd=ENOUGH_USD))

    def ask_again(_event: Event, _controller: Controller) -> None:
        run.inbox.put(extend(5.0, max_cost_usd=2.0 * ENOUGH_USD))

    run.drive(observers=(ask_again,))
    assert [granted.max_cost_usd for granted in run.controller.state.history.of(Granted)] == [ENOUGH_USD]


def test_two_extensions_at_once_leave_the_larger_limits() -> None:
    run = Run(CAPPED, extend(5.0, deadline_s=700.0), extend(5.0, "r-2", deadline_s=650.0, max_cost_usd=ENOUGH_USD))
    run.drive()
    assert (run.controller.job.deadline_s, run.controller.job.max_cost_usd) == (700.0, ENOUGH_USD)


class DyingInbox(MemoryInbox):
    """Its driver dies between the journal and the discarding."""

    def discard(self, id: str) -> None:
        raise Killed


@pytest.mark.parametrize("asked", [extend(0.0, max_cost_usd=ENOUGH_USD), cancel(0.0)], ids=["extend", "cancel"])
def test_requests_that_a_driver_journalled_and_kept_are_taken_once(asked: DriverRequest) -> None:
    run = Run(CAPPED if asked.kind == "extend" else FREE)
    with pytest.raises(Killed):
        run.drive(DyingInbox([asked]))
    run.inbox.put(asked)
    assert run.drive().outcome == "done"
    assert run.inbox.pending() == []
    assert sum(isinstance(event, LimitsChanged | CancelRequested) for event in run.events) == 1


def test_an_interrupted_run_that_was_extended_resumes_with_its_new_limits() -> None:
    run = Run(CAPPED)
    left = iter(range(8))

    def die(_event: Event, _controller: Controller) -> None:
        if next(left, None) is None:
            raise Killed

    with pytest.raises(Killed):
        run.drive(observers=(die,))
    run.backend.forget()
    run.inbox.put(extend(0.0, max_cost_usd=ENOUGH_USD))
    assert run.drive().outcome == "done"
    assert run.trained() == whole()


def test_a_folder_s_inbox_reaches_its_driver_and_the_report_mentions_it(tmp_path: Path) -> None:
    folder = ExperimentFolder(home=tmp_path, name="test")
    session.create(folder, CAPPED, run_spec(checkpoints=str(folder.checkpoints)))
    assert session.run(folder).outcome == "budget"
    assert session.run(folder, view=dying_after(0)).outcome == "budget"
    Inbox(folder.inbox).put(extend(0.0, max_cost_usd=ENOUGH_USD))
    assert read(folder).max_cost_usd == CAPPED.max_cost_usd
    result = session.run(folder)
    assert (result.outcome, result.max_cost_usd) == ("done", ENOUGH_USD)
    assert result.planned_cost_usd == FREE.prediction.cost_usd
    (extension,) = result.extensions
    assert (extension.max_cost_before_usd, extension.max_cost_usd) == (CAPPED.max_cost_usd, ENOUGH_USD)
    assert (extension.deadline_before_s, extension.deadline_s) == (600.0, 600.0)
    assert Inbox(folder.inbox).pending() == []
    assert read(folder) == result
