"""Experiment files of every kind by seed, most of them valid, and how each is estimated."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

Document = dict[str, Any]
INSTANCE_TYPES = {"p3.2xlarge": 1, "p3.8xlarge": 4, "p3.16xlarge": 8, "g4dn.xlarge": 1, "g5.12xlarge": 4}
"""Names of the catalogue, and the GPUs of each."""
POLICIES = ("optimal", "optimal", "optimal", "greedy", "static", "naive_elastic")
INVALID_EVERY = 8


def write_experiments(folder: Path, count: int) -> list[list[str]]:
    """Write `count` experiment files, and return the arguments of `rubberband estimate` for each.

    The arguments name the files relative to the folder above `folder`. The same count gives the same files.
    """
    folder.mkdir()
    commands = []
    for index in range(count):
        source = random.Random(f"experiment {index}")
        document = _experiment(source, index, folder)
        text = _text(document)
        if index % INVALID_EVERY == INVALID_EVERY - 1:
            text = source.choice(_FAULTS)(source, document)
        path = folder / f"{index:04}.yaml"
        path.write_text(text, encoding="utf-8")
        commands.append([f"{folder.name}/{path.name}", *_options(source, document, path)])
    return commands


def virtual_experiment(index: int) -> Document:
    """A small experiment on the virtual provider that is planned within its limits and has noise."""
    source = random.Random(f"virtual {index}")
    return {
        "version": 1,
        "name": f"virtual-{index}",
        "search": {
            "space": _space(source),
            "scheduler": {
                "type": "sha",
                "num_samples": source.randint(9, 40),
                "grace_period": source.choice([1, 2]),
                "max_t": source.choice([27, 54]),
                "reduction_factor": source.choice([2, 3]),
            },
            "metric": "accuracy",
            "mode": source.choice(["max", "min"]),
        },
        "constraints": {"deadline": source.choice(["2h", "5h"]), "max_cost": 400, "confidence": 0.8},
        "resources": {
            "provider": "virtual",
            "instance_type": source.choice(["p3.8xlarge", "g4dn.xlarge"]),
            "max_instances": source.randint(6, 16),
            "market": source.choice(["on_demand", "spot"]),
            "provision_delay": "20s",
            "init_delay": {"mean": "15s", "cv": 0.3},
        },
        "profile": {
            "seconds_per_iteration": {1: 60, 2: 32, 4: 18},
            "trial_startup": "2s",
            "trial_cv": 0.1,
            "iteration_cv": 0.1,
        },
    }


class _Dumper(yaml.SafeDumper):
    """Writes a value twice instead of an alias of it, which experiment files may not have."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(document: Document) -> str:
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False)


def _experiment(source: random.Random, index: int, folder: Path) -> Document:
    scheduler, trials, iterations = _scheduler(source)
    types = source.sample(sorted(INSTANCE_TYPES), source.choice([1, 1, 1, 1, 2, 3]))
    profile = _profile(source)
    document: Document = {
        "version": 1,
        "name": f"experiment-{index:04}",
        "search": {
            "space": _space(source),
            "scheduler": scheduler,
            "sampler": {"type": "random", "seed": source.randint(0, 99)},
            "metric": "loss",
            "mode": source.choice(["min", "max"]),
        },
        "resources": _resources(source, types),
        "profile": profile,
    }
    _adapt_batches(source, document)
    gpus = INSTANCE_TYPES[types[0]] * document["resources"]["max_instances"]
    rough_s = 120.0 + profile["seconds_per_iteration"][1] * max(1.5 * trials * iterations / gpus, iterations)
    document["constraints"] = _constraints(source, rough_s, gpus * 3.0)
    _place_profile(source, document, types, folder / f"{index:04}.json")
    return document


