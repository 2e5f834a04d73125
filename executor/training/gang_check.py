"""Compares an iteration on two workers with the same one on one, for trials whose training loop is their own.

Programs and distributed functions divide their batches and add up their metrics themselves. The comparison begins from
the checkpoint that one worker wrote. It sees the metric alone, so it finds faults of the kind that a search would
suffer from; `comparing.py` compares the weights of a TorchTrial.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any

from rubberband.cloud.ray_head.ray_node import free_port
from rubberband.executor.checkpoints import CheckpointStore
from rubberband.executor.training.entrypoint import Entrypoint
from rubberband.executor.training.run import run_segment
from rubberband.executor.training.segment import Segment, SegmentFailure, SegmentReport

LIMIT_S = 60.0
"""Most seconds of the two workers."""
_SAME = 1e-3
"""Relative difference of the metric that rounding may make in one iteration."""
_NOISE = 3.0
"""Times the difference between two runs on one worker that two workers may differ by."""
_TWICE = 0.02


def on_two_workers(
    entrypoint: Entrypoint, segment: Segment, store: CheckpointStore
) -> Mapping[str, float] | SegmentFailure | None:
    """Train a segment of one iteration on two workers; return its metrics, or the failure; None: it takes too long."""
    context = multiprocessing.get_context("fork")
    rendezvous = f"tcp://127.0.0.1:{free_port()}"
    jobs, processes = list[Connection](), list[Any]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a thread that only waits for the end is not copied
        for rank in (0, 1):
            ours, theirs = context.Pipe(duplex=False)
            order = replace(segment, rank=rank, num_workers=2, rendezvous=rendezvous)
            processes.append(context.Process(target=_train, args=(theirs, entrypoint, order, store), daemon=False))
            processes[-1].start()
            theirs.close()
            jobs.append(ours)
    try:
        return _received(jobs)
    finally:
        for process in processes:
            process.kill()
            process.join()
        for job in jobs:
            job.close()


def _received(jobs: list[Connection]) -> Mapping[str, float] | SegmentFailure | None:
    """Return rank 0's metrics, or the first failure that is not another's consequence."""
    until_s, open_jobs = time.monotonic() + LIMIT_S, list(jobs)
    metrics: Mapping[str, float] | None = None
    failures = list[SegmentFailure]()
    while open_jobs and (left_s := until_s - time.monotonic()) > 0.0:
        for job in wait(open_jobs, left_s):
            assert isinstance(job, Connection)
            try:
                item = job.recv()
            except (EOFError, OSError):
                open_jobs.remove(job)
                continue
            if isinstance(item, SegmentFailure):
                failures.append(item)
            elif isinstance(item, SegmentReport):
                metrics = item.metrics
    if failures:
        return next((failure for failure in failures if not failure.secondary), failures[0])
    return metrics


def _train(job: Connection, entrypoint: Entrypoint, segment: Segment, store: CheckpointStore) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):  # the check has shown what the trial prints
        os.dup2(nothing, stream)
    with suppress(BrokenPipeError):
        for item in run_segment(entrypoint, segment, store):
            job.send(item)
    job.close()
    os._exit(0)


def difference(metric: str, one: float, two: float, again: float | None) -> str | None:
    """Return a remark if an iteration on two workers reports another metric than on one; None if it does not.

    `again`: the metric of a second run on one worker, if there is one: it may differ by random draws.
    """
    noise = 0.0 if again is None else _relative(one, again)
    if _relative(one, two) <= max(_SAME, _NOISE * noise):
        return None
    ratio = two / one if one else float("inf")
    if abs(ratio - 2.0) < 2.0 * _TWICE or abs(ratio - 0.5) < 0.5 * _TWICE:
        times = "twice" if ratio > 1.0 else "half"
        return (
            f"two workers report {metric}={two:.6g}, {times} what one reports from the same checkpoint ({one:.6g}): "
            "average the metric over the workers, weighted by their samples, where it is added up or averaged once too "
            "often (a Trainer of transformers needs average_tokens_across_devices=False)"
        )
    more = "" if noise <= _SAME else f", and a second run on one {again:.6g}"
    return (
        f"two workers report {metric}={two:.6g}, and one {one:.6g} from the same checkpoint{more}: divide the batch by "
        "WORLD_SIZE, give each worker its own samples, and average the metric over the workers; or set "
        "resources.gpus_per_trial.max to 1"
    )


def _relative(one: float, other: float) -> float:
    return abs(one - other) / max(abs(one), abs(other), 1e-12)
