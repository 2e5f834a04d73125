"""Slow and silent instances are replaced where that pays, within the limits, and not twice on the same evidence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from rubberband.executor import Controller, FailureKind, Faults, Job, Replacement, State, TrialStatus, bill_usd
from rubberband.executor.core import stragglers
from rubberband.executor.core.history import HungInstance
from rubberband.planner.exact.model import predict
from rubberband.values.offer import Offer
from rubberband.values.plan import Plan, Stage, StagePlan, repeating
from rubberband.values.profile import Profile
from tests.builders.memory import MemoryJournal
from tests.builders.virtual_runs import jct_s, run_virtual

OFFER = Offer(
    instance_type="test",
    gpus=1,
    price_usd_per_hour=3.6,
    max_instances=5,
    provision_delay_s=30.0,
    init_delay_s=20.0,
    minimum_billed_s=60.0,
)
DEAR = replace(OFFER, data_usd_per_instance=0.3)
"""Each instance downloads data first."""
PROFILE = Profile(seconds_per_iteration={1: 40.0, 2: 20.0, 4: 10.0}, trial_startup_s=5.0)
SLOW = Faults(slow={"i-003": 20.0})
"""One of the four instances of the only trial's gang is twenty times slower."""


def a_job(*, iterations: int = 60, gpus: int = 4, instances: int = 4, offer: Offer = OFFER, **changes: Any) -> Job:
    stages = (Stage(trials=1, iterations=iterations),)
    plan = Plan(stages=(StagePlan(instances=instances, gpus_per_trial=gpus),))
    job = Job(
        name="test",
        stages=stages,
        plan=plan,
        prediction=predict(stages, plan, PROFILE, offer),
        offer=offer,
        profile=PROFILE,
        metric="score",
        mode="max",
        replan=False,
    )
    return replace(job, **changes)


def run(job: Job, faults: Faults = SLOW) -> State:
    """The state after a run, each invariant checked after every event; the journal gives the same one again."""
    journal = MemoryJournal()
    controller, _, finish = run_virtual(job, faults, journal)
    assert finish.outcome == "done"
    again = Controller(job)
    for _, event in journal.events():
        again.handle(event)
    assert again.state == controller.state
    return controller.state


def without(job: Job, monkeypatch: pytest.MonkeyPatch, faults: Faults = SLOW) -> State:
    with monkeypatch.context() as patch:
        patch.setattr(stragglers, "MOST_REPLACEMENTS", 0)
        return run(job, faults)


def test_a_slow_instance_is_replaced_and_used_until_the_other_one_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    state, before = run(a_job()), without(a_job(), monkeypatch)
    (found,) = state.history.of(Replacement)
    assert (found.instance, found.trial, found.ranks, found.first) == ("i-003", 0, (2,), True)
    assert jct_s(before) - jct_s(state) == pytest.approx(found.saved_s, rel=0.02)
    cost = bill_usd(state, state.now) - bill_usd(before, before.now)
    assert cost == pytest.approx(found.extra_usd, rel=0.02)
    assert {slot.instance for slot in state.trials[0].gang} == {"i-001", "i-002", "i-004", "i-005"}
    assert state.trials[0].failures == 0


def test_without_room_for_both_the_trial_waits_for_the_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    job = a_job(offer=replace(OFFER, max_instances=4))
    state, before = run(job), without(job, monkeypatch)
    (found,) = state.history.of(Replacement)
    assert not found.first
    assert jct_s(before) - jct_s(state) == pytest.approx(found.saved_s, rel=0.02)
    cost = bill_usd(state, state.now) - bill_usd(before, before.now)
    assert cost == pytest.approx(found.extra_usd, rel=0.02)


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(a_job(iterations=6), id="the stage is almost over"),
        pytest.param(a_job(offer=DEAR, iterations=16), id="its data cost more than it saves"),
        pytest.param(a_job(offer=DEAR, iterations=16, deadline_s=10_000.0), id="the deadline is far"),
        pytest.param(
            a_job(offer=DEAR, iterations=16, max_cost_usd=2.2, objective="min_time"), id="max_cost leaves no room"
        ),
        pytest.param(a_job(offer=replace(OFFER, billing="per_function")), id="functions are not held"),
    ],
)
def test_an_instance_is_not_replaced_where_that_does_not_pay(job: Job) -> None:
    assert not run(job).history.of(Replacement)


def test_time_is_worth_money_where_the_deadline_would_be_missed_or_the_shortest_time_is_asked_for() -> None:
    job = a_job(offer=DEAR, iterations=16)
    assert run(replace(job, objective="min_time")).history.of(Replacement)
    assert run(replace(job, deadline_s=job.prediction.jct_s * 1.15)).history.of(Replacement)


def test_a_slow_gpu_that_is_no_straggler_stays() -> None:
    assert not run(a_job(), Faults(slow={"i-003": 3.0})).history.of(Replacement)