def _scheduler(source: random.Random) -> tuple[Document, int, int]:
    """A scheduler, about how many trials it starts, and about how many iterations each has on average."""
    kind = source.choice(["sha", "sha", "sha", "sha", "stages", "stages", "hyperband"])
    eta = source.choice([2, 3, 4])
    if kind == "hyperband":
        max_t = source.choice([4, 9, 16])
        return {"type": kind, "max_t": max_t, "reduction_factor": max(eta, 3)}, max_t, 6
    if kind == "sha":
        trials, max_t = source.randint(1, 40), source.choice([9, 27, 50])
        words = {"num_samples": trials, "grace_period": source.choice([1, 2, 4]), "max_t": max_t}
        return {"type": kind, **words, "reduction_factor": eta}, trials, max_t // 4
    trials, stages = source.randint(2, 40), []
    while trials and len(stages) < 4:
        stages.append({"trials": trials, "iterations": source.randint(1, 12)})
        trials //= eta
    return {"type": kind, "stages": stages}, stages[0]["trials"], 8


def _space(source: random.Random) -> Document:
    domains: Document = {
        "lr": {"type": "loguniform", "lower": 1e-4, "upper": 1e-1},
        "momentum": {"type": "uniform", "lower": 0.5, "upper": 0.99},
        "hidden": {"type": "choice", "values": [32, 64, 128]},
        "layers": {"type": "randint", "lower": 1, "upper": 6},
        "dropout": {"type": "quniform", "lower": 0.0, "upper": 0.5, "q": 0.1},
        "optimizer": "adam",
    }
    return {name: domains[name] for name in sorted(source.sample(sorted(domains), source.randint(1, 6)))}


def _profile(source: random.Random) -> Document:
    single_s, efficiency = source.uniform(5.0, 120.0), source.uniform(0.5, 1.0)
    most = source.choice([1, 4, 8, 8])
    table = {gpus: round(single_s / gpus**efficiency, 3) for gpus in (1, 2, 4, 8) if gpus <= most}
    profile: Document = {"seconds_per_iteration": table, "trial_startup": source.choice(["0s", "2s", "10s"])}
    if source.random() < 0.2:
        profile["trial_cv"] = round(source.uniform(0.02, 0.3), 3)
        profile["iteration_cv"] = source.choice([0.0, 0.2])
        profile["startup_cv"] = source.choice([0.0, 0.3])
        profile["mean_cv"] = source.choice([0.0, 0.05])
        profile["noise"] = source.choice(["lognormal", "normal"])
    return profile


