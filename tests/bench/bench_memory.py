"""Memory of LoRA configurations: predicted from a few that are measured, against each one's own process.

    python -m tests.bench.bench_memory

It prints both for ten configurations that were not measured for the prediction, and the largest difference. The memory
is the most that is resident in two steps of TRL's SFTTrainer on the CPU, with an evaluation and a checkpoint. Tensors
are below 32 MB: glibc gives larger ones back at once, and keeps smaller ones, so resident memory is not smooth there.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import rubberband
from rubberband.executor.training.check_findings import CheckOrder, brief
from rubberband.executor.training.checking import check
from rubberband.executor.training.entrypoint import Entrypoint
from rubberband.planning.memory_model import LEAST_RESIDENT, Exploring, MemoryPoint
from rubberband.spec.space import choice, loguniform
from tests.builders.segments import SEGMENT
from tests.builders.small_llama import make_model

SPACE = {
    "lr": loguniform(1e-5, 1e-3),
    "dropout": choice([0.0, 0.05, 0.1]),
    "r": choice([8, 32, 128, 256]),
    "batch": choice([1, 2, 4, 8]),
    "length": choice([64, 128, 256]),
}
FOLDER = "RUBBERBAND_BENCH_FOLDER"
LIMIT_S = 300.0


@rubberband.distributed
def train(config: Mapping[str, Any]) -> None:
    """Train LoRA adapters of a Llama of 12 million parameters on sentences that fill the length."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    from rubberband.integrations.transformers import fit

    folder = Path(os.environ[FOLDER])
    shape = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8}
    words = {"vocab_size": 4096, "max_position_embeddings": 512, "pad_token_id": 0, "eos_token_id": 1}
    rows = Dataset.from_dict({"text": ["Ann sees a cat. " * 200] * 32})
    batch = config["batch"]
    arguments: dict[str, Any] = {"per_device_train_batch_size": batch, "per_device_eval_batch_size": 2, "max_steps": 2}
    arguments |= {"max_length": config["length"], "learning_rate": config["lr"], "bf16": False, "use_cpu": True}
    fit(
        SFTTrainer(
            model=LlamaForCausalLM(LlamaConfig(**shape, **words)),
            args=SFTConfig(report_to="none", disable_tqdm=True, output_dir=str(folder / "out"), **arguments),
            train_dataset=rows,
            eval_dataset=rows.select(range(4)),
            processing_class=AutoTokenizer.from_pretrained(folder / "model"),
            peft_config=LoraConfig(
                r=config["r"], lora_dropout=config["dropout"], target_modules="all-linear", task_type="CAUSAL_LM"
            ),
        ),
        steps_per_iteration=2,
    )


def measured(config: Mapping[str, Any]) -> float:
    """Return the peak of a configuration in bytes, in a process of its own."""
    segment = replace(SEGMENT, config=config, metric="eval_loss", until_iterations=1, max_iterations=1)
    order = CheckOrder(
        entrypoint=Entrypoint.parse("tests.bench.bench_memory:train", [os.getcwd()]),
        segment=segment,
        max_gpus=1,
        only_memory=True,
    )
    found = check(order, limit_s=LIMIT_S, output=2)
    assert found.peak_bytes is not None, found.problems
    return float(found.peak_bytes)


def main() -> None:
    drawn = random.Random(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FOLDER] = folder
        make_model(Path(folder))
        first = {"lr": 1e-4, "dropout": 0.05, "r": 32, "batch": 4, "length": 128}
        exploring = Exploring(MemoryPoint(first, measured(first)), SPACE, measured, least=LEAST_RESIDENT)
        exploring.largest()
        model = exploring.model()
        print(f"{len(exploring.points)} configurations measured; parameters that count: {', '.join(model.slopes)}")
        for point in exploring.points:
            print(f"  {point.peak_bytes / 1e6:7.1f} MB measured  {brief(point.config)}", flush=True)
        known, differences = [point.config for point in exploring.points], []
        while len(differences) < 10:
            config = {name: domain.draw(drawn.random()) for name, domain in SPACE.items()}
            if config in known:
                continue
            seen, predicted = measured(config), model.predict(config)
            differences.append(predicted / seen - 1.0)
            known.append(config)
            print(
                f"predicted {predicted / 1e6:7.1f} MB  seen {seen / 1e6:7.1f} MB  {differences[-1]:+6.1%}  "
                f"{brief(config)}",
                flush=True,
            )
    print(f"largest difference: {100.0 * max(map(abs, differences)):.1f} %")


if __name__ == "__main__":
    main()
