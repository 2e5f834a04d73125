"""Virtual runs whose trials adapt their batch sizes: the noise scale grows with progress, and the batch follows it."""

from __future__ import annotations

from rubberband.adaptive import BatchUse
from rubberband.executor.events import Gang
from rubberband.executor.result import Result, summarise
from rubberband.executor.state import Job
from rubberband.executor.virtual import Faults, VirtualBackend
from tests.unit.test_views_tables import a_job, configurations
from tests.unit.virtual_runs import run_virtual

INITIAL, LARGEST = 64, 2048


def following_noise(trial: int, iterations: int, gang: Gang, iteration_s: float) -> tuple[BatchUse, ...]:
    """Two stretches an iteration, of batches up to four times the noise scale; none is known in the first stretch."""
    halves = [iterations - 1.0, iterations - 0.5]
    noises = [(40.0 + 4.0 * trial) * (1.0 + progress) ** 1.6 * len(gang) for progress in halves]
    return tuple(
        _use(noise if progress else None, gang, 0.48 * iteration_s)
        for noise, progress in zip(noises, halves, strict=True)
    )


def _use(noise: float | None, gang: Gang, duration_s: float) -> BatchUse:
    size = INITIAL
    while noise is not None and 2 * size <= min(LARGEST, 4 * noise):
        size *= 2
    gpus, passes = len(gang), 1 + size // (len(gang) * 513)
    step_s = 0.02 + 0.0004 * size / gpus + (0.01 if gpus > 1 else 0.0)
    return BatchUse(
        instances=len({slot.instance for slot in gang}),
        gpus=gpus,
        batch_size=size,
        per_gpu=-(-size // (gpus * passes)),
        accumulation=passes - 1,
        steps=max(1, round(duration_s / step_s)),
        duration_s=duration_s,
        step_s=step_s,
        noise_scale=noise,
        efficiency=1.0 if noise is None else (noise + INITIAL) / (noise + size),
    )


def adaptive_backend(job: Job, faults: Faults | None = None) -> VirtualBackend:
    """A virtual backend whose trials tell of their batches."""
    return VirtualBackend(
        job.name, job.offer, job.profile, metric=job.metric, faults=faults, batches_of=following_noise
    )


def adaptive_result(job: Job | None = None, faults: Faults | None = None) -> Result:
    """What came of a run with adaptive batches."""
    job = job or a_job()
    backend = adaptive_backend(job, faults)
    controller, _, _ = run_virtual(job, backend=backend)
    return summarise(job, controller.state, configurations(job), backend.now())
