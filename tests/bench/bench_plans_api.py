"""How many plan previews a second one server answers: different ones, repeats, and what is refused.

wrk asks, where it is installed; else threads of a process do, whose own work limits repeats to 2,000 a second. The
row `twenty jobs` asks for one preview after another, of all schedulers and sizes, and gives the CPU of the dearest.

Run: python tests/bench/bench_plans_api.py [SECONDS] [PLANNERS] [--plans N] [--only ROW]. It starts `rubberband serve`
with tokens, in a home of its own. With --plans, each row of different requests lasts until N are answered, however long
that takes: `--plans 5000 --only "different plans"` asks for 5,000 plans. Prints figures, asserts none.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_suffix(".lua")
NUMBER = "@NUMBER@"
MOST_S = 3600
"""Of a row that lasts until all is answered."""


SHA: Mapping[str, Any] = {"type": "sha", "num_samples": 64, "grace_period": 4, "max_t": 508, "reduction_factor": 2}


def experiment(deadline: str | None, scheduler: Mapping[str, Any] = SHA) -> str:
    """SHA(64, 4, 508, 2), or another job, on up to 16 instances of 4 GPUs."""
    words: dict[str, Any] = {
        "name": "bench",
        "search": {
            "space": {"lr": {"type": "loguniform", "lower": 1e-4, "upper": 1e-1}},
            "scheduler": dict(scheduler),
            "metric": "accuracy",
            "mode": "max",
        },
        "constraints": {} if deadline is None else {"deadline": deadline},
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


TWENTY = "twenty jobs"
ROUNDS = 3
JOBS: Sequence[Mapping[str, Any]] = (
    *({**SHA, "num_samples": trials} for trials in (16, 64, 256, 1024, 4096, 20_000)),
    *({**SHA, "num_samples": trials, "reduction_factor": 4} for trials in (64, 4096)),
    *({"type": "hyperband", "max_t": max_t, "reduction_factor": 3} for max_t in (27, 81, 243)),
    *({"type": "pbt", "population": size, "generations": 10, "iterations": 5} for size in (8, 64)),
    *(
        {"type": "stages", "stages": [{"trials": trials, "iterations": 4}, {"trials": trials // 4, "iterations": 16}]}
        for trials in (16, 20_000)
    ),
    *({"type": "none", "num_samples": trials, "max_t": 50} for trials in (16, 256, 2000)),
    *({"type": "asha", "num_samples": trials, "max_t": 508, "grace_period": 4} for trials in (16, 64)),
)


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
    """Return a line about one kind of request, after `seconds` or `count` answers."""
    body, query, clients = BODIES[name]
    url = f"{address}/v1/plans{query}"
    if shutil.which("wrk") is None:
        asked = json.dumps([url, token, body, clients, MOST_S if count else seconds, count])
        command = [sys.executable, __file__, "--ask", asked]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(body)
        file.flush()
        environment = {**os.environ, "BODY": file.name, "TOKEN": token, "COUNT": str(count or 0)}
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


def by_threads(url: str, token: str, body: str, clients: int, seconds: float, count: int | None) -> str:
    """Return what wrk would print, with a connection and a thread for each client."""
    parts, numbers, end_s = urlsplit(url), itertools.count(1), time.monotonic() + seconds
    path = f"{parts.path}?{parts.query}" if parts.query else parts.path
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}

    def ask(_: int) -> list[tuple[float, int]]:
        assert parts.hostname is not None, "an address of a server"
        found, to = list[tuple[float, int]](), http.client.HTTPConnection(parts.hostname, parts.port, timeout=30)
        while time.monotonic() < end_s and (number := next(numbers)) <= (count or math.inf):
            began_s = time.monotonic()
            to.request("POST", path, body.replace(NUMBER, f"{number / 1000:.3f}"), headers)
            answer = to.getresponse()
            answer.read()
            found.append((time.monotonic() - began_s, answer.status))
        to.close()
        return found

    began_s = time.monotonic()
    with ThreadPoolExecutor(clients) as threads:
        answers = [one for some in threads.map(ask, range(clients)) for one in some]
    took_s, waits_ms = time.monotonic() - began_s, sorted(1e3 * wait_s for wait_s, _ in answers)
    shares = " ".join(f"p{part}={waits_ms[part * (len(answers) - 1) // 100]:.1f}" for part in (50, 90, 99))
    statuses = ",".join(f"{times}x{status}" for status, times in Counter(status for _, status in answers).items())
    return f"rate={len(answers) / took_s:.1f} {shares} max={waits_ms[-1]:.1f} answers={statuses}"


def twenty_jobs(address: str, token: str, pid: int) -> str:
    """Return the CPU of the planning processes for a preview of each of some jobs: the least of a few rounds."""
    host = http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)
    headers, cost_ms = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}, dict[str, float]()
    for at in range(ROUNDS):
        for job in JOBS:
            before_ms, body = planners_ms(pid), experiment(None, job).replace('"2s"', f'"2.{at + 1}s"')
            host.request("POST", "/v1/plans", body, headers)
            answer, name = host.getresponse(), f"{job['type']} {next(iter(list(job.values())[1:]))}"
            text = answer.read()
            if answer.status != 200:
                return f"{name}: {text[:200]!r}"
            cost_ms[name] = min(cost_ms.get(name, math.inf), planners_ms(pid) - before_ms)
    return f"CPU ms: median {median(cost_ms.values()):.1f}; " + ", ".join(
        f"{name} {cost_ms[name]:.1f}" for name in sorted(cost_ms, key=lambda each: -cost_ms[each])
    )


def planners_ms(pid: int) -> float:
    """CPU milliseconds of the processes of one thread that the server started, so far."""
    found = 0.0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found += int(stat.with_name("schedstat").read_text().split()[0]) / 1e6
    return found


def main() -> None:
    rows = (*BODIES, TWENTY)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seconds", type=int, nargs="?", default=10, help="of each row")
    parser.add_argument("planners", type=int, nargs="?", default=1, help="planning processes of the server")
    parser.add_argument("--plans", type=int, metavar="N", help="different requests that each of their rows answers")
    parser.add_argument("--only", action="append", choices=rows, metavar="ROW", help=", ".join(rows))
    parser.add_argument("--ask", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.ask:
        print(by_threads(*json.loads(given.ask)))
        return
    print(
        f"SHA(64, 4, 508, 2), {given.planners} planning process(es), {given.seconds} s each; latencies in ms; "
        f"load before: {os.getloadavg()[0]:.1f}"
    )
    with serving(given.planners) as (address, token, pid):
        measure(address, token, "repeats, 20 clients", 2)
        for name in given.only or rows:
            if name == TWENTY:
                print(f"{name:<24} {twenty_jobs(address, token, pid)}", flush=True)
                continue
            before = cpu_s(pid)
            expected = measure(address, token, name, given.seconds, given.plans if NUMBER in BODIES[name][0] else None)
            count = max(1, sum(int(each) for each in re.findall(r"(\d+)x\d", expected)))
            server_ms, planner_ms = ((after - was) * 1e3 / count for after, was in zip(cpu_s(pid), before, strict=True))
            print(f"{name:<24} {expected}  CPU ms each: server {server_ms:.2f}, planners {planner_ms:.2f}", flush=True)


if __name__ == "__main__":
    main()
