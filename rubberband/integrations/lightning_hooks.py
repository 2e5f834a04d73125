"""Hooks of a LightningModule or LightningDataModule that the loop calls, those that it refuses, and EarlyStopping."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

from rubberband.errors import InputError
from rubberband.executor.training.torch_trial import Mean
from rubberband.installation import install_hint
from rubberband.integrations.lightning_data import overrides

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
OWN_STEP = "write a rubberband.TorchTrial with a step() of its own"
OWN_LOOP = "write a rubberband.TorchTrial, or call rubberband.report() from a Callback of your own Trainer"
_AT_END = "use on_validation_epoch_end(), as a trial that has paused may train on, or the model of load_best()"
_NO_MODE = "call train() or eval() of its parts in on_validation_start()"

CALLED = frozenset(
    [
        "configure_callbacks",
        "configure_model",
        "configure_optimizers",
        "load_state_dict",
        "on_after_batch_transfer",
        "on_before_backward",
        "on_before_optimizer_step",
        "on_fit_start",
        "on_load_checkpoint",
        "on_save_checkpoint",
        "on_train_batch_end",
        "on_train_batch_start",
        "on_train_epoch_start",
        "on_train_start",
        "on_validation_batch_end",
        "on_validation_batch_start",
        "on_validation_end",
        "on_validation_epoch_end",
        "on_validation_epoch_start",
        "on_validation_start",
        "prepare_data",
        "setup",
        "state_dict",
        "teardown",
        "train_dataloader",
        "training_step",
        "val_dataloader",
        "validation_step",
    ]
)
"""Hooks that the loop calls where a Trainer would."""
OWN = frozenset(
    [
        "all_gather",
        "clip_gradients",
        "freeze",
        "from_datasets",
        "load_from_checkpoint",
        "lr_schedulers",
        "manual_backward",
        "optimizers",
        "print",
        "remove_ignored_hparams",
        "save_hyperparameters",
        "to_onnx",
        "to_tensorrt",
        "to_torchscript",
        "toggle_optimizer",
        "toggled_optimizer",
        "unfreeze",
        "untoggle_optimizer",
    ]
)
"""Methods that the module itself calls, and no Trainer does."""
REFUSED = {
    "backward": OWN_STEP,
    "configure_gradient_clipping": "set gradient_clip_norm of the LightningTrial",
    "configure_sharded_model": "make the layers in configure_model()",
    "log": "log other values, or by other names",
    "log_dict": "log other values, or by other names",
    "lr_scheduler_step": OWN_LOOP,
    "on_after_backward": "use on_before_optimizer_step()",
    "on_before_batch_transfer": "use the collate_fn of the DataLoader, or on_after_batch_transfer()",
    "on_before_zero_grad": "use on_train_batch_end()",
    "on_exception": "use teardown()",
    "on_fit_end": _AT_END,
    "on_train_end": _AT_END,
    "on_train_epoch_end": "use on_validation_epoch_end()",
    "on_validation_model_eval": _NO_MODE,
    "on_validation_model_train": _NO_MODE,
    "on_validation_model_zero_grad": "use on_validation_end()",
    "optimizer_step": OWN_STEP,
    "optimizer_zero_grad": OWN_STEP,
    "transfer_batch_to_device": "use the collate_fn of the DataLoader, or on_after_batch_transfer()",
}
"""Hooks that the loop does not call -> what to do instead."""


def hooks_of(kind: type) -> Iterator[str]:
    """Iterate over the public methods of a class of Lightning that are not PyTorch's, nor for tests or predictions."""
    import torch

    for name in dir(kind):
        is_later = name.removeprefix("on_").startswith(("_", "test_", "predict_"))
        if not is_later and not hasattr(torch.nn.Module, name) and callable(getattr(kind, name, None)):
            yield name


def check(made: Any, kind: str, what: str) -> Any:
    """Return a module or data module. Raises TypeError for anything else, ValueError for hooks that are not called."""
    kinds = [getattr(sys.modules[name], kind) for name in PACKAGES if name in sys.modules]
    if not isinstance(made, tuple(kinds)):
        if not any(find_spec(name.partition(".")[0]) for name in PACKAGES):
            raise InputError(f"Lightning is not installed; run {install_hint('lightning')}")
        raise TypeError(f"{what} returned {type(made).__name__}, which is no {kind}; return one, or write a TorchTrial")
    for hook in sorted({*REFUSED, *(name for each in kinds for name in hooks_of(each))} - CALLED - OWN):
        if overrides(made, hook):
            raise ValueError(
                f"{type(made).__name__} overrides {hook}(), which RubberBand's loop does not call; "
                f"{REFUSED.get(hook, OWN_LOOP)}"
            )
    if getattr(made, "strict_loading", True) is False:
        raise ValueError(
            f"{type(made).__name__} sets strict_loading = False, and checkpoints hold the whole module; leave it out"
        )
    return made


class EarlyStops:
    """The EarlyStopping callbacks of a module's `configure_callbacks`, which end the trial."""

    def __init__(self, module: Any) -> None:
        """Raises ValueError for callbacks of other kinds."""
        found = module.configure_callbacks()
        self.callbacks = list(found) if isinstance(found, (list, tuple)) else [found]
        """The callbacks."""
        self._module = type(module).__name__
        for each in self.callbacks:
            name, place = type(each).__name__, type(each).__module__
            if name != "EarlyStopping" or not place.startswith(tuple(f"{package}." for package in PACKAGES)):
                remedy = "the trial keeps its checkpoints itself; leave it out"
                if name != "ModelCheckpoint":
                    remedy = "do what it does in hooks of the module, or leave it out"
                raise ValueError(
                    f"{self._module}.configure_callbacks() returned {name}, and only EarlyStopping works here; {remedy}"
                )

    def are_over(self, metrics: Mapping[str, float], epoch: int) -> bool:
        """Return whether one of them ends the training, after an evaluation. Raises ValueError without its metric."""
        import torch

        values = {name.removeprefix("train_"): torch.tensor(value) for name, value in metrics.items()}
        values |= {name: torch.tensor(value) for name, value in metrics.items()}
        trainer = SimpleNamespace(
            state=SimpleNamespace(fn="fit"),
            strategy=SimpleNamespace(reduce_boolean_decision=lambda decision, all: decision),
            callback_metrics=values,
            current_epoch=epoch,
            should_stop=False,
            **dict.fromkeys(("sanity_checking", "fast_dev_run"), False),
            val_check_interval=1.0,
            check_val_every_n_epoch=1,
            global_rank=0,
            world_size=1,
        )
        for each in self.callbacks:
            if each.strict and each.monitor not in values:
                raise ValueError(
                    f"{self._module}: EarlyStopping monitors {each.monitor!r}, which is not reported; the "
                    f"trial reports {', '.join(metrics)}"
                )
            each.setup(trainer, None, "fit")
            each.on_train_epoch_end(trainer, None)
            each.on_validation_end(trainer, None)  # one of the two acts
        return bool(trainer.should_stop)

    def state_dict(self) -> dict[str, Any]:
        """Return how long each has waited, and its best value."""
        return {each.state_key: each.state_dict() for each in self.callbacks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for each in self.callbacks:
            if each.state_key in state:
                each.load_state_dict(state[each.state_key])


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
