"""Memory and time of a large checkpoint that is a folder, in workers and in the driver, by store.

Run: python -m tests.bench.bench_checkpoints [GIGABYTES [local] [s3] [gs]]

Each step runs in a process of its own, which first saves and loads a small checkpoint. Its memory is the peak of the
step above that (VmHWM and VmRSS of /proc/self/status). Servers of S3 (moto) and of Google Cloud Storage
(gcp-storage-emulator, if it is installed) run in other processes.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import rubberband
from rubberband.executor import (
    CheckpointRef,
    CheckpointStore,
    Entrypoint,
    FolderCheckpoint,
    SegmentFailure,
    SegmentReport,
    TrialResult,
    open_store,
    run_segment,
    unpack,
)
from rubberband.executor.checkpoints.folders import pack
from rubberband.executor.checkpoints.scratch import Scratch
from rubberband.executor.result.restoring import restore_trial
from tests.builders.segments import SEGMENT

ROOT = Path(__file__).parents[2]
MIB = 2**20
FILES = 8
AIM_MIB = 64
STEPS = ("save", "restore", "load_best", "program")


def train(config: Mapping[str, Any]) -> None:
    """Report the folder of the configuration, or the one that it resumes from."""
    kept = rubberband.get_checkpoint()
    if kept is not None:
        assert size_of(kept.path) == config["bytes"]
    rubberband.report({"loss": 1.0}, checkpoint=kept or FolderCheckpoint.from_directory(config["folder"]))
    rubberband.report({"loss": 1.0})


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def make_folder(folder: Path, gigabytes: float) -> int:
    """Write files that do not compress; return their bytes."""
    folder.mkdir()
    block = os.urandom(16 * MIB)
    for number in range(FILES):
        with open(folder / f"shard-{number}.bin", "wb") as file:
            for _ in range(round(gigabytes * 1024 / 16 / FILES)):
                file.write(block)
    return size_of(folder)


def status(name: str) -> float:
    """A line of /proc/self/status, in MiB."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024


def segment(store: CheckpointStore, config: Mapping[str, Any], ref: CheckpointRef | None) -> CheckpointRef:
    """Train one iteration, after the first one if there is a checkpoint."""
    done = 0 if ref is None else 1
    words = replace(SEGMENT, config=config, from_iterations=done, until_iterations=done + 1, checkpoint=ref)
    *_, last = run_segment(Entrypoint.from_object(train), words, store)
    assert isinstance(last, SegmentReport), last.message if isinstance(last, SegmentFailure) else last
    assert last.checkpoint is not None
    return last.checkpoint


def best(ref: CheckpointRef, place: Path) -> None:
    """Load the best trial's folder as a user does, and write it."""
    found = TrialResult(
        trial=0,
        status="completed",
        configuration={},
        iterations=2,
        metrics={"loss": 1.0},
        failures=0,
        failure=None,
        checkpoint=ref,
        curve=(),
        seed=1,
    )
    restore_trial(found, train, is_simulated=False).to_directory(place / "best")


def program(store: CheckpointStore, folder: Path, place: Path) -> None:
    """Pack and store a program's folder, and restore it elsewhere."""
    ref = store.save(0, 1, lambda draft: pack(folder, draft, iterations=1, metrics={"loss": 1.0}))
    with store.file(ref) as path:
        unpack(path, place / "program")
    store.discard(ref)


def step(name: str, url: str, folder: Path, place: Path, ref: CheckpointRef | None) -> CheckpointRef | None:
    """Run one step in this process, and print its figures."""
    store = open_store(url)
    small = store.save(9, 1, b"small")
    with store.file(small):
        store.discard(small)
    config = {"folder": str(folder), "bytes": size_of(folder)}
    steps: dict[str, Callable[[], CheckpointRef | None]] = {
        "save": lambda: segment(store, config, None),
        "restore": lambda: segment(store, config, ref),
        "load_best": lambda: None if ref is None else best(ref, place),
        "program": lambda: program(store, folder, place),
    }
    with Scratch():
        idle = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    begun = time.perf_counter()
    made = steps[name]()
    figures = {"seconds": time.perf_counter() - begun, "mib": status("VmHWM") - idle, "idle_mib": idle}
    print(json.dumps({**figures, "ref": None if made is None else [made.url, made.digest, made.size_bytes]}))
    return made


@contextmanager
def server(command: list[str]) -> Iterator[int]:
    """Yield the port of a server, whose command gets it as its last word."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with subprocess.Popen([*command, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            while process.poll() is None:
                with socket.socket() as tried:
                    if tried.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.1)
            yield port
        finally:
            process.kill()


def main(gigabytes: float, wanted: Sequence[str]) -> None:
    """Print a line for each store and step."""
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rubberband-bench-")))
        size_bytes = make_folder(place / "folder", gigabytes)
        environment = {**os.environ, "NO_GCE_CHECK": "true", "AWS_EC2_METADATA_DISABLED": "true"}
        stores = {"local": str(place / "store")}
        port = stack.enter_context(server([sys.executable, "-m", "moto.server", "-p"]))
        environment |= {"AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
        environment |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
        bucket = "from rubberband.cloud.aws.s3 import _client; _client().create_bucket(Bucket='bucket')"
        subprocess.run([sys.executable, "-c", bucket], env=environment, check=True, cwd=ROOT)
        stores["s3"] = "s3://bucket/bench"
        if find_spec("gcp_storage_emulator") and find_spec("gcsfs"):
            emulator = (
                "import sys, time; from gcp_storage_emulator.server import create_server; "
                f"create_server('127.0.0.1', int(sys.argv[1]), in_memory=False, data_dir={str(place / 'gcs')!r}, "
                "default_bucket='bucket').start(); time.sleep(1e6)"
            )
            port = stack.enter_context(server([sys.executable, "-c", emulator]))
            environment["STORAGE_EMULATOR_HOST"] = f"http://127.0.0.1:{port}"
            stores["gs"] = "gs://bucket/bench"
        print(f"a folder of {size_bytes / 1e9:.2f} GB in {FILES} files; aim: {AIM_MIB} MiB above idle")
        print(f"{'store':<6} {'step':<10} {'above idle':>11} {'idle':>9} {'time':>8}")
        for store, url in ((store, url) for store, url in stores.items() if store in (wanted or stores)):
            ref: list[Any] | None = None
            for name in STEPS:
                there = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rubberband-bench-")))
                words = ["step", name, url, str(place / "folder"), str(there), json.dumps(ref)]
                done = subprocess.run(
                    [sys.executable, "-m", "tests.bench.bench_checkpoints", *words],
                    env=environment,
                    check=True,
                    cwd=ROOT,
                    stdout=subprocess.PIPE,
                )
                found = json.loads(done.stdout.splitlines()[-1])
                ref = found["ref"] or ref
                print(
                    f"{store:<6} {name:<10} {found['mib']:>7.0f} MiB {found['idle_mib']:>5.0f} MiB "
                    f"{found['seconds']:>6.1f} s",
                    flush=True,
                )
                subprocess.run(["rm", "-rf", str(there)], check=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["step"]:
        name, url, folder, place, ref = sys.argv[2:]
        known = json.loads(ref)
        kept = None if known is None else CheckpointRef(url=known[0], digest=known[1], size_bytes=known[2])
        step(name, url, Path(folder), Path(place), kept)
    else:
        main(float(sys.argv[1]) if sys.argv[1:] else 2.0, sys.argv[2:])
