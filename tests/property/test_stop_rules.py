"""Rules of `search.stop` under every scheduler: a resume decides alike, and what an end saves is what it says."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubberband.executor import Controller, Job, State, VirtualBackend, bill_usd, drive, replay
from rubberband.executor.core.history import SearchEnd, TrialCut
from rubberband.executor.virtual.backend import curves
from rubberband.planner.exact.model import predict
from rubberband.spec.schedulers import asha, sha
from rubberband.values.plan import Plan, Stage, StagePlan
from rubberband.values.stopping import StopRules
from tests.builders.brackets import divided
from tests.builders.jobs import JOB
from tests.builders.memory import MemoryJournal
from tests.builders.virtual_runs import jct_s, run_until_killed, run_virtual
from tests.harness.chaos_cases import asha_prediction
from tests.harness.chaos_stops import random_rules, uneven

SEARCHES: dict[str, tuple[Stage, ...]] = {
    "sha": sha(27, 1, 27, 3),
    "stages": (Stage(trials=6, iterations=4), Stage(trials=2, iterations=5)),
    "asha": (asha(sha(27, 1, 27, 3), 3),),
    "none": (asha((Stage(trials=27, iterations=9),), 2),),
}


def job_of(kind: str) -> Job:
    if kind == "hyperband":
        return divided([4, 1, 1], [2])
    stages = SEARCHES[kind]
    plan = Plan(stages=tuple(StagePlan(instances=3, gpus_per_trial=1) for _ in stages))
    if stages[0].has_sync:
        return replace(JOB, stages=stages, plan=plan, prediction=predict(stages, plan, JOB.profile, JOB.offer))
    prediction = asha_prediction(stages[0], plan.stages[0], JOB.profile, JOB.offer)
    return replace(JOB, stages=stages, plan=plan, prediction=prediction)


def outcome(state: State) -> object:
    trials = [(trial.status, trial.iterations, trial.ended) for trial in state.trials]
    return trials, state.outcome, state.reason, state.history.of(TrialCut), state.history.of(SearchEnd), state.ended_at


@given(kind=st.sampled_from(["hyperband", *SEARCHES]), seed=st.integers(0, 2**32), kill_at=st.integers(1, 200))
def test_a_resume_decides_alike(kind: str, seed: int, kill_at: int) -> None:
    job = job_of(kind)
    job = replace(job, stop=random_rules(Random(seed), job), resize_in_stage=seed % 2 == 1)

    def backend() -> VirtualBackend:
        return VirtualBackend(job.name, job.offer, job.profile, metric=job.metric, metric_of=uneven(seed))

    journal, one = MemoryJournal(), backend()
    run_until_killed(Controller(job), one, journal, kill_at)
    killed = Controller(job)
    drive(killed, one, journal)
    again = Controller(job)
    replay(again, journal)
    assert outcome(again.state) == outcome(killed.state)
    assert again.state.best_so_far == killed.state.best_so_far


@pytest.mark.parametrize("target", [0.45, 0.55, 0.75, 0.85, 0.92])
@pytest.mark.parametrize("kind", ["hyperband", *SEARCHES])
def test_an_early_end_saves_what_the_whole_search_takes(kind: str, target: float) -> None:
    """Exactly where stages end in a SYNC or trials train to their ends; rungs without one depend on the results."""
    job = job_of(kind)

    def state_of(stop: StopRules) -> State:
        backend = VirtualBackend(job.name, job.offer, job.profile, metric=job.metric, metric_of=curves(job, 3))
        return run_virtual(replace(job, stop=stop), backend=backend)[0].state

    whole, found = state_of(StopRules()), state_of(StopRules(target=target))
    assert whole.ended_at is not None
    for end in found.history.of(SearchEnd):
        off = {"rel": 0.15} if kind == "asha" else {"abs": 1e-6}
        assert end.expected_jct_s == pytest.approx(jct_s(whole), **off)
        assert end.expected_cost_usd == pytest.approx(bill_usd(whole, whole.ended_at), **off)
