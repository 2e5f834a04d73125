"""`Tuner`: every word of Ray Tune's objects is taken over, or refused by name in one line."""

from __future__ import annotations

import dataclasses
import inspect
import random
import re
from datetime import timedelta
from typing import Any

import numpy as np
import optuna
import pytest
from ray import tune
from ray.tune import schedulers
from ray.tune.schedulers import (
    ASHAScheduler,
    HyperBandScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    ResourceChangingScheduler,
)
from ray.tune.schedulers.pb2 import PB2
from ray.tune.search import BasicVariantGenerator, ConcurrencyLimiter, Repeater
from ray.tune.search.optuna import OptunaSearch
from ray.tune.stopper import (
    CombinedStopper,
    ExperimentPlateauStopper,
    FunctionStopper,
    MaximumIterationStopper,
    NoopStopper,
    TimeoutStopper,
    TrialPlateauStopper,
)

import rubberband
from rubberband.errors import InputError
from rubberband.executor import ExperimentFolder, Inbox
from rubberband.executor.run.callbacks import FailureInfo, ReportInfo, RunInfo, SyncInfo
from rubberband.integrations.ray_tune import Tuner
from rubberband.integrations.ray_tune_options import WORDS
from rubberband.integrations.ray_tune_trials import FailFast, TuneCallbacks
from rubberband.spec.experiment import Experiment
from tests.builders.tables import cases

SPACE = {"lr": tune.loguniform(1e-3, 1.0), "epochs": 9}
OBJECTIVE = {"metric": "loss", "mode": "min"}
LOCAL = {"provider": "virtual", "instance_type": "p3.2xlarge"}


def easy_train(config: dict[str, Any]) -> None:
    """A function of Ray Tune."""


