"""Profiling, on the virtual backend (exact numbers) and on a real one (a torch trial, one and two workers)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rubberband.cloud.local.provider import LocalProvider
from rubberband.cloud.virtual import InstanceFaults
from rubberband.errors import ProviderError, RubberbandError
from rubberband.executor import (
    WITHOUT_CHECKPOINT,
    Event,
    Faults,
    RayBackend,
    TrialEnd,
    TrialReported,
    TrialStarted,
    VirtualBackend,
    open_store,
)
from rubberband.executor.profiling.points import Point
from rubberband.executor.profiling.session import ProfilingLimits
from rubberband.executor.profiling.summary import gpu_counts, measure
from rubberband.planner.goodput import step_s
from rubberband.values.adaptive import BatchLimits, GoodputProfile, Throughput
from rubberband.values.offer import Offer
from rubberband.values.profile import FIXED, Profile
from tests.builders import trials
from tests.builders.adaptive_backend import AdaptiveBackend
from tests.builders.conversation import nothing_left
from tests.builders.sessions import run_spec

PROFILE = Profile(seconds_per_iteration={1: 4.0, 2: 2.5, 4: 1.5}, trial_startup_s=3.0)
OFFER = Offer(
    instance_type="virtual", gpus=2, price_usd_per_hour=1.0, max_instances=2, provision_delay_s=5.0, init_delay_s=7.0
)


def virtual(faults: Faults | None = None) -> VirtualBackend:
    """A virtual backend with known times."""
    return VirtualBackend("profiling", OFFER, PROFILE, metric="loss", faults=faults)


def test_listed_numbers_of_gpus_are_measured_and_no_others() -> None:
    assert gpu_counts(4, 2, 1, 16, [1, 3, 8, 16]) == [1, 3, 8]


@pytest.mark.parametrize(
    ("gpus_per_instance", "instances", "minimum", "maximum", "expected"),
    [
        (4, 4, 1, 16, [1, 2, 4, 8, 16]),
        (4, 3, 1, 12, [1, 2, 4, 8, 12]),
        (8, 1, 1, 6, [1, 2, 4, 6]),
        (2, 1, 1, 8, [1, 2]),
        (4, 1, 5, 8, []),
    ],
)
def test_gpu_counts_double_up_to_what_fits(
    gpus_per_instance: int, instances: int, minimum: int, maximum: int, expected: list[int]
) -> None:
    assert gpu_counts(gpus_per_instance, instances, minimum, maximum) == expected


@pytest.mark.parametrize(
    ("job_iterations", "gpus", "timed"),
    [
        (None, [1, 2, 4], 3),
        (1000.0, [1, 2, 4], 3),
        (50.0, [1, 4], 3),  # a tenth is 20 s: 1 GPU takes 22 s, 4 take 12 s
        (10.0, [1, 4], 2),
        (1.0, [1, 4], 2),  # some seconds are measured whatever they are of the job
    ],
)
def test_a_short_job_is_measured_for_a_tenth_of_its_time(
    job_iterations: float | None, gpus: list[int], timed: int
) -> None:
    measured = measure(
        virtual(),
        slots_per_instance=2,
        instances=2,
        max_gpus_per_trial=4,
        limits=ProfilingLimits(job_iterations=job_iterations),
    )
    assert [point.gpus for point in measured.points] == gpus
    assert len(measured.points[0].timed[0].iterations_s) == timed
    expected = {number: PROFILE.seconds_per_iteration[number] for number in gpus}
    assert dict(measured.profile.seconds_per_iteration) == pytest.approx(expected)
    assert any("speeds with 2 GPUs are interpolated" in line for line in measured.remarks) == (2 not in gpus)


@pytest.mark.parametrize("least", [1, 2])
def test_a_trial_whose_start_passes_within_an_iteration_is_timed_for_one_more(least: int) -> None:
    slow = replace(PROFILE, seconds_per_iteration={1: 300.0})
    backend = VirtualBackend("profiling", OFFER, slow, metric="loss")
    limits = ProfilingLimits(job_iterations=2.0, least_iterations=least)
    measured = measure(backend, slots_per_instance=2, instances=1, limits=limits)
    assert len(measured.points[0].timed[0].iterations_s) == least


def test_a_virtual_backend_is_measured_exactly_with_every_slot_busy() -> None:
    points: list[Point] = []
    backend = virtual()
    measured = measure(backend, slots_per_instance=2, instances=2, max_gpus_per_trial=4, on_point=points.append)
    profile = measured.profile
    assert profile.seconds_per_iteration == pytest.approx(PROFILE.seconds_per_iteration)
    assert profile.trial_startup_s == pytest.approx(3.0)
    assert profile.provision_delay_s == pytest.approx(5.0)
    assert profile.init_delay_s == pytest.approx(7.0)
    assert (profile.iteration_cv, profile.startup_cv) == (0.0, 0.0)
    assert [(point.gpus, point.copies) for point in measured.points] == [(1, 4), (2, 2), (4, 1)]
    assert list(measured.points) == points
    assert measured.held_s == pytest.approx((7.0 + 3 * 2 * 3.0 + 4 * (4.0 + 2.5 + 1.5),) * 2)
    assert all(status.state == "terminated" for status in backend.provider.describe())


@pytest.mark.parametrize("returns", [False, True])
@pytest.mark.parametrize(("iterations", "timed"), [(1, 1), (2, 1), (3, 2), (9, 3)])
def test_a_trial_that_ends_by_itself_is_timed_by_what_it_did(iterations: int, timed: int, returns: bool) -> None:
    ends = dict.fromkeys(range(2), TrialEnd(iterations=iterations, returns=returns))
    measured = measure(virtual(Faults(ends=ends)), slots_per_instance=2, max_gpus_per_trial=2, least_trials=1)
    assert [len(one.iterations_s) for point in measured.points for one in point.timed] == [timed] * 3
    assert measured.profile.seconds_per_iteration == pytest.approx({1: 4.0, 2: 2.5}, rel=0.01)
    assert any("ended by themselves in the warm-up" in line for line in measured.remarks) == (iterations == 1)


def test_instances_that_start_in_turn_predict_the_last_ones_time_and_the_cost() -> None:
    slow = InstanceFaults(provision_s=11.0, init_s=9.0)
    backend = virtual(Faults(instance_faults={"profile-1": slow}))
    profile = measure(backend, slots_per_instance=2, instances=2, one_machine=True).profile
    assert profile.init_spread == FIXED
    assert profile.provision_delay_s is not None
    assert profile.init_delay_s is not None
    assert profile.provision_delay_s + profile.init_delay_s == pytest.approx(20.0)
    assert 2 * profile.init_delay_s == pytest.approx((20.0 - 5.0) + (20.0 - 11.0))


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        (Faults(refused=("profile-0",)), "refused"),
        (Faults(failures={(0, 1): "raised", (1, 1): "not_a_number"}), "every trial that was measured failed"),
        (Faults(failures={(1, 1): "no_metric"}), "fault"),
        (Faults(failures={(0, 1): "hung", (1, 1): "hung"}), "an iteration took more than 60 s.*iteration_timeout"),
        (Faults(lost_after_s={"profile-0": 8.0}), "lost instance"),
    ],
)
def test_problems_are_reported_and_everything_is_released(faults: Faults, message: str) -> None:
    backend = virtual(faults)
    with pytest.raises(RubberbandError, match=message):
        measure(backend, slots_per_instance=2, limits=ProfilingLimits(first_s=60.0))
    assert all(status.state == "terminated" for status in backend.provider.describe())


@pytest.mark.parametrize(
    ("limits", "attempt", "silence_s"),
    [
        (ProfilingLimits(), 1, 60.0),
        (ProfilingLimits(first_s=20.0), 2, 60.0),
        (ProfilingLimits(shortest_s=30.0), 2, 40.0),
        (ProfilingLimits(iteration_s=15.0), 2, 15.0),
    ],
)
def test_a_trial_that_hangs_is_given_up_and_the_others_are_measured(
    limits: ProfilingLimits, attempt: int, silence_s: float
) -> None:
    backend = virtual(Faults(failures={(0, attempt): "hung"}))
    measured = measure(backend, slots_per_instance=2, limits=limits)
    assert [(point.gpus, point.copies) for point in measured.points] == [(1, 1)]
    assert measured.profile.seconds_per_iteration == pytest.approx({1: 4.0})
    warm_s, timed_s = 3.0 + 4.0, 3.0 + 3 * 4.0
    undisturbed_s = timed_s if attempt == 1 else warm_s
    assert measured.held_s == pytest.approx((7.0 + undisturbed_s + 3.0 + silence_s,))


def test_start_up_has_a_limit_of_its_own() -> None:
    slow = Profile(seconds_per_iteration={1: 1.0}, trial_startup_s=250.0)
    backend = VirtualBackend("profiling", OFFER, slow, metric="loss")
    measured = measure(backend, slots_per_instance=2, limits=ProfilingLimits(iteration_s=2.0))
    assert measured.profile.trial_startup_s == pytest.approx(250.0)
    with pytest.raises(RubberbandError, match="start-up took more than 200 s"):
        measure(
            VirtualBackend("profiling", OFFER, slow, metric="loss"),
            slots_per_instance=2,
            limits=ProfilingLimits(first_s=200.0),
        )


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        (ProfilingLimits(held_s=50.0, held_by="max_cost=1.00 USD"), "max_cost=1.00 USD is reached"),
        (ProfilingLimits(time_s=52.0, time_by="deadline=1m"), "deadline=1m is reached"),
    ],
)
def test_a_limit_ends_the_measurement_with_the_points_there_are(limits: ProfilingLimits, named: str) -> None:
    backend = virtual()
    measured = measure(backend, slots_per_instance=2, instances=2, max_gpus_per_trial=4, limits=limits)
    assert [point.gpus for point in measured.points] == [1, 2]
    assert named in measured.stopped_by
    assert backend.now() <= 55.0
    assert max(measured.held_s) <= 50.0
    assert all(status.state == "terminated" for status in backend.provider.describe())


@pytest.mark.parametrize(
    "limits", [ProfilingLimits(held_s=20.0), ProfilingLimits(time_s=20.0), ProfilingLimits(time_s=2.0)]
)
def test_a_limit_before_the_first_point_is_reported_and_everything_released(limits: ProfilingLimits) -> None:
    backend = virtual()
    with pytest.raises(RubberbandError, match=r"before its first point: .* is reached; raise it"):
        measure(backend, slots_per_instance=2, limits=limits)
    assert backend.now() <= 25.0
    assert all(status.state == "terminated" for status in backend.provider.describe())


def test_a_gang_that_hangs_leaves_the_narrower_ones_measured() -> None:
    measured = measure(virtual(Faults(failures={(0, 3): "hung"})), slots_per_instance=2, max_gpus_per_trial=2)
    assert [point.gpus for point in measured.points] == [1]
    assert "hung" in measured.stopped_by


class Sleepy(VirtualBackend):
    """A machine that sleeps for an hour while the first iteration is under way."""

    slept = False

    def next_events(self, wake_at: float | None) -> Sequence[Event]:
        events = super().next_events(wake_at)
        if not self.slept and any(isinstance(event, TrialStarted) for event in events):
            self.slept = True
            self.sleep(3600.0)
        return events


def test_a_machine_that_slept_takes_no_trial_to_hang() -> None:
    measured = measure(Sleepy("profiling", OFFER, PROFILE, metric="loss"), slots_per_instance=2)
    assert [(point.gpus, point.copies) for point in measured.points] == [(1, 2)]


class Importing(VirtualBackend):
    """Programs that save no checkpoint: the first iteration of each start, an old one or not, imports for 5 s more."""

    def next_events(self, wake_at: float | None) -> Sequence[Event]:
        return [
            replace(event, occurred_at=event.occurred_at - 5.0) if isinstance(event, TrialStarted) else event
            for event in super().next_events(wake_at)
        ]


def test_repeated_training_without_a_checkpoint_is_no_start_up_but_its_imports_are() -> None:
    unsaved = replace(PROFILE, resumes=False, trial_startup_s=PROFILE.trial_startup_s + 5.0)
    measured = measure(Importing("profiling", OFFER, unsaved, metric="loss"), slots_per_instance=2)
    assert measured.profile.trial_startup_s == pytest.approx(unsaved.trial_startup_s)
    assert measured.profile.first_iteration_extra_s == pytest.approx(5.0)
    assert measured.profile.seconds_per_iteration[1] == pytest.approx(PROFILE.seconds_per_iteration[1])
    assert measured.remarks == (f"a trial {WITHOUT_CHECKPOINT}; plans count that",)
    assert not measured.profile.resumes
    assert measure(virtual(), slots_per_instance=2).remarks == ()
    assert measure(virtual(), slots_per_instance=2).profile.resumes


class Forgetful(VirtualBackend):
    """Programs that save files, and never load them."""

    def next_events(self, wake_at: float | None) -> Sequence[Event]:
        return [
            replace(event, saved_iterations=None) if isinstance(event, TrialReported) else event
            for event in super().next_events(wake_at)
        ]


def test_a_program_that_saves_and_does_not_load_starts_again() -> None:
    forgetful = Forgetful("profiling", OFFER, replace(PROFILE, resumes=False), metric="loss")
    measured = measure(forgetful, slots_per_instance=2)
    assert not measured.profile.resumes
    assert measured.remarks == (
        "a trial starts from zero though it has saved files, as it does not load them; plans count that",
    )


def test_copies_are_no_more_than_the_trials_there_are() -> None:
    measured = measure(virtual(), slots_per_instance=2, instances=2, max_gpus_per_trial=2, num_trials=3)
    assert [(point.gpus, point.copies) for point in measured.points] == [(1, 3), (2, 2)]


def test_a_few_bad_trials_do_no_harm() -> None:
    faults = Faults(failures={(0, 1): "not_a_number", (2, 2): "raised"})
    measured = measure(virtual(faults), slots_per_instance=2, instances=2, max_gpus_per_trial=2, num_trials=8)
    assert measured.profile.seconds_per_iteration == pytest.approx({1: 4.0, 2: 2.5})
    assert [(point.gpus, point.copies) for point in measured.points] == [(1, 2), (2, 2)]


def test_a_cancelled_measurement_releases_everything() -> None:
    backend = virtual()
    with pytest.raises(RubberbandError, match="cancelled"):
        measure(backend, slots_per_instance=2, cancelled=lambda: backend.now() > 10.0)
    assert all(status.state == "terminated" for status in backend.provider.describe())


def test_a_trial_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ProviderError, match="cannot hold a trial of 4 GPUs"):
        measure(virtual(), slots_per_instance=2, min_gpus_per_trial=4, max_gpus_per_trial=4)


MODEL = GoodputProfile(
    throughput=Throughput(alpha_grad_s=0.02, beta_grad_s=0.001, alpha_local_s=0.01, beta_local_s=0.001, gamma=2.0),
    noise_scale=300.0,
    samples_per_iteration=640.0,
    limits=BatchLimits(initial=64, max=1024, max_per_gpu=128),
)


def adaptive(*noise_scales: float | None, faults: Faults | None = None) -> AdaptiveBackend:
    """Two instances of two GPUs; an iteration takes at least ten steps at M0."""
    backend = AdaptiveBackend("profiling", OFFER, PROFILE, metric="loss", faults=faults)
    return backend.reporting(MODEL, *noise_scales)


def test_a_sweep_over_batch_sizes_gives_a_model_of_goodput() -> None:
    backend = adaptive(100.0, 200.0, 600.0)
    measured = measure(backend, slots_per_instance=2, instances=2, max_gpus_per_trial=4, sweep=True)
    assert measured.profile.seconds_per_iteration == pytest.approx(PROFILE.seconds_per_iteration)
    assert measured.remarks == ()
    model = measured.profile.goodput
    assert model is not None
    assert (model.limits, model.samples_per_iteration) == (MODEL.limits, 640.0)
    assert model.noise_scale == 150.0
    assert model.fit_error < 0.02
    assert {(point.instances, point.gpus) for point in model.points} == {(1, 1), (1, 2), (2, 4)}
    held_s = [10 * float(step_s(MODEL.throughput, n, g, 64 // g, 0)) for n, g in ((1, 1), (1, 2), (2, 4))]
    copies = [4] * 3 + [2] * 3 + [1] * 3
    beside_s = [time_s - steps_s for time_s, steps_s in zip((4.0, 2.5, 1.5), held_s, strict=True) for _ in range(3)]
    weighted = sum(count * left for count, left in zip(copies, beside_s, strict=True)) / sum(copies)
    assert model.overhead_s == pytest.approx(weighted)


def test_the_batch_is_held_but_in_the_sweep() -> None:
    backend = adaptive(100.0)
    measure(backend, slots_per_instance=2, max_gpus_per_trial=2, sweep=True)
    segments = {start.attempt: start for start in backend.started}.values()
    modes = [(len(one.gang), one.batch_mode, one.until_iterations - one.from_iterations) for one in segments]
    assert modes == [(gpus, mode, count) for gpus in (1, 2) for mode, count in (("hold", 1), ("hold", 3), ("sweep", 1))]


def test_the_points_show_every_batch_size_that_was_tried() -> None:
    measured = measure(adaptive(100.0), slots_per_instance=2, sweep=True)
    sizes = [timed.batch_size for timed in measured.points[0].batches]
    assert (sizes[0], sizes[-1], sizes) == (64, 1024, sorted(sizes))
    assert measured.points[0].batches[0].step_s == pytest.approx(0.084)


def test_without_a_noise_scale_the_initial_batch_is_used_and_reported() -> None:
    measured = measure(adaptive(None), slots_per_instance=2, sweep=True)
    assert measured.profile.goodput is not None
    assert measured.profile.goodput.noise_scale == 64.0
    assert "no trial measured its noise scale" in measured.remarks[0]


def test_trials_that_do_not_mention_batches_leave_no_model() -> None:
    measured = measure(virtual(), slots_per_instance=2, sweep=True)
    assert measured.profile.goodput is None
    assert measured.profile.seconds_per_iteration == pytest.approx({1: 4.0})


def test_failures_in_a_sweep_are_skipped() -> None:
    faults = Faults(failures={(0, 3): "raised", (1, 3): "hung", (0, 6): "died"})
    measured = measure(adaptive(100.0, faults=faults), slots_per_instance=2, max_gpus_per_trial=2, sweep=True)
    assert [point.gpus for point in measured.points] == [1, 2]
    assert [len(point.batches) for point in measured.points] == [1, 1]
    assert measured.profile.goodput is not None
    assert measured.remarks == ("some batch sizes could not be tried on 2 GPU: fault",)


def test_a_limit_in_a_sweep_keeps_what_there_is() -> None:
    whole = adaptive(100.0)
    measure(whole, slots_per_instance=2, sweep=True)
    until_s = whole.now() - 2.0
    measured = measure(adaptive(100.0), slots_per_instance=2, sweep=True, limits=ProfilingLimits(time_s=until_s))
    assert "deadline is reached" in measured.stopped_by
    assert [point.gpus for point in measured.points] == [1]
    assert measured.profile.goodput is not None
    assert len(measured.profile.goodput.points) == 1


@pytest.mark.long
@pytest.mark.ray
def test_a_torch_trial_is_measured_on_one_and_two_workers(tmp_path: Path) -> None:
    backend = RayBackend(
        LocalProvider("profiling", tmp_path, 2),
        run_spec(
            [{"lr": 0.1}] * 2,
            entrypoint=trials.entrypoint("torch_trials:Line"),
            metric="train_loss",
            batch={"policy": "goodput"},
        ),
        store=open_store(str(tmp_path / "checkpoints")),
        slots_per_instance=2,
        logs=tmp_path / "logs",
    )
    try:
        measured = measure(backend, slots_per_instance=2, max_gpus_per_trial=2, sweep=True)
    finally:
        backend.close()
    assert [(point.gpus, point.copies) for point in measured.points] == [(1, 2), (2, 1)]
    values = [value for point in measured.points for value in (point.iteration_s, point.startup_s)]
    assert all(math.isfinite(value) and value > 0.0 for value in values)
    assert measured.profile.init_delay_s is not None
    model = measured.profile.goodput
    assert model is not None
    assert {point.gpus for point in model.points} == {1, 2}
    assert all(len(point.batches) > 1 for point in measured.points)
    assert list((tmp_path / "checkpoints").glob("*.ckpt")) == []
    assert nothing_left(tmp_path)
    print(measured)
