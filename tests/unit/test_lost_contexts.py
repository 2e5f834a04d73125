"""CUDA's errors: whose fault they are, what a user reads, and what becomes of the process, the trial and the GPU."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rubberband.executor import (
    RUNS_ON,
    Attempt,
    Entrypoint,
    FailureKind,
    SegmentFailure,
    SegmentReport,
    Slot,
    SlotWorker,
    Started,
    StartTrial,
    TrialLog,
    TrialStatus,
    Workers,
    describe,
    open_store,
    run_segment,
    runner,
    slot_worker,
)
from rubberband.executor.core.trials import MOST_GPU_FAILURES
from rubberband.executor.training import failures, run
from rubberband.executor.training.reporting import report
from tests.builders.lost_context import ADVICE, cuda_error
from tests.builders.ray_actors import Actor
from tests.builders.ray_actors import ray as ray
from tests.builders.segments import SEGMENT
from tests.builders.stories import Story

XID_79 = "[{:.6f}] NVRM: Xid (PCI:0000:00:1e): 79, pid=1, GPU has fallen off the bus.\n"
XID_13 = "[{:.6f}] NVRM: Xid (PCI:0000:00:1e): 13, pid=1, Graphics Exception\n"


def dmesg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    """Put a program that prints `text` in the place of dmesg."""
    program = tmp_path / "dmesg"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{text}END\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("error", "kind", "line"),
    [
        (("device-side assert triggered", 710), "raised", "; a label or index is probably out of range: train it on"),
        (
            ("an illegal memory access was encountered", 700),
            "raised",
            "; CUDA reports errors late: train it on the CPU",
        ),
        (("no kernel image is available for execution on the device", 209), "raised", "; this build of torch has no"),
        (("out of memory", 2), "raised", "; train on fewer samples at once"),
        (("uncorrectable ECC error encountered", 214), "gpu", failures.MACHINE),
        (("CUDA-capable device(s) is/are busy or unavailable", 46), "gpu", failures.MACHINE),
        (("system not yet initialized", 802), "gpu", failures.MACHINE),
    ],
)
def test_a_user_reads_cuda_s_own_line_and_its_fix(error: tuple[str, int], kind: str, line: str) -> None:
    failure = describe(cuda_error(*error), in_gang=False)
    assert failure.kind == kind
    assert f"CUDA error: {error[0]}" in failure.message
    assert line in failure.message
    assert "TORCH_USE_CUDA_DSA" not in failure.message or error[1] == 2
    assert ADVICE.strip() in failure.details


@pytest.mark.parametrize(
    ("text", "age_s", "kind"), [(XID_79, 5, "gpu"), (XID_79, 5000, "raised"), (XID_13, 5, "raised")]
)
@pytest.mark.parametrize(("message", "code"), [("unspecified launch failure", 719), ("unknown error", 999)])
def test_a_launch_failure_is_the_machine_s_where_the_driver_saw_the_hardware_fail(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, age_s: float, kind: str, message: str, code: int
) -> None:
    monkeypatch.setattr(failures.time, "monotonic", lambda: 10_000.0)
    dmesg(monkeypatch, tmp_path, text.format(10_000.0 - age_s))
    assert describe(cuda_error(message, code), in_gang=False).kind == kind


@pytest.mark.parametrize("lost", [True, False])
def test_a_failure_says_whether_the_process_can_use_its_gpu_no_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lost: bool
) -> None:
    import torch

    def query() -> bool:
        if lost:
            raise cuda_error("device-side assert triggered", 710)
        return True

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(query=query))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    real = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, **_: real(*size))
    (failure,) = [
        item
        for item in run_segment(Entrypoint.from_object(fails), SEGMENT, open_store(str(tmp_path)))
        if isinstance(item, SegmentFailure)
    ]
    assert (failure.message, failure.context_lost) == ("ValueError: of the trial", lost)


def test_a_gpu_that_is_still_busy_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(query=lambda: False))
    monkeypatch.setattr(failures, "_DONE_S", 0.0)
    assert not failures.context_is_lost()


def fails(config: dict[str, Any]) -> None:
    raise ValueError("of the trial")


def workers(tmp_path: Path, on_sick: Any) -> Workers:
    store = open_store(str(tmp_path))
    return Workers(
        "a", 2, Entrypoint.parse("a:b"), store, device="cuda", slots_on_machine=2, timeout_s=1.0, on_sick=on_sick
    )


def test_a_gpu_that_fails_twice_makes_its_instance_sick(tmp_path: Path) -> None:
    found: list[tuple[str, str]] = []
    answer = threading.Event()
    place = workers(tmp_path, lambda *sick: (found.append(sick), answer.set()))
    place.note_gpu_failure(0, "ECC")
    place.note_gpu_failure(1, "ECC")
    assert not answer.wait(0.05)
    place.note_gpu_failure(0, "CUDA error: ECC")
    assert answer.wait(10.0)
    place.note_gpu_failure(0, "ECC")
    threads = [each for each in threading.enumerate() if each.name == "sick-0"]
    for each in threads:
        each.join(10.0)
    assert found == [("a", "GPU 0 failed 2 times: CUDA error: ECC")]


@pytest.mark.parametrize(("lost", "replaced"), [(True, [0]), (False, [])])
@pytest.mark.parametrize("kind", ["gpu", "raised"])
def test_a_worker_whose_context_is_lost_is_replaced_and_any_other_stays_warm(
    kind: FailureKind, lost: bool, replaced: list[int]
) -> None:
    failure = SegmentFailure(kind=kind, message="ECC", details="", secondary=False, context_lost=lost)
    found: list[int] = []
    noted: list[tuple[int, str]] = []
    ready: Future[Actor] = Future()
    ready.set_result(Actor([failure]))
    place = SimpleNamespace(
        worker=lambda gpu: ready,
        replace=lambda gpu, _: found.append(gpu),
        note_gpu_failure=lambda *failed: noted.append(failed),
    )
    start = StartTrial(
        trial=4, attempt=1, gang=(Slot(instance="i", gpu=0),), from_iterations=0, until_iterations=4, checkpoint=None
    )
    events: list[Any] = []
    attempt = Attempt(start, SEGMENT, None, lambda _: place, lambda make: events.append(make(0.0)))  # type: ignore[arg-type, return-value]
    attempt.begin()
    attempt.wait(60.0)
    assert [(event.kind, event.message) for event in events] == [(kind, "ECC")]
    assert (found, noted) == (replaced, [(0, "ECC")] if kind == "gpu" else []), "a trial's own errors are not the GPU's"


def test_a_process_without_its_gpu_ends_when_its_last_item_has_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ends: list[Any] = []
    monkeypatch.setattr(failures, "context_is_lost", lambda: True)
    monkeypatch.setattr(run, "run_segment", lambda *_: (item for item in ["failure"]))
    monkeypatch.setattr(slot_worker, "time", SimpleNamespace(sleep=lambda seconds: ends.append(seconds >= 1.0)))
    monkeypatch.setattr(slot_worker, "os", SimpleNamespace(_exit=ends.append))
    worker = SlotWorker(Entrypoint.parse("a:b"), open_store(str(tmp_path)))
    assert list(worker.run(SEGMENT, None)) == ["failure"]
    assert ends == [True, 1]


LET_GO = threading.Event()


def swallows(config: dict[str, Any]) -> None:
    while True:
        try:
            report({"loss": 1.0})
        except BaseException:
            LET_GO.wait(config["ends_after_s"])
            return


def test_a_process_whose_function_goes_on_after_its_stop_ends_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ends: list[Any] = []
    monkeypatch.setattr(runner, "END_TIMEOUT_S", 0.05)
    monkeypatch.setattr(slot_worker, "_DELIVERY_S", 0.0)
    monkeypatch.setattr(os, "_exit", ends.append)
    for ends_after_s, expected in ((0.0, []), (30.0, [1])):
        worker = SlotWorker(Entrypoint.from_object(swallows), open_store(str(tmp_path)))
        log = TrialLog(path=tmp_path / f"{ends_after_s}.log", limit_bytes=10_000)
        segment = replace(SEGMENT, until_iterations=2, config={"ends_after_s": ends_after_s}, metric="loss")
        *_, last = worker.run(segment, log)
        assert isinstance(last, SegmentReport)
        assert ends == expected
        assert log.path.read_text().count(RUNS_ON) == len(expected)
        worker._log_pump.close()
    LET_GO.set()


def test_failures_of_gpus_cost_a_trial_no_retry_unless_they_follow_it() -> None:
    story = Story()
    story.controller.state.job = replace(story.controller.job, max_failures=1)
    story.tell(Started)
    story.ready("i-001", "i-002")
    trial = story.state.trials[0]
    for count in range(1, MOST_GPU_FAILURES + 1):
        story.fail(0, "gpu")
        assert (trial.failures, trial.gpu_failures, trial.status) == (0, count, TrialStatus.RUNNING)
    story.fail(0, "gpu")
    assert (trial.failures, trial.status) == (1, TrialStatus.RUNNING)
    story.fail(0, "gpu")
    assert trial.status is TrialStatus.FAILED
