"""What is left of deadline and budget is spent on a wider search (`spend: remaining`), and the limits still hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rubberband.errors import RubberbandError
from rubberband.executor.core.brackets import brackets_of
from rubberband.executor.core.budget import bill_usd
from rubberband.executor.core.controller import Controller
from rubberband.executor.core.events import TrialsDrawn
from rubberband.executor.core.state import Job, Phase, State, TrialStatus
from rubberband.executor.core.trials import best_trial
from rubberband.executor.driver import replay
from rubberband.executor.virtual.backend import VirtualBackend, shuffled
from rubberband.planner.brackets import plan_job
from rubberband.spec.search import Hyperband, Sha, sha
from rubberband.values.plan import PlanningConstraints, Stage
from tests.builders.budget import examples
from tests.builders.memory import MemoryJournal
from tests.builders.planned_jobs import planned_job
from tests.builders.strategies import offers, profiles
from tests.builders.virtual_runs import run_until_killed, run_virtual

CENT, MILLISECOND = 0.005, 0.0005
MOST = 2000
"""Trials that a metric is known of; a job with more is not looked at."""


def draw(
    _job: Job,
    _state: State,
    drawn: Mapping[int, Mapping[str, Any]],
    trials: Sequence[int],
    now: Callable[[], float],
) -> TrialsDrawn:
    """The configuration of a trial is its number: it does not depend on when it is drawn."""
    assert trials[0] not in drawn, "trials are drawn once"
    configurations = tuple({"number": trial} for trial in trials)
    return TrialsDrawn(occurred_at=now(), first_trial=trials[0], configurations=configurations, reason="by number")


@st.composite
def shapes(draw: st.DrawFn) -> Sha:
    eta = draw(st.integers(2, 3))
    max_t = draw(st.integers(2, 6))
    samples = draw(st.integers(eta, 12))
    return Sha(type="sha", num_samples=samples, max_t=max_t, reduction_factor=eta)


def _widening(shape: Sha) -> Sha:
    return shape.model_copy(update={"num_samples": shape.reduction_factor})


@st.composite
def chains(draw: st.DrawFn, room: st.SearchStrategy[float]) -> Job:
    """Draw jobs of one bracket: `room` times the money that they need, and a deadline that binds or does not."""
    shape = draw(shapes())
    assert isinstance(shape.num_samples, int)
    assert isinstance(shape.max_t, int)
    stages = sha(shape.num_samples, 1, shape.max_t, shape.reduction_factor)
    slack = draw(st.floats(0.0, 6.0))
    offer = dataclasses.replace(draw(offers()), billing="per_instance")
    assume(offer.price_usd_per_hour > 0.0)
    try:
        job = planned_job(stages, draw(profiles()), offer, slack, draw(room))
    except RubberbandError:
        assume(False)
        raise
    return dataclasses.replace(job, widening=_widening(shape))


@st.composite
def lanes(draw: st.DrawFn) -> Job:
    """Hyperband in one lane or more, with some money left."""
    scheduler = Hyperband(type="hyperband", max_t=draw(st.integers(2, 9)), reduction_factor=3)
    offer, profile = draw(offers()), draw(profiles())
    assume(offer.price_usd_per_hour > 0.0)
    limits = PlanningConstraints(min_gpus_per_trial=profile.smallest_gpus, max_gpus_per_trial=8)
    brackets: tuple[tuple[Stage, ...], ...] = scheduler.brackets()
    assume(offer.max_instances * offer.gpus >= 2 * profile.smallest_gpus)
    planned = plan_job(brackets, profile, offer, limits)
    deadline_s = planned.prediction.jct_s * draw(st.floats(0.5, 3.0))
    limits = dataclasses.replace(limits, deadline_s=deadline_s)
    try:
        planned = plan_job(brackets, profile, offer, limits)
    except RubberbandError:
        assume(False)
    numbers = [lane.brackets for lane in planned.lanes]
    assert isinstance(scheduler.max_t, int)
    return Job(
        name="widened",
        stages=tuple(stage for lane in planned.lanes for stage in lane.stages),
        plan=planned.plan,
        prediction=planned.prediction,
        offer=offer,
        profile=profile,
        metric="score",
        mode="max",
        deadline_s=deadline_s,
        max_cost_usd=planned.prediction.cost_usd * draw(st.floats(1.01, 2.0)),
        min_gpus_per_trial=limits.min_gpus_per_trial,
        max_gpus_per_trial=limits.max_gpus_per_trial,
        brackets=brackets_of(brackets, numbers),
        lane_instances=tuple(lane.max_instances for lane in planned.lanes) if len(brackets) > 1 else (),
        widening=Sha(type="sha", num_samples=3, max_t=scheduler.max_t, reduction_factor=3),
    )


def _backend(job: Job) -> VirtualBackend:
    metric_of = shuffled(MOST, "widening")
    return VirtualBackend(job.name, job.offer, job.profile, metric=job.metric, metric_of=metric_of)


def _kept(job: Job) -> None:
    try:
        controller, backend, finish = run_virtual(job, backend=_backend(job), draw=draw)
    except IndexError:
        assume(False)
    state = controller.state
    plain = dataclasses.replace(job, widening=None)
    before = run_virtual(plain, backend=_backend(plain))[0].state
    assert finish.outcome == "done"
    assert all(status.state == "terminated" for status in backend.provider.describe())
    assert job.deadline_s is not None
    assert job.max_cost_usd is not None
    last_s = max(stage.ended_at or 0.0 for stage in state.stages) - state.started_at
    assert last_s <= job.deadline_s + MILLISECOND
    assert bill_usd(controller.job, state, state.now) <= job.max_cost_usd + 1e-6
    assert len(state.trials) >= len(before.trials)
    best, best_before = best_trial(state, "score", "max"), best_trial(before, "score", "max")
    assert best is not None
    assert best_before is not None
    assert (best.metric("score") or 0.0) >= (best_before.metric("score") or 0.0)
    added = [event for event in state.widened if event.stages]
    assert len(state.trials) == len(before.trials) + sum(event.stages[0].trials for event in added)
    assert [event for event in state.widened if not event.stages] == state.widened[len(added) :]
    assert all(trial.status is not TrialStatus.QUEUED for trial in state.trials)


@given(chains(st.floats(1.01, 4.0)))
@settings(deadline=None, max_examples=examples(60))
def test_a_wider_search_keeps_both_limits_and_is_never_worse(job: Job) -> None:
    _kept(job)


@given(lanes())
@settings(deadline=None, max_examples=examples(18))
def test_so_does_one_of_several_brackets_wherever_its_last_lane_ends(job: Job) -> None:
    _kept(job)


@given(chains(st.floats(1.5, 3.0)), st.integers(0, 60))
@settings(deadline=None, max_examples=examples(45))
def test_a_driver_killed_after_any_event_goes_on_with_the_bracket_that_was_decided(job: Job, events: int) -> None:
    journal, backend = MemoryJournal(), _backend(job)
    before = Controller(job)
    try:
        run_until_killed(before, backend, journal, events, draw=draw)
        after, _, finish = run_virtual(job, journal=journal, backend=backend, draw=draw)
    except IndexError:
        assume(False)
    state, decided = after.state, before.state.widened
    assert state.phase is Phase.FINISHED
    assert state.widened[: len(decided)] == decided
    if finish.outcome == "done" and not finish.reason:
        assert state.widened
        assert not state.widened[-1].stages
    for old, new in zip(before.state.trials, state.trials, strict=False):
        assert new.reports[: old.iterations] == old.reports
    assert all(status.state == "terminated" for status in backend.provider.describe())
    again = Controller(job)
    replay(again, journal)
    assert (again.state, again.job) == (state, after.job)
