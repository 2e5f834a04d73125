"""How far are trainers of TRL in a trial from the trainer alone?

Run: python -m tests.bench.bench_finetune [KINDS [ADAPTERS [fit|command]]], such as `sft,dpo lora,all fit`. Trains three
epochs at a stretch, in three segments on one worker, and on gangs of 1, 2 and 1 workers: by `fit`, or by the command
that `rubberband init` makes of a config of TRL. Prints the largest differences of `loss` and `eval_loss`, relative to
1 or more, `num_tokens` of the last report, and the bytes of a checkpoint. It asserts none.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rubberband.executor import CheckpointStore, ForkServer, SegmentReport, open_store
from rubberband.executor.checkpoints.folders import members
from tests.builders import segments, trials, trl_configs
from tests.builders.processes.segment_worker import gang_of, resized

KINDS = ("sft", "dpo", "reward", "kto", "grpo")
ADAPTERS = ("lora", "dora", "all")


def losses(store: CheckpointStore, reports: Sequence[SegmentReport]) -> list[float]:
    """Losses of each iteration; a command prints four digits, and its Trainer saves all of those of evaluations."""
    payload = store.load(reports[-1].checkpoint)
    content = payload if isinstance(payload, bytes) else payload.read_bytes()
    found = members(payload)
    state = next((name for name in found if "/checkpoint-" in f"/{name}" and name.endswith("trainer_state.json")), None)
    if state is None:  # of `fit`
        return [report.metrics[name] for report in reports for name in ("loss", "eval_loss")]
    begin, size = found[state]
    history = json.loads(content[begin : begin + size])["log_history"]
    return [entry["eval_loss"] for entry in history if "eval_loss" in entry]


def difference(whole: Sequence[float], other: Sequence[float]) -> float:
    """Largest difference, relative to values above 1."""
    return max(abs(one - again) / max(1.0, abs(one)) for one, again in zip(whole, other, strict=True))


def main() -> None:
    """Print a row for each kind of trainer and of weights."""
    given = [word.split(",") for word in sys.argv[1:]]
    kinds, adapters, (way,) = (*given, *(KINDS, ADAPTERS, ["fit"])[len(given) :])
    with tempfile.TemporaryDirectory() as folder:
        store, server = open_store(str(Path(folder, "checkpoints"))), ForkServer("bench", Path(folder), None)
        with gang_of(2, RUBBERBAND_DIRECTORY=folder, PYTHONHASHSEED="0") as workers:
            for kind in kinds:
                for adapter in adapters:
                    entrypoint, config = trials.entrypoint("finetuned:train"), {"kind": kind, "adapter": adapter}
                    if way == "command":
                        (place := Path(folder, f"{kind}-{adapter}")).mkdir()
                        entrypoint, config = trl_configs.make(place, kind, adapter)
                    segment = replace(segments.SEGMENT, metric="eval_loss", max_iterations=3, config=config)
                    whole, again, gang = (
                        resized(workers, entrypoint, segment, store, parts)
                        for parts in ([(1, 3)], [(1, 1), (1, 2), (1, 3)], [(1, 1), (2, 2), (1, 3)])
                    )
                    tokens = [int(found[-1].metrics.get("num_tokens", 0)) for found in (whole, again, gang)]
                    alone, resumed, other = (losses(store, found) for found in (whole, again, gang))
                    print(
                        f"{kind:7} {adapter:5} resumed {difference(alone, resumed):.1e}  gangs 1, 2, 1"
                        f" {difference(alone, other):.1e}  tokens {tokens}  {gang[-1].checkpoint.total_bytes} bytes",
                        flush=True,
                    )
        server.close()


if __name__ == "__main__":
    main()
