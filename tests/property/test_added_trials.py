"""Trials that are added at any time: each trains its iterations once, the run ends, and a resume decides alike."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Collection, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rubberband.errors import InputError
from rubberband.executor import (
    Controller,
    DriverRequest,
    Extension,
    Faults,
    Finish,
    Job,
    Phase,
    Requests,
    State,
    TrialsAdded,
    TrialStatus,
    VirtualBackend,
    bill_usd,
    drive,
    expected_iterations,
    extension,
    replay,
    summarise,
)
from rubberband.executor.core.state import stage_iterations
from rubberband.executor.journal.inbox import NewTrials
from tests.builders.additions import add
from tests.builders.budget import examples
from tests.builders.memory import MemoryJournal
from tests.builders.strategies import faults, jobs
from tests.builders.virtual_runs import Killed, check
from tests.property.test_asha_runs import asha_jobs
from tests.property.test_brackets import divided_jobs

Addition = tuple[int, NewTrials]
"""The round of requests from which it is pending, and what is asked for."""

any_jobs = st.one_of(jobs(), asha_jobs(most_trials=12), divided_jobs())


class Adds(Requests):
    """Requests for trials. Those that come after the end are asked at a resume."""

    def __init__(self, additions: Sequence[Addition]) -> None:
        self._additions, self._round, self.is_over = additions, 0, False

    def pending(self, done: Collection[str] = ()) -> list[DriverRequest]:
        self._round += 1
        return [
            DriverRequest(id=f"a-{index}", kind="add", asked_at=0.0, trials=trials)
            for index, (since, trials) in enumerate(self._additions)
            if (since <= self._round or self.is_over) and f"a-{index}" not in done
        ]


@st.composite
def new_trials(draw: st.DrawFn) -> NewTrials:
    if draw(st.booleans()):
        return NewTrials(count=draw(st.integers(1, 9)))
    clone_of = draw(st.one_of(st.none(), st.integers(0, 5)))
    return NewTrials(clone_of=clone_of, from_checkpoint=clone_of is not None and draw(st.booleans()))


@st.composite
def added_jobs(draw: st.DrawFn, most_rounds: int = 40) -> tuple[Job, list[Addition]]:
    job = draw(any_jobs)
    if job.has_sync:
        job = dataclasses.replace(job, replan=draw(st.booleans()))
    additions = st.tuples(st.integers(0, most_rounds), new_trials())
    return job, draw(st.lists(additions, min_size=1, max_size=4))


def backend_of(job: Job, faults: Faults | None = None) -> VirtualBackend:
    return VirtualBackend(job.name, job.offer, job.profile, metric=job.metric, faults=faults)


class Run:
    """A run with additions; it is driven again until all of them have been trained."""

    def __init__(self, job: Job, additions: Sequence[Addition], faults: Faults | None = None) -> None:
        self.job, self.journal, self.asked = job, MemoryJournal(), Adds(additions)
        self.backend, self.controller, self.told = backend_of(job, faults), Controller(job), list[Extension | None]()
        self.drivers = 0

    def _add(self, state: State, asked: DriverRequest, now: float) -> TrialsAdded:
        try:
            event = add(state, asked, now)
        except InputError:  # what cannot be cloned is a trial of its own
            event = add(state, dataclasses.replace(asked, trials=NewTrials()), now)
        self.told.append(None)
        with contextlib.suppress(InputError):
            self.told[-1] = extension(copy.deepcopy(state), now, added=event)
        return event

    def drive(self, kill_after: int = -1) -> Finish | None:
        """Drive it once; None if the driver was killed."""
        left, self.drivers = [kill_after], self.drivers + 1

        def kill(*_: object) -> None:
            left[0] -= 1
            if left[0] == -1:
                raise Killed

        self.controller = Controller(self.job)
        try:
            return drive(
                self.controller, self.backend, self.journal, observers=[check, kill], requests=self.asked, add=self._add
            )
        except Killed:
            self.backend.forget()
            return None

    def to_its_end(self) -> State:
        """Drive it to its end, and again with what was asked for after that."""
        assert self.drive() is not None
        self.asked.is_over = True
        while self._is_open():
            assert self.drive() is not None
        return self.controller.state

    def _is_open(self) -> bool:
        state = self.controller.state
        added = any(trial.status is TrialStatus.QUEUED for trial in state.trials)
        return state.outcome == "done" and (added or bool(self.asked.pending(state.requests)))


def require_trained(run: Run) -> None:
    """Every trial has trained each of its iterations once, to the end of a stage, and the bill is the instances'."""
    job, state = run.controller.job, run.controller.state
    assert state.phase is Phase.FINISHED
    assert all(status.state == "terminated" for status in run.backend.provider.describe())
    summarise(state, {"configurations": []}, state.now)
    if state.outcome == "done":
        assert len(state.trials) == job.num_trials
        for trial in state.trials:
            assert trial.status in (TrialStatus.STOPPED, TrialStatus.COMPLETED, TrialStatus.FAILED)
            ends = job.rung_ends(trial.last_stage)
            assert trial.status is TrialStatus.FAILED or trial.iterations == ends[trial.rung]
            assert trial.failures or trial.reports
        if all(trial.status is not TrialStatus.FAILED for trial in state.trials):
            assert expected_iterations(state) == sum(trial.iterations for trial in state.trials)
        if job.has_sync:
            for record in state.stages:
                assert len(set(record.trials)) == len(record.trials) <= job.stages[record.stage].trials
                for number in record.trials:
                    trial = state.trials[number]
                    done = trial.iterations if trial.status is not TrialStatus.FAILED else job.max_iterations
                    assert stage_iterations(job, record.stage, trial) <= done
    again = Controller(run.job)
    replay(again, run.journal)
    assert again.state == state


