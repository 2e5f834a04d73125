"""What the best plan could still do from a run's first SYNC on: the measure of a replan."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

from rubberband.executor.core.controller import Controller
from rubberband.executor.core.events import Event
from rubberband.executor.core.replanning import held, limits, remaining
from rubberband.executor.core.state import Phase
from rubberband.planner.model import predict
from rubberband.planner.search import plan
from rubberband.values.offer import gang_sizes, slots
from rubberband.values.plan import Plan, StagePlan
from rubberband.values.profile import Profile

MOST_PLANS = 1000
"""Up to this number of plans all are tried; beyond it, the exact search finds the shortest."""


class FirstSync:
    """Looks at a run at its first SYNC, and finds what the best plan with the true times could still do."""

    def __init__(self, slowdown: float) -> None:
        self._slowdown = slowdown
        self.shortest_jct_s = math.inf

    def __call__(self, event: Event, controller: Controller) -> None:
        """An observer of the driver."""
        job, state = controller.job, controller.state
        if state.phase is not Phase.PLANNING or state.decisions:
            return
        true = slower(job.profile, self._slowdown)
        rest, now_held = remaining(job, state, state.lanes[0])[1:], held(state, state.lanes[0], state.now)
        elapsed_s = state.now - state.started_at
        limit = limits(job)
        choices = [
            StagePlan(instances=instances, gpus_per_trial=gpus)
            for instances in range(1, job.offer.max_instances + 1)
            for gpus in gang_sizes(job.offer.gpus, limit.min_gpus_per_trial, limit.max_gpus_per_trial)
            if slots(instances, job.offer.gpus, gpus) > 0
        ]
        if len(choices) ** len(rest) <= MOST_PLANS:
            every = (Plan(stages=chosen) for chosen in itertools.product(choices, repeat=len(rest)))
            shortest_s = min(predict(rest, chosen, true, job.offer, now_held).jct_s for chosen in every)
        else:
            free = replace(limit, deadline_s=None)
            shortest_s = plan(rest, true, job.offer, free, "optimal", "min_time", held=now_held).prediction.jct_s
        self.shortest_jct_s = elapsed_s + shortest_s


def slower(profile: Profile, slowdown: float) -> Profile:
    """The profile of trials that take `slowdown` times as long."""
    table = profile.seconds_per_iteration.items()
    return replace(profile, seconds_per_iteration={gpus: slowdown * seconds for gpus, seconds in table})
