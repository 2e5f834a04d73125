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

import itertools
import uuid
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from rubberband.executor.training.asynchronous.servers import Servers, ServerSnapshot
from rubberband.executor.training.asynchronous.shards import largest_share, trained_parameters
from rubberband.executor.training.failures import refused
from rubberband.executor.training.gang import Gang
from rubberband.executor.training.loading import Part
from rubberband.executor.training.loop import TorchRunner
from rubberband.executor.training.metrics import Means
from rubberband.executor.training.runner import Steps, clean_metrics
from rubberband.executor.training.sampler import Batching, FixedBatching, GlobalBatch, reseed
from rubberband.executor.training.segment import BatchReport, Segment
from rubberband.executor.training.torch_trial import TorchTrial, fault_of_words
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
        self._trained = trained_parameters(self.module)
        self._check()
        self._clip_norm = trial.gradient_clip_norm

    def _check(self) -> None:
        trial, servers = self.trial, self._training.servers
        fault = fault_of_words(trial, self._training, self._workers)
        if self.feed.is_stream:
            fault = (
                "train_dataset() returned a dataset that is read from front to end, and asynchronous workers take "
                "batches in any order; return one with len and [i], or set training.mode to sync"
            )
        if servers > len(self._trained):
            fault = (
                f"training.servers={servers} are more than the tensors that are trained ({len(self._trained)}), and "
                f"none is divided; lower it to {len(self._trained)}"
            )
        given = {id(each) for group in self.optimizers.members[0].param_groups for each in group["params"]}
        if given - {id(each) for each in self.module.parameters()}:
            fault = (
                "the optimizer has parameters that are not the model's, and the servers hold the model; make them "
                "part of the model, or set training.mode to sync"
            )
        if fault is not None:
            raise refused(fault)

    def _make_batching(self) -> Batching:
        found = super()._make_batching()
        assert isinstance(found, FixedBatching), "the edge refuses adaptive batches"
        return Updates(found.sampler, found.batch_size, found.per_gpu, found.samples_per_iteration)

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
        worker = f"{self._rank:05d}-{uuid.uuid4().hex[:8]}"
        self._name = worker
        self._servers.join(worker, 1 + self.feed.parts_ahead, closes=self._rank == 0)
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
        evaluated = self._evaluated(iterations)
        metrics = clean_metrics({**trained, **evaluated}, segment.metric)
        states = self._servers.close_iteration(iterations, self._for_plateau(metrics, iterations))
        if states is not None:
            groups = states["optimizer"]["param_groups"]
            optimizer = {**snapshot.optimizer, "param_groups": groups}
            self._snapshot = replace(snapshot, optimizer=optimizer, scheduler=states["scheduler"])
        self.ended = self._ends()
        return metrics

    def _for_plateau(self, metrics: Mapping[str, float], iterations: int) -> float | None:
        """Return the metric that ReduceLROnPlateau steps with; None if there is none, or it is not due."""
        watched = self.schedule.watched(metrics)
        is_due = self.schedule.has_plateau and self.evaluation.is_regular(iterations)
        return metrics[watched] if is_due else None

    def _until(self, iterations: int) -> Generator[None]:
        """Exchange gradients until that iteration is complete; pause after each, and once in a segment at least."""
        servers = self._servers
        self.step.begin()
        self.trial.on_iteration(self.module, iterations)
        changed = trained_parameters(self.module).keys() ^ self._trained.keys()
        if changed:
            raise refused(
                f"on_iteration() or train_mode() freezes or thaws {min(changed)}, and the parameter servers hold what "
                "build_model() leaves to train; do it there, or set training.mode to sync"
            )
        if self._is_behind:
            servers.pull()
            self._is_behind = False
        while not servers.is_over and servers.cut < iterations:
            weight, sums = self._gradient()
            self._clip()
            servers.exchange(weight, sums)
            self._has_paused = True
            yield
        if not self._has_paused:
            self._has_paused = True
            yield

    def _gradient(self) -> tuple[float, dict[str, float]]:
        """Compute the gradient of this worker's next samples; return what it counts, and the sums of its losses."""
        batch = self._batch(self._servers.tickets[0])
        if not batch.size:
            return 0.0, {}
        means = Means(self.device)
        self.step.take(batch, means)
        for parameter in self._trained.values():
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                raise refused(
                    "a gradient is sparse, and parameter servers take dense ones; build the embedding with "
                    "sparse=False, or set training.mode to sync",
                )
        weight, sums = means.sums()
        return weight, {"": weight, **sums}

    def _clip(self) -> None:
        if self._clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(list(self._trained.values()), self._clip_norm)

    def _batch(self, ticket: int) -> GlobalBatch:
        """Return this worker's samples of a batch, by its number."""
        total, size = self.feed.num_samples, self.batch_size
        per_epoch = self._boundary_of_epoch()
        epoch, place = divmod(ticket, per_epoch)
        self.sampler.move_to(epoch, min(place * size, total - 1))
        members = self._servers.members if self._training.max_staleness == 0 else [self._name]
        whole = self.sampler.next_shared(size, max(1, len(members)), even_shares)
        mine = whole.of(members.index(self._name)) if self._name in members else whole.indices[:0]
        return GlobalBatch(indices=mine, shares=(len(mine),), epoch=whole.epoch)

    def _boundary_of_epoch(self) -> int:
        total, size = self.feed.num_samples, self.batch_size
        return total // size if self.trial.drop_last else -(-total // size)

    def _parts_ahead(self) -> Iterator[Part]:
        """Iterate over what this worker will load after the present step, as far as its tickets go; then guess."""
        present = self.step.begun

        def parts() -> Iterator[Part]:
            last = self._servers.tickets[0]
            for step in itertools.count(present + 1):
                later = [ticket for ticket in self._servers.tickets if ticket > last]
                last = later[0] if later else last + 1
                batch = self._batch(last)
                for part in self.step.parts(batch, step - self.step.begun)[0]:
                    yield Part(indices=part, epoch=batch.epoch)

        return parts()

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

    def _states(self) -> dict[str, Any]:
        """Return the states; those of optimizer and LR schedule are the servers', at the end of the iteration."""
        assert self._snapshot is not None
        own = {"optimizer": self._snapshot.optimizer, "scheduler": self._snapshot.scheduler}
        return {**super()._states(), **own}

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
        epoch, place = divmod(data["next_ticket"], self._boundary_of_epoch())
        self.sampler.move_to(epoch, min(place * self.batch_size, self.feed.num_samples - 1))
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
