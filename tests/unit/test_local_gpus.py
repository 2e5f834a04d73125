"""GPUs of this machine: counted as torch can use them, and taken by one run at a time."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rubberband.cloud.local import gpus
from rubberband.cloud.local.gpus import find_gpus, free_gpus, gpus_to_share, holder, one_taken, take, visible_ids
from rubberband.cloud.local.provider import LocalProvider
from rubberband.cloud.ray_head.ray_node import Guards, RayHead
from rubberband.errors import InputError, ProviderError
from rubberband.files import SHARED, try_lock
from rubberband.running.starting import announce_device
from rubberband.values.offer import Offer
from tests.builders.experiments import experiment

_NVIDIA_SMI = """#!/bin/sh
if [ "$1" = -L ]; then cat '{listing}'; else cat '{used}'; fi
exit {status}
"""
_TORCH = """
import os, types
from types import SimpleNamespace

__version__ = {version!r}
version = SimpleNamespace(cuda={cuda!r})
open({asked!r}, "a").write(os.environ.get("CUDA_VISIBLE_DEVICES", "all") + "\\n")

def init():
    if not {ids!r}:
        raise RuntimeError({error!r})

cuda = SimpleNamespace(
    init=init,
    device_count=lambda: len({ids!r}),
    get_device_properties=lambda index: SimpleNamespace(uuid={ids!r}[index].removeprefix("GPU-")),
)
"""


class FakeGpus:
    """Puts an nvidia-smi on PATH and a torch where processes find it first; locks are in a folder of the test."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._bin, self._python = folder / "fake-bin", folder / "fake-python"
        self._bin.mkdir()
        (self._python / "torch").mkdir(parents=True)
        self._asked = folder / "asked"
        temporary = folder / "tmp"
        temporary.mkdir()
        for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("PATH", f"{self._bin}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("PYTHONPATH", f"{self._python}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        monkeypatch.setenv("TMPDIR", str(temporary))
        monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    def listed(self, *lines: str, status: int = 0) -> None:
        """What `nvidia-smi -L` prints, and its exit status."""
        (self._bin / "listing").write_text("".join(f"{line}\n" for line in lines))
        script = self._bin / "nvidia-smi"
        script.write_text(_NVIDIA_SMI.format(listing=self._bin / "listing", used=self._bin / "used", status=status))
        script.chmod(0o755)

    def plain(self, count: int) -> tuple[str, ...]:
        """So many GPUs, which torch can use; return their ids."""
        ids = tuple(f"GPU-0000000{index}-aaaa-bbbb-cccc-dddddddddddd" for index in range(count))
        self.listed(*(f"GPU {index}: NVIDIA A100-SXM4-40GB (UUID: {gpu})" for index, gpu in enumerate(ids)))
        self.used(*((gpu, 3) for gpu in ids))
        self.torch(*ids)
        return ids

    def used(self, *pairs: tuple[str, int]) -> None:
        """The memory in use (MiB) by id."""
        (self._bin / "used").write_text("".join(f"{gpu}, {mib}\n" for gpu, mib in pairs))

    def torch(self, *ids: str, version: str = "2.11.0+cu130", cuda: str | None = "13.0", error: str = "") -> None:
        source = _TORCH.format(version=version, cuda=cuda, asked=str(self._asked), ids=ids, error=error)
        (self._python / "torch" / "__init__.py").write_text(source)

    def times_asked(self) -> int:
        return len(self._asked.read_text().splitlines()) if self._asked.exists() else 0


A, B, C = "GPU-a1", "GPU-b1", "GPU-b2"
MIG = ("MIG-1", "MIG-2")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeGpus:
    """One with nvidia-smi and torch."""
    monkeypatch.setattr(gpus, "_FREED_S", 0.0)
    return FakeGpus(tmp_path, monkeypatch)


def offer(instances: int, each: int = 1) -> Offer:
    return Offer(instance_type="local", gpus=each, price_usd_per_hour=1.0, max_instances=instances)


def announced(**resources: Any) -> list[str]:
    lines: list[str] = []
    announce_device(experiment(**resources), lines.append)
    return lines


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        ("0,1", (A, B)),
        (" 2 , 0", (C, A)),
        ("0,-1,1", (A,)),
        ("0,7,1", (A,)),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("0,0", ()),
        ("GPU-a", (A,)),
        ("GPU-b,GPU-a", ()),
        ("GPU-b2,GPU-a1", (C, A)),
        ("0,", (A,)),
        ("0;1", (A,)),
        ("2gpu,+1", (C, B)),
        ("²", ()),
    ],
)
def test_devices_are_read_as_cuda_reads_them(visible: str, found: tuple[str, ...]) -> None:
    assert visible_ids(visible, [(A,), (B,), (C,)]) == found


