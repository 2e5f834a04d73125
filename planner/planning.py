"""From a problem to its plan: the one way of estimates, previews, runs, remedies and sizes, and for a job that runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from rubberband.planner import asha, hyperband, risk, search
from rubberband.planner.exact.solver import Objective, unbeaten
from rubberband.planner.hyperband import divided
from rubberband.planner.noise.sampling import Draws, Samples, without_noise
from rubberband.planner.problem import Infeasible, JobPlan, Problem
from rubberband.planner.search import meets
from rubberband.units import counted, format_duration, format_usd
from rubberband.values.plan import Plan, Planned, PlanningConstraints, Prediction, Stage, StagePlan

_FRONTIER_POINTS = 5
_FRONTIER_STEP = 0.75
"""For a job with several brackets: this number of deadlines, each this share of the one before."""
Point = tuple[float, float]
"""JCT in seconds, and cost in US dollars."""


class Method(NamedTuple):
    """A way to plan stages."""

    solve: Callable[[Problem], Planned | Infeasible]
    frontier: Callable[[Problem], list[Point]]
    planned: Callable[[Problem, Plan], Planned]
    sample_lanes: Callable[..., Samples]


def method_of(stages: Sequence[Stage]) -> Method:
    """Return how stages are planned: one by one up to their SYNCs, or by simulations of a run that has none."""
    if all(stage.has_sync for stage in stages):
        return Method(search.solve_chain, search.frontier, risk.planned, hyperband.sample_lanes)
    return Method(asha.solve, asha.frontier, asha.planned, asha.sample_lanes)


def plan(problem: Problem) -> JobPlan | Infeasible:
    """Return the best plan of a job (or of the rest of one), or the answer that none meets the limits.

    * `optimal` is exact where nothing varies: no plan within the limits has a lower cost (RubberBand §4.3 asks for this
      and approximates it). With several brackets (`rubberband.planner.hyperband`) min_time is approached.
    * `static` is the paper's baseline: the cheapest number of instances held through all stages, with the best GPUs
      per trial in each.
    * `naive_elastic` (§6) is the cheapest plan with the same GPUs per trial in every stage.
    * `greedy` is the paper's Algorithm 2; where times vary it decides on few samples, and may miss the limits.

    A plan whose JCT equals the deadline is feasible. Ties on cost go to the shorter JCT, then to fewer instances, then
    to fewer GPUs; with `min_time`, ties on JCT go to the lower cost.

    Where times vary, cost and time are means (times within 0.1 % of each other tie), and the plan keeps deadline and
    budget with a probability of `constraints.confidence` (`rubberband.planner.risk`). Equal seeds give equal
    samples.

    Raises InputError if no plan can exist for any limits.
    """
    if len(problem.brackets) > 1:
        return divided(problem)
    found = method_of(problem.stages).solve(problem)
    return found if isinstance(found, Infeasible) else JobPlan.of_chain(problem, found)


def frontier(problem: Problem) -> list[Point]:
    """Return (jct_s, cost_usd) of plans that no other beats on both, fastest first, without limits.

    Whole for one bracket (`search.frontier`). For several brackets, the plans for a few deadlines with all times
    fixed; empty on the spot market, whose times are never fixed.
    """
    limits = replace(problem.constraints, deadline_s=None, max_cost_usd=None)
    free = replace(problem, constraints=limits, reserve=None, objective="min_cost")
    if len(problem.brackets) == 1:
        return method_of(free.stages).frontier(free)
    if problem.offer.spot is not None:
        return []
    profile, offer = without_noise(problem.profile, problem.offer)
    certain = replace(free, profile=profile, offer=offer)
    points: list[Point] = []
    for deadline_s in _deadlines_s(certain):
        found = plan(replace(certain, constraints=replace(limits, deadline_s=deadline_s)))
        if isinstance(found, Infeasible):
            break
        points.append((found.prediction.jct_s, found.prediction.cost_usd))
    return unbeaten(points)


def _deadlines_s(problem: Problem) -> list[float | None]:
    """Return None and then shorter and shorter deadlines, from the shortest time of all brackets in one chain down.

    They end well above the time of the longest bracket by itself, since finding that there is no plan is slow.
    """
    brackets = problem.brackets

    def fastest_s(chain: Sequence[Stage]) -> float:
        found = plan(replace(problem, brackets=(chain,), objective="min_time"))
        assert isinstance(found, JobPlan), "there are no limits"
        return found.prediction.jct_s

    longest_s = fastest_s([stage for stages in brackets for stage in stages])
    shortest_s = max(fastest_s(stages) for stages in brackets)
    deadlines_s = [1.01 * longest_s * _FRONTIER_STEP**at for at in range(_FRONTIER_POINTS)]
    return [None, deadlines_s[0], *(deadline_s for deadline_s in deadlines_s[1:] if deadline_s > 1.7 * shortest_s)]


# Planning the rest of a running job, from the instances held, the time and money spent, and the speeds measured. SYNC
# makes stages additive (RubberBand §4.2), so the rest is a job of its own that starts with instances held, less time
# and less money. The same state gives the same plan.

SMALLEST_GAIN = 0.01
"""Hysteresis: a plan that keeps its limits is left only for one that saves this share of the rest, and at least
`SMALLEST_GAIN_USD` (or `SMALLEST_GAIN_S` for min_time), and more than the saving's standard deviation."""
SMALLEST_GAIN_USD = 0.01
SMALLEST_GAIN_S = 1.0
PAIRED_CHUNKS = 4
"""Chunks of samples by which two plans are compared."""
LOWER_CONFIDENCES = (0.9, 0.75, 0.5)
"""Shares of the confidence to try where no plan reaches it."""
_WORTH = 1.0
"""Price of surely missed limits, in costs (or times) of the whole run: a late run is paid for nothing. Where the true
times are 30 % longer, twice as much keeps hardly more limits, and half as much up to one in a hundred less."""
_LIKELY = 0.5
"""A change of later stages waits if the plan in force keeps the limits with this probability."""
_LOST = 0.05
"""The limits are lost where no plan keeps them with a higher probability."""
MOST_CHANGES = 3
"""Stages that a reason names; it counts the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replanned:
    """The plan for the rest of a job, and the reason for it."""

    plan: Plan
    """The whole plan; finished stages are unchanged."""
    prediction: Prediction
    """Prediction of the rest by `plan`: time from now, and the cost that is added to the bill from now on."""
    present: Prediction
    """Prediction of the rest by the plan in force before."""
    changed: bool
    keeps: bool
    """Whether `plan` keeps the constraints, with their confidence."""
    reason: str
    """One line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _JobRest:
    """The job that is left."""

    problem: Problem
    draws: Draws | None
    """None if nothing varies."""
    spent_s: float
    spent_usd: float
    first: str
    """The stage of the job that is the first one left."""

    @property
    def limits(self) -> PlanningConstraints:
        """The limits of the job less time and money spent."""
        return self.problem.constraints

    @property
    def by_cost(self) -> bool:
        """Whether cost is the objective, not time."""
        return self.problem.objective == "min_cost"

    def evaluate(self, choice: Plan) -> Planned:
        """Return the time and cost of a plan of the rest from now on, and its odds of keeping the limits."""
        return risk.planned(self.problem, choice, self.draws)

    def value(self, planned: Planned) -> float:
        """Return the objective's value: US dollars, or seconds."""
        return planned.prediction.cost_usd if self.by_cost else planned.prediction.jct_s

    def unsure(self, present: Planned, other: Planned) -> float | None:
        """Return the standard deviation of the saving by `other`, both on the same samples; None if nothing varies.

        Shared luck cancels: a slow stage that both plans have does not count.
        """
        if self.draws is None:
            return None
        chunks = min(PAIRED_CHUNKS, self.draws.most_chunks)
        one, two = (self.draws.evaluate(each.plan, chunks, self.problem.held) for each in (present, other))
        saves = one.cost_usd - two.cost_usd if self.by_cost else one.jct_s - two.jct_s
        return float(saves.std())

    def worth(self, present: Planned) -> float:
        """Return the worth of keeping the limits, in the unit of the objective.

        It falls as the plan in force gets likelier to keep them. Plans change in large steps, so insurance against a
        small risk costs as much as a rescue, and is mostly not needed.
        """
        at_risk = 1.0 - self.odds(present)
        spent = self.spent_usd if self.by_cost else self.spent_s
        return _WORTH * at_risk * (self.value(present) + spent)

    def worth_the_time(self, present: Planned, sooner: Planned) -> bool:
        """Return whether the time that `sooner` saves is worth its extra cost, where the limits are lost anyway."""
        if not self.by_cost:
            return True
        share = (present.prediction.jct_s - sooner.prediction.jct_s) / (self.spent_s + present.prediction.jct_s)
        return sooner.prediction.cost_usd - present.prediction.cost_usd <= share * self.worth(present)

    def odds(self, planned: Planned) -> float:
        """Return the probability that a plan keeps the limits."""
        return float(all(self.meets(planned))) if planned.odds is None else planned.odds.p_both

    def meets(self, planned: Planned) -> tuple[bool, bool]:
        """Return whether a plan keeps the deadline and the budget, by its means."""
        return meets(planned.prediction, self.limits, reserve_usd=planned.reserve_usd)

    def best(self, limits: PlanningConstraints, objective: Objective) -> Planned | None:
        """Return the best plan within `limits`, with its odds of keeping those left; None if none keeps `limits`."""
        found = plan(replace(self.problem, constraints=limits, objective=objective))
        if isinstance(found, Infeasible):
            return None
        same = replace(limits, confidence=self.limits.confidence) == self.limits
        return found.lanes[0].planned if same else self.evaluate(found.plan)

    def kept(self, planned: Planned) -> bool:
        """Return whether a plan keeps the limits, with their confidence."""
        return self.odds(planned) >= (1.0 if planned.odds is None else self.limits.confidence)


