"""The result of an experiment: trials, the best configuration, planned against actual, and how paid time was used.

A view of the journal at any moment, also while the experiment runs or after a crash. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from rubberband.errors import InputError
from rubberband.executor.core.bill import (
    PaidTime,
    bill_lines,
    bill_usd,
    instance_cost_usd,
    lane_bill_usd,
    paid_time,
    rent_usd_per_hour,
)
from rubberband.executor.core.events import CheckpointRef
from rubberband.executor.core.history import (
    DecisionResult,
    Fork,
    GivenBack,
    LimitsExtended,
    Pause,
    Regrouped,
    Replacement,
    RungResult,
    SearchEnd,
    Setback,
    TrialCut,
    TrialsJoined,
)
from rubberband.executor.core.limits import can_go_on, not_started
from rubberband.executor.core.ranking import best_trial, standing
from rubberband.executor.core.state import GangRun, LaneState, Phase, State, TrialState
from rubberband.executor.result.batch_history import (
    BalanceStretch,
    BatchStretch,
    balance_history,
    batch_history,
    copied,
    plain_of,
)
from rubberband.executor.sampling import Seeds, configurations, first_configurations
from rubberband.units import counted, format_usd, in_unit
from rubberband.values.adaptive import GoodputProfile
from rubberband.values.asynchronous import AsyncUse
from rubberband.values.kinds import KINDS, NOT_INSTALLED
from rubberband.values.offer import BillLine, Place, Unit
from rubberband.values.plan import Market
from rubberband.values.ranking import Limit, Ranking, Standing
from rubberband.values.stopping import is_evaluated
from rubberband.values.worth import RestWorth

if TYPE_CHECKING:
    import os
    from pathlib import Path

    import optuna
    import pandas

    from rubberband.executor.training.entrypoint import Code


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A metric, and which of its values are better."""

    metric: str
    mode: Literal["max", "min"]
    at_most: float | None = None
    """Limits of a feasible trial; None: none."""
    at_least: float | None = None

    @property
    def title(self) -> str:
        """Return `latency (min)`, with its limits."""
        return f"{self.metric} ({', '.join(filter(None, (self.mode, self.limit_text)))})"

    @property
    def limit_text(self) -> str:
        """Return `at most 20`; empty without a limit."""
        limits = (("at least", self.at_least), ("at most", self.at_most))
        return " and ".join(f"{word} {limit:g}" for word, limit in limits if limit is not None)


Found = TypeVar("Found")


def front(candidates: Sequence[tuple[Found, Mapping[str, float]]], objectives: Sequence[Objective]) -> list[Found]:
    """Return the Pareto front: those that no other equals in every objective and beats in one, best first.

    The first objective orders them. A candidate without a finite value of every objective is left out.
    """
    known: list[tuple[tuple[float, ...], int]] = []
    for index, (_, metrics) in enumerate(candidates):
        reported = [metrics.get(objective.metric, math.nan) for objective in objectives]
        if all(map(math.isfinite, reported)):
            signed = (-v if o.mode == "max" else v for v, o in zip(reported, objectives, strict=True))
            known.append((tuple(signed), index))
    front_values: list[tuple[float, ...]] = []
    kept: list[Found] = []
    for values, index in sorted(known):  # whatever beats a candidate comes before it
        if not any(_beats(other, values) for other in front_values):
            front_values.append(values)
            kept.append(candidates[index][0])
    return kept


