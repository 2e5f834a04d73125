"""Compare predicted limits with runs: `python -m tests.bench.bench_limits agree|kept [COUNT] [PART …]`.

`agree`: COUNT caps and deadlines around the own ones of random plans, on each provider (EC2 is the fake). `estimate`
and the first remedy of it are compared with `run`, which goes as far as its first spending. `kept`: COUNT virtual runs
of random jobs with a cap, of each kind, with and without replanning: runs above the cap, and runs within their limits
beside the probability that was told. Prints figures, asserts none.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from rubberband.cloud.virtual import VirtualClock
from rubberband.errors import InfeasibleError, InputError
from rubberband.executor.core.budget import bill_usd
from rubberband.executor.core.controller import Controller
from rubberband.executor.core.state import Job
from rubberband.executor.journal.folder import ExperimentFolder
from rubberband.executor.run.driver import drive
from rubberband.executor.virtual.backend import VirtualBackend
from rubberband.executor.virtual.fleet import Noise
from rubberband.planning.feasible import Terms
from rubberband.planning.prices_and_quotas import EstimateAnswer, answer, live_terms
from rubberband.running import run as running
from rubberband.spec.experiment import Experiment
from rubberband.spec.loading import experiment_of
from rubberband.spec.pool import PoolFile, PoolFolder, on_pool
from rubberband.units import MONEY_SLACK_USD
from tests.builders.aws_account import Account
from tests.builders.memory import MemoryJournal
from tests.builders.plans import plan_job

Words = dict[str, Any]
LIMITS_EACH = 10
"""Caps and deadlines around one plan."""
PROVIDERS = ("local", "virtual", "aws", "pool")


class Begun(Exception):
    """A run has passed every refusal, and would spend now."""


# Estimate and run agree


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


def limits_around(chance: random.Random, told: EstimateAnswer) -> Words:
    """Return a cap and a deadline near those that the plan without limits keeps."""
    prediction = told.estimate.prediction
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
    terms = live_terms(experiment, home)
    return answer(experiment, profiles, terms, now=time.time(), clock=time.perf_counter)


def begins(words: Words, home: Path) -> bool:
    """Return whether `run` gets past its refusals."""
    folder = ExperimentFolder(home=home, name="limits")
    try:
        running.run_experiment(read(words, home), folder, check=False)
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
        told = estimated(limited, home)
        is_accepted = begins(limited, home)
        found["limits"] += 1
        found["feasible"] += told.estimate.feasible
        found["accepted"] += is_accepted
        if told.estimate.feasible != is_accepted:
            found["disagree"] += 1
            print("DISAGREE", provider, seed, limited["constraints"], told.estimate.reason, file=sys.stderr)
        for remedy in told.estimate.remedies[:1]:
            found["remedies"] += 1
            settings = [change.setting for change in remedy.changes]
            if not begins(with_changes(read(limited, home).to_words(), settings), home):
                found["refused"] += 1
                print("REFUSED", provider, seed, limited["constraints"], settings, file=sys.stderr)


def agree(count: int, providers: Sequence[str]) -> None:
    """Print the table."""
    heads = ("limits", "feasible", "accepted", "disagree", "remedies", "refused")
    print(f"{'provider':<10} " + " ".join(f"{head:>9}" for head in heads))
    with world() as (home, account):
        for provider in providers:
            found: Counter[str] = Counter()
            for seed in range(-(-count // LIMITS_EACH)):
                compare(provider, seed, home, account, found)
            print(f"{provider:<10} " + " ".join(f"{found[head]:>9}" for head in heads), flush=True)


# Promises are kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Of jobs: their market, objective, billing and scheduler."""

    spot: bool = False
    objective: str = "min_cost"
    billing: str = "per_instance"
    hyperband: bool = False
    deadline: bool = True
    slow_start: bool = False
    """Instances that start as slowly as on EC2, and stages of equally many trials, for which it pays to grow."""


KINDS: Mapping[str, Kind] = {
    "spot min_time": Kind(spot=True, objective="min_time", deadline=False),
    "spot slow start": Kind(spot=True, objective="min_time", deadline=False, slow_start=True),
    "spot min_cost": Kind(spot=True),
    "min_time": Kind(objective="min_time", deadline=False),
    "min_cost": Kind(),
    "hyperband": Kind(hyperband=True),
    "hyperband spot": Kind(hyperband=True, spot=True, objective="min_time", deadline=False),
    "per function": Kind(billing="per_function", objective="min_time", deadline=False),
}


