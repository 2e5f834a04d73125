"""`fit`: the Trainer of Hugging Face in a trial. The Trainer trains; its epochs are the trial's iterations."""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from rubberband.errors import InputError
from rubberband.installation import install_hint
from rubberband.integrations import trainer_files
from rubberband.integrations.trainer_order import is_streamed, remark_repeated_samples, sample_order
from rubberband.integrations.trainer_parts import Division, ignores_items
from rubberband.integrations.trainer_state import BesideState, most_remembered

_OWN = "a trial keeps its latest checkpoint itself; leave it out"
REFUSED = {
    "auto_find_batch_size": "training would begin anew, and its epochs count twice; set per_device_train_batch_size",
    "enable_jit_checkpoint": _OWN,
    "push_to_hub": "every trial would be uploaded; push what result.load_best() returns",
    "resume_from_checkpoint": "a trial resumes from its own checkpoint; leave it out",
    "save_only_model": "it saves no optimizer, so a trial cannot resume; leave it out",
}
"""Arguments of a Trainer that must have their defaults -> why, and what to do instead."""


def fit(trainer: Any, *, steps_per_iteration: int | None = None) -> None:
    """Train as `trainer.train()` does, in a function trial: report each epoch, and resume from the trial's checkpoint.

    An iteration is an epoch, or `steps_per_iteration` optimizer steps. It ends with an evaluation, whose `eval_…`
    metrics are reported with the training `loss`, and a checkpoint: the files that the Trainer saves (model, optimizer,
    LR schedule, random states). Its own checkpoints (`save_strategy`, `output_dir`) are not written. `num_train_epochs`
    is the longest training of the search, `max_t`; the LR schedule follows it. Losses that are not finite count as they
    are (`logging_nan_inf_filter` is off), so that a trial that diverges fails, as one does whose weights are not
    finite. A callback that stops the training before, such as EarlyStoppingCallback, ends the trial; its patience
    counts the evaluations of `eval_strategy` alone, and goes on after a resume. So do frozen parameters, the
    attributes of your own callbacks that are plain data, and those that a subclass of the Trainer changes in training.

    Where a step or an evaluation runs out of memory, the trial begins again from its checkpoint with half as many
    samples at once: the gradients of a batch's parts are added, so that the result is the same. Its later segments
    begin so too.

    `result.load_best(train)` returns the best checkpoint; its `to_directory(folder)` writes what `from_pretrained`
    reads.

    Raises TypeError for anything but a Trainer; ValueError for one without evaluation data, with arguments that cannot
    have an effect here, or whose `num_train_epochs` end before the search does; RuntimeError outside a function trial.
    """
    try:
        import transformers
    except ImportError:
        raise InputError(f"transformers is not installed; run {install_hint('transformers')}") from None
    if not isinstance(trainer, transformers.Trainer):
        raise TypeError(f"fit() got {type(trainer).__name__}, which is no transformers.Trainer; give one")
    if not trainer_files.in_trial():
        trainer.train()
        return
    if trainer.eval_dataset is None:
        raise ValueError("the Trainer has no eval_dataset, so it has no eval_… metric; give it eval_dataset=")
    _check_arguments(trainer.args)
    if (workers := int(os.environ.get("WORLD_SIZE", "1"))) != trainer.args.world_size:
        raise ValueError(
            f"the Trainer has {trainer.args.world_size} of the gang's {workers} workers, so each would train on its "
            "own; make TrainingArguments in the function"
        )
    if steps_per_iteration is not None and steps_per_iteration < 1:
        raise ValueError(f"steps_per_iteration={steps_per_iteration} is below 1; give the steps of an iteration")
    with tempfile.TemporaryDirectory(prefix="rubberband-trainer-") as folder:
        _adopt(trainer.args, folder)
        resumed = trainer_files.resumed_in(Path(folder) / "resumed")
        _require_mean_of_losses(transformers, trainer)
        remark_repeated_samples(trainer)
        asked = [trainer_files.most_at_once(), None if resumed is None else most_remembered(resumed)]
        most = min((each for each in asked if each is not None), default=None)
        division = Division(transformers, trainer, most)
        beside = BesideState(transformers, trainer, most)
        reporter = _reporter(transformers, trainer, Path(folder), steps_per_iteration, beside, resumed)
        trainer.add_callback(sample_order(transformers, trainer, is_resumed=resumed is not None))
        trainer.add_callback(reporter)
        try:
            trainer.train(resume_from_checkpoint=None if resumed is None else str(resumed))
        except RuntimeError as error:
            if not trainer_files.may_begin_again() or (failure := division.failure(error)) is None:
                raise
            raise failure from error
    if trainer.state.global_step >= trainer.state.max_steps:  # no callback has stopped it
        raise ValueError(
            f"the Trainer has ended after {trainer.state.epoch:g} epochs ({trainer.state.global_step} steps), and the "
            "search continues; set num_train_epochs to the scheduler's max_t"
        )


def _check_arguments(args: Any) -> None:
    """Raise ValueError for an argument that differs from its default and cannot have its effect."""
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    for name, remedy in REFUSED.items():
        if name in defaults and getattr(args, name) != defaults[name]:
            raise ValueError(f"{name}={getattr(args, name)} has no place in a trial: {remedy}")


