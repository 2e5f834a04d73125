"""Plans and what is predicted of them: plain values that planner, executor and reports share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of the job: `trials` trials train for `iterations` more iterations each, then synchronise (a rung)."""

    trials: int
    iterations: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """What one stage gets: `instances` instances (k_i) and `gpus_per_trial` GPUs for each of its trials (g_i)."""

    instances: int
    gpus_per_trial: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Instances and GPUs per trial for every stage."""

    stages: tuple[StagePlan, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePrediction:
    """What one stage is predicted to take and cost."""

    start_s: float
    """From the job's start until the stage's first command (the launch of its instances, if it grows)."""
    provisioning_s: float
    """SCALE + INIT_INSTANCE if the cluster grows for this stage, else 0."""
    duration_s: float
    """Stage time: from its first trial's start to SYNC; without `provisioning_s`."""
    cost_usd: float
    """What is added to the bill from `start_s` to the stage's SYNC, minimum billing and data included."""
    slots: int
    """Trials that run at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a plan is predicted to take and cost in all."""

    jct_s: float
    """Job completion time: from the first launch to the last SYNC."""
    cost_usd: float
    stages: tuple[StagePrediction, ...]
    extrapolated: tuple[int, ...] = field(default=())
    """GPU counts that the plan uses and the profile did not measure (beyond its largest)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """What a plan must keep: None is no limit."""

    deadline_s: float | None = None
    max_cost_usd: float | None = None
    min_gpus_per_trial: int = 1
    max_gpus_per_trial: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan together with its prediction."""

    plan: Plan
    prediction: Prediction


def total_iterations(stages: Sequence[Stage]) -> int:
    """Iterations that a trial has done which survives all `stages`."""
    return sum(stage.iterations for stage in stages)
