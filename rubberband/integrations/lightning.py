"""`fit`: the Trainer of Lightning in a trial. The Trainer trains; its epochs are the trial's iterations."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rubberband.integrations import trainer_files

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_FILE, _RANDOM = "trainer.ckpt", "random-states.pt"
_KEPT = "kept"
"""Folder of the checkpoint with the files of the user's ModelCheckpoints."""
_PATHS = ("best_model_path", "kth_best_model_path", "last_model_path", "dirpath")


def fit(trainer: Any, model: Any, *data: Any, **words: Any) -> None:
    """Train as `trainer.fit(model, ...)` does, in a trial: report each epoch, and resume from the trial's checkpoint.

    An iteration is an epoch, or `check_val_every_n_epoch` of them. It reports what the module logs, with a checkpoint
    of all that the Trainer saves and the random states. `max_epochs` is the longest training of the search, `max_t`.
    Your callbacks stay: one that stops the training, such as EarlyStopping, ends the trial; the files of each
    ModelCheckpoint are kept in the trial's checkpoint, in a folder `kept`. In a gang the Trainer gets the gang's
    workers in place of `devices`, `num_nodes` and `strategy`, and metrics of an epoch are those of all workers.
    Outside a search, it is `trainer.fit(model, ...)`.

    Raises TypeError for anything but a Trainer; ValueError for one with arguments that cannot have their effect here,
    or whose `max_epochs` end before the search does.
    """
    if not _package(trainer):
        raise TypeError(f"fit() got {type(trainer).__name__}, which is no Trainer of Lightning; give one")
    if not trainer_files.in_trial():
        trainer.fit(model, *data, **words)
        return
    _check(trainer, words)
    _take_gang(trainer)
    with tempfile.TemporaryDirectory(prefix="rubberband-trainer-") as folder:
        resumed = trainer_files.resumed_in(Path(folder, "resumed"))
        _keep_files(trainer, Path(folder), resumed)
        trainer.callbacks.insert(0, _reporter(trainer, Path(folder), resumed))
        _average(trainer, model)
        if resumed is not None:
            words = {**words, "ckpt_path": str(resumed / _FILE), "weights_only": False}
        trainer.fit(model, *data, **words)
    if _is_trained(trainer):
        raise ValueError(
            f"the Trainer has ended after {trainer.current_epoch} epochs, and the search continues; set max_epochs to "
            "the scheduler's max_t"
        )


def _package(trainer: Any) -> str:
    """Return the package that the Trainer is from, one of `PACKAGES`; empty: it is no Trainer of Lightning."""
    places = [base.__module__ for base in type(trainer).__mro__ if base.__name__ == "Trainer"]
    return next((package for package in PACKAGES if any(place.startswith(package) for place in places)), "")


def _is_trained(trainer: Any) -> bool:
    return trainer.max_epochs not in (None, -1) and bool(trainer.current_epoch >= trainer.max_epochs)


def _check(trainer: Any, words: Mapping[str, Any]) -> None:
    """Raise ValueError for what cannot have its effect in a trial."""
    refused = {
        "ckpt_path": (words.get("ckpt_path"), "a trial resumes from its own checkpoint; leave it out"),
        "fast_dev_run": (trainer.fast_dev_run, "it saves nothing; set limit_train_batches"),
        "barebones": (trainer.barebones, "it logs no metrics; leave it out"),
        "max_steps": (
            trainer.max_steps if trainer.max_steps != -1 else None,
            "an iteration is an epoch; set max_epochs",
        ),
        "check_val_every_n_epoch": (
            "None" if trainer.check_val_every_n_epoch is None else None,
            "an iteration is a whole number of epochs; set it to 1",
        ),
    }
    for name, (value, why) in refused.items():
        if value:
            raise ValueError(f"{name}={value} has no place in a trial: {why}")


# The gang


def _take_gang(trainer: Any) -> None:
    """Let the Trainer train on the gang's workers. Raises ValueError where its strategy cannot."""
    connector, strategy = trainer._accelerator_connector, trainer.strategy
    strategies = sys.modules[f"{_package(trainer)}.strategies"]
    is_single = type(strategy) is strategies.SingleDeviceStrategy
    if trainer_files.in_function():
        if trainer.world_size > 1:
            raise ValueError(
                f"the Trainer has {trainer.world_size} processes, and a function has one; write "
                "@rubberband.distributed above it"
            )
        return
    if not connector.cluster_environment.creates_processes_externally:
        raise ValueError(
            f"plugins: {type(connector.cluster_environment).__name__} starts processes itself; leave it out, as the "
            "gang's are started"
        )
    here, workers = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
    machines = workers // here
    sizes = f"devices={trainer.num_devices} and num_nodes={trainer.num_nodes}"
    is_sized = (trainer.num_devices, trainer.num_nodes) == (here, machines)
    if not is_single and type(strategy) is not strategies.DDPStrategy:
        if not is_sized:
            raise ValueError(
                f"{type(strategy).__name__} has {sizes}, and the gang has {here} and {machines}; use strategy='ddp', "
                "which can be resized"
            )
        return
    if not is_single and not is_sized:
        trainer_files.remark(f"the Trainer has {sizes}, and its gang {here} and {machines}, which it takes")
    if is_single:
        # Not in a gang of one either: without DDP the order of the samples would be another one.
        strategy = strategies.DDPStrategy(accelerator=strategy.accelerator, precision_plugin=strategy.precision_plugin)
        strategy.checkpoint_io = connector.strategy.checkpoint_io
        strategy.cluster_environment = connector.cluster_environment
        strategy._layer_sync = connector._layer_sync
        connector.strategy = strategy
    strategy.parallel_devices = strategy.accelerator.get_parallel_devices(strategy.accelerator.parse_devices(here))
    strategy.num_nodes = machines
    strategy._start_method = "popen"
    strategy.set_world_ranks()
    strategy._configure_launcher()


