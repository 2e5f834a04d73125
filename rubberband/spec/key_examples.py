"""An example of each key of the experiment file, for editors (its JSON Schema) and for the page of the file.

Keys whose values are listed or that hold a section of their own need none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SPACE = {
    "lr": {"type": "loguniform", "lower": 1e-4, "upper": 0.1},
    "momentum": {"type": "uniform", "lower": 0.5, "upper": 0.99},
}
_SHA = {"type": "sha", "num_samples": 64, "grace_period": 1, "max_t": 85, "reduction_factor": 4}

EXAMPLES: Mapping[str, Mapping[str, Any]] = {
    "": {
        "version": 1,
        "name": "digits",
        "entrypoint": "my_module:MyTrial",
        "profile": {"seconds_per_iteration": {1: 60, 2: 32, 4: 18}, "trial_startup": "5s"},
        "track": ["csv", "tensorboard"],
        "notify": ["SLACK_WEBHOOK_URL"],
    },
    "Also": {"metric": "latency"},
    "Asha": {"num_samples": 64, "max_t": 81, "grace_period": 1, "reduction_factor": 3},
    "AsyncTimesWords": {"compute_s": 0.2, "up_s": 0.01, "server_s": 0.002, "down_s": 0.01},
    "AsyncWords": {"updates_per_iteration": 500, "overhead_s": 1.5, "servers": 2, "largest_shard": 0.6, "blend": 0.5},
    "Aws": {
        "image": "ami-0123456789abcdef0",
        "install": "scikit-learn pandas",
        "index_url": "https://packages.example.org/simple",
        "setup": ["apt-get install -y libsndfile1"],
        "subnets": ["subnet-0123456789abcdef0"],
        "security_group": "sg-0123456789abcdef0",
        "reservation": "cr-0123456789abcdef0",
        "key_name": "laptop",
        "worker_profile": "rubberband-worker",
        "head_profile": "rubberband-head",
        "head_instance_type": "m7i-flex.large",
        "head_idle": "30m",
        "guard_role": "rubberband-guard",
        "owner": "vision-team",
        "volume_gb": 200,
        "driver_address": "10.0.0.5",
    },
    "Batch": {
        "initial": 128,
        "max": 4096,
        "max_per_gpu": 256,
        "lr_scaling": "adascale",
        "warmup_epochs": 5,
        "interval": 20,
    },
    "BatchBalance": {"max_share": 0.5},
    "Choice": {"values": ["adam", "sgd"]},
    "Constraints": {
        "deadline": "2h",
        "max_cost": 20,
        "confidence": 0.95,
        "iteration_timeout": "10m",
        "max_failures": 2,
    },
    "CsvTracker": {"folder": "results/csv"},
    "GoodputWords": {
        "noise_scale": 500,
        "samples_per_iteration": 50000,
        "overhead_s": 3.5,
        "points": [],
        "fit_error": 0.04,
    },
    "GpusPerTrial": {"min": 1, "max": 4, "sizes": [1, 2, 4]},
    "Grid": {"values": [0.001, 0.01, 0.1]},
    "Hyperband": {"max_t": 27, "reduction_factor": 3, "num_samples": 49},
    "InlineProfile": {
        "seconds_per_iteration": {1: 60, 2: 32, 4: 18},
        "resumes": False,
        "trial_cv": 0.1,
        "iteration_cv": 0.05,
        "startup_cv": 0.2,
        "mean_cv": 0.05,
        "trial_startup": "5s",
        "first_iteration_extra": "2s",
        "cold_iteration_extra": "4s",
        "provision_delay": "90s",
        "init_delay": "3m",
    },
    "LimitsWords": {"initial": 128, "max": 4096, "max_per_gpu": 256},
    "LogRandint": {"lower": 16, "upper": 1025, "base": 10},
    "LogUniform": {"lower": 1e-4, "upper": 0.1, "base": 10},
    "LognormalDelay": {"mean": "90s", "cv": 0.3},
    "MetricsPlace": {"file": "${checkpoint}/metrics.jsonl", "pattern": "loss is (?P<loss>[0-9.]+)"},
    "MlflowTracker": {"uri": "http://mlflow.example.org:5000", "experiment": "digits"},
    "NoScheduler": {"num_samples": 50, "max_t": 1},
    "NotifyAddress": {"url_from": "SLACK_WEBHOOK_URL", "kinds": ["done", "failed"]},
    "PointWords": {"instances": 1, "gpus": 2, "per_gpu": 64, "accumulation": 0, "step_s": 0.12},
    "ProfilesByType": {"by_instance_type": {"g5.xlarge": "g5.profile.json", "g4dn.xlarge": "g4dn.profile.json"}},
    "Program": {"command": "python train.py --lr ${lr} --out ${checkpoint}", "resume": "--init_from=resume"},
    "QLogRandint": {"lower": 16, "upper": 1024, "q": 16, "base": 10},
    "QLogUniform": {"lower": 0.001, "upper": 1.0, "q": 0.001, "base": 10},
    "QRandint": {"lower": 16, "upper": 256, "q": 16},
    "QRandn": {"mean": 0.0, "sd": 1.0, "q": 0.5},
    "QUniform": {"lower": 0.0, "upper": 0.5, "q": 0.1},
    "Randint": {"lower": 1, "upper": 9},
    "Randn": {"mean": 0.0, "sd": 1.0},
    "Resources": {
        "provider": "aws",
        "pool": "team",
        "address": "10.0.0.5:6379",
        "node_labels": {"ray.io/accelerator-type": "A100"},
        "region": "eu-west-1",
        "instance_type": "g5.xlarge",
        "instance_types": ["g4dn.xlarge", "g5.xlarge"],
        "catalogue": "our-instances.csv",
        "max_instances": 8,
        "trials_per_gpu": 4,
        "slots": 4,
        "gpus_per_instance": 4,
        "price_per_hour": 3.06,
        "side_price_per_hour": 0.02,
        "minimum_billed": "60s",
        "provision_delay": "90s",
        "init_delay": {"mean": "3m", "cv": 0.2},
        "dataset_gb": 150,
        "data_price_per_gb": 0.02,
        "head_price_per_hour": 0.11,
        "lease": "10m",
        "log_limit": "64MB",
        "checkpoints": "s3://my-bucket/digits",
        "env": {"OMP_NUM_THREADS": "4"},
        "secrets": ["HF_TOKEN"],
        "options": {"zone": "a"},
    },
    "SampledDelay": {"samples": ["80s", "95s", "140s"]},
    "Sampler": {"seed": 7},
    "Search": {
        "space": _SPACE,
        "scheduler": _SHA,
        "points_to_evaluate": [{"lr": 0.01, "momentum": 0.9}],
        "evaluated_rewards": [0.93],
        "metric": "accuracy",
        "also": [{"metric": "latency", "mode": "min"}],
    },
    "Sha": {"num_samples": 64, "max_t": 85, "grace_period": 1, "reduction_factor": 4},
    "SpotMarket": {
        "price_per_hour": 0.3,
        "interruptions_per_hour": 0.05,
        "checkpoint_iterations": 1,
        "restart": "5m",
    },
    "TensorboardTracker": {"folder": "results/tensorboard"},
    "ThroughputWords": {
        "alpha_grad_s": 0.02,
        "beta_grad_s": 0.0005,
        "alpha_local_s": 0.005,
        "beta_local_s": 0.001,
        "alpha_node_s": 0.02,
        "beta_node_s": 0.002,
        "gamma": 1.5,
    },
    "Training": {"servers": 2, "max_staleness": 4},
    "Uniform": {"lower": 0.5, "upper": 0.99},
    "WandbTracker": {"project": "digits", "entity": "vision-team"},
    "WrittenStage": {"trials": 16, "iterations": 4},
    "WrittenStages": {"stages": [{"trials": 16, "iterations": 1}, {"trials": 4, "iterations": 4}]},
}
"""Name of the object in the schema (empty: the file itself) -> key -> an example."""


def add_examples(schema: dict[str, Any]) -> None:
    """Add the examples to the keys of a schema."""
    for name, examples in EXAMPLES.items():
        properties = (schema["$defs"][name] if name else schema)["properties"]
        for key, example in examples.items():
            properties[key]["examples"] = [example]