@given(added_jobs())
@settings(deadline=None, max_examples=examples(400))
def test_every_trial_that_is_added_is_trained(given: tuple[Job, list[Addition]]) -> None:
    run = Run(*given)
    state = run.to_its_end()
    require_trained(run)
    assert state.outcome in ("done", "budget")
    if state.outcome == "done":
        asked = run.job.repeats * sum(trials.count or 1 for _, trials in given[1])
        assert len(state.trials) == run.job.num_trials + asked


@given(added_jobs())
@settings(deadline=None, max_examples=examples(400))
def test_a_preview_is_what_comes(given: tuple[Job, list[Addition]]) -> None:
    job, additions = given
    varies = any((job.profile.trial_cv, job.profile.iteration_cv, job.profile.startup_cv))
    if not job.has_sync or varies or job.offer.spot is not None or job.deadline_s or job.max_cost_usd:
        return
    job = dataclasses.replace(job, resize_in_stage=False)  # an upper bound otherwise
    run = Run(job, additions[:1])
    state = run.to_its_end()
    (told,) = run.told
    if told is None or job.offer.billing == "per_function" or not job.profile.resumes:
        return
    alone = Run(job, []).to_its_end()
    if seen(alone) != (pytest.approx(told.before.jct_s), pytest.approx(told.before.cost_usd)):
        return  # lanes hand instances on, which no forecast foresees
    assert seen(state) == (pytest.approx(told.after.jct_s, abs=1e-3), pytest.approx(told.after.cost_usd, abs=1e-6))


def seen(state: State) -> tuple[float, float]:
    """Time and cost of a run that is over."""
    return max(record.ended_at or 0.0 for record in state.stages) - state.started_at, bill_usd(state, state.now)


@given(added_jobs(), faults(), st.lists(st.integers(0, 40), max_size=3))
@settings(deadline=None, max_examples=examples(400))
def test_additions_survive_faults_and_killed_drivers(
    given: tuple[Job, list[Addition]], faults: Faults, kills: list[int]
) -> None:
    run = Run(*given, faults)
    for after in kills:
        if run.drive(after) is not None:
            break
    added = len(run.controller.state.trials)
    state = run.to_its_end()
    assert len(state.trials) >= added, "what was journalled is there again"
    require_trained(run)
