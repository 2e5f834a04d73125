"""Lack of memory: errors that come from it, and what is told of a trial whose process the kernel ended for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from rubberband.cloud.node import memory_kills
from rubberband.cloud.ray_head.ray_node import SETTINGS, environment
from rubberband.executor import (
    HUNG,
    RAN_OUT,
    Entrypoint,
    Gathered,
    SegmentFailure,
    SlotWorker,
    TrialLog,
    describe,
    open_store,
)
from rubberband.executor.ray import slot_worker
from rubberband.executor.training.failures import is_out_of_memory

REMEDY = "train on fewer samples at once: batch.max_per_gpu, or the trial's max_batch_size_per_gpu"
SURE = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    torch.AcceleratorError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
]
DOUBTFUL = [
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError("Unable to find a valid cuDNN algorithm to run convolution"),
    RuntimeError("GET was unable to find an engine to execute this computation; FIND was unable to find an engine"),
    RuntimeError(
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input."
    ),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"),
]


@pytest.mark.parametrize("error", SURE + DOUBTFUL, ids=str)
def test_the_faces_of_a_full_gpu_are_known_and_have_the_remedy(error: RuntimeError) -> None:
    assert is_out_of_memory(error)
    failure = describe(error, in_gang=True)
    assert not failure.secondary
    assert REMEDY in failure.message


@pytest.mark.parametrize("error", DOUBTFUL, ids=str)
def test_libraries_that_fail_beside_free_memory_do_not_lack_it(
    error: RuntimeError, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for free, is_lack in ((1 << 30, True), (60 << 30, False)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free, 80 << 30))
        assert is_out_of_memory(error) is is_lack

    def lost() -> None:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "mem_get_info", lost)
    assert not is_out_of_memory(error)


def test_a_collective_without_memory_is_the_failure_itself_and_is_not_repeated() -> None:
    nccl = "NCCL error in: NCCLUtils.cpp:93, unhandled cuda error, NCCL version 2.27.5\nncclUnhandledCudaError: "
    for last in ("Cuda failure 2 'out of memory'", "Last error:\nFailed to CUDA calloc async 608 bytes"):
        error = torch.distributed.DistBackendError(nccl + last)
        assert not is_out_of_memory(error), "one worker alone cannot do the step again"
        failure = describe(error, in_gang=True)
        assert not failure.secondary
        assert REMEDY in failure.message
    lost = describe(torch.distributed.DistBackendError(nccl + "Cuda failure 'peer is gone'"), in_gang=True)
    assert lost.secondary
    assert "batch.max_per_gpu" not in lost.message


def test_the_kernel_s_count_is_read(tmp_path: Path) -> None:
    counters = tmp_path / "vmstat"
    counters.write_text("pgfault 7\noom_kill 3\nnr_oom_kill_x 9\n")
    assert memory_kills(counters) == 3
    counters.write_text("pgfault 7\n")
    assert memory_kills(counters) == memory_kills(tmp_path / "none") == 0


def test_a_death_by_lack_of_memory_is_distinguished_from_other_deaths() -> None:
    echo = SegmentFailure(kind="raised", message="gloo lost a peer", details="", secondary=True)
    died = Gathered(failures=[echo], deaths=["rank 0: The actor is dead"])
    assert "its process exited" in died.cause()[1]
    died.died_of = "memory"
    assert died.cause() == ("died", RAN_OUT, "rank 0: The actor is dead")
    died.died_of = "hang"
    assert died.cause() == ("died", HUNG, "rank 0: The actor is dead")
    raised = SegmentFailure(kind="raised", message="boom", details="", secondary=False)
    assert Gathered(failures=[raised], deaths=["rank 0"], died_of="memory").cause()[1] == "boom"


def test_the_kernel_chooses_the_process_that_lack_of_memory_ends(tmp_path: Path) -> None:
    """Ray would end the worker that came last, on every instance of this machine at once."""
    assert SETTINGS["RAY_memory_monitor_refresh_ms"] == "0"
    assert environment(os.environ, tmp_path, {}, ())["RAY_memory_monitor_refresh_ms"] == "0"


def test_a_death_by_torch_s_watchdog_shows_in_what_the_trial_printed_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_worker, "memory_kills", lambda: 3)
    worker = SlotWorker(Entrypoint.parse("segment_trials:Regression"), open_store(str(tmp_path)))
    log = TrialLog(path=tmp_path / "trial-001.log", limit_bytes=2**20)
    lines = "[rank1]: [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)\n"
    assert worker.death_cause(before := worker.vitals(log), log) == ""
    log.path.write_text(lines + "#0 c10::Error\n" * 30)
    assert worker.death_cause(before, log) == "hang"
    assert worker.death_cause((2, before[1]), log) == "memory"
    assert worker.death_cause(worker.vitals(log), log) == "", "an earlier attempt's lines are no sign"
