"""The controller on a virtual clock: it does what was predicted, and it survives what goes wrong."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rubberband.executor import (
    Controller,
    Faults,
    Job,
    Journal,
    Phase,
    TrialStatus,
    VirtualBackend,
    bill_usd,
    paid_time,
    replay,
)
from tests.builders.budget import examples
from tests.builders.strategies import faults, jobs
from tests.builders.virtual_runs import jct_s, run_until_killed, run_virtual

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


@given(jobs(), faults(), st.integers(0, 60), st.sampled_from([1, 1, 2, 3]))
@settings(deadline=None, max_examples=examples(100))
def test_a_driver_killed_after_any_event_resumes_and_trains_no_acknowledged_iteration_again(
    job: Job, faults: Faults, events_before: int, checkpoint_every: int
) -> None:
    journal = Journal("sqlite://", job.name, create=True)
    backend = VirtualBackend(
        job.name, job.offer, job.profile, metric=job.metric, faults=faults, checkpoint_every=checkpoint_every
    )
    try:
        before = Controller(job)
        run_until_killed(before, backend, journal, events_before)
        after, _, _ = run_virtual(job, journal=journal, backend=backend)
        assert after.state.phase is Phase.FINISHED
        assert all(status.state == "terminated" for status in backend.provider.describe())
        for old, new in zip(before.state.trials, after.state.trials, strict=True):
            assert new.reports[: old.iterations] == old.reports
        again = Controller(job)
        replay(again, journal)
        assert again.state == after.state
    finally:
        journal.close()
