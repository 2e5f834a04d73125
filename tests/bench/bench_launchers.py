"""Do two trials on one machine, whose programs launchers start, ever take the same port?

Run: python -m tests.bench.bench_launchers [torchrun|accelerate [STARTS [WORKERS]]]. Two trials are started again and
again side by side, by default 200 times in all with two workers each. Prints the starts, those that failed, with the
first reason, and the ports that both had at once. It asserts none.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

from rubberband.executor import Entrypoint, SegmentFailure, SegmentReport, open_store
from rubberband.values.command import ProgramCommand, words_of
from tests.builders.processes.segment_worker import gang_of, run_gang
from tests.builders.segments import SEGMENT

PROGRAM = """
import os, sys, rubberband, torch, torch.distributed as dist
total = torch.ones(1)
if "RANK" in os.environ:
    dist.init_process_group("gloo")
    dist.all_reduce(total)
if os.environ.get("RANK", "0") == "0":
    rubberband.report({"loss": total.item(), "port": int(sys.argv[1])})
if dist.is_initialized():
    dist.destroy_process_group()
"""
LINES = {
    "torchrun": "-m torch.distributed.run --nproc-per-node ${gpus} --nnodes ${machines} --node-rank ${machine_rank} "
    "--master-addr ${master_addr} --master-port ${master_port}",
    "accelerate": "-m accelerate.commands.launch ${kind} --num_processes ${workers} --num_machines ${machines} "
    "--machine_rank ${machine_rank} --main_process_ip ${master_addr} --main_process_port ${master_port}",
}


class Trial:
    """Starts of a program by a launcher on workers of its own."""

    def __init__(self, folder: Path, launcher: str, workers: int) -> None:
        folder.mkdir()
        (folder / "train.py").write_text(PROGRAM)
        line = LINES[launcher].replace("${kind}", "--multi_gpu" if workers > 1 else "--cpu")  # gloo is under both
        words = words_of(f"{sys.executable} {line} train.py ${{master_port}}")
        command = ProgramCommand(words=words, launch="machine")
        self._entrypoint = Entrypoint(module="", attribute="", search_path=(str(folder),), command=command)
        self._store, self._workers = open_store(str(folder / "store")), workers
        self.ports: list[tuple[float, float, int]] = []
        """Begin, end and port of each start."""
        self.failures: list[str] = []

    def start(self, times: int) -> None:
        segment = replace(SEGMENT, metric="loss", max_iterations=1, until_iterations=1)
        with gang_of(self._workers) as workers:
            for _ in range(times):
                began = time.monotonic()
                (*_, last), *_ = run_gang(workers, self._entrypoint, segment, self._store)
                if isinstance(last, SegmentReport) and last.metrics["loss"] == self._workers:
                    self.ports.append((began, time.monotonic(), int(last.metrics["port"])))
                else:
                    self.failures.append(last.message if isinstance(last, SegmentFailure) else str(last))


def main() -> None:
    """Print one line."""
    launcher, starts, workers = (*sys.argv[1:], *("torchrun", "200", "2")[len(sys.argv) - 1 :])
    with tempfile.TemporaryDirectory() as folder:
        trials = [Trial(Path(folder, str(number)), launcher, int(workers)) for number in range(2)]
        threads = [threading.Thread(target=trial.start, args=(int(starts) // 2,)) for trial in trials]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    one, other = trials
    shared = sum(
        port == taken and begin < until and since < end
        for begin, end, port in one.ports
        for since, until, taken in other.ports
    )
    failures, done = one.failures + other.failures, len(one.ports) + len(other.ports)
    print(f"{launcher} x {workers}: {done} started, {len(failures)} failed {failures[:1]}; {shared} ports had at once")


if __name__ == "__main__":
    main()