@pytest.mark.parametrize(("count", "shared_out"), [(0, 0), (1, 0), (3, 0), (4, 4), (8, 8)])
def test_gpus_that_are_not_used_are_reported(machine: FakeGpus, count: int, shared_out: int) -> None:
    ids = machine.plain(count) if count else ()
    assert gpus_to_share(offer(2, 2), None).ids == ids[:shared_out]
    lines = announced()
    if 0 < count < 4:
        assert f"take 4 GPUs and this machine has {count}; lower resources.max_instances" in lines[0]
    else:
        assert lines == []


@pytest.mark.parametrize(
    ("visible", "said"),
    [
        ("3", "CUDA_VISIBLE_DEVICES=3 has 1; name more devices, or lower"),
        ("", "trials use the CPU: CUDA_VISIBLE_DEVICES= hides all GPUs"),
        ("-1", "trials use the CPU: CUDA_VISIBLE_DEVICES=-1 gives 0 GPUs: CUDA takes no unknown and no doubled names"),
        ("0,0", "trials use the CPU: CUDA_VISIBLE_DEVICES=0,0 gives 0 GPUs: CUDA takes no unknown and no doubled"),
    ],
)
def test_gpus_that_are_hidden_are_reported(
    machine: FakeGpus, monkeypatch: pytest.MonkeyPatch, visible: str, said: str
) -> None:
    machine.torch(machine.plain(4)[3])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    (line,) = announced()
    assert said in line