def replan(
    job: Problem,
    *,
    done: int,
    spent_s: float,
    spent_usd: float,
    current: Plan,
    because: str = "",
    name_of: Callable[[int], str] = "stage {}".format,
) -> Replanned:
    """Return the best plan from stage `done` on, with the instances held now and the rest of the constraints.

    `job` is the whole one, with the instances that are held now and the speeds of the trials that go on.

    * The plan in force stays while it keeps the constraints, unless another saves more than the hysteresis and the
      saving's standard deviation.
    * A plan that no longer keeps them stays if keeping them is worth less than another plan costs more (`_WORTH`). It
      also stays if the next stage can stay as it is: later stages are decided after it.
    * If no plan keeps the constraints, the one that ends soonest within the budget is taken, unless it costs more than
      the time is worth. If none keeps the budget, the cheapest one is taken.

    `because` (the differences from the plan's assumptions) goes into the reason; `name_of(stage)` is the name of a
    stage in it.

    Raises InputError if no plan can exist at all.
    """
    deadline_s, max_cost_usd = job.constraints.deadline_s, job.constraints.max_cost_usd
    left = replace(
        job.constraints,
        deadline_s=None if deadline_s is None else max(0.0, deadline_s - spent_s),
        max_cost_usd=None if max_cost_usd is None else max(0.0, max_cost_usd - spent_usd),
    )
    problem = replace(job, brackets=(job.stages[done:],), constraints=left)
    draws = problem.draws() if problem.varies else None
    rest = _JobRest(problem=problem, draws=draws, spent_s=spent_s, spent_usd=spent_usd, first=name_of(done))
    present = rest.evaluate(Plan(stages=current.stages[done:]))
    chosen, verdict = _choose(rest, present)
    changed = chosen.plan != present.plan
    changes = _changes(done, name_of, rest, present, chosen) if changed else ""
    return Replanned(
        plan=Plan(stages=(*current.stages[:done], *chosen.plan.stages)),
        prediction=chosen.prediction,
        present=present.prediction,
        changed=changed,
        keeps=rest.kept(chosen),
        reason="; ".join(filter(None, (because, verdict, changes))),
    )


