"""Random jobs whose plan the planner made, within limits that bind: what a replan starts from."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume
from hypothesis import strategies as st

from rubberband.errors import InfeasibleError, InputError
from rubberband.executor import Job
from rubberband.values.offer import Offer
from rubberband.values.plan import PlanningConstraints, Stage
from rubberband.values.profile import Profile
from tests.builders.plans import plan
from tests.builders.strategies import offers, profiles, saving, stage_lists

LIMITS = PlanningConstraints(max_gpus_per_trial=8)


def planned_job(
    stages: tuple[Stage, ...], profile: Profile, offer: Offer, slack: float | None, room: float | None = None
) -> Job:
    """A job planned by the optimal policy.

    `slack` places the deadline between the shortest JCT (0) and the cheapest plan's (1), or beyond; `room` times the
    cost of that plan is its budget.
    """
    limits = replace(LIMITS, min_gpus_per_trial=profile.smallest_gpus)
    if slack is not None:
        shortest = plan(stages, profile, offer, limits, "optimal", "min_time").prediction.jct_s
        cheapest = plan(stages, profile, offer, limits).prediction.jct_s
        limits = replace(limits, deadline_s=shortest + slack * max(cheapest - shortest, 1.0))
    planned = plan(stages, profile, offer, limits)
    return Job(
        name="planned",
        stages=stages,
        plan=planned.plan,
        prediction=planned.prediction,
        offer=offer,
        profile=profile,
        metric="score",
        mode="max",
        deadline_s=limits.deadline_s,
        max_cost_usd=None if room is None else room * planned.prediction.cost_usd,
        min_gpus_per_trial=limits.min_gpus_per_trial,
        max_gpus_per_trial=limits.max_gpus_per_trial,
    )


@st.composite
def planned_jobs(draw: st.DrawFn, slack: st.SearchStrategy[float | None], room: st.SearchStrategy[float | None]) -> Job:
    offer, profile, stages = draw(offers()), draw(profiles()), draw(stage_lists())
    stages, profile = draw(saving(stages, profile))
    assume(len(stages) > 1)
    try:
        return planned_job(stages, profile, offer, draw(slack), draw(room))
    except (InfeasibleError, InputError):
        assume(False)
        raise
