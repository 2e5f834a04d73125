"""Losses and metrics of a `TorchTrial`: weighted means over the micro-batches of all workers of its gang; evaluation.

Sums stay on the device until the end of an iteration, so that no step waits for it.

The evaluation set is divided into the same batches for every gang, and each rank takes consecutive batches of it. So
the metrics do not depend on the number of workers, also where the loss of a batch is no mean over its samples.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from rubberband.executor.training.components import Component
from rubberband.executor.training.data import Feed, num_samples
from rubberband.executor.training.failures import RanOut, is_out_of_memory, one_line, refused, release
from rubberband.executor.training.gang import Gang
from rubberband.executor.training.loading import Part
from rubberband.executor.training.reported import to_float
from rubberband.executor.training.sampler import Indices, reseed
from rubberband.executor.training.segment import Segment
from rubberband.executor.training.torch_trial import Mean, TorchTrial, override_of
from rubberband.units import counted
from rubberband.values.stopping import EVALUATED_AT

Within = Callable[[Callable[[], Any]], Any]
"""Calls what passes through the model, and returns what that does."""
Weight = float | torch.Tensor
"""Weight of a batch: a number, or a scalar tensor on the device."""


def loss_and_metrics(returned: Any, method: str = "loss()") -> tuple[torch.Tensor, Mapping[str, Any]]:
    """Return the loss and the metrics, if any, that a trial's `method` returned. Raises TypeError or ValueError."""
    metrics: Any = {}
    loss = returned
    if isinstance(returned, tuple) and len(returned) == 2:
        loss, metrics = returned
    if not isinstance(loss, torch.Tensor) or not isinstance(metrics, Mapping):
        kinds = f"({type(loss).__name__}, {type(metrics).__name__})" if loss is not returned else type(loss).__name__
        raise TypeError(f"{method} returned {kinds}; return the mean loss, a tensor, or (loss, mapping of metrics)")
    if loss.dim() != 0:
        raise ValueError(f"{method} returned a loss of shape {tuple(loss.shape)}; return its mean, a scalar")
    return loss, metrics


def checked_weight(value: Any, device: torch.device) -> Weight:
    """Return what `weight(batch)` returned, on the device. Raises TypeError or ValueError.

    The value of a tensor on a GPU is not looked at, as that would wait for the GPU: see `Means.reduce`.
    """
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ValueError(f"weight() returned a tensor of shape {tuple(value.shape)}; return one number, its sum")
        if value.device.type != "cpu":
            return value.detach().reshape(()).to(device, torch.float64)
        value = value.item()
    number = to_float(value)
    if number is None:
        raise TypeError(f"weight() returned {type(value).__name__}; return the number that the batch counts")
    if not 0.0 <= number < math.inf:
        raise ValueError(_not_a_weight(number))
    return number


def _not_a_weight(value: object) -> str:
    return f"weight() returned {value}; return a finite number of at least 0, such as the tokens of the batch"