def _choose(rest: _JobRest, present: Planned) -> tuple[Planned, str]:
    """Return the plan to take, and the verdict on the one in force."""
    best = rest.best(rest.limits, rest.problem.objective)
    if rest.kept(present):
        return _saves_enough(rest, present, best)
    if best is not None:
        return _keeps_enough(rest, present, best)
    if present.odds is not None and (likely := _likeliest(rest, present)) is not None:
        return likely, f"no plan keeps its limits with a probability of {rest.limits.confidence:g} any more"
    soonest = rest.best(replace(rest.limits, deadline_s=None), "min_time")
    if soonest is not None:
        within_budget = rest.meets(present)[1]
        sooner = _gains("min_time", present.prediction, soonest.prediction) and rest.worth_the_time(present, soonest)
        taken = present if within_budget and not sooner else soonest
        return taken, f"no plan keeps the deadline any more{_surely(rest, taken)}; this one ends {_late(rest, taken)}"
    cheapest = rest.best(replace(rest.limits, deadline_s=None, max_cost_usd=None), "min_cost")
    if cheapest is None or not _gains("min_cost", present.prediction, cheapest.prediction):
        cheapest = present
    return cheapest, f"no plan keeps max_cost any more{_surely(rest, cheapest)}; this one costs {_dear(rest, cheapest)}"


