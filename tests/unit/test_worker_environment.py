"""A worker's environment for CUDA, torch and OpenMP."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rubberband.executor import (
    Entrypoint,
    ServerProcess,
    SlotWorker,
    compute_with,
    open_store,
    slot_worker,
    worker_process,
    worker_settings,
)
from rubberband.executor.training import run

_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
_COMPILE = "TORCHINDUCTOR_COMPILE_THREADS"


@pytest.fixture(autouse=True)
def _cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(32)), raising=False)
    for name in ("OMP_NUM_THREADS", _ALLOCATOR, "PYTORCH_ALLOC_CONF", _COMPILE, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")  # so that all of them are put back
        monkeypatch.delenv(name)


@pytest.fixture
def began_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A stand-in for the environment at the start of this process."""
    path = tmp_path / "environ"
    path.write_bytes(b"PATH=/bin\0")
    monkeypatch.setattr(worker_process, "_BEGAN_WITH", path)
    return path


def test_a_worker_on_a_gpu_has_growing_segments_and_its_part_of_the_cpus() -> None:
    assert worker_settings({}, "cuda", 8) == {_ALLOCATOR: "expandable_segments:True", _COMPILE: "4"}
    assert worker_settings({}, "cuda", 64)[_COMPILE] == "1"


def test_a_worker_on_the_cpu_sees_no_gpu() -> None:
    assert worker_settings({"CUDA_VISIBLE_DEVICES": "0"}, "cpu", 8) == {"CUDA_VISIBLE_DEVICES": "", _COMPILE: "4"}


@pytest.mark.parametrize("name", [_ALLOCATOR, "PYTORCH_ALLOC_CONF"])
def test_values_of_the_user_stay(name: str) -> None:
    assert worker_settings({name: "max_split_size_mb:64", _COMPILE: "2"}, "cuda", 8) == {}


def test_torch_has_as_many_threads_as_a_gpu_has_cpus_for(monkeypatch: pytest.MonkeyPatch, began_with: Path) -> None:
    threads: list[int] = []
    monkeypatch.setitem(__import__("sys").modules, "torch", SimpleNamespace(set_num_threads=threads.append))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # Ray's
    compute_with(4)
    compute_with(0)
    assert threads == [4, 1]
    assert os.environ["OMP_NUM_THREADS"] == "1"
    began_with.write_bytes(b"PATH=/bin\0OMP_NUM_THREADS=1\0")  # the user's
    compute_with(4)
    assert threads == [4, 1]


@pytest.mark.parametrize(
    ("device", "threads", "visible"), [("cpu", None, ""), ("cuda", "16", "1")], ids=["cpu", "cuda"]
)
def test_a_slot_s_worker_imports_code_in_that_environment(
    monkeypatch: pytest.MonkeyPatch, began_with: Path, tmp_path: Path, device: Any, threads: str | None, visible: str
) -> None:
    seen: dict[str, str] = {}
    monkeypatch.setattr(run, "warm_up", lambda *_: seen.update(os.environ))
    monkeypatch.setattr(slot_worker, "end_forks_by_sigterm", lambda: None)
    monkeypatch.setattr(slot_worker.LogPump, "start", lambda _: None)
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    SlotWorker(Entrypoint.parse("a:b"), open_store(str(tmp_path))).warm_up(device, 2)
    assert seen["CUDA_VISIBLE_DEVICES"] == visible
    assert seen.get("OMP_NUM_THREADS") == threads
    assert seen[_COMPILE] == "16"
    assert (_ALLOCATOR in seen) == (device == "cuda")


def test_a_parameter_server_sees_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    ServerProcess(Entrypoint.parse("a:b"))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_gangs_of_several_machines_talk_on_the_interface_that_ray_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "10.0.0.5")
    addresses = {"lo": "127.0.0.1", "docker0": "172.17.0.1", "ens5": "10.0.0.5"}
    monkeypatch.setattr(
        "psutil.net_if_addrs", lambda: {name: [SimpleNamespace(address=each)] for name, each in addresses.items()}
    )
    SlotWorker(Entrypoint.parse("a:b"), open_store(str(tmp_path)), remote=True)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ens5"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=ens5", "NCCL takes a name for a prefix, as of ens50"


def test_a_worker_begins_without_torch_ray_and_what_reads_experiment_files() -> None:
    """Imports are most of a worker's start, and a process that has Ray cannot be forked for one."""
    code = "import sys, rubberband.executor.ray.slot_worker; print({'torch', 'ray', 'pydantic'} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
