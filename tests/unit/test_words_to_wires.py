"""From the word to the wire: every key of the experiment file changes what it should, and nothing else.

Keys are found by a walk through the schema; a new one needs a line here. A line gives the key two values, and names all
wires (`tests/builders/wires.py`) on which the two experiments differ.
"""

from __future__ import annotations

import copy
import json
import re
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from rubberband.spec.experiment import Experiment
from tests.builders.aws_account import Account
from tests.builders.wires import wires

Words = dict[str, Any]
WORLD = Account().fake.world
"""Names of what there is in the account of `wires`."""
SHA: Words = {"type": "sha", "num_samples": 8, "max_t": 4, "reduction_factor": 2}
LOCAL: Words = {
    "name": "wired",
    "entrypoint": "examples.digits:DigitsTrial",
    "search": {
        "space": {"lr": {"type": "uniform", "lower": 0.001, "upper": 0.1}},
        "scheduler": SHA,
        "metric": "loss",
        "mode": "min",
    },
    "constraints": {"deadline": "2h", "max_cost": 50},
    "resources": {
        "provider": "local",
        "gpus_per_instance": 2,
        "price_per_hour": 3.6,
        "max_instances": 2,
        "checkpoints": "/store",
    },
    "profile": {"seconds_per_iteration": {1: 40, 2: 24}, "trial_startup": 3},
}


def _with(base: Words, **changes: Any) -> Words:
    """The words with others; `resources__market` reaches below, and None removes."""
    found = copy.deepcopy(base)
    for path, value in changes.items():
        _set(found, path.replace("__", "."), value)
    return found


def _set(words: Words, path: str, value: Any) -> None:
    *above, last = path.split(".")
    target: Any = words
    for key in above:
        if isinstance(target, list):
            target = target[int(key)]
        elif key not in target or target[key] is None:
            target = target.setdefault(key, {})
        else:
            target = target[key]
    if value is None:
        target.pop(last, None)
    elif isinstance(target, list):
        target[int(last)] = value
    else:
        target[last] = value


NOISY = _with(LOCAL, profile__trial_cv=0.1, profile__iteration_cv=0.1, profile__startup_cv=0.2, profile__mean_cv=0.05)
STEPS: Words = {"alpha_grad_s": 0.02, "beta_grad_s": 0.0004, "alpha_local_s": 0.01, "alpha_node_s": 0.03}
GOODPUT = _with(
    LOCAL,
    batch={"policy": "goodput", "initial": 64, "max": 1024},
    profile__goodput={
        "throughput": {**STEPS, "beta_local_s": 0.001, "beta_node_s": 0.001, "gamma": 2.0},
        "noise_scale": 200.0,
        "samples_per_iteration": 20_000.0,
        "limits": {"initial": 64, "max": 2048, "max_per_gpu": 512},
        "points": [{"instances": 1, "gpus": 1, "per_gpu": 64, "accumulation": 0, "step_s": 0.05}],
    },
)
ASYNC = _with(
    LOCAL,
    training={"mode": "async", "servers": 2},
    profile__asynchronous={
        "times": {"compute_s": 0.05, "up_s": 0.01, "down_s": 0.01, "server_s": 0.002},
        "updates_per_iteration": 100.0,
        "servers": 2,
    },
)
VIRTUAL = _with(LOCAL, entrypoint=None, resources__provider="virtual", resources__checkpoints=None)
SPOT = _with(VIRTUAL, resources__market="spot", resources__spot={"price_per_hour": 1.2, "interruptions_per_hour": 0.1})
LONG = _with(SPOT, search__scheduler={"type": "stages", "stages": [{"trials": 4, "iterations": 20}]})
LEARNS = _with(
    LOCAL,
    search__sampler={"type": "optuna", "sampler": "tpe"},
    search__also=[{"metric": "size", "mode": "min"}],
    search__scheduler={"type": "asha", "num_samples": 16, "max_t": 4, "reduction_factor": 2},
)
PROGRAM = _with(LOCAL, entrypoint={"command": "python train.py ${args}", "metrics": "stdout"})
RAY = _with(
    LOCAL,
    resources={"provider": "ray", "address": "10.0.0.5:6379", "price_per_hour": 3.6, "max_instances": 2},
    resources__gpus_per_instance=2,
)
AWS = _with(
    LOCAL,
    resources={
        "provider": "aws",
        "instance_type": "g5.xlarge",
        "max_instances": 2,
        "checkpoints": "s3://rubberband-fake-checkpoints/tests",
        "aws": {"install": "none"},
    },
    profile__seconds_per_iteration={1: 40},
)
COMMITS = {"a/b@main": "a" * 40, "c/d@main": "c" * 40, "datasets/a/b@main": "d" * 40}
FETCHED: Words = {"models": ["a/b"], "commits": COMMITS}
FETCHING = _with(AWS, resources__fetch=FETCHED)


def _asha(kind: str) -> Words:
    return {"type": kind, "num_samples": 8, "max_t": 4}


BRACKETS = _with(LOCAL, search__scheduler={"type": "hyperband", "max_t": 9, "reduction_factor": 3})
WRITTEN = {"type": "stages", "stages": [{"trials": 8, "iterations": 1}, {"trials": 2, "iterations": 2}]}
STAGES = _with(LOCAL, search__scheduler=WRITTEN)
NONE = _with(LOCAL, search__scheduler=_asha("none"))
ASHA = _with(LOCAL, search__scheduler=_asha("asha"))
PATIENT = _with(LOCAL, search__stop__patience={"iterations": 2})
UNIMPROVED = _with(LOCAL, search__stop__no_improvement={"time": "20m"})
FLAT = _with(LOCAL, search__stop__no_improvement={"plateau": {"top": 3, "std": 0.1}})
HALVED = _with(LOCAL, search__scheduler={**SHA, "max_t": 15})
GROUP: Words = {"type": "pbt", "population": 8, "generations": 2, "iterations": 2, "mutate": ["lr"]}
POPULATION = _with(LOCAL, search__scheduler=GROUP)
DELAYS = {"provision_delay": {"mean": 30, "cv": 0.5}, "init_delay": {"samples": [10, 20]}}
DELAYED = _with(VIRTUAL, **{f"resources__{key}": value for key, value in DELAYS.items()})
TRACKED = {kind: _with(LOCAL, track=[{"type": kind}]) for kind in ("csv", "tensorboard", "mlflow", "wandb")}
ONE_GPU = _with(ASYNC, profile__seconds_per_iteration={1: 40})
MODEL: Words = GOODPUT["profile"]["goodput"]
APART = _with(GOODPUT, resources__gpus_per_instance=1)
MEASURED = _with(GOODPUT, batch={"policy": "goodput"})
BUILT = _with(AWS, resources__aws__install="scikit-learn")