def _saves_enough(rest: _JobRest, present: Planned, best: Planned | None) -> tuple[Planned, str]:
    """Return the best plan if it saves more than the uncertainty, where the plan in force keeps the limits too."""
    if best is None or best.plan == present.plan:
        return present, _holds(rest, present)
    if not _gains(rest.problem.objective, present.prediction, best.prediction):
        return present, _holds(rest, present)
    saves, unsure = rest.value(present) - rest.value(best), rest.unsure(present, best)
    if saves > (unsure or 0.0):
        return best, ""
    return present, f"{_holds(rest, present)}; changing would save {_amount(rest, saves, unsure)}"


def _keeps_enough(rest: _JobRest, present: Planned, best: Planned) -> tuple[Planned, str]:
    """Return the best plan if its extra cost is worth it, where the plan in force may miss the limits."""
    extra, more_likely = rest.value(best) - rest.value(present), rest.odds(best) - rest.odds(present)
    failing = f"the plan would {_failing(rest, present)}"
    later = _changed_later(rest, present, best)
    if later is not None and rest.odds(present) >= _LIKELY:
        return present, f"{failing}; {rest.first} stays as it is, later ones can still change"
    if later is not None:
        return later, failing
    if extra <= more_likely * rest.worth(present):
        return best, failing
    return present, f"{failing}; changing would cost {_amount(rest, extra, rest.unsure(present, best))} more"


def _changed_later(rest: _JobRest, present: Planned, best: Planned) -> Planned | None:
    """Return the plan that leaves the next stage as it is and keeps the limits by changing later ones, if cheaper.

    The later change is needed with the probability that the plan in force misses the limits.
    """
    extra = rest.value(best) - rest.value(present)
    if present.odds is None or extra <= 0.0 or len(present.plan.stages) == 1:
        return None
    later = rest.evaluate(Plan(stages=(present.plan.stages[0], *best.plan.stages[1:])))
    needed = 1.0 - rest.odds(present)
    return later if rest.kept(later) and needed * (rest.value(later) - rest.value(present)) <= extra else None


def _likeliest(rest: _JobRest, present: Planned) -> Planned | None:
    """Return the plan worth most where none keeps the limits with the confidence; None if they are lost anyway."""
    asked = [share * rest.limits.confidence for share in LOWER_CONFIDENCES]
    found = [rest.best(replace(rest.limits, confidence=each), rest.problem.objective) for each in asked]
    soonest = rest.best(replace(rest.limits, deadline_s=None), "min_time")
    planned = [present, *(each for each in (*found, soonest) if each is not None)]
    if max(map(rest.odds, planned)) <= _LOST:
        return None
    return max(planned, key=lambda each: rest.odds(each) * rest.worth(present) - rest.value(each))


def _gains(objective: Objective, present: Prediction, other: Prediction) -> bool:
    """Return whether leaving the plan in force saves enough."""
    if objective == "min_time":
        return present.jct_s - other.jct_s >= max(SMALLEST_GAIN * present.jct_s, SMALLEST_GAIN_S)
    return present.cost_usd - other.cost_usd >= max(SMALLEST_GAIN * present.cost_usd, SMALLEST_GAIN_USD)


def _holds(rest: _JobRest, present: Planned) -> str:
    if rest.limits.deadline_s is None:
        return "no other saves enough to change it"
    return f"{_duration(rest.limits.deadline_s - present.prediction.jct_s)} to spare"