def _average(trainer: Any, model: Any) -> None:
    """Log metrics of an epoch as means over all workers; the Trainer does where `sync_dist` says so."""
    if trainer.world_size == 1:
        return
    log, remarked = model.log, set[str]()

    def logged(name: str, value: Any, *args: Any, **options: Any) -> None:
        ends_epoch = options.get("on_epoch") or (options.get("on_epoch") is None and not trainer.training)
        if ends_epoch and not options.get("on_step") and not options.get("rank_zero_only") and len(args) < 6:
            if "sync_dist" not in options and name not in remarked and not hasattr(value, "compute"):
                remarked.add(name)
                trainer_files.remark(f"{name} is logged without sync_dist, and is averaged over the workers")
            options["sync_dist"] = True
        log(name, value, *args, **options)

    model.log = logged


# Files


def _keep_files(trainer: Any, folder: Path, resumed: Path | None) -> None:
    """Let each ModelCheckpoint write into a folder that is part of the trial's checkpoint.

    Those that monitor nothing keep the latest files, as a trial does itself; they write beside it.
    """
    for number, checkpoint in enumerate(filter(_is_model_checkpoint, trainer.callbacks)):
        name = Path(checkpoint.dirpath).name if checkpoint.dirpath else f"checkpoints-{number}"
        place = folder / (_KEPT if checkpoint.monitor else "latest") / name
        if checkpoint.dirpath is not None:
            trainer_files.remark(
                f"ModelCheckpoint(dirpath={checkpoint.dirpath!r}) writes into the trial's checkpoint instead"
            )
        checkpoint.dirpath = str(place)
        before = None if resumed is None else resumed / _KEPT / name
        if before is not None and before.is_dir():
            shutil.copytree(before, place)


def _is_model_checkpoint(callback: Any) -> bool:
    return any(base.__name__ == "ModelCheckpoint" for base in type(callback).__mro__)


def _move(state: dict[str, Any], folder: str) -> None:
    """Replace the folder of a ModelCheckpoint in its state: another process wrote it.

    It would forget its best files otherwise, and be out of step with the other workers.
    """
    before = state.get("dirpath")

    def path(text: Any) -> Any:
        return folder + text[len(before) :] if before and isinstance(text, str) and text.startswith(before) else text

    for name in _PATHS:
        if name in state:
            state[name] = path(state[name])
    state["best_k_models"] = {path(name): score for name, score in state.get("best_k_models", {}).items()}


def _reporter(trainer: Any, folder: Path, resumed: Path | None) -> Any:
    """Return the callback that reports."""
    import torch

    class LightningReporter(sys.modules[f"{_package(trainer)}.callbacks"].Callback):  # type: ignore[misc]
        """Reports an epoch once all that ends it is done: before the next one begins, or in the end."""

        def __init__(self) -> None:
            self._is_resuming = resumed is not None
            self._reported = 0

        def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
            for callback in trainer.callbacks:
                if _is_model_checkpoint(callback) and callback.state_key in checkpoint["callbacks"]:
                    _move(checkpoint["callbacks"][callback.state_key], callback.dirpath)

        def on_train_start(self, trainer: Any, module: Any) -> None:
            self._reported = trainer.current_epoch
            if threading.current_thread() is threading.main_thread():
                # The Trainer's own handler waits for the end of a batch, which does not come while `report` waits.
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            if self._is_resuming:
                self._is_resuming = False
                _restore_random_states(resumed)
                iter(trainer.fit_loop._data_fetcher)  # begun with the random states and the order of the first epoch
            elif trainer.current_epoch > self._reported:
                # A checkpoint is as that of a whole epoch: the next one has not begun.
                progress = trainer.fit_loop.epoch_progress
                for count in (progress.current, progress.total):
                    count.ready -= 1
                self._report(is_last=False)
                for count in (progress.current, progress.total):
                    count.ready += 1

        def on_train_end(self, trainer: Any, module: Any) -> None:
            if trainer.current_epoch > self._reported:
                self._report(is_last=not _is_trained(trainer))

        def _report(self, *, is_last: bool) -> None:
            if trainer.current_epoch % trainer.check_val_every_n_epoch and not is_last:
                return
            self._reported = trainer.current_epoch
            trainer_files.require_finite(trainer.lightning_module)
            saved = folder / "saved"
            trainer.save_checkpoint(saved / _FILE)
            states = trainer_files.gathered(_random_states())
            if trainer.is_global_zero:
                saved.mkdir(exist_ok=True)
                torch.save(states, saved / _RANDOM)
                _link(folder / _KEPT, saved / _KEPT)
            metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
            trainer_files.report({**metrics, "epoch": trainer.current_epoch}, saved, is_last=is_last)

    return LightningReporter()


def _link(source: Path, target: Path) -> None:
    """Show the files of a folder in another one."""
    shutil.rmtree(target, ignore_errors=True)
    if source.is_dir():
        shutil.copytree(source, target, copy_function=os.link)


def _random_states() -> dict[str, Any]:
    import numpy as np
    import torch

    states = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _restore_random_states(resumed: Path | None) -> None:
    """Restore those of this worker; rank 0's where the gang had fewer."""
    import numpy as np
    import torch

    assert resumed is not None
    by_rank = torch.load(resumed / _RANDOM, weights_only=False)
    rank = int(os.environ.get("RANK", "0"))
    states = by_rank[rank] if rank < len(by_rank) else by_rank[0]
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
