"""One search by a scheduler of Ray Tune, on a fixed cluster of local instances or on a cluster that is there.

Not a program of its own: `bench_ray_tune.py` runs `python -m tests.bench.ray_tune_peers NAME FOLDER LIMIT_S` and ends
it where need be; `bench_ray_cluster.py` adds the address of its cluster. Below FOLDER, `cluster` has the instances'
records and `iterations.jsonl` a line for every iteration.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.execution.class_cache import _ActorClassCache
from ray.tune.schedulers import ASHAScheduler, HyperBandScheduler, ResourceChangingScheduler, TrialScheduler
from ray.tune.schedulers.hyperband import _Bracket
from ray.tune.schedulers.resource_changing_scheduler import DistributeResources

from rubberband.cloud.local.provider import LocalProvider
from rubberband.cloud.ray_head.ray_node import end_all
from rubberband.executor import Connection, Job
from rubberband.spec.schedulers import Sha
from tests.bench.bench_ray_tune import planned

_STORED = "iterations.txt"


class SleepingTrial(tune.Trainable):
    """The trial of examples/scaling.py in Ray Tune's words; it imports nothing of RubberBand."""

    def setup(self, config: dict[str, Any]) -> None:
        self.reset_config(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Let the actor go on with another trial."""
        self._search, self._configuration = new_config["search"], new_config["configuration"]
        self._done = 0
        return True

    def step(self) -> dict[str, float]:
        """Sleep e(g) seconds, g being the GPUs that the trial has now."""
        resources = self.trial_resources
        assert resources is not None
        gpus = int(resources.required_resources["GPU"])
        time.sleep(self._search["iteration_s"][gpus])
        self._done += 1
        loss = self._configuration["floor"] + self._done ** -self._configuration["decay"]
        line = json.dumps({"trial": self._configuration["trial"], "iteration": self._done, "gpus": gpus, "loss": loss})
        with open(self._search["log"], "a") as log:
            log.write(line + "\n")
        return {"loss": loss}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """The iterations done are the whole state; Ray Tune asks for it before it pauses a trial."""
        Path(checkpoint_dir, _STORED).write_text(str(self._done))

    def load_checkpoint(self, checkpoint: Any) -> None:
        self._done = int(Path(checkpoint, _STORED).read_text())


class OneBracket(HyperBandScheduler):
    """HyperBand with one bracket of all trials, whose rungs are those of ASHAScheduler with the same words.

    By itself HyperBandScheduler chooses brackets from max_t and reduction_factor alone.
    """

    def __init__(self, sha: Sha) -> None:
        super().__init__(max_t=sha.max_t, reduction_factor=sha.reduction_factor)
        self._sha = sha

    def _create_bracket(self, s: int) -> _Bracket:
        rung, halvings = self._sha.grace_period, 0
        while rung < self._sha.max_t:
            rung, halvings = rung * self._sha.reduction_factor, halvings + 1
        return _Bracket(
            time_attr=self._time_attr,
            max_trials=self._sha.num_samples,
            init_t_attr=self._sha.grace_period,
            max_t_attr=self._sha.max_t,
            eta=self._sha.reduction_factor,
            s=halvings,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """How Ray Tune is set."""

    scheduler: Callable[[Sha, int], TrialScheduler]
    """(the search, the most GPUs that a trial may have) -> the scheduler."""
    gpus: int = 1
    """Of each trial; ResourceChangingScheduler begins with them."""
    reuse_actors: bool = True
    """Start the next trial in a process that is there; ResourceChangingScheduler refuses that."""


def _asha(sha: Sha) -> ASHAScheduler:
    return ASHAScheduler(max_t=sha.max_t, grace_period=sha.grace_period, reduction_factor=sha.reduction_factor)


def _resource_changing(sha: Sha, most_gpus: int) -> ResourceChangingScheduler:
    """As Ray Tune's documentation has it: ASHA decides, and free GPUs go in equal parts to the trials that live.

    Bundles are added, so that a trial may be wider than an instance; with one bundle that grows it would not fit.
    """
    shares = DistributeResources(add_bundles=True, increase_by={"CPU": 1, "GPU": 1}, increase_by_times=most_gpus - 1)
    return ResourceChangingScheduler(base_scheduler=_asha(sha), resources_allocation_function=shares)


PEERS: Mapping[str, Peer] = {
    "hyperband-one": Peer(scheduler=lambda sha, _: OneBracket(sha)),
    "hyperband": Peer(
        scheduler=lambda sha, _: HyperBandScheduler(max_t=sha.max_t, reduction_factor=sha.reduction_factor)
    ),
    "asha": Peer(scheduler=lambda sha, _: _asha(sha)),
    "resource-changing": Peer(scheduler=_resource_changing, reuse_actors=False),
    "hyperband-one-wide": Peer(scheduler=lambda sha, _: OneBracket(sha), gpus=4),
    "asha-wide": Peer(scheduler=lambda sha, _: _asha(sha), gpus=4),
}


def _without_runtime_environment() -> None:
    """Let trials start like any other actor.

    Ray Tune gives them a runtime environment for a few variables that do nothing here. It takes an agent on every node,
    which local instances do without, and keeps a trial off the processes that Ray has started beforehand.
    """

    def get(self: _ActorClassCache, trainable: type) -> Any:
        if trainable not in self._cache:
            self._cache[trainable] = ray.remote(trainable)
        return self._cache[trainable]

    _ActorClassCache.get = get  # type: ignore[method-assign]


def search(peer: Peer, job: Job, sha: Sha, configurations: list[dict[str, Any]], folder: Path) -> None:
    """Run the search on the cluster that this process is connected to."""
    slots = job.offer.gpus * max(stage.instances for stage in job.plan.stages)
    fixed = {
        "iteration_s": [0.0, *(job.profile.iteration_s(gpus) for gpus in range(1, slots + 1))],
        "log": str(folder / "iterations.jsonl"),
    }
    numbered = [{**configuration, "trial": trial} for trial, configuration in enumerate(configurations)]
    bundle: dict[str, float] = {"CPU": peer.gpus, "GPU": peer.gpus}
    tuner = tune.Tuner(
        tune.with_resources(SleepingTrial, tune.PlacementGroupFactory([bundle])),
        param_space={"search": fixed, "configuration": tune.grid_search(numbered)},
        tune_config=tune.TuneConfig(
            metric=job.metric,
            mode=job.mode,
            scheduler=peer.scheduler(sha, job.profile.largest_gpus),
            reuse_actors=peer.reuse_actors,
        ),
        run_config=tune.RunConfig(name="search", storage_path=str(folder / "storage"), verbose=0),
    )
    tuner.fit()


def main(name: str, folder: Path, limit_s: float, address: str | None = None) -> None:
    """Search on the cluster at `address`, or on one that is started, and given back at once."""
    experiment, job = planned()
    sha = experiment.search.scheduler
    assert isinstance(sha, Sha)
    if address is not None:
        ray.init(address=address, log_to_driver=False)
        search(PEERS[name], job, sha, experiment.configurations(), folder)
        return
    wanted = max(stage.instances for stage in job.plan.stages)
    provider = LocalProvider("ray-tune", folder / "cluster", job.offer.gpus, lease_s=2.0 * limit_s)
    connection = Connection()
    _without_runtime_environment()
    try:
        for number in range(wanted):
            provider.launch(f"i-{number + 1:03}")
        connection.open(provider.ensure_head())
        while sum(instance.state == "running" for instance in provider.describe()) < wanted:
            time.sleep(0.05)
        search(PEERS[name], job, sha, experiment.configurations(), folder)
    finally:
        end_all(folder / "cluster" / "instances")
        connection.close()
        provider.close()


if __name__ == "__main__":
    os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"  # no tables and charts that nobody reads
    main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]), *sys.argv[4:])