def _adopt(args: Any, folder: str) -> None:
    """Give a Trainer the arguments that a trial needs."""
    args.output_dir = folder
    args.restore_callback_states_from_checkpoint = True
    args.logging_nan_inf_filter = False  # it would report 0 for an epoch that has diverged
    _leave_out_own_saves(args)
    _leave_out_best_model(args)


def _leave_out_best_model(args: Any) -> None:
    """Let the Trainer load no best model as it ends, which its trial could not keep. EarlyStopping does without."""
    if args.load_best_model_at_end:
        args.load_best_model_at_end = False
        trainer_files.remark(
            "load_best_model_at_end=True has no effect in a trial, whose checkpoint is that of its latest iteration"
        )


def _leave_out_own_saves(args: Any) -> None:
    """Let the Trainer save at the end of each iteration alone. The default strategy is every 500 steps."""
    strategy, default = str(getattr(args.save_strategy, "value", args.save_strategy)), type(args).save_steps
    if strategy == "best" or (strategy == "steps" and args.save_steps != default):
        asked = strategy if strategy == "best" else f"steps with save_steps={args.save_steps:g}"
        trainer_files.remark(
            f"save_strategy={asked} has no effect in a trial, which keeps a checkpoint of each iteration; for shorter "
            "iterations give fit() steps_per_iteration"
        )
    args.save_strategy = "no"


def _state_file(folder: Path, rank: int, num_workers: int) -> Path:
    """Return the file with a worker's random states, as the Trainer names it."""
    return folder / ("rng_state.pth" if num_workers == 1 else f"rng_state_{rank}.pth")


def _add_random_states(saved: Path, args: Any) -> None:
    """Put the random states of all workers beside each other: each has written its own."""
    own = _state_file(saved, args.process_index, args.world_size)
    for rank, content in enumerate(trainer_files.gathered(own.read_bytes())):
        _state_file(saved, rank, args.world_size).write_bytes(content)


def _require_mean_of_losses(transformers: Any, trainer: Any) -> None:
    """Let losses of a gang be means over its workers where the model leaves out `num_items_in_batch`.

    The Trainer multiplies such a loss, and its gradient, by the number of workers: it takes any model whose `forward`
    has `**kwargs` for one that divides its sum by the tokens of all workers.
    """
    args = trainer.args
    if args.world_size == 1 or not args.average_tokens_across_devices or not trainer.model_accepts_loss_kwargs:
        return
    if trainer.compute_loss_func is None and ignores_items(transformers, trainer):
        args.average_tokens_across_devices = False
        trainer_files.remark(
            f"{type(trainer.model).__name__} leaves out num_items_in_batch, so average_tokens_across_devices=True "
            f"would multiply its loss by {args.world_size} on {args.world_size} workers; it is set to False"
        )


def _reporter(
    transformers: Any, trainer: Any, folder: Path, steps: int | None, beside: BesideState, resumed: Path | None
) -> Any:
    """Return the callback that reports. `resumed`: files from which training goes on."""

    class TransformersReporter(transformers.TrainerCallback):  # type: ignore[misc]
        """Ends each iteration with a log, an evaluation and a checkpoint, and reports them."""

        def __init__(self) -> None:
            self._metrics: dict[str, float] = {}
            self._is_due = False
            self._evaluated_at = -1
            self._skips_since: float | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **kwargs: Any) -> None:
            beside.begin()
            if resumed is None:
                return
            beside.restore(model, resumed, args.process_index)
            if not _state_file(resumed, args.process_index, args.world_size).exists():  # the gang had another size
                transformers.set_seed((args.seed + state.global_step) % 2**32)
            if is_streamed(trainer.train_dataset) and not args.ignore_data_skip:
                self._skips_since = time.monotonic()

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self._skips_since is not None:
                skipped_s, self._skips_since = time.monotonic() - self._skips_since, None
                trainer_files.remark(f"the Trainer read {skipped_s:.1f} s of a streamed dataset again, to resume in it")

        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if steps is None:
                self._end(control)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if steps is not None and state.global_step % steps == 0:
                self._end(control)

        def _end(self, control: Any) -> None:
            control.should_log = control.should_save = self._is_due = True

        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._evaluated_at = state.global_step

        def _evaluate(self) -> None:
            """Evaluate at an iteration's end where the Trainer does not, so that only the report sees it."""
            import torch

            handler = trainer.callback_handler
            callbacks, handler.callbacks = handler.callbacks, [self]
            try:
                with torch.random.fork_rng():
                    trainer.evaluate()
            finally:
                handler.callbacks = callbacks

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            self._metrics.update(logs or {})

        def on_save(self, args: Any, state: Any, control: Any, *, model: Any, **kwargs: Any) -> None:
            if not self._is_due:
                return
            self._is_due = False
            trainer_files.require_finite(model)
            saved = folder / f"checkpoint-{state.global_step}"
            beside.save(model, saved)
            if self._evaluated_at != state.global_step:
                self._evaluate()
            _add_random_states(saved, args)
            metrics, self._metrics = self._metrics, {}
            is_stopped = control.should_training_stop and state.global_step < state.max_steps  # by a callback
            trainer_files.report(metrics, saved, is_last=is_stopped)

    return TransformersReporter()