def _failing(rest: _JobRest, present: Planned) -> str:
    """Say how the plan in force would miss the limits."""
    in_time, in_budget = rest.meets(present)
    failings = [] if in_time else [f"end {_late(rest, present)}"]
    failings += [] if in_budget else [f"cost {_dear(rest, present)}{rest.problem.reserve_text}"]
    if present.odds is not None and not failings:
        return f"keep its limits with a probability of {present.odds.p_both:.2f} only, not {rest.limits.confidence:g}"
    return " and ".join(failings)


def _late(rest: _JobRest, planned: Planned) -> str:
    late_s = planned.prediction.jct_s - (rest.limits.deadline_s or 0.0)
    return f"{_duration(late_s)} {'after' if late_s > 0 else 'before'} the deadline"


def _dear(rest: _JobRest, planned: Planned) -> str:
    beyond_usd = planned.prediction.cost_usd + planned.reserve_usd - (rest.limits.max_cost_usd or 0.0)
    return f"{format_usd(abs(beyond_usd))} {'more' if beyond_usd > 0 else 'less'} than max_cost"


def _surely(rest: _JobRest, planned: Planned) -> str:
    return "" if planned.odds is None else f" with a probability of {rest.limits.confidence:g}"


def _changes(done: int, name_of: Callable[[int], str], rest: _JobRest, present: Planned, chosen: Planned) -> str:
    """Say how the new plan differs, and how much that costs or saves."""
    pairs = zip(present.plan.stages, chosen.plan.stages, strict=True)
    changes = [
        _change(name_of(done + index), old, new, rest.problem.offer.place)
        for index, (old, new) in enumerate(pairs)
        if old != new
    ]
    named = changes[:MOST_CHANGES]
    if len(changes) > MOST_CHANGES:
        left = len(changes) - MOST_CHANGES
        named.append("1 more stage changes" if left == 1 else f"{left} more stages change")
    return f"{', '.join(named)} ({_difference(rest, present, chosen)})"


def _change(stage: str, old: StagePlan, new: StagePlan, place: str) -> str:
    parts = []
    if new.instances != old.instances:
        parts.append(f"{counted(new.instances, 'instance')} instead of {old.instances}")
    if new.gpus_per_trial != old.gpus_per_trial:
        parts.append(f"{counted(new.gpus_per_trial, place)} per trial instead of {old.gpus_per_trial}")
    if new.market != old.market:
        parts.append(f"{new.market.replace('_', ' ')} instances")
    return f"{stage} gets {' and '.join(parts)}"


def _difference(rest: _JobRest, present: Planned, chosen: Planned) -> str:
    extra_usd = chosen.prediction.cost_usd - present.prediction.cost_usd
    extra_s = chosen.prediction.jct_s - present.prediction.jct_s
    unsure = rest.unsure(present, chosen)
    by_cost = rest.by_cost
    cost = _usd(abs(extra_usd), unsure if by_cost else None)
    change = f"costs {cost} more" if extra_usd > 0.0 else f"saves {cost}"
    cost = change if abs(extra_usd) >= 5e-5 else "no extra cost"
    time = _seconds(abs(extra_s), None if by_cost else unsure)
    return f"{cost}, {time} {'later' if extra_s > 0.0 else 'sooner'}" if abs(extra_s) >= 1.0 else cost


def _amount(rest: _JobRest, value: float, unsure: float | None) -> str:
    return _usd(value, unsure) if rest.by_cost else _seconds(value, unsure)


def _usd(value_usd: float, unsure_usd: float | None) -> str:
    if unsure_usd is None:
        return format_usd(value_usd)
    decimals = 2 if value_usd >= 0.01 else 4
    return f"{value_usd:.{decimals}f} +- {unsure_usd:.{decimals}f} USD"


def _seconds(value_s: float, unsure_s: float | None) -> str:
    return _duration(value_s) + ("" if unsure_s is None else f" +- {_duration(unsure_s)}")


def _duration(seconds: float) -> str:
    """Format a duration, in whole seconds from 10 s on."""
    return format_duration(round(abs(seconds), 0 if abs(seconds) >= 10.0 else 1))
