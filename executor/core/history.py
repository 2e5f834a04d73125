"""Records of a run beside its instances, stages and trials, for views and results. Plain data.

Times are seconds from the start of the run, 0 before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from rubberband.values.plan import Plan
from rubberband.values.worth import RestWorth


@dataclass(frozen=True, slots=True, kw_only=True)
class Setback:
    """A trial went back to an earlier checkpoint, or to its beginning, since its latest was lost."""

    at_s: float
    trial: int
    from_iterations: int
    to_iterations: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Promotion:
    """A trial goes on to a rung, where trials climb rungs (asha)."""

    at_s: float
    trial: int
    rung: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """A trial goes on from another trial's checkpoint, with a configuration of its own."""

    at_s: float
    trial: int
    parent: int
    iterations: int
    """Iterations that the checkpoint holds."""
    from_iterations: int
    """Iterations that the trial itself had done."""
    configuration: Mapping[str, Any]
    """Its own from then on."""
    changes: Mapping[str, tuple[Any, Any]]
    """Parameter -> (the parent's value, its own); None where one of them has no such parameter."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """The driver stood still, paused or with its machine asleep."""

    at_s: float
    """Its begin."""
    paused_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsExtended:
    """More time or money than an experiment had, or another target, from then on; None is no limit."""

    at_s: float
    deadline_before_s: float | None
    deadline_s: float | None
    max_cost_before_usd: float | None
    max_cost_usd: float | None
    target_before: float | None = None
    target: float | None = None
    deadline_before: str = ""
    """Like `deadline` for people, as in `Job`."""
    deadline: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceCapChanged:
    """Another number of instances that an experiment may hold from then on, and what that changes.

    The times and costs are those of the plan in force, cut to the cap; a replan follows and may be better.
    """

    at_s: float
    max_instances_before: int
    max_instances: int
    jct_before_s: float
    jct_s: float
    """End of the run, from the start; where they are too few for any trial, as if the fewest were."""
    cost_before_usd: float
    cost_usd: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """A slow instance was exchanged for another, at the report of a trial whose gang it held up."""

    at_s: float
    instance: str
    """The slow one."""
    trial: int
    ranks: tuple[int, ...]
    """The trial's stragglers on it."""
    first: bool
    """Whether it is used until the other one is ready; if not, its trials wait for that."""
    left_s: float
    """Seconds that the stage would still have taken."""
    saved_s: float
    """Seconds by which the stage was expected to end earlier, the start of the other one included."""
    extra_usd: float
    """Its expected cost; negative if it saves money."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HungInstance:
    """An instance was exchanged for another: a trial hung on it, and no other trial on it reported meanwhile."""

    at_s: float
    instance: str
    trial: int
    first: bool
    """Whether it is used until the other one is ready; if not, its trials wait for that."""


Rule = Literal["target", "patience", "median", "no_improvement", "worth"]
"""The word of `search.stop` whose rule ended a trial, or the search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialCut:
    """A rule ended a trial, whose latest report counts as that of one which has ended by itself."""

    at_s: float
    trial: int
    iterations: int
    rule: Rule
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchEnd:
    """A rule ended the search."""

    at_s: float
    rule: Rule
    reason: str
    trial: int | None
    """The one that reached the target, and is the best; None for other rules."""
    expected_jct_s: float
    """End of the run that was expected without the rule, from the start."""
    expected_cost_usd: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenBack:
    """Instances were given back within a stage, since no trial was left for them."""

    at_s: float
    stage: int
    instances: tuple[str, ...]
    left_s: float
    """Seconds until the stage was expected to end."""
    saved_usd: float
    """Their expected cost until then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Regrouped:
    """A trial went on with another gang from a checkpoint within a stage: a wider one, or elsewhere."""

    at_s: float
    trial: int
    iterations: int
    gpus_before: int
    gpus: int
    """The same number where it moved so that its instance could be given back."""
    left_s: float
    """Seconds that the stage would still have taken."""
    saved_s: float
    """Seconds by which the stage was expected to end earlier, with all trials that were to go on so."""
    extra_usd: float
    """Their expected cost; negative if it saves money."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialsJoined:
    """Trials were added to the search, or could not be."""

    at_s: float
    trials: tuple[int, ...]
    """Their numbers, one after another; none: `reason` says why."""
    stage: int
    """The stage that they join, or the first one of their own."""
    sampled: bool
    """Whether the sampler draws them; else the user gave them."""
    reason: str = ""
    """How they were drawn; empty: they were given, or are drawn as they start."""
    clone_of: int | None = None
    """The trial that they are a change of."""
    changes: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """Parameter -> (that trial's value, its own)."""
    from_iterations: int = 0
    """The iterations of that trial after whose checkpoint it goes on; 0: it trains from the beginning."""


Record = (
    Setback
    | Promotion
    | Fork
    | Pause
    | LimitsExtended
    | InstanceCapChanged
    | Replacement
    | HungInstance
    | TrialCut
    | SearchEnd
    | RestWorth
    | GivenBack
    | Regrouped
    | TrialsJoined
)
Kind = TypeVar("Kind", bound=Record)


@dataclass(slots=True)
class History:
    """The records of a run, in order."""

    records: list[Record] = field(default_factory=list)
    _by_kind: dict[type, list[Any]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def add(self, record: Record) -> None:
        """Add the latest record."""
        self.records.append(record)
        self._by_kind.setdefault(type(record), []).append(record)

    def of(self, kind: type[Kind]) -> Sequence[Kind]:
        """Return the records of a kind."""
        return self._by_kind.get(kind, [])


# The same of decisions and rungs, for results.


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionResult:
    """A decision at a SYNC: to keep the plan for the rest, or to change it."""

    stage: int
    """The first stage that it is about."""
    at_s: float
    """From the start."""
    changed: bool
    reason: str
    plan: Plan
    """In force from then on."""
    present_jct_s: float
    """Expected for the whole run by the plan that was in force."""
    present_cost_usd: float
    jct_s: float
    """Expected by the plan that is in force now."""
    cost_usd: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RungResult:
    """One rung of a search whose trials climb rungs without a SYNC (asha)."""

    rung: int
    iterations: int
    """Iterations in all that a trial has done at its end."""
    trials: int
    """Trials that started in it, or were promoted to it."""
    ended: int
    """Trials that ended it."""
    promoted: int
    """Trials that went on from it."""
