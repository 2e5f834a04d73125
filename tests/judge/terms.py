"""What the independent simulation is given: a job with its plan, an offer and the noise, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """Law of a factor with mean 1: fixed, lognormal, normal and cut off at 0, or one of measured values."""

    cv: float = 0.0
    samples: tuple[float, ...] = ()
    is_normal: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """What varies between runs, beside the delays."""

    trial: Law = field(default_factory=Law)
    """A trial's own factor, the same in all of its stages."""
    iteration: Law = field(default_factory=Law)
    """Of each iteration, drawn anew."""
    startup: Law = field(default_factory=Law)
    """Of each start of a trial, drawn anew."""
    mean: Law = field(default_factory=Law)
    """The profile's own error, which all trials share."""
    slow_is_good: float = 0.0
    """Correlation of a trial's slowness (log) with its metric; 0: survivors are random."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """One instance type: delays in seconds, prices of an instance in USD per hour."""

    gpus: int
    price: float
    spot_price: float = 0.0
    interruptions_per_hour: float = 0.0
    checkpoint_iterations: int = 1
    provision_s: float = 0.0
    provision: Law = field(default_factory=Law)
    init_s: float = 0.0
    init: Law = field(default_factory=Law)
    per_function: bool = False
    minimum_s: float = 0.0
    once_usd: float = 0.0
    head_price: float = 0.0
    margin_s: float = 0.0
    """Time in which everything may still have to be paid for when a run is stopped."""
    reserved_price: float = 0.0
    """What is kept back for an hour of an instance whose price may rise, or is not known yet; at least `price`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A stage, and what the plan gives it."""

    trials: int
    iterations: int
    """More of each trial."""
    instances: int
    gpus: int
    """Of each trial."""
    iteration_s: float
    """With that many GPUs."""
    spot: bool = False
    begins: bool = False
    """Whether its trials are new: the first stage of a bracket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A job with its plan: lanes side by side, each a chain of stages."""

    lanes: tuple[tuple[Step, ...], ...]
    startup_s: float
    rungs: tuple[int, ...] = ()
    """Without a SYNC (asha): iterations that each rung adds; the only lane has one stage then."""
    reduction: int = 0
    """The best 1/reduction of a rung are promoted (asha)."""
    quotas: tuple[int, ...] = ()
    """The most instances of each lane; empty: as many as its plan needs."""

    @property
    def most(self) -> tuple[int, ...]:
        """The most instances of each lane."""
        return self.quotas or tuple(max(step.instances for step in lane) for lane in self.lanes)