def _resources(source: random.Random, types: Sequence[str]) -> Document:
    most = max(INSTANCE_TYPES[name] for name in types)
    resources: Document = {
        "provider": source.choice(["aws", "aws", "virtual", "local"]),
        "region": source.choice(["us-east-1", "us-east-1", "eu-west-1"]),
        "market": source.choice(["on_demand", "on_demand", "spot"]) if len(types) == 1 else "on_demand",
        "max_instances": source.randint(max(1, 8 // most), max(2, 32 // most)),
        "billing": source.choice(["per_instance", "per_instance", "per_function"]),
        "minimum_billed": source.choice(["0s", "1m"]),
        "dataset_gb": source.choice([0.0, 0.0, 50.0]),
        "data_price_per_gb": source.choice([0.0, 0.02]),
        "head_price_per_hour": source.choice([0.0, 0.2]),
    }
    resources |= {"instance_type": types[0]} if len(types) == 1 else {"instance_types": list(types)}
    if len(types) == 1 and source.random() < 0.5:
        resources["price_per_hour"] = round(3.06 * most * source.uniform(0.5, 1.5), 2)
    if source.random() < 0.6:
        resources["gpus_per_trial"] = {"min": source.choice([1, 1, 1, 2]), "max": source.choice([2, 4, 8])}
    if source.random() < 0.6:
        resources["provision_delay"] = source.choice(["15s", "2m", "90s", {"mean": "40s", "cv": 0.4}])
        resources["init_delay"] = source.choice(["15s", "1m30s", "10s", {"samples": ["12s", "15s", "31s"]}])
    if resources["market"] == "spot" and source.random() < 0.95:
        resources["spot"] = {
            "price_per_hour": round(0.9 * most, 2),
            "interruptions_per_hour": source.choice([0.02, 0.2, 1.0]),
            "checkpoint_iterations": source.choice([1, 3]),
            "restart": source.choice(["30s", "3m"]),
        }
    return resources


def _adapt_batches(source: random.Random, document: Document) -> None:
    if source.random() >= 0.2:
        return
    second_s = document["profile"]["seconds_per_iteration"][1]
    document["batch"] = {"policy": "goodput", "initial": 64, "max": source.choice([512, 4096])}
    document["profile"]["goodput"] = {
        "throughput": {
            "alpha_grad_s": round(second_s / 400, 5),
            "beta_grad_s": round(second_s / 12_000, 6),
            "alpha_local_s": 0.004,
            "alpha_node_s": 0.02,
            "gamma": 1.6,
        },
        "noise_scale": source.choice([100.0, 1500.0, 20_000.0]),
        "samples_per_iteration": 5000.0,
        "limits": {"initial": 64, "max": 4096, "max_per_gpu": source.choice([None, 256])},
        "overhead_s": 0.5,
    }


def _constraints(source: random.Random, rough_s: float, usd_per_hour: float) -> Document:
    constraints: Document = {"objective": source.choice(["min_cost", "min_cost", "min_time"])}
    deadline_s = round(rough_s * source.uniform(1.0, 8.0))
    written = source.choice(["seconds", "minutes", "minutes", "instant", "none"])
    if written == "instant":
        constraints["deadline"] = "2027-01-16T08:00:00Z"
    elif written != "none":
        constraints["deadline"] = f"{deadline_s}s" if written == "seconds" else f"{max(1, deadline_s // 60)}m"
    if constraints["objective"] == "min_time" or source.random() < 0.4:
        constraints["max_cost"] = round(rough_s / 3600.0 * usd_per_hour * source.uniform(0.4, 5.0), 2)
    if source.random() < 0.4:
        constraints["confidence"] = source.choice([0.5, 0.9, 0.99])
    return constraints


def _place_profile(source: random.Random, document: Document, types: Sequence[str], path: Path) -> None:
    """The profile inline, in a file of its own, or for each type."""
    profile = document["profile"]
    if len(types) > 1 and source.random() < 0.9:
        document["profile"] = {"by_instance_type": dict.fromkeys(types, profile)}
    elif source.random() < 0.2:
        written = {("trial_startup_s" if key == "trial_startup" else key): value for key, value in profile.items()}
        path.write_text(json.dumps({"schema": "rubberband.profile/1", **written}), encoding="utf-8")
        document["profile"] = path.name


def _options(source: random.Random, document: Document, path: Path) -> list[str]:
    options = ["--policy", source.choice(POLICIES)]
    if source.random() < 0.3:
        options += ["--seed", str(source.randint(1, 9))]
    if source.random() < 0.1:
        options += ["-s", source.choice(["constraints.deadline=3h", "resources.max_instances=3", "search.metrc=x"])]
    if source.random() < 0.08:
        options.append("--frontier")
    scheduler = document["search"].get("scheduler", {})
    if scheduler.get("type") == "stages" and source.random() < 0.4:
        stages = [{"instances": 2, "gpus_per_trial": 1}] * len(scheduler["stages"])
        plan = path.with_name(f"{path.stem}-plan.json")
        plan.write_text(json.dumps({"stages": stages}), encoding="utf-8")
        options += ["--plan", f"{path.parent.name}/{plan.name}"]
    return options


def _with(path: Sequence[str], value: Any) -> Callable[[random.Random, Document], str]:
    """A fault: the value at a key path replaced."""

    def broken(_: random.Random, document: Document) -> str:
        changed: Document = json.loads(json.dumps(document))
        target = changed
        for key in path[:-1]:
            if not isinstance(target.get(key), dict):
                target[key] = {}
            target = target[key]
        target[path[-1]] = value
        return _text(changed)

    return broken


def _cut(source: random.Random, document: Document) -> str:
    text = _text(document)
    return text[: source.randint(10, len(text) - 1)]


def _twice(_: random.Random, document: Document) -> str:
    return _text(document) + "name: again\n"


_FAULTS: tuple[Callable[[random.Random, Document], str], ...] = (
    _cut,
    _twice,
    *(_with(path, value) for path, value in yaml.safe_load(Path(__file__).with_name("faults.yaml").read_text("utf-8"))),
)
