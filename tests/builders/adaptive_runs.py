"""Virtual runs whose trials adapt their batch sizes: the noise scale grows with progress, and the batch follows it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rubberband.executor import Faults, Gang, Job, Result, VirtualBackend, summarise
from rubberband.planner.goodput import choose
from rubberband.values.adaptive import BatchLimits, BatchUse, GoodputProfile, Throughput
from tests.builders.results import a_job, configurations
from tests.builders.virtual_runs import run_virtual

MODEL = GoodputProfile(
    throughput=Throughput(
        alpha_grad_s=0.02, beta_grad_s=0.0004, alpha_local_s=0.01, alpha_node_s=0.03, beta_node_s=0.001, gamma=2.0
    ),
    noise_scale=200.0,
    samples_per_iteration=20_000.0,
    limits=BatchLimits(initial=64, max=2048, max_per_gpu=512),
)


def following_noise(trial: int, iterations: int, gang: Gang, iteration_s: float) -> tuple[BatchUse, ...]:
    """Two stretches an iteration, each of the best batch at its noise scale; none is known in the first stretch."""
    halves = [iterations - 1.0, iterations - 0.5]
    noises = [(100.0 + 10.0 * trial) * (1.0 + progress) ** 1.3 if progress else None for progress in halves]
    return tuple(_use(noise, gang, 0.48 * iteration_s) for noise in noises)


def _use(noise: float | None, gang: Gang, duration_s: float) -> BatchUse:
    instances = len({slot.instance for slot in gang})
    limits = replace(MODEL.limits, max=MODEL.limits.initial) if noise is None else MODEL.limits
    chosen = choose(MODEL.throughput, noise or 0.0, limits, instances, len(gang))
    return BatchUse(
        instances=instances,
        gpus=len(gang),
        batch_size=chosen.batch_size,
        per_gpu=chosen.per_gpu,
        accumulation=chosen.accumulation,
        steps=max(1, round(duration_s / chosen.step_s)),
        duration_s=duration_s,
        step_s=chosen.step_s,
        noise_scale=noise,
        efficiency=1.0 if noise is None else chosen.efficiency,
    )


def an_adaptive_job(**changes: Any) -> Job:
    """`a_job` whose profile has a model of the batch sizes."""
    return a_job(profile=replace(a_job().profile, goodput=MODEL), **changes)


def adaptive_backend(job: Job, faults: Faults | None = None) -> VirtualBackend:
    """A virtual backend whose trials tell of their batches."""
    return VirtualBackend(
        job.name, job.offer, job.profile, metric=job.metric, faults=faults, batches_of=following_noise
    )


def adaptive_result(job: Job | None = None, faults: Faults | None = None) -> Result:
    job = job or an_adaptive_job()
    backend = adaptive_backend(job, faults)
    controller, _, _ = run_virtual(job, backend=backend)
    return summarise(controller.state, configurations(job), backend.now())
