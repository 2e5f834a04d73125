"""What does a base model of 530 MB cost a trial that trains an adapter of 1 MB?

Run: python -m tests.bench.bench_base_model. A trial trains an iteration, then another trial at the same slot, then the
first one again, from its checkpoint. Prints the bytes of a checkpoint; seconds of a change of trial until it
trains, with those of its process and of loading the base; and how often the base's file is opened, new and resumed. It
asserts none.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path

from rubberband.executor import ForkServer, SegmentReport, open_store
from tests.builders import segments, trials
from tests.builders.processes.segment_worker import gang_of, run_gang


def main() -> None:
    """Print a line for each start."""
    with tempfile.TemporaryDirectory() as folder:
        size = trials.entrypoint("big_base:make_base").load()(Path(folder, "base"))
        store, server = open_store(str(Path(folder, "checkpoints"))), ForkServer("bench", Path(folder), None)
        whole = replace(segments.SEGMENT, metric="eval_loss", max_iterations=3)
        words = {"base": str(Path(folder, "base")), "out": str(Path(folder, "out"))}
        one, other = ({**words, "lr": rate} for rate in (1e-3, 2e-3))
        last: SegmentReport | None = None
        with gang_of(1, RUBBERBAND_DIRECTORY=folder, PYTHONHASHSEED="0") as workers:
            for name, config, begin in (("first", one, 0), ("another", other, 0), ("resumed", one, 1)):
                segment = replace(whole, config=config, from_iterations=begin, until_iterations=begin + 1)
                segment = replace(segment, checkpoint=last.checkpoint if begin and last else None)
                began = time.time()
                ((_, report),) = run_gang(workers, trials.entrypoint("big_base:train"), segment, store)
                assert isinstance(report, SegmentReport), report
                last = last or report
                found = report.metrics
                print(
                    f"{name:8} base {size / 1e6:.0f} MB, checkpoint {report.checkpoint.total_bytes / 1e6:.2f} MB; "
                    f"{found['step_at'] - began:.1f} s until it trains, of which {found['begun_at'] - began:.1f} start "
                    f"its process and {found['loaded_s']:.1f} load the base; "
                    f"its file was opened {found['base_opened']:.0f} times",
                    flush=True,
                )
        server.close()


if __name__ == "__main__":
    main()
