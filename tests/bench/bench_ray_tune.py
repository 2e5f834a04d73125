"""RubberBand and the schedulers of Ray Tune on the same search, side by side: prints a table, asserts nothing.

    python tests/bench/bench_ray_tune.py [--runs 3] [--only NAME ...] [--keep FILE] [--limit 600] [-o text|json]
    python tests/bench/bench_ray_tune.py --table FILE

The search is examples/scaling.yaml: 16 trials that sleep as long as its profile says. Ray Tune has a fixed cluster as
wide as RubberBand's plan is at its widest. All get the same configurations, the same successive halving and local
instances of the same price, and one meter holds for all: time is from the command to its end, when all is given back;
an instance is billed from when its node has joined to its end, by the experiment's price and minimum; of the time so
paid, iterations train. Contenders take turns. FILE has a line of JSON for each run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]

from rubberband.cloud.ray_head.instance import load, tagged  # noqa: E402
from rubberband.cloud.ray_head.ray_node import end_all  # noqa: E402
from rubberband.executor import ExperimentFolder, Job  # noqa: E402
from rubberband.spec.experiment import Experiment  # noqa: E402
from rubberband.spec.loading import load_experiment  # noqa: E402
from rubberband.values.offer import Offer  # noqa: E402
from rubberband.values.profile import Profile  # noqa: E402
from tests.builders.plans import plan_job  # noqa: E402

EXAMPLE = ROOT / "examples" / "scaling.yaml"
OURS = "rubberband"
TITLES = {
    OURS: "RubberBand",
    "hyperband-one": "HyperBandScheduler, one bracket, 1 GPU per trial",
    "hyperband": "HyperBandScheduler, default brackets, 1 GPU per trial",
    "asha": "ASHAScheduler, 1 GPU per trial",
    "resource-changing": "ResourceChangingScheduler on ASHA, 1 to 8 GPUs per trial",
    "hyperband-one-wide": "HyperBandScheduler, one bracket, 4 GPUs per trial",
    "asha-wide": "ASHAScheduler, 4 GPUs per trial",
}
"""Contender -> its name in the table. What is set for each is in ray_tune_peers.py."""
_OUTCOMES = {0: "done", 4: "late"}
"""Exit code -> outcome; only RubberBand knows of the deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    trial: int
    iteration: int
    """Of the trial, from 1."""
    gpus: int
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one contender took, once."""

    contender: str
    outcome: str
    """`done`, `late` (done, after the deadline), or why it did not finish."""
    time_s: float
    cost_usd: float
    training_share: float
    """Of the GPU-seconds paid for; 0 if there were none."""
    iterations: int
    best_loss: float | None
    """The least that any trial reported; None if none did."""
    ran_at: str
    machine: str
    versions: str


def planned() -> tuple[Experiment, Job]:
    """The example, and RubberBand's plan for it."""
    experiment = load_experiment(EXAMPLE)
    profiles = experiment.loaded_profiles()
    assert profiles is not None, "the example has its profile inline"
    return experiment, plan_job(experiment, profiles)


def metered(
    contender: str,
    outcome: str,
    time_s: float,
    held_s: Sequence[float],
    done: Iterable[Iteration],
    *,
    offer: Offer,
    profile: Profile,
) -> Run:
    """Measure a run by how long each instance was held and which iterations were done; one done again counts once."""
    first = {(each.trial, each.iteration): each for each in reversed(list(done))}
    trained_gpu_s = sum(each.gpus * profile.iteration_s(each.gpus) for each in first.values())
    paid_gpu_s = offer.gpus * sum(max(seconds, offer.minimum_billed_s) for seconds in held_s)
    return Run(
        contender=contender,
        outcome=outcome,
        time_s=time_s,
        cost_usd=sum(offer.instance_cost_usd(seconds) for seconds in held_s),
        training_share=trained_gpu_s / paid_gpu_s if paid_gpu_s else 0.0,
        iterations=len(first),
        best_loss=min((each.loss for each in first.values()), default=None),
        ran_at=time.strftime("%Y-%m-%d", time.gmtime()),
        machine=f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, Python {platform.python_version()}",
        versions=f"rubberband-tune {version('rubberband-tune')}, Ray {version('ray')}",
    )


def reported(report: Mapping[str, Any]) -> list[Iteration]:
    """The iterations in RubberBand's report (`-o json`): a trial had as many GPUs as were busy with it."""
    stretches = Counter((busy["trial"], busy["start_s"], busy["end_s"]) for busy in report["busy"])
    found = []
    for trial in report["trials"]:
        for at_s, iteration, metrics in trial["curve"]:
            gpus = next(
                gpus
                for (busy_with, start_s, end_s), gpus in stretches.items()
                if busy_with == trial["trial"] and start_s < at_s <= end_s
            )
            found.append(
                Iteration(trial=trial["trial"], iteration=iteration, gpus=gpus, loss=metrics[report["metric"]])
            )
    return found


def held_s(cluster: Path) -> list[float]:
    """How long each instance of the local provider at `cluster` ran, by its record."""
    records = [load(path) for path in (cluster / "instances").glob("*.json")]
    return [
        record.ended_at - record.running_at
        for record in records
        if record.running_at is not None and record.ended_at is not None
    ]


