"""From a problem to its plan: the one way of estimates, previews, runs, remedies, sizes and replanning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rubberband.planner import search
from rubberband.planner.exact.solver import unbeaten
from rubberband.planner.hyperband import divided
from rubberband.planner.noise.sampling import without_noise
from rubberband.planner.problem import Infeasible, JobPlan, Problem
from rubberband.values.plan import Stage

_FRONTIER_POINTS = 5
_FRONTIER_STEP = 0.75
"""For a job with several brackets: this number of deadlines, each this share of the one before."""
Point = tuple[float, float]
"""JCT in seconds, and cost in US dollars."""


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
    found = search.solve_chain(problem)
    return found if isinstance(found, Infeasible) else JobPlan.of_chain(problem, found)


def frontier(problem: Problem) -> list[Point]:
    """Return (jct_s, cost_usd) of plans that no other beats on both, fastest first, without limits.

    Whole for one bracket (`search.frontier`). For several brackets, the plans for a few deadlines with all times
    fixed; empty on the spot market, whose times are never fixed.
    """
    limits = replace(problem.constraints, deadline_s=None, max_cost_usd=None)
    free = replace(problem, constraints=limits, reserve=None, objective="min_cost")
    if len(problem.brackets) == 1:
        return search.frontier(free)
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