def virtual_words(chance: random.Random, kind: Kind) -> Words:
    """Return the words of a random experiment of a kind, without limits."""
    single_s, efficiency = chance.uniform(5.0, 60.0), chance.uniform(0.6, 0.95)
    scheduler: Words = {
        "type": "sha",
        "num_samples": chance.choice([8, 16, 32]),
        "grace_period": chance.choice([1, 2, 4]),
        "max_t": chance.choice([27, 54]),
        "reduction_factor": chance.choice([2, 3]),
    }
    if kind.hyperband:
        scheduler = {"type": "hyperband", "max_t": 9, "reduction_factor": 3}
    words: Words = {
        "name": "kept",
        "search": {"space": {"lr": 0.1}, "scheduler": scheduler, "metric": "loss", "mode": "min"},
        "constraints": {"objective": kind.objective},
        "resources": {
            "provider": "virtual",
            "instance_type": "p3.8xlarge",
            "price_per_hour": 12.24,
            "max_instances": chance.choice([4, 8, 16]),
            "gpus_per_trial": {"max": 4},
            "billing": kind.billing,
            "provision_delay": {"mean": chance.uniform(5.0, 60.0), "cv": 0.3},
            "init_delay": {"mean": chance.uniform(5.0, 90.0), "cv": 0.3},
            "market": "spot" if kind.spot else "on_demand",
            "spot": {"price_per_hour": 4.0, "interruptions_per_hour": chance.choice([0.02, 0.2])},
        },
        "profile": {
            "seconds_per_iteration": {gpus: single_s / gpus**efficiency for gpus in (1, 2, 4)},
            "trial_startup": chance.uniform(1.0, 5.0),
            "trial_cv": chance.uniform(0.0, 0.2),
            "iteration_cv": chance.uniform(0.0, 0.3),
        },
    }
    if kind.slow_start:
        counts = chance.choice([((16, 2), (8, 6), (8, 20)), ((8, 4), (8, 30)), ((12, 3), (6, 9), (4, 27))])
        stages = [{"trials": trials, "iterations": iterations} for trials, iterations in counts]
        words["search"]["scheduler"] = {"type": "stages", "stages": stages}
        words["resources"]["init_delay"] = {"mean": chance.uniform(60.0, 300.0), "cv": 0.1}
        words["resources"]["spot"] = {"price_per_hour": chance.choice([2.0, 4.0]), "interruptions_per_hour": 0.02}
        words["profile"] |= {"trial_cv": 0.03, "iteration_cv": 0.05}
    return words


def planned_job(name: str, seed: int) -> tuple[Job, float] | None:
    """Return a random job with a cap, and its predicted probability; None if it is refused."""
    kind, chance = KINDS[name], random.Random(f"{name} {seed}")
    words = virtual_words(chance, kind)
    free = Experiment(**{**words, "constraints": {"objective": "min_cost"}})
    profile = free.loaded_profile()
    assert profile is not None, "it is written"
    prediction = plan_job(free, profile, now=0.0).prediction
    assert prediction.cost is not None
    assert prediction.jct is not None
    words["constraints"]["max_cost"] = prediction.cost.p95 * chance.uniform(1.0, 1.4)
    if kind.deadline:
        words["constraints"]["deadline"] = prediction.jct.p95 * chance.uniform(0.7, 1.2)
    try:
        job = plan_job(Experiment(**words), profile, now=0.0)
    except InfeasibleError:
        return None
    odds = answer(Experiment(**words), profile, Terms(), now=0.0, clock=time.perf_counter).estimate.odds
    return job, 1.0 if odds is None else odds.p_both


def outcome(job: Job, seed: int) -> tuple[bool, bool]:
    """Return whether a virtual run is above its cap, and whether it ends well within its limits."""
    clock, controller = VirtualClock(0.0), Controller(job)
    noise = Noise(job.profile, job.offer, seed=seed, now=clock.now)
    backend = VirtualBackend(job.name, job.offer, job.profile, metric=job.metric, faults=noise, clock=clock)
    finish = drive(controller, backend, MemoryJournal())
    state = controller.state
    assert job.max_cost_usd is not None
    is_above = bill_usd(job, state, state.now) > job.max_cost_usd + MONEY_SLACK_USD
    ended_at = state.stages[-1].ended_at
    in_time = job.deadline_s is None or (ended_at is not None and ended_at - state.started_at <= job.deadline_s + 1e-3)
    return is_above, finish.outcome == "done" and in_time and not is_above


def kept(count: int, names: Sequence[str]) -> None:
    """Print the table."""
    print(f"{'kind':<16} {'runs':>6} {'refused':>8} {'told':>7} {'kept':>7} {'fixed':>7} {'above':>6}")
    for name in names:
        told, ends, above, refused = list[float](), {True: list[bool](), False: list[bool]()}, 0, 0
        for seed in range(count):
            found = planned_job(name, seed)
            if found is None:
                refused += 1
                continue
            job, odds = found
            told.append(odds)
            for replans in (True, False):
                is_above, is_kept = outcome(replace(job, replan=replans), seed)
                ends[replans].append(is_kept)
                above += is_above
                if replans and not is_kept and ends[True] and odds > 0.9:
                    print("MISSED", name, seed, file=sys.stderr)
        shares = [statistics.fmean(each) if each else 0.0 for each in (told, ends[True], ends[False])]
        print(
            f"{name:<16} {len(told):>6} {refused:>8} "
            + " ".join(f"{share:>7.3f}" for share in shares)
            + f" {above:>6}",
            flush=True,
        )
    print(
        "told: mean probability that the plan keeps its limits. kept: share of runs that did, with replanning; fixed:"
    )
    print("without. above: runs of both that cost more than their cap.")


def main() -> None:
    """Print a table."""
    task, count, parts = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 100, sys.argv[3:]
    if task == "agree":
        agree(count, parts or PROVIDERS)
    elif task == "kept":
        kept(count, parts or list(KINDS))
    else:
        raise InputError(f"{task}: write agree or kept")


if __name__ == "__main__":
    main()
