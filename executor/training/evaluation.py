"""Evaluation of a `TorchTrial`: the loader of its evaluation set, and the metrics of all ranks made one.

The set is divided into the same batches for every gang, and each rank takes consecutive batches of it. So the metrics
do not depend on the number of workers, also where the loss of a batch is no mean over its samples.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from rubberband.executor.training.data import Collate, Feed, num_samples
from rubberband.executor.training.gang import Gang
from rubberband.executor.training.gpu_rows import Residence
from rubberband.executor.training.loading import LoaderSettings, Part
from rubberband.executor.training.means import Means, checked_weight, loss_and_metrics
from rubberband.executor.training.memory import is_out_of_memory, release
from rubberband.executor.training.runner import refused, to_float
from rubberband.executor.training.sampler import reseed, reseed_data
from rubberband.executor.training.segment import Segment
from rubberband.executor.training.torch_trial import Mean, TorchTrial, override_of
from rubberband.units import counted

EVALUATED_AT = "evaluated_at"
"""Metric of trials that do not evaluate every iteration: the iteration whose evaluation a report has."""


class EvalLoader:
    """The evaluation set in order, as batches on the device; it can be iterated any number of times."""

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        batch_size: int,
        device: torch.device,
        collate: Collate | None,
        rank: int = 0,
        num_workers: int = 1,
        seed: int = 0,
        settings: LoaderSettings | None = None,
        residence: Residence | None = None,
    ) -> None:
        """`rank` of `num_workers` takes its part of the batches; the first ranks take one more.

        With `settings`, loader workers load them ahead, the first ones of the next evaluation too.
        """
        self.dataset = dataset
        total = num_samples(dataset, "eval_dataset()")
        parts = [np.arange(start, min(start + batch_size, total)) for start in range(0, total, batch_size)]
        mine = np.array_split(np.arange(len(parts)), num_workers)[rank]
        self._parts = [parts[index] for index in mine]
        self.device = device
        self._feed = Feed(
            dataset,
            device=device,
            collate=collate,
            seed=seed,
            batch_size=batch_size,
            what="eval_dataset()",
            settings=settings,
            most_workers=len(parts),
            residence=residence,
        )
        self._feed.ahead = self._again

    @property
    def sizes(self) -> list[int]:
        """Samples in each batch."""
        return [len(part) for part in self._parts]

    def halve(self) -> int:
        """Make two batches of each; return the samples of the largest, 0 if no batch can be divided."""
        self._feed.leave_device()
        if max(self.sizes) == 1:
            return 0
        self._parts = [half for part in self._parts for half in np.array_split(part, 2) if len(half)]
        return max(self.sizes)

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[Any]:
        parts = list(self._parts)
        self._feed.follow()
        self._feed.expect(parts, 0)
        return map(self._feed.load, parts)

    def close(self) -> None:
        """End the loader workers."""
        self._feed.close()

    def _again(self) -> Iterator[Part]:
        return itertools.cycle([Part(indices=part, epoch=0) for part in self._parts])


class Evaluation:
    """Evaluates a trial after its iterations: on all ranks where `evaluate` returns sums, on rank 0 alone otherwise."""

    def __init__(self, trial: TorchTrial, segment: Segment, gang: Gang, *, every: int) -> None:
        self._trial = trial
        self._segment = segment
        self._gang = gang
        self._every = every
        self.on_all_ranks = type(trial).evaluate is TorchTrial.evaluate or trial.eval_on_all_ranks
        """Whether each rank evaluates its part of the set."""
        self._loader: EvalLoader | None = None
        self._latest: dict[str, Any] | None = None
        """The metrics of the latest evaluation, on rank 0, with its iteration; None before the first one."""

    def load(
        self,
        *,
        batch_size: int,
        device: torch.device,
        collate: Collate | None,
        settings: LoaderSettings | None = None,
        residence: Residence | None = None,
    ) -> None:
        """Make the loader, on the ranks that evaluate."""
        segment = self._segment
        if not self.on_all_ranks and segment.rank > 0:
            return
        reseed_data(segment.seed, segment.data_seed)
        dataset = self._trial.eval_dataset(segment.config)
        if dataset is None:
            return
        rank, num_workers = (segment.rank, segment.num_workers) if self.on_all_ranks else (0, 1)
        self._loader = EvalLoader(
            dataset,
            batch_size=batch_size,
            device=device,
            collate=collate,
            rank=rank,
            num_workers=num_workers,
            seed=segment.seed,
            settings=settings,
            residence=residence,
        )

    def close(self) -> None:
        """End the loader workers."""
        if self._loader is not None:
            self._loader.close()

    def is_regular(self, iterations: int) -> bool:
        """Whether `eval_every` calls for an evaluation, wherever segments begin and end."""
        return iterations % self._every == 0

    def metrics(self, module: torch.nn.Module, iterations: int, *, ends: bool = False) -> Mapping[str, Any]:
        """Evaluate after that many iterations, or return the latest metrics if it is not due; called on every rank.

        It is due every `eval_every` iterations, at the end of a segment or of the trial (`ends`), and where nothing has
        been evaluated yet.
        Empty without an evaluation set, and on ranks other than 0.
        """
        ends = ends or iterations == self._segment.until_iterations
        is_due = ends or self.is_regular(iterations) or self._latest is None
        if is_due:
            found = self._evaluated(module, iterations)
            at = {EVALUATED_AT: iterations} if found and self._every > 1 else {}
            self._latest = {**found, **at}
        return self._latest or {}

    def state(self) -> dict[str, Any] | None:
        """Return plain values for `restore`; None if every iteration is evaluated."""
        if self._every == 1 or self._latest is None:
            return None
        floats = {name: to_float(value) for name, value in self._latest.items()}
        return {name: value for name, value in floats.items() if value is not None}

    def restore(self, state: dict[str, Any] | None) -> None:
        """Continue from the `state`."""
        self._latest = state

    def _evaluated(self, module: torch.nn.Module, iterations: int) -> Mapping[str, Any]:
        if not self.on_all_ranks:
            return {} if self._loader is None else self._call(module, self._loader, iterations)
        if self._loader is None:
            return {}
        found = self._call(module, self._loader, iterations) if len(self._loader) else {}
        return _joined(self._gang.gather({name: _sums(name, value) for name, value in found.items()}))

    def _call(self, module: torch.nn.Module, loader: EvalLoader, iterations: int) -> Mapping[str, Any]:
        """Return the trial's own metrics; where memory runs out, again in batches of half the size."""
        while True:
            rank = self._segment.rank
            reseed("evaluate", self._segment.seed, iterations, *([rank] if rank else []))
            module.eval()
            try:
                with torch.no_grad():
                    metrics: Any = self._trial.evaluate(module, loader)
                break
            except RuntimeError as error:
                size = loader.halve() if is_out_of_memory(error) else 0
                if size == 0:
                    raise
            print(
                f"rubberband: evaluation ran out of memory; its batches have {counted(size, 'sample')} now", flush=True
            )
            release(loader.device)
        if not isinstance(metrics, Mapping):
            raise TypeError(f"evaluate() must return a mapping of metrics, not {type(metrics).__name__}")
        return metrics


