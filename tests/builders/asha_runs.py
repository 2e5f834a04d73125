"""Simulated runs of asha in which nothing varies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rubberband.planner.noise.asha_draws import Draw
from rubberband.planner.noise.asha_runs import SimulatedRuns, simulate
from rubberband.values.offer import Offer
from rubberband.values.plan import Stage, StagePlan
from rubberband.values.profile import Profile


def steady_run(
    stage: Stage, choice: StagePlan, profile: Profile, offer: Offer, merits: Sequence[Sequence[float]]
) -> SimulatedRuns:
    """Simulate one run in which `merits[rung][trial]` says how good a result is: the lowest is the best."""
    ranks = np.array([np.argsort(np.argsort(row, kind="stable")) for row in merits])
    draw = Draw(
        ranks=ranks[:, None, :],
        provision_s=np.array([offer.provision_delay_s]),
        init_s=np.array([offer.init_delay_s]),
        slow=np.array([0.5]),
    )
    return simulate(stage, [choice], profile, offer, draw)


def reached(runs: SimulatedRuns, rungs: int) -> tuple[int, ...]:
    """Return how many trials of a single run entered each rung."""
    return tuple(int((runs.rungs >= rung).sum()) for rung in range(rungs))
