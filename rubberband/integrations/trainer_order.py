"""The order of a Trainer's samples after a resume: a sampler with random numbers of its own goes on with them.

The Trainer of Hugging Face keeps the order of its usual sampler. TRL's GRPOTrainer has one with a generator, which
would begin with the order of the first epoch again; one that takes the numbers of torch, as for `group_by_length`,
would divide the rest of an epoch otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rubberband.integrations import trainer_files

_NAME = "_rubberband_order"
"""Attribute of the Trainer with the random states, which `BesideState` saves and restores as those of a subclass."""


def sample_order(transformers: Any, trainer: Any, *, is_resumed: bool) -> Any:
    """Return a callback that keeps the order; it comes before the one that saves."""
    import torch

    made: list[Any] = []
    make = trainer._get_train_sampler

    def made_sampler(*words: Any, **named: Any) -> Any:
        made.append(make(*words, **named))
        return made[-1]

    trainer._get_train_sampler = made_sampler

    def generator() -> Any:
        found = getattr(made[-1], "generator", None) if made else None
        return found if isinstance(found, torch.Generator) else None

    class SampleOrder(transformers.TrainerCallback):  # type: ignore[misc]
        """Keeps random states at the begin of an epoch and at a save."""

        def __init__(self) -> None:
            self._is_due = is_resumed
            """Whether the next epoch is the first one after a resume."""

        def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            kept, drawn = getattr(trainer, _NAME, None), _bytes(torch.get_rng_state())
            if self._is_due and kept is not None:
                is_within = state.epoch is not None and state.epoch % 1 > 0
                if (own := generator()) is not None and (known := kept["begin" if is_within else "saved"]) is not None:
                    own.set_state(_tensor(known))
                if kept["workers"] == args.world_size:
                    drawn = kept["torch" if is_within else "torch_saved"]
                    if is_within:  # else the Trainer restores it after this
                        torch.set_rng_state(_tensor(drawn))
            self._is_due = False
            setattr(trainer, _NAME, {"begin": _now(), "torch": drawn, "saved": None})

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            kept = getattr(trainer, _NAME, None)
            if kept is not None:
                saved = {"saved": _now(), "torch_saved": _bytes(torch.get_rng_state())}
                setattr(trainer, _NAME, {**kept, **saved, "workers": args.world_size})

    def _now() -> bytes | None:
        own = generator()
        return None if own is None else _bytes(own.get_state())

    def _bytes(state: Any) -> bytes:
        content: bytes = state.numpy().tobytes()
        return content

    def _tensor(content: bytes) -> Any:
        return torch.frombuffer(bytearray(content), dtype=torch.uint8)

    return SampleOrder()


def remark_repeated_samples(trainer: Any) -> None:
    """Say where the last batch of an epoch, or of an evaluation, is not the same on a gang of another size.

    The Trainer gives each worker as many samples, some of them a second time. Samplers of a subclass, such as GRPO's,
    divide evenly.
    """
    from torch.utils.data import RandomSampler, SequentialSampler

    args, repeated = trainer.args, []
    if args.world_size == 1 or args.dataloader_drop_last or is_streamed(trainer.train_dataset):
        return
    if isinstance(trainer._get_train_sampler(), RandomSampler | SequentialSampler):
        repeated.append(("an epoch", trainer.train_dataset, args.per_device_train_batch_size))
    if hasattr(trainer.eval_dataset, "__len__") and not isinstance(trainer.eval_dataset, Mapping):
        repeated.append(("an evaluation", trainer.eval_dataset, args.per_device_eval_batch_size))
    for name, dataset, per_worker in repeated:
        batch = per_worker * args.world_size
        if last := len(dataset) % batch:
            trainer_files.remark(
                f"the last batch of {name} has {last} of {batch} samples, and the Trainer repeats some on "
                f"{args.world_size} workers; a multiple of {batch} samples gives the same on any number of workers"
            )


def is_streamed(dataset: Any) -> bool:
    """Whether a dataset is read from its begin alone."""
    import torch.utils.data as data

    return isinstance(dataset, data.IterableDataset) or not hasattr(dataset, "__len__")
