"""How a gang forms its process group for GPUs, without any."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rubberband.executor import gang
from rubberband.executor.training.failures import GangBroken


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
    gang.form_group(None, 1, 2, "cuda")  # type: ignore[arg-type]
    assert formed["backend"] == "cpu:gloo,cuda:nccl"
    assert formed["summed"] == ((8 * 2**20,), {"device": "cuda"})
    assert formed["is_done"]
    assert formed["device_id"] == torch.device("cuda", 0), "a worker sees one GPU, whatever its rank"
    assert formed["timeout"] == gang.COLLECTIVE_TIMEOUT
    assert gang.os.environ["NCCL_DEBUG"] == "INFO", "the user's own"
    assert gang.os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"


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
    for thread in threading.enumerate():
        if thread.name == "rubberband leave":
            thread.join()
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
    aborted: list[Any] = []
    monkeypatch.setattr(gang, "leave_group", lambda device, *, in_order: aborted.append((device, in_order)))
    gang.release_waits("cpu")
    gang.release_waits("cuda")
    assert aborted == [("cuda", False)], "to destroy the group would wait for the lost one"


@pytest.fixture
def leaving(monkeypatch: pytest.MonkeyPatch) -> tuple[gang.Gang, list[str], Any]:
    """A worker of a gang of two, what it does as it leaves, and its life line."""
    calls: list[str] = []
    how = {True: "in order", False: "at once"}
    monkeypatch.setattr(gang, "leave_group", lambda device, *, in_order: calls.append(how[in_order]))
    line: Any = SimpleNamespace(broken="", leave=lambda: calls.append("farewell"), close=lambda: calls.append("closed"))
    store = dist.HashStore()
    store.set("agreed-1", "0.0")
    return gang.Gang(1, 2, store, "cuda", line), calls, line


def test_a_worker_parts_with_a_farewell_for_others_would_take_it_for_lost(leaving):
    found, calls, _ = leaving
    found.part()
    found.close()
    assert calls == ["farewell", "in order", "closed", "closed"]


def test_a_worker_that_fails_does_not_wait_for_the_others_to_leave(leaving):
    found, calls, _ = leaving
    found.close()
    assert calls == ["at once", "closed"]


def test_the_first_worker_does_not_wait_at_the_end_for_one_that_is_lost(leaving):
    found, calls, line = leaving
    found.rank, line.broken = 0, "worker 1 failed: no"
    found.part()
    assert calls == ["farewell", "at once", "closed"]


def test_a_wait_for_others_ends_when_one_is_lost():
    line: Any = SimpleNamespace(broken="")
    looks: list[bool] = []

    def check(keys: list[str]) -> bool:
        line.broken = "worker 1 failed: no"
        looks.append(True)
        return len(looks) > 9

    found = gang.Gang(0, 2, SimpleNamespace(set=lambda *_: None, check=check), "cpu", line)  # type: ignore[arg-type]
    with pytest.raises(GangBroken, match="worker 1 failed: no"):
        found.meet()
    assert len(looks) == 1


def test_workers_wait_for_each_other_at_every_meeting():
    store = dist.HashStore()
    first, other = (gang.Gang(rank, 2, store) for rank in range(2))
    for _ in range(2):
        waits = threading.Thread(target=first.meet, daemon=True)
        waits.start()
        waits.join(0.05)
        assert waits.is_alive()
        other.meet()
        waits.join(10.0)
        assert not waits.is_alive()
