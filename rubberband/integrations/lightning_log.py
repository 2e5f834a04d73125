"""Values that a LightningModule gives to `self.log`, reduced over the batches of an epoch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rubberband.executor.training.torch_trial import Mean

OPTIONS = (
    *("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist", "sync_dist_group"),
    *("add_dataloader_idx", "batch_size", "metric_attribute", "rank_zero_only"),
)
"""Options of `LightningModule.log`, in their order."""


class Now:
    """Takes what a module logs, into the log of what it does at present."""

    def __init__(self, log: Log) -> None:
        self.log = log

    def add(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Keep a value: `LightningModule.log`."""
        self.log.add(name, value, {**dict(zip(OPTIONS, args, strict=False)), **options})

    def add_all(self, values: Mapping[str, Any], *args: Any, **options: Any) -> None:
        """Keep several values: `LightningModule.log_dict`."""
        for name, value in values.items():
            self.add(name, value, *args, **options)


class Log:
    """Values that `self.log` got since they were last taken, reduced as they came."""

    def __init__(self) -> None:
        self.weight = 1
        """Samples of the present batch."""
        self._sums: dict[str, tuple[str, Any, float]] = {}
        self._metrics: dict[str, Any] = {}
        self._latest: dict[str, tuple[str, Any]] = {}

    def add(self, name: str, value: Any, options: Mapping[str, Any]) -> None:
        """Keep a value, as `LightningModule.log` does; what concerns loggers and progress bars has no effect."""
        import torch

        if odd := sorted(options.keys() - set(OPTIONS)):
            raise ValueError(f"self.log({name!r}) has an option {odd[0]}, which has no effect here; leave it out")
        kind = options.get("reduce_fx", "mean")
        kind = getattr(kind, "__name__", str(kind)).lower().replace("avg", "mean")
        if hasattr(value, "compute") and hasattr(value, "reset"):
            self._metrics[name] = value
            return
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.detach().double().squeeze()
        elif not isinstance(value, (int, float)):
            raise TypeError(f"self.log({name!r}) got {type(value).__name__}; log a number, or a torchmetrics.Metric")
        if kind not in ("mean", "sum", "min", "max"):
            raise ValueError(
                f"self.log({name!r}) has reduce_fx={kind}; use mean, sum, min, max or a torchmetrics.Metric"
            )
        weight = float(options.get("batch_size") or self.weight)
        self._latest[name] = kind, value
        _, before, total = self._sums.get(name, (kind, None, 0.0))
        value = value * weight if kind == "mean" else value
        if before is not None:
            value = {"min": min, "max": max}[kind](before, value) if kind in ("min", "max") else before + value
        self._sums[name] = (kind, value, total + weight)

    def of_batch(self) -> dict[str, Any]:
        """Return the values of one batch. Raises ValueError for those that are no means."""
        for name, (kind, _) in self._latest.items():
            if kind != "mean":
                raise ValueError(f"training_step() logs {name!r} by reduce_fx={kind}; use mean, or log it in a hook")
        for name, metric in self._metrics.items():
            if metric._forward_cache is None:
                raise ValueError(f"training_step() logs {name!r}, whose metric it only updates; call it: metric(…)")
        return {
            **{name: value for name, (_, value) in self._latest.items()},
            **{name: metric._forward_cache for name, metric in self._metrics.items()},
        }

    def take(self, *, as_parts: bool = False) -> dict[str, float]:
        """Return the values, and begin anew; `as_parts`: as means that can be joined with those of other workers."""
        sums, metrics = self._sums, self._metrics
        self._sums, self._metrics = {}, {}
        others = [*metrics, *(name for name, (kind, _, _) in sums.items() if kind != "mean")]
        if as_parts and others:
            raise ValueError(f"{others[0]!r} is no mean, which workers could join; set eval_on_all_ranks = False")
        found = {}
        for name, (kind, value, total) in sums.items():
            found[name] = Mean(value, total) if kind == "mean" else float(value)
        for name, metric in metrics.items():
            found[name] = float(metric.compute())
            metric.reset()
        return found