Line = tuple[Words, str, Any, Any]
LINES: dict[str, Line] = {
    "Experiment.name": (LOCAL, "name", "wired", "other"),
    "Experiment.entrypoint": (LOCAL, "entrypoint", "examples.digits:DigitsTrial", "examples.scaling:ScalingTrial"),
    "Search.space": (LOCAL, "search.space", {"lr": 0.5}, {"rate": 0.5}),
    "Search.scheduler": (LOCAL, "search.scheduler", SHA, _asha("none")),
    "Search.sampler": (LOCAL, "search.sampler", {"type": "random"}, {"type": "quasi"}),
    "Resources.keep": (LOCAL, "resources.keep", "latest", "best"),
    "Search.repeats": (LOCAL, "search.repeats", 1, 2),
    "Search.points_to_evaluate": (LOCAL, "search.points_to_evaluate", [{"lr": 0.01}], [{"lr": 0.02}]),
    "Search.evaluated_rewards": (
        _with(LEARNS, search__points_to_evaluate=[{"lr": 0.01}, {"lr": 0.002}]),
        "search.evaluated_rewards",
        [-5.0, 5.0],
        [5.0, -5.0],
    ),
    "Search.metric": (LOCAL, "search.metric", "loss", "error"),
    "Search.mode": (LOCAL, "search.mode", "min", "max"),
    "Search.also": (
        _with(LEARNS, search__sampler__multi_objective=True),
        "search.also",
        [{"metric": "size", "mode": "min"}],
        [{"metric": "loss2", "mode": "min"}],
    ),
    "Search.stop": (LOCAL, "search.stop", None, {"target": 0.1}),
    "Stop.target": (LOCAL, "search.stop.target", 0.1, 0.2),
    "Stop.patience": (LOCAL, "search.stop.patience", None, {"iterations": 1}),
    "Stop.median": (LOCAL, "search.stop.median", None, {"after": 2}),
    "Stop.no_improvement": (LOCAL, "search.stop.no_improvement", None, {"syncs": 1}),
    "Stop.worth": (LOCAL, "search.stop.worth", "0.001 per USD", "0.002 per USD"),
    "Patience.iterations": (LOCAL, "search.stop.patience.iterations", 1, 2),
    "Patience.min_delta": (PATIENT, "search.stop.patience.min_delta", 0.1, 0.2),
    "Patience.std": (PATIENT, "search.stop.patience.std", 0.1, 0.2),
    "Patience.after": (PATIENT, "search.stop.patience.after", 2, 3),
    "Median.after": (LOCAL, "search.stop.median.after", 1, 2),
    "Median.trials": (LOCAL, "search.stop.median.trials", 2, 3),
    "NoImprovement.trials": (NONE, "search.stop.no_improvement.trials", 2, 3),
    "NoImprovement.time": (LOCAL, "search.stop.no_improvement.time", "20m", "30m"),
    "NoImprovement.cost": (LOCAL, "search.stop.no_improvement.cost", 1, 2),
    "NoImprovement.syncs": (HALVED, "search.stop.no_improvement.syncs", 1, 2),
    "NoImprovement.min_delta": (UNIMPROVED, "search.stop.no_improvement.min_delta", 0.1, 0.2),
    "NoImprovement.plateau": (UNIMPROVED, "search.stop.no_improvement.plateau", None, {"top": 3, "std": 0.1}),
    "Plateau.top": (FLAT, "search.stop.no_improvement.plateau.top", 3, 4),
    "Plateau.std": (FLAT, "search.stop.no_improvement.plateau.std", 0.1, 0.2),
    "Plateau.reports": (FLAT, "search.stop.no_improvement.plateau.reports", 0, 5),
    "Also.metric": (_with(LEARNS, search__sampler__multi_objective=True), "search.also.0.metric", "size", "width"),
    "Also.at_most": (LEARNS, "search.also.0.at_most", 3, 4),
    "Also.at_least": (LEARNS, "search.also.0.at_least", 3, 4),
    "Also.mode": (_with(LEARNS, search__sampler__multi_objective=True), "search.also.0.mode", "min", "max"),
    "Sampler.type": (LOCAL, "search.sampler.type", "random", "quasi"),
    "Sampler.sampler": (LEARNS, "search.sampler.sampler", "tpe", "nsgaii"),
    "Sampler.multi_objective": (LEARNS, "search.sampler.multi_objective", False, True),
    "Sampler.seed": (LOCAL, "search.sampler.seed", 0, 1),
    "Sha.type": (LOCAL, "search.scheduler.type", "sha", "asha"),
    "Sha.num_samples": (LOCAL, "search.scheduler.num_samples", 8, 9),
    "Sha.max_t": (LOCAL, "search.scheduler.max_t", 4, 5),
    "Sha.grace_period": (LOCAL, "search.scheduler.grace_period", 1, 2),
    "Sha.reduction_factor": (LOCAL, "search.scheduler.reduction_factor", 2, 3),
    "Asha.type": (ASHA, "search.scheduler.type", "asha", "sha"),
    "Asha.num_samples": (ASHA, "search.scheduler.num_samples", 8, 9),
    "Asha.max_t": (ASHA, "search.scheduler.max_t", 4, 5),
    "Asha.grace_period": (ASHA, "search.scheduler.grace_period", 1, 2),
    "Asha.reduction_factor": (ASHA, "search.scheduler.reduction_factor", 2, 3),
    "Pbt.type": (POPULATION, "search.scheduler", GROUP, SHA),
    "Pbt.population": (POPULATION, "search.scheduler.population", 8, 9),
    "Pbt.generations": (POPULATION, "search.scheduler.generations", 2, 3),
    "Pbt.iterations": (POPULATION, "search.scheduler.iterations", 2, 3),
    "Pbt.quantile": (POPULATION, "search.scheduler.quantile", 0.25, 0.5),
    "Pbt.explore": (POPULATION, "search.scheduler.explore", "perturb", "gp"),
    "Pbt.perturb": (POPULATION, "search.scheduler.perturb", [0.8, 1.2], [0.5, 2.0]),
    "Pbt.resample": (POPULATION, "search.scheduler.resample", 0.25, 0.75),
    "Pbt.mutate": (
        _with(POPULATION, search__space__width={"type": "choice", "values": [8, 16, 32]}),
        "search.scheduler.mutate",
        ["lr"],
        ["width"],
    ),
    "NoScheduler.type": (NONE, "search.scheduler.type", "none", "asha"),
    "NoScheduler.num_samples": (NONE, "search.scheduler.num_samples", 8, 9),
    "NoScheduler.max_t": (NONE, "search.scheduler.max_t", 4, 5),
    "Hyperband.type": (BRACKETS, "search.scheduler", BRACKETS["search"]["scheduler"], SHA),
    "Hyperband.num_samples": (BRACKETS, "search.scheduler.num_samples", 9, 10),
    "Hyperband.max_t": (BRACKETS, "search.scheduler.max_t", 9, 27),
    "Hyperband.reduction_factor": (BRACKETS, "search.scheduler.reduction_factor", 2, 3),
    "WrittenStages.type": (STAGES, "search.scheduler", WRITTEN, SHA),
    "WrittenStages.stages": (STAGES, "search.scheduler.stages", WRITTEN["stages"], WRITTEN["stages"][:1]),
    "WrittenStage.trials": (STAGES, "search.scheduler.stages.0.trials", 8, 9),
    "WrittenStage.iterations": (STAGES, "search.scheduler.stages.1.iterations", 2, 3),
    "Constraints.deadline": (LOCAL, "constraints.deadline", "2h", "3h"),
    "Constraints.max_cost": (LOCAL, "constraints.max_cost", 50, 60),
    "Constraints.confidence": (NOISY, "constraints.confidence", 0.95, 0.5),
    "Constraints.objective": (LOCAL, "constraints.objective", "min_cost", "min_time"),
    "Constraints.iteration_timeout": (LOCAL, "constraints.iteration_timeout", "5m", "6m"),
    "Constraints.max_failures": (LOCAL, "constraints.max_failures", 1, 2),
    "Constraints.resize_in_stage": (LOCAL, "constraints.resize_in_stage", True, False),
    "Resources.provider": (VIRTUAL, "resources.provider", "virtual", "local"),
    "Resources.address": (RAY, "resources.address", "10.0.0.5:6379", "10.0.0.6:6379"),
    "Resources.node_labels": (RAY, "resources.node_labels", {"kind": "a"}, {"kind": "b"}),
    "Resources.region": (AWS, "resources.region", None, "us-west-2"),
    "Resources.instance_type": (AWS, "resources.instance_type", "g5.xlarge", "g5.2xlarge"),
    "Resources.instance_types": (
        _with(AWS, resources__instance_type=None),
        "resources.instance_types",
        ["g5.xlarge"],
        ["g5.2xlarge"],
    ),
    "Resources.market": (SPOT, "resources.market", "spot", "on_demand"),
    "Resources.spot": (SPOT, "resources.spot", {"price_per_hour": 1.2}, {"price_per_hour": 1.3}),
    "Resources.max_instances": (LOCAL, "resources.max_instances", 2, 3),
    "Resources.gpus_per_trial": (LOCAL, "resources.gpus_per_trial", {"max": 1}, {"max": 2}),
    "GpusPerTrial.min": (LOCAL, "resources.gpus_per_trial.min", 1, 2),
    "GpusPerTrial.max": (LOCAL, "resources.gpus_per_trial.max", 1, 2),
    "GpusPerTrial.sizes": (LOCAL, "resources.gpus_per_trial.sizes", [1], [1, 2]),
    "Resources.trials_per_gpu": (_with(LOCAL, resources__gpus_per_trial={"max": 1}), "resources.trials_per_gpu", 1, 2),
    "Resources.slots": (_with(LOCAL, resources__gpus_per_instance=None), "resources.slots", 2, 3),
    "Resources.gpus_per_instance": (LOCAL, "resources.gpus_per_instance", 2, 4),
    "Resources.price_per_hour": (LOCAL, "resources.price_per_hour", 3.6, 3.7),
    "Resources.side_price_per_hour": (AWS, "resources.side_price_per_hour", None, 0.5),
    "Resources.billing": (LOCAL, "resources.billing", "per_instance", "per_function"),
    "Resources.minimum_billed": (LOCAL, "resources.minimum_billed", "60s", "1h"),
    "Resources.provision_delay": (LOCAL, "resources.provision_delay", "10s", "20s"),
    "Resources.init_delay": (LOCAL, "resources.init_delay", "10s", "20s"),
    "LognormalDelay.mean": (DELAYED, "resources.provision_delay.mean", 30, 40),
    "LognormalDelay.cv": (DELAYED, "resources.provision_delay.cv", 0.5, 0.25),
    "SampledDelay.samples": (DELAYED, "resources.init_delay.samples", [10, 20], [10, 30]),
    "Resources.dataset_gb": (_with(LOCAL, resources__data_price_per_gb=0.1), "resources.dataset_gb", 1, 2),
    "Resources.data_price_per_gb": (_with(LOCAL, resources__dataset_gb=1), "resources.data_price_per_gb", 0.1, 0.2),
    "Resources.head_price_per_hour": (LOCAL, "resources.head_price_per_hour", 0.1, 0.2),
    "Resources.lease": (LOCAL, "resources.lease", "2m", "3m"),
    "Resources.log_limit": (LOCAL, "resources.log_limit", "64KB", "65KB"),
    "Resources.checkpoints": (LOCAL, "resources.checkpoints", "/store", "/other"),
    "Resources.env": (LOCAL, "resources.env", {"A": "1"}, {"A": "2"}),
    "Resources.secrets": (LOCAL, "resources.secrets", ["A_SECRET"], ["B_SECRET"]),
    "Resources.fetch": (AWS, "resources.fetch", None, FETCHED),
    "Fetch.models": (FETCHING, "resources.fetch.models", ["a/b"], ["c/d"]),
    "Fetch.datasets": (FETCHING, "resources.fetch.datasets", None, ["a/b"]),
    "Fetch.from": (FETCHING, "resources.fetch.from", None, "s3://bucket/hub"),
    "Fetch.commits": (FETCHING, "resources.fetch.commits", COMMITS, {**COMMITS, "a/b@main": "e" * 40}),
    "Resources.aws": (AWS, "resources.aws", {"install": "none"}, {"install": "none", "volume_gb": 100}),
    "SpotMarket.price_per_hour": (SPOT, "resources.spot.price_per_hour", 1.2, 1.3),
    "SpotMarket.interruptions_per_hour": (SPOT, "resources.spot.interruptions_per_hour", 0.1, 0.2),
    "SpotMarket.checkpoint_iterations": (LONG, "resources.spot.checkpoint_iterations", 1, 2),
    "SpotMarket.restart": (SPOT, "resources.spot.restart", "1m", "2m"),
    "Aws.image": (AWS, "resources.aws.image", None, list(WORLD.images)[1]),
    "Aws.install": (AWS, "resources.aws.install", "none", "scikit-learn"),
    "Aws.index_url": (BUILT, "resources.aws.index_url", None, "https://two/simple"),
    "Aws.setup": (AWS, "resources.aws.setup", None, ["true"]),
    "Aws.subnets": (AWS, "resources.aws.subnets", None, [list(WORLD.subnets)[2]]),
    "Aws.security_group": (AWS, "resources.aws.security_group", None, next(iter(WORLD.groups))),
    "Aws.reservation": (AWS, "resources.aws.reservation", None, "cr-2"),
    "Aws.key_name": (AWS, "resources.aws.key_name", None, "mine"),
    "Aws.worker_profile": (AWS, "resources.aws.worker_profile", None, "rubberband-head"),
    "Aws.head_profile": (AWS, "resources.aws.head_profile", None, "rubberband-worker"),
    "Aws.head_instance_type": (AWS, "resources.aws.head_instance_type", None, "m7i.large"),
    "Aws.head_idle": (AWS, "resources.aws.head_idle", None, "2h"),
    "Aws.guard_role": (AWS, "resources.aws.guard_role", None, "other-guard"),
    "Aws.owner": (AWS, "resources.aws.owner", None, "other"),
    "Aws.volume_gb": (AWS, "resources.aws.volume_gb", None, 200),
    "Aws.driver_address": (AWS, "resources.aws.driver_address", None, "127.0.0.1"),
    "Batch.policy": (_with(GOODPUT, batch=None), "batch.policy", "fixed", "goodput"),
    "Batch.initial": (GOODPUT, "batch.initial", 64, 128),
    "Batch.max": (GOODPUT, "batch.max", 1024, 512),
    "Batch.max_per_gpu": (GOODPUT, "batch.max_per_gpu", 128, 256),
    "Batch.accumulation": (GOODPUT, "batch.accumulation", True, False),
    "Batch.lr_scaling": (GOODPUT, "batch.lr_scaling", "sqrt", "linear"),
    "Batch.warmup_epochs": (GOODPUT, "batch.warmup_epochs", 1.0, 2.0),
    "Batch.interval": (GOODPUT, "batch.interval", 100, 200),
    "Batch.balance": (LOCAL, "batch.balance", {"policy": "auto"}, {"policy": "equal"}),
    "Batch.verify": (LOCAL, "batch.verify", True, False),
    "BatchBalance.policy": (LOCAL, "batch.balance.policy", "auto", "paper"),
    "BatchBalance.max_share": (LOCAL, "batch.balance.max_share", 0.5, 0.75),
    "Training.mode": (_with(ASYNC, training=None), "training.mode", "sync", "async"),
    "Training.servers": (ASYNC, "training.servers", 1, 2),
    "Training.max_staleness": (ASYNC, "training.max_staleness", 1, 2),
    "Experiment.track": (LOCAL, "track", "csv", "tensorboard"),
    "CsvTracker.folder": (TRACKED["csv"], "track.0.folder", "/one", "/two"),
    "CsvTracker.type": (TRACKED["csv"], "track.0.type", "csv", "tensorboard"),
    "TensorboardTracker.folder": (TRACKED["tensorboard"], "track.0.folder", "/one", "/two"),
    "TensorboardTracker.type": (TRACKED["tensorboard"], "track.0.type", "tensorboard", "csv"),
    "MlflowTracker.type": (TRACKED["mlflow"], "track.0.type", "mlflow", "csv"),
    "MlflowTracker.uri": (TRACKED["mlflow"], "track.0.uri", "http://one", "http://two"),
    "MlflowTracker.experiment": (TRACKED["mlflow"], "track.0.experiment", "one", "two"),
    "WandbTracker.type": (TRACKED["wandb"], "track.0.type", "wandb", "csv"),
    "WandbTracker.project": (TRACKED["wandb"], "track.0.project", "one", "two"),
    "WandbTracker.entity": (TRACKED["wandb"], "track.0.entity", "one", "two"),
    "WandbTracker.mode": (TRACKED["wandb"], "track.0.mode", "online", "offline"),
    "Experiment.notify": (LOCAL, "notify", "FIRST", "SECOND"),
    "NotifyAddress.url_from": (LOCAL, "notify", [{"url_from": "FIRST"}], [{"url_from": "SECOND"}]),
    "NotifyAddress.kinds": (
        LOCAL,
        "notify",
        [{"url_from": "FIRST", "kinds": ["done"]}],
        [{"url_from": "FIRST", "kinds": ["late"]}],
    ),
    "Program.command": (PROGRAM, "entrypoint.command", "python train.py ${args}", "python other.py ${args}"),
    "Program.metrics": (PROGRAM, "entrypoint.metrics", "stdout", "report"),
    "Program.launch": (PROGRAM, "entrypoint.launch", "worker", "machine"),
    "Program.booleans": (PROGRAM, "entrypoint.booleans", {"style": "1/0"}, {"style": "flag"}),
    "Program.resume": (PROGRAM, "entrypoint.resume", "--resume", "--init_from=resume"),
    "Program.rank": (PROGRAM, "entrypoint.rank", True, False),
    "BooleanWords.style": (PROGRAM, "entrypoint.booleans", {"style": "True/False"}, {"style": "1/0"}),
    "MetricsPlace.file": (PROGRAM, "entrypoint.metrics", {"file": "${checkpoint}/a"}, {"file": "${checkpoint}/b"}),
    "MetricsPlace.pattern": (
        PROGRAM,
        "entrypoint.metrics",
        {"pattern": "a (?P<loss>.*)"},
        {"pattern": "b (?P<loss>.*)"},
    ),
    "Experiment.profile": (LOCAL, "profile", {"seconds_per_iteration": {1: 40}}, {"seconds_per_iteration": {1: 41}}),
    "ProfilesByType.by_instance_type": (
        AWS,
        "profile",
        {"by_instance_type": {"g5.xlarge": {"seconds_per_iteration": {1: 40}}}},
        {"by_instance_type": {"g5.xlarge": {"seconds_per_iteration": {1: 41}}}},
    ),
    "InlineProfile.seconds_per_iteration": (LOCAL, "profile.seconds_per_iteration", {1: 40}, {1: 41}),
    "InlineProfile.resumes": (LOCAL, "profile.resumes", True, False),
    "InlineProfile.trial_cv": (NOISY, "profile.trial_cv", 0.1, 0.2),
    "InlineProfile.iteration_cv": (NOISY, "profile.iteration_cv", 0.1, 0.2),
    "InlineProfile.startup_cv": (NOISY, "profile.startup_cv", 0.2, 0.4),
    "InlineProfile.mean_cv": (NOISY, "profile.mean_cv", 0.05, 0.1),
    "InlineProfile.end_chance": (NOISY, "profile.end_chance", 0.0, 0.1),
    "InlineProfile.noise": (NOISY, "profile.noise", "lognormal", "normal"),
    "InlineProfile.trial_startup": (LOCAL, "profile.trial_startup", 3, 4),
    "InlineProfile.checkpoint_load": (LOCAL, "profile.checkpoint_load", 3, 4),
    "InlineProfile.first_iteration_extra": (LOCAL, "profile.first_iteration_extra", 1, 2),
    "InlineProfile.cold_iteration_extra": (LOCAL, "profile.cold_iteration_extra", 1, 2),
    "InlineProfile.provision_delay": (LOCAL, "profile.provision_delay", 10, 20),
    "InlineProfile.init_delay": (LOCAL, "profile.init_delay", 10, 20),
    "InlineProfile.goodput": (GOODPUT, "profile.goodput", MODEL, {**MODEL, "noise_scale": 400.0}),
    "InlineProfile.asynchronous": (ASYNC, "profile.asynchronous", None, ASYNC["profile"]["asynchronous"]),
    "GoodputWords.throughput": (
        GOODPUT,
        "profile.goodput.throughput",
        {**STEPS, "gamma": 2.0},
        {**STEPS, "gamma": 3.0},
    ),
    "GoodputWords.noise_scale": (GOODPUT, "profile.goodput.noise_scale", 200.0, 400.0),
    "GoodputWords.samples_per_iteration": (GOODPUT, "profile.goodput.samples_per_iteration", 20_000.0, 30_000.0),
    "GoodputWords.limits": (
        MEASURED,
        "profile.goodput.limits",
        {"initial": 64, "max": 512},
        {"initial": 64, "max": 256},
    ),
    "GoodputWords.overhead_s": (GOODPUT, "profile.goodput.overhead_s", 0.5, 1.0),
    "GoodputWords.points": (GOODPUT, "profile.goodput.points", None, MODEL["points"]),
    "GoodputWords.fit_error": (GOODPUT, "profile.goodput.fit_error", 0.1, 0.2),
    **{
        f"ThroughputWords.{key}": (GOODPUT, f"profile.goodput.throughput.{key}", value, 2 * value)
        for key, value in MODEL["throughput"].items()
    },
    "LimitsWords.initial": (MEASURED, "profile.goodput.limits.initial", 64, 128),
    "LimitsWords.max": (MEASURED, "profile.goodput.limits.max", 2048, 512),
    "LimitsWords.max_per_gpu": (MEASURED, "profile.goodput.limits.max_per_gpu", 64, 128),
    **{
        f"PointWords.{key}": (GOODPUT, f"profile.goodput.points.0.{key}", value, value + 1)
        for key, value in MODEL["points"][0].items()
    },
    "AsyncWords.times": (
        ONE_GPU,
        "profile.asynchronous.times",
        {"compute_s": 0.05, "up_s": 0.01, "down_s": 0.01, "server_s": 0.002},
        {"compute_s": 0.06, "up_s": 0.01, "down_s": 0.01, "server_s": 0.002},
    ),
    "AsyncWords.updates_per_iteration": (ONE_GPU, "profile.asynchronous.updates_per_iteration", 100.0, 120.0),
    "AsyncWords.overhead_s": (ONE_GPU, "profile.asynchronous.overhead_s", 0.5, 1.0),
    "AsyncWords.servers": (ONE_GPU, "profile.asynchronous.servers", 2, 3),
    "AsyncWords.largest_shard": (ONE_GPU, "profile.asynchronous.largest_shard", 0.5, 0.75),
    "AsyncWords.blend": (ONE_GPU, "profile.asynchronous.blend", 0.25, 0.75),
    **{
        f"AsyncTimesWords.{key}": (ONE_GPU, f"profile.asynchronous.times.{key}", value, 2 * value)
        for key, value in ASYNC["profile"]["asynchronous"]["times"].items()
    },
}
LINES |= {
    "Experiment.name on EC2": (AWS, "name", "wired", "other"),
    "Resources.lease on EC2": (AWS, "resources.lease", None, "20m"),
    "Resources.market on EC2": (_with(AWS, resources__spot={"price_per_hour": 0.4}), "resources.market", None, "spot"),
    "Resources.init_delay on EC2": (AWS, "resources.init_delay", None, "20m"),
    "Resources.checkpoints on EC2": (AWS, "resources.checkpoints", AWS["resources"]["checkpoints"], "s3://other/tests"),
    "Resources.gpus_per_instance on Ray": (RAY, "resources.gpus_per_instance", 2, 4),
    "Search.mode for a sampler that learns": (LEARNS, "search.mode", "min", "max"),
    "Sampler.seed for a sampler that learns": (LEARNS, "search.sampler.seed", 0, 1),
    "ThroughputWords.alpha_node_s of wider gangs": (APART, "profile.goodput.throughput.alpha_node_s", 0.0, 9.0),
}
SPACES: dict[str, Words] = {
    "Uniform": {"type": "uniform", "lower": 0.1, "upper": 0.5},
    "QUniform": {"type": "quniform", "lower": 0.1, "upper": 0.5, "q": 0.1},
    "LogUniform": {"type": "loguniform", "lower": 0.1, "upper": 0.5},
    "QLogUniform": {"type": "qloguniform", "lower": 0.1, "upper": 0.5, "q": 0.1},
    "Randn": {"type": "randn", "mean": 1.0, "sd": 0.5},
    "QRandn": {"type": "qrandn", "mean": 1.0, "sd": 0.5, "q": 0.1},
    "Randint": {"type": "randint", "lower": 10, "upper": 90},
    "QRandint": {"type": "qrandint", "lower": 10, "upper": 90, "q": 5},
    "LogRandint": {"type": "lograndint", "lower": 10, "upper": 90},
    "QLogRandint": {"type": "qlograndint", "lower": 10, "upper": 90, "q": 5},
    "Choice": {"type": "choice", "values": [1, 2, 3, 4, 5, 6, 7]},
    "Grid": {"type": "grid", "values": [1, 2, 3, 4, 5, 6, 7, 8]},
}
OTHER: Words = {
    "lower": 0.2,
    "upper": 0.95,
    "q": 0.2,
    "mean": 2.0,
    "sd": 1.0,
    "values": [2, 3, 4, 5, 6, 7, 8, 9],
    "type": "uniform",
}
for _name, _space in SPACES.items():
    for _key, _value in _space.items():
        _scale = 100 if isinstance(_value, int) else 1
        _changed = {**_space, _key: OTHER[_key] if _key in ("type", "values") else type(_value)(_scale * OTHER[_key])}
        if _key == "type":
            _changed = SPACES["Randn" if _name != "Randn" else "Uniform"]
        LINES[f"{_name}.{_key}"] = (LOCAL, "search.space.lr", _space, _changed)
    if "log" in _name.lower():
        LINES[f"{_name}.base"] = (LOCAL, "search.space.lr", _space, {**_space, "base": 2})


