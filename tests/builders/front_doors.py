"""Random experiments at two doors: what `estimate` says of caps and deadlines around a plan, and what `run` does.

`run` goes as far as its first spending; EC2 is the fake.
"""

from __future__ import annotations

import contextlib
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from rubberband.errors import InfeasibleError
from rubberband.executor import ExperimentFolder
from rubberband.planning.feasible import PlanningOptions
from rubberband.planning.prices_and_quotas import EstimateAnswer, answer, live_prices_and_quotas
from rubberband.running import run as running
from rubberband.spec.experiment import Experiment
from rubberband.spec.loading import experiment_of
from rubberband.spec.pool import PoolFile, PoolFolder, on_pool
from tests.builders.aws_account import Account

Words = dict[str, Any]
LIMITS_EACH = 10
"""Caps and deadlines around one plan."""


class Begun(Exception):
    """A run has passed every refusal, and would spend now."""


def experiment_words(chance: random.Random, provider: str, account: Account) -> Words:
    """Return the words of a random small experiment."""
    single_s, efficiency = chance.uniform(5.0, 90.0), chance.uniform(0.6, 0.95)
    profile: Words = {
        "seconds_per_iteration": {gpus: single_s / gpus**efficiency for gpus in (1, 2, 4)},
        "trial_startup": chance.uniform(0.5, 5.0),
    }
    if chance.random() < 0.4:
        profile |= {"trial_cv": 0.1, "iteration_cv": 0.2}
    resources: Words = {"max_instances": chance.choice([2, 4, 8, 12])}
    types = ["p3.8xlarge"]
    if provider == "aws":
        types = chance.choice([["g5.xlarge"], ["g5.12xlarge"], ["g4dn.12xlarge"], ["g5.12xlarge", "g4dn.12xlarge"]])
        market = chance.choice(["on_demand", "spot"]) if len(types) == 1 else "on_demand"
        resources |= {"provider": "aws", "instance_types": types, "market": market}
        resources |= {"aws": {"install": "none", "driver_address": "127.0.0.1"}}
        resources |= {"checkpoints": f"s3://{account.bucket}/limits"}
    elif provider == "pool":
        resources |= {"pool": "team"}
    else:
        resources |= {"provider": provider, "price_per_hour": 12.24, "gpus_per_instance": 4}
        resources |= {"instance_type": types[0]}
        resources |= {"gpus_per_trial": {"max": 4}, "billing": chance.choice(["per_instance"] * 3 + ["per_function"])}
        if provider == "virtual":
            resources |= {"market": chance.choice(["on_demand", "spot"]), "init_delay": chance.choice([0, 20, 60])}
    scheduler: Words = {"type": "sha", "num_samples": chance.randint(4, 32), "max_t": chance.choice([9, 27])}
    if chance.random() < 0.15:
        scheduler = {"type": "hyperband", "max_t": 9, "reduction_factor": 3}
    return {
        "name": "limits",
        "entrypoint": "examples.scaling:ScalingTrial",
        "search": {"space": {"lr": 0.1}, "scheduler": scheduler, "metric": "loss", "mode": "min"},
        "constraints": {"objective": chance.choice(["min_cost", "min_time"])},
        "resources": resources,
        "profile": profile if len(types) == 1 else {"by_instance_type": dict.fromkeys(types, profile)},
    }


def limits_around(chance: random.Random, found: EstimateAnswer) -> Words:
    """Return a cap and a deadline near those that the plan without limits keeps."""
    prediction = found.estimate.prediction
    assert prediction is not None, "without limits there is a plan"
    cost_usd = prediction.cost_usd if prediction.cost is None else prediction.cost.p95
    jct_s = prediction.jct_s if prediction.jct is None else prediction.jct.p95
    limits: Words = {"max_cost": round(cost_usd * chance.uniform(0.97, 1.12), 4) or 0.01}
    if chance.random() < 0.6:
        limits["deadline"] = f"{round(jct_s * chance.uniform(0.9, 1.3)) + 1}s"
    return limits


def estimated(words: Words, home: Path) -> EstimateAnswer:
    """Return the answer of `estimate` (on EC2 of `plan`, with live prices)."""
    experiment = read(words, home)
    profiles = experiment.loaded_profiles()
    assert profiles is not None, "it is written"
    prices = live_prices_and_quotas(experiment, home)
    return answer(experiment, profiles, prices, PlanningOptions(now=time.time(), clock=time.perf_counter))


def begins(words: Words, home: Path) -> bool:
    """Return whether `run` gets past its refusals."""
    folder = ExperimentFolder(home=home, name="limits")
    try:
        running.run_experiment(read(words, home), folder, running.RunOptions(check=False))
    except Begun:
        return True
    except InfeasibleError:
        return False
    raise AssertionError("it neither began nor was refused")


def read(words: Words, home: Path) -> Experiment:
    """Return the experiment of the words, on its pool if it has one."""
    return Experiment(**on_pool(words, home))


def with_changes(words: Words, settings: Sequence[str]) -> Words:
    """Return the words with the settings of a remedy."""
    return experiment_of(words, overrides=settings).to_words()


@contextlib.contextmanager
def world() -> Iterator[tuple[Path, Account]]:
    """A home with a pool, and an account; runs end where they would spend."""

    def create(*_: object) -> None:
        raise Begun

    account = Account()
    with (
        tempfile.TemporaryDirectory() as path,
        mock.patch.object(running, "create", create),
        mock.patch("rubberband.cloud.aws.calls.open_aws", return_value=account.session),
    ):
        home = Path(path)
        pool = PoolFile(name="team", instances=8, gpus_per_instance=4, price_per_hour=6.0, max_usd_per_hour=48.0)
        PoolFolder(path=home / "pools" / "team").write(pool.model_dump(mode="json", by_alias=True, exclude_none=True))
        yield home, account


def compare(
    provider: str, seed: int, home: Path, account: Account, found: Counter[str], limits: int = LIMITS_EACH
) -> None:
    """Count how often the front doors agree about the limits of one random experiment."""
    chance = random.Random(f"{provider} {seed}")
    words = experiment_words(chance, provider, account)
    free = estimated(words, home)
    for _ in range(limits):
        limited = {**words, "constraints": words["constraints"] | limits_around(chance, free)}
        text = estimated(limited, home)
        is_accepted = begins(limited, home)
        found["limits"] += 1
        found["feasible"] += text.estimate.feasible
        found["accepted"] += is_accepted
        if text.estimate.feasible != is_accepted:
            found["disagree"] += 1
            print("DISAGREE", provider, seed, limited["constraints"], text.estimate.reason, file=sys.stderr)
        for remedy in text.estimate.remedies[:1]:
            found["remedies"] += 1
            settings = [change.setting for change in remedy.changes]
            if not begins(with_changes(read(limited, home).to_words(), settings), home):
                found["refused"] += 1
                print("REFUSED", provider, seed, limited["constraints"], settings, file=sys.stderr)
