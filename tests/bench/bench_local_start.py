"""Where the start of a run on this machine goes: instants from the command to the first step, CPU seconds by process.

Prints figures, asserts none. Wall times mean little where anything else runs; CPU seconds and counts do.

Run: python tests/bench/bench_local_start.py [--runs N] [FILE [OVERRIDE …]]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import psutil

from rubberband.executor import (
    Controller,
    ExperimentFolder,
    InstanceReady,
    InstanceRunning,
    Journal,
    Started,
    TrialStarted,
    replay,
    sqlite_url,
)
from rubberband.executor import read_journal as read
from rubberband.spec.loading import load_experiment

ROOT = Path(__file__).parents[2]
LOOK_S = 0.05
KINDS = {
    "import ray_node": "driver",
    "trial_log.py": "log pump",
    "gcs_server": "head's control store",
    "raylet/raylet": "raylet",
    "dashboard/dashboard.py": "dashboard",
    "ray::DashboardAgent": "dashboard agent",
    "dashboard/agent.py": "dashboard agent",
    "ray::RuntimeEnvAgent": "runtime environment agent",
    "runtime_env/agent": "runtime environment agent",
    "-I -S -c import os": "stand-in for an agent",
    "ray_head/instance.py": "guard of an instance",
    "ray_start": "ray start",
    "ray.scripts.scripts": "ray start",
    "ray::ForkServer": "fork server",
    "fork_server": "fork server",
    "ray::": "worker",
    "default_worker.py": "worker",
    "setup_worker.py": "worker",
    "rubberband": "driver",
}
"""Part of a command line -> what the process is; the first that is found."""


@dataclass(slots=True, kw_only=True)
class Seen:
    kind: str
    began_at: float
    cpu_s: float = 0.0


class Sampler:
    """Looks at the processes whose environment names `home`."""

    def __init__(self, home: Path) -> None:
        self._mark = f"RUBBERBAND_HOME={home}".encode()
        self._foreign: set[tuple[int, float]] = set()
        self.seen: dict[tuple[int, float], Seen] = {}

    def look(self) -> None:
        """Note what runs, and how much it has used."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                key = process.pid, process.create_time()
                if key in self._foreign:
                    continue
                if key not in self.seen and self._mark not in Path(f"/proc/{process.pid}/environ").read_bytes():
                    self._foreign.add(key)
                    continue
                command, times = " ".join(process.cmdline()), process.cpu_times()
                found = self.seen.setdefault(key, Seen(kind="", began_at=process.create_time()))
                found.kind = next((kind for part, kind in KINDS.items() if part in command), found.kind or command[:40])
                found.cpu_s = times.user + times.system

    def cpu_s(self) -> dict[str, tuple[int, float, float]]:
        """Kind -> how many there were, when the first one began, the CPU seconds of all."""
        kinds: defaultdict[str, list[Seen]] = defaultdict(list)
        for seen in self.seen.values():
            kinds[seen.kind].append(seen)
        return {
            kind: (len(found), min(seen.began_at for seen in found), sum(seen.cpu_s for seen in found))
            for kind, found in kinds.items()
        }


def busy_s() -> float:
    """CPU seconds that this whole machine has used."""
    times = psutil.cpu_times()
    return float(times.user + times.system + times.nice)


def instants(folder: ExperimentFolder) -> dict[str, list[float]]:
    """When the run began, and its instances ran, were ready, and trials began to train."""
    journal = Journal(sqlite_url(folder.journal), folder.name)
    names = {Started: "driver journals", InstanceReady: "workers warm", TrialStarted: "first steps"}
    found: dict[str, list[float]] = {name: [] for name in (*names.values(), "node has joined")}
    for _, event in journal.events():
        if isinstance(event, InstanceRunning):
            found["node has joined"].append(event.running_at)
        elif (name := names.get(type(event))) is not None:
            found[name].append(event.occurred_at)
    journal.close()
    return found


def first_step(folder: ExperimentFolder) -> bool:
    """Whether a trial trains already."""
    with contextlib.suppress(Exception):
        return bool(instants(folder)["first steps"])
    return False


