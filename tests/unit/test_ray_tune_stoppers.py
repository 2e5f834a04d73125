"""Ray Tune's stoppers and ours: of the same curves, the same trials end at the same iterations."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray import tune
from ray.tune.schedulers import MedianStoppingRule, TrialScheduler
from ray.tune.stopper import ExperimentPlateauStopper, TrialPlateauStopper

from rubberband.executor import Controller, Job, TrialReported, VirtualBackend
from rubberband.executor.core.history import TrialCut
from rubberband.integrations.ray_tune_options import words_of
from rubberband.spec.search import Search
from rubberband.values.plan import Plan, Stage, StagePlan
from tests.builders.jobs import JOB
from tests.builders.virtual_runs import run_virtual
from tests.harness.chaos_cases import asha_prediction

TRIALS, MOST = 9, 12

Reported = tuple[int, int, float]
"""A trial, its iterations and its metric."""


def curve(seed: int, trial: int, iterations: int) -> float:
    level = Random(f"{seed}/{trial}").uniform(0.2, 1.0)
    return level * 0.6**iterations + Random(f"{seed}/{trial}/{iterations}").gauss(0.0, 0.02)


def ours(seed: int, mode: str, slots: int, scheduler: Any = None, **run: Any) -> tuple[list[Reported], Controller]:
    """Run the search that Ray Tune's words mean; return what was reported, in order."""
    config = tune.TuneConfig(metric="loss", mode=mode, num_samples=TRIALS, scheduler=scheduler)
    stop = [{"training_iteration": MOST}, *([run["stop"]] if "stop" in run else [])]
    run_config = SimpleNamespace(stop=stop)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rubberband.integrations.ray_tune_options.check_fields", lambda config: None)
        words = words_of({}, config, run_config, {}).search
    search = Search(**words)
    (stage,), plan = search.scheduler.brackets()[0], Plan(stages=(StagePlan(instances=slots, gpus_per_trial=2),))
    job = replace(_job(stage, plan), mode=search.mode, metric="loss", stop=search.stop_rules)
    seen: list[Reported] = []

    def watch(event: Any, controller: Controller) -> None:
        if isinstance(event, TrialReported) and controller.state.trials[event.trial].iterations == event.iterations:
            seen.append((event.trial, event.iterations, event.metrics["loss"]))

    sign = 1.0 if mode == "min" else -1.0
    backend = VirtualBackend(
        job.name,
        job.offer,
        job.profile,
        metric="loss",
        metric_of=lambda trial, done: sign * curve(seed, trial, done),
        pace_of=lambda trial: 1.0 + trial / 100.0,
    )
    controller, _, _ = run_virtual(job, backend=backend, observers=[watch])
    return seen, controller


def _job(stage: Stage, plan: Plan) -> Job:
    prediction = asha_prediction(stage, plan.stages[0], JOB.profile, JOB.offer)
    return replace(JOB, stages=(stage,), plan=plan, prediction=prediction)


def ended(controller: Controller) -> list[tuple[int, int]]:
    return [(cut.trial, cut.iterations) for cut in controller.state.history.of(TrialCut)]


WHAT = given(seed=st.integers(0, 2**32), mode=st.sampled_from(["min", "max"]), slots=st.integers(2, 4))


@WHAT
@pytest.mark.parametrize(("std", "results", "grace"), [(0.01, 4, 4), (0.05, 2, 3), (0.03, 3, 7)])
def test_a_trial_plateaus_as_in_ray_tune(
    seed: int, mode: str, slots: int, std: float, results: int, grace: int
) -> None:
    def stopper() -> TrialPlateauStopper:
        return TrialPlateauStopper("loss", std=std, num_results=results, grace_period=grace)

    reports, controller = ours(seed, mode, slots, stop=stopper())
    theirs = stopper()
    found = [(trial, done) for trial, done, loss in reports if theirs(str(trial), {"loss": loss}) and done < MOST]
    assert ended(controller) == found


@WHAT
@pytest.mark.parametrize(("grace", "samples"), [(1, 3), (3, 3), (2, 1), (4, 5)])
def test_the_median_rule_ends_trials_as_in_ray_tune(seed: int, mode: str, slots: int, grace: int, samples: int) -> None:
    def rule() -> MedianStoppingRule:
        words: dict[str, Any] = {"time_attr": "training_iteration", "metric": "loss", "mode": mode}
        return MedianStoppingRule(grace_period=grace, min_samples_required=samples, **words)

    reports, controller = ours(seed, mode, slots, scheduler=rule())
    theirs, tuner, found = rule(), SimpleNamespace(get_live_trials=list), []
    trials = [_Trial(trial) for trial in range(TRIALS)]
    for trial, done, loss in reports:
        result = {"training_iteration": done, "loss": loss}
        if theirs.on_trial_result(tuner, trials[trial], result) == TrialScheduler.STOP and done < MOST:
            found.append((trial, done))
    assert ended(controller) == found


class _Trial:
    """A trial of Ray Tune, as its median rule needs it."""

    def __init__(self, number: int) -> None:
        self.trial_id = str(number)


@WHAT
@pytest.mark.parametrize(("std", "top", "patience"), [(0.05, 5, 0), (0.02, 3, 2), (0.1, 8, 1), (0.001, 10, 0)])
def test_a_search_plateaus_as_in_ray_tune(
    seed: int, mode: str, slots: int, std: float, top: int, patience: int
) -> None:
    def stopper() -> ExperimentPlateauStopper:
        return ExperimentPlateauStopper("loss", std=std, top=top, mode=mode, patience=patience)

    reports, controller = ours(seed, mode, slots, stop=stopper())
    theirs = stopper()
    at = next((at for at, (trial, _, loss) in enumerate(reports) if theirs(str(trial), {"loss": loss})), None)
    if controller.state.ended_by is None:
        assert at is None or at == len(reports) - 1
    else:
        assert at == len(reports) - 1
