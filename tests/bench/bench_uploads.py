"""How much training time a large checkpoint costs, beside the program's or function's own save of it.

Run: python -m tests.bench.bench_uploads [GIGABYTES [SECONDS [ITERATIONS [again|replace|names]...]]]

A program, and a function of Ray Tune, train on one core for SECONDS per iteration and save a folder of GIGABYTES
after each: into the same files again, by files that take their places, or below a new name. Alone, the same
loop saves and trains on. The cost is how much longer the iterations after the first take than alone, on a store that is
a folder, and on S3 (moto: 9 s of CPU for each GB, so the server has the lowest priority on this machine). `report` is
the part of it that the loop waits.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from rubberband.executor import Entrypoint, SegmentFailure, SegmentReport, open_store, run_segment
from rubberband.values.command import ProgramCommand
from tests.bench.bench_checkpoints import ROOT, server
from tests.builders.segments import SEGMENT

LOOP = """
import json, os, shutil, sys, time
import numpy

def train(folder, report, how, gigabytes, units, iterations, times):
    block = os.urandom(2**24)
    numbers = numpy.random.default_rng(0).random((256, 256))
    def save(name):
        os.makedirs(os.path.join(folder, os.path.dirname(name)), exist_ok=True)
        with open(os.path.join(folder, name), "wb") as file:
            for _ in range(round(gigabytes * 2**30 / 4 / 2**24)):
                file.write(block)
    for iteration in range(1, iterations + 1):
        begun = time.perf_counter()
        for _ in range(units):
            numbers = numpy.tanh(numbers @ numbers / 256)
        trained = time.perf_counter()
        for shard in range(4):
            if how == "again":
                save(f"shard-{shard}")
            elif how == "replace":
                save(f"new-{shard}")
                os.replace(os.path.join(folder, f"new-{shard}"), os.path.join(folder, f"shard-{shard}"))
            else:
                save(f"step-{iteration}/shard-{shard}")
        if how == "names":
            shutil.rmtree(os.path.join(folder, f"step-{iteration - 1}"), ignore_errors=True)
        saved = time.perf_counter()
        report({"loss": 1.0 / iteration})
        with open(times, "a") as file:
            file.write(json.dumps([trained - begun, saved - trained, time.perf_counter() - saved]) + "\\n")
"""
PROGRAM = """
from loop import *
import rubberband
folder, how, gigabytes, units, iterations, times = sys.argv[1:]
train(folder, rubberband.report, how, float(gigabytes), int(units), int(iterations), times)
"""
FUNCTION = """
from loop import *
from ray import tune

def function(config):
    folder = config["folder"]
    def report(metrics):
        tune.report(metrics, checkpoint=tune.Checkpoint.from_directory(folder))
    train(folder, report, config["how"], config["gigabytes"], config["units"], config["iterations"], config["times"])
"""
WAYS = ("again", "replace", "names")


def measured(kind: str, how: str, url: str | None, words: dict[str, Any]) -> list[list[float]]:
    """Run the loop in a process; return its seconds of training, save and report by iteration."""
    with tempfile.TemporaryDirectory(prefix="rubberband-bench-", dir=words["place"]) as place:
        folder, times = Path(place, "folder"), Path(place, "times")
        folder.mkdir()
        gigabytes, units, iterations = (words[name] for name in ("gigabytes", "units", "iterations"))
        given = (how, str(gigabytes), str(units), str(iterations), str(times))
        if url is None:
            alone = [sys.executable, "program.py", str(folder), *given]
            subprocess.run(alone, cwd=words["place"], check=True, stdout=subprocess.DEVNULL)
        else:
            config = {**words, "folder": str(folder), "how": how, "times": str(times)}
            worker = [sys.executable, "-m", "tests.bench.bench_uploads", kind, url, json.dumps(config), *given]
            subprocess.run(worker, cwd=ROOT, check=True)
        return [json.loads(line) for line in times.read_text().splitlines()]


def work(kind: str, url: str, words: str, *given: str) -> None:
    """Run the loop in a segment, as a worker does."""
    config = json.loads(words)
    command = ProgramCommand(words=(sys.executable, "program.py", "${checkpoint}", *given))
    entrypoint = Entrypoint(module="", attribute="", search_path=(config["place"],), command=command)
    if kind == "function":
        entrypoint = Entrypoint.parse("function:function", (config["place"],))
    iterations, store = config["iterations"], open_store(url)
    segment = replace(SEGMENT, config=config, until_iterations=iterations, max_iterations=iterations + 1)
    for item in run_segment(entrypoint, segment, store):
        assert not isinstance(item, SegmentFailure), item.message
        if isinstance(item, SegmentReport) and item.checkpoint is not None:
            store.discard(item.checkpoint)  # as the driver does once there is a newer one


def main(gigabytes: float, seconds: float, iterations: int, ways: Sequence[str] = WAYS) -> None:
    """Print a line for each kind, way of saving, and store."""
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_EC2_METADATA_DISABLED": "true"}
    with ExitStack() as stack:
        place = stack.enter_context(tempfile.TemporaryDirectory(prefix="rubberband-bench-"))
        for name, source in {"loop": LOOP, "program": PROGRAM, "function": FUNCTION}.items():
            Path(place, f"{name}.py").write_text(textwrap.dedent(source))
        port = stack.enter_context(server(["nice", "-n", "19", sys.executable, "-m", "moto.server", "-p"]))
        os.environ["AWS_ENDPOINT_URL_S3"] = f"http://127.0.0.1:{port}"
        bucket = "from rubberband.cloud.aws.s3 import _client; _client().create_bucket(Bucket='bucket')"
        subprocess.run([sys.executable, "-c", bucket], check=True, cwd=ROOT)
        words = {"place": place, "gigabytes": 0.0, "units": 200, "iterations": 2}
        unit_s = measured("program", "again", None, words)[-1][0] / 200
        words |= {"gigabytes": gigabytes, "units": round(seconds / unit_s), "iterations": iterations}
        print(f"{gigabytes:g} GB each {seconds:g} s, {iterations} iterations")
        print(f"{'kind':<9} {'saves':<8} {'store':<6} {'train':>7} {'save':>7} {'report':>7} {'cost':>7}", flush=True)
        for how in ways:
            alone = _middle(measured("program", how, None, words))
            print(f"{'alone':<9} {how:<8} {'':<6} " + "".join(f"{each:>6.2f}s " for each in alone), flush=True)
            for kind in ("program", "function"):
                for name, url in (("folder", f"{place}/store"), ("s3", "s3://bucket/bench")):
                    found = _middle(measured(kind, how, url, words))
                    cost = sum(found) / sum(alone) - 1
                    row = "".join(f"{each:>6.2f}s " for each in found)
                    print(f"{kind:<9} {how:<8} {name:<6} {row}{cost:>7.1%}", flush=True)


def _middle(times: list[list[float]]) -> list[float]:
    """Return the medians over the iterations after the first, whose files say nothing yet, but the last."""
    return [median(column) for column in zip(*times[1:], strict=True)]


if __name__ == "__main__":
    if sys.argv[1:2] in (["program"], ["function"]):
        work(*sys.argv[1:])
        sys.exit()
    given = [float(word) for word in sys.argv[1:4]]
    gigabytes, seconds, iterations = given + [2.0, 10.0, 6.0][len(given) :]
    main(gigabytes, seconds, int(iterations), sys.argv[4:] or WAYS)