def _beats(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one != other and all(mine <= theirs for mine, theirs in zip(one, other, strict=True))


def best_iteration(ranking: Ranking, reports: Iterable[tuple[int, Mapping[str, float]]]) -> int | None:
    """Return the evaluated iteration with the best result, the first of equal ones; None without any."""
    evaluated = [(done, metrics) for done, metrics in reports if is_evaluated(done, metrics, ranking.metric)]
    merits = [(ranking.merit(metrics), done) for done, metrics in evaluated]
    return min((each for each in merits if not each[0][0]), default=(None, None))[1]


SCHEMA = "rubberband.report/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptCheckpoint:
    """A checkpoint of a trial that its store still has."""

    checkpoint: CheckpointRef
    iterations: int
    """Iterations after which it was written."""
    saved_s: float
    """From the start of the run."""
    best: bool = False
    """Whether it is that of the trial's best evaluated iteration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleStep:
    """A configuration that trained a trial's weights for some iterations, before another one did."""

    after: int
    """Iterations before it."""
    trial: int
    """The trial that trained with it: the trial itself, or one whose checkpoint it has taken over."""
    configuration: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactResult:
    """A file that a trial gave to `rubberband.artifact`."""

    name: str
    file: CheckpointRef
    iterations: int
    """Iterations after which it was saved."""
    saved_s: float
    """From the start of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """One trial, with its learning curve."""

    trial: int
    status: str
    configuration: Mapping[str, Any]
    iterations: int
    metrics: Mapping[str, float]
    """Metrics of its latest report with its present configuration; empty before the first."""
    failures: int
    failure: str | None
    """Why it failed (or was retried), in one line."""
    checkpoint: CheckpointRef | None
    curve: tuple[tuple[float, int, Mapping[str, float]], ...]
    """(seconds from the start, iterations, metrics) of every report that it made itself, in order: a trial that takes
    over another's checkpoint goes on from the other's iterations."""
    bracket: int | None = None
    """None if there is only one."""
    batches: tuple[BatchStretch, ...] = ()
    """Its batch sizes, in order; empty if the batch is fixed."""
    balance: tuple[BalanceStretch, ...] = ()
    """Shares and times of its workers, in order; empty where they were equal."""
    updates: tuple[AsyncUse, ...] = ()
    """Its iterations of asynchronous training, in order; empty if it is synchronous."""
    seed: int = 0
    """The seed of its initial weights and the order of its data."""
    ended: bool = False
    """Whether it has ended by itself, after its `iterations`."""
    stopped_s: float | None = None
    """Time at which the user stopped it, from the start; None: not by the user."""
    artifacts: tuple[ArtifactResult, ...] = ()
    """Files that it gave to be kept, by name."""
    standing: Standing | None = None
    """Its value in the ranking, where that is more than its metric; None without limits of `also` and repeats."""
    checkpoints: tuple[KeptCheckpoint, ...] = ()
    """The checkpoints that are kept, the latest first: two at most while it trains, one once it is stopped."""
    schedule: tuple[ScheduleStep, ...] = ()
    """The configurations that led to its weights, in order; empty if there is only its own."""
    ended_by: str = ""
    """The rule of `search.stop` that ended it; empty: none did."""

    def __repr__(self) -> str:
        metrics = "".join(f" {name}={value:.3g}" for name, value in list(self.metrics.items())[:3])
        return f"<TrialResult {self.trial}: {self.status}, {counted(self.iterations, 'iteration')}{metrics}>"

    @property
    def present_curve(self) -> tuple[tuple[float, int, Mapping[str, float]], ...]:
        """Return the reports with its present configuration: all, unless it has taken over a checkpoint."""
        after = self.schedule[-1].after if self.schedule else 0
        return tuple(report for report in self.curve if report[1] > after) if after else self.curve

    @property
    def status_text(self) -> str:
        """Return its status, with its end by itself or by the user: `completed (ended at 5)`."""
        return self.with_end(self.status)

    def with_end(self, status: str) -> str:
        """Return a status with the trial's end, by itself, by a rule or by the user, and whether it breaks a limit."""
        if self.stopped_s is not None:
            status = f"{status} (by the user at {self.iterations})" if status == "stopped" else f"{status} (stopped)"
        elif self.ended:
            by = f" by {self.ended_by}" if self.ended_by else ""
            status = f"{status} (ended at {self.iterations}{by})"
        return f"{status}, not feasible" if self.feasible is False else status

    @property
    def is_over(self) -> bool:
        """Whether it trains no more, whatever happens: then there is nothing to stop."""
        return self.ended or self.status in ("completed", "failed", "stopped")

    @property
    def feasible(self) -> bool | None:
        """Whether it keeps the limits of `also`; None without limits, and before its first report."""
        return None if self.standing is None else self.standing.feasible

    @property
    def config(self) -> Mapping[str, Any]:
        """Its configuration."""
        return self.configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """One stage, planned against actual. Actual values of a stage that is not over count up to now."""

    stage: int
    trials: int
    iterations: int
    gpus_per_trial: int
    """By the plan in force; 1 where trials share a GPU."""
    planned_instances: int
    """By the plan at the start of the run, like everything called planned."""
    instances: int
    """Most instances held at once."""
    planned_s: float
    """Provisioning included."""
    actual_s: float | None
    """None before it started."""
    planned_cost_usd: float
    actual_cost_usd: float | None
    promoted: tuple[int, ...]
    start_s: float | None = None
    """From the start of the run; None before it started."""
    bracket: int | None = None
    """Its bracket, as the scheduler numbers them; None if there is only one."""
    rung: int = 0
    """Its number within its bracket."""
    lane: int = 0
    """Brackets of one lane run one after another, and lanes side by side."""
    trials_per_gpu: int = 1
    """Trials that share each GPU."""
    place: Place = "GPU"
    """Word for a GPU; slots share the CPUs of an instance without GPUs."""
    added: bool = False
    """Whether its bracket was added to the search: what is planned is what was planned then."""

    @property
    def name(self) -> str:
        """Its number; of several brackets, `bracket.stage`."""
        return str(self.stage) if self.bracket is None else f"{self.bracket}.{self.rung}"

    @property
    def title(self) -> str:
        """Its name in a sentence."""
        return f"stage {self.stage}" if self.bracket is None else f"bracket {self.bracket} stage {self.rung}"


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceResult:
    """One instance: instants in seconds from the start, and its share of the bill."""

    instance: str
    requested_s: float
    running_s: float | None
    ready_s: float | None
    ended_s: float | None
    cost_usd: float
    reason: str
    market: Market
    instance_type: str
    """The type that was bought."""
    zone: str
    """Empty without zones."""
    price_usd_per_hour: float
    """The rent; its average over the hours if each has its own price (spot)."""
    interrupted_s: float | None
    """Time of the provider's notice that it reclaims it; None without a notice."""
    preempted: bool
    """Whether the provider reclaimed it."""
    failed_start: bool = False
    """Whether it never got ready, through its own fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """A GPU's stretch of time with one trial, in seconds from the start."""

    instance: str
    gpu: int
    trial: int
    stage: int
    start_s: float
    training_s: float | None
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The whole outcome, as `rubberband report` prints and `rubberband.tune` returns it.

    Examples:
        >>> result = rubberband.load_result("first")
        >>> result.outcome, result.best.iterations, len(result.trials)
        ('done', 4, 8)
    """

    name: str
    outcome: Literal["done", "cancelled", "budget", "failed", "unfinished"]
    reason: str
    metric: str
    mode: Literal["max", "min"]
    best: TrialResult | None
    """The winner, or the best so far."""
    trials: tuple[TrialResult, ...]
    stages: tuple[StageResult, ...]
    decisions: tuple[DecisionResult, ...]
    """One per SYNC, in order; empty without replanning."""
    planned_jct_s: float
    actual_jct_s: float
    """From the start to the last SYNC; to now while it runs, to its end if it was cut short."""
    planned_cost_usd: float
    actual_cost_usd: float
    deadline_s: float | None
    """In force now, extensions included, like max_cost."""
    max_cost_usd: float | None
    paid: PaidTime
    instances: tuple[InstanceResult, ...]
    busy: tuple[Busy, ...]
    resumes: int
    profiling_s: float
    """Spent on measuring a profile before the start; it counts against the deadline."""
    profiling_cost_usd: float
    """Its cost, which counts against max_cost; not part of `actual_cost_usd`."""
    interruptions: int = 0
    """Instances that the provider reclaimed, or gave notice of reclaiming."""
    redone_iterations: int = 0
    """Iterations that interruptions cut off and that were repeated: at most one per trial and interruption."""
    head_cost_usd: float = 0.0
    """The share of `actual_cost_usd` for the head's machine."""
    side_usd_per_hour: float = 0.0
    """Cost of an instance per hour beside its rent."""
    bill: tuple[BillLine, ...] = ()
    """The lines that add up to `actual_cost_usd`."""
    goodput: GoodputProfile | None = None
    """The model of adaptive training at the latest replan; None if none was measured."""
    extensions: tuple[LimitsExtended, ...] = ()
    """In order."""
    resumed_s: tuple[float, ...] = ()
    """Times at which drivers resumed it, from the start."""
    setbacks: tuple[Setback, ...] = ()
    """In order."""
    pauses: tuple[Pause, ...] = ()
    """In order."""
    replacements: tuple[Replacement, ...] = ()
    """Slow instances that were replaced, in order."""
    given_back: tuple[GivenBack, ...] = ()
    """Instances that were given back within a stage, in order."""
    regrouped: tuple[Regrouped, ...] = ()
    """Trials that went on with other gangs within a stage, in order."""
    forks: tuple[Fork, ...] = ()
    added: tuple[TrialsJoined, ...] = ()
    """Trials that were added while it ran, or after its end."""
    """Trials that went on from another trial's checkpoint with a configuration of their own, in order."""
    instead_of_spot: str = ""
    """How many instances were bought on demand instead of spot, and why; empty if none was."""
    resumable: bool = False
    """Whether a resume continues it, if its driver is gone."""
    unsaved_trials: int = 0
    """Trials whose function never passed a checkpoint, so that every stage trains them from zero."""
    provider: str = ""
    """local, aws or virtual; empty in reports of earlier versions."""
    unit: Unit = "USD"
    """Unit of all amounts, also of those whose names say `usd`: GPU-hours on a Ray cluster without a price."""
    rungs: tuple[RungResult, ...] = ()
    """Rungs of a search without a SYNC (asha); empty for others."""
    also: tuple[Objective, ...] = ()
    """The metrics that are reported beside the one that ranks."""
    ended_by: SearchEnd | None = None
    """The rule of `search.stop` that ended it; None: none did."""
    cuts: tuple[TrialCut, ...] = ()
    """Ends of trials by rules of `search.stop`, in order."""
    worths: tuple[RestWorth, ...] = ()
    """Looks at the rest: how likely it improves the best, beside its cost. Those with too few reports are left out."""
    repeats: int = 1
    """Trials of each configuration, whose numbers follow each other."""
    planned_head_usd: float = 0.0
    """Planned cost of the head node where stages run side by side; else they have it, and this is 0."""

    @property
    def ranking(self) -> Ranking:
        """The order of its trials' results."""
        limited = [one for one in self.also if one.limit_text]
        limits = (Limit(metric=one.metric, at_most=one.at_most, at_least=one.at_least) for one in limited)
        return Ranking(metric=self.metric, mode=self.mode, limits=tuple(limits), repeats=self.repeats)

    @property
    def trials_per_gpu(self) -> int:
        """Trials that share each GPU."""
        return self.stages[0].trials_per_gpu if self.stages else 1

    @property
    def is_simulated(self) -> bool:
        """Whether it was a rehearsal, whose clock has no time of day."""
        return KINDS.get(self.provider, NOT_INSTALLED).is_simulated

    @property
    def place(self) -> Place:
        """Word for a GPU: `slot` on instances without GPUs."""
        return self.stages[0].place if self.stages else "GPU"

    @property
    def slot_name(self) -> Place:
        """Word for what a trial's worker has: `slot` also where trials share a GPU."""
        return self.place if self.trials_per_gpu == 1 else "slot"

    @property
    def pareto(self) -> tuple[TrialResult, ...]:
        """Trials that no other beats in `metric` and all of `also`, best first; empty without `also`.

        Each trial counts with its latest report; failed and infeasible ones do not.
        """
        if not self.also:
            return ()
        objectives = (Objective(metric=self.metric, mode=self.mode), *self.also)
        counting = [one for one in self.trials if one.status != "failed" and one.feasible is not False]
        return tuple(front([(trial, trial.metrics) for trial in counting], objectives))

    @property
    def infeasible(self) -> str:
        """How the best trial breaks its limits, and how many trials keep theirs; empty if it keeps them."""
        best = self.best
        if best is None or best.feasible is not False:
            return ""
        limited = [one for one in self.also if one.limit_text]
        kept = sum(bool(trial.feasible) for trial in self.trials)
        found = ", ".join(
            f"{one.metric}={best.metrics[one.metric]:.6g}" if one.metric in best.metrics else f"no {one.metric}"
            for one in limited
        )
        limits = ", ".join(f"{one.metric} {one.limit_text}" for one in limited)
        others = (
            "no trial is" if not kept else f"{counted(kept, 'trial')} stopped earlier {'is' if kept == 1 else 'are'}"
        )
        return f"the best trial is not feasible ({found}; limits: {limits}); {others}"

    @property
    def asked_deadline_s(self) -> float | None:
        """The deadline as the user asked for it: `deadline_s`, and what measuring the profile took of it."""
        return None if self.deadline_s is None else self.deadline_s + self.profiling_s

    @property
    def whole_cost_usd(self) -> float:
        """The cost of the run and of the profile that was measured for it."""
        return self.actual_cost_usd + self.profiling_cost_usd

    @property
    def whole_planned_usd(self) -> float:
        """The planned cost of the run, and the cost of its profile."""
        return self.planned_cost_usd + self.profiling_cost_usd

    @property
    def asked_max_cost_usd(self) -> float | None:
        """The max_cost as the user asked for it: `max_cost_usd`, and what measuring the profile took of it."""
        return None if self.max_cost_usd is None else self.max_cost_usd + self.profiling_cost_usd

    @property
    def late(self) -> bool:
        """Whether it ended (or already is) past its deadline."""
        return self.deadline_s is not None and self.actual_jct_s > self.deadline_s

    @property
    def start_failures(self) -> str:
        """How many instances never got ready, and why the last one did not; empty if all did."""
        failed = [instance for instance in self.instances if instance.failed_start]
        return not_started(len(failed), len(self.instances), failed[-1].reason) if failed else ""

    @property
    def best_config(self) -> Mapping[str, Any]:
        """The best trial's configuration. Raises InputError if no trial has reported."""
        from rubberband.executor.result.rows import best_of

        return best_of(self).configuration

    @property
    def is_charged(self) -> bool:
        """Whether its instances are paid for; those of this machine, and virtual ones, are only metered.

        On a Ray cluster with a price, that is the user's own rate.
        """
        return KINDS.get(self.provider, NOT_INSTALLED).is_charged(self.unit)

    def to_dataframe(self, *, reports: bool = False) -> pandas.DataFrame:
        """Return a pandas data frame with a row for each trial, or with `reports` for each report of each trial.

        Columns of a trial are `config.NAME`, the metrics of its latest report, `iterations`, `status`, `gpu_s` and
        `cost_usd`, its share of the bill. Raises InputError without pandas.
        """
        from rubberband.executor.result import rows

        return rows.to_dataframe(rows.report_rows(self) if reports else rows.trial_rows(self))

    def to_study(self, storage: str | None = None) -> optuna.Study:
        """Return an Optuna study of the trials, in memory or at `storage`, such as sqlite:///study.db.

        Trials that were stopped early are pruned ones, and reports are intermediate values by iterations. Raises
        InputError without Optuna, or if the storage cannot be written or has a study of this name.
        """
        from rubberband.executor.result.rows import to_study

        return to_study(self, storage)

    def best_at(self, iteration: int | Literal["best", "latest"] = "latest") -> TrialResult:
        """Return the best trial as it was after an iteration whose checkpoint is kept: its latest, its best, or N.

        Raises InputError if no trial has reported, or that checkpoint was not kept.
        """
        from rubberband.executor.result.rows import best_of, trial_at

        return trial_at(self, best_of(self), iteration)

    def load_best(
        self, trial: Code | str, /, *, device: str = "cpu", iteration: int | Literal["best", "latest"] = "latest"
    ) -> Any:
        """Return the best trial, restored from its checkpoint in this process, without Ray; see `best_at`.

        `trial` is the class or function that was trained, or its `module:attribute`. A `TorchTrial` has its `model` (in
        evaluation mode, on `device`) and its `config`; a `Trial` was set up and has loaded; of a function, the content
        of its latest checkpoint is returned. torch's tensors in it are on `device`, wherever they were saved.

        Raises InputError if no trial has reported, the run was virtual, or the device is not there; CheckpointError if
        the checkpoint is missing or does not fit, StoreAwayError if its store is away.
        """
        from rubberband.executor.result.restoring import restore_trial

        return restore_trial(self.best_at(iteration), trial, is_simulated=self.is_simulated, device=device)

    def save_best(
        self, folder: str | os.PathLike[str], /, *, iteration: int | Literal["best", "latest"] = "latest"
    ) -> Path:
        """Write the files of the best trial's checkpoint into a folder, which is made; return it. See `best_at`.

        The checkpoint is a folder if a command, `transformers` or Ray Tune saved it. A TorchTrial has its model's
        `state_dict()` written into a file of that name, which `torch.load` reads with `weights_only=True`.

        Raises InputError if no trial has reported, the checkpoint is neither, or `folder` has files; CheckpointError if
        the checkpoint is missing or `folder` cannot be written, StoreAwayError if its store is away.
        """
        from rubberband.executor.result.restoring import save_files

        return save_files(self.best_at(iteration), folder, is_simulated=self.is_simulated)

    def save_artifacts(self, folder: str | os.PathLike[str], /, *, trial: int | None = None) -> list[Path]:
        """Write the files that a trial gave to `rubberband.artifact` into a folder, which is made; return their paths.

        By default those of the best trial. Raises InputError if the trial is unknown, it gave none, or a file of the
        name is there; CheckpointError if one is missing or cannot be written, StoreAwayError if its store is away.
        """
        from rubberband.executor.result.restoring import save_artifacts
        from rubberband.executor.result.rows import trial_of

        return save_artifacts(trial_of(self, trial), folder)

    def __repr__(self) -> str:
        best = "" if self.best is None else f", {self.metric}={self.best.metrics[self.metric]:.3g}"
        cost = in_unit(format_usd(self.whole_cost_usd), self.unit)
        return f"<Result {self.name}: {self.outcome}{best}, {cost}>"

    def __str__(self) -> str:
        """Return a report of about ten lines; `rubberband report NAME` prints the whole one."""
        from rubberband.executor.result.rows import result_text

        return result_text(self)

    def _repr_html_(self) -> str:
        from rubberband.executor.result.rows import result_html

        return result_html(self)

    @property
    def exit_code(self) -> int:
        """The command line's: 0 done, 1 failed (or over budget), 4 after its deadline, 130 cancelled."""
        if self.outcome == "cancelled":
            return 130
        if self.outcome != "done":
            return 1
        return 4 if self.late else 0

    def to_json(self) -> dict[str, Any]:
        """Return the object that `rubberband report NAME -o json` prints."""
        plain: dict[str, Any] = plain_of(self)
        shares = {"total_gpu_s": self.paid.total_gpu_s, "training_share": self.paid.training_share}
        pareto = [trial.trial for trial in self.pareto]
        return {"schema": SCHEMA, **plain, "late": self.late, "paid": plain["paid"] | shares, "pareto": pareto}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Result:
        """Return the result from which `to_json` made `plain`; fields of a newer version are ignored.

        Raises InputError if it is no report.
        """
        known = {field.name: plain[field.name] for field in fields(cls) if field.name in plain}
        paid = plain.get("paid")
        if isinstance(paid, Mapping):
            known["paid"] = {field.name: paid[field.name] for field in fields(PaidTime) if field.name in paid}
        try:
            return TypeAdapter(cls).validate_python(known)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise InputError(f"no report of schema {SCHEMA}: {where}: {first['msg']}; use the same version") from None


def summarise(state: State, setup: Mapping[str, Any], now: float) -> Result:
    """Return the result as of `now`, on the clock of the events."""
    job = state.job
    as_of = state.ended_at if state.ended_at is not None else max(now, state.now)
    if state.phase is Phase.NEW:
        as_of = state.started_at
    known, seeds = configurations(state, setup), Seeds(setup.get("seeds", ()), setup.get("experiment", {}))
    rules = {cut.trial: cut.rule for cut in state.history.of(TrialCut)}
    trials = tuple(
        replace(_trial(state, trial, known.get(trial, {}), seeds[trial]), ended_by=rules.get(trial, ""))
        for trial in range(len(state.trials))
    )
    if state.forked_configs:
        began = first_configurations(state, setup)
        trials = tuple(replace(each, schedule=_schedule(state.trials[each.trial], began)) for each in trials)
    best = best_trial(state)
    head_s = max(0.0, as_of - state.started_at - state.paused_s)
    return Result(
        name=job.name,
        outcome=state.outcome if state.outcome and state.phase is Phase.FINISHED else "unfinished",
        reason=state.reason or state.stopped,
        metric=job.metric,
        mode=job.mode,
        best=None if best is None else trials[best.trial],
        trials=trials,
        stages=tuple(_stage(state, stage, as_of) for stage in range(len(job.stages))),
        decisions=tuple(copied(DecisionResult, d, at_s=d.occurred_at - state.started_at) for d in state.decisions),
        planned_jct_s=job.prediction.jct_s,
        actual_jct_s=jct_s(state, as_of),
        planned_cost_usd=job.prediction.cost_usd,
        planned_head_usd=job.prediction.cost_usd - math.fsum(stage.cost_usd for stage in job.prediction.stages),
        actual_cost_usd=bill_usd(state, as_of),
        deadline_s=job.deadline_s,
        max_cost_usd=job.max_cost_usd,
        paid=paid_time(state, as_of),
        instances=tuple(_instances(state, as_of)),
        busy=tuple(_busy(state, as_of)),
        resumes=len(state.resumed_at),
        profiling_s=setup.get("profiling_s", 0.0),
        profiling_cost_usd=setup.get("profiling_cost_usd", 0.0),
        interruptions=sum(record.was_interrupted for record in state.instances.values()),
        redone_iterations=sum(_was_cut_off(state, use) for use in state.allocations),
        head_cost_usd=job.offer.head_cost_usd(head_s),
        side_usd_per_hour=job.offer.side_usd_per_hour,
        bill=bill_lines(state, as_of),
        goodput=state.profile.goodput,
        extensions=tuple(state.history.of(LimitsExtended)),
        resumed_s=tuple(map(state.elapsed_s, state.resumed_at)),
        setbacks=tuple(state.history.of(Setback)),
        pauses=tuple(state.history.of(Pause)),
        replacements=tuple(state.history.of(Replacement)),
        forks=tuple(state.history.of(Fork)),
        given_back=tuple(state.history.of(GivenBack)),
        regrouped=tuple(state.history.of(Regrouped)),
        added=tuple(state.history.of(TrialsJoined)),
        instead_of_spot=_instead_of_spot(state),
        resumable=state.phase is not Phase.FINISHED or can_go_on(state),
        unsaved_trials=sum(
            trial.checkpoint is not None and trial.reports[-1].saved_iterations == 0 and job.max_iterations > 1
            for trial in state.trials
            if trial.reports and not trial.ended
        ),
        provider=setup.get("provider", ""),
        unit=job.offer.unit,
        rungs=tuple(_rungs(state)),
        repeats=job.repeats,
        also=tuple(Objective(**entry) for entry in setup.get("experiment", {}).get("search", {}).get("also", ())),
        ended_by=state.ended_by,
        cuts=tuple(state.history.of(TrialCut)),
        worths=tuple(state.history.of(RestWorth)),
    )


def _instead_of_spot(state: State) -> str:
    """Return `2 instances on demand instead of spot: …`, counting those that ran."""
    count = sum(r.instead_of_spot and r.running_at is not None for r in state.instances.values())
    return f"{counted(count, 'instance')} on demand instead of spot: {state.fleet.spot_dry_reason}" if count else ""


def _was_cut_off(state: State, use: GangRun) -> bool:
    """Whether an interruption ended the gang's stretch within an iteration."""
    if not use.preempted or use.training_at is None or use.ended_at is None:
        return False
    return all(report.reported_at != use.ended_at for report in reversed(state.trials[use.trial].made))


def jct_s(state: State, at: float) -> float:
    """Return the seconds from the start to the last SYNC of a finished run, or its end by a rule, otherwise to `at`."""
    if state.ended_by is not None:
        return state.ended_by.at_s
    ends = [stage.ended_at for stage in state.stages if stage.ended_at is not None]
    return (max(ends) if state.outcome == "done" else at) - state.started_at


def _trial(state: State, trial: int, config: Mapping[str, Any], seed: int) -> TrialResult:
    record = state.trials[trial]
    return TrialResult(
        trial=trial,
        status=record.status.value,
        configuration=config,
        iterations=record.iterations,
        metrics=record.metrics,
        failures=record.failures,
        failure=None if record.failure is None else f"{record.failure[0]}: {record.failure[1]}",
        checkpoint=record.checkpoint,
        curve=tuple((r.reported_at - state.started_at, r.iterations, r.metrics) for r in record.made),
        bracket=next((b.bracket for b in state.job.brackets if trial in state.job.trials_of(b)), None),
        batches=batch_history(record.made, state.started_at),
        balance=balance_history(record.made, (u for u in state.allocations if u.trial == trial), state.started_at),
        updates=tuple(report.updates for report in record.made if report.updates is not None),
        seed=seed,
        ended=record.ended,
        stopped_s=None if record.stopped_at is None else record.stopped_at - state.started_at,
        standing=standing(state, record) if state.job.limits or state.job.repeats > 1 else None,
        checkpoints=tuple(_saved(state, record)),
        artifacts=tuple(
            copied(ArtifactResult, record.artifacts[name], saved_s=record.artifacts[name].saved_at - state.started_at)
            for name in sorted(record.artifacts)
        ),
    )


def _schedule(trial: TrialState, began: Mapping[int, Mapping[str, Any]]) -> tuple[ScheduleStep, ...]:
    return tuple(
        ScheduleStep(
            after=span.after,
            trial=span.trial,
            configuration=began.get(span.trial, {}) if span.configuration is None else span.configuration,
        )
        for span in trial.configured
    )


def _saved(state: State, trial: TrialState) -> Iterator[KeptCheckpoint]:
    own = ((report.iterations, report.metrics) for report in trial.reports[trial.inherited :])
    best = best_iteration(state.job.ranking, own)
    for checkpoint, iterations in trial.kept():
        saved_s = trial.reports[iterations - 1].reported_at - state.started_at
        is_best = iterations == best
        yield KeptCheckpoint(checkpoint=checkpoint, iterations=iterations, saved_s=saved_s, best=is_best)


def _stage(state: State, index: int, at: float) -> StageResult:
    job = state.job
    predicted, stage, bracket = job.prediction.stages[index], job.stages[index], job.bracket_of(index)
    planned_instances = job.plan.stages[index].instances
    if added := predicted.duration_s == 0.0:  # planned then
        predicted, planned_instances = state.predicted[index], state.plan.stages[index].instances
    record, lane = state.record_of(index), state.lanes[bracket.lane]
    actual_s = actual_cost_usd = None
    promoted: tuple[int, ...] = ()
    if record is not None:
        # Costs after the last SYNC, while instances are released, belong to the last begun stage of the lane.
        last = record is lane.stage
        actual_s = (at if record.ended_at is None else record.ended_at) - record.started_at
        until = at if last or record.ended_at is None else record.ended_at
        # The first stage's cost starts from nothing: an instance may be billed from the very instant of the start.
        # What was held between two stages, as while no driver ran, belongs to the later one.
        earlier = lane.stages[next(at for at, one in enumerate(lane.stages) if one is record) - 1]
        before_usd = _bill_usd(lane, earlier.ended_at or record.started_at) if record is not lane.stages[0] else 0.0
        actual_cost_usd = _bill_usd(lane, until) - before_usd
        promoted = job.promoted(record)
        promoted = tuple(sorted(promoted)) if index + 1 < bracket.end_stage else promoted
    return StageResult(
        stage=index,
        trials=stage.trials,
        iterations=stage.iterations,
        gpus_per_trial=state.plan.stages[index].gpus_per_trial,
        trials_per_gpu=job.offer.trials_per_gpu,
        place=job.offer.place,
        planned_instances=planned_instances,
        instances=record.widest if record else 0,
        planned_s=predicted.provisioning_s + predicted.duration_s,
        actual_s=actual_s,
        planned_cost_usd=predicted.cost_usd,
        actual_cost_usd=actual_cost_usd,
        promoted=promoted,
        start_s=None if record is None else record.started_at - state.started_at,
        bracket=bracket.bracket if job.is_divided else None,
        rung=index - bracket.first_stage,
        lane=bracket.lane,
        added=added,
    )


def _rungs(state: State) -> list[RungResult]:
    if state.job.has_sync:
        return []
    begun = [trial for trial in state.trials if trial.attempt > 0]
    return [
        RungResult(
            rung=rung,
            iterations=total,
            trials=sum(trial.rung >= rung for trial in begun),
            ended=sum(t.rung > rung or t.iterations >= total or (t.ended and t.rung == rung) for t in begun),
            promoted=sum(trial.rung > rung for trial in begun),
        )
        for rung, total in enumerate(state.job.rung_ends(0))
    ]


def _bill_usd(lane: LaneState, at: float) -> float:
    """Return the bill at `at`: of the whole job or, if it has several brackets, of a lane, without the head node."""
    return lane_bill_usd(lane, at) if lane.job.is_divided else bill_usd(lane.state, at)


def _instances(state: State, at: float) -> list[InstanceResult]:
    job = state.job

    def since_start(instant: float | None) -> float | None:
        return None if instant is None else instant - state.started_at

    return [
        copied(
            InstanceResult,
            record,
            requested_s=record.requested_at - state.started_at,
            running_s=since_start(record.running_at),
            ready_s=since_start(record.ready_at),
            ended_s=since_start(record.ended_at),
            cost_usd=instance_cost_usd(job, record, at),
            instance_type=record.instance_type or job.offer.instance_type,
            price_usd_per_hour=rent_usd_per_hour(job, record, at),
            interrupted_s=since_start(record.interrupted_at),
        )
        for record in state.instances.values()
    ]


def _busy(state: State, at: float) -> list[Busy]:
    start = state.started_at
    return [
        Busy(
            instance=slot.instance,
            gpu=slot.gpu,
            trial=use.trial,
            stage=use.stage,
            start_s=use.started_at - start,
            training_s=None if use.training_at is None else use.training_at - start,
            end_s=(at if use.ended_at is None else use.ended_at) - start,
        )
        for use in state.allocations
        for slot in use.gang
    ]
