"""The training loop of a `TorchTrial` on one worker of an asynchronous gang.

* A worker trains like a gang of one, up to the gradient: it takes a batch of M samples of its own (`protocol.py`), and
  exchanges its gradient for parameters. An update is an optimizer step, made by the servers, and an iteration has as
  many updates as synchronous training has steps.
* With max_staleness 0 all workers share each batch as in synchronous training, and the result is the same.
* Rank 0 evaluates alone, on the snapshot of an iteration; the others go on with the next one. Buffers of the model,
  such as BatchNorm's statistics, stay with each worker, and those of rank 0 are evaluated and saved.
* Gradients are clipped on each worker.
"""

from __future__ import annotations

import uuid
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from rubberband.executor.training.asynchronous.servers import Servers, ServerSnapshot
from rubberband.executor.training.asynchronous.shards import largest_share, trained_parameters
from rubberband.executor.training.failures import refused
from rubberband.executor.training.gang import Gang
from rubberband.executor.training.loop import TorchRunner
from rubberband.executor.training.metrics import Means
from rubberband.executor.training.reported import clean_metrics
from rubberband.executor.training.runner import Steps
from rubberband.executor.training.sampler import FixedBatching, GlobalBatch, GlobalBatchSampler, reseed
from rubberband.executor.training.segment import BatchReport, Segment
from rubberband.executor.training.torch_trial import ASYNC_REFUSAL, TorchTrial
from rubberband.executor.training.waits import WaitClock
from rubberband.values.asynchronous import AsyncUse
from rubberband.values.balance import even_shares


@dataclass(eq=False)
class Updates(FixedBatching):
    """Batches of one size whose gradients are left to the servers; and the position of the data."""

    data: dict[str, Any] = field(default_factory=lambda: {"next_ticket": 0, "returned": []})
    """Number of the next batch that no worker has taken, and of those that were taken and not used."""

    def update(self, optimizer: torch.optim.Optimizer, step: Any) -> bool:
        return True

    def state_dict(self) -> dict[str, Any] | None:
        return {**(super().state_dict() or {}), "data": self.data}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        if state is None or "data" not in state:
            raise KeyError("it was written by synchronous training")
        super().load_state_dict(state)
        self.data = state["data"]


def make_runner(trial: TorchTrial, segment: Segment) -> AsyncRunner | None:
    """Return the runner of a trial that is trained with parameter servers; None for any other."""
    return None if segment.training is None else AsyncRunner(trial, segment)


def make_batching(loop: TorchRunner) -> Updates | None:
    """Return the batches of a worker with parameter servers; None for any other."""
    if not isinstance(loop, AsyncRunner):
        return None
    size = loop.batch_size
    return Updates(loop.sampler, size, min(size, loop.limit or size), loop.samples_per_iteration)


