"""The words `batch` and `training` of an experiment: how the workers of a trial train together."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from rubberband.spec.fields import MODULE_ATTRIBUTE, Count, Tally, Words, fault
from rubberband.units import nearest, shown
from rubberband.values.adaptive import INTERVAL, LR_SCALINGS, AdaptiveBatch
from rubberband.values.asynchronous import AsyncTraining
from rubberband.values.balance import Balance, BalancePolicy


def _lr_scaling(value: Any) -> Any:
    if value is None or value in LR_SCALINGS or (isinstance(value, str) and MODULE_ATTRIBUTE.fullmatch(value)):
        return value
    raise fault(
        f"{shown(value)} is not one of {', '.join(LR_SCALINGS)}, nor module:function; "
        f"{nearest(str(value), LR_SCALINGS)}"
    )


class BatchBalance(Words):
    """The division of a batch among the workers of a trial."""

    policy: BalancePolicy = "auto"
    """auto: by the measured speed of each worker, where that pays; equal: the same for all; paper: by the algorithms of
    LB-BSP as printed."""
    max_share: Annotated[float, Field(strict=True, gt=0, le=1)] | None = None
    """Largest part of a batch on one worker, such as 0.5; never less than an equal share. By default what its memory
    holds."""

    @model_validator(mode="after")
    def _agrees(self) -> BatchBalance:
        if self.policy == "equal" and self.max_share is not None:
            wrong = f"{self.max_share:g} limits nothing where shares are equal; leave it out, or set policy: auto"
            raise fault(wrong, at="max_share")
        return self

    def to_plain(self) -> Balance:
        """Return the settings of the trials."""
        return Balance(policy=self.policy, max_share=self.max_share)


_FOR_ALL_BATCHES = ("policy", "balance", "verify")
"""Keys of `batch` that do not need policy: goodput."""


class Batch(Words):
    """The choice of a trial's batch size. All keys but `policy`, `balance` and `verify` are for
    `policy: goodput`."""

    policy: Literal["fixed", "goodput"] = "fixed"
    """fixed: the trial's own; goodput: the one with the most progress per second on the trial's GPUs."""
    initial: Count | None = None
    """Samples per optimizer step at the start, over all GPUs of the trial, and at least; by default the trial's own
    batch size."""
    max: Count | None = None
    """Most samples per optimizer step; by default 32 times the initial ones."""
    max_per_gpu: Count | None = None
    """Most samples in one pass on one GPU; by default the trial's own limit."""
    accumulation: Annotated[bool, Field(strict=True)] = True
    """Whether gradients may be accumulated over several passes, if a batch does not fit otherwise."""
    lr_scaling: Annotated[str | None, BeforeValidator(_lr_scaling)] = None
    """Rule for the learning rate of a batch: adascale, linear, sqrt, legw, or module:function; by default adascale, or
    sqrt for optimizers such as Adam."""
    warmup_epochs: Annotated[float, Field(strict=True, ge=0, le=1000)] = 1.0
    """Epochs of warm-up at the initial batch size, for legw."""
    interval: Count = INTERVAL
    """Optimizer steps between choices of the batch size."""
    balance: BatchBalance = Field(default_factory=BatchBalance.defaults)
    """How the workers of a trial divide a batch; also for `policy: fixed`."""
    verify: Annotated[bool, Field(strict=True)] = True
    """Whether the weights of a trial's workers are compared at every SYNC; a difference fails the trial. Also for
    `policy: fixed`."""

    @model_validator(mode="after")
    def _agrees(self) -> Batch:
        if self.policy == "fixed":
            for key in Batch.model_fields:
                if key not in _FOR_ALL_BATCHES and key in self.model_fields_set:
                    raise fault("is for policy: goodput; leave it out, or set policy: goodput", at=key)
        elif self.initial is not None and self.max is not None and self.max < self.initial:
            raise fault(f"{self.max} is less than initial={self.initial}; raise it, or lower initial", at="max")
        return self

    @model_serializer(mode="wrap")
    def _without_keys_of_goodput(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        words: dict[str, Any] = serialize(self)
        if self.policy == "goodput":
            return words
        return {
            key: words[key]
            for key in _FOR_ALL_BATCHES
            if key in words and (key == "policy" or key in self.model_fields_set)
        }

    def to_plain(self) -> AdaptiveBatch | None:
        """Return the settings of the trials; None: the batch is fixed."""
        return None if self.policy == "fixed" else AdaptiveBatch(**self.model_dump(exclude=set(_FOR_ALL_BATCHES)))


class Training(Words):
    """Whether a trial's workers take each optimizer step together. All keys but `mode` are for `mode: async`."""

    mode: Literal["sync", "async"] = "sync"
    """sync: the gradients of all workers are averaged; async: parameter servers apply each worker's on its own."""
    servers: Count = 1
    """Parameter servers of each trial: processes beside its workers, each with a part of the model."""
    max_staleness: Tally | None = None
    """Most updates by which a worker may be ahead of the slowest one; 0: all share the batch of each update, as in
    sync; by default there is no bound."""

    @model_validator(mode="after")
    def _agrees(self) -> Training:
        if self.mode == "sync":
            for key in ("servers", "max_staleness"):
                if key in self.model_fields_set:
                    raise fault("is for mode: async; leave it out, or set mode: async", at=key)
        return self

    @model_serializer(mode="wrap")
    def _without_keys_of_async(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        words: dict[str, Any] = serialize(self)
        return words if self.mode == "async" else {"mode": self.mode}

    def to_plain(self) -> AsyncTraining | None:
        """Return the settings of the trials; None: training is synchronous."""
        return None if self.mode == "sync" else AsyncTraining(**self.model_dump(exclude={"mode"}))
