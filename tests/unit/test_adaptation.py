"""Batches chosen by goodput, noise scale and device being fakes: progress, decisions, sweeps, memory, restores."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import numpy as np
import pytest
import torch

from rubberband.executor import (
    CudaLapClock,
    GlobalBatch,
    GlobalBatchSampler,
    LapClock,
    NoiseReading,
    TrialFailure,
    make_lr_scaling,
)
from rubberband.executor import WorkerGang as Gang
from rubberband.executor.training.components import Division
from rubberband.executor.training.goodput.adaptation import MOST_USES, AdaptiveBatching, make_batching, resolve_limits
from rubberband.executor.training.segment import BatchReport
from rubberband.executor.training.step import TrainStep
from rubberband.values.adaptive import AdaptiveBatch, BatchLimits
from tests.builders import segments
from tests.builders.fake_cuda import FakeCuda

SEGMENT = replace(segments.SEGMENT, batch=AdaptiveBatch(interval=10))
LIMITS = BatchLimits(initial=32, max=1024)
SAMPLES = 4096


@dataclass
class FakeNoise:
    noise_scale: float | None
    seen: list[Any] = field(default_factory=list)

    halves_every = 0

    def wants_halves(self, share, steps_ahead=0):
        return False

    def before_step(self, shares, parts):
        self.seen.append((tuple(shares), tuple(parts)))

    def after_part(self):
        pass

    def before_update(self):
        pass

    def reading(self):
        return NoiseReading(
            noise_scale=self.noise_scale, trace=1.0, squared_norm=1.0, uncertainty=0.0, kind="workers", estimates=9
        )

    def state_dict(self):
        return {"seen": len(self.seen)}

    def load_state_dict(self, state):
        self.loaded = state

    def close(self):
        pass


class Device:
    """A device on which a step takes `constant_s` and `per_sample_s` for each sample of the fullest GPU."""

    def __init__(self, constant_s: float = 0.1, per_sample_s: float = 1e-4, memory: int = 10**9) -> None:
        self.now, self.constant_s, self.per_sample_s, self.memory = 0.0, constant_s, per_sample_s, memory
        self.tried: list[int] = []
        self.disturbed_s = 0.0

    def fits(self, per_gpu: int) -> bool:
        self.tried.append(per_gpu)
        return per_gpu <= self.memory

    def compute(self, seconds: float) -> None:
        self.now += seconds

    def clock(self) -> LapClock:
        return LapClock(lambda: self.now, lambda: self.now - self.disturbed_s)


class Gpu(Device):
    """The same on a GPU, to which the host hands a step over in a five-hundredth of its time."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self.cuda = cuda

    def compute(self, seconds: float) -> None:
        self.cuda.launch(seconds, host_s=0.002 * seconds)

    def clock(self) -> LapClock:
        return CudaLapClock(self.cuda.clock)


def make(device: Device, noise_scale: float | None = 500.0, limits: BatchLimits = LIMITS, segment=SEGMENT, **more):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    return AdaptiveBatching(
        segment=segment,
        limits=limits,
        samples_per_iteration=more.pop("samples_per_iteration", SAMPLES),
        num_samples=SAMPLES,
        gang=Gang(0, 1, None),
        noise=FakeNoise(noise_scale),
        scaling=make_lr_scaling("adascale", optimizer, 1.0),
        least_per_gpu=more.pop("least_per_gpu", 1),
        fits=device.fits,
        clock=device.clock(),
        **more,
    )