class AsyncRunner(TorchRunner):
    """Trains a `TorchTrial` with parameter servers, which listen already."""

    def __init__(self, trial: TorchTrial, segment: Segment) -> None:
        assert segment.training is not None
        self._rank, self._training = segment.rank, segment.training
        self._workers = segment.num_workers
        self._order = segment
        self._has_paused = False
        self._is_behind = False
        """Whether the model holds an iteration's snapshot, not the servers' parameters."""
        self._snapshot: ServerSnapshot | None = None
        alone = replace(segment, rank=0, num_workers=1, rendezvous=None)
        super().__init__(trial, alone, Gang(0, 1, None))
        self._exchanging = WaitClock()
        self.waited = {**self.waited, "peers": self._exchanging.seconds}
        self._trained = trained_parameters(self.module)
        self._check()
        total, size = self.feed.num_samples, self.batch_size
        self._per_epoch = total // size if trial.drop_last else -(-total // size)

    def _check(self) -> None:
        trial, servers = self.trial, self._training.servers
        if servers > len(self._trained):
            raise refused(
                f"training.servers={servers} are more than the tensors that are trained ({len(self._trained)}), and "
                f"none is divided; lower it to {len(self._trained)}"
            )
        given = {id(each) for group in self.optimizers.members[0].param_groups for each in group["params"]}
        shared_clip = trial.gradient_clip_norm and self._training.max_staleness == 0 and self._workers > 1
        refusals = {
            'precision = "fp16"': trial.precision == "fp16",
            "gradient_compression": trial.gradient_compression,
            "static_graph": trial.static_graph,
            "find_unused_parameters": trial.find_unused_parameters,
            "gradient_clip_norm with max_staleness: 0": shared_clip,
            "a dataset that is read from front to end": self.feed.is_stream,
            "an optimizer with parameters that are not the model's": given - {*map(id, self.module.parameters())},
        }
        for what, is_there in refusals.items():
            if is_there:
                raise refused(f"{what} {ASYNC_REFUSAL}")

    def begin(self, payload: bytes | Path | None) -> int:
        """Begin as `Runner` says; rank 0 sends the state to the servers, unless they have it and train already."""
        held = super().begin(payload)
        optimizer = self.optimizers.members[0]
        self._servers = Servers(
            self._order.servers,
            self._order.secret,
            self._trained,
            pulls_later=self._training.max_staleness not in (None, 0),
        )
        done = held
        if self._rank == 0:
            closed = self._servers.closed()
            if closed is None:
                self._servers.begin(self._beginning(held), optimizer, self.schedule.state_dict())
            else:
                done = max(held, min(closed, self._order.from_iterations))
        optimizer.state.clear()
        self._name = f"{self._rank:05d}-{uuid.uuid4().hex[:8]}"
        self._servers.join(self._name, 1 + self.feed.parts_ahead, closes=self._rank == 0)
        return done

    def _beginning(self, iteration: int) -> dict[str, Any]:
        """Return what the servers must know of a segment that begins after that iteration."""
        data = self._updates.data
        return {
            "iteration": iteration,
            "boundaries": [self.fixed_steps(each) for each in range(iteration, self._order.until_iterations + 1)],
            "total_steps": self.schedule.total_steps,
            "next_ticket": data["next_ticket"],
            "returned": data["returned"],
        }

    @property
    def _updates(self) -> Updates:
        assert isinstance(self.batching, Updates)
        return self.batching

    def steps(self, iterations: int) -> Steps:
        """Take part until that iteration is complete; on rank 0, evaluate its snapshot and step ReduceLROnPlateau."""
        segment = self._order
        reseed("train", segment.seed, iterations, segment.rank)
        yield from self._until(iterations)
        if segment.rank > 0:
            self.ended = self._servers.is_over and self._servers.cut < iterations
            return {}
        self._snapshot = snapshot = self._servers.snapshot(iterations, self.optimizers.members[0])
        self._is_behind = True
        sums = dict(snapshot.sums)
        weight = sums.pop("", 0.0)
        trained = {f"train_{name}": total / weight for name, total in sums.items()} if weight else {}
        evaluated = self.evaluated(iterations)
        metrics = clean_metrics({**trained, **evaluated}, segment.metric)
        watched = self.schedule.watched(metrics)
        is_due = self.schedule.has_plateau and self.evaluation.is_regular(iterations)
        states = self._servers.close_iteration(iterations, metrics[watched] if is_due else None)
        if states is not None:
            groups = states["optimizer"]["param_groups"]
            optimizer = {**snapshot.optimizer, "param_groups": groups}
            self._snapshot = replace(snapshot, optimizer=optimizer, scheduler=states["scheduler"])
        self.ended = self.ends()
        return metrics

    def _until(self, iterations: int) -> Generator[None]:
        """Exchange gradients until that iteration is complete; pause after each, and once in a segment at least."""
        servers = self._servers
        self.step.begin()
        self.trial.on_iteration(self.module, iterations)
        changed = trained_parameters(self.module).keys() ^ self._trained.keys()
        if changed:
            raise refused(f"a hook that freezes or thaws {min(changed)} {ASYNC_REFUSAL}")
        if self._is_behind:
            servers.pull()
            self._is_behind = False
        while not servers.is_over and servers.cut < iterations:
            weight, sums = self._gradient()
            if self.trial.gradient_clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(list(self._trained.values()), self.trial.gradient_clip_norm)
            with self._exchanging:
                servers.exchange(weight, sums)
            self._has_paused = True
            yield
        if not self._has_paused:
            self._has_paused = True
            yield

    def _gradient(self) -> tuple[float, dict[str, float]]:
        """Compute the gradient of this worker's next samples; return what it counts, and the sums of its losses."""
        batch = self.next_batch(self.sampler)
        if not batch.size:
            return 0.0, {}
        means = Means(self.device)
        self.step.take(batch, means)
        for parameter in self._trained.values():
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                raise refused(f"a sparse gradient {ASYNC_REFUSAL}")
        weight, sums = means.sums()
        return weight, {"": weight, **sums}

    def next_batch(self, sampler: GlobalBatchSampler) -> GlobalBatch:
        """Return this worker's samples of the batch of its ticket; of a later one by a copy of the sampler.

        Beyond its tickets, those that follow are guessed.
        """
        ticket = self._servers.tickets[0]
        if sampler is not self.sampler:
            due = sampler.epoch * self._per_epoch + -(-sampler.position // self.batch_size)
            ticket = next((each for each in self._servers.tickets if each >= due), due)
        self._move(sampler, ticket)
        members = self._servers.members if self._training.max_staleness == 0 else [self._name]
        whole = sampler.next_shared(self.batch_size, max(1, len(members)), even_shares)
        mine = whole.of(members.index(self._name)) if self._name in members else whole.indices[:0]
        return GlobalBatch(indices=mine, shares=(len(mine),), epoch=whole.epoch)

    def _move(self, sampler: GlobalBatchSampler, ticket: int) -> None:
        epoch, place = divmod(ticket, self._per_epoch)
        sampler.move_to(epoch, min(place * self.batch_size, self.feed.num_samples - 1))

    def batch_report(self) -> BatchReport:
        if self._snapshot is None:
            return BatchReport()
        sizes = self._servers.sizes_bytes
        return BatchReport(
            updates=AsyncUse(
                servers=self._training.servers,
                largest_shard=largest_share(sizes, self._training.servers),
                **self._snapshot.use,
            )
        )

    def states(self) -> dict[str, Any]:
        """Return the states; those of optimizer and LR schedule are the servers', at the end of the iteration."""
        assert self._snapshot is not None
        own = {"optimizer": self._snapshot.optimizer, "scheduler": self._snapshot.scheduler}
        return {**super().states(), **own}

    def dump(self, iterations: int, metrics: Mapping[str, float], *, is_last: bool = False) -> Any:
        """The same content as that of synchronous training; and the batches that workers hold."""
        assert self._snapshot is not None
        data = self._snapshot.data
        unused = [ticket for held in data["held"].values() for ticket in held]
        self._updates.data = {
            "next_ticket": data["next_ticket"],
            "returned": sorted([*data["returned"], *unused]),
            "held": data["held"],
        }
        self._move(self.sampler, data["next_ticket"])
        self.counter.count = self.fixed_steps(iterations)
        return super().dump(iterations, metrics, is_last=is_last)

    def part(self) -> None:
        if self._rank == 0:
            self._servers.finish()
        super().part()

    def close(self) -> None:
        if hasattr(self, "_servers"):
            self._servers.close()
        super().close()