EXPECTED = """
job.name: Experiment.name
job.stop: Search.stop, Stop.target, Stop.patience, Stop.median, Stop.no_improvement, Stop.worth, Patience.iterations,
    Patience.min_delta, Patience.std, Patience.after, Median.after, Median.trials, NoImprovement.trials,
    NoImprovement.time, NoImprovement.cost, NoImprovement.syncs, NoImprovement.min_delta, NoImprovement.plateau,
    Plateau.top, Plateau.std, Plateau.reports
header.entrypoint measured: Experiment.entrypoint
header.configurations measured: Search.space, Uniform.type, Uniform.lower, Uniform.upper, QUniform.type,
    QUniform.lower, QUniform.upper, QUniform.q, LogUniform.type, LogUniform.lower, LogUniform.upper, QLogUniform.type,
    QLogUniform.lower, QLogUniform.upper, QLogUniform.q, Randn.type, Randn.mean, Randn.sd, QRandn.type, QRandn.mean,
    QRandn.sd, QRandn.q, Randint.type, Randint.lower, Randint.upper, QRandint.type, QRandint.lower, QRandint.upper,
    QRandint.q, LogRandint.type, LogRandint.lower, LogRandint.upper, QLogRandint.type, QLogRandint.lower,
    QLogRandint.upper, QLogRandint.q, Choice.type, Choice.values, Grid.type, Grid.values
job.replan job.stages plan: Search.scheduler, Sha.type, Asha.type
header.configurations: Search.sampler, Search.points_to_evaluate, Sampler.type
drawn: Search.evaluated_rewards, Search.also, Also.metric, Also.mode, Sampler.sampler, Sampler.multi_objective
job.metric segment.metric: Search.metric
job.mode: Search.mode
job.limits: Also.at_most, Also.at_least
header.configurations header.seeds job.repeats job.stages plan: Search.repeats
header.configurations header.data_seed header.seeds segment.data_seed segment.seed: Sampler.seed
header.configurations header.seeds job.stages plan: Pbt.population, Sha.num_samples, Asha.num_samples,
    NoScheduler.num_samples, WrittenStage.trials
job.stages plan segment.max_iterations: Pbt.generations, Pbt.iterations, Sha.max_t, Asha.max_t, NoScheduler.max_t,
    WrittenStages.type, WrittenStages.stages, WrittenStage.iterations
explored guided job.stages plan: Pbt.type
job.stages: Pbt.quantile
explored: Pbt.perturb, Pbt.resample, Pbt.mutate
guided: Pbt.explore
job.stages plan: Sha.grace_period, Sha.reduction_factor, Asha.grace_period, Asha.reduction_factor, NoScheduler.type
header.configurations header.seeds job.brackets job.lane_instances job.stages plan segment.max_iterations:
    Hyperband.type, Hyperband.max_t
header.configurations header.seeds job.brackets job.stages plan: Hyperband.num_samples, Hyperband.reduction_factor
job.deadline_s measuring: Constraints.deadline
job.max_cost_usd measuring: Constraints.max_cost
job.confidence: Constraints.confidence
job.objective plan: Constraints.objective
job.iteration_timeout_s measuring: Constraints.iteration_timeout
job.max_failures: Constraints.max_failures
job.resize_in_stage: Constraints.resize_in_stage
attempt header.provider job.lease_s job.release_margin_s job.trains leases logs measuring offer.init_delay_s
    offer.instance_type offer.provision_delay_s plan segment: Resources.provider
ray.address: Resources.address
measured ray.group: Resources.node_labels
ec2.region measured: Resources.region
ec2.offers measured measuring offer.instance_type offer.price_usd_per_hour plan worker.InstanceType:
    Resources.instance_type, Resources.instance_types
offer.spot plan: Resources.market, Resources.spot, SpotMarket.price_per_hour, SpotMarket.interruptions_per_hour,
    SpotMarket.checkpoint_iterations, SpotMarket.restart
measured offer.max_instances: Resources.max_instances
job.max_gpus_per_trial measured: Resources.gpus_per_trial, GpusPerTrial.max
job.min_gpus_per_trial measured plan: GpusPerTrial.min
job.gpus_per_trial_sizes job.max_gpus_per_trial measured: GpusPerTrial.sizes
measured offer.trials_per_gpu plan segment.slots_on_machine segment.trials_per_gpu: Resources.trials_per_gpu
measured offer.gpus plan segment.slots_on_machine: Resources.slots, Resources.gpus_per_instance
measuring offer.price_usd_per_hour plan: Resources.price_per_hour
ec2.offers measuring offer.side_costs plan: Resources.side_price_per_hour
offer.billing plan: Resources.billing
offer.minimum_billed_s plan: Resources.minimum_billed
offer.provision_delay_s plan: Resources.provision_delay, LognormalDelay.mean
offer.init_delay_s plan: Resources.init_delay
offer.provision_spread plan: LognormalDelay.cv
offer.init_delay_s offer.init_spread plan: SampledDelay.samples
measuring offer.data_usd_per_instance plan: Resources.dataset_gb, Resources.data_price_per_gb
offer.head_price_usd_per_hour plan: Resources.head_price_per_hour
job.lease_s lease leases: Resources.lease
logs: Resources.log_limit
header.checkpoints: Resources.checkpoints
job.keep_best: Resources.keep
environment measured: Resources.env
environment: Resources.secrets
worker_script.FETCH: Resources.fetch, Fetch.models, Fetch.datasets, Fetch.from, Fetch.commits
ec2.offers measuring offer.side_costs plan worker.BlockDeviceMappings: Resources.aws, Aws.volume_gb
head.ImageId measured worker.ImageId: Aws.image
head.BlockDeviceMappings head_script.CONSTRAINTS head_script.MADE_OF head_script.REQUIREMENTS head_script.WHEELS
    measured worker_script.CONSTRAINTS worker_script.REQUIREMENTS worker_script.WHEELS: Aws.install
head_script.INDEX_URL head_script.MADE_OF head_script.REQUIREMENTS head_script.WHEELS worker_script.INDEX_URL
    worker_script.REQUIREMENTS worker_script.WHEELS: Aws.index_url
head_script.MADE_OF head_script.SETUP measured worker_script.SETUP: Aws.setup
head.SubnetId worker.SubnetId: Aws.subnets
head.SecurityGroupIds worker.SecurityGroupIds: Aws.security_group
worker: Aws.reservation
head worker: Aws.key_name
worker.IamInstanceProfile: Aws.worker_profile
head.IamInstanceProfile: Aws.head_profile
head.InstanceType: Aws.head_instance_type
head_script.IDLE_S head_script.MADE_OF: Aws.head_idle
ec2.guard: Aws.guard_role
head.TagSpecifications worker.TagSpecifications worker_script.TOKEN: Aws.owner
ec2.host: Aws.driver_address
measured plan profile.goodput profile.seconds_per_iteration segment.batch segment.known_points: Batch.policy
measured plan profile.goodput profile.seconds_per_iteration segment.batch: Batch.initial, Batch.max
measured profile.goodput segment.batch: Batch.max_per_gpu, Batch.accumulation
measured segment.batch: Batch.lr_scaling, Batch.warmup_epochs, Batch.interval
job.balances measured segment.balance: Batch.balance
measured segment.verify: Batch.verify
measured segment.balance: BatchBalance.policy, BatchBalance.max_share
attempt job.keeps_width measured profile.asynchronous segment.training: Training.mode
measured profile.asynchronous segment.training: Training.servers
measured segment.training: Training.max_staleness
trackers: Experiment.track, CsvTracker.folder, CsvTracker.type, TensorboardTracker.folder, TensorboardTracker.type,
    MlflowTracker.type, MlflowTracker.uri, MlflowTracker.experiment, WandbTracker.type, WandbTracker.project,
    WandbTracker.entity, WandbTracker.mode
notices: Experiment.notify, NotifyAddress.url_from, NotifyAddress.kinds
header.entrypoint: Program.command, Program.metrics, Program.launch, Program.booleans, Program.resume,
    Program.rank, BooleanWords.style, MetricsPlace.file, MetricsPlace.pattern
plan profile.seconds_per_iteration: Experiment.profile, ProfilesByType.by_instance_type,
    InlineProfile.seconds_per_iteration
job.stages plan profile.resumes: InlineProfile.resumes
plan profile.trial_cv: InlineProfile.trial_cv
plan profile.iteration_cv: InlineProfile.iteration_cv
plan profile.startup_cv: InlineProfile.startup_cv
plan profile.mean_cv: InlineProfile.mean_cv
profile.end_chance: InlineProfile.end_chance
plan profile.law: InlineProfile.noise
plan profile.trial_startup_s: InlineProfile.trial_startup
plan profile.checkpoint_load_s: InlineProfile.checkpoint_load
profile.first_iteration_extra_s: InlineProfile.first_iteration_extra
profile.cold_iteration_extra_s: InlineProfile.cold_iteration_extra
offer.provision_delay_s plan profile.provision_delay_s: InlineProfile.provision_delay
offer.init_delay_s plan profile.init_delay_s: InlineProfile.init_delay
plan profile.goodput profile.seconds_per_iteration: InlineProfile.goodput, GoodputWords.noise_scale,
    GoodputWords.samples_per_iteration, GoodputWords.limits, GoodputWords.overhead_s, ThroughputWords.alpha_grad_s,
    ThroughputWords.beta_grad_s, LimitsWords.initial, LimitsWords.max, LimitsWords.max_per_gpu,
    ThroughputWords.alpha_node_s of wider gangs
profile.asynchronous: InlineProfile.asynchronous, AsyncWords.updates_per_iteration
profile.goodput profile.seconds_per_iteration: GoodputWords.throughput, ThroughputWords.alpha_local_s,
    ThroughputWords.gamma
profile.goodput segment.known_points: GoodputWords.points, PointWords.instances, PointWords.gpus, PointWords.per_gpu,
    PointWords.accumulation, PointWords.step_s
profile.goodput: GoodputWords.fit_error, ThroughputWords.alpha_node_s, ThroughputWords.beta_local_s,
    ThroughputWords.beta_node_s
profile.asynchronous profile.seconds_per_iteration: AsyncWords.times, AsyncWords.overhead_s, AsyncWords.servers,
    AsyncWords.largest_shard, AsyncWords.blend, AsyncTimesWords.compute_s, AsyncTimesWords.up_s,
    AsyncTimesWords.down_s, AsyncTimesWords.server_s
header.checkpoints job.name worker.TagSpecifications: Experiment.name on EC2
job.lease_s lease leases worker_script.BOOT_S worker_script.LEASE_S: Resources.lease on EC2
ec2.offers measured offer.spot plan worker worker.SubnetId: Resources.market on EC2
ec2.offers job.boot_lease_s measuring offer.init_delay_s plan: Resources.init_delay on EC2
head_script.BUCKET header.checkpoints: Resources.checkpoints on EC2
measured offer.gpus plan ray.group segment.slots_on_machine: Resources.gpus_per_instance on Ray
drawn job.mode: Search.mode for a sampler that learns
drawn header.data_seed header.seeds segment.data_seed segment.seed: Sampler.seed for a sampler that learns
measured: LogUniform.base, QLogUniform.base, LogRandint.base, QLogRandint.base
"""
"""The wires on which the two values of keys differ, and these keys."""
OF_PARTS = ("batch", "constraints", "resources", "search", "training")
"""Keys of the experiment that are only the names of their parts."""
ELSEWHERE = {
    "Experiment.version": "one value",
    "LimitsWords.accumulation": "says how the profile was measured; plans and runs follow batch.accumulation",
    "Resources.catalogue": "test_catalogue.py: a table of one's own",
    "Resources.options": "test_example_provider.py: the words of an installed provider",
    "Search.warm_start": "test_warm_start.py: experiments of the home",
    "Resources.pool": "test_pool_file.py: a pool sets most of resources",
}