def iterate(batching: AdaptiveBatching, device: Device, iterations: int = 1) -> tuple[BatchReport, int, int, list[int]]:
    """One iteration; what it told, its samples, the steps of the LR schedule, and the batch of every step."""
    sampler = GlobalBatchSampler(SAMPLES, 1, crosses=True)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduled, sizes = 0, []
    batching.begin(iterations)
    while not batching.is_over():
        size, passes = batching.batch_size, -(-batching.batch_size // batching.per_gpu)
        batch = sampler.next_batch([size])
        batching.before_step(batch, [size // passes] * passes)
        device.compute(passes * device.constant_s + size * device.per_sample_s)
        batching.update(optimizer, lambda: True)
        batching.after_step(batch)
        scheduled += batching.batches_due
        sizes.append(size)
    return BatchReport(**batching.end()), sum(sizes), scheduled, sizes


def test_an_iteration_is_the_same_statistical_progress_at_any_batch_size():
    device = Device()
    batching = make(device)
    report, samples, scheduled, sizes = iterate(batching, device)
    useful = sum(use.steps * use.batch_size * use.efficiency for use in report.batches)
    assert SAMPLES <= useful < SAMPLES + sizes[-1]
    assert samples > SAMPLES
    assert scheduled == SAMPLES // LIMITS.initial
    assert sizes[0] == LIMITS.initial
    assert sizes[-1] > 4 * LIMITS.initial
    assert report.limits == LIMITS
    assert report.samples_per_iteration == SAMPLES


@pytest.mark.parametrize("samples_per_iteration", [SAMPLES // 4, SAMPLES, 4 * SAMPLES])
def test_a_rule_of_learning_rates_counts_epochs_however_long_an_iteration_is(samples_per_iteration):
    device, epochs = Device(), []
    batching = make(device, limits=BatchLimits(initial=32, max=64), samples_per_iteration=samples_per_iteration)
    batching.scaling = replace(batching.scaling, rule=lambda *given: epochs.append(given[-1]) or 1.0)
    for iterations in range(1, 4 * SAMPLES // samples_per_iteration + 1):
        iterate(batching, device, iterations)
    assert epochs == sorted(epochs)
    assert epochs[-1] == pytest.approx(4.0, abs=0.2)


def test_an_overshoot_of_one_iteration_shortens_the_next():
    device = Device()
    batching = make(device)
    done, scheduled = 0.0, 0
    for iterations in range(1, 6):
        report, _, now, _ = iterate(batching, device, iterations)
        scheduled += now
        assert scheduled == iterations * SAMPLES // LIMITS.initial, "an LR schedule may end with the last iteration"
        done += sum(use.steps * use.batch_size * use.efficiency for use in report.batches)
        assert iterations * SAMPLES <= done < iterations * SAMPLES + LIMITS.max


@pytest.mark.parametrize("queued_s", [0.0, 0.25, 0.3])
def test_pauses_for_reports_do_not_count_as_time_of_steps(queued_s):
    """Neither where the thread waits for a CPU meanwhile."""
    device, pausing = Device(), Device()
    report, _, _, sizes = iterate(make(device), device)
    batching = make(pausing)
    after = batching.after_step

    def paused(batch):
        after(batch)
        batching.pause()
        pausing.now, pausing.disturbed_s = pausing.now + 0.3, pausing.disturbed_s + queued_s
        batching.resume()

    batching.after_step = paused
    found, _, _, others = iterate(batching, pausing)
    assert others == sizes
    for one, other in zip(report.batches, found.batches, strict=True):
        assert (other.step_s, other.duration_s) == pytest.approx((one.step_s, one.duration_s))


def test_other_work_on_the_machine_does_not_change_the_batches():
    quiet, loaded = Device(), Device()
    report, _, _, sizes = iterate(make(quiet), quiet)
    batching, disturbances = make(loaded), np.random.default_rng(1)
    begin = batching.before_step

    def disturbed(batch, parts):
        seconds = float(disturbances.exponential(1.0))
        loaded.now, loaded.disturbed_s = loaded.now + seconds, loaded.disturbed_s + seconds
        begin(batch, parts)

    batching.before_step = disturbed
    found, _, _, others = iterate(batching, loaded)
    assert others == sizes
    for one, other in zip(report.batches, found.batches, strict=True):
        assert other.step_s == pytest.approx(one.step_s)
        assert other.duration_s > one.duration_s, "reports tell what passed"


@pytest.mark.parametrize("others", [1, 3])
def test_threads_that_want_the_cpu_do_not_make_steps_of_a_gpu_shorter(fake_cuda, others):
    """Loader workers, say: the thread that waits for the GPU spins, and its time in the queue is the GPU's as well."""
    quiet = Device()
    report, _, _, sizes = iterate(make(quiet), quiet)
    fake_cuda.others = others
    gpu = Gpu(fake_cuda)
    found, _, _, same = iterate(make(gpu), gpu)
    assert fake_cuda.queued_s > 0.4 * fake_cuda.now
    assert same == sizes
    for one, other in zip(report.batches, found.batches, strict=True):
        assert (other.step_s, other.duration_s) == pytest.approx((one.step_s, one.duration_s), rel=0.02)


@pytest.mark.parametrize("pause_s", [0.05, 0.4])
def test_a_pause_counts_as_far_as_the_gpu_works_on(fake_cuda, pause_s):
    """A report leaves after every third step; by then the GPU has 0.3 s left to do."""
    gpu = Gpu(fake_cuda)
    batching = make(gpu, None)
    after, ends = batching.after_step, []

    def paused(batch):
        after(batch)
        ends.append(fake_cuda.now)
        if len(ends) % 3 == 0:
            batching.pause()
            fake_cuda.sleep(pause_s)
            batching.resume()

    batching.after_step = paused
    report, *_ = iterate(batching, gpu)
    for use in report.batches:
        assert use.step_s == pytest.approx(0.1 + 32e-4, rel=0.03)


def test_batches_on_a_gpu_are_timed_by_the_gpu(fake_cuda):
    model = torch.nn.Linear(1, 1)
    segment = replace(SEGMENT, device="cuda", num_workers=1)
    step: Any = create_autospec(TrainStep, instance=True, wrapped=model, least=1)
    step.precision = SimpleNamespace(scale=lambda: None)
    loop: Any = SimpleNamespace(
        segment=segment,
        gang=Gang(0, 1, None),
        optimizers=SimpleNamespace(members=[torch.optim.SGD(model.parameters(), lr=0.1)]),
        step=step,
        feed=SimpleNamespace(num_samples=SAMPLES),
        division=Division(),
        batch_size=32,
        limit=None,
        samples_per_iteration=SAMPLES,
    )
    batching = make_batching(loop)
    assert batching is not None
    assert isinstance(batching.clock, CudaLapClock)


def test_without_a_noise_scale_it_trains_as_with_a_fixed_batch():
    device = Device()
    report, samples, scheduled, sizes = iterate(make(device, None), device)
    assert (samples, scheduled, set(sizes)) == (SAMPLES, SAMPLES // 32, {32})
    assert {use.noise_scale for use in report.batches} == {None}
    assert {use.efficiency for use in report.batches} == {1.0}


def test_a_sweep_times_sizes_from_the_smallest_to_the_largest():
    device = Device()
    report, *_ = iterate(make(device, segment=replace(SEGMENT, batch_mode="sweep")), device)
    sizes = [use.batch_size for use in report.batches]
    assert sizes[0] == 32
    assert sizes[-1] == 1024
    assert len(sizes) == len(set(sizes)) >= 5
    for use in report.batches:
        assert use.step_s == pytest.approx(0.1 + use.batch_size * 1e-4)


def test_a_sweep_ends_in_time():
    device = Device(constant_s=10.0)
    report, *_ = iterate(make(device, segment=replace(SEGMENT, batch_mode="sweep")), device)
    assert [use.batch_size for use in report.batches] == [32]


@pytest.mark.parametrize("mode", ["adapt", "sweep"])
@pytest.mark.parametrize("accumulation", [True, False])
def test_where_memory_runs_out_it_backs_off_remembers_and_resumes(mode, accumulation):
    device = Device(memory=100)
    limits = replace(LIMITS, accumulation=accumulation)
    batching = make(device, 1e6, limits=limits, segment=replace(SEGMENT, batch_mode=mode))
    report, _, _, sizes = iterate(batching, device)
    assert max(use.per_gpu for use in report.batches) <= 100
    assert report.limits.max_per_gpu <= 100
    failed = [size for size in device.tried if size > 100]
    assert len(failed) == len(set(failed)) <= 6
    assert (max(sizes) > 100) is accumulation
    tried = len(device.tried)
    if mode == "adapt":
        iterate(batching, device, 2)
        assert len(device.tried) <= tried + 1, "the limit is remembered"


def test_a_restored_one_resumes_with_what_was_learnt():
    device = Device()
    batching = make(device)
    iterate(batching, device)
    state, learnt = batching.state_dict(), batching.batch_size
    other = make(device)
    other.load_state_dict(state)
    assert other.batch_size == learnt > 32
    _, _, _, sizes = iterate(other, device, 2)
    assert sizes[0] >= learnt / 1.1
    assert other.state_dict()["progress"] >= 2 * SAMPLES


def test_a_checkpoint_of_a_fixed_batch_does_not_fit():
    with pytest.raises(KeyError, match="fixed batch"):
        make(Device()).load_state_dict(None)


def test_stretches_are_few_even_where_the_batch_never_settles():
    device = Device()
    batching = make(device, samples_per_iteration=50 * SAMPLES)
    noise, samples, decisions = batching.noise, 0, 0
    batching.begin(1)
    while not batching.is_over():
        size = batching.batch_size
        device.now += 0.1 + size * 1e-4
        batching.after_step(GlobalBatch(indices=np.arange(size), shares=(size,)))
        samples, decisions = samples + size, decisions + 1
        noise.noise_scale = 100.0 if decisions // 10 % 2 else 10_000.0
    report = BatchReport(**batching.end())
    assert len(report.batches) == MOST_USES
    assert sum(use.steps * use.batch_size for use in report.batches) == pytest.approx(samples, rel=0.05)
    assert sum(use.duration_s for use in report.batches) == pytest.approx(device.now)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (AdaptiveBatch(max=64), r"batch\.max \(64\) is less than the trial's own batch size \(128\); raise it"),
        (AdaptiveBatch(initial=5000), r"batch\.initial \(5000\) is more than the 4096 samples of train_dataset\(\)"),
    ],
)
def test_limits_that_leave_no_batch_are_refused(batch, message):
    with pytest.raises(TrialFailure, match=message):
        resolve_limits(batch, batch_size=128, per_gpu=None, num_samples=SAMPLES, samples_per_iteration=SAMPLES)


def test_limits_come_from_the_user_then_the_trial_and_no_batch_is_larger_than_the_training_set():
    assert resolve_limits(
        AdaptiveBatch(), batch_size=16, per_gpu=8, num_samples=SAMPLES, samples_per_iteration=SAMPLES
    ) == BatchLimits(initial=16, max=512, max_per_gpu=8)
    given = AdaptiveBatch(initial=128, max=8192, max_per_gpu=256, accumulation=False)
    assert resolve_limits(
        given, batch_size=16, per_gpu=8, num_samples=SAMPLES, samples_per_iteration=SAMPLES
    ) == BatchLimits(initial=128, max=SAMPLES, max_per_gpu=256, accumulation=False)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (BatchLimits(initial=32, max=64), r"40 GPUs with at least 2 samples each .* raise batch\.max to 80"),
        (BatchLimits(initial=32, max=640, max_per_gpu=1), r"max_per_gpu=1 is less than the 2 samples .* raise it to 2"),
    ],
)
def test_a_gang_that_no_batch_can_be_split_over_is_refused(limits, message):
    segment = replace(SEGMENT, num_workers=40, batch=AdaptiveBatch())
    with pytest.raises(TrialFailure, match=message):
        make(Device(), limits=limits, segment=segment, least_per_gpu=2)


def test_no_batch_is_larger_than_an_iteration_unless_the_initial_one_is():
    for samples, largest in [(100, 100), (10, 16)]:
        found = resolve_limits(
            AdaptiveBatch(), batch_size=16, per_gpu=None, num_samples=SAMPLES, samples_per_iteration=samples
        )
        assert found.max == largest


@pytest.mark.parametrize(
    ("max_per_gpu", "accumulation", "passes", "most"),
    [(None, True, 48, None), (20, True, 16, None), (20, False, 16, 20)],
)
def test_the_largest_of_unequal_shares_goes_through_at_once_if_memory_allows(max_per_gpu, accumulation, passes, most):
    limits = BatchLimits(initial=64, max=64, max_per_gpu=max_per_gpu, accumulation=accumulation)
    segment = replace(SEGMENT, num_workers=4)
    shares = [[16, 16, 16, 16]]
    batching = make(Device(), limits=limits, segment=segment, shares=lambda batch_size, num_workers: shares[-1])
    assert batching.per_gpu == 16
    shares.append([4, 4, 8, 48])
    batching.before_shares_change()
    batching.after_shares_change()
    assert batching.per_gpu == passes
    assert batching.most_per_worker == most