def words_of(monkeypatch: pytest.MonkeyPatch, trainable: Any = easy_train, **given: Any) -> dict[str, Any]:
    """The words that `fit` tunes with; they make an experiment."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(rubberband, "tune", lambda trainable, **words: found.update(words, entrypoint=trainable))
    monkeypatch.setattr("rubberband.integrations.ray_tune.ResultGrid", lambda result: result)
    given = {"param_space": SPACE, "constraints": {"deadline": "20m"}, "resources": LOCAL, **given}
    Tuner(trainable, **given).fit()
    Experiment(**{key: value for key, value in found.items() if key not in ("verbose", "callbacks", "home")})
    return found


def test_words_of_a_search_replace_those_of_ray_tune_key_by_key(monkeypatch):
    scheduler = {"type": "sha", "num_samples": 9, "max_t": 9, "reduction_factor": 3}
    found = words_of(monkeypatch, tune_config=tune.TuneConfig(**OBJECTIVE), search={"scheduler": scheduler})["search"]
    assert found["scheduler"] == scheduler
    assert (found["metric"], found["space"].keys()) == ("loss", SPACE.keys())


ASHA = {"type": "asha", "num_samples": 9, "grace_period": 1, "max_t": 9, "reduction_factor": 3}
HYPERBAND = {"type": "hyperband", "num_samples": 9, "max_t": 9, "reduction_factor": 3}


@pytest.mark.parametrize(
    ("scheduler", "words"),
    [
        (ASHAScheduler(max_t=9, reduction_factor=3, **OBJECTIVE), ASHA),
        (
            ASHAScheduler(max_t=16, grace_period=2, reduction_factor=2.0),
            {**ASHA, "max_t": 16, "grace_period": 2, "reduction_factor": 2},
        ),
        (HyperBandScheduler(max_t=9), HYPERBAND),
        ("asynchyperband", {**ASHA, "max_t": 100, "reduction_factor": 4}),
    ],
)
def test_schedulers_have_their_counterparts(monkeypatch, scheduler, words):
    objective = {} if getattr(scheduler, "_metric", None) else OBJECTIVE
    config = tune.TuneConfig(num_samples=9, scheduler=scheduler, **objective)
    search = words_of(monkeypatch, tune_config=config)["search"]
    assert search["scheduler"] == words
    assert (search["metric"], search["mode"]) == ("loss", "min")


def above(trial_id: str, result: dict[str, Any]) -> bool:
    """A rule of one trial."""
    return bool(result["loss"] > 3)


@pytest.mark.parametrize(
    ("stop", "max_t", "ends"),
    [
        ({"training_iteration": 5}, 5, False),
        ({"training_iteration": 5000}, 9, False),
        ({"training_iteration": 4.5, "loss": 0.1}, 5, True),
        (MaximumIterationStopper(7), 7, False),
        ([MaximumIterationStopper(7), CombinedStopper(MaximumIterationStopper(4), FunctionStopper(above))], 4, True),
        (above, 9, True),
        (NoopStopper(), 9, False),
        (None, 9, False),
    ],
)
@pytest.mark.parametrize("scheduler", [ASHAScheduler, HyperBandScheduler])
def test_the_smaller_of_stop_and_max_t_holds(monkeypatch, scheduler, stop, max_t, ends):
    config = tune.TuneConfig(num_samples=9, scheduler=scheduler(max_t=9, reduction_factor=3), **OBJECTIVE)
    words = words_of(monkeypatch, tune_config=config, run_config=tune.RunConfig(stop=stop))
    assert words["search"]["scheduler"]["max_t"] == max_t
    assert (words["entrypoint"] is not easy_train) == ends, "a rule goes to the workers"


def test_a_grace_period_beyond_the_stop_is_the_stop(monkeypatch):
    config = tune.TuneConfig(scheduler=ASHAScheduler(grace_period=5), **OBJECTIVE)
    words = words_of(monkeypatch, tune_config=config, run_config=tune.RunConfig(stop={"training_iteration": 1}))
    assert words["search"]["scheduler"] | {"grace_period": 1, "max_t": 1} == words["search"]["scheduler"]


def test_without_a_scheduler_all_trials_train_until_the_stop(monkeypatch):
    config = tune.TuneConfig(time_budget_s=600, **OBJECTIVE)
    grid = {"lr": tune.grid_search([0.1, 0.2]), "width": tune.grid_search([8, 16, 32])}
    run = tune.RunConfig(name="ours", stop={"training_iteration": 5})
    words = words_of(monkeypatch, param_space=grid, tune_config=config, run_config=run, constraints={})
    assert words["search"]["scheduler"] == {"type": "none", "num_samples": 6, "max_t": 5}
    assert words["name"] == "ours"
    assert words["constraints"] == {"deadline": "600s"}


@pytest.mark.parametrize(
    ("searcher", "num_samples", "stop", "words"),
    [
        (None, 4, None, {"num_samples": 4, "max_t": "auto"}),
        (None, -1, 5, {"num_samples": "auto", "max_t": 5}),
        (OptunaSearch(), 4, 5, {"num_samples": 4, "max_t": 5}),
        (OptunaSearch(), 4, None, {"num_samples": 4, "max_t": "auto"}),
    ],
)
def test_without_a_scheduler_no_trial_is_stopped_for_another(monkeypatch, capsys, searcher, num_samples, stop, words):
    """Trials train to their own end, as long as the limits allow; a sampler that learns draws each when it starts."""
    config = tune.TuneConfig(num_samples=num_samples, search_alg=searcher, **OBJECTIVE)
    run = tune.RunConfig(stop=stop and {"training_iteration": stop})
    found = words_of(monkeypatch, tune_config=config, run_config=run)["search"]["scheduler"]
    assert found == {"type": "none", **words}
    assert ("nothing says how long a trial trains" in capsys.readouterr().err) == (stop is None)


def test_each_sample_has_the_whole_grid_and_draws_the_rest(monkeypatch):
    space = {"lr": tune.uniform(0, 1), "kind": tune.grid_search(["a", "b"]), "width": tune.grid_search([1, 2])}
    given = [{"kind": "b", "lr": 0.5}]
    config = tune.TuneConfig(num_samples=3, search_alg=BasicVariantGenerator(given), **OBJECTIVE)
    run = tune.RunConfig(stop={"training_iteration": 5})
    words = words_of(monkeypatch, param_space=space, tune_config=config, run_config=run)
    assert words["search"]["scheduler"] == {"type": "none", "num_samples": 10, "max_t": 5}
    drawn = Experiment(**{key: words[key] for key in ("name", "search")}).search.configurations()
    assert [(each["kind"], each["width"]) for each in drawn] == [
        *[("b", 1), ("b", 2)],
        *[("a", 1), ("a", 2), ("b", 1), ("b", 2)] * 2,
    ]
    assert [each["lr"] for each in drawn[:2]] == [0.5, 0.5]
    assert len({each["lr"] for each in drawn[2:]}) == 8


def test_searchers_are_samplers(monkeypatch):
    searcher = OptunaSearch(points_to_evaluate=[{"lr": 0.1}], seed=3)
    config = tune.TuneConfig(
        num_samples=9, search_alg=ConcurrencyLimiter(searcher, 4), scheduler=ASHAScheduler(max_t=9), **OBJECTIVE
    )
    words = words_of(monkeypatch, tune_config=config)
    assert words["search"]["sampler"] == {"type": "optuna", "seed": 3}
    assert words["search"]["points_to_evaluate"] == [{"lr": 0.1}]
    assert words["resources"]["max_instances"] == 4, "of one GPU each: four trials at a time"


def test_distributions_of_the_searcher_are_the_space(monkeypatch):
    own = {"lr": optuna.distributions.FloatDistribution(1e-3, 1.0, log=True)}
    config = tune.TuneConfig(search_alg=OptunaSearch(own, **OBJECTIVE), scheduler=ASHAScheduler())
    assert words_of(monkeypatch, param_space={"epochs": 9}, tune_config=config)["search"]["space"] == own | {
        "epochs": 9
    }


def test_as_many_samples_as_the_limits_allow(monkeypatch):
    config = tune.TuneConfig(num_samples=-1, scheduler=ASHAScheduler(max_t=9), **OBJECTIVE)
    assert words_of(monkeypatch, tune_config=config)["search"]["scheduler"]["num_samples"] == "auto"


def test_several_objectives_teach_the_sampler_alike(monkeypatch, capsys):
    searcher = OptunaSearch(metric=["loss", "gain"], mode=["min", "max"])
    config = tune.TuneConfig(search_alg=searcher)
    search = words_of(monkeypatch, tune_config=config)["search"]
    assert (search["metric"], search["mode"]) == ("loss", "min")
    assert search["also"] == [{"metric": "gain", "mode": "max"}]
    assert search["sampler"] == {"type": "optuna", "multi_objective": True}
    assert "loss ranks the trials; the sampler learns from loss and gain alike" in capsys.readouterr().err


FIFO = {"tune_config": tune.TuneConfig(**OBJECTIVE)}


@pytest.mark.parametrize(
    ("run", "key", "value"),
    [
        (tune.RunConfig(name="easy_objective"), "name", "easy-objective"),
        (tune.RunConfig(verbose=0), "verbose", 0),
        (tune.RunConfig(verbose=3), "verbose", 2),
        (tune.RunConfig(log_to_file=True), "verbose", 1),
        (tune.RunConfig(failure_config=tune.FailureConfig(max_failures=3)), "constraints", {"max_failures": 3}),
        (tune.RunConfig(failure_config=tune.FailureConfig(fail_fast=True)), "constraints", {"max_failures": 0}),
        (tune.RunConfig(stop=TimeoutStopper(timedelta(minutes=2))), "constraints", {"deadline": "120.0s"}),
    ],
)
def test_words_of_a_run_config(monkeypatch, run, key, value):
    given = {"constraints": {}} if key == "constraints" and "deadline" in value else {}
    found = words_of(monkeypatch, run_config=run, **FIFO, **given)
    assert found[key] == value | {**found[key], **value} if isinstance(value, dict) else found[key] == value
    assert any(isinstance(each, FailFast) for each in found.get("callbacks", ())) == bool(run.failure_config.fail_fast)


def test_a_score_of_checkpoints_keeps_the_best(monkeypatch):
    score = CHECKPOINTS(num_to_keep=1, checkpoint_score_attribute="loss", checkpoint_score_order="min")
    run = tune.RunConfig(checkpoint_config=score)
    found = words_of(monkeypatch, tune_config=tune.TuneConfig(**OBJECTIVE), run_config=run)
    assert found["resources"]["keep"] == "best"
    assert "keep" not in words_of(monkeypatch, tune_config=tune.TuneConfig(**OBJECTIVE))["resources"]


@pytest.mark.parametrize("score", ["loss", None])
def test_a_number_of_checkpoints_to_keep_is_taken_over_with_a_line(monkeypatch, capsys, score):
    order = {"checkpoint_score_attribute": score, "checkpoint_score_order": "min"}
    run = tune.RunConfig(checkpoint_config=CHECKPOINTS(num_to_keep=4, **order))
    words_of(monkeypatch, tune_config=tune.TuneConfig(**OBJECTIVE), run_config=run)
    line = "CheckpointConfig(num_to_keep=4): a trial keeps its latest two checkpoints"
    assert f"{line}{' and the best one' if score else ''}\n" in capsys.readouterr().err


class OneForAll(tune.Stopper):
    """A stopper that sees all trials."""

    def __call__(self, trial_id, result):
        return False

    def stop_all(self):
        return False


def test_a_stopper_that_sees_all_trials_is_refused_with_the_words_that_mean_the_same(monkeypatch):
    with pytest.raises(InputError, match=r"OneForAll\(\.\.\.\)\) has no counterpart: .*'target': VALUE") as refused:
        words_of(monkeypatch, tune_config=tune.TuneConfig(**OBJECTIVE), run_config=tune.RunConfig(stop=OneForAll()))
    assert "\n" not in str(refused.value)
    search = {"stop": {"target": 0.1}}
    run = tune.RunConfig(stop={"training_iteration": 5})
    found = words_of(monkeypatch, tune_config=tune.TuneConfig(**OBJECTIVE), run_config=run, search=search)
    assert found["search"]["stop"] == {"target": 0.1}


def test_a_repeater_is_repeats(monkeypatch, capsys):
    searcher = Repeater(ConcurrencyLimiter(OptunaSearch(**OBJECTIVE), max_concurrent=2), repeat=3)
    config = tune.TuneConfig(search_alg=searcher, num_samples=12)
    found = words_of(monkeypatch, tune_config=config, run_config=tune.RunConfig(stop={"training_iteration": 5}))
    assert found["search"]["repeats"] == 3
    assert found["search"]["scheduler"] == {"type": "none", "num_samples": 4, "max_t": 5}
    assert found["resources"]["max_instances"] == 6
    assert "a configuration has no __trial_index__" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("scheduler", "stop", "words"),
    [
        (
            None,
            CombinedStopper(TrialPlateauStopper("loss", std=0.1), MaximumIterationStopper(20)),
            {"patience": {"iterations": 4, "std": 0.1, "after": 4}},
        ),
        (
            ASHAScheduler(max_t=20, **OBJECTIVE),
            ExperimentPlateauStopper("loss", top=5, patience=3),
            {"no_improvement": {"plateau": {"top": 5, "std": 0.001, "reports": 2}}},
        ),
        (
            MedianStoppingRule("training_iteration", grace_period=5.0, min_samples_required=2),
            {"training_iteration": 20},
            {"median": {"after": 5, "trials": 2}},
        ),
        (None, {"training_iteration": 20, "loss": 0.1}, None),
    ],
)
def test_rules_that_end_trials_and_searches(monkeypatch, scheduler, stop, words):
    objective = {} if isinstance(scheduler, ASHAScheduler) else OBJECTIVE
    config = tune.TuneConfig(scheduler=scheduler, num_samples=9, **objective)
    search = words_of(monkeypatch, tune_config=config, run_config=tune.RunConfig(stop=stop))["search"]
    assert (search.get("stop"), search["scheduler"]["max_t"]) == (words, 20)


@pytest.mark.parametrize(("share", "count"), [(0.5, 2), (0.25, 4), (0.33, 3), (1 / 7, 7), (0.0625, 16)])
def test_a_part_of_a_gpu_is_a_number_of_trials_that_share_it(monkeypatch, share, count):
    config = tune.TuneConfig(**OBJECTIVE, max_concurrent_trials=2 * count)
    asked = words_of(monkeypatch, with_gpus(gpu=share), tune_config=config)["resources"]
    assert (asked["trials_per_gpu"], asked["max_instances"]) == (count, 2)
    own = words_of(monkeypatch, with_gpus(gpu=share), **FIFO, resources={**LOCAL, "trials_per_gpu": 5})["resources"]
    assert own["trials_per_gpu"] == 5
    assert "trials_per_gpu" not in words_of(monkeypatch, with_gpus(gpu=1), **FIFO)["resources"]


def test_a_trainable_without_a_name_has_its_own_with_letters_of_an_experiment(monkeypatch):
    assert re.fullmatch(r"easy-train-\d{8}-\d{6}", words_of(monkeypatch, **FIFO)["name"])


def with_gpus(**asked: Any) -> Any:
    """A function that asks for resources."""
    return tune.with_resources(lambda config: None, asked)


class Silent(tune.Callback):
    """A callback that needs what is not called."""

    def on_checkpoint(self, **info: Any) -> None:
        """Nothing."""


class Later(tune.Callback):
    """A callback of a later Ray Tune, which calls more."""

    def on_later(self, **info: Any) -> None:
        """Nothing."""


def count(state: list[int]) -> Any:
    """Return a rule that keeps something between its calls."""
    return lambda trial_id, result: bool(state)


CHECKPOINTS = tune.CheckpointConfig
TPE = optuna.samplers.TPESampler
NO_COUNTERPART = " has no counterpart; leave it out, or see the words of Ray Tune in docs/move.md"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"scheduler": ASHAScheduler(time_attr="epoch")}, "ASHAScheduler(time_attr='epoch')"),
    ({"scheduler": ASHAScheduler(brackets=3)}, "ASHAScheduler(brackets=3)"),
    ({"scheduler": ASHAScheduler(stop_last_trials=False)}, "ASHAScheduler(stop_last_trials=False)"),
    ({"scheduler": HyperBandScheduler(time_attr="epoch")}, "HyperBandScheduler(time_attr='epoch')"),
    ({"scheduler": HyperBandScheduler(stop_last_trials=False)}, "HyperBandScheduler(stop_last_trials=False)"),
    ({"scheduler": HyperBandScheduler(), "num_samples": -1}, "num_samples=-1 with HyperBandScheduler"),
    ({"stop": {"time_total_s": 60}}, "RunConfig(stop={'time_total_s': 60})"),
    ({"stop": {"timesteps_total": 60}}, "RunConfig(stop={'timesteps_total': 60})"),
    ({"stop": {"training_iteration": 0}}, "RunConfig(stop={'training_iteration': 0})"),
    ({"stop": {"loss": "low"}}, "RunConfig(stop={'loss': 'low'})"),
    (
        {"stop": TrialPlateauStopper("loss", metric_threshold=0.5, mode="min")},
        "TrialPlateauStopper(metric_threshold=0.5)",
    ),
    ({"stop": [TrialPlateauStopper("loss"), TrialPlateauStopper("loss", std=0.1)]}, "a second TrialPlateauStopper"),
    (
        {"stop": [{"training_iteration": 9}, TrialPlateauStopper("accuracy")]},
        "TrialPlateauStopper(metric='accuracy') in a search for loss",
    ),
    (
        {"stop": [{"training_iteration": 9}, ExperimentPlateauStopper("loss", mode="max")]},
        "ExperimentPlateauStopper(mode='max') in a search for the min of loss",
    ),
    ({"stop": count([])}, "RunConfig(stop=<lambda>), which keeps something between its calls,"),
    ({"storage_path": "s3://bucket"}, "RunConfig(storage_path='s3://bucket')"),
    ({"log_to_file": "out.txt"}, "RunConfig(log_to_file='out.txt')"),
    ({"trial_name_creator": str}, "TuneConfig(trial_name_creator=...) without callbacks"),
    ({"chdir_to_trial_dir": True}, "TuneConfig(chdir_to_trial_dir=True)"),
    ({"failure_config": tune.FailureConfig(max_failures=-1)}, "FailureConfig(max_failures=-1)"),
    (
        {"checkpoint_config": CHECKPOINTS(checkpoint_frequency=2)},
        "CheckpointConfig(checkpoint_frequency=..., checkpoint_at_end=...) of a function",
    ),
    ({"trainable": with_gpus(gpu=1, tpu=1)}, "tpu of tune.with_resources(<lambda>, ...)"),
    (
        {"trainable": tune.with_resources(lambda config: None, tune.PlacementGroupFactory([{"CPU": 1}, {"GPU": 1}]))},
        "tune.with_resources(<lambda>, ...) with a function or several bundles",
    ),
    ({"search_alg": ConcurrencyLimiter(OptunaSearch(), 2, batch=True)}, "ConcurrencyLimiter(batch=True)"),
    (
        {"search_alg": BasicVariantGenerator(constant_grid_search=True)},
        "BasicVariantGenerator(constant_grid_search=True)",
    ),
    ({"search_alg": BasicVariantGenerator(random_state=3)}, "BasicVariantGenerator(random_state=...)"),
    ({"search_alg": OptunaSearch(study_name="own")}, "OptunaSearch(storage=..., study_name=...)"),
    ({"search_alg": OptunaSearch(sampler=TPE(n_startup_trials=3))}, "TPESampler(n_startup_trials=...)"),
    ({"search_alg": OptunaSearch(sampler=TPE(seed=3))}, "TPESampler(seed=...)"),
    ({"search_alg": OptunaSearch(sampler=optuna.samplers.RandomSampler())}, "OptunaSearch(sampler=RandomSampler(...))"),
    (
        {"search_alg": OptunaSearch({"a": optuna.distributions.FloatDistribution(0, 1)}, **OBJECTIVE)},
        "OptunaSearch(space=...) beside param_space, which draws lr,",
    ),
    ({"param_space": {"lr": tune.grid_search([1, 2])}, "num_samples": -1}, "num_samples=-1 with a grid"),
]


def mutating(mutations: dict[str, Any] | None = None, stop: Any = 8, **words: Any) -> dict[str, Any]:
    """A search by PopulationBasedTraining."""
    given = {"time_attr": "training_iteration", "perturbation_interval": 4, **words}
    scheduler = PopulationBasedTraining(hyperparam_mutations=mutations or {"lr": tune.uniform(0.1, 0.5)}, **given)
    return {"scheduler": scheduler, "num_samples": 8, "stop": None if stop is None else {"training_iteration": stop}}


PBT = {
    "type": "pbt",
    "population": 8,
    "generations": 2,
    "iterations": 4,
    "quantile": 0.25,
    "perturb": [0.8, 1.2],
    "resample": 0.25,
    "mutate": ["lr"],
}


def population(monkeypatch: pytest.MonkeyPatch, **given: Any) -> dict[str, Any]:
    """The search of a population."""
    asked = mutating(**given)
    config = tune.TuneConfig(num_samples=8, scheduler=asked["scheduler"], **OBJECTIVE)
    found: dict[str, Any] = words_of(monkeypatch, tune_config=config, run_config=tune.RunConfig(stop=asked["stop"]))[
        "search"
    ]
    return found


def test_population_based_training_has_its_counterpart(monkeypatch, capsys):
    assert population(monkeypatch)["scheduler"] == PBT
    given = {"quantile_fraction": 0.5, "perturbation_factors": (2.0, 0.5), "resample_probability": 0.0}
    changed = {"quantile": 0.5, "perturb": [0.5, 2.0], "resample": 0.0}
    assert population(monkeypatch, **given)["scheduler"] == PBT | changed
    assert "trials wait for each other at the end of each generation, as with synch=True" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mutation", "words"),
    [
        (tune.loguniform(1e-3, 0.5), {"type": "loguniform", "lower": 1e-3, "upper": 0.5, "base": 10}),
        ([0.1, 0.2], {"type": "choice", "values": [0.1, 0.2]}),
        (lambda: random.uniform(0.1, 0.5), {"type": "uniform", "lower": 0.1, "upper": 0.5}),
        (lambda: np.random.uniform(0.1, 0.5), {"type": "uniform", "lower": 0.1, "upper": 0.5}),
        (lambda: random.choice([0.1, 0.5]), {"type": "choice", "values": [0.1, 0.5]}),
        (lambda: random.randint(1, 8), {"type": "randint", "lower": 1, "upper": 9}),
        (lambda: np.random.randint(1, 8), {"type": "randint", "lower": 1, "upper": 8}),
    ],
)
def test_a_mutation_is_the_domain_that_it_draws_from(monkeypatch, capsys, mutation, words):
    space = population(monkeypatch, mutations={"lr": mutation})["space"]
    assert space["lr"].to_words() == words
    assert "lr is drawn from hyperparam_mutations also at first" in capsys.readouterr().err


def test_a_first_value_that_is_a_constant_is_that_of_all_trials(monkeypatch):
    asked = mutating()
    config = tune.TuneConfig(num_samples=8, scheduler=asked["scheduler"], **OBJECTIVE)
    run = tune.RunConfig(stop=asked["stop"])
    found = words_of(monkeypatch, param_space={"lr": 0.1, "epochs": 9}, tune_config=config, run_config=run)
    assert found["search"]["points_to_evaluate"] == [{"lr": 0.1}] * 8


def test_pb2_is_population_based_training_with_a_model_of_the_numbers(monkeypatch, capsys):
    bounds = {"lr": [0.001, 0.1], "layers": [1, 4], "width": [2, 9]}
    scheduler = PB2("training_iteration", perturbation_interval=4, hyperparam_bounds=bounds, quantile_fraction=0.5)
    config = tune.TuneConfig(num_samples=6, scheduler=scheduler, **OBJECTIVE)
    space = {"lr": 0.01, "layers": 2, "width": tune.randint(2, 5), "epochs": 9}
    run = tune.RunConfig(stop={"training_iteration": 12})
    search = words_of(monkeypatch, param_space=space, tune_config=config, run_config=run)["search"]
    assert search["scheduler"] == {
        "type": "pbt",
        "population": 6,
        "generations": 3,
        "iterations": 4,
        "quantile": 0.5,
        "perturb": [0.8, 1.2],
        "resample": 0.0,
        "mutate": ["lr", "layers", "width"],
        "explore": "gp",
    }
    assert search["space"] == {
        "lr": rubberband.uniform(0.001, 0.1),
        "layers": rubberband.randint(1, 5),
        "width": rubberband.randint(2, 10),
        "epochs": 9,
    }
    assert search["points_to_evaluate"] == [{"lr": 0.01, "layers": 2}] * 6
    assert "width is drawn from hyperparam_bounds also at first" in capsys.readouterr().err


REMEDIED: list[tuple[dict[str, Any], str]] = [
    (
        {"checkpoint_config": CHECKPOINTS(checkpoint_score_attribute="loss")},
        "CheckpointConfig(checkpoint_score_attribute='loss', checkpoint_score_order='max') is not the min of loss",
    ),
    ({"mode": None}, "the search has no metric or mode; write tune.TuneConfig"),
    (
        {"scheduler": PB2(hyperparam_bounds={"lr": [1, 2]}), "stop": {"training_iteration": 60}},
        "PB2(time_attr='time_total_s'): generations are counted in iterations; write time_attr='training_iteration'",
    ),
    (
        {"scheduler": ResourceChangingScheduler()},
        "ResourceChangingScheduler has no counterpart; use ASHAScheduler, HyperBandScheduler or MedianStoppingRule",
    ),
    (mutating(time_attr="time_total_s"), "generations are counted in iterations; write time_attr='training_iteration'"),
    (mutating(custom_explore_fn=dict), "PopulationBasedTraining(custom_explore_fn=...) has no counterpart; compute"),
    (mutating(burn_in_period=6), "burn_in_period=6) has no counterpart beyond perturbation_interval=4; raise that"),
    (mutating(perturbation_interval=3), "8 iterations are no multiple of perturbation_interval=3; write RunConfig"),
    (mutating({"lr": lambda: 0.1}), "is <function <lambda> at"),
    (mutating({"lr": {"low": 1}}), "is a mapping of its own; write its parameters side by side"),
    (mutating(stop=None), "nothing says how large the search is; add RunConfig(stop={'training_iteration': N})"),
    (mutating() | {"num_samples": -1}, "nothing says how large the search is; add TuneConfig(num_samples=8)"),
    (
        {"scheduler": MedianStoppingRule()},
        "MedianStoppingRule(time_attr='time_total_s') has no counterpart; write time_attr='training_iteration'",
    ),
    (
        {"scheduler": MedianStoppingRule("training_iteration", hard_stop=False)},
        "MedianStoppingRule(hard_stop=False) has no counterpart; write hard_stop=True",
    ),
    (
        {"search_alg": Repeater(OptunaSearch(**OBJECTIVE), repeat=5), "num_samples": 12},
        "TuneConfig(num_samples=12) counts trials, and Repeater(repeat=5) trains each configuration 5 times; write "
        "num_samples=10",
    ),
    ({"num_samples": -1}, "without a scheduler the length of a trial is not known; add RunConfig(stop="),
    ({"constraints": {}}, "without a scheduler the length of a trial is not known; add RunConfig(stop="),
    ({"callbacks": [Silent()]}, "RunConfig(callbacks=[Silent(...)]): on_checkpoint() is not called"),
    ({"callbacks": [Later()]}, "RunConfig(callbacks=[Later(...)]): on_later() is not called"),
    ({"callbacks": [object()]}, "RunConfig(callbacks=[object(...)]): it is no ray.tune.Callback"),
    ({"callbacks": [rubberband.Callback()]}, "it is a callback of RubberBand; give it as Tuner(..., callbacks=[...])"),
    ({"callbacks": [tune.logger.CSVLoggerCallback()]}, "loggers of Ray Tune write into its own folders; use Tuner("),
    ({"trainable": with_gpus(gpu=0.3)}, "0.3 GPUs, and a GPU is shared in 2 to 16 equal parts; ask for 0.3333"),
    ({"trainable": with_gpus(gpu=0.7)}, "ask for 0.5, by which 2 trials share one"),
    ({"trainable": with_gpus(gpu=0.01)}, "ask for 0.0625, by which 16 trials share one"),
    ({"trainable": with_gpus(gpu=2)}, "asks for 2 GPUs; ask for 1, or write a rubberband.TorchTrial for several"),
    ({"trainable": with_gpus(cpu=16)}, "asks for 16 CPUs, and a trial on p3.2xlarge has 8; ask for that"),
    ({"trainable": with_gpus(gpu=0.5, cpu=8)}, "asks for 8 CPUs, and a trial on p3.2xlarge has 4; ask for that"),
    ({"trainable": with_gpus(gpu=0.5), "max_concurrent_trials": 1}, "trains 2 trials at once, 2 on each GPU; choose"),
    (
        {"max_concurrent_trials": 2, "resources": {**LOCAL, "instance_type": "p3.8xlarge"}},
        "an instance trains 4 trials",
    ),
    (
        {"param_space": {"lr": tune.grid_search([1, 2])}, "search_alg": OptunaSearch()},
        "param_space: lr is a grid, which no sampler learns; write tune.choice",
    ),
    *((given, f"{what}{NO_COUNTERPART}") for given, what in REFUSED),
]


@pytest.mark.parametrize(("given", "line"), REMEDIED, ids=[line[:50] for _, line in REMEDIED])
def test_words_without_a_counterpart_are_refused_by_name(given, line):
    fields = {field.name for field in dataclasses.fields(tune.TuneConfig)}
    config = {**OBJECTIVE, **{key: value for key, value in given.items() if key in fields}}
    run = {
        key: value for key, value in given.items() if key in {each.name for each in dataclasses.fields(tune.RunConfig)}
    }
    words = {key: value for key, value in given.items() if key not in {*config, *run, "trainable"}}
    words = {"param_space": SPACE, "constraints": {"deadline": "1h"}, "resources": LOCAL, **words}
    with pytest.raises(InputError, match=re.escape(line)) as caught:
        Tuner(
            given.get("trainable", easy_train),
            tune_config=tune.TuneConfig(**config),
            run_config=tune.RunConfig(**run),
            **words,
        )
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "kind",
    [
        *(ASHAScheduler, HyperBandScheduler, schedulers.FIFOScheduler, MedianStoppingRule),
        *(TrialPlateauStopper, ExperimentPlateauStopper, Repeater),
        *(OptunaSearch, BasicVariantGenerator, ConcurrencyLimiter),
    ],
)
def test_every_parameter_of_schedulers_and_searchers_is_known(kind):
    parameters = inspect.signature(kind.__init__).parameters.values()
    named = {each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)}
    assert named - {"self"} == set(WORDS[kind.__name__])


def test_a_field_of_a_later_ray_tune_is_refused_until_it_is_known(monkeypatch):
    @dataclasses.dataclass
    class LaterConfig(tune.TuneConfig):
        pruning: str | None = None

    words_of(monkeypatch, tune_config=LaterConfig(**OBJECTIVE))
    with pytest.raises(InputError, match=re.escape(f"TuneConfig(pruning='hard'){NO_COUNTERPART}")):
        words_of(monkeypatch, tune_config=LaterConfig(pruning="hard", **OBJECTIVE))


def test_the_first_failure_cancels_an_experiment_that_fails_fast(monkeypatch, tmp_path):
    run = tune.RunConfig(name="fast", failure_config=tune.FailureConfig(fail_fast="raise"))
    tuner = Tuner(
        easy_train, tune_config=tune.TuneConfig(**OBJECTIVE), run_config=run, resources=LOCAL, home=tmp_path,
        constraints={"deadline": "1h"},
    )  # fmt: skip

    def fails(trainable: Any, callbacks: Any, **words: Any) -> None:
        (fail_fast,) = callbacks
        for trial in (4, 5):
            failed = FailureInfo(trial=trial, config={}, iterations=1, failure="it was too hot", elapsed_s=2.0)
            fail_fast.on_trial_failure(failed)

    monkeypatch.setattr(rubberband, "tune", fails)
    with pytest.raises(RuntimeError, match="trial 4 failed: it was too hot"):
        tuner.fit()
    (request,) = Inbox(tmp_path / "experiments" / "fast" / "inbox").pending()
    assert request.kind == "cancel"


@cases("aws", "install")
def test_rented_instances_install_what_ray_tune_imports(monkeypatch, aws, install):
    rented = {**LOCAL, "provider": "aws", "checkpoints": "s3://bucket/here", "aws": aws}
    assert words_of(monkeypatch, resources=rented, **FIFO)["resources"]["aws"]["install"] == install


def test_a_config_of_ray_train_is_refused_as_ray_tune_has_its_own(monkeypatch):
    import ray.train

    with pytest.raises(InputError, match=r"RunConfig is that of ray\.train; import it from ray\.tune"):
        words_of(monkeypatch, run_config=ray.train.RunConfig(name="ours"), **FIFO)


def test_a_second_run_of_a_script_has_the_next_free_name(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(ExperimentFolder, "exists", property(lambda folder: folder.name == "ours"))
    words = words_of(monkeypatch, run_config=tune.RunConfig(name="ours"), home=tmp_path, **FIFO)
    assert words["name"] == "ours-2"
    assert "ours is the name of an earlier experiment; this one is ours-2" in capsys.readouterr().err


def test_an_experiment_is_not_restored_by_its_folder():
    with pytest.raises(InputError, match="resume an experiment with `rubberband resume NAME`"):
        Tuner.restore("/somewhere/experiment")


# Callbacks.


class Telling(tune.Callback):
    """Keeps what it is called with."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def setup(self, **info: Any) -> None:
        self.calls.append(("setup", info["total_num_samples"]))

    def on_trial_start(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        self.calls.append(("start", str(trial), trial.config))

    def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: dict[str, Any], **info: Any) -> None:
        self.calls.append((str(trial), iteration, result["loss"], result["training_iteration"]))

    def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        self.calls.append(("complete", str(trial), trial.status))

    def on_trial_error(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        self.calls.append(("error", str(trial)))

    def on_experiment_end(self, trials: Any, **info: Any) -> None:
        self.calls.append(("end", len(trials)))


def test_callbacks_of_ray_tune_are_called(tmp_path):
    telling = Telling()
    called = TuneCallbacks([telling], "train", tmp_path, None, lambda trial: f"folder-{trial.trial_id}")
    run = RunInfo(name="n", metric="loss", mode="min", num_trials=2, experiment={}, is_resumed=False)
    called.on_experiment_start(run)
    for trial in (0, 1, 2):
        called.on_trial_report(
            ReportInfo(
                trial=trial,
                config={"lr": trial},
                iterations=1,
                metrics={"loss": 0.5},
                stage=0,
                elapsed_s=1.0,
                reported_at=2.0,
            )
        )
    called.on_trial_failure(FailureInfo(trial=1, config={"lr": 1}, iterations=1, failure="it failed", elapsed_s=2.0))
    sync = SyncInfo(stage=0, bracket=None, trials=(0, 1, 2), ranking=(2, 0), promoted=(2,), elapsed_s=3.0, cost_usd=0.1)
    called.on_sync(sync)
    result: Any = None
    called.on_end(result)
    assert telling.calls == [
        ("setup", 2),
        ("start", "train_00000", {"lr": 0}),
        ("train_00000", 1, 0.5, 1),
        ("start", "train_00001", {"lr": 1}),
        ("train_00001", 1, 0.5, 1),
        ("start", "train_00002", {"lr": 2}),
        ("train_00002", 1, 0.5, 1),
        ("error", "train_00001"),
        ("complete", "train_00000", "TERMINATED"),
        ("complete", "train_00002", "TERMINATED"),
        ("end", 3),
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder-00000", "folder-00001", "folder-00002"]
