"""Hooks of a LightningModule or LightningDataModule that the loop calls, those that it refuses, and EarlyStopping."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

from rubberband.errors import InputError
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
