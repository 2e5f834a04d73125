"""The controller on a virtual clock: predictions, forecasts and previews come true, caps hold, deaths lose nothing."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rubberband.executor import (
    Controller,
    Event,
    Extension,
    Faults,
    Forecast,
    Job,
    LimitsChanged,
    Phase,
    State,
    TrialStatus,
    VirtualBackend,
    bill_usd,
    drive,
    extension,
    forecast,
    paid_time,
)
from rubberband.planner.exact.model import predict
from rubberband.values.offer import Spot
from rubberband.values.plan import Plan
from tests.builders.budget import examples
from tests.builders.invariants import validate
from tests.builders.memory import MemoryJournal
from tests.builders.planned_jobs import planned_jobs
from tests.builders.strategies import faults, jobs
from tests.builders.timed_requests import TimedInbox, extend
from tests.builders.virtual_runs import jct_s, killed_and_resumed, run_virtual

CENT, MILLISECOND = 0.005, 0.0005


@given(jobs())
@settings(deadline=None, max_examples=examples(75))
def test_a_virtual_run_takes_and_costs_what_was_predicted(job: Job) -> None:
    controller, _, finish = run_virtual(job)
    state = controller.state
    assert finish.outcome == "done"
    assert abs(jct_s(state) - job.prediction.jct_s) < MILLISECOND
    assert abs(bill_usd(state, state.now) - job.prediction.cost_usd) < CENT
    assert len(state.trials) == job.stages[0].trials
    for record, stage, predicted in zip(state.stages, job.stages, job.prediction.stages, strict=True):
        assert len(record.trials) == stage.trials
        assert abs(record.started_at - state.started_at - predicted.start_s) < MILLISECOND
        assert record.training_at is not None
        assert abs(record.training_at - record.started_at - predicted.provisioning_s) < MILLISECOND
    assert [trial.trial for trial in state.trials if trial.status is TrialStatus.COMPLETED] == list(
        range(job.stages[-1].trials)
    )


@given(jobs())
@settings(deadline=None, max_examples=examples(50))
def test_the_paid_time_adds_up_to_the_bill(job: Job) -> None:
    controller, _, _ = run_virtual(job)
    offer = job.offer
    paid = paid_time(controller.state, controller.state.now)
    compute_usd = paid.total_gpu_s / offer.gpus * offer.price_usd_per_s
    launched = len(controller.state.instances) * offer.data_usd_per_instance
    head_usd = offer.head_cost_usd(jct_s(controller.state))
    assert bill_usd(controller.state, controller.state.now) == pytest.approx(compute_usd + launched + head_usd)
    causes = [paid.idle_before_gpu_s, paid.idle_in_stage_gpu_s, paid.idle_between_gpu_s, paid.idle_after_gpu_s]
    assert min(causes) >= 0.0
    assert sum(causes) == pytest.approx(paid.idle_gpu_s)


@given(jobs(), faults(), st.integers(0, 60), st.sampled_from([1, 1, 2, 3]))
@settings(deadline=None, max_examples=examples(100))
def test_a_driver_killed_after_any_event_resumes_and_trains_no_acknowledged_iteration_again(
    job: Job, faults: Faults, events_before: int, checkpoint_every: int
) -> None:
    before, after, backend = killed_and_resumed(job, faults, events_before, checkpoint_every)
    assert all(status.state == "terminated" for status in backend.provider.describe())
    for old, new in zip(before.state.trials, after.state.trials, strict=True):
        assert new.reports[: old.iterations] == old.reports


@given(jobs())
@settings(deadline=None, max_examples=examples(250))
def test_whenever_it_is_asked_the_forecast_of_an_undisturbed_run_is_the_prediction(job: Job) -> None:
    seen: list[Forecast] = []

    def look(event: Event, controller: Controller) -> None:
        seen.append(forecast(controller.state, event.occurred_at))

    run_virtual(job, observers=[look])
    for expected in seen:
        assert expected.jct_s == pytest.approx(job.prediction.jct_s, abs=1e-3)
        assert expected.cost_usd == pytest.approx(job.prediction.cost_usd, abs=0.005)


# Markets


@st.composite
def jobs_on_markets(draw: st.DrawFn) -> Job:
    job = draw(jobs())
    share = draw(st.sampled_from([0.2, 0.5, 1.0]))
    spot = Spot(price_usd_per_hour=share * job.offer.price_usd_per_hour, interruptions_per_hour=0.0)
    offer = dataclasses.replace(job.offer, spot=spot)
    plan = Plan(
        stages=tuple(
            dataclasses.replace(choice, market=draw(st.sampled_from(["spot", "on_demand"])))
            for choice in job.plan.stages
        )
    )
    return dataclasses.replace(
        job,
        offer=offer,
        plan=plan,
        prediction=predict(job.stages, plan, job.profile, offer),
        replan=draw(st.booleans()),
    )


@given(jobs_on_markets())
@settings(deadline=None, max_examples=examples(50))
def test_a_run_over_markets_takes_and_costs_what_was_predicted(job: Job) -> None:
    job = dataclasses.replace(job, replan=False)
    controller, _, finish = run_virtual(job)
    state = controller.state
    assert finish.outcome == "done"
    assert abs(state.now - state.started_at - job.prediction.jct_s) < MILLISECOND
    assert abs(bill_usd(state, state.now) - job.prediction.cost_usd) < CENT
    bought = {record.market for record in state.instances.values()}
    assert bought == {choice.market for choice in job.plan.stages}


@given(
    jobs_on_markets(),
    st.floats(0.05, 1.5),
    st.sampled_from([0.0, 3.0, 30.0]),
    st.one_of(st.none(), st.sampled_from([60.0, 600.0])),
)
@settings(deadline=None, max_examples=examples(100))
def test_at_every_moment_the_bill_stays_within_the_cap_even_if_the_driver_dies_there(
    job: Job, share: float, margin_s: float, lease_s: float | None
) -> None:
    cap_usd = share * job.prediction.cost_usd
    job = dataclasses.replace(job, max_cost_usd=cap_usd, release_margin_s=margin_s, lease_s=lease_s)

    def held_to_the_last(_event: Event, controller: Controller) -> None:
        """All that runs is held as long as its lease may be; what is billed already only grows by that."""
        state, until = controller.state, controller.hold_until()
        if state.fleet.live() and until < math.inf:
            assert bill_usd(state, until) <= cap_usd + 1e-6

    controller, backend, finish = run_virtual(job, observers=[held_to_the_last])
    assert finish.outcome in ("done", "budget") or "lease expired" in finish.reason
    assert bill_usd(controller.state, controller.state.now) <= cap_usd + 1e-6
    assert all(status.state == "terminated" for status in backend.provider.describe())


# Other limits


class Watch:
    """Looks at a run when its limits are changed: what the preview says just then, of both."""

    def __init__(self, job: Job, deadline_s: float) -> None:
        self._job = job
        self._deadline_s = deadline_s
        self.seen: Extension | None = None

    def __call__(self, event: Event, controller: Controller) -> None:
        validate(controller)
        if isinstance(event, LimitsChanged) and controller.state.outcome is None:
            now, state = event.occurred_at, controller.state.supposed(job=self._job)
            self.seen = extension(state, now, deadline_s=self._deadline_s)


def extended_run(job: Job, at: float | None, deadline_s: float) -> tuple[State, Watch]:
    """Drive `job` to its end; `at` an instant it is given until `deadline_s`."""
    backend = VirtualBackend(job.name, job.offer, job.profile, metric=job.metric)
    watch = Watch(job, deadline_s)
    asked = [] if at is None else [extend(at, deadline_s=deadline_s)]
    controller = Controller(job)
    drive(controller, backend, MemoryJournal(), observers=[watch], requests=TimedInbox(backend.now, *asked))
    return controller.state, watch


@given(
    planned_jobs(st.sampled_from([0.0, 0.1, 0.5]), st.none()),
    st.floats(0.0, 0.95),
    st.sampled_from([1.05, 1.3, 2.0, 10.0]),
)
@settings(deadline=None, max_examples=examples(125))
def test_expectations_with_and_without_a_later_deadline_come_true(job: Job, when: float, later: float) -> None:
    assert job.deadline_s is not None
    deadline_s = later * job.deadline_s
    extended, watch = extended_run(job, when * job.prediction.jct_s, deadline_s)
    seen = watch.seen
    assume(seen is not None)
    assert seen is not None
    as_it_was, _ = extended_run(job, None, deadline_s)
    for state, outlook in ((as_it_was, seen.before), (extended, seen.after)):
        assert state.phase is Phase.FINISHED
        assert outlook.feasible
        assert outlook.jct_s == pytest.approx(jct_s(state), abs=1e-3)
        assert outlook.cost_usd == pytest.approx(bill_usd(state, state.now), abs=0.005)
        assert outlook.plan.stages[seen.stage :] == state.plan.stages[seen.stage :]
    assert seen.added_usd <= 0.005
