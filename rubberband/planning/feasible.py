"""The plan with which an experiment would run, or the changes that make one possible: the one way of every front door.

`estimate`, previews and admission, `run` and the size of a search all count the same: the limits of
`rubberband.planning.candidates`, and the money that a run keeps back (`rubberband.planner.reserve`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rubberband.cloud.catalogue import Table
from rubberband.errors import InfeasibleError, InputError
from rubberband.planner import (
    Beside,
    Estimate,
    JobPlan,
    Nearest,
    Objective,
    Problem,
    estimate,
    estimate_plan,
    first_kept,
)
from rubberband.planning.candidates import Room, candidates, with_start_times
from rubberband.planning.remedies import CandidatesOf, Reached, advice, find_remedies, none_within, reached
from rubberband.planning.size import refused, size
from rubberband.planning.startup_history import StartTimes
from rubberband.spec.experiment import Experiment
from rubberband.spec.search import Asha, Sha, asha
from rubberband.units import counted, format_duration, format_usd
from rubberband.values.plan import Plan, Policy, Size, Spent
from rubberband.values.profile import Profile

if TYPE_CHECKING:
    from rubberband.planning.month_cap import MonthCap

Profiles = Profile | Mapping[str, Profile]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Inputs of an estimate beside the file and its profile."""

    table: Table | None = None
    """Instance types and prices; None: the experiment's own table."""
    room: Room | None = None
    """Instances that the account's quota allows; None: the file's limit counts."""
    starts: StartTimes | None = None
    """Measured start times of instances on this machine; None for other providers, or before a first run."""
    notes: tuple[str, ...] = ()
    """Remarks on these: stale prices, quotas. Every screen of an estimate shows them."""
    blocks: Callable[[Estimate], str | None] | None = None
    """Returns the remark that compares a plan on demand with a capacity block on offer; None without EC2's offers."""
    month_cap: MonthCap | None = None
    """The cap of the experiment's pool on a month's bill, and what is spent of it; None without a cap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedExperiment:
    """An experiment with its plan, or the reason why there is none."""

    experiment: Experiment
    """With the start times of this machine, and a number as the size of its search."""
    candidates: tuple[Problem, ...]
    estimate: Estimate
    size: Size | None
    """Set if the search was sized to the limits."""
    remarks: tuple[str, ...]
    """On the start times."""
    seen: frozenset[str]
    """The words that measured start times replace."""

    @property
    def job(self) -> JobPlan:
        """The plan to run. Raises InfeasibleError, with remedies, if it does not keep the limits."""
        if self.estimate.job is None or not self.estimate.feasible:
            raise _refusal(self.estimate)
        return self.estimate.job


def planned(
    experiment: Experiment,
    profiles: Profiles,
    terms: Terms,
    *,
    now: float,
    policy: Policy = "optimal",
    given: Plan | None = None,
    spent: Spent | None = None,
    to_size: bool = False,
    compare: bool = False,
    frontier: bool = False,
    seed: int = 0,
    most_usd: float | None = None,
    advise: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> PlannedExperiment:
    """Plan an experiment that starts at `now` (Unix time), with what is left of its limits after `spent`.

    `profiles` is one for all types, or type -> profile. With `to_size`, or where its size is auto, the search is first
    sized to the limits (`rubberband.planning.size`). `given` is the user's own plan, to predict instead of search.
    `compare` and `frontier` add to the estimate. To `advise` is to search for remedies where there is no plan, none of
    which costs more than `most_usd`. `clock` reads seconds. Raises InputError for what cannot be planned.
    """
    started, remarks, seen = with_start_times(experiment, terms.starts, profiles)
    used = spent or Spent()

    def candidates_of(changed: Experiment) -> tuple[Problem, ...]:
        return candidates(
            changed, profiles, now, policy=policy, seed=seed, table=terms.table, room=terms.room, spent=used
        )

    found, sized = candidates_of(started), None
    if to_size or started.search.auto is not None:
        if given is not None:
            raise InputError(
                "--plan: a plan file is for one size, and this search is sized to the limits; leave it out"
            )
        sized, started = size(started, found)
        found = tuple(replace(one, brackets=started.brackets()) for one in found)
    if given is not None:
        best = estimate_plan(_only(found), given, started.name, with_frontier=frontier)
    else:
        best = estimate(
            found,
            started.name,
            clock=clock,
            compare=compare,
            with_frontier=frontier,
            beside=_beside(started.search.scheduler) if compare else None,
        )
    if best.job is None and advise:
        best = _with_remedies(best, started, candidates_of, used, clock=clock, most_usd=most_usd)
    if sized is not None and sized.number is None:
        best = _unsized(best, sized)
    return PlannedExperiment(
        experiment=started, candidates=found, estimate=best, size=sized, remarks=remarks, seen=seen
    )


def _only(found: Sequence[Problem]) -> Problem:
    """Return the problem that the user's own plan solves. Raises InputError if that is ambiguous."""
    brackets = found[0].brackets
    if len(brackets) > 1:
        raise InputError(
            f"--plan: a plan file holds one chain of stages and hyperband has {counted(len(brackets), 'bracket')}; "
            "leave --plan out, or use the scheduler sha or stages"
        )
    if len(found) > 1:
        names = [one.offer.instance_type for one in found]
        raise InputError(
            f"--plan: a plan is for one instance type and the experiment has {', '.join(names)}; "
            f"choose one with -s 'resources.instance_types=[{names[0]}]'"
        )
    # Predicted as it is written, and compared by its cost.
    return replace(found[0], policy="optimal", objective="min_cost")


