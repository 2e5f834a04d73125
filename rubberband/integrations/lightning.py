"""`LightningTrial`: a LightningModule, with its LightningDataModule, in the training loop of a `TorchTrial`.

No Lightning Trainer runs. The loop is RubberBand's, so that gangs, resizing, resumes and adaptive batches work;
it calls the module's steps and hooks at the places where a Trainer would. The rest is refused in one line.
Works with `lightning` and with `pytorch_lightning`; neither is imported here.
"""

from __future__ import annotations

import inspect
import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rubberband.executor.training.torch_trial import TorchTrial
from rubberband.integrations.lightning_data import Loaders, loader_of, overrides, prepare, seeded
from rubberband.integrations.lightning_hooks import OWN_LOOP, OWN_STEP, EarlyStops, Log, Now, check
from rubberband.integrations.lightning_trainer import fit

if TYPE_CHECKING:
    import torch
    from torch.utils.data import Dataset

    from rubberband.executor.training.metrics import EvalLoader

__all__ = ["LightningTrial", "fit"]


class LightningTrial(TorchTrial):
    """A LightningModule as a trial: subclass it, and return the module and its data.

    An iteration is an epoch, or `samples_per_iteration`. Batches are those of `train_dataloader()`: its dataset,
    `batch_size` (over the whole gang) and `collate_fn`; their order is RubberBand's, shuffled in every epoch. Metrics
    are what `self.log` gets: means over the samples by default, or what a torchmetrics.Metric computes. Those of
    `training_step` are reported as `train_NAME`.

    The module's `trainer` is a stand-in with `current_epoch`, `global_step`, `datamodule` and the like. One optimizer
    is stepped, with an LR schedule of interval `epoch` or `step`. EarlyStopping of `configure_callbacks` and
    `self.trainer.should_stop = True` end the trial. Manual optimization, several optimizers, other callbacks and hooks
    that replace parts of the loop raise ValueError, which names what to do instead.
    """

    @abstractmethod
    def build_module(self, config: Mapping[str, Any]) -> Any:
        """Return the LightningModule of a configuration."""

    def build_datamodule(self, config: Mapping[str, Any]) -> Any:
        """Return the LightningDataModule; None: the module has `train_dataloader` and `val_dataloader` itself."""
        return None

    def build_model(self, config: Mapping[str, Any]) -> torch.nn.Module:
        """Return the module, after its `configure_model` and `setup`."""
        model: torch.nn.Module = self._source(config).module(config)
        return model

    def build_optimizer(self, config: Mapping[str, Any], model: torch.nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of `configure_optimizers`."""
        self._run = _ModuleRun(self._source(config), model)
        optimizer, self._schedule = self._run.optimizers()
        self.scheduler_step = "batch" if self._schedule.interval == "step" else "iteration"  # type: ignore[misc]
        self.scheduler_metric = self._schedule.monitor
        self._run.watch(optimizer, self._schedule.scheduler)
        return optimizer

    def build_scheduler(self, config: Mapping[str, Any], optimizer: torch.optim.Optimizer, *, total_steps: int) -> Any:
        """Return the LR schedule of `configure_optimizers`, or None."""
        return self._schedule.scheduler

    def train_dataset(self, config: Mapping[str, Any]) -> Dataset[Any]:
        """Return the dataset of `train_dataloader()`."""
        return self._source(config).loaders.train.dataset

    def eval_dataset(self, config: Mapping[str, Any]) -> Dataset[Any] | None:
        """Return the dataset of `val_dataloader()`; None if there is none."""
        return self._source(config).loaders.eval_dataset()

    def global_batch_size(self, config: Mapping[str, Any]) -> int:
        """Return the `batch_size` of `train_dataloader()`, and take its other words."""
        loaders = self._source(config).loaders
        train = loaders.train
        if loaders.collate is not None:
            vars(self)["collate"] = loaders.collate
        if self.eval_batch_size is None and loaders.val is not None:
            self.eval_batch_size = loaders.val.batch_size
        if self.num_workers is None and train.num_workers > 0:
            self.num_workers, self.prefetch_factor = train.num_workers, train.prefetch_factor or self.prefetch_factor
        if train.timeout > 0:
            self.loader_timeout_s = train.timeout
        self.drop_last = self.drop_last or train.drop_last
        assert train.batch_size is not None
        return train.batch_size

    def worker_init(self, worker: int, dataset: Dataset[Any]) -> None:
        """Call the `worker_init_fn` of `train_dataloader()`."""
        if (init := self._made.loaders.train.worker_init_fn) is not None:
            init(worker)

    def train_mode(self, model: torch.nn.Module) -> None:
        """Leave the parts in evaluation mode that the module was built with."""
        self._run.train_mode()

    def on_iteration(self, model: torch.nn.Module, iterations: int) -> None:
        """Call the hooks of an epoch's start."""
        self._run.begin(iterations)

    def loss(self, model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, Mapping[str, Any]]:
        """Return the loss of `training_step`, and what it logs."""
        return self._run.train(batch)

    def on_step(self, model: torch.nn.Module, step: int, batch_size: int) -> None:
        """Call `on_train_batch_end`."""
        self._run.stepped(step)

    def state_dict(self) -> Any:
        """Return `global_step`, the state of the data module, and what `on_save_checkpoint` adds."""
        return self._run.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Restore it, by `on_load_checkpoint` and the data module's `load_state_dict`."""
        self._run.load_state_dict(state)

    def evaluate(self, model: torch.nn.Module, loader: EvalLoader) -> Mapping[str, Any]:
        """Return what `validation_step` and all hooks log."""
        return self._run.validate(loader, as_parts=self.eval_on_all_ranks)

    def _observe(self, metrics: Mapping[str, float]) -> None:
        self._run.observe(metrics)

    def _close(self) -> None:
        if hasattr(self, "_made"):
            self._made.close()

    def _source(self, config: Mapping[str, Any]) -> _Source:
        if not hasattr(self, "_made"):
            self._made = _Source(self, config)
        return self._made


class _Source:
    """Makes the module, the data module and their loaders, each once."""

    def __init__(self, trial: LightningTrial, config: Mapping[str, Any]) -> None:
        self._trial = weakref.proxy(trial)  # which refers to this
        self._name = type(trial).__name__
        self._config = config
        self._module: Any = None
        self.place = _TrainerSubstitute(self, trial)
        self._data_seed = trial._data_seed
        with seeded(self._data_seed, 0):
            self.datamodule = trial.build_datamodule(config)
        if self.datamodule is not None:
            check(self.datamodule, "LightningDataModule", f"{self._name}.build_datamodule()")
            self.datamodule.trainer = self.place
        self._loaders: Loaders | None = None

    def module(self, config: Mapping[str, Any]) -> Any:
        """Return the module, set up."""
        if self._module is None:
            module = check(self._trial.build_module(config), "LightningModule", f"{self._name}.build_module()")
            if not module.automatic_optimization:
                raise ValueError(f"{type(module).__name__} sets automatic_optimization = False; {OWN_STEP}")
            if has_data := self.datamodule is None:
                with seeded(self._data_seed, 1):
                    prepare(module)
            module.trainer = self.place
            module.configure_model()
            with seeded(self._data_seed if has_data else None, 2):
                module.setup("fit")
            module.trainer = None  # a model that is only loaded can go to a Trainer
            self._module = module
        return self._module

    @property
    def loaders(self) -> Loaders:
        """The loaders, after `prepare_data` and `setup`."""
        if self._loaders is None:
            source = self.datamodule
            if source is None:
                source = self.module(self._config)
                source.trainer = self.place
            else:
                with seeded(self._data_seed, 1):
                    prepare(source)
                with seeded(self._data_seed, 2):
                    source.setup("fit")
            with seeded(self._data_seed, 3):
                self._loaders = Loaders(
                    train=loader_of(source, "train_dataloader"),
                    val=loader_of(source, "val_dataloader") if overrides(source, "val_dataloader") else None,
                )
        return self._loaders

    def close(self) -> None:
        """Call `teardown` of what was set up."""
        for made in (self._module, None if self._loaders is None else self.datamodule):
            if made is not None:
                made.teardown("fit")


class _TrainerSubstitute:
    """Substitute for `self.trainer`: the progress of the training, and the place in the gang."""

    _source: Any = None
    _trial: Any = None
    run: Any = None
    current_epoch = global_step = 0
    training = True
    validating = testing = predicting = sanity_checking = fast_dev_run = False
    logger = progress_bar_callback = None
    loggers: Sequence[Any] = ()
    callbacks: Sequence[Any] = ()
    accumulate_grad_batches = 1

    def __init__(self, source: _Source, trial: LightningTrial) -> None:
        # The module refers to this, and this to nothing that refers to the module: a trial then ends without waiting
        # for a collection of garbage.
        self._source = weakref.proxy(source)
        self._trial = weakref.proxy(trial)

    @property
    def should_stop(self) -> bool:
        """Whether the trial ends with the iteration."""
        return bool(self._trial.ended)

    @should_stop.setter
    def should_stop(self, ends: bool) -> None:
        self._trial.ended = ends

    @property
    def optimizers(self) -> list[Any]:
        """The optimizer; none before it is there."""
        return [] if self.run is None else [self.run.optimizer]

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        """The LR schedule, if there is one."""
        found = None if self.run is None else self.run.scheduler
        return [] if found is None else [SimpleNamespace(scheduler=found)]

    @property
    def datamodule(self) -> Any:
        """The data module, or None."""
        return self._source.datamodule

    @property
    def global_rank(self) -> int:
        """This worker's place in the gang."""
        import torch.distributed as dist

        return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0

    local_rank = global_rank

    @property
    def is_global_zero(self) -> bool:
        """Whether this worker reports."""
        return self.global_rank == 0

    @property
    def world_size(self) -> int:
        """Workers of the gang."""
        import torch.distributed as dist

        return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1

    @property
    def num_training_batches(self) -> int:
        """Batches of an epoch."""
        return len(self._source.loaders.train)

    @property
    def max_epochs(self) -> int:
        """Iterations of a trial that trains to the end."""
        trial: LightningTrial = self._trial
        return trial.max_iterations

    @property
    def estimated_stepping_batches(self) -> int:
        """Optimizer steps of a trial that trains to the end."""
        from rubberband.executor.training.options import fixed_steps

        train: Any = self._source.loaders.train
        samples = len(train.dataset)
        return fixed_steps(
            self.max_epochs,
            num_samples=samples,
            batch_size=self._trial.global_batch_size(self._source._config),
            samples_per_iteration=self._trial.samples_per_iteration or samples,
            drop_last=self._trial.drop_last,
        )

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"self.trainer.{name} is not there in a LightningTrial, which has no Trainer; {OWN_LOOP}")

    def __setattr__(self, name: str, value: Any) -> None:
        if not hasattr(type(self), name):
            getattr(self, name)  # which says that it is not there
        super().__setattr__(name, value)