def test_a_name_that_cuda_does_not_know_is_said(machine: FakeGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = machine.plain(2)
    machine.torch(ids[0])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,-1,1")
    found = find_gpus()
    assert found.ids == ids[:1]
    assert found.notes == ("CUDA_VISIBLE_DEVICES=0,-1,1 gives 1 GPU: CUDA takes no unknown and no doubled names",)


@pytest.mark.parametrize(
    ("torch", "said"),
    [
        (
            {"version": "2.13.0+cpu", "cuda": None},
            "torch 2.13.0+cpu is a build without CUDA and cannot use this machine's 4 GPUs; install one with CUDA",
        ),
        (
            {"error": "The NVIDIA driver on your system is too old (found version 11040)."},
            "torch 2.11.0+cu130 cannot use this machine's 4 GPUs (The NVIDIA driver on your system is too old (found "
            "version 11040).); update the driver",
        ),
    ],
)
def test_a_torch_that_cannot_use_the_gpus_is_said_and_trials_use_the_cpu(
    machine: FakeGpus, torch: dict[str, Any], said: str
) -> None:
    machine.plain(4)
    machine.torch(**torch)
    assert gpus_to_share(offer(2, 2), None).ids == ()
    (line,) = announced()
    assert line.startswith(f"trials use the CPU: {said}")


def test_a_driver_that_fails_is_said(machine: FakeGpus) -> None:
    machine.listed("Failed to initialize NVML: Driver/library version mismatch", status=18)
    (line,) = announced()
    assert line.startswith(
        "trials use the CPU: nvidia-smi fails (Failed to initialize NVML: Driver/library version mismatch); restart"
    )
    assert machine.times_asked() == 0


def test_torch_is_asked_once_while_it_sees_all_and_again_while_it_does_not(machine: FakeGpus) -> None:
    ids = machine.plain(2)
    machine.torch(ids[0])
    assert [find_gpus().ids for _ in range(2)] == [ids[:1]] * 2
    assert machine.times_asked() == 2
    machine.torch(*ids)
    assert [find_gpus().ids for _ in range(3)] == [ids] * 3
    assert machine.times_asked() == 3


def test_mig_instances_are_gpus_and_take_no_part_in_gangs(machine: FakeGpus) -> None:
    machine.listed(
        "GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-a1)",
        "  MIG 3g.20gb     Device  0: (UUID: MIG-1)",
        "  MIG 3g.20gb     Device  1: (UUID: MIG-2)",
        "GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-b1)",
    )
    machine.used()
    machine.torch("MIG-1")  # CUDA shows one to a process
    assert find_gpus().names == {"MIG-1": "MIG 0 of GPU 0", "MIG-2": "MIG 1 of GPU 0", "GPU-b1": "GPU 1"}
    assert announced(max_instances=3, gpus_per_instance=1, gpus_per_trial={"max": 1}) == []
    with pytest.raises(InputError, match=r"gpus_per_trial\.max=2: NCCL does not join MIG instances.* to 1"):
        announced(max_instances=3, gpus_per_instance=1, gpus_per_trial={"min": 1, "max": 2})


def test_a_gpu_that_others_use_is_left_out(machine: FakeGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = machine.plain(3)
    machine.used((ids[0], 20_480), (ids[1], 3), (ids[2], 900))
    found = gpus_to_share(offer(2), None)
    free = free_gpus(found, offer(2))
    assert free.ids == ids[1:]
    assert free.notes == ("others use 20.0 GiB of GPU 0, which is left out; name it in CUDA_VISIBLE_DEVICES to use it",)
    with pytest.raises(
        InputError, match=r"take 3 GPUs and 2 of this machine's 3 are free \(others use 20.0 GiB of GPU 0\)"
    ):
        free_gpus(found, offer(3))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    named = free_gpus(found, offer(3))
    assert named.ids == ids
    assert named.notes == ("others use 20.0 GiB of GPU 0, and trials use it too",)


def test_gpus_that_another_run_has_taken_are_not_free(machine: FakeGpus, tmp_path: Path) -> None:
    ids = machine.plain(2)
    machine.used((ids[0], 20_480), (ids[1], 3))  # of the run that has taken it
    found = gpus_to_share(offer(2), None)
    taken = take(ids[0], "first", tmp_path / "first")
    assert taken is not None
    with taken:
        assert take(ids[0], "second", tmp_path / "second") is None
        assert holder(ids[0]) == ("first", str(tmp_path / "first"))
        assert free_gpus(found, offer(1)).ids == ids, "it may be given back"
        with pytest.raises(InputError, match=r"1 of this machine's 2 are free \(first has taken GPU 0\); wait .* CPU"):
            free_gpus(found, offer(2))
        assert free_gpus(found, offer(2), tmp_path / "first").ids == ids
        with one_taken(ids, "check") as gpu:
            assert gpu == ids[1]
            assert holder(ids[1]) == ("check", ".")
            with one_taken(ids, "another") as beside:
                assert beside == ids[0]
    assert holder(ids[0]) is None
    assert holder(ids[1]) is None


def test_a_gpu_belongs_to_the_run_that_has_taken_it_last(machine: FakeGpus, tmp_path: Path) -> None:
    (gpu,) = machine.plain(1)
    for owner in ("the first run", "another"):
        taken = take(gpu, owner, tmp_path)
        assert taken is not None
        with taken:
            assert holder(gpu) == (owner, str(tmp_path))


def test_a_look_for_the_holder_takes_nothing(machine: FakeGpus, tmp_path: Path) -> None:
    (gpu,) = machine.plain(1)
    taken = take(gpu, "ended", tmp_path)
    assert taken is not None
    taken.close()
    (lock,) = gpus.machine_folder().glob("gpus/*.lock")
    with open(lock) as looker:
        assert try_lock(looker, SHARED)
        assert holder(gpu) is None


def test_gpus_that_are_named_are_not_taken_for_all_that_torch_sees(
    machine: FakeGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = machine.plain(2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    machine.torch(ids[1])
    assert find_gpus().ids == ids[1:]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    machine.torch(*ids)
    assert find_gpus().ids == ids


def test_torch_is_asked_again_after_a_boot(machine: FakeGpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver may be another one."""
    ids = machine.plain(2)
    monkeypatch.setattr(gpus, "_BOOT", tmp_path / "boot")
    for boot, seen in (("one", ids), ("another", ids[:1])):
        (tmp_path / "boot").write_text(boot)
        machine.torch(*seen)
        assert find_gpus().ids == seen


@pytest.fixture
def provider(machine: FakeGpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalProvider]:
    """One that starts no process."""
    opened = LocalProvider("run", tmp_path / "run", 2, devices=(A, B, C), token_path=tmp_path / "token")
    monkeypatch.setattr(RayHead, "ensure", lambda *_, **__: SimpleNamespace(address="127.0.0.1:1"))
    yield opened
    opened.close()


def test_an_instance_takes_all_of_its_gpus_or_none(provider: LocalProvider, tmp_path: Path) -> None:
    others = [take(gpu, "another", tmp_path / "another") for gpu in (A, C)]
    with pytest.raises(ProviderError, match=r"1 of this machine's 3 GPUs are free \(another has others\)"):
        provider.launch("a")
    assert holder(B) is None
    for each in others:
        assert each is not None
        each.close()


def test_a_launch_that_is_repeated_takes_the_same_gpus(
    provider: LocalProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record names them: its first process may never have begun."""
    held: list[list[str]] = []
    monkeypatch.setattr(Guards, "spawn", lambda *_: held.append([gpu for gpu in (A, B, C) if holder(gpu)]))
    for _ in range(2):
        provider.launch("a")
    assert held == [[A, B], [A, B]]


def test_a_gpu_is_waited_for_while_its_instance_ends(machine: FakeGpus, tmp_path: Path) -> None:
    before = take(A, "ending", tmp_path)
    assert before is not None
    ends = threading.Timer(0.1, before.close)
    ends.start()
    taken = take(A, "next", tmp_path, 10.0)
    ends.join()
    assert taken is not None
    taken.close()


def test_the_memory_of_the_smallest_gpu_is_known_unless_one_is_a_part_of_another(machine: FakeGpus) -> None:
    ids = machine.plain(2)
    machine.used((ids[0], 81_559), (ids[1], 40_960))  # the stand-in answers every question with these
    assert gpus.least_memory_bytes(ids) == 40_960 << 20
    assert gpus.least_memory_bytes(ids[:1]) == 81_559 << 20
    assert gpus.least_memory_bytes([*ids, "MIG-1"]) is None
    machine.listed(status=9)
    assert gpus.least_memory_bytes(ids) is None
