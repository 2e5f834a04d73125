"""Trials that the user stops: any of them at any time, and a run ends, holds nothing and can be replayed."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rubberband.executor import (
    Controller,
    DriverRequest,
    Faults,
    Finish,
    Job,
    Phase,
    Requests,
    State,
    TrialStatus,
    VirtualBackend,
    best_trial,
    drive,
    expected_iterations,
    forecast,
    is_result,
    replay,
)
from tests.builders.budget import examples
from tests.builders.memory import MemoryJournal
from tests.builders.strategies import faults, jobs
from tests.builders.virtual_runs import check, run_until_killed
from tests.property.test_asha_runs import asha_jobs
from tests.property.test_brackets import divided_jobs

Stop = tuple[int, int]
"""The round of requests from which a stop is pending, and its trial."""

any_jobs = st.one_of(jobs(), asha_jobs(most_trials=12, repeated=(1, 1, 2, 3)), divided_jobs())


class Stops(Requests):
    """Requests to stop trials."""

    def __init__(self, stops: Sequence[Stop]) -> None:
        self._stops, self._round = stops, 0

    def pending(self, done: Collection[str] = ()) -> list[DriverRequest]:
        self._round += 1
        asked = [(f"s-{index}", trial) for index, (since, trial) in enumerate(self._stops) if since <= self._round]
        found = [DriverRequest(id=id, kind="stop", asked_at=0.0, trial=trial) for id, trial in asked]
        return [request for request in found if request.id not in done]


@st.composite
def stopped_jobs(draw: st.DrawFn, most_rounds: int = 40) -> tuple[Job, list[Stop]]:
    job = draw(any_jobs)
    if not job.is_divided and job.has_sync:
        job = dataclasses.replace(job, replan=draw(st.booleans()))
    trials = st.one_of(st.integers(0, job.num_trials - 1), st.just(job.num_trials + 1))
    stops = draw(st.lists(st.tuples(st.integers(0, most_rounds), trials), max_size=2 * job.num_trials))
    if draw(st.booleans()):
        at = draw(st.integers(0, most_rounds))
        stops += [(at, trial) for trial in range(job.num_trials)]
    return job, stops


def driven(
    job: Job, stops: Sequence[Stop], backend: VirtualBackend, journal: MemoryJournal
) -> tuple[Controller, Finish]:
    controller = Controller(job)
    return controller, drive(controller, backend, journal, observers=[check], requests=Stops(stops))


def backend_of(job: Job, faults: Faults | None = None) -> VirtualBackend:
    return VirtualBackend(job.name, job.offer, job.profile, metric=job.metric, faults=faults)


def require_its_end(job: Job, state: State, finish: Finish, backend: VirtualBackend, journal: MemoryJournal) -> None:
    assert state.phase is Phase.FINISHED
    assert all(status.state == "terminated" for status in backend.provider.describe())
    best = best_trial(state)
    assert (finish.outcome == "done") <= (best is not None and is_result(best))
    for trial in state.trials:
        if trial.stopped_at is not None:
            runs = [use for use in state.allocations if use.trial == trial.trial]
            assert all(use.started_at <= trial.stopped_at and use.ended_at is not None for use in runs)
            assert all(report.reported_at <= trial.stopped_at for report in trial.reports)
    again = Controller(job)
    replay(again, journal)
    assert again.state == state


@given(stopped_jobs())
@settings(deadline=None, max_examples=examples(300))
def test_a_run_with_any_stops_ends_with_what_was_left(given: tuple[Job, list[Stop]]) -> None:
    job, stops = given
    backend, journal = backend_of(job), MemoryJournal()
    controller, finish = driven(job, stops, backend, journal)
    state = controller.state
    require_its_end(job, state, finish, backend, journal)
    unstopped = [trial for trial in state.trials if trial.stopped_at is None]
    assert all(trial.status in (TrialStatus.STOPPED, TrialStatus.COMPLETED) for trial in unstopped)
    if any(trial.reports for trial in state.trials) or len(unstopped) == job.num_trials:
        assert finish.outcome == "done"
    else:
        assert finish.outcome == "failed"
        assert "was stopped before its first report" in finish.reason


@given(stopped_jobs(), faults(), st.integers(0, 60))
@settings(deadline=None, max_examples=examples(200))
def test_stops_survive_faults_and_a_killed_driver(
    given: tuple[Job, list[Stop]], faults: Faults, events_before: int
) -> None:
    job, stops = given
    backend, journal = backend_of(job, faults), MemoryJournal()
    before = Controller(job)
    run_until_killed(before, backend, journal, events_before, requests=Stops(stops))
    stopped = [trial.trial for trial in before.state.trials if trial.stopped_at is not None]
    controller, finish = driven(job, stops, backend, journal)
    assert all(controller.state.trials[trial].stopped_at is not None for trial in stopped)
    require_its_end(job, controller.state, finish, backend, journal)


@given(stopped_jobs())
@settings(deadline=None, max_examples=examples(50))
def test_forecasts_of_runs_with_stops_reach_what_came(given: tuple[Job, list[Stop]]) -> None:
    job, stops = given
    controller, finish = driven(job, stops, backend_of(job), MemoryJournal())
    state = controller.state
    done = sum(trial.iterations for trial in state.trials)
    if finish.outcome == "done" and (not job.has_sync or len(state.stages) == len(job.stages)):
        assert expected_iterations(state) == done
    assert forecast(state, state.now).jct_s == pytest.approx((state.ended_at or 0.0) - state.started_at)
