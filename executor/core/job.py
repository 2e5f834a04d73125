"""The job: the input of the controller before its first event. Plain data; the journal keeps it in its header."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from rubberband.executor.core.events import LimitsChanged
from rubberband.planner import Reserve
from rubberband.units import deadline_text, duration
from rubberband.values.offer import Offer
from rubberband.values.plan import Plan, Prediction, Stage, gang_sizes, total_iterations
from rubberband.values.profile import Profile
from rubberband.values.ranking import Limit, Ranking
from rubberband.values.stopping import StopRules

if TYPE_CHECKING:
    from rubberband.executor.core.state import StageRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Bracket:
    """One successive halving of a job: a chain of its stages, with trials of its own."""

    bracket: int = 0
    """Its number, as the scheduler lists them."""
    first_stage: int = 0
    num_stages: int
    first_trial: int = 0
    lane: int = 0
    num_trials: int | None = None
    """Trials from `first_trial` on; None: as many as its first stage trains."""
    joined: tuple[int, ...] = ()
    """Trials that were added to it."""

    @property
    def end_stage(self) -> int:
        """The stage after its last one."""
        return self.first_stage + self.num_stages


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Description of an experiment for its controller: stages, plan, limits and rules."""

    name: str
    stages: tuple[Stage, ...]
    """The stages of all brackets, one after another; those of a lane follow each other."""
    plan: Plan
    prediction: Prediction
    """If there are several brackets, its stages do not include the head node."""
    offer: Offer
    profile: Profile
    metric: str
    mode: Literal["max", "min"]
    deadline_s: float | None = None
    """From Started."""
    profiling_s: float = 0.0
    """The time that measuring the profile took of the deadline, before Started."""
    deadline_at: float | None = None
    """The deadline on the backend's clock, if it is an instant; `deadline_s` follows from it at Started."""
    submitted_at: float | None = None
    """Its submission to a service on the backend's clock, which is 0 at the start of a rehearsal; None: run by hand, or
    without a deadline."""
    max_cost_usd: float | None = None
    max_failures: int = 1
    """How often a trial is tried again after a failure."""
    iteration_timeout_s: float | None = None
    """A trial that reports nothing for this long is taken to hang. None: a minute, or ten times the expected time."""
    release_margin_s: float = 0.0
    """How long a release may take; the cap on the cost keeps clear of it."""
    launch_attempts: int = 3
    """How often a stage's missing instances are asked for again before the stage runs with what there is."""
    replan: bool = True
    """Whether the rest is planned again at every SYNC; False where the plan was given, or is held fixed."""
    objective: Literal["min_cost", "min_time"] = "min_cost"
    """Objective of a replan."""
    min_gpus_per_trial: int | None = None
    """Limit of a replan. None: the fewest that were profiled."""
    max_gpus_per_trial: int | None = None
    """Limit of a replan. None: the most that the plan gives."""
    gpus_per_trial_sizes: tuple[int, ...] = ()
    """The only GPUs per trial of a replan and of a gang that is cut; empty: all within the limits."""
    confidence: float = 0.95
    """With which a replan keeps the limits, where times vary."""
    highest_price_usd_per_hour: float | None = None
    """Highest price of an instance, if more expensive types may be used instead. None: the offer's price."""
    lease_s: float | None = None
    """How long an instance may outlive the driver at most. None: not at all, as far as the budget is concerned."""
    boot_lease_s: float | None = None
    """The same of an instance that is not ready yet, if that is longer: it renews its lease itself then."""
    start_attempts: int | None = None
    """Instances in a row that never got ready after which buying stops. None: no limit, as in older journals."""
    hung_replacements: int = 0
    """Most instances of a run that are replaced since a trial hung on them; 0: none, as in older journals."""
    draws: bool = False
    """Whether a sampler that learns draws the configurations when a bracket begins; False: all are known beforehand."""
    brackets: tuple[Bracket, ...] = ()
    """In the order of their stages; empty: one, of all stages."""
    lane_instances: tuple[int, ...] = ()
    """The most instances that each lane may have; empty: the offer's, of the one lane."""
    speeds: Mapping[str, float] = field(default_factory=dict)
    """Type that may be used instead of the offer's -> speed of one of its GPUs over that of the offer's."""
    repeats: int = 1
    """Trials of each configuration, with seeds of their own, whose numbers follow each other; stages count trials."""
    keep_best: bool = False
    """Whether the checkpoint of a trial's best evaluated iteration is kept beside its latest two."""
    limits: tuple[Limit, ...] = ()
    """Limits of metrics that a trial has to keep: those that break one rank behind the others."""
    resize_in_stage: bool = False
    """Whether GPUs that are idle within a stage are given back or join other gangs; False in older journals."""
    keeps_width: bool = False
    """Whether a trial keeps its number of GPUs within a stage: its workers train asynchronously, so that more of them
    would change what it learns."""
    balances: bool = True
    """Whether a gang of unequal workers is faster than one of its slowest: they divide a batch by their speeds, or do
    not wait for each other."""
    stop: StopRules = field(default_factory=StopRules)
    """The rules by which trials and the search end early; none in older journals."""
    trains: bool = True
    """Whether trials train; False for a rehearsal, whose metric is invented, and in which no trial is the best."""

    @property
    def ranking(self) -> Ranking:
        """The order of its trials' results."""
        return Ranking(metric=self.metric, mode=self.mode, limits=self.limits, repeats=self.repeats)

    @property
    def is_divided(self) -> bool:
        """Whether it has several brackets."""
        return len(self.brackets) > 1

    @property
    def has_sync(self) -> bool:
        """Whether its stages end in a SYNC; else trials climb rungs, and its only stage is the whole run."""
        return self.stages[0].has_sync

    def all_brackets(self) -> tuple[Bracket, ...]:
        """Its brackets: one, unless it is divided."""
        return self.brackets or (Bracket(num_stages=len(self.stages)),)

    def bracket_of(self, stage: int) -> Bracket:
        """The bracket that a stage belongs to."""
        return next(bracket for bracket in self.all_brackets() if stage < bracket.end_stage)

    @property
    def max_iterations(self) -> int:
        """Iterations of a trial that trains to the end."""
        return max(self.iterations_by(bracket.end_stage - 1) for bracket in self.all_brackets())

    def iterations_by(self, stage: int) -> int:
        """Iterations that a trial of the stage's bracket has done in all at the stage's end."""
        return total_iterations(self.stages[self.bracket_of(stage).first_stage : stage + 1])

    def rung_ends(self, stage: int) -> tuple[int, ...]:
        """Iterations that a trial of the stage's bracket has done in all at the end of each of the stage's rungs."""
        before = self.iterations_by(stage) - self.stages[stage].iterations
        return tuple(before + total for total in self.stages[stage].rungs.totals)

    def stage_name(self, stage: int) -> str:
        """Return the name of a stage; if there are several brackets, stages are numbered within each."""
        bracket = self.bracket_of(stage)
        return f"bracket {bracket.bracket} stage {stage - bracket.first_stage}" if self.is_divided else f"stage {stage}"

    def trials_of(self, bracket: Bracket) -> tuple[int, ...]:
        """The trials that a bracket starts with, and those that were added to it."""
        count = self.stages[bracket.first_stage].trials if bracket.num_trials is None else bracket.num_trials
        return (*range(bracket.first_trial, bracket.first_trial + count), *bracket.joined)

    @property
    def num_trials(self) -> int:
        """Trials of all brackets."""
        return sum(len(self.trials_of(bracket)) for bracket in self.all_brackets())

    @property
    def longest_lease_s(self) -> float:
        """Return the longest lease of an instance that is not ready yet."""
        return max(self.lease_s or 0.0, self.boot_lease_s or 0.0)

    @property
    def largest_gang(self) -> int:
        """The most GPUs that a trial may have: by the plan, or by what a replan can know to be faster."""
        replanned = min(self.max_gpus_per_trial or 0, self.profile.largest_gpus) if self.replan else 0
        return max(replanned, *(choice.gpus_per_trial for choice in self.plan.stages))

    def gang_sizes(self, most: int) -> list[int]:
        """Return the GPUs that a trial may have, up to `most`. Never fewer than were profiled: it may not fit."""
        least = max(self.profile.smallest_gpus, self.min_gpus_per_trial or 1)
        return gang_sizes(self.offer.slots, min(least, most), most, self.gpus_per_trial_sizes)

    @property
    def reserve(self) -> Reserve:
        """The terms of the money that a plan leaves of max_cost."""
        return Reserve(margin_s=self.release_margin_s, highest_price_usd_per_hour=self.highest_price_usd_per_hour)

    @property
    def reserved_usd_per_hour(self) -> float:
        """The price with side costs that is reserved until an instance's price is known; of a spot one also after."""
        rent = max(self.offer.price_usd_per_hour, self.highest_price_usd_per_hour or 0.0)
        return rent + self.offer.side_usd_per_hour

    def begun(self, started_at: float) -> Job:
        """The job once it is known when it started: a deadline that is an instant is no later than that."""
        return self if self.deadline_at is None else replace(self, deadline_s=max(0.0, self.deadline_at - started_at))

    @property
    def deadline(self) -> str:
        """The deadline as it was written, for people; empty without one.

        That of a submission is an instant and the time from the submission; of a run by hand either an instant or a
        duration from the start; of a rehearsal, which has no time of day, a duration.
        """
        if self.deadline_s is None:
            return ""
        if self.deadline_at is not None:
            return deadline_text(self.deadline_at, self.submitted_at)
        return duration(self.deadline_s + self.before_s)

    @property
    def before_s(self) -> float:
        """Time before Started that counts for its deadline: from its submission on, or for measuring its profile."""
        if self.submitted_at is None:
            return self.profiling_s
        started_at = 0.0 if self.deadline_at is None or self.deadline_s is None else self.deadline_at - self.deadline_s
        return started_at - self.submitted_at

    def extended(self, deadline_s: float | None) -> Job:
        """The job with a deadline that is never earlier; what was submitted still has an instant."""
        later_s = raised(self.deadline_s, deadline_s)
        at = self.deadline_at
        if self.deadline_s is not None and later_s is not None and later_s > self.deadline_s:
            at = None if at is None or self.submitted_at is None else at + later_s - self.deadline_s
        return replace(self, deadline_s=later_s, deadline_at=None if later_s is None else at)

    def granted(self, event: LimitsChanged) -> Job:
        """The job with the limits that the event grants, of which none is ever lowered, and with its target."""
        return replace(
            self.extended(event.deadline_s),
            max_cost_usd=raised(self.max_cost_usd, event.max_cost_usd),
            stop=self.stop if event.target is None else replace(self.stop, target=event.target),
        )

    def promoted(self, stage: StageRecord) -> tuple[int, ...]:
        """The trials that go on after a stage's SYNC, best first; after the last one of a bracket its whole ranking."""
        if stage.stage + 1 == self.bracket_of(stage.stage).end_stage:
            return stage.ranking
        most = self.stages[stage.stage + 1].trials // self.repeats
        best = {*[*dict.fromkeys(trial // self.repeats for trial in stage.ranking)][:most]}
        revived = (trial for trial in stage.forked if trial not in stage.ranking)
        return (*(trial for trial in stage.ranking if trial // self.repeats in best), *revived)


def raised(limit: float | None, asked: float | None) -> float | None:
    """The larger one of two limits; None is none."""
    return None if limit is None or asked is None else max(limit, asked)


def brackets_of(stages: Sequence[Sequence[Stage]], lanes: Sequence[Sequence[int]]) -> tuple[Bracket, ...]:
    """Return the brackets of a job, in the order of its stages: lane by lane. Empty if there is only one.

    `stages` are those of each bracket, as the scheduler lists them; trials are numbered in that order. `lanes` are the
    brackets of each lane, by number.
    """
    if len(stages) == 1:
        return ()
    found, first_stage = list[Bracket](), 0
    for lane, numbers in enumerate(lanes):
        for number in numbers:
            first_trial = sum(bracket[0].trials for bracket in stages[:number])
            count = len(stages[number])
            found.append(
                Bracket(bracket=number, first_stage=first_stage, num_stages=count, first_trial=first_trial, lane=lane)
            )
            first_stage += count
    return tuple(found)