def test_repeats_of_a_trial_without_checkpoints_count_against_a_replacement() -> None:
    late, unsaved = Faults(slow={"i-003": 8.0}, slow_from=500.0), a_job(profile=replace(PROFILE, resumes=False))
    assert run(a_job(), late).history.of(Replacement)
    assert not run(replace(unsaved, stages=repeating(unsaved.stages)), late).history.of(Replacement)


def test_an_instance_that_slows_down_in_mid_run_is_replaced() -> None:
    state = run(a_job(), replace(SLOW, slow_from=300.0))
    (found,) = state.history.of(Replacement)
    assert state.started_at + found.at_s > 300.0


@dataclass(frozen=True)
class _SlowWorker(Faults):
    """A worker that is slow wherever it trains: every instance but the first three is, as is the third."""

    slow: Mapping[str, float] = field(default_factory=lambda: {"i-004": 20.0, "i-005": 20.0, "i-006": 20.0})


def test_a_worker_that_is_slow_on_another_instance_too_is_not_moved_again() -> None:
    state = run(a_job(iterations=200), _SlowWorker())
    (found,) = state.history.of(Replacement)
    assert found.instance == "i-004"
    assert state.fleet.slow_anywhere == {3}


def test_new_evidence_leads_to_another_replacement_up_to_a_limit() -> None:
    slow = {f"i-{number:03d}": 20.0 for number in (1, 5, 6, 7)}
    state = run(a_job(iterations=300, instances=4), Faults(slow=slow))
    ranks = [found.ranks for found in state.history.of(Replacement)]
    assert ranks == [(0,), (3,)]
    assert len(state.history.of(Replacement)) <= stragglers.MOST_REPLACEMENTS


def test_trials_on_the_other_gpus_of_a_slow_instance_move_too() -> None:
    offer = replace(OFFER, gpus=2)
    stages = (Stage(trials=3, iterations=60),)
    plan = Plan(stages=(StagePlan(instances=3, gpus_per_trial=2),))
    job = replace(a_job(offer=offer), stages=stages, plan=plan, prediction=predict(stages, plan, PROFILE, offer))
    state = run(job, Faults(slow={"i-002": 20.0}))
    assert not state.history.of(Replacement)  # all workers of that gang are as slow, and none holds up the others
    assert state.outcome == "done"


def test_a_failed_launch_leaves_the_trial_where_it_is() -> None:
    state = run(a_job(), replace(SLOW, refused=[f"i-{number:03d}" for number in range(5, 500)]))
    assert len(state.history.of(Replacement)) == 1
    assert "i-003" in {slot.instance for slot in state.trials[0].gang}


def of_two(trials: int = 2, iterations: int = 8, **changes: Any) -> Job:
    """Trials on one GPU each, on two instances."""
    gpus = changes.pop("gpus_per_instance", 1)
    offer = replace(OFFER, gpus=gpus)
    stages = (Stage(trials=trials, iterations=iterations),)
    plan = Plan(stages=(StagePlan(instances=2, gpus_per_trial=1),))
    job = replace(a_job(offer=offer), stages=stages, plan=plan, prediction=predict(stages, plan, PROFILE, offer))
    return replace(job, **{"hung_replacements": 3, **changes})


def failures(state: State) -> list[int]:
    return [trial.failures for trial in state.trials]


@pytest.mark.parametrize("room", [True, False])
def test_an_instance_on_which_a_trial_hangs_is_replaced(room: bool) -> None:
    job = of_two(iterations=20)
    job = job if room else replace(job, offer=replace(job.offer, max_instances=2))
    state = run(job, Faults(slow={"i-002": 40.0}, slow_from=200.0))
    (found,) = state.history.of(HungInstance)
    assert (found.instance, found.trial, found.first) == ("i-002", 1, room)
    assert failures(state) == [0, 1]
    assert [trial.status for trial in state.trials] == [TrialStatus.COMPLETED] * 2
    assert state.trials[1].gang[0].instance == "i-003"


def test_a_journal_of_an_older_version_replaces_none() -> None:
    state = run(of_two(hung_replacements=0), Faults(slow={"i-002": 40.0}, slow_from=200.0))
    assert (state.history.of(HungInstance), failures(state)) == ([], [0, 2])


def test_a_trial_that_hangs_on_another_instance_too_hangs_by_its_own_doing() -> None:
    again_and_again: dict[tuple[int, int], FailureKind] = {
        (trial, attempt): "hung" for trial in (1, 3) for attempt in (1, 2, 3)
    }
    state = run(of_two(trials=4), Faults(failures=again_and_again))
    assert [one.trial for one in state.history.of(HungInstance)] == [1]
    assert failures(state) == [0, 2, 0, 2]


def test_an_instance_from_which_another_trial_reports_stays() -> None:
    state = run(of_two(trials=4, gpus_per_instance=2), Faults(failures={(1, 1): "hung"}))
    assert (state.history.of(HungInstance), failures(state)) == ([], [0, 1, 0, 0])
