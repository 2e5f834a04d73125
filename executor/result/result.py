"""The result of an experiment: trials, the best configuration, planned against actual, and how paid time was used.

A view of the journal at any moment, also while the experiment runs or after a crash. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from rubberband.errors import InputError
from rubberband.executor.core.bill import PaidTime
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
from rubberband.executor.core.limits import not_started
from rubberband.executor.result.batch_history import plain_of
from rubberband.executor.result.parts import Busy, InstanceResult, KeptCheckpoint, StageResult, TrialResult
from rubberband.units import counted, format_usd, in_unit
from rubberband.values.adaptive import GoodputProfile
from rubberband.values.kinds import KINDS, NOT_INSTALLED
from rubberband.values.offer import BillLine, Place, Unit
from rubberband.values.ranking import Limit, Ranking
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


def _without_best(checkpoints: Iterable[KeptCheckpoint]) -> tuple[KeptCheckpoint, ...]:
    return tuple(replace(one, best=False) for one in checkpoints)


def best_iteration(ranking: Ranking, reports: Iterable[tuple[int, Mapping[str, float]]]) -> int | None:
    """Return the evaluated iteration with the best result, the first of equal ones; None without any."""
    evaluated = [(done, metrics) for done, metrics in reports if is_evaluated(done, metrics, ranking.metric)]
    merits = [(ranking.merit(metrics), done) for done, metrics in evaluated]
    return min((each for each in merits if not each[0][0]), default=(None, None))[1]


SCHEMA = "rubberband.report/1"


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
    """The winner, or the best so far; None before a report, and in a rehearsal."""
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
    """Trials that went on from another trial's checkpoint with a configuration of their own, in order."""
    added: tuple[TrialsJoined, ...] = ()
    """Trials that were added while it ran, or after its end."""
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
    waited_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds from the command to the start of the run, by cause: imports, check, …"""
    planned_head_usd: float = 0.0
    """Planned cost of the head node where stages run side by side; else they have it, and this is 0."""
    rehearsal: bool = False
    """Whether nothing was trained: time and cost are simulated, the metric is invented, and no trial is the best."""
    fetched: Mapping[str, str] = field(default_factory=dict)
    """Models and datasets of `resources.fetch`, NAME@REVISION -> commit of the hub."""
    deadline: str = ""
    """The deadline in force for people: an instant and the time from the submission, or a duration; may be empty."""

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
        """Whether its clock is simulated, and has no time of day."""
        return KINDS.get(self.provider, NOT_INSTALLED).is_simulated

    @property
    def shown(self) -> Result:
        """The result for people: a rehearsal without its invented metric; any other as it is."""
        if not self.rehearsal:
            return self
        trials = [
            replace(one, metrics={}, curve=(), standing=None, checkpoints=_without_best(one.checkpoints))
            for one in self.trials
        ]
        return replace(self, trials=tuple(trials), worths=())

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

        Each trial counts with its latest report; failed and infeasible ones do not. With repeats, a configuration
        counts with its `means`, and its best repeat stands for it.
        """
        if not self.also or self.rehearsal:
            return ()
        objectives = (Objective(metric=self.metric, mode=self.mode), *self.also)
        counting = [one for one in self.of_configurations if one.status != "failed" and one.feasible is not False]
        return tuple(front([(trial, self.means(trial)) for trial in counting], objectives))

    @property
    def of_configurations(self) -> Sequence[TrialResult]:
        """One trial for each configuration: the best of its repeats that count; without repeats all trials."""
        merit = self.ranking.merit
        firsts = self.trials[:: self.repeats]
        return [min(self.counting(one), key=lambda repeat: (merit(repeat.metrics), repeat.trial)) for one in firsts]

    def means(self, trial: TrialResult) -> Mapping[str, float]:
        """Return the means of `metric` and `also` over the repeats of a trial's configuration, as they rank it.

        Without repeats these are its own metrics.
        """
        every = Ranking(metric=self.metric, mode=self.mode, limits=tuple(Limit(metric=one.metric) for one in self.also))
        return every.mean([repeat.metrics for repeat in self.counting(trial)])

    def counting(self, trial: TrialResult) -> Sequence[TrialResult]:
        """Return the repeats of a trial's configuration that count, as for its `standing`."""
        first = trial.trial // self.repeats * self.repeats
        repeats = self.trials[first : first + self.repeats]
        done = [one for one in repeats if one.status == "completed"]
        return done or [one for one in repeats if one.metrics and one.status != "failed"] or [trial]

    @property
    def infeasible(self) -> str:
        """How the best trial breaks its limits, and how many trials keep theirs; empty if it keeps them."""
        best = self.best
        if best is None or best.feasible is not False:
            return ""
        limited = [one for one in self.also if one.limit_text]
        kept = sum(bool(trial.feasible) for trial in self.trials)
        means, of = self.means(best), "" if self.repeats == 1 else "mean "
        found = ", ".join(
            f"{of}{one.metric}={means[one.metric]:.6g}" if one.metric in means else f"no {of}{one.metric}"
            for one in limited
        )
        limits = ", ".join(f"{one.metric} {one.limit_text}" for one in limited)
        others = (
            "no trial is" if not kept else f"{counted(kept, 'trial')} stopped earlier {'is' if kept == 1 else 'are'}"
        )
        return f"the best trial is not feasible ({found}; limits: {limits}); {others}"

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
        `state_dict()` written into a file of that name, which `torch.load` reads with `weights_only=True`; if the name
        ends in `.safetensors`, in that format, where tied weights are there under each of their names. A model or an
        adapter of Hugging Face has a card beside it (README.md: result, search, cost, configuration).

        Raises InputError if no trial has reported, the checkpoint is neither, `folder` has files, or safetensors is not
        installed or cannot hold the model; CheckpointError if the checkpoint is missing or `folder` cannot be written,
        StoreAwayError if its store is away.
        """
        from rubberband.executor.result.model_card import write_card
        from rubberband.executor.result.restoring import save_files

        trial = self.best_at(iteration)
        place = save_files(trial, folder, is_simulated=self.is_simulated)
        if place.is_dir():
            write_card(self, trial, place)
        return place

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