def _sums(name: str, value: Any) -> tuple[float, float]:
    if isinstance(value, Mean):
        return value.sum, value.count
    raise refused(
        f"evaluate() returned {name} as a {type(value).__name__}, which the workers cannot join; return "
        f"rubberband.Mean(sum, count), or set eval_on_all_ranks = False",
    )


def _joined(sums: list[dict[str, tuple[float, float]]]) -> dict[str, Mean]:
    names = dict.fromkeys(name for found in sums for name in found)
    parts = {name: [found[name] for found in sums if name in found] for name in names}
    return {
        name: Mean(math.fsum(total for total, _ in own), math.fsum(count for _, count in own))
        for name, own in parts.items()
    }


def mean_loss(trial: TorchTrial, model: torch.nn.Module, loader: EvalLoader) -> dict[str, Mean]:
    """Return the loss and the metrics of `trial.loss` over this worker's part of the set, by what batches count."""
    weight, means = override_of(trial, "weight"), Means(loader.device)
    for batch, size in zip(loader, loader.sizes, strict=True):
        counts = size if weight is None else checked_weight(weight(batch), loader.device)
        means.add(counts, *loss_and_metrics(trial.loss(model, batch)))
    total, sums = means.sums()
    return {name: Mean(value, total) for name, value in sums.items()}
