"""How far are trainers of TRL in a trial from the trainer alone?

Run: python -m tests.bench.bench_finetune [KINDS [ADAPTERS]], such as `sft,dpo lora,all`. Trains three epochs at a
stretch, in three segments on one worker, and on gangs of 1, 2 and 1 workers. Prints the largest differences of `loss`
and `eval_loss`, relative to 1 or more, `num_tokens` of the last report, and the bytes of a checkpoint. It asserts
none.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rubberband.executor import ForkServer, SegmentReport, open_store
from tests.builders import segments, trials
from tests.builders.processes.segment_worker import gang_of, resized

KINDS = ("sft", "dpo", "reward", "kto", "grpo")
ADAPTERS = ("lora", "dora", "all")
_METRICS = ("loss", "eval_loss")


def difference(whole: Sequence[SegmentReport], other: Sequence[SegmentReport]) -> float:
    """Largest difference of the losses, relative to values above 1."""
    return max(
        abs(straight.metrics[name] - again.metrics[name]) / max(1.0, abs(straight.metrics[name]))
        for straight, again in zip(whole, other, strict=True)
        for name in _METRICS
    )


def main() -> None:
    """Print a row for each kind of trainer and of weights."""
    kinds, adapters = (
        sys.argv[at].split(",") if len(sys.argv) > at else given for at, given in ((1, KINDS), (2, ADAPTERS))
    )
    entrypoint = trials.entrypoint("finetuned:train")
    with tempfile.TemporaryDirectory() as folder:
        store, server = open_store(str(Path(folder, "checkpoints"))), ForkServer("bench", Path(folder), None)
        with gang_of(2, RUBBERBAND_DIRECTORY=folder, PYTHONHASHSEED="0") as workers:
            for kind in kinds:
                for adapter in adapters:
                    config = {"kind": kind, "adapter": adapter}
                    segment = replace(segments.SEGMENT, metric="eval_loss", max_iterations=3, config=config)
                    whole, again, gang = (
                        resized(workers, entrypoint, segment, store, parts)
                        for parts in ([(1, 3)], [(1, 1), (1, 2), (1, 3)], [(1, 1), (2, 2), (1, 3)])
                    )
                    tokens = [int(found[-1].metrics.get("num_tokens", 0)) for found in (whole, again, gang)]
                    print(
                        f"{kind:7} {adapter:5} resumed {difference(whole, again):.1e}  gangs 1, 2, 1"
                        f" {difference(whole, gang):.1e}  tokens {tokens}  {gang[-1].checkpoint.total_bytes} bytes",
                        flush=True,
                    )
        server.close()


if __name__ == "__main__":
    main()