def run(file: Path, overrides: list[str]) -> None:
    """One run, in a home of its own."""
    with tempfile.TemporaryDirectory() as home:
        experiment = load_experiment(file, overrides)
        folder = ExperimentFolder(home=Path(home), name=experiment.name)
        sampler = Sampler(Path(home))
        environment = os.environ | {"RUBBERBAND_HOME": home, "PYTHONPATH": str(ROOT)}
        command = ["rubberband", "run", str(file)]
        for override in overrides:
            command += ["-s", override]
        before_s, began_at = busy_s(), time.time()
        found = Path(home) / "told"
        with open(found, "w") as output:
            driver = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)
            at_step: dict[str, tuple[int, float, float]] = {}
            step_busy_s = 0.0
            while driver.poll() is None:
                sampler.look()
                if not at_step and folder.journal.exists() and first_step(folder):
                    at_step, step_busy_s = sampler.cpu_s(), busy_s() - before_s
                time.sleep(LOOK_S)
        ended_at, all_busy_s = time.time(), busy_s() - before_s
        if driver.returncode:
            print(found.read_text())
        print_timeline(instants(folder), sampler, at_step, began_at)
        print(f"  this machine was busy for {step_busy_s:.1f} CPU s until then, {all_busy_s:.1f} in all")
        print_end(folder, ended_at - began_at)


def print_timeline(
    found: dict[str, list[float]], sampler: Sampler, at_step: dict[str, tuple[int, float, float]], began_at: float
) -> None:
    """The instants, and the processes in the order in which they began."""
    for name, times in found.items():
        expected = ", ".join(f"{at - began_at:.1f}" for at in sorted(times)[:6])
        print(f"  {name:<22} {expected} s after the command")
    print(f"  {'process':<28} {'number':>6} {'first at':>9} {'CPU s to the first step':>24} {'in all':>8}")
    for kind, (number, first_at, cpu_s) in sorted(sampler.cpu_s().items(), key=lambda item: item[1][1]):
        until_s = at_step[kind][2] if kind in at_step else 0.0
        print(f"  {kind:<28} {number:>6} {first_at - began_at:>8.1f}s {until_s:>24.1f} {cpu_s:>8.1f}")
    total_s = sum(cpu_s for _, _, cpu_s in at_step.values())
    print(f"  {'all':<28} {'':>6} {'':>9} {total_s:>24.1f} {sum(seen.cpu_s for seen in sampler.seen.values()):>8.1f}")


def print_end(folder: ExperimentFolder, took_s: float) -> None:
    result = read(folder)
    journal = Journal(sqlite_url(folder.journal), folder.name)
    header = journal.header()
    assert header is not None
    replay(Controller(header.job), journal)
    journal.close()
    paid = result.paid
    print(
        f"  {took_s:.1f} s in all; JCT predicted {result.planned_jct_s:.1f} s, actual {result.actual_jct_s:.1f} s; "
        f"cost predicted {result.planned_cost_usd:.3f}, actual {result.actual_cost_usd:.3f} USD"
    )
    print(
        f"  of {paid.total_gpu_s:.0f} paid GPU s: training {paid.training_share:.1%} ({paid.training_gpu_s:.0f}), "
        f"start-up {paid.startup_gpu_s:.0f}, provisioning {paid.provisioning_gpu_s:.0f}, idle {paid.idle_gpu_s:.0f}, "
        f"minimum {paid.minimum_gpu_s:.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=ROOT / "examples" / "digits.yaml")
    parser.add_argument("overrides", nargs="*", default=[])
    parser.add_argument("--runs", type=int, default=1)
    chosen = parser.parse_args()
    overrides = chosen.overrides or ["profile.seconds_per_iteration={1: 0.8}", "profile.trial_startup=0.2s"]
    for number in range(chosen.runs):
        print(f"run {number + 1} of {chosen.runs}: {chosen.file.name} {' '.join(overrides)}")
        run(chosen.file.resolve(), overrides)


if __name__ == "__main__":
    main()
