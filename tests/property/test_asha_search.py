"""The search for a plan of asha: what it leaves out, or simulates side by side, changes no answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rubberband.planner import asha as planner
from rubberband.planner.noise.ladders import Ladders
from rubberband.planner.problem import Infeasible, Problem
from rubberband.spec.schedulers import asha, sha
from rubberband.values.offer import Spot
from rubberband.values.plan import PlanningConstraints, StagePlan
from rubberband.values.profile import Spread
from rubberband.values.schedulers import Ladder, Rungs
from tests.builders.budget import examples
from tests.builders.strategies import offers, profiles, saving


class OneByOne(planner._AshaCandidates):
    """The search that simulates every candidate, one batch after another: nothing is left out by a bound."""

    def _best(self, candidates: Sequence[StagePlan]) -> StagePlan | None:
        first = self._hopeful(candidates, self.runs.rough)[:1]
        near = [one for choice in first for one in self._near(choice)]
        self.candidates += near
        found = self._confirmed([*candidates, *near])
        if found is None or found in [*first, *near]:
            return found
        near = list(self._near(found))
        self.candidates += near
        choices = [choice for choice in (self._confirmed(near), found) if choice is not None]
        figures = self.runs.figures(choices, self.runs.most)
        return min(zip(choices, figures, strict=True), key=lambda pair: self._value(pair[1]))[0]

    def _confirmed(self, candidates: Sequence[StagePlan], *, looks_near: bool = False) -> StagePlan | None:
        hopeful = self._hopeful(candidates, self.runs.rough)
        together = 1 if len(self.runs.ends) == 2 else 10
        for first in range(0, len(hopeful), together):
            for choice in self._hopeful(hopeful[first : first + together], self.runs.ends[1]):
                if all(self._hopeful([choice], count) for count in self.runs.ends):
                    return choice
        return None


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """A job of asha, with and without noise, losses and checkpoints, whose row is asked for."""
    offer, profile, eta = draw(offers()), draw(profiles()), draw(st.integers(2, 4))
    if draw(st.booleans()):
        cvs = st.sampled_from([0.0, 0.1, 0.3])
        profile = replace(profile, trial_cv=draw(cvs), iteration_cv=draw(cvs), startup_cv=draw(cvs), mean_cv=draw(cvs))
        offer = replace(offer, provision_spread=Spread(cv=draw(cvs)), init_spread=Spread(cv=draw(cvs)))
    if draw(st.sampled_from([True, False, False])):
        spot = Spot(price_usd_per_hour=0.2, interruptions_per_hour=0.5, restart_s=60.0, checkpoint_iterations=2)
        offer = replace(offer, spot=spot)
    grace = draw(st.integers(1, 3))
    chain = sha(draw(st.integers(1, 70)), grace, grace + draw(st.integers(0, 30)), eta)
    stages, profile = draw(saving((asha(chain, eta),), profile))
    objective = draw(st.sampled_from(["min_cost", "min_cost", "min_time"]))
    return Problem(
        brackets=(stages,),
        profile=profile,
        offer=offer,
        constraints=PlanningConstraints(max_gpus_per_trial=8, min_gpus_per_trial=profile.smallest_gpus),
        objective=objective,
        quick=True,
    )


@given(problems(), st.floats(0.3, 1.5), st.floats(0.8, 2.0), st.sampled_from(["deadline", "budget", "both", "none"]))
@settings(deadline=None, max_examples=examples(200))
def test_the_row_is_that_of_a_search_that_leaves_nothing_out(
    problem: Problem, times: float, more: float, limit: str
) -> None:
    free = planner.solve(problem)
    assert not isinstance(free, Infeasible)
    if limit in ("deadline", "both"):
        problem = problem.with_limits(deadline_s=times * free.prediction.jct_s)
    if limit in ("budget", "both"):
        problem = problem.with_limits(max_cost_usd=more * free.prediction.cost_usd + 1e-6)
    expected = OneByOne(problem, planner.QUICK)
    expected.runs = planner.Simulations(problem.stages[0], problem.profile, problem.offer, 0, planner.QUICK)
    choice, found = expected.best(), planner.solve(problem)
    if isinstance(found, Infeasible):
        assert choice is None
        assert str(found.error) == str(expected.infeasible())
        return
    assert choice == found.plan.stages[0]
    (figures,) = expected.runs.figures([choice], expected.runs.most)
    assert figures.mean == (found.prediction.jct_s, found.prediction.cost_usd)


@given(st.integers(1, 300), st.integers(2, 5), st.integers(0, 10**6))
@settings(deadline=None, max_examples=examples(300))
def test_simulated_ladders_promote_as_rungs_do(trials: int, eta: int, seed: int) -> None:
    source, ladder = Random(seed), Ladder(totals=(1, 3, 9, 27), reduction_factor=eta)
    ranks = np.array([source.sample(range(trials), trials) for _ in ladder.totals])
    simulated, rungs = Ladders(ladder, ranks[:, None], np.zeros(1, np.int64), defers=False), Rungs(ladder)
    running, fresh = [(trial, 0) for trial in range(min(4, trials))], min(4, trials)
    while running:
        trial, rung = running.pop(source.randrange(len(running)))
        rungs.record(rung, ranks[rung, trial], trial)
        (goes,) = simulated.settle(np.zeros(1, np.int64), np.array([rung]), np.array([trial]))
        due = rungs.promotable()
        assert (None if goes < 0 else (rung, goes)) == due
        if due is not None:
            rungs.promote(rung)
            running.append((int(goes), rung + 1))
        elif fresh < trials:
            running.append((fresh, 0))
            fresh += 1
