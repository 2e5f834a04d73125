"""The model of adaptive batches in the words of a profile: the `goodput` block, inline or in a profile file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any

from pydantic import Field, model_validator

from rubberband.adaptive import BatchLimits, BatchPoint, GoodputProfile, Throughput
from rubberband.units import MAX_DURATION_S
from rubberband.words import Amount, Count, Gpus, Tally, Words, fault

Seconds = Annotated[float, Field(strict=True, ge=0, le=MAX_DURATION_S)]
"""Plain seconds: those of a step are too short to be written otherwise."""


class ThroughputWords(Words):
    """The parameters of the time of an optimizer step (Pollux, eqs. 8-12)."""

    alpha_grad_s: Seconds
    """Of a pass through the model, whatever its size."""
    beta_grad_s: Seconds
    """Of each sample of a pass."""
    alpha_local_s: Seconds = 0.0
    """To synchronise two GPUs of one instance."""
    beta_local_s: Seconds = 0.0
    """For each GPU of the instance beyond the second."""
    alpha_node_s: Seconds = 0.0
    """To synchronise two GPUs of several instances."""
    beta_node_s: Seconds = 0.0
    """For each GPU beyond the second."""
    gamma: Annotated[float, Field(strict=True, ge=1, le=10)] = 1.0
    """How far computing and synchronising overlap: 1 not at all, 10 almost wholly."""

    @model_validator(mode="after")
    def _takes_time(self) -> ThroughputWords:
        if self.alpha_grad_s == 0 == self.beta_grad_s:
            raise fault("is 0 like beta_grad_s, so that a step takes no time; raise one of them", at="alpha_grad_s")
        return self


class LimitsWords(Words):
    """Which batches a trial can choose among."""

    initial: Count
    """Samples of the smallest batch."""
    max: Count
    """Samples of the largest one."""
    max_per_gpu: Count | None = None
    """Most samples that go through the model on one GPU at once; none: no limit is known."""
    accumulation: Annotated[bool, Field(strict=True)] = True
    """Whether gradients may be accumulated."""

    @model_validator(mode="after")
    def _agrees(self) -> LimitsWords:
        if self.max < self.initial:
            raise fault(f"{self.max} is less than initial={self.initial}; raise it, or lower initial", at="max")
        return self


class PointWords(Words):
    """A measured optimizer step."""

    instances: Count
    """That the trial's GPUs were on."""
    gpus: Gpus
    per_gpu: Count
    """Samples that went through the model on one GPU at once."""
    accumulation: Tally
    """Passes beyond the first."""
    step_s: Annotated[float, Field(strict=True, gt=0, le=MAX_DURATION_S)]


class GoodputWords(Words):
    """What adaptive batches are planned with; without it they are planned as fixed ones."""

    throughput: ThroughputWords
    """How long an optimizer step takes."""
    noise_scale: Annotated[float, Field(strict=True, gt=0, le=1e15)]
    """The gradient noise scale, in samples: how large a batch still teaches nearly as much per sample."""
    samples_per_iteration: Annotated[float, Field(strict=True, gt=0, le=1e15)]
    """Training samples of an iteration at the initial batch size."""
    limits: LimitsWords
    """Which batches there are; the experiment's own `batch` goes before it."""
    overhead_s: Seconds = 0.0
    """Of an iteration, beside its optimizer steps: evaluation, checkpoint."""
    points: Annotated[tuple[PointWords, ...], Field(max_length=10_000)] = ()
    """What the throughput was fitted to; empty where it was written by hand."""
    fit_error: Amount = 0.0
    """Mean relative error of the fit over the points."""

    def to_plain(self) -> GoodputProfile:
        """The plain values that the planner reckons with."""
        return GoodputProfile(
            throughput=Throughput(**self.throughput.model_dump()),
            noise_scale=self.noise_scale,
            samples_per_iteration=self.samples_per_iteration,
            limits=BatchLimits(**self.limits.model_dump()),
            overhead_s=self.overhead_s,
            points=tuple(BatchPoint(**point.model_dump()) for point in self.points),
            fit_error=self.fit_error,
        )


def goodput_document(model: GoodputProfile | None) -> Mapping[str, Any] | None:
    """The block as JSON values, which `GoodputWords` reads back equal; None where there is none."""
    return None if model is None else asdict(model)