def _beside(scheduler: object) -> Beside | None:
    """Return the scheduler that is shown beside this one: with a SYNC after every rung, or without."""
    if isinstance(scheduler, Asha):
        return Beside(scheduler="sha", stages=scheduler.stages())
    if isinstance(scheduler, Sha):
        return Beside(scheduler="asha", stages=(asha(scheduler.brackets()[0], scheduler.reduction_factor),))
    return None


def _unsized(best: Estimate, sized: Size) -> Estimate:
    """Return the estimate of the smallest search, which does not fit, with the reason and the remedies of a run."""
    error = refused(sized, _refusal(best))
    return replace(
        best,
        feasible=False,
        job=None,
        nearest=Nearest(jct_s=error.shortest_jct_s, cost_usd=error.cheapest_usd),
        reason=str(error),
        obstacle=error.obstacle,
        remedies=error.remedies,
        options=(),
        frontier=(),
        static_frontier=(),
    )


def _with_remedies(
    found: Estimate,
    experiment: Experiment,
    candidates_of: CandidatesOf,
    used: Spent,
    *,
    clock: Callable[[], float],
    most_usd: float | None,
) -> Estimate:
    """Return an estimate without a plan with the remedies that make a run possible, of at most `most_usd`."""

    def attempt(tried: Sequence[Problem], objective: Objective) -> Reached | None:
        kept = first_kept([replace(one, brackets=found.brackets, objective=objective) for one in tried])
        if kept is None:
            return None
        plain = reached(kept[1], tried[kept[0]].constraints.confidence)
        return replace(plain, needs_s=plain.needs_s + used.seconds, needs_usd=plain.needs_usd + used.cost_usd)

    nearest = found.nearest if used == Spent() else None
    remedies = find_remedies(experiment, candidates_of, attempt, clock=clock, most_usd=most_usd, nearest=nearest)
    if not remedies and most_usd is None:
        return found
    fix = advice(remedies[0]) if remedies else none_within(most_usd)
    if used != Spent():
        fix = f"measuring took {format_duration(used.seconds)} and {format_usd(used.cost_usd)} of the limits; {fix}"
    return replace(found, remedies=remedies, reason=f"{found.obstacle}; {fix}")


def _refusal(found: Estimate) -> InfeasibleError:
    """Return the error of an estimate that is not feasible, with its remedies."""
    if found.job is not None:
        return _missed(found)
    assert found.nearest is not None, "an infeasible answer has a nearest plan"
    return InfeasibleError(
        found.obstacle or "",
        advice=(found.reason or "").removeprefix(f"{found.obstacle}; "),
        remedies=found.remedies,
        shortest_jct_s=found.nearest.jct_s,
        cheapest_usd=found.nearest.cost_usd,
    )


def _missed(found: Estimate) -> InfeasibleError:
    """Return the error for a policy that has one plan, which misses the limits."""
    assert found.prediction is not None, "there is a plan"
    prediction, limits = found.prediction, found.constraints
    missed = []
    if limits.deadline_s is not None:
        missed.append(f"deadline {format_duration(limits.deadline_s)}")
    if limits.max_cost_usd is not None:
        missed.append(f"max_cost {format_usd(limits.max_cost_usd)}")
    surely = "" if found.odds is None else f" with confidence {limits.confidence:g}"
    return InfeasibleError(
        f"the {found.policy} plan does not keep {' and '.join(missed)}{surely}: it takes "
        f"{format_duration(prediction.jct_s)} and costs {format_usd(prediction.cost_usd)}",
        advice="use the policy optimal, or raise the limits",
        shortest_jct_s=prediction.jct_s,
        cheapest_usd=prediction.cost_usd,
    )
