"""Peak host memory of each worker of a gang with a whole and with a divided model, on CPUs, and what a save costs.

Run: python -m tests.bench.bench_sharding [MILLIONS_OF_PARAMETERS [WORKERS]]

Workers are processes that have joined the gang; their memory is the peak above that (VmHWM and VmRSS of
/proc/self/status), once after the start and once after an iteration with AdamW. On CPUs weights, gradients and the
optimizer's states are in host memory too: 16 bytes a parameter, which a gang of n divides by n. A save stops training
for the copy; the file is written behind it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import rubberband
from rubberband.cloud.ray_head.ray_node import free_port
from rubberband.executor import CheckpointRef, TorchRunner, WorkerGang
from rubberband.executor.checkpoints import Payload
from tests.bench.bench_checkpoints import status
from tests.builders.segments import SEGMENT

LAYERS = 8


class Wide(rubberband.TorchTrial):
    """Square layers of that many parameters together."""

    batch_size = 8

    def build_model(self, config: Mapping[str, Any]) -> nn.Module:
        width = round((config["parameters"] / LAYERS) ** 0.5)
        return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))

    def build_optimizer(self, config: Mapping[str, Any], model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)

    def train_dataset(self, config: Mapping[str, Any]) -> TensorDataset:
        return TensorDataset(torch.randn(16, round((config["parameters"] / LAYERS) ** 0.5)))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[0])


class Divided(Wide):
    sharding = "fsdp"


def work(kind: type[Wide], rank: int, workers: int, port: int, parameters: float, folder: str, resumes: bool) -> None:
    torch.set_num_threads(1)
    rendezvous = f"tcp://127.0.0.1:{port}"
    place = {"rank": rank, "num_workers": workers, "rendezvous": rendezvous}
    segment = replace(SEGMENT, config={"parameters": parameters}, metric="train_loss", **place)
    gang = WorkerGang.join(rank=rank, num_workers=workers, rendezvous=rendezvous, device="cpu")
    held = Path(folder, "0") if resumes else None
    if held is not None:
        segment = replace(segment, from_iterations=1, checkpoint=CheckpointRef(url=str(held), digest="", size_bytes=0))
    before = status("VmRSS")
    runner = TorchRunner(kind(), segment, gang)
    runner.parts_held = [path for path in sorted(Path(folder).iterdir()) if path != held]
    runner.begin(held)
    started = status("VmHWM") - before
    runner.iterate(2 if resumes else 1)
    trained = status("VmHWM") - before
    runner.save = lambda iterations, payload: save(Path(folder, str(rank)), payload)
    began = time.perf_counter()
    payload = runner.dump(1, {}) if rank == 0 else runner.dump_part(1)
    stopped_s = time.perf_counter() - began
    if payload is not None and not resumes:
        save(Path(folder, "0"), payload)
        runner.parts()
    runner.part()
    size = Path(folder, str(rank)).stat().st_size / 2**20 if Path(folder, str(rank)).exists() else 0.0
    found = {"rank": rank, "started": started, "trained": trained, "stopped_ms": 1e3 * stopped_s, "file": size}
    print(json.dumps({name: round(value) for name, value in found.items()}) + "\n", end="", flush=True)


def save(path: Path, payload: Payload) -> CheckpointRef:
    assert callable(payload)
    payload(path)
    return CheckpointRef(url=str(path), digest="", size_bytes=path.stat().st_size)


def main() -> None:
    parameters = 1e6 * float(sys.argv[1] if len(sys.argv) > 1 else 32)
    workers = int(sys.argv[2]) if len(sys.argv) > 2 else 4
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**20)  # else glibc keeps what parts leave, and all looks like in use
    context = multiprocessing.get_context("spawn")
    whole = 4 * parameters / 2**20
    print(f"{parameters / 1e6:.0f} million parameters: {whole:.0f} MiB of weights, {4 * whole:.0f} MiB with AdamW")
    for kind in (Wide, Divided):
        with tempfile.TemporaryDirectory() as folder:
            for resumes in (False, True):
                print(f"{kind.__name__}, {'from its checkpoint' if resumes else 'from the beginning'}:", flush=True)
                port = free_port()
                words = (workers, port, parameters, folder, resumes)
                gang = [context.Process(target=work, args=(kind, rank, *words)) for rank in range(workers)]
                for process in gang:
                    process.start()
                for process in gang:
                    process.join()


if __name__ == "__main__":
    main()
