"""Functions that run in every worker of a gang."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import rubberband


@rubberband.distributed
def ddp(config: dict[str, Any]) -> None:
    """A line, by DistributedDataParallel; its checkpoint is a folder."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    assert (rank, size) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    begin, folder = 0, rubberband.get_checkpoint()
    if folder is not None:
        state = torch.load(Path(folder, "state.pt"))
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        begin = state["epoch"]
    trained = torch.nn.parallel.DistributedDataParallel(model)
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1), dtype=torch.double)
    y = x.sum(1, keepdim=True)
    share = rubberband.per_worker(16)
    for epoch in range(begin + 1, 9):
        for batch in torch.arange(64).split(16):
            mine = batch[rank * share : (rank + 1) * share]
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(trained(x[mine]), y[mine]).backward()
            optimizer.step()
        with torch.no_grad():
            loss = torch.nn.functional.mse_loss(model(x), y).item()
        saved = Path("saved") if config.get("here") else Path(os.environ["RUBBERBAND_CHECKPOINT"])
        if rank == 0:
            torch.save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, saved / "state.pt"
            )
        rubberband.report({"loss": loss}, checkpoint=saved)


@rubberband.distributed
def raises_at_rank_1(config: dict[str, Any]) -> None:
    """Fails on one of two workers, while the other one is in a collective."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise KeyError("no such sample")
    dist.all_reduce(torch.zeros(1))


@rubberband.distributed
def without_report(config: dict[str, Any]) -> None:
    """Returns at once."""


@rubberband.distributed
def returns_metrics(config: dict[str, Any]) -> dict[str, float]:
    """Trains in one go."""
    return {"loss": 0.5}


@rubberband.distributed
def odd_batch(config: dict[str, Any]) -> None:
    rubberband.report({"loss": float(rubberband.per_worker(15))})


@rubberband.distributed
def ends(config: dict[str, Any]) -> None:
    for loss in (2.0, 1.0):
        rubberband.report({"loss": loss})


@rubberband.distributed
def accelerated(config: dict[str, Any]) -> None:
    """A loop of Accelerate, as its quick tour has it, and `per_worker`."""
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator()
    assert accelerator.num_processes == int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1), dtype=torch.double)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    loader = torch.utils.data.DataLoader(data, batch_size=rubberband.per_worker(16))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    begin, folder = 0, rubberband.get_checkpoint()
    if folder is not None:
        accelerator.load_state(folder)
        begin = int(Path(folder, "epoch").read_text())
    for epoch in range(begin + 1, 9):
        total = torch.zeros((), dtype=torch.double)
        for inputs, targets in loader:
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            total += accelerator.reduce(loss.detach(), reduction="mean")
        saved = os.environ["RUBBERBAND_CHECKPOINT"]
        accelerator.save_state(saved)
        if accelerator.is_main_process:
            Path(saved, "epoch").write_text(str(epoch))
        rubberband.report({"loss": total.item()}, checkpoint=saved)


@rubberband.distributed
def draws(config: dict[str, Any]) -> None:
    """Reports its first random number, that of the last rank, and the rank that it was given."""
    import torch.distributed as dist

    drawn: list[Any] = [None] * int(os.environ["WORLD_SIZE"])
    first = random.random()
    dist.init_process_group("gloo")
    dist.all_gather_object(drawn, first)
    while True:
        dist.barrier()  # as training does: no worker writes while rank 0 still reports
        Path(os.environ["RUBBERBAND_CHECKPOINT"], "drawn").touch()
        rubberband.report({"loss": first, "of_last": drawn[-1], "rank": float(os.environ["RANK"])})
