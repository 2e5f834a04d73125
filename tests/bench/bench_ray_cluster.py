"""RubberBand and the schedulers of Ray Tune on one Ray cluster that is there already: prints a table, asserts nothing.

    python tests/bench/bench_ray_cluster.py [--runs 3] [--only NAME ...] [--keep FILE] [--limit 600]
    python tests/bench/bench_ray_cluster.py --table FILE

The search is that of `bench_ray_tune.py`. The cluster has four nodes with four logical GPUs each and stays up for all
runs. Contenders take turns. One meter holds for all: time is from the command to its end, and GPU-seconds are those
that Ray shows as taken, sampled ten times a second. FILE has a line of JSON for each run.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]

import ray  # noqa: E402
import yaml  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

from tests.bench import bench_ray_tune  # noqa: E402
from tests.bench.bench_ray_tune import EXAMPLE  # noqa: E402

NODES, GPUS = 4, 4
OBJECTIVES = {"rubberband-fast": "min_time", "rubberband-thrifty": "min_cost"}
TITLES = {
    "rubberband-fast": "RubberBand, the fastest plan",
    "rubberband-thrifty": "RubberBand, the fewest GPU-seconds within 68 s",
    **{name: title for name, title in bench_ray_tune.TITLES.items() if name != bench_ray_tune.OURS},
}
_SAMPLE_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one contender took, once."""

    contender: str
    outcome: str
    time_s: float
    gpu_s: float
    """GPU-seconds that Ray showed as taken."""
    iterations: int
    best_loss: float | None


@contextmanager
def cluster() -> Iterator[str]:
    """Yield the address of a cluster, to which this process is connected."""
    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "num_gpus": 0})
    try:
        for _ in range(NODES):
            started.add_node(num_cpus=2 * GPUS, num_gpus=GPUS)
        ray.init(address=started.address, log_to_driver=False)
        yield started.address
    finally:
        ray.shutdown()
        started.shutdown()


def _taken() -> float:
    return NODES * GPUS - ray.available_resources().get("GPU", 0.0)


class Meter:
    """Sums the GPU-seconds that are taken, in a thread, until it is stopped."""

    def __init__(self) -> None:
        self.gpu_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        before = time.monotonic()
        while not self._stop.wait(_SAMPLE_S):
            taken, now = _taken(), time.monotonic()
            self.gpu_s += taken * (now - before)
            before = now

    def stop(self) -> float:
        self._stop.set()
        self._thread.join()
        return self.gpu_s


def _file(contender: str, address: str, folder: Path) -> Path:
    """Write examples/scaling.yaml for the cluster, without money."""
    words = yaml.safe_load(EXAMPLE.read_text())
    words["constraints"] = {"deadline": "68s", "objective": OBJECTIVES[contender]}
    words["resources"] = {
        "provider": "ray",
        "address": address,
        "gpus_per_instance": GPUS,
        "max_instances": NODES,
        "gpus_per_trial": {"min": 1, "max": 8},
    }
    path = folder / "scaling.yaml"
    path.write_text(yaml.safe_dump(words, sort_keys=False))
    return path


def run(contender: str, address: str, limit_s: float) -> Run:
    """Run a contender in a process and a home of its own, and wait until the cluster is free again."""
    with tempfile.TemporaryDirectory(prefix="ray-cluster-", dir="/tmp", ignore_cleanup_errors=True) as place:
        folder, is_ours = Path(place), contender in OBJECTIVES
        if is_ours:
            command = ["-m", "rubberband.cli", "run", str(_file(contender, address, folder))]
        else:
            command = ["-m", "tests.bench.ray_tune_peers", contender, str(folder), str(limit_s), address]
        meter = Meter()
        outcome, time_s = bench_ray_tune.finished(command, folder, limit_s)
        until = time.monotonic() + 30.0
        while _taken() and time.monotonic() < until:
            time.sleep(_SAMPLE_S)
        gpu_s = meter.stop()
        if is_ours:
            done = bench_ray_tune.reported(bench_ray_tune.report("scaling", folder))
        else:
            done = bench_ray_tune.logged(folder / "iterations.jsonl")
        first = {(each.trial, each.iteration): each for each in done}
        return Run(
            contender=contender,
            outcome=outcome if not _taken() else f"{outcome}, but {_taken():g} GPUs are held",
            time_s=time_s,
            gpu_s=gpu_s,
            iterations=len(first),
            best_loss=min((each.loss for each in first.values()), default=None),
        )


def table(runs: Sequence[Run]) -> str:
    """Return a Markdown table: a row for each contender that ran, with medians and, where they differ, extremes."""
    spread = bench_ray_tune.spread
    rows = [["", "runs", "time (s)", "GPU-seconds", "iterations", "best loss"]]
    for contender, title in TITLES.items():
        mine = [each for each in runs if each.contender == contender]
        others = sorted({each.outcome for each in mine if each.outcome != "done"})
        if mine:
            rows.append(
                [
                    f"{title} ({'; '.join(others)})" if others else title,
                    str(len(mine)),
                    spread([each.time_s for each in mine], "{:.1f}"),
                    spread([each.gpu_s for each in mine], "{:.0f}"),
                    spread([each.iterations for each in mine], "{:.0f}"),
                    spread([each.best_loss for each in mine if each.best_loss is not None], "{:.3f}"),
                ]
            )
    return bench_ray_tune.markdown(rows)


def main() -> None:
    asked = bench_ray_tune.arguments(__doc__, TITLES).parse_args()
    if asked.table:
        print(table([Run(**json.loads(line)) for line in asked.table.read_text().splitlines()]))
        return
    with cluster() as address:
        runs = list(bench_ray_tune.in_turn(asked, TITLES, lambda contender: run(contender, address, asked.limit)))
    print(table(runs))


if __name__ == "__main__":
    main()