class Means:
    """Sums of one iteration on one worker."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._loss: torch.Tensor | float = 0.0
        self._weight: Weight = 0.0
        self._metrics: dict[str, torch.Tensor | float] | None = None

    def add(self, weight: Weight, loss: torch.Tensor, metrics: Mapping[str, Any]) -> None:
        """Add the means of a micro-batch that counts `weight`. Raises TypeError or ValueError for bad metrics."""
        self._loss = self._loss + _counted(loss.detach().double(), weight)
        self._weight = self._weight + weight
        sums = self._same(metrics)
        for name, total in sums.items():
            sums[name] = total + _counted(self._value(name, metrics[name]), weight)

    def join(self, found: Means) -> None:
        """Add the sums of another part of the iteration. Raises ValueError for other metrics than before."""
        self._loss = self._loss + found._loss
        self._weight = self._weight + found._weight
        sums = self._same(found._metrics or {})
        for name, total in sums.items():
            sums[name] = total + (found._metrics or {})[name]

    def _same(self, metrics: Mapping[str, Any]) -> dict[str, torch.Tensor | float]:
        """Return the sums of the metrics, which are the same in every batch."""
        if self._metrics is None:
            self._metrics = {_name(name): 0.0 for name in metrics}
        if self._metrics.keys() != metrics.keys():
            before, now = (", ".join(sorted(map(str, names))) or "none" for names in (self._metrics, metrics))
            raise ValueError(f"loss() returned other metrics than before ({now}; before: {before}); return the same")
        return self._metrics

    def reduce(self, gang: Gang) -> dict[str, float]:
        """Return the means over the gang, `loss` and the metrics by their names; every worker calls it.

        Raises ValueError if all weights are 0, or one was no weight.
        """
        total, sums = self.sums(gang)
        if not 0.0 < total < math.inf:
            none = "weight() returned 0 for every batch; return what counts in a batch, such as its tokens"
            raise ValueError(none if total == 0.0 else _not_a_weight(total))
        return {name: value / total for name, value in sums.items()}

    def sums(self, gang: Gang | None = None) -> tuple[float, dict[str, float]]:
        """Return the sum of the weights, and the weighted sums by name, of this worker or of all of a gang."""
        metrics = self._metrics or {}
        names = sorted(metrics)
        values = [self._weight, self._loss, *(metrics[name] for name in names)]
        found = torch.stack([torch.as_tensor(value, dtype=torch.float64, device=self._device) for value in values])
        total, *sums = (found if gang is None else gang.sum(found)).tolist()
        return total, dict(zip(["loss", *names], sums, strict=True))

    def _value(self, name: str, value: Any) -> torch.Tensor | float:
        if isinstance(value, torch.Tensor):
            if value.numel() != 1:
                raise ValueError(f"loss() returned the metric {name!r} of shape {tuple(value.shape)}; return its mean")
            return value.detach().reshape(()).to(self._device, torch.float64)
        number = to_float(value)
        if number is None:
            raise TypeError(f"loss() returned the metric {name!r} as {type(value).__name__}; return a number")
        return number


def _counted(value: torch.Tensor | float, weight: Weight) -> torch.Tensor | float:
    """Return value * weight; 0 for a weight of 0, even if the mean over nothing is no number."""
    if isinstance(weight, torch.Tensor):
        return torch.where(weight > 0.0, value * weight, 0.0)
    return value * weight if weight else 0.0


def _name(name: Any) -> str:
    if not isinstance(name, str) or name == "loss":
        raise ValueError(
            f"loss() returned a metric named {name!r}; use a text other than 'loss', which is the mean loss itself"
        )
    return name


# Weights of the micro-batches of a step, and the factor by which each one's loss enters the gradient of the gang.


_LEAST = torch.finfo(torch.float64).tiny


@dataclass(frozen=True, slots=True)
class Weighed:
    """The micro-batches of one worker in one step, each by its number."""

    load: Callable[[int], Any]
    """Returns the samples on the device; called once for each, in order."""
    weights: Sequence[Weight]
    factor: Callable[[int], Weight]
    """Returns n w_i / W: gradients are averaged over n workers, and W is the sum over the micro-batches of all of them,
    so that the gradient of the step is sum w_i g_i / W."""


class Weighing:
    """Weighs the micro-batches of a trial: by their samples, or as its `weight` says."""

    def __init__(self, trial: TorchTrial, gang: Gang, feed: Feed) -> None:
        self._weight = override_of(trial, "weight")
        self._gang, self._device, self._load = gang, feed.device, feed.load

    def of(
        self,
        parts: Sequence[Indices],
        sizes: Sequence[int],
        batch_size: int,
        note: Callable[[Sequence[Weight]], None] = lambda fractions: None,
    ) -> Weighed:
        """Weigh the `parts`, of which `sizes` samples count, of a batch of M = `batch_size` samples over the gang.

        `note` gets w_i / W of the parts if the trial weighs them, with the first factor. A trial's own weights need all
        samples of the worker at once; W is added up while the first of them go through the model.
        """
        num_workers = self._gang.num_workers
        if self._weight is None:
            return Weighed(
                load=lambda at: self._load(parts[at]),
                weights=sizes,
                factor=lambda at: num_workers * sizes[at] / batch_size,
            )
        held = [self._load(part) for part in parts]
        weights = [
            checked_weight(self._weight(samples), self._device) if size else 0.0
            for samples, size in zip(held, sizes, strict=True)
        ]
        total = self._sum_later(sum(weights))

        @cache
        def fractions() -> Sequence[Weight]:
            found = [weight / total() for weight in weights]
            note(found)
            return found

        return Weighed(load=lambda at: held.pop(0), weights=weights, factor=lambda at: num_workers * fractions()[at])

    def _sum_later(self, weight: Weight) -> Callable[[], Weight]:
        """Begin to add up the weights of all workers; the result is W, or the least number if W is 0."""
        if not isinstance(weight, torch.Tensor):
            if self._gang.num_workers == 1:
                return lambda: weight or _LEAST
            weight = torch.full((), weight, dtype=torch.float64, device=self._device)  # does not wait for a GPU
        summed = self._gang.sum_later(weight)
        is_cheap = self._device.type == "cpu"
        return cache(lambda: (summed().item() or _LEAST) if is_cheap else summed().clamp(min=_LEAST))


# Evaluation: the loader of the evaluation set, and the metrics of all ranks made one.


class EvalLoader:
    """The evaluation set in order, as batches on the device; it can be iterated any number of times."""

    def __init__(
        self,
        dataset: Dataset[Any],
        make_feed: Callable[..., Feed],
        *,
        batch_size: int,
        rank: int = 0,
        num_workers: int = 1,
        is_even: bool = False,
    ) -> None:
        """`rank` of `num_workers` takes its part of the batches; the first ranks take one more.

        `is_even`: the others take another one too, of which no sample counts.

        If the feed has loader workers, they load the first batches of the next evaluation ahead too.
        """
        self.dataset = dataset
        total = num_samples(dataset, "eval_dataset()")
        parts = [np.arange(start, min(start + batch_size, total)) for start in range(0, total, batch_size)]
        mine = np.array_split(np.arange(len(parts)), num_workers)[rank]
        self._parts = [parts[index] for index in mine]
        self._spare = [parts[0]] * (-(-len(parts) // num_workers) - len(mine)) if is_even else []
        self._feed = make_feed(dataset, batch_size=batch_size, what="eval_dataset()", most_workers=len(parts))
        self._feed.ahead = lambda: itertools.cycle([Part(indices=part, epoch=0) for part in self._all])

    @property
    def _all(self) -> list[Indices]:
        return self._parts + self._spare

    @property
    def device(self) -> torch.device:
        """The device of the batches."""
        return self._feed.device

    @property
    def sizes(self) -> list[int]:
        """Samples in each batch."""
        return [*map(len, self._parts), *[0] * len(self._spare)]

    def halve(self) -> int:
        """Make two batches of each; return the samples of the largest, 0 if no batch can be divided."""
        self._feed.leave_device()
        if max(self.sizes) == 1:
            return 0
        self._parts = [half for part in self._parts for half in np.array_split(part, 2) if len(half)]
        return max(self.sizes)

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Any]:
        parts = self._all
        self._feed.follow()
        self._feed.expect(parts, 0)
        return map(self._feed.load, parts)

    def close(self) -> None:
        self._feed.close()


class Evaluation(Component):
    """Evaluates a trial after its iterations: on all ranks where `evaluate` returns sums, on rank 0 alone otherwise.

    Workers that pass through the model together (`in_step`) all evaluate: as many batches of their own each, or all the
    whole set, and then the metrics of rank 0 count.
    """

    def __init__(self, trial: TorchTrial, segment: Segment, gang: Gang, *, every: int, in_step: bool = False) -> None:
        self._trial = trial
        self._in_step = in_step
        self._segment = segment
        self._gang = gang
        self._every = every
        self.on_all_ranks = type(trial).evaluate is TorchTrial.evaluate or trial.eval_on_all_ranks
        self._loader: EvalLoader | None = None
        self._latest: dict[str, Any] | None = None
        """The metrics of the latest evaluation, on rank 0, with its iteration; None before the first one."""

    def load(self, make_feed: Callable[..., Feed], batch_size: int) -> None:
        """Make the loader, on the ranks that evaluate."""
        segment = self._segment
        if not (self.on_all_ranks or self._in_step) and segment.rank > 0:
            return
        reseed("data", segment.data_seed)
        dataset = self._trial.eval_dataset(segment.config)
        if dataset is not None:
            rank, num_workers = (segment.rank, segment.num_workers) if self.on_all_ranks else (0, 1)
            if self._in_step and segment.most_per_gpu is not None:
                batch_size = min(batch_size, segment.most_per_gpu)
            self._loader = EvalLoader(
                dataset, make_feed, batch_size=batch_size, rank=rank, num_workers=num_workers, is_even=self._in_step
            )

    def close(self) -> None:
        if self._loader is not None:
            self._loader.close()

    def is_regular(self, iterations: int) -> bool:
        """Whether `eval_every` calls for an evaluation, wherever segments begin and end."""
        return iterations % self._every == 0

    def metrics(
        self, module: torch.nn.Module, iterations: int, within: Within, *, ends: bool = False
    ) -> Mapping[str, Any]:
        """Evaluate after that many iterations, or return the latest metrics if it is not due; called on every rank.

        It is due every `eval_every` iterations, at the end of a segment or of the trial (`ends`), and where nothing has
        been evaluated yet.
        Empty without an evaluation set, and on ranks other than 0.
        """
        ends = ends or iterations == self._segment.until_iterations
        is_due = ends or self.is_regular(iterations) or self._latest is None
        if is_due:
            found = self._evaluated(module, iterations, within)
            at = {EVALUATED_AT: iterations} if found and self._every > 1 else {}
            self._latest = {**found, **at}
        return self._latest or {}

    def state_dict(self) -> dict[str, Any] | None:
        """Return plain values for `load_state_dict`; None if every iteration is evaluated."""
        if self._every == 1 or self._latest is None:
            return None
        floats = {name: to_float(value) for name, value in self._latest.items()}
        return {name: value for name, value in floats.items() if value is not None}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        self._latest = state

    def _evaluated(self, module: torch.nn.Module, iterations: int, within: Within) -> Mapping[str, Any]:
        if self._loader is None:
            return {}
        if not self.on_all_ranks:
            found = self._call(module, self._loader, iterations, within)
            return found if self._segment.rank == 0 else {}
        found = self._call(module, self._loader, iterations, within) if len(self._loader) else {}
        return _joined(self._gang.gather({name: _sums(name, value) for name, value in found.items()}))

    def _call(self, module: torch.nn.Module, loader: EvalLoader, iterations: int, within: Within) -> Mapping[str, Any]:
        """Return the trial's own metrics; where memory runs out, again in batches of half the size.

        Workers in step cannot do that alone: their segment begins again, as where a step runs out of memory.
        """
        while True:
            rank = self._segment.rank if self.on_all_ranks else 0
            reseed("evaluate", self._segment.seed, iterations, *([rank] if rank else []))
            module.eval()
            try:
                with torch.no_grad():
                    metrics: Any = within(lambda: self._trial.evaluate(module, loader))
                break
            except RuntimeError as error:
                size = loader.halve() if is_out_of_memory(error) else 0
                if size == 0:
                    raise
                if self._in_step:
                    raise RanOut(one_line(error), size) from error
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
        f"rubberband.Mean(sum, count), or set eval_on_all_ranks = False"
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
        counts = size if weight is None or not size else checked_weight(weight(batch), loader.device)
        means.add(counts, *loss_and_metrics(trial.loss(model, batch)))
    total, sums = means.sums()
    return {name: Mean(value, total) for name, value in sums.items()}