def run(contender: str, job: Job, limit_s: float) -> Run:
    """Run a contender in a process and a home of its own, and end whatever it leaves."""
    with tempfile.TemporaryDirectory(prefix="ray-tune-", dir="/tmp", ignore_cleanup_errors=True) as place:
        folder = Path(place)
        is_ours = contender == OURS
        cluster = ExperimentFolder(home=folder, name=job.name).instances if is_ours else folder / "cluster"
        if is_ours:
            command = ["-m", "rubberband.cli", "run", str(EXAMPLE)]
        else:
            command = ["-m", "tests.bench.ray_tune_peers", contender, str(folder), str(limit_s)]
        outcome, time_s = finished(command, folder, limit_s)
        for kind in ("instances", "heads"):
            end_all(cluster / kind)
        left = tagged(str(cluster))
        assert not (left and is_ours), f"{contender} left {len(left)} processes behind"
        done = reported(report(job.name, folder)) if is_ours else logged(folder / "iterations.jsonl")
        return metered(contender, outcome, time_s, held_s(cluster), done, offer=job.offer, profile=job.profile)


def _environment(home: Path) -> dict[str, str]:
    inherited = {key: value for key, value in os.environ.items() if key != "RUBBERBAND_STORE"}
    return {**inherited, "RUBBERBAND_HOME": str(home), "PYTHONPATH": str(ROOT)}


def finished(command: Sequence[str], folder: Path, limit_s: float) -> tuple[str, float]:
    """How the command ended, and after how many seconds."""
    log = folder / "log"
    began_s = time.monotonic()
    with open(log, "w") as said:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env=_environment(folder), stdout=said, stderr=said
        )
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"not finished within {limit_s:.0f} s", limit_s
        finally:
            process.kill()
            process.wait()
    time_s = time.monotonic() - began_s
    if status not in _OUTCOMES:
        print(log.read_text()[-4000:], file=sys.stderr)
    return _OUTCOMES.get(status, f"failed with exit code {status}"), time_s


def report(name: str, home: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "rubberband.cli", "report", name, "-o", "json"]
    process = subprocess.run(command, cwd=ROOT, env=_environment(home), stdout=subprocess.PIPE, check=False)
    found: dict[str, Any] = json.loads(process.stdout)
    return found


def logged(path: Path) -> list[Iteration]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [Iteration(**json.loads(line)) for line in lines]


def kept(path: Path) -> list[Run]:
    """The runs of a file that `--keep` wrote."""
    return [Run(**json.loads(line)) for line in path.read_text().splitlines()]


def table(runs: Sequence[Run]) -> str:
    """A Markdown table: a row for each contender that ran, with medians of its runs, and extremes where they differ."""
    rows = [["", "runs", "time (s)", "cost (USD)", "paid time that trains", "iterations", "best loss"]]
    for contender, title in TITLES.items():
        mine = [each for each in runs if each.contender == contender]
        if not mine:
            continue
        others = Counter(each.outcome for each in mine if each.outcome != "done")
        notes = [f"{outcome} in {count} of {len(mine)}" for outcome, count in sorted(others.items())]
        rows.append(
            [
                f"{title} ({'; '.join(notes)})" if notes else title,
                str(len(mine)),
                spread([each.time_s for each in mine], "{:.1f}"),
                spread([each.cost_usd for each in mine], "{:.2f}"),
                spread([100.0 * each.training_share for each in mine], "{:.0f}") + " %",
                spread([each.iterations for each in mine], "{:.0f}"),
                spread([each.best_loss for each in mine if each.best_loss is not None], "{:.3f}"),
            ]
        )
    return markdown(rows)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table whose first row is the head and whose first column is of words."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    ruled = [rows[0], ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])], *rows[1:]]
    return "\n".join(f"| {' | '.join(map(_padded, row, widths, range(len(row))))} |" for row in ruled)


def _padded(cell: str, width: int, column: int) -> str:
    return cell.rjust(width) if column else cell.ljust(width)


def spread(values: Sequence[float], form: str) -> str:
    """The median, and from where to where the values go if that shows."""
    if not values:
        return "-"
    middle, least, most = (form.format(value) for value in (statistics.median(values), min(values), max(values)))
    return middle if least == most else f"{middle} ({least} to {most})"


def arguments(description: str | None, titles: Iterable[str]) -> argparse.ArgumentParser:
    """Return the parser of a comparison's options; `titles` are the names of its contenders."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="of every contender, in turn")
    parser.add_argument("--only", action="append", choices=titles, help="a contender; may be given several times")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="append each run to FILE, a line of JSON each")
    parser.add_argument("--table", type=Path, metavar="FILE", help="run nothing: print the table of what FILE has")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds after which a contender is ended")
    return parser


def in_turn(asked: argparse.Namespace, titles: Iterable[str], run: Callable[[str], Any]) -> Iterator[Any]:
    """Run each contender that is asked for, as often as that is asked for, and keep what it took."""
    for turn in range(1, asked.runs + 1):
        for contender in asked.only or titles:
            print(f"run {turn} of {asked.runs}: {contender}", file=sys.stderr, flush=True)
            ran = run(contender)
            if asked.keep:
                with open(asked.keep, "a") as file:
                    file.write(json.dumps(asdict(ran)) + "\n")
            yield ran


def main() -> None:
    parser = arguments(__doc__, TITLES)
    parser.add_argument("-o", choices=["text", "json"], default="text", help="what to print")
    asked = parser.parse_args()
    if asked.table:
        runs = kept(asked.table)
    else:
        _, job = planned()
        runs = list(in_turn(asked, TITLES, lambda contender: run(contender, job, asked.limit)))
    if asked.o == "json":
        print(json.dumps([asdict(each) for each in runs], indent=2))
    else:
        print(table(runs))
        print("\n".join(sorted({f"{each.ran_at}; {each.machine}; {each.versions}" for each in runs})))


if __name__ == "__main__":
    main()