class _ModuleRun:
    """Trains and validates a module, and keeps what it logs."""

    def __init__(self, source: _Source, model: Any) -> None:
        self.module = model
        self._place = source.place
        self._datamodule = source.datamodule
        self._evaluating = [part for part in model.modules() if not part.training]
        self._names: set[str] | None = None
        """Metrics that `training_step` logs."""
        self._batch_hooks = source.datamodule if overrides(source.datamodule, "on_after_batch_transfer") else model
        self.optimizer: Any = None
        self.scheduler: Any = None
        self._train_log = Log()
        self._now = Now(self._train_log)
        self._batch_index = 0
        self._began = self._attached = False
        self._latest: tuple[Any, Any] = (None, None)
        self._place.run = weakref.proxy(self)
        self._is_evaluated = False
        self.module.trainer = self._place
        self._early_stops = EarlyStops(model)
        self.module.trainer = None
        self._place.callbacks = list(self._early_stops.callbacks)

    def optimizers(self) -> tuple[torch.optim.Optimizer, _Schedule]:
        """Return what `configure_optimizers` says."""
        self.module.trainer = self._place
        found = _divided(self.module.configure_optimizers())
        self.module.trainer = None
        return found

    def _attach(self) -> None:
        """Let the module log here, and have a trainer; a module that is only loaded stays as it is."""
        if self._attached:
            return
        self._attached = True
        self.module.trainer = self._place
        for part in self.module.modules():
            if hasattr(part, "log_dict"):
                part.log, part.log_dict = self._now.add, self._now.add_all
            if hasattr(part, "distributed_available_fn"):  # a torchmetrics.Metric: evaluation is on one worker alone
                part.distributed_available_fn = lambda: False

    def watch(self, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        """Call the hook before each step of the optimizer."""
        self.optimizer, self.scheduler, module = optimizer, scheduler, self.module
        module.optimizers = lambda use_pl_optimizer=True: optimizer
        if overrides(module, "on_before_optimizer_step"):
            optimizer.register_step_pre_hook(lambda found, *_: module.on_before_optimizer_step(found))

    def train_mode(self) -> None:
        """Put the parts back into evaluation mode that were in it when the module was built."""
        for part in self._evaluating:
            part.training = False

    def stepped(self, step: int) -> None:
        """Note that the optimizer has taken `step` steps."""
        (outputs, batch), self._latest = self._latest, (None, None)
        self._place.global_step = step
        self.module.on_train_batch_end(outputs, batch, self._batch_index)
        self._batch_index += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the part of a checkpoint that is neither model nor optimizer."""
        state = {"epoch": self._place.current_epoch, "global_step": self._place.global_step}
        self.module.on_save_checkpoint(state)
        data = None if self._datamodule is None else self._datamodule.state_dict()
        return {"module": state, "data": data, "callbacks": self._early_stops.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._place.global_step = state["module"]["global_step"]
        self.module.on_load_checkpoint(state["module"])
        if self._datamodule is not None and state["data"]:
            self._datamodule.load_state_dict(state["data"])
        self._early_stops.load_state_dict(state["callbacks"])

    def observe(self, metrics: Mapping[str, float]) -> None:
        """End the trial if a callback says so of metrics that are new."""
        if self._is_evaluated and self._early_stops.are_over(metrics, self._place.current_epoch):
            self._place.should_stop = True
        self._is_evaluated = False

    def begin(self, iterations: int) -> None:
        """Begin an iteration, after which that many are done."""
        self._place.current_epoch = iterations - 1
        self._batch_index = 0
        for part in self.module.modules():
            if hasattr(part, "distributed_available_fn"):
                part.reset()
        self._attach()
        if not self._began:
            self._began = True
            self.module.on_fit_start()
            self.module.on_train_start()
        self.module.on_train_epoch_start()

    def train(self, batch: Any) -> tuple[torch.Tensor, Mapping[str, Any]]:
        """Take a batch through `training_step`."""
        import torch

        self._attach()
        batch = self._batch_hooks.on_after_batch_transfer(batch, 0)
        if self.module.on_train_batch_start(batch, self._batch_index) == -1:
            raise ValueError(
                f"{type(self.module).__name__}.on_train_batch_start() returned -1, which ends an epoch in Lightning; "
                "set samples_per_iteration of the LightningTrial"
            )
        step = self.module.training_step
        logged = self._now.log = Log()
        try:
            output = step(*_arguments(step, batch, self._batch_index))
        finally:
            self._now.log = self._train_log
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, torch.Tensor):
            raise TypeError(
                f"{type(self.module).__name__}.training_step() returned {type(loss).__name__}; return the loss, or a "
                f"dict with 'loss'"
            )
        self.module.on_before_backward(loss)
        outputs = dict(output) if isinstance(output, Mapping) else {"loss": loss}
        self._latest = ({**outputs, "loss": loss.detach()}, batch)
        return loss, self._checked(logged.of_batch())

    def _checked(self, metrics: dict[str, Any]) -> Mapping[str, Any]:
        """Return the metrics of a batch by their names without `train_`. Raises ValueError for others than before."""
        names = metrics.keys() if self._names is None else self._names
        if odd := sorted(names ^ metrics.keys()):
            raise ValueError(f"training_step() logs {odd[0]!r} in some batches only; log it in each, or in a hook")
        self._names = set(names)
        found = {name.removeprefix("train_"): value for name, value in metrics.items()}
        return {name: value for name, value in found.items() if name != "loss"}  # it is reported anyway

    def validate(self, loader: EvalLoader, *, as_parts: bool) -> Mapping[str, Any]:
        """Take the evaluation set through `validation_step`; return all that was logged since the last time.

        `as_parts`: this worker has a part of the set.
        """
        log = self._now.log = Log()  # a new one, as memory may have run out in the midst of the one before
        self._place.training, self._place.validating, self._is_evaluated = False, True, True
        try:
            if overrides(self.module, "validation_step"):
                self._validate(loader, log)
        finally:
            self._place.training, self._place.validating = True, False
            self._now.log = self._train_log
        return {**({} if as_parts else self._train_log.take()), **log.take(as_parts=as_parts)}

    def _validate(self, loader: EvalLoader, log: Log) -> None:
        module = self.module
        module.on_validation_start()
        module.on_validation_epoch_start()
        for index, (batch, size) in enumerate(zip(loader, loader.sizes, strict=True)):
            batch = self._batch_hooks.on_after_batch_transfer(batch, 0)
            log.weight = size
            module.on_validation_batch_start(batch, index)
            outputs = module.validation_step(*_arguments(module.validation_step, batch, index))
            module.on_validation_batch_end(outputs, batch, index)
        log.weight = 1
        module.on_validation_epoch_end()
        module.on_validation_end()


@dataclass
class _Schedule:
    """The LR schedule of `configure_optimizers`."""

    scheduler: Any = None
    interval: str = "epoch"
    monitor: str | None = None


def _divided(made: Any) -> tuple[torch.optim.Optimizer, _Schedule]:
    """Return the optimizer and the LR schedule in any form that `configure_optimizers` has. Raises ValueError."""
    import torch

    what, schedules, monitor = "configure_optimizers() returned", [], None
    if isinstance(made, (list, tuple)) and len(made) == 2 and isinstance(made[0], (list, tuple)):
        made, schedules = made[0], list(made[1]) if isinstance(made[1], (list, tuple)) else [made[1]]
    if isinstance(made, (list, tuple)):
        if len(made) != 1:
            raise ValueError(
                f"{what} {len(made)} optimizers; a LightningTrial steps one: give it parameter groups, or {OWN_STEP}"
            )
        made = made[0]
    if isinstance(made, Mapping):
        _check_words(made, ("optimizer", "lr_scheduler", "monitor"), what)
        monitor = made.get("monitor")
        schedules = [made["lr_scheduler"]] if made.get("lr_scheduler") is not None else schedules
        made = made.get("optimizer")
    if not isinstance(made, torch.optim.Optimizer):
        raise ValueError(f"{what} {type(made).__name__}; return a torch.optim.Optimizer")
    if len(schedules) > 1:
        raise ValueError(f"{what} {len(schedules)} LR schedules; join them: torch.optim.lr_scheduler.ChainedScheduler")
    return made, _schedule(schedules[0], monitor) if schedules else _Schedule()


def _check_words(given: Mapping[str, Any], known: Sequence[str], what: str) -> None:
    if odd := [name for name in given if name not in known]:
        raise ValueError(f"{what} a key {odd[0]!r}, which has no effect here; use {', '.join(known)}")


def _schedule(given: Any, monitor: str | None) -> _Schedule:
    import torch

    words = dict(given) if isinstance(given, Mapping) else {"scheduler": given}
    _check_words(
        words,
        ("scheduler", "interval", "frequency", "monitor", "name", "reduce_on_plateau", "strict"),
        "the LR schedule has",
    )
    interval, frequency = words.get("interval", "epoch"), words.get("frequency", 1)
    if interval not in ("epoch", "step"):
        raise ValueError(f"the LR schedule has interval {interval!r}; use 'epoch' or 'step'")
    if frequency != 1:
        raise ValueError(
            f"the LR schedule has frequency {frequency}; use 1, and a schedule that counts every {interval}"
        )
    is_plateau = isinstance(words["scheduler"], torch.optim.lr_scheduler.ReduceLROnPlateau)
    if words.get("reduce_on_plateau", is_plateau) != is_plateau:
        raise ValueError(
            f"the LR schedule has reduce_on_plateau = {words['reduce_on_plateau']}, which has no effect here; leave it "
            "out: a ReduceLROnPlateau steps by its metric, and no other schedule does"
        )
    return _Schedule(words["scheduler"], interval, words.get("monitor", monitor))


def _arguments(step: Callable[..., Any], batch: Any, index: int) -> tuple[Any, ...]:
    """Return what a step takes: the batch, and its index if it has a place for it."""
    try:
        inspect.signature(step).bind(batch, index)
    except TypeError:
        return (batch,)
    return (batch, index)
