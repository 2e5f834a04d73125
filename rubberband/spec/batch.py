"""The batch size of a trial in the words of the experiment file: fixed, or adapted within limits (Pollux, OSDI '21)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from rubberband.spec.fields import MODULE_ATTRIBUTE, Count, Words, fault
from rubberband.units import nearest, shown
from rubberband.values.adaptive import INTERVAL, LR_SCALINGS, AdaptiveBatch


def _lr_scaling(value: Any) -> Any:
    if value is None or value in LR_SCALINGS or (isinstance(value, str) and MODULE_ATTRIBUTE.fullmatch(value)):
        return value
    raise fault(
        f"{shown(value)} is none of {', '.join(LR_SCALINGS)}, and no module:function; "
        f"{nearest(str(value), LR_SCALINGS)}"
    )


class Batch(Words):
    """How the batch size of a trial is chosen. All but the policy is for goodput."""

    policy: Literal["fixed", "goodput"] = "fixed"
    """fixed: as the trial says; goodput: whatever makes the most progress per second on the trial's GPUs."""
    initial: Count | None = None
    """Samples per optimizer step that a trial starts with, over all of its GPUs, and never goes below; by default the
    trial's own batch size."""
    max: Count | None = None
    """Most samples per optimizer step; by default 32 times the initial ones."""
    max_per_gpu: Count | None = None
    """Most samples that go through the model on one GPU at once; by default the trial's own limit."""
    accumulation: Annotated[bool, Field(strict=True)] = True
    """Whether gradients may be accumulated over several passes, for a batch that does not fit otherwise."""
    lr_scaling: Annotated[str | None, BeforeValidator(_lr_scaling)] = None
    """How the learning rate follows the batch: adascale, linear, sqrt, legw, or module:function; by default adascale,
    or sqrt for Adam and its kin."""
    warmup_epochs: Annotated[float, Field(strict=True, ge=0, le=1000)] = 1.0
    """Of legw: epochs of warm-up at the initial batch size."""
    interval: Count = INTERVAL
    """Optimizer steps from one choice of the batch to the next."""

    @model_validator(mode="after")
    def _agrees(self) -> Batch:
        if self.policy == "fixed":
            self._refuse_keys_of_goodput()
        elif self.initial is not None and self.max is not None and self.max < self.initial:
            raise fault(f"{self.max} is less than initial={self.initial}; raise it, or lower initial", at="max")
        return self

    def _refuse_keys_of_goodput(self) -> None:
        for key in Batch.model_fields:
            if key != "policy" and key in self.model_fields_set:
                raise fault("is for policy: goodput; leave it out, or set policy: goodput", at=key)

    @model_serializer(mode="wrap")
    def _without_keys_of_goodput(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        words: dict[str, Any] = serialize(self)
        return words if self.policy == "goodput" else {"policy": self.policy}

    def to_plain(self) -> AdaptiveBatch | None:
        """As the trials are told; None: the batch is fixed."""
        if self.policy == "fixed":
            return None
        return AdaptiveBatch(
            initial=self.initial,
            max=self.max,
            max_per_gpu=self.max_per_gpu,
            accumulation=self.accumulation,
            lr_scaling=self.lr_scaling,
            warmup_epochs=self.warmup_epochs,
            interval=self.interval,
        )
