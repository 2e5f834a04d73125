"""Batches of a Trainer in parts, after one ran out of memory: the same samples and the same result in less memory.

A part is what the Trainer's collator makes of a few samples of a batch, and the gradients of the parts are added before
the optimizer's step. That is what half the `per_device_train_batch_size` with twice the `gradient_accumulation_steps`
computes, with the same samples in each step, also in an epoch's last one and on several workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from itertools import accumulate, pairwise
from typing import Any

from rubberband.executor.training import peak
from rubberband.executor.training.failures import LacksMemory, RanOut, TrialFailure, is_out_of_memory, one_line
from rubberband.integrations import trainer_files
from rubberband.units import counted

_TOGETHER = {
    "GRPOTrainer": "it draws completions for whole batches",
    "RLOOTrainer": "it draws completions for whole batches",
    "KTOTrainer": "its loss compares the samples of a batch",
}
"""Trainers of TRL whose batches cannot be divided -> why."""


class Parts(list[Any]):
    """A batch in parts: each what the collator made, with a tensor that has its number of samples."""


class _Collator:
    """Makes a batch of parts of at most `most` samples."""

    def __init__(self, collate: Any, most: int) -> None:
        self._collate, self._most = collate, most

    def __call__(self, samples: Sequence[Any]) -> Parts:
        import torch

        count = -(-len(samples) // self._most)
        size, larger = divmod(len(samples), count)
        ends = accumulate([size + 1] * larger + [size] * (count - larger), initial=0)
        made = ((self._collate(samples[begin:end]), end - begin) for begin, end in pairwise(ends))
        return Parts((part, torch.tensor([rows])) for part, rows in made)


class Division:
    """Lets a Trainer take at most `most` samples at once; None: as many as it has in a batch."""

    def __init__(self, transformers: Any, trainer: Any, most: int | None) -> None:
        self._transformers, self._trainer, self._most = transformers, trainer, most
        if peak.current is not None:
            peak.current.takes_parts = not self._undivided(is_training=True)
        self._factor = 1.0
        """The weight of a part's loss, where the Trainer takes a mean."""
        self._items: Any = None
        """Tokens of the gang by which the latest loss was divided; None: by its own."""
        if most is None or most >= max(trainer.args.train_batch_size, trainer.args.eval_batch_size):
            return
        is_given = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
        self._adds_up = is_given and not ignores_items(transformers, trainer)
        for name in ("floating_point_ops", "_track_num_input_tokens"):
            self._wrap(name, lambda original, inputs: sum(original(part) or 0 for part in _parts(inputs)))
        for name, is_training in (("get_train_dataloader", True), ("get_eval_dataloader", False)):
            if not self._undivided(is_training=is_training):
                self._wrap(name, self._load)
        self._wrap("_get_num_items_in_batch", self._count)
        self._wrap("compute_loss", self._compute_loss)
        self._wrap("training_step", self._train)
        self._wrap("prediction_step", self._predict)

    def failure(self, error: RuntimeError) -> TrialFailure | None:
        """Return how the trial goes on after an error: in smaller parts, or not at all; None if it has memory."""
        if not is_out_of_memory(error):
            return None
        trainer, args = self._trainer, self._trainer.args
        is_training = trainer.model.training
        size = args.train_batch_size if is_training else args.eval_batch_size
        size = min(size, self._most or size)
        if why := self._undivided(is_training=is_training):
            name = "per_device_train_batch_size" if is_training else "per_device_eval_batch_size"
            remedy = f"set a smaller {name}" + (", and gradient_accumulation_steps" if is_training else "")
            return TrialFailure("memory", f"out of memory with {size} at once, and {why}; {remedy}")
        if size == 1:
            return LacksMemory.with_least(1)
        smaller = (size + 1) // 2
        again = f"the trial begins again from its checkpoint, with at most {counted(smaller, 'sample')} at once"
        trainer_files.remark(f"a step of {size} samples ran out of memory; {again}: the same batch, the same result")
        return RanOut(one_line(error), smaller)

    def _undivided(self, *, is_training: bool) -> str:
        """Return why batches cannot be divided; empty if they can."""
        import torch

        trainer = self._trainer
        data = trainer.train_dataset if is_training else trainer.eval_dataset
        is_stream = isinstance(data, torch.utils.data.IterableDataset)
        for kind in type(trainer).__mro__:
            if kind.__name__ in _TOGETHER:
                return f"batches of {kind.__name__} are not divided: {_TOGETHER[kind.__name__]}"
        if trainer.is_deepspeed_enabled:
            return "batches are not divided with DeepSpeed"
        if is_stream and (not is_training or trainer.args.world_size > 1):
            return "batches of a stream are divided in training on one worker alone"
        if not is_training and "inputs" in trainer.args.include_for_metrics:
            return 'batches of an evaluation with include_for_metrics="inputs" are not divided'
        return ""

    def _wrap(self, name: str, call: Any) -> None:
        original = getattr(self._trainer, name)
        setattr(self._trainer, name, lambda *args, **words: call(original, *args, **words))

    def _load(self, original: Any, *args: Any, **words: Any) -> Any:
        collate = self._trainer.data_collator
        self._trainer.data_collator = _Collator(collate, self._most or 1)
        try:
            return original(*args, **words)
        finally:
            self._trainer.data_collator = collate

    def _count(self, original: Any, batches: Sequence[Any], device: Any) -> Any:
        return original([part for batch in batches for part in _parts(batch)], device)

    def _compute_loss(self, original: Any, *args: Any, **words: Any) -> Any:
        self._items = words.get("num_items_in_batch")
        found = original(*args, **words)
        return (found[0] * self._factor, *found[1:]) if isinstance(found, tuple) else found * self._factor

    def _train(self, original: Any, model: Any, batch: Any, num_items: Any = None) -> Any:
        """Add the gradients of the parts; those of a gang are exchanged in the last one."""
        loss, parts, trainer = 0.0, _parts(batch), self._trainer
        weights, is_sum = self._weights(batch), self._is_sum(num_items)
        for number, (part, weight) in enumerate(zip(parts, weights, strict=True), start=1):
            with nullcontext() if number == len(parts) else trainer.accelerator.no_sync(model):
                self._factor = 1.0 if is_sum else weight / sum(weights)
                try:
                    loss = loss + original(model, part, num_items)
                finally:
                    self._factor = 1.0
        return loss

    def _is_sum(self, num_items: Any) -> bool:
        """Whether losses are sums, divided by the items of the whole batch: they are added as they are."""
        trainer = self._trainer
        declared = getattr(trainer, "loss_is_scaled_for_ga", None)
        if declared is None:
            takes_items = trainer.model_accepts_loss_kwargs and num_items is not None
            declared = (takes_items or trainer.compute_loss_func is not None) and self._adds_up
        return bool(declared)

    def _predict(self, original: Any, model: Any, batch: Any, loss_only: bool, ignore_keys: Any = None) -> Any:
        """Evaluate the parts. Their losses are means over tokens, of the gang where the Trainer counts these."""
        found, weights, own = list[Any](), list[float](), self._weights(batch)
        for part, weight in zip(_parts(batch), own, strict=True):
            found.append(original(model, part, loss_only, ignore_keys=ignore_keys))
            weights.append(weight if self._items is None else float(self._items))
        losses, *others = zip(*found, strict=True)
        loss = losses[0]
        if loss is not None:
            loss = sum(each * weight / sum(weights) for each, weight in zip(losses, weights, strict=True))
        return (loss, *map(self._joined, others))

    def _joined(self, each: Sequence[Any]) -> Any:
        joined = each[0]
        for more in each[1:] if joined is not None else ():
            joined = self._transformers.trainer_pt_utils.nested_concat(joined, more, padding_index=-100)
        return joined

    def _weights(self, batch: Any) -> list[float]:
        """Return what each part counts in the batch's mean: its tokens where these have labels, else its samples."""
        return [self._weight(part, int(rows)) for part, rows in batch] if isinstance(batch, Parts) else [1.0]

    def _weight(self, part: Any, rows: int) -> float:
        labels = part.get("labels")
        if labels is None or labels.dim() < 2 or labels.is_floating_point():
            return float(rows)
        labels = labels[..., 1:] if getattr(self._trainer, "_loss_shifts_labels", False) else labels
        return float(labels.ne(-100).sum())


def _parts(batch: Any) -> list[Any]:
    return [part for part, _ in batch] if isinstance(batch, Parts) else [batch]


def ignores_items(transformers: Any, trainer: Any) -> bool:
    """Whether the loss of a sample is the same for any `num_items_in_batch`.

    TRL's own losses are tried as the Trainer's, as they note what they have computed. A subclass such as GRPOTrainer
    has batches that the Trainer's loss cannot take.
    """
    import torch

    is_known = type(trainer).compute_loss.__module__.startswith(("transformers.", "trl."))
    kind = transformers.Trainer if is_known else type(trainer)
    known = trainer.eval_dataset
    loader = trainer.get_eval_dataloader(next(iter(known.values())) if isinstance(known, dict) else known)
    trainer.model.eval()
    with torch.random.fork_rng(), torch.no_grad(), suppress(Exception):
        inputs = transformers.Trainer._prepare_inputs(trainer, loader.collate_fn([next(iter(loader.dataset))]))
        first, second = (
            kind.compute_loss(trainer, trainer.model, dict(inputs), num_items_in_batch=torch.tensor(items)).item()
            for items in (8, 16)
        )
        return bool(first == second)
    return False
