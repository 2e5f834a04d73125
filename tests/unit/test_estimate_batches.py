"""What is planned as a run: with adaptive batches, on the best of several types, replanned where that is meant."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rubberband.errors import InputError
from rubberband.executor import ExperimentFolder
from rubberband.planner.estimates import Estimate, estimate, estimate_plan
from rubberband.planner.goodput import planning
from rubberband.planner.goodput.planning import adapted, at_noise_scale, limits_within
from rubberband.planner.problem import Problem
from rubberband.planning.assumptions import assumptions
from rubberband.planning.candidates import batch_notes, candidates
from rubberband.running.run import run_experiment
from rubberband.running.starting import RunOptions
from rubberband.spec.experiment import Experiment
from rubberband.spec.resources import Resources
from rubberband.values.adaptive import AdaptiveBatch, BatchLimits, BatchPoint
from rubberband.values.plan import Stage
from rubberband.values.profile import Profile
from rubberband.views.estimate.tables import option_table, tables
from tests.builders.experiment_words import MINIMAL, words
from tests.builders.plans import plan_job

STAGES = [Stage(trials=8, iterations=2), Stage(trials=2, iterations=20)]
GOODPUT: dict[str, Any] = {
    "throughput": {"alpha_grad_s": 0.06, "beta_grad_s": 0.0016, "alpha_local_s": 0.01, "gamma": 2.0},
    "noise_scale": 2000.0,
    "samples_per_iteration": 50_000,
    "limits": {"initial": 128, "max": 4096, "max_per_gpu": 512},
    "overhead_s": 1.5,
}
TABLE = {1: 105, 2: 66, 4: 48, 8: 40}
POINTS = [{"instances": 1, "gpus": 1, "per_gpu": size, "accumulation": 0, "step_s": 0.1} for size in (128, 512)]


def experiment(
    batch: dict[str, Any] | None = None, goodput: dict[str, Any] | None = GOODPUT, **more: Any
) -> Experiment:
    profile: dict[str, Any] = {"seconds_per_iteration": TABLE} | ({"goodput": goodput} if goodput else {})
    gpus = {"resources__gpus_per_instance": 4, "resources__gpus_per_trial": {"min": 1, "max": 8}}
    return Experiment(**words(batch={"policy": "goodput"} | (batch or {}), profile=profile, **gpus, **more))


def problem_of(asked: Experiment) -> Problem:
    profiles = asked.loaded_profiles()
    assert profiles is not None
    (problem,) = candidates(asked, profiles, 0.0)
    return replace(problem, brackets=[STAGES])


def planned(asked: Experiment, **options: Any) -> Estimate:
    problem = replace(problem_of(asked), objective=options.pop("objective", "min_cost"))
    return estimate([problem], experiment_name="digits", clock=lambda: 0.0, **options)


def model_of(asked: Experiment) -> Any:
    profile = asked.loaded_profile()
    assert profile is not None
    assert profile.goodput is not None
    return profile.goodput


def test_trials_that_adapt_are_planned_with_the_times_of_the_model() -> None:
    problem = problem_of(experiment())
    assert problem.fixed is not None
    assert (problem.batch, problem.fixed.goodput) == ("goodput", None)
    assert dict(problem.fixed.seconds_per_iteration) == TABLE
    sizes = [1, 2, 3, 4, 8]
    adaptive_s = planning.seconds_per_iteration(model_of(experiment()), 4, sizes)
    fixed_s = planning.fixed_seconds_per_iteration(model_of(experiment()), 4, sizes)
    for gpus in (gpus for gpus in sizes if problem.fixed.covers(gpus)):
        gain = fixed_s[gpus] / adaptive_s[gpus]
        assert problem.profile.iteration_s(gpus) == pytest.approx(problem.fixed.iteration_s(gpus) / gain)
    assert problem.profile.iteration_s(4) < 48


def test_a_fixed_batch_is_planned_with_its_own_times_and_knows_no_model() -> None:
    problem = problem_of(experiment({"policy": "fixed"}))
    assert (problem.batch, problem.fixed, problem.profile.goodput) == ("fixed", None, None)
    assert dict(problem.profile.seconds_per_iteration) == TABLE
    assert batch_notes(experiment({"policy": "fixed"}), None) == []


def test_without_a_model_the_fixed_times_hold_and_a_remedy_is_named() -> None:
    asked = experiment(goodput=None)
    problem = problem_of(asked)
    assert (problem.batch, dict(problem.profile.seconds_per_iteration)) == ("fixed", TABLE)
    (note,) = batch_notes(asked, problem.profile.goodput)
    assert "as if their batch were fixed" in note
    assert "`rubberband profile`" in note


def test_adapting_is_never_planned_slower_than_the_fixed_batch() -> None:
    slow = GOODPUT | {"overhead_s": 70.0}
    table = problem_of(experiment(goodput=slow)).profile.seconds_per_iteration
    assert all(table[gpus] <= time_s for gpus, time_s in TABLE.items())


@pytest.mark.parametrize(
    ("asked", "points", "expected"),
    [
        (AdaptiveBatch(), (), BatchLimits(initial=128, max=4096, max_per_gpu=512)),
        (
            AdaptiveBatch(initial=64, max=8192, max_per_gpu=256, accumulation=False),
            (),
            BatchLimits(initial=64, max=8192, max_per_gpu=256, accumulation=False),
        ),
        (AdaptiveBatch(max=8192), POINTS, BatchLimits(initial=128, max=4096, max_per_gpu=512)),
        (AdaptiveBatch(max=1024), POINTS, BatchLimits(initial=128, max=1024, max_per_gpu=512)),
        (AdaptiveBatch(initial=5000), POINTS, BatchLimits(initial=5000, max=5000, max_per_gpu=512)),
    ],
)
def test_the_experiments_own_limits_go_before_those_of_the_profile(
    asked: AdaptiveBatch, points: Any, expected: BatchLimits
) -> None:
    model = replace(model_of(experiment()), points=tuple(BatchPoint(**point) for point in points))
    assert limits_within(model, asked) == expected


def test_a_larger_batch_than_was_profiled_is_reported() -> None:
    asked = experiment({"max": 8192}, GOODPUT | {"points": POINTS, "fit_error": 0.2})
    larger, poor = batch_notes(asked, problem_of(asked).profile.goodput)
    assert "batch: max=8192 is more than the 4096 samples" in larger
    assert "misses its own points by 20%" in poor


def test_a_gang_has_no_more_gpus_than_the_largest_batch_has_samples() -> None:
    tiny = GOODPUT | {"limits": {"initial": 2, "max": 3}}
    assert problem_of(experiment(goodput=tiny)).constraints.max_gpus_per_trial == 3
    with pytest.raises(InputError, match=r"min: 4 GPUs are more than .* largest batch; lower it to 3"):
        problem_of(experiment(goodput=tiny, resources__gpus_per_trial__min=4))


def test_a_model_moves_with_its_noise_scale() -> None:
    profile = Profile(seconds_per_iteration={1: 1000.0}, goodput=model_of(experiment()))
    now = adapted(profile, 4, [1, 4])
    assert now.seconds_per_iteration == at_noise_scale(now, 4, 2000.0).seconds_per_iteration
    later, before = (at_noise_scale(now, 4, phi) for phi in (20_000.0, 200.0))
    assert later.goodput is not None
    assert later.goodput.noise_scale == 20_000.0
    assert all(later.iteration_s(g) < now.iteration_s(g) < before.iteration_s(g) for g in (1, 4))


def test_a_fixed_batch_is_set_beside_the_plan() -> None:
    answer = planned(experiment(constraints__deadline="40m"))
    fixed = planned(experiment({"policy": "fixed"}, constraints__deadline="40m"))
    assert answer.fixed_batch is not None
    assert fixed.job is not None
    assert answer.fixed_batch.prediction == fixed.job.prediction
    assert (fixed.fixed_batch, fixed.problem.batch) == (None, "fixed")
    data = json.loads(json.dumps(answer.to_json()))
    assert (data["batch"], fixed.to_json()["batch"]) == ("goodput", "fixed")
    assert [(one["policy"], one["batch"]) for one in data["options"]][-1] == ("optimal", "fixed")
    assert set(data["baselines"]) == {"static", "naive_elastic", "greedy"}


def test_a_plan_of_the_users_is_predicted_with_a_fixed_batch_too() -> None:
    given = planned(experiment(constraints__deadline="40m")).plan
    assert given is not None
    answer = estimate_plan(problem_of(experiment(constraints__deadline="40m")), given)
    assert answer.fixed_batch is not None
    assert answer.job is not None
    assert answer.fixed_batch.plan == given
    assert answer.fixed_batch.prediction.jct_s > answer.job.prediction.jct_s
    assert "the given plan, fixed batch" in [row[0].strip() for row in option_table(answer).rows]


def test_the_noise_scale_and_what_the_model_extrapolates_are_assumptions() -> None:
    answer = planned(experiment(goodput=GOODPUT | {"points": POINTS}, constraints__deadline="20m"))
    found = {one.name: one for one in assumptions(answer, {"noise scale of the gradients": "measured"})}
    noise = found["noise scale of the gradients"]
    assert (noise.value, noise.basis, noise.change) == ("2,000 samples", "measured", "half of it")
    assert noise.effect_s > 0
    assert found["speed beyond measured batches"].basis == "extrapolated"
    by_hand = {one.name for one in assumptions(planned(experiment()), {})}
    assert "speed beyond measured batches" not in by_hand
    assert any("noise scale of the gradients" in row[0] for row in tables(answer, list(found.values()))[-1].rows)


def test_a_virtual_run_takes_what_was_planned(tmp_path: Path) -> None:
    virtual = {"provider": "virtual", "instance_type": "p3.8xlarge", "gpus_per_trial": {"min": 1, "max": 8}}
    asked = experiment(constraints__deadline="2h").model_copy(update={"resources": Resources(**virtual)})
    said: list[str] = []
    result = run_experiment(asked, ExperimentFolder(home=tmp_path, name="small"), RunOptions(announce=said.append))
    assert result.outcome == "done"
    assert result.actual_jct_s == pytest.approx(result.planned_jct_s)
    blind = asked.model_copy(update={"profile": experiment(goodput=None).profile})
    fixed = run_experiment(blind, ExperimentFolder(home=tmp_path, name="other"), RunOptions(announce=said.append))
    assert any("planned as if their batch were fixed" in line for line in said)
    assert fixed.outcome == "done"


def test_an_estimate_loads_neither_scipy_nor_torch_nor_ray(tmp_path: Path) -> None:
    (tmp_path / "digits.json").write_text(json.dumps(experiment().to_words()))
    program = (
        "import sys; from rubberband.cli import main; sys.argv[1:] = ['estimate', sys.argv[1]]\n"
        "try: main()\nexcept SystemExit as ended: assert not ended.code, ended.code\n"
        "assert not {'scipy', 'torch', 'ray', 'boto3'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "digits.json")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "adapting the batch" in done.stdout


PROFILES = {
    "p3.2xlarge": {"seconds_per_iteration": {1: 60.0}},
    "p3.8xlarge": {"seconds_per_iteration": {1: 60.0, 4: 16}},
}


def of_types(constraints: dict[str, Any] | None = None, **resources: Any) -> Experiment:
    words = {
        **MINIMAL,
        "constraints": constraints or {"deadline": "9h"},
        "resources": {"provider": "virtual", "instance_types": list(PROFILES), **resources},
        "profile": {"by_instance_type": PROFILES},
    }
    return Experiment(**words)


def planned_job(asked: Experiment, policy: Any = "optimal") -> Any:
    profiles = asked.loaded_profiles()
    assert profiles is not None
    return plan_job(asked, profiles, policy)


def test_the_cheapest_type_that_is_in_time_is_chosen() -> None:
    assert planned_job(of_types()).offer.instance_type == "p3.2xlarge"
    fast = planned_job(of_types({"deadline": "4m"}))
    assert fast.offer.instance_type == "p3.8xlarge"
    assert dict(fast.profile.seconds_per_iteration) == {1: 60.0, 4: 16.0}
    assert fast.prediction.jct_s <= 240


def test_the_job_knows_what_a_replan_must_keep() -> None:
    job = planned_job(of_types({"deadline": "9h", "confidence": 0.8, "objective": "min_time", "max_cost": 50}))
    assert (job.confidence, job.objective, job.max_cost_usd) == (0.8, "min_time", 50)
    assert job.min_gpus_per_trial == 1
    assert job.max_gpus_per_trial == job.offer.gpus


def test_a_deadline_is_met_with_more_gpus_per_trial_than_an_instance_has_where_the_profile_knows_them() -> None:
    asked = of_types({"deadline": "20m"}).to_words()
    asked["search"]["scheduler"] = {"type": "sha", "num_samples": 32, "max_t": 50, "reduction_factor": 3}
    asked["resources"] = {"provider": "virtual", "instance_type": "p3.8xlarge"}
    asked["profile"] = {"seconds_per_iteration": {1: 110, 2: 57, 4: 30, 8: 18, 16: 13, 32: 11}}
    job = planned_job(Experiment(**asked))
    assert max(choice.gpus_per_trial for choice in job.plan.stages) == 8
    assert (job.max_gpus_per_trial, job.prediction.jct_s <= 1200) == (32, True)


@pytest.mark.parametrize("policy", ["optimal", "static", "naive_elastic", "greedy"])
def test_only_the_optimal_plan_is_replanned(policy: str) -> None:
    job = planned_job(of_types(), policy)
    assert job.replan == (policy == "optimal")


def test_an_experiment_that_cannot_run_is_refused_before_anything_is_made(tmp_path: Any) -> None:
    folder = ExperimentFolder(home=tmp_path, name="small")
    with pytest.raises(InputError, match="which makes a bucket, or name one"):
        run_experiment(of_types(provider="aws"), folder)
    assert list(tmp_path.iterdir()) == []
