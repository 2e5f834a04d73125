"""Adaptive batch sizes in plain values: the user's limits, the measurements, and the model that is fitted to them.

Symbols are those of Pollux (OSDI '21, §3): K GPUs of a gang on N instances, m samples per GPU and pass, s accumulation
steps, M = K m (s + 1) samples per optimizer step, M0 the initial batch size, phi the gradient noise scale. The
functions over these values are in `rubberband.planner.goodput`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

ScaleLr = Callable[[int, int, float], float]
"""A user's rule for the learning rate: (M0, M, phi) -> its factor lambda."""

BatchMode = Literal["adapt", "hold", "sweep"]
"""Use of an adaptive batch: choose it by goodput; keep the initial one and only observe; or time the allowed sizes one
after another."""

LR_SCALINGS = ("adascale", "linear", "sqrt", "legw")
"""The built-in rules; a user's own one is `module:function`."""

MAX_GROWTH = 32
"""Default of the largest batch over the initial one (Pollux §3.1: works well in most cases)."""
INTERVAL = 20
"""Default of the optimizer steps between choices of the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveBatch:
    """The limits of `batch: {policy: goodput, …}`."""

    initial: int | None = None
    """M0. None: the trial's own batch size."""
    max: int | None = None
    """The largest M. None: `MAX_GROWTH` times the initial one."""
    max_per_gpu: int | None = None
    """The largest m. None: the trial's own limit."""
    accumulation: bool = True
    """Whether s may be more than 0 if M does not fit otherwise."""
    lr_scaling: str | None = None
    """One of `LR_SCALINGS`, or `module:function`. None: adascale, or sqrt for Adam and its kin (Pollux §5.1)."""
    warmup_epochs: float = 1.0
    """Epochs of warm-up at the initial batch size, for legw."""
    interval: int = INTERVAL
    """Optimizer steps between choices of the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """The batches that a trial can choose among, after the trial has filled in its own limits."""

    initial: int
    """M0: no batch is smaller."""
    max: int
    """No batch is larger."""
    max_per_gpu: int | None = None
    """The largest m: the user's, the trial's, or the one that memory allowed. None: no limit is known."""
    accumulation: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPoint:
    """A measured optimizer step: (a, m, s) -> T_iter (§4.1)."""

    instances: int
    """N, the instances of the gang."""
    gpus: int
    """K."""
    per_gpu: int
    """m."""
    accumulation: int
    """s."""
    step_s: float
    """T_iter, seconds per optimizer step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchUse:
    """A stretch of a trial's training at one batch size."""

    instances: int
    gpus: int
    batch_size: int
    """M; not always a multiple of K, as some workers may take a sample less."""
    per_gpu: int
    accumulation: int
    steps: int
    duration_s: float
    """Seconds of all its steps."""
    step_s: float
    """Mean seconds per step, without the first one of a new batch size."""
    noise_scale: float | None
    """phi at its end; None before the first estimate."""
    efficiency: float
    """EFFICIENCY(M) at its end (eq. 6); 1 while phi is unknown."""

    @property
    def throughput(self) -> float:
        """Samples per second (eq. 7)."""
        return self.batch_size / self.step_s

    def point(self) -> BatchPoint:
        """Return its measurement of the time of a step."""
        return BatchPoint(
            instances=self.instances,
            gpus=self.gpus,
            per_gpu=self.per_gpu,
            accumulation=self.accumulation,
            step_s=self.step_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """theta_sys, the parameters of the time of an optimizer step (eq. 12); seconds, all at least 0."""

    alpha_grad_s: float
    beta_grad_s: float
    """Per sample."""
    alpha_local_s: float = 0.0
    beta_local_s: float = 0.0
    """Per GPU beyond the second."""
    alpha_node_s: float = 0.0
    beta_node_s: float = 0.0
    """Per GPU beyond the second."""
    gamma: float = 1.0
    """Overlap of computing and synchronising: 1 is none, 10 is almost complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputProfile:
    """The model that adaptive training is planned with: measured points, their fit, and the work of an iteration."""

    throughput: Throughput
    noise_scale: float
    """phi as measured; it grows during training, so plans are on the safe side."""
    samples_per_iteration: float
    """Samples of an iteration at the initial batch size, the unit of statistical progress."""
    limits: BatchLimits
    overhead_s: float = 0.0
    """Time of an iteration beside its optimizer steps: evaluation, checkpoint."""
    points: tuple[BatchPoint, ...] = ()
    """Empty where the model was written by hand."""
    fit_error: float = 0.0
    """Mean relative error of the fit over the points."""
