"""Plans and their predictions: plain values that planner, executor and reports share."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal

from rubberband import markup
from rubberband.values.schedulers import Exchange, Ladder

Market = Literal["on_demand", "spot"]
MARKETS: tuple[Market, Market] = ("on_demand", "spot")
SizeKey = Literal["num_samples", "max_t"]
"""A key of a scheduler that sizes its search, and may be `auto`."""
Policy = Literal["optimal", "greedy", "static", "naive_elastic"]
"""The method of planning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of the job: `trials` trials train for `iterations` more iterations each, then synchronise (a rung)."""

    trials: int
    iterations: int
    ladder: Ladder | None = None
    """Set where no trial waits for others at a SYNC: it is the only stage, and `iterations` are those of the last
    rung. Ask `has_sync` and `rungs`."""
    repeats: int | None = None
    """Iterations before it that each of its trials trains again, as programs without a checkpoint do at every start;
    None: trials go on from their checkpoints. `repeating` sets it."""
    exchange: Exchange | None = None
    """Set where trials take over checkpoints of others at its SYNC."""

    @property
    def has_sync(self) -> bool:
        """Whether its trials wait for each other at its end, and the best are promoted then."""
        return self.ladder is None

    @property
    def rungs(self) -> Ladder:
        """The rungs that its trials climb: one, to the SYNC, where it has one."""
        return self.ladder or Ladder(totals=(self.iterations,), reduction_factor=1)

    @property
    def work(self) -> int:
        """Iterations that a trial which starts in it trains until its end; without rungs."""
        return self.iterations + (self.repeats or 0)

    @property
    def rung_work(self) -> tuple[int, ...]:
        """The same for each of its rungs."""
        return self.rungs.gains if self.repeats is None else tuple(total + self.repeats for total in self.rungs.totals)

    @property
    def scheduler(self) -> str:
        """The scheduler of a stage without a SYNC; empty for others."""
        return "" if self.ladder is None else self.ladder.scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """The resources of one stage: `instances` instances (k_i) and `gpus_per_trial` GPUs per trial (g_i)."""

    instances: int
    gpus_per_trial: int
    market: Market = "on_demand"
    """Market of its instances; a change of market replaces all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cohort:
    """Held instances that were started together, when the rest of a job is planned."""

    instances: int
    held_s: float
    """Seconds that each has been billed."""
    market: Market = "on_demand"


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Knowledge of the surviving trials, when the rest of a job is planned.

    These are the trials of the first stage that is left, in the order of their starts; later stages take some of them.
    """

    factors: tuple[float, ...]
    """Seconds per iteration of each trial over the profile's mean: its expected value."""
    errors: tuple[float, ...]
    """Coefficient of variation of each factor's error; 0: it is known exactly."""
    with_metric: float = 0.0
    """Correlation, from -1 to 1, of a trial's (log) seconds per iteration with how good its metric is: above 0, slow
    trials survive more often than fast ones. 0: survival does not depend on speed."""

    @property
    def plain(self) -> bool:
        """Whether nothing is known beyond the profile's mean."""
        return set(self.factors) <= {1.0} and not any(self.errors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Instances and GPUs per trial for every stage."""

    stages: tuple[StagePlan, ...]

    def _repr_html_(self) -> str:
        rows = [
            (str(number), str(stage.instances), str(stage.gpus_per_trial), stage.market.replace("_", " "))
            for number, stage in enumerate(self.stages)
        ]
        header = ("stage", "instances", "GPUs per trial", "market")
        return markup.card("plan", markup.table(header, rows, words=(0, 3)))


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePrediction:
    """The predicted time and cost of one stage."""

    start_s: float
    """From the job's start until the stage's first command (the launch of its instances, if it grows)."""
    provisioning_s: float
    """SCALE + INIT_INSTANCE if the cluster grows for this stage, else 0."""
    duration_s: float
    """Stage time: from its first trial's start to SYNC; without `provisioning_s`."""
    cost_usd: float
    """Growth of the bill from `start_s` to the stage's SYNC, with minimum billing and data."""
    slots: int
    """Trials that run at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Mean and quantiles of a quantity that varies, in its own unit."""

    mean: float
    p10: float
    p50: float
    p90: float
    p95: float

    @classmethod
    def point(cls, value: float) -> Distribution:
        """Return the distribution of a quantity that does not vary."""
        return cls(mean=value, p10=value, p50=value, p90=value, p95=value)

    def shifted(self, by: float) -> Distribution:
        """Return the distribution of the quantity plus `by`."""
        return Distribution(**{name: value + by for name, value in self.to_json().items()})

    def to_json(self) -> dict[str, float]:
        """Return plain values by name."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}  # asdict takes ten times as long


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The predicted time and cost of a plan: mean values, and their distributions."""

    jct_s: float
    """Job completion time: from the first launch to the last SYNC."""
    cost_usd: float
    stages: tuple[StagePrediction, ...]
    """Mean values; they add up to `jct_s` and `cost_usd`."""
    jct: Distribution | None = None
    """None if nothing varies."""
    cost: Distribution | None = None
    """None if nothing varies."""
    num_samples: int = 1
    """Samples that the distributions were drawn with; 1 if nothing varies."""
    extrapolated: tuple[int, ...] = ()
    """GPU counts that the plan uses and the profile did not measure (beyond its largest)."""

    def ahead(self, seconds: float) -> Prediction:
        """Return the prediction of a job whose first launch began `seconds` before it; its cost stays."""
        first_s = [stage.provisioning_s for stage in self.stages if stage.start_s == 0.0]  # of each lane
        passed_s = min(seconds, *first_s)
        stages = tuple(
            replace(stage, provisioning_s=stage.provisioning_s - passed_s)
            if stage.start_s == 0.0
            else replace(stage, start_s=stage.start_s - passed_s)
            for stage in self.stages
        )
        jct = None if self.jct is None else self.jct.shifted(-passed_s)
        return replace(self, jct_s=self.jct_s - passed_s, jct=jct, stages=stages)


def gang_sizes(gpus_per_instance: int, minimum: int, maximum: int, sizes: Collection[int] = ()) -> list[int]:
    """Return the GPUs per trial that packing allows in a range: any up to G, multiples of G beyond.

    Only those among `sizes`, if there are any.
    """
    return [
        gpus
        for gpus in range(minimum, maximum + 1)
        if (gpus <= gpus_per_instance or gpus % gpus_per_instance == 0) and (not sizes or gpus in sizes)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningConstraints:
    """Limits of a plan; None is no limit."""

    deadline_s: float | None = None
    max_cost_usd: float | None = None
    min_gpus_per_trial: int = 1
    max_gpus_per_trial: int = 1
    gpus_per_trial_sizes: tuple[int, ...] = ()
    """The only GPUs per trial within that range; empty: all."""
    confidence: float = 0.95
    """P(JCT <= deadline and cost <= budget) that a plan must reach if times vary; in (0, 1)."""

    def gang_sizes(self, gpus_per_instance: int) -> list[int]:
        """Return the GPUs per trial that a plan may have on instances of `gpus_per_instance`."""
        return gang_sizes(
            gpus_per_instance, self.min_gpus_per_trial, self.max_gpus_per_trial, self.gpus_per_trial_sizes
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Odds:
    """Probabilities that a plan keeps its constraints."""

    p_deadline: float
    p_budget: float
    p_both: float
    """The one that `confidence` asks for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan together with its prediction."""

    plan: Plan
    prediction: Prediction
    odds: Odds | None = None
    """None if nothing varies."""
    reserve_usd: float = 0.0
    """Money that a run keeps back beside the cost."""


def repeating(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """Return the stages of a bracket, or the later ones of those returned here, whose trials save no checkpoint."""
    before = accumulate((stage.iterations for stage in stages), initial=0)
    return tuple(
        stage if stage.repeats is not None else replace(stage, repeats=earlier)
        for stage, earlier in zip(stages, before, strict=False)
    )


def total_iterations(stages: Sequence[Stage]) -> int:
    """Return the iterations of a trial that survives all `stages`."""
    return sum(stage.iterations for stage in stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The size of a search that was sized to its limits."""

    key: SizeKey
    number: int | None
    """None if no size fits: then the estimate is of the smallest search."""
    smallest: int
    num_trials: int
    """Configurations that are tried, over all brackets."""

    @property
    def setting(self) -> str:
        """The size as an override of the file: `search.scheduler.num_samples=283`."""
        return f"search.scheduler.{self.key}={self.number}"

    def to_json(self) -> dict[str, Any]:
        """Return the object under `size` of an estimate's JSON."""
        return {"key": self.key, "number": self.number, "trials": self.num_trials}


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Time and money used before an experiment starts; they count against its limits."""

    seconds: float = 0.0
    cost_usd: float = 0.0