def _keys() -> set[str]:
    """All keys of the file, as `Definition.key` of its schema."""
    schema = Experiment.model_json_schema(by_alias=True)
    found = {f"Experiment.{key}" for key in schema["properties"] if key not in OF_PARTS}
    for name, definition in schema["$defs"].items():
        found |= {f"{name}.{key}" for key in definition.get("properties", ())}
    return found


def _expected() -> dict[str, set[str]]:
    found = {}
    for group in re.split(r"\n(?! )", EXPECTED.strip()):
        wires, _, names = group.partition(":")
        found |= {name: set(wires.split()) for name in re.split(r",\s+", " ".join(names.split()))}
    return found


@cache
def _wires(words: str) -> Words:
    with TemporaryDirectory() as folder:
        return wires(json.loads(words), Path(folder))


def differing(line: Line) -> set[str]:
    """Return the wires on which the two values of a line differ; of those that only one of them has, the first part."""
    base, path, *values = line
    found = []
    for value in values:
        words = copy.deepcopy(base)
        _set(words, path, value)
        found.append(_wires(json.dumps(words)))
    one, other = found
    apart = {name for name in one.keys() & other.keys() if one[name] != other[name]}
    return apart | {name.partition(".")[0] for name in one.keys() ^ other.keys()}


def test_every_key_has_a_line():
    known = {name.partition(" ")[0] for name in LINES} | ELSEWHERE.keys()
    assert _keys() - known == set(), "add a line with two values to LINES in test_words_to_wires.py"
    assert known - _keys() == set(), "the schema has these keys no more"


@pytest.mark.parametrize("name", LINES)
def test_a_key_changes_what_it_should_and_nothing_else(name):
    assert differing(LINES[name]) == _expected().get(name), f"{LINES[name][1]}: the wires that differ, and EXPECTED"
