"""Adaptive batch sizes in plain values: what the user allows, what was measured, and the model that was fitted to it.

Symbols are those of Pollux (OSDI '21, §3): K GPUs of a gang on N instances, m samples per GPU and pass, s accumulation
steps, M = K m (s + 1) samples per optimizer step, M0 the initial batch size, phi the gradient noise scale. The
functions over these values are in `rubberband.planner.goodput`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

ScaleLr = Callable[[int, int, float], float]
"""A user's rule for the learning rate: (M0, M, phi) -> lambda, by which the learning rate is multiplied."""

BatchMode = Literal["adapt", "hold", "sweep"]
"""What a trial does where its batch may be adapted: choose it by goodput; keep the initial one and only observe; or try
the sizes that are allowed one after another, to time them."""

LR_SCALINGS = ("adascale", "linear", "sqrt", "legw")
"""The rules that are built in; a user's own one is named `module:function`."""

MAX_GROWTH = 32
"""Where nothing is said, a batch may grow to so many times the initial one (Pollux §3.1: works well in most cases)."""
INTERVAL = 20
"""Where nothing is said, the batch is chosen anew after so many optimizer steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveBatch:
    """What `batch: {policy: goodput, …}` allows."""

    initial: int | None = None
    """M0. None: what the trial itself takes as its batch size."""
    max: int | None = None
    """The largest M. None: `MAX_GROWTH` times the initial one."""
    max_per_gpu: int | None = None
    """The largest m. None: what the trial itself gives as its limit."""
    accumulation: bool = True
    """Whether s may be more than 0 where M does not fit otherwise."""
    lr_scaling: str | None = None
    """One of `LR_SCALINGS`, or `module:function`. None: adascale, or sqrt for Adam and its kin (Pollux §5.1)."""
    warmup_epochs: float = 1.0
    """Of legw: epochs at the initial batch size over which the learning rate is warmed up."""
    interval: int = INTERVAL
    """Optimizer steps from one choice of the batch to the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Which batches a trial can choose among, once what is not said was taken from the trial itself."""

    initial: int
    """M0: no batch is smaller."""
    max: int
    """No batch is larger."""
    max_per_gpu: int | None = None
    """The largest m: as the user or the trial says, or as memory turned out to allow. None: no limit is known."""
    accumulation: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPoint:
    """A measured optimizer step: (a, m, s) -> T_iter (§4.1)."""

    instances: int
    """N, that the gang spans."""
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
    """M, which need not be a multiple of K: some workers may take a sample less."""
    per_gpu: int
    accumulation: int
    steps: int
    duration_s: float
    """From its first step to its last, all included."""
    step_s: float
    """Mean seconds per step, without the first one of a new batch size."""
    noise_scale: float | None
    """phi at its end; None as long as there is no estimate."""
    efficiency: float
    """EFFICIENCY(M) at its end (eq. 6); 1 as long as phi is not known."""

    @property
    def throughput(self) -> float:
        """Samples per second (eq. 7)."""
        return self.batch_size / self.step_s

    def point(self) -> BatchPoint:
        """What it tells of the time of a step."""
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
    """How far computing and synchronising overlap: 1 not at all, 10 almost wholly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputProfile:
    """What adaptive training is planned with: measured points, the fit, and what an iteration is."""

    throughput: Throughput
    noise_scale: float
    """phi as measured; it grows as training goes on, so that plans are on the safe side."""
    samples_per_iteration: float
    """Of an iteration at the initial batch size; statistical progress is counted in these."""
    limits: BatchLimits
    overhead_s: float = 0.0
    """Of an iteration, beside its optimizer steps: evaluation, checkpoint."""
    points: tuple[BatchPoint, ...] = ()
    """Empty where the model was written by hand."""
    fit_error: float = 0.0
    """Mean relative error of the fit over the points."""
