"""What a run's own times say of its profile, and what is taken for chance."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rubberband.executor import InstanceStatus, Job, StageRecord, State, VirtualBackend, measured
from rubberband.executor.core.fleet import InstanceRecord
from rubberband.planner.goodput import planning
from rubberband.planner.queueing import scaled
from rubberband.values.adaptive import BatchLimits, BatchUse, GoodputProfile, Throughput
from rubberband.values.asynchronous import AsyncProfile, AsyncTimes, AsyncUse
from rubberband.values.offer import Spot
from rubberband.values.plan import PlanningConstraints, Stage
from rubberband.values.profile import Profile
from tests.builders.jobs import JOB
from tests.builders.measured_runs import OFFER, PROFILE, seen
from tests.builders.plans import plan
from tests.builders.virtual_runs import run_virtual


def table(*args: object, **kwargs: object) -> dict[int, float]:
    return dict(measured(seen(*args, **kwargs)).profile.seconds_per_iteration)  # type: ignore[arg-type]


def test_the_found_environment_is_adopted_where_all_trials_agree() -> None:
    found = measured(seen({1: [[13.0, 13.0]] * 4}))
    assert dict(found.profile.seconds_per_iteration) == pytest.approx({1: 13.0, 2: 7.8, 4: 5.2})
    assert found.findings == "30 % slower than profiled"
    faster = measured(seen({1: [[6.0, 6.0]] * 4}))
    assert faster.findings == "40 % faster than profiled"


def test_small_deviations_and_few_iterations_are_left_alone() -> None:
    for steps in ([[10.2, 10.2]] * 4, [[13.0, 13.0]], []):
        state = seen({1: steps})
        found = measured(state)
        assert found.profile is state.job.profile
        assert found.offer == state.job.offer
        assert found.findings == ""


def test_each_gang_size_has_its_own_factor_and_the_others_the_weighted_mean() -> None:
    found = table({1: [[13.0] * 3] * 2, 2: [[6.0] * 3] * 4})
    assert found == pytest.approx({1: 13.0, 2: 6.0, 4: 4.0 * (1.3 * 6 + 1.0 * 12) / 18})


def test_a_size_between_measured_ones_becomes_a_measured_one() -> None:
    expected_s = PROFILE.iteration_s(3)
    found = table({3: [[expected_s * 1.5] * 3] * 2})
    assert found == pytest.approx({1: 15.0, 2: 9.0, 3: expected_s * 1.5, 4: 6.0})


def test_a_few_broken_trials_and_a_nap_of_the_machine_do_not_count() -> None:
    assert table({1: [[10.0, 10.0]] * 5 + [[90.0, 90.0]]}) == dict(PROFILE.seconds_per_iteration)
    state = seen({1: [[10.0, 3600.0, 10.0]] * 4})
    state.woke_at.append(3700.0)
    assert measured(state).profile is state.job.profile


def test_differences_by_chance_are_shrunk_away() -> None:
    noisy = dataclasses.replace(PROFILE, trial_cv=0.3)
    assert table({1: [[12.0, 12.0]] * 2}, profile=noisy) == dict(PROFILE.seconds_per_iteration)
    many = table({1: [[12.0, 12.0]] * 60}, profile=noisy)
    assert 11.5 < many[1] < 12.0


def test_start_ups_are_corrected_too() -> None:
    found = measured(seen({1: [[10.0, 10.0]] * 4}, startup_s=12.0))
    assert found.profile.trial_startup_s == pytest.approx(12.0)
    assert found.findings == "a trial starts in 12s instead of 5s"
    assert dict(found.profile.seconds_per_iteration) == dict(PROFILE.seconds_per_iteration)


def test_the_latest_start_ups_count() -> None:
    state = seen({1: [[10.0, 10.0]] * 20}, startup_s=12.0)
    for use in state.allocations[12:]:
        use.started_at += 7.0
    assert measured(state).profile is state.job.profile


def adaptive(profile: Profile = PROFILE, noise_scale: float = 200.0) -> Profile:
    model = GoodputProfile(
        throughput=Throughput(alpha_grad_s=0.02, beta_grad_s=0.001, alpha_local_s=0.005, gamma=2.0),
        noise_scale=noise_scale,
        samples_per_iteration=6_400.0,
        limits=BatchLimits(initial=64, max=4096),
        overhead_s=0.5,
    )
    return dataclasses.replace(
        profile, goodput=model, seconds_per_iteration=planning.seconds_per_iteration(model, OFFER.gpus, [1, 2, 4])
    )


def at(noise_scale: float, profile: Profile) -> dict[int, float]:
    assert profile.goodput is not None
    later = dataclasses.replace(profile.goodput, noise_scale=noise_scale)
    return planning.seconds_per_iteration(later, OFFER.gpus, [1, 2, 4])


def batches(noise_scale: float | None) -> tuple[BatchUse, ...]:
    return (
        BatchUse(
            instances=1,
            gpus=1,
            batch_size=64,
            per_gpu=64,
            accumulation=0,
            steps=100,
            duration_s=1.0,
            step_s=0.01,
            noise_scale=noise_scale,
            efficiency=1.0,
        ),
    )


def seen_at(noise_scales: list[float], pace: float, profile: Profile, gpus: int = 1) -> State:
    """Trials that take `pace` times as long as their noise scales explain."""
    state = seen({gpus: [[pace * at(phi, profile)[gpus]] * 3 for phi in noise_scales]}, profile=profile)
    for phi, trial in zip(noise_scales, state.trials, strict=False):
        for report in trial.reports:
            report.batches = batches(phi)
    return state


def test_the_effect_of_the_noise_scale_is_not_taken_for_speed() -> None:
    profile = adaptive()
    found = measured(seen_at([900.0] * 4, 1.0, profile))
    assert found.findings == "the noise scale rose from 200 to 900: larger gangs pay off more"
    assert dict(found.profile.seconds_per_iteration) == pytest.approx(at(900.0, profile), rel=0.02)
    assert found.profile.goodput is not None
    assert found.profile.goodput.noise_scale == pytest.approx(900.0, rel=0.02)


def test_iterations_in_which_the_batch_was_still_being_found_are_not_taken_for_slowness() -> None:
    profile = adaptive()
    state = seen_at([200.0] * 4, 3.0, profile)
    for trial in state.trials:
        for report in trial.reports:
            (use,) = batches(200.0)
            report.batches = (use, dataclasses.replace(use, batch_size=4 * use.batch_size))
    assert measured(state).findings == ""
    for trial in state.trials:
        for report in trial.reports:
            report.batches = batches(None)
    assert measured(state).findings == ""


def test_speed_is_what_the_noise_scale_does_not_explain() -> None:
    profile = adaptive()
    found = measured(seen_at([50.0] * 6, 1.3, profile, gpus=2))
    assert found.findings == (
        "the noise scale fell from 200 to 50: larger gangs pay off less, 30 % slower than profiled"
    )
    expected = {gpus: 1.3 * time_s for gpus, time_s in at(50.0, profile).items()}
    assert dict(found.profile.seconds_per_iteration) == pytest.approx(expected, rel=0.02)


def test_the_noise_scale_of_the_trials_that_continue_counts() -> None:
    state = seen_at([200.0, 200.0, 2000.0, 2000.0], 1.0, adaptive())
    ranking = (3, 2, 1, 0)
    state.lanes[0].stages.append(StageRecord(stage=0, trials=(0, 1, 2, 3), started_at=0.0, ranking=ranking))
    assert len(state.job.promoted(state.lanes[0].stage)) == 2
    assert "rose from 200 to 2,000" in measured(state).findings


@pytest.mark.parametrize("phi", [None, 170.0, 230.0])
def test_a_noise_scale_that_is_not_known_or_as_profiled_changes_nothing(phi: float | None) -> None:
    profile = adaptive()
    state = seen({1: [[at(phi or 200.0, profile)[1]] * 3] * 4}, profile=profile)
    for trial in state.trials:
        for report in trial.reports:
            report.batches = batches(phi)
    found = measured(state)
    assert found.profile is state.job.profile
    assert found.findings == ""


@settings(deadline=None)
@given(
    phi=st.floats(1.0, 1e6),
    pace=st.one_of(st.floats(0.3, 0.9), st.floats(1.1, 4.0)),
    gpus=st.sampled_from([1, 2, 4]),
    profiled=st.floats(1.0, 1e5),
)
def test_noise_scale_and_speed_are_distinguished(phi: float, pace: float, gpus: int, profiled: float) -> None:
    profile = adaptive(noise_scale=profiled)
    found = measured(seen_at([phi] * 4, pace, profile, gpus))
    near = abs(phi / profiled - 1.0) < 0.21
    for size, time_s in at(profiled if near else phi, profile).items():
        assert found.profile.iteration_s(size) == pytest.approx(pace * time_s, rel=0.22 if near else 0.03)


def planned_job(stages: tuple[Stage, ...], profile: Profile, limits: PlanningConstraints) -> Job:
    """A job with its plan, which is planned again at every SYNC."""
    planned = plan(stages, profile, OFFER, limits)
    return dataclasses.replace(
        JOB,
        stages=stages,
        plan=planned.plan,
        prediction=planned.prediction,
        offer=OFFER,
        profile=profile,
        deadline_s=limits.deadline_s,
        replan=True,
        min_gpus_per_trial=limits.min_gpus_per_trial,
        max_gpus_per_trial=limits.max_gpus_per_trial,
    )


@pytest.mark.parametrize(
    ("phi", "pace", "expected"),
    [
        (2000.0, 1.0, "the noise scale rose from 200 to 2,000: larger gangs pay off more"),
        (2000.0, 1.5, "larger gangs pay off more, 50 % slower than profiled"),
        (200.0, 1.5, "50 % slower than profiled"),
    ],
)
def test_a_run_is_planned_again_with_the_noise_scale_it_has_come_to(phi: float, pace: float, expected: str) -> None:
    profile = adaptive()
    stages = (Stage(trials=8, iterations=4), Stage(trials=2, iterations=12))
    job = planned_job(stages, profile, PlanningConstraints(deadline_s=3600.0, max_gpus_per_trial=4))
    truth = dataclasses.replace(profile, seconds_per_iteration=at(phi, profile))
    backend = VirtualBackend(
        job.name, OFFER, truth, metric=job.metric, slowdown=pace, batches_of=lambda *_: batches(phi)
    )
    controller, _, finish = run_virtual(job, backend=backend)
    assert finish.outcome == "done"
    decision = controller.state.decisions[0]
    assert expected in decision.reason
    assert ("noise scale" in decision.reason) == (phi != 200.0)
    assert dict(decision.profile.seconds_per_iteration) == pytest.approx(
        {gpus: pace * time_s for gpus, time_s in at(phi, profile).items()}, rel=0.02
    )
    assert controller.state.now - controller.state.started_at == pytest.approx(decision.jct_s, rel=0.02)


WORKERS = AsyncProfile(
    times=AsyncTimes(compute_s=0.029, up_s=0.072, server_s=0.018, down_s=0.072),
    updates_per_iteration=50,
    overhead_s=0.5,
)


def asynchronous(blend: float | None) -> Profile:
    """A profile whose workers wait for each other less, the larger the blend."""
    model = dataclasses.replace(WORKERS, blend=blend)
    return scaled(dataclasses.replace(PROFILE, seconds_per_iteration={1: 10.05}, asynchronous=model), [1, 2, 4])


@pytest.mark.parametrize("blend", [0.0, 0.3, 1.0])
def test_the_first_gang_of_two_workers_calibrates_the_others(blend: float) -> None:
    truth, planned = asynchronous(blend), asynchronous(None)
    found = measured(seen({2: [[truth.iteration_s(2)] * 3] * 2}, profile=planned))
    assert dict(found.profile.seconds_per_iteration) == pytest.approx(dict(truth.seconds_per_iteration), rel=0.01)
    assert "2 workers make" in found.findings


def test_the_times_of_updates_show_where_larger_gangs_wait() -> None:
    times = dataclasses.replace(WORKERS.times, compute_s=0.02, server_s=0.09)
    model = dataclasses.replace(WORKERS, times=times, blend=0.4)
    truth = scaled(dataclasses.replace(PROFILE, seconds_per_iteration={1: 13.2}, asynchronous=model), [1, 2, 4])
    state = seen({2: [[truth.iteration_s(2)] * 3] * 2}, profile=asynchronous(None))
    for report in (report for trial in state.trials for report in trial.reports):
        # Two transfers at a time take longer than one.
        taken = {"compute_s": 0.02, "up_s": 0.08, "wait_s": 0.03, "server_s": 0.09, "down_s": 0.08}
        report.updates = AsyncUse(
            workers=2, servers=1, updates=50, duration_s=9.0, staleness=1.0, max_staleness=2, **taken
        )
    found = measured(state).profile
    assert dict(found.seconds_per_iteration) == pytest.approx(dict(truth.seconds_per_iteration), rel=0.01)


def test_workers_that_are_all_slower_wait_as_before() -> None:
    planned = asynchronous(0.3)
    slower = {gpus: [[1.5 * planned.iteration_s(gpus)] * 3] * 2 for gpus in (1, 2)}
    found = measured(seen(slower, profile=planned)).profile
    assert found.iteration_s(4) == pytest.approx(1.5 * planned.iteration_s(4), rel=0.02)


def test_a_run_is_planned_again_with_the_workers_it_has_seen() -> None:
    stages = (Stage(trials=8, iterations=4), Stage(trials=2, iterations=12))
    limits = PlanningConstraints(deadline_s=3600.0, min_gpus_per_trial=2, max_gpus_per_trial=4)
    job = planned_job(stages, asynchronous(None), limits)
    backend = VirtualBackend(job.name, OFFER, asynchronous(0.05), metric=job.metric)
    controller, _, finish = run_virtual(job, backend=backend)
    assert finish.outcome == "done"
    decision = controller.state.decisions[0]
    assert "updates/s instead of" in decision.reason
    assert controller.state.now - controller.state.started_at == pytest.approx(decision.jct_s, rel=0.02)


def test_delays_of_instances_are_corrected_too() -> None:
    state = seen({})
    spot = Spot(price_usd_per_hour=1.0, interruptions_per_hour=0.1, restart_s=100.0)
    state.job = dataclasses.replace(state.job, offer=dataclasses.replace(state.job.offer, spot=spot))
    for number in range(3):
        record = InstanceRecord(instance=f"i-{number}", requested_at=0.0, status=InstanceStatus.READY)
        record.running_at, record.ready_at = 90.0, 120.0
        state.instances[record.instance] = record
    early = InstanceRecord(instance="i-early", requested_at=0.0, status=InstanceStatus.READY)
    early.running_at, early.ready_at = 0.01, 0.02  # it started before it was asked for, which no later one does
    state.instances[early.instance] = early
    found = measured(state)
    assert found.offer.provision_delay_s == pytest.approx(90.0)
    assert found.offer.init_delay_s == 30.0
    assert found.offer.spot is not None
    assert found.offer.spot.restart_s == pytest.approx(130.0), "a restart waits for a new instance"
    assert found.findings == "an instance runs after 1m30s instead of 1m"


def own_paces(trial: int) -> float:
    return 0.7 + 0.05 * trial


def test_where_larger_models_win_the_rest_is_foretold_for_the_survivors() -> None:
    profile = dataclasses.replace(PROFILE, trial_cv=0.2)
    stages = (Stage(trials=16, iterations=2), Stage(trials=4, iterations=6))
    job = planned_job(stages, profile, PlanningConstraints(deadline_s=600.0, max_gpus_per_trial=4))
    backend = VirtualBackend(
        job.name, OFFER, profile, metric=job.metric, metric_of=lambda trial, _: own_paces(trial), pace_of=own_paces
    )
    controller, _, finish = run_virtual(job, backend=backend)
    state = controller.state
    assert finish.outcome == "done"
    (decision,) = state.decisions
    assert set(decision.own) == {12, 13, 14, 15}
    ended_at = state.stages[-1].ended_at
    assert ended_at is not None
    assert decision.jct_s == pytest.approx(ended_at - state.started_at, rel=1e-3)
    assert "the trials that go on are 28 % slower than average" in decision.reason
