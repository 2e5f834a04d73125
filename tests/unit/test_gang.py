"""How a gang forms its process group for GPUs, without any."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rubberband.executor.training import gang
from rubberband.executor.training.runner import GangBroken


@pytest.fixture
def formed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """How the group was formed, and what was summed first."""
    found: dict[str, Any] = {}
    for name in ("NCCL_DEBUG", "TORCH_NCCL_ASYNC_ERROR_HANDLING"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **words: found.update(backend=backend, **words))
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: found.update(summed=tensor))
    monkeypatch.setattr(torch, "zeros", lambda *size, **words: (size, words))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: found.update(is_done=True))
    return found


def test_a_group_of_gpus_sums_tensors_of_the_host_too_and_connects_all_at_once(formed, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    gang.form_group(None, 0, 2, "cuda")  # type: ignore[arg-type]
    assert formed["backend"] == "cpu:gloo,cuda:nccl"
    assert formed["summed"] == ((8 * 2**20,), {"device": "cuda"})
    assert formed["is_done"]
    assert gang.os.environ["NCCL_DEBUG"] == "INFO", "the user's own"
    assert gang.os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"


def test_nccl_says_why_it_fails(formed):
    gang.form_group(None, 0, 2, "cuda")  # type: ignore[arg-type]
    assert gang.os.environ["NCCL_DEBUG"] == "WARN"


@pytest.mark.parametrize(("destroy_s", "abort_s", "calls"), [(0.0, 0.0, ["destroy"]), (9.0, 0.0, ["destroy", "abort"])])
def test_a_group_that_does_not_end_is_aborted(monkeypatch, destroy_s, abort_s, calls):
    assert left(monkeypatch, destroy_s, abort_s, in_order=True) == calls


def test_a_process_whose_group_cannot_be_aborted_ends(monkeypatch):
    assert left(monkeypatch, 0.0, 9.0, in_order=False) == ["abort", "exit"]


def left(monkeypatch: Any, destroy_s: float, abort_s: float, *, in_order: bool) -> list[str]:
    """What `leave_group` calls where destroying and aborting take so long."""
    calls: list[str] = []
    over = threading.Event()

    def called(name: str, seconds: float) -> None:
        calls.append(name)
        over.wait(seconds)

    monkeypatch.setattr(gang, "LEAVE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: called("destroy", destroy_s))
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", lambda: called("abort", abort_s))
    monkeypatch.setattr(gang.os, "_exit", lambda code: calls.append("exit"))
    gang.leave_group("cuda", in_order=in_order)
    over.set()
    time.sleep(0.01)
    return calls


def test_sums_of_a_gang_that_is_broken_meanwhile_are_not_used(monkeypatch):
    line: Any = SimpleNamespace(broken="")
    found = gang.Gang(0, 2, dist.HashStore(), "cuda", line)
    assert found.agree(2.0) == 2.0
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: setattr(line, "broken", "worker 1 failed: no"))
    with pytest.raises(GangBroken, match="worker 1 failed: no"):
        found.sum(torch.ones(1))
    with pytest.raises(GangBroken):
        found.agree(2.0)


def test_a_lost_worker_ends_the_waits_of_gpus_and_gloo_ends_its_own(monkeypatch):
    aborted: list[str] = []
    monkeypatch.setattr(gang, "leave_group", lambda device, *, in_order: aborted.append(device))
    gang._release_waits("cpu")
    gang._release_waits("cuda")
    assert aborted == ["cuda"]
