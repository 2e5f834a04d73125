"""GPUs that are idle within a stage: the report says how long and why, and they are given back or join a gang."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import rubberband
from rubberband.executor import (
    Controller,
    DriverRequest,
    Faults,
    GivenBack,
    InstanceInterrupted,
    InstanceLost,
    Job,
    Regrouped,
    Result,
    Slot,
    StartTrial,
    State,
    TrialEnd,
    TrialEnded,
    TrialStarted,
    VirtualBackend,
    bill_usd,
    drive,
    paid_time,
    summarise,
)
from rubberband.executor.core.forecast import end_chance, forecast
from rubberband.planner.exact.model import predict
from rubberband.values.offer import Offer, Spot
from rubberband.values.plan import Plan, Stage, StagePlan
from rubberband.values.profile import Profile, until_end
from rubberband.views.report.tables import paid_time as paid_table
from rubberband.views.story import story
from tests.builders.jobs import JOB
from tests.builders.memory import MemoryJournal
from tests.builders.populations import job_of, population, run
from tests.builders.results import configurations
from tests.builders.stories import begun, kinds
from tests.builders.timed_requests import TimedInbox
from tests.builders.virtual_runs import jct_s, run_virtual

PROFILE = Profile(seconds_per_iteration={1: 100.0, 2: 55.0, 4: 30.0}, trial_startup_s=10.0)
OFFER = Offer(
    instance_type="test",
    gpus=1,
    price_usd_per_hour=3.6,
    max_instances=8,
    provision_delay_s=20.0,
    init_delay_s=30.0,
    minimum_billed_s=60.0,
)


def a_job(stages: list[tuple[int, int]], plan: list[tuple[int, int]], offer: Offer = OFFER, **changes: object) -> Job:
    """A job of stages (trials, iterations) with (instances, GPUs per trial) in each."""
    of = tuple(Stage(trials=trials, iterations=iterations) for trials, iterations in stages)
    chosen = Plan(stages=tuple(StagePlan(instances=held, gpus_per_trial=gpus) for held, gpus in plan))
    job = dataclasses.replace(
        JOB, stages=of, plan=chosen, offer=offer, profile=PROFILE, prediction=predict(of, chosen, PROFILE, offer)
    )
    return dataclasses.replace(job, **changes)


def test_idle_time_is_divided_by_its_cause() -> None:
    job = a_job([(4, 1), (3, 1)], [(2, 1), (3, 1)])
    state = run_virtual(job)[0].state
    paid = paid_time(state, state.now)
    assert paid.idle_between_gpu_s == pytest.approx(2 * 50.0)  # two wait for the third: asked for, then warmed up
    assert paid.idle_gpu_s == paid.idle_between_gpu_s
    wave = a_job([(5, 1)], [(4, 1)])
    state = run_virtual(wave)[0].state
    paid = paid_time(state, state.now)
    assert paid.idle_in_stage_gpu_s == pytest.approx(3 * 110.0)  # three of four have no trial in the second wave
    assert paid.idle_gpu_s == paid.idle_in_stage_gpu_s


def test_an_early_end_leaves_idle_time_within_the_stage() -> None:
    job = a_job([(2, 3), (2, 1)], [(2, 1), (2, 1)])
    state = run_virtual(job, Faults(ends={0: TrialEnd(iterations=1)}))[0].state
    paid = paid_time(state, state.now)
    assert paid.idle_in_stage_gpu_s == pytest.approx(200.0)  # its instance is kept for the next stage


# What is done about it


def run_both(job: Job, faults: Faults | None = None) -> tuple[State, State]:
    """Run a job without and with the use of idle GPUs."""
    without, with_it = (
        run_virtual(dataclasses.replace(job, resize_in_stage=on), faults)[0].state for on in (False, True)
    )
    return without, with_it


def test_none_is_bought_within_a_stage_for_the_next_one() -> None:
    """After an end in each stage; the third has plans for the instance that the second did without."""
    job = a_job([(4, 2), (4, 3), (4, 2)], [(4, 1), (4, 1), (4, 1)], replan=False)
    state = run_virtual(job, Faults(ends={0: TrialEnd(iterations=1), 1: TrialEnd(iterations=3)}))[0].state
    assert (state.outcome, len(state.instances)) == ("done", 4)


def test_a_stage_with_fewer_trials_than_slots_waits_for_none_of_those_that_stay_empty() -> None:
    """Two of four trials have ended: a slot of three planned has no instance, and needs none."""
    offer = dataclasses.replace(OFFER, provision_delay_s=900.0)
    job = a_job([(4, 2), (3, 3)], [(4, 1), (3, 1)], offer, replan=False)
    seen = list[float]()

    def look(event: object, controller: Controller) -> None:
        if len(controller.state.stages) == 2 and controller.state.running():
            seen.append(forecast(controller.state, controller.state.now).jct_s)

    controller = run_virtual(job, Faults(ends={0: TrialEnd(iterations=1), 1: TrialEnd(iterations=1)}), observers=[look])
    assert seen == pytest.approx([jct_s(controller[0].state)] * len(seen))


def test_instances_without_a_trial_in_the_last_wave_are_given_back() -> None:
    without, with_it = run_both(a_job([(5, 4)], [(4, 1)]))
    assert (jct_s(without), jct_s(with_it)) == (870.0, 870.0)
    saved_usd = bill_usd(without, without.now) - bill_usd(with_it, with_it.now)
    assert saved_usd == pytest.approx(3 * 410.0 * 3.6 / 3600.0)
    back = with_it.history.of(GivenBack)
    assert sum(one.saved_usd for one in back) == pytest.approx(saved_usd)
    assert paid_time(with_it, with_it.now).idle_gpu_s == 0.0


def test_an_instance_stays_whose_minimum_is_paid_beyond_the_end_of_the_stage() -> None:
    offer = dataclasses.replace(OFFER, minimum_billed_s=3600.0)
    assert not run_both(a_job([(5, 4)], [(4, 1)], offer))[1].history.of(GivenBack)


def test_instances_of_the_next_stage_are_kept_unless_it_is_surely_cheaper_to_buy_again() -> None:
    ends = Faults(ends={0: TrialEnd(iterations=1)})
    _, kept = run_both(a_job([(4, 2), (3, 1)], [(4, 1), (3, 1)]), ends)
    assert len(kept.history.of(GivenBack)) == 1  # the fourth goes at once
    assert len(kept.instances) == 4  # the others are idle for 100 s, which is cheaper than their start of 50 s
    slow = a_job([(5, 40), (3, 1)], [(3, 1), (3, 1)])
    _, again = run_both(slow)
    assert [one.instances for one in again.history.of(GivenBack)] == [("i-003",)]
    deadline = dataclasses.replace(slow, deadline_s=slow.prediction.jct_s + 100.0)
    assert not run_both(deadline)[1].history.of(GivenBack)  # there is no room for three starts


def test_instances_that_may_not_be_had_again_are_kept() -> None:
    """Under an instance cap another experiment may take them; on spot there may be none."""
    slow = a_job([(5, 40), (3, 1)], [(3, 1), (3, 1)], resize_in_stage=True)
    backend = VirtualBackend(slow.name, slow.offer, slow.profile, metric=slow.metric)
    controller = Controller(slow)
    cap = DriverRequest(id="l-1", kind="limit", asked_at=100.0, max_instances=3)
    drive(controller, backend, MemoryJournal(), requests=TimedInbox(backend.now, cap))
    assert controller.state.instance_cap == 3
    assert not controller.state.history.of(GivenBack)
    offer = dataclasses.replace(OFFER, spot=Spot(price_usd_per_hour=3.6, interruptions_per_hour=0.0))
    spot = Plan(stages=tuple(dataclasses.replace(one, market="spot") for one in slow.plan.stages))
    assert not run_virtual(dataclasses.replace(slow, offer=offer, plan=spot))[0].state.history.of(GivenBack)


WIDE = dataclasses.replace(OFFER, gpus=4, max_instances=2)


def test_the_last_trial_takes_the_free_gpus_of_its_instance_at_its_next_checkpoint() -> None:
    without, with_it = run_both(a_job([(5, 4)], [(1, 1)], WIDE, max_gpus_per_trial=4, replan=True))
    (wider,) = with_it.history.of(Regrouped)
    assert (wider.trial, wider.iterations, wider.gpus_before, wider.gpus) == (4, 1, 1, 4)
    assert jct_s(with_it) == pytest.approx(jct_s(without) - wider.saved_s)
    assert wider.saved_s == pytest.approx(3 * 100.0 - 10.0 - 3 * 30.0)
    assert bill_usd(with_it, with_it.now) == pytest.approx(bill_usd(without, without.now) + wider.extra_usd)
    assert [use.gang for use in with_it.allocations if use.trial == 4][-1] == tuple(
        Slot(instance="i-001", gpu=gpu) for gpu in range(4)
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"keeps_width": True},
        {"profile": dataclasses.replace(PROFILE, resumes=False)},
        {"gpus_per_trial_sizes": (1,)},
        {"max_gpus_per_trial": 1},
        {"offer": dataclasses.replace(WIDE, billing="per_function")},
        {"offer": dataclasses.replace(WIDE, trials_per_gpu=2)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_gang_stays_as_it_is_where_it_must(changes: dict[str, object]) -> None:
    job = a_job([(5, 4)], [(1, 1)], WIDE, max_gpus_per_trial=4, replan=True)
    assert not run_both(dataclasses.replace(job, **changes))[1].history.of(Regrouped)


def test_gpus_that_others_are_about_to_leave_are_waited_for_where_time_decides() -> None:
    job = a_job([(5, 4)], [(4, 1)], objective="min_time", max_gpus_per_trial=4, replan=True)
    without, with_it = run_both(job)
    (wider,) = with_it.history.of(Regrouped)
    assert (wider.gpus, jct_s(with_it)) == (4, jct_s(without) - 200.0)
    capped = dataclasses.replace(job, max_cost_usd=bill_usd(with_it, with_it.now) - 0.05)
    assert bill_usd(run_both(capped)[1], 1e9) <= capped.max_cost_usd  # type: ignore[operator]


@pytest.mark.parametrize("max_cost_usd", [2.35, 2.45, 2.6, 2.7])
def test_no_wider_gang_takes_the_money_that_is_reserved_to_stop_with(max_cost_usd: float) -> None:
    job = a_job([(5, 4)], [(4, 1)], objective="min_time", max_gpus_per_trial=4, replan=True, resize_in_stage=True)
    capped = dataclasses.replace(job, release_margin_s=30.0, max_cost_usd=max_cost_usd)
    assert run_virtual(capped)[0].state.outcome == "done"


class SlowTrial(Faults):
    """The last trial takes twice as long as the others."""

    def iteration(self, trial: int, iterations: int) -> float:
        return 2.0 if trial == 4 else 1.0


def test_a_slow_trial_is_slow_in_a_wider_gang_too() -> None:
    profile = dataclasses.replace(PROFILE, trial_cv=0.5)
    job = a_job([(5, 4)], [(1, 1)], WIDE, max_gpus_per_trial=4, replan=True, profile=profile)
    without, with_it = run_both(job, SlowTrial())
    (wider,) = with_it.history.of(Regrouped)
    assert wider.left_s == pytest.approx(2.0 * 3 * 100.0)
    assert wider.saved_s == pytest.approx(2.0 * 3 * (100.0 - 30.0) - 10.0)
    assert jct_s(with_it) == pytest.approx(jct_s(without) - wider.saved_s)


def test_a_population_keeps_the_instances_of_trials_that_will_be_replaced() -> None:
    resources = {"instance_type": "p3.2xlarge", "max_instances": 8, "gpus_per_trial": {"min": 1, "max": 1}}
    experiment = population({**resources, "init_delay": "60s"})
    job = job_of(experiment)
    plan = Plan(stages=(StagePlan(instances=8, gpus_per_trial=1),) * len(job.stages))
    prediction = predict(job.stages, plan, job.profile, job.offer)
    job = dataclasses.replace(job, plan=plan, prediction=prediction, replan=False, resize_in_stage=True)
    state = run(experiment, Faults(ends={0: TrialEnd(iterations=1)}), job=job)[0].state
    assert len(state.instances) == 8, "none is bought again"
    assert jct_s(state) <= prediction.jct_s


def test_a_trial_moves_so_that_its_instance_can_be_given_back() -> None:
    ends = Faults(ends={trial: TrialEnd(iterations=2 + trial // 2) for trial in (0, 1, 2, 4, 5, 6)})
    job = a_job([(8, 10), (2, 4)], [(2, 1), (1, 1)], WIDE, max_gpus_per_trial=1)
    without, with_it = run_both(job, ends)
    (moved,) = with_it.history.of(Regrouped)
    assert (moved.gpus_before, moved.gpus, moved.saved_s) == (1, 1, pytest.approx(-10.0))
    assert jct_s(with_it) == jct_s(without) + 10.0  # its start
    assert bill_usd(with_it, with_it.now) < 0.85 * bill_usd(without, without.now)
    late = dataclasses.replace(job, deadline_s=jct_s(without) + 5.0)
    assert not run_both(late, ends)[1].history.of(Regrouped)


def test_the_stated_chance_of_an_end_and_what_is_seen_are_one_estimate() -> None:
    assert until_end(4, 0.0) == 4
    assert until_end(3, 0.5) == pytest.approx(1.0 + 0.5 + 0.25)
    assert until_end(10**6, 1e-12) == pytest.approx(10**6)
    job = a_job([(4, 4)], [(4, 1)])
    state = run_virtual(job, Faults(ends={0: TrialEnd(iterations=2), 1: TrialEnd(iterations=2)}))[0].state
    assert end_chance(state) == 2 / (12 + 4)
    state.profile = dataclasses.replace(PROFILE, end_chance=0.1)
    assert end_chance(state) == pytest.approx((2 + 10) / (12 + 100))


def test_the_report_names_what_was_done() -> None:
    _, with_it = run_both(a_job([(5, 4)], [(1, 1)], WIDE, max_gpus_per_trial=4, replan=True))
    result = summarise(with_it, configurations(with_it.job), with_it.now)
    assert "1 wider gang formed" in paid_table(result).notes[-1]
    assert Result.from_json(result.to_json()) == result
    (line,) = [line.text for line in story(result) if line.kind == "idle"]
    assert line == (
        "trial 4 takes a gang of 4 instead of 1 after iteration 1; the stage is expected to end 3m20s sooner, and that "
        "to save 0.2000 USD"
    )


def test_no_gang_is_widened_by_the_gpus_that_a_trial_waits_to_train_on() -> None:
    """A gang of two instances has lost one: the other is idle until that is replaced."""
    job = a_job([(2, 9)], [(4, 2)], objective="min_time", max_gpus_per_trial=4, replan=True, resize_in_stage=True)
    profile = dataclasses.replace(PROFILE, seconds_per_iteration={1: 300.0, 2: 100.0, 3: 30.0, 4: 30.0})
    story = begun(dataclasses.replace(job, profile=profile))
    story.ready("i-003", "i-004")
    struck = story.state.trials[1].gang[-1].instance
    assert "LaunchInstance" in kinds(story.tell(InstanceLost, instance=struck, ended_at=story.at, reason="died"))
    assert story.report(0, 0.5) == []
    assert len(story.state.running()) == 1
    assert not story.state.history.of(Regrouped)


def test_an_idle_instance_stays_for_a_trial_whose_instance_is_taken_away() -> None:
    offer = dataclasses.replace(OFFER, spot=Spot(price_usd_per_hour=1.0, interruptions_per_hour=0.0))
    job = a_job([(2, 9)], [(2, 1)], offer, resize_in_stage=True)
    spot = Plan(stages=(dataclasses.replace(job.plan.stages[0], market="spot"),))
    story = begun(dataclasses.replace(job, plan=spot))
    for trial in (0, 1):
        story.tell(TrialStarted, trial=trial, attempt=1)
        story.report(trial, 0.5)
    left, stays = (story.state.trials[trial].gang[0].instance for trial in (1, 0))
    story.tell(InstanceInterrupted, instance=left)
    assert "ReleaseInstance" not in kinds(story.tell(TrialEnded, trial=0, attempt=1))
    moved = [order for order in story.report(1, 0.6) if isinstance(order, StartTrial)]
    assert [slot.instance for order in moved for slot in order.gang] == [stays]


def test_an_estimate_says_which_part_of_the_iterations_is_expected_where_trials_end_by_chance() -> None:
    words: dict[str, Any] = {
        "name": "ends",
        "search": {
            "space": {"lr": {"type": "uniform", "lower": 0.0, "upper": 1.0}},
            "scheduler": {"type": "sha", "num_samples": 16, "max_t": 15, "reduction_factor": 2},
            "metric": "loss",
            "mode": "min",
        },
        "constraints": {"deadline": "2h"},
        "resources": {"provider": "virtual", "gpus_per_instance": 1, "price_per_hour": 3, "max_instances": 4},
    }
    without = rubberband.estimate(**words, profile={"seconds_per_iteration": {1: 10}})
    found = rubberband.estimate(**words, profile={"seconds_per_iteration": {1: 10}, "end_chance": 0.1})
    assert found.prediction == without.prediction  # the limits are kept without any end
    expected = sum(trials * (until_end(after, 0.1) - until_end(before, 0.1)) for trials, before, after in _HALVING)
    assert [note for note in found.notes if note not in without.notes] == [
        "ends: after each iteration a trial ends by itself with 0.1 (profile.end_chance), so about "
        f"{expected / 64:.0%} of the iterations are expected to be trained. Time and cost are upper bounds."
    ]


_HALVING = [(16, 0, 1), (8, 1, 3), (4, 3, 7), (2, 7, 15)]
