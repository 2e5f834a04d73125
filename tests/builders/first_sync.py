"""What the best plan could still do from a run's first SYNC on: the measure of a replan."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

from rubberband.executor import Controller, Event, Phase, bill_usd, limits, remaining
from rubberband.executor import held_instances as held
from rubberband.planner.exact.model import predict
from rubberband.planner.planning import plan
from rubberband.planner.problem import JobPlan, Problem
from rubberband.values.offer import slots
from rubberband.values.plan import Plan, StagePlan, gang_sizes
from rubberband.values.profile import Profile

MOST_PLANS = 1000
"""Up to this number of plans all are tried; beyond it, the exact search finds the cheapest."""


class FirstSync:
    """Looks at a run at its first SYNC, and finds what the best plan with the true times could still do."""

    def __init__(self, slowdown: float) -> None:
        self._slowdown = slowdown
        self.shortest_jct_s = math.inf
        """Of many plans, this is the time of the cheapest that keeps the deadline."""
        self.is_worth_it = False
        """Whether a plan keeps the deadline, and costs no more in addition than the whole run does if it is late."""

    def __call__(self, event: Event, controller: Controller) -> None:
        job, state = controller.job, controller.state
        if state.phase is not Phase.PLANNING or state.decisions:
            return
        true = slower(job.profile, self._slowdown)
        rest, now_held = remaining(state.lanes[0])[1:], held(state.lanes[0], state.now)
        elapsed_s = state.now - state.started_at
        limit = limits(job)
        choices = [
            StagePlan(instances=instances, gpus_per_trial=gpus)
            for instances in range(1, job.offer.max_instances + 1)
            for gpus in gang_sizes(job.offer.slots, limit.min_gpus_per_trial, limit.max_gpus_per_trial)
            if slots(instances, job.offer.slots, gpus) > 0
        ]
        deadline_s = math.inf if job.deadline_s is None else job.deadline_s
        if len(choices) ** len(rest) <= MOST_PLANS:
            every = (Plan(stages=chosen) for chosen in itertools.product(choices, repeat=len(rest)))
            found = [predict(rest, chosen, true, job.offer, now_held) for chosen in every]
        else:
            bound = replace(limit, deadline_s=max(0.0, deadline_s - elapsed_s))
            cheapest = plan(Problem(brackets=(rest,), profile=true, offer=job.offer, constraints=bound, held=now_held))
            found = [cheapest.prediction] if isinstance(cheapest, JobPlan) else []
        self.shortest_jct_s = elapsed_s + min((each.jct_s for each in found), default=math.inf)
        in_time_usd = min((each.cost_usd for each in found if elapsed_s + each.jct_s <= deadline_s), default=math.inf)
        late = predict(rest, Plan(stages=state.plan.stages[1:]), true, job.offer, now_held)
        self.is_worth_it = in_time_usd - late.cost_usd <= bill_usd(state, state.now) + late.cost_usd


def slower(profile: Profile, slowdown: float) -> Profile:
    """The profile of trials that take `slowdown` times as long."""
    table = profile.seconds_per_iteration.items()
    return replace(profile, seconds_per_iteration={gpus: slowdown * seconds for gpus, seconds in table})
