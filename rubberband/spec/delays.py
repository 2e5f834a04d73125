"""Delays as users write them: fixed, with a coefficient of variation, or measured one by one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from rubberband.spec.fields import Duration, Words
from rubberband.spec.fields import Spread as Coefficient
from rubberband.values.chance import FIXED, Spread, measured


class LognormalDelay(Words):
    """A delay that differs from one time to the next: its mean and coefficient of variation."""

    mean_s: Duration = Field(alias="mean")
    cv: Coefficient = 0.0


class SampledDelay(Words):
    """A delay that was measured: each of the `samples` is as likely as the others."""

    samples_s: Annotated[tuple[Duration, ...], Field(alias="samples", min_length=1, max_length=10_000)]


def _delay_kind(value: Any) -> str:
    if isinstance(value, SampledDelay) or (isinstance(value, Mapping) and "samples" in value):
        return "samples"
    return "mean" if isinstance(value, LognormalDelay | Mapping) else "duration"


Delay = Annotated[
    Annotated[Duration, Tag("duration")]
    | Annotated[LognormalDelay, Tag("mean")]
    | Annotated[SampledDelay, Tag("samples")],
    Discriminator(_delay_kind),
]
"""A duration, `{mean: 30s, cv: 0.5}`, or `{samples: [12s, 15s, 31s]}`."""


def delay_of(delay: float | LognormalDelay | SampledDelay) -> tuple[float, Spread]:
    """The mean of a delay in seconds, and how it varies about it."""
    if isinstance(delay, SampledDelay):
        return measured(delay.samples_s)
    if isinstance(delay, LognormalDelay):
        return delay.mean_s, Spread(cv=delay.cv) if delay.mean_s > 0.0 else FIXED
    return delay, FIXED
