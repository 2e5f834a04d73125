"""How many plan previews a second one server answers, by wrk: different ones, repeats, and what is refused.

Run: python tests/bench/bench_plans_api.py [SECONDS] [PLANNERS] [--plans N] [--only ROW]. It starts `rubberband serve`
with tokens, in a home of its own. With --plans, each row of different requests lasts until N are answered, however long
that takes: `--plans 5000 --only "different plans"` asks for 5,000 plans. Prints figures, asserts none.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_suffix(".lua")
NUMBER = "@NUMBER@"
MOST_S = 3600
"""Of a row that lasts until all is answered."""


def experiment(deadline_s: str, minutes: float = 20.0) -> str:
    """SHA(64, 4, 508, 2) on up to 16 instances of 4 GPUs."""
    words: dict[str, Any] = {
        "name": "bench",
        "search": {
            "space": {"lr": {"type": "loguniform", "lower": 1e-4, "upper": 1e-1}},
            "scheduler": {"type": "sha", "num_samples": 64, "grace_period": 4, "max_t": 508, "reduction_factor": 2},
            "metric": "accuracy",
            "mode": "max",
        },
        "constraints": {"deadline": deadline_s},
        "resources": {
            "provider": "virtual",
            "instance_type": "p3.8xlarge",
            "gpus_per_instance": 4,
            "price_per_hour": 12.24,
            "max_instances": 16,
            "gpus_per_trial": {"min": 1, "max": 16},
            "provision_delay": "15s",
            "init_delay": "15s",
        },
        "profile": {"seconds_per_iteration": {"1": 4, "2": 2.1, "4": 1.2, "8": 0.8, "16": 0.6}, "trial_startup": "2s"},
    }
    return json.dumps(words)


BODIES = {
    # A deadline of 20 minutes and so many milliseconds: no two are alike, as when the deadline is moved on the page.
    "different plans": (experiment("@20m@").replace('"@20m@"', f'"20m{NUMBER}s"'), "", 4),
    "different, 20 clients": (experiment("@21m@").replace('"@21m@"', f'"21m{NUMBER}s"'), "", 20),
    # So many milliseconds more for the start-up of a trial: nothing that was reckoned for another one is of use.
    "different jobs": (experiment("20m").replace('"2s"', f'"2{NUMBER}s"'), "", 4),
    "different infeasible": (experiment("@1m@").replace('"@1m@"', f'"1m{NUMBER}s"'), "", 4),
    "repeats, 4 clients": (experiment("20m"), "", 4),
    "repeats, 20 clients": (experiment("20m"), "", 20),
    "repeats with a query": (experiment("20m"), "?set=constraints.deadline%3D30m", 20),
    "repeated infeasible": (experiment("1m"), "", 20),
    "repeated malformed": ('{"name": NaN}', "", 20),
    "different malformed": (f'{{"name": {NUMBER}, "x": NaN}}', "", 20),
    "invalid query": (experiment("20m"), "?policy=best", 20),
}


@contextmanager
def serving(planners: int) -> Iterator[tuple[str, str, int]]:
    """The address, a token and the id of a server."""
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "RUBBERBAND_HOME": home}
        command = [sys.executable, "-m", "rubberband.cli"]
        token = subprocess.run(
            [*command, "token", "create", "bench"], env=environment, check=True, capture_output=True, text=True
        ).stdout.split()[-1]
        options = ["--port", "0", "--auth", "--rate", "0", "--planners", str(planners)]
        log = Path(home) / "server.log"
        with (
            log.open("w") as output,
            subprocess.Popen([*command, "serve", *options], env=environment, stdout=output, stderr=output) as server,
        ):
            try:
                yield _address(log), token, server.pid
            finally:
                server.terminate()


def _address(log: Path) -> str:
    while (found := re.search(r"http://[^\s/]+(?=[\s/])", log.read_text())) is None:
        time.sleep(0.1)
    return found[0]


def cpu_s(pid: int) -> tuple[float, float]:
    """CPU seconds of the server so far, and of the processes that it started."""
    used = {0: 0.0, 1: 0.0}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if pid in (int(stat.parent.name), int(fields[1])):
                used[int(stat.parent.name) != pid] += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return used[0], used[1]


def measure(address: str, token: str, name: str, seconds: int, count: int | None = None) -> str:
    """Return what wrk prints about one kind of request, after `seconds` or `count` answers."""
    body, query, clients = BODIES[name]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(body)
        file.flush()
        environment = {**os.environ, "BODY": file.name, "TOKEN": token, "COUNT": str(count or 0)}
        url = f"{address}/v1/plans{query}"
        command = [
            "wrk",
            "-t1",
            f"-c{clients}",
            f"-d{MOST_S if count else seconds}s",
            "--timeout",
            "30s",
            "-s",
            str(SCRIPT),
            url,
        ]
        printed = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    return next(line.removeprefix("RESULT ") for line in printed.splitlines() if line.startswith("RESULT"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seconds", type=int, nargs="?", default=10, help="of each row")
    parser.add_argument("planners", type=int, nargs="?", default=1, help="planning processes of the server")
    parser.add_argument("--plans", type=int, metavar="N", help="different requests that each of their rows answers")
    parser.add_argument("--only", action="append", choices=BODIES, metavar="ROW", help=", ".join(BODIES))
    given = parser.parse_args()
    if shutil.which("wrk") is None:
        print("wrk is not installed (apt install wrk): nothing is measured")
        return
    print(
        f"SHA(64, 4, 508, 2), {given.planners} planning process(es), {given.seconds} s each; latencies in ms; "
        f"load before: {os.getloadavg()[0]:.1f}"
    )
    with serving(given.planners) as (address, token, pid):
        measure(address, token, "repeats, 20 clients", 2)
        for name in given.only or BODIES:
            before = cpu_s(pid)
            expected = measure(address, token, name, given.seconds, given.plans if NUMBER in BODIES[name][0] else None)
            count = max(1, sum(int(each) for each in re.findall(r"(\d+)x\d", expected)))
            server_ms, planner_ms = ((after - was) * 1e3 / count for after, was in zip(cpu_s(pid), before, strict=True))
            print(f"{name:<24} {expected}  CPU ms each: server {server_ms:.2f}, planners {planner_ms:.2f}", flush=True)


if __name__ == "__main__":
    main()
