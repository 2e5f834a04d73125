"""A LoRA of a base model of 530 MB in a folder.

How often its file is opened, and the times when the function and its step begin, are metrics.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import safetensors
import torch
import transformers
from datasets import Dataset
from finetuned import text, tokenizer
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

import rubberband
from rubberband.integrations.transformers import fit


def make_base(folder: Path) -> int:
    """Write a model of 132 million parameters in float32; return its bytes."""
    shape = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 10, "num_attention_heads": 8}
    config = LlamaConfig(vocab_size=2000, max_position_embeddings=64, pad_token_id=24, eos_token_id=25, **shape)
    LlamaForCausalLM(config).save_pretrained(folder)
    return sum(path.stat().st_size for path in folder.iterdir())


class Opened:
    """Counts how often this process opens safetensors of more than 100 MB."""

    def __init__(self) -> None:
        self.times = 0
        self._open = safetensors.safe_open
        for module in (safetensors, safetensors.torch, transformers.modeling_utils):
            module.safe_open = self

    def __call__(self, filename: Any, *words: Any, **named: Any) -> Any:
        self.times += Path(filename).stat().st_size > 100e6
        return self._open(filename, *words, **named)


@rubberband.distributed
def train(config: dict[str, Any]) -> None:
    begun_at = time.time()
    torch.set_num_threads(1)
    opened, began = Opened(), time.monotonic()
    base = LlamaForCausalLM.from_pretrained(config["base"])
    loaded_s = time.monotonic() - began
    data = Dataset.from_dict({"text": [text(number, 4) for number in range(2)]})
    trainer = SFTTrainer(
        model=base,
        processing_class=tokenizer(),
        args=SFTConfig(
            output_dir=config["out"],
            per_device_train_batch_size=rubberband.per_worker(2),
            num_train_epochs=3,
            learning_rate=config["lr"],
            bf16=False,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=data,
        eval_dataset=data,
        peft_config=LoraConfig(r=6, target_modules=["q_proj", "v_proj"]),
    )

    class Counts(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *words: Any, **_: Any) -> None:
            self.step_at = time.time()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            logs |= {"base_opened": opened.times, "loaded_s": loaded_s, "begun_at": begun_at, "step_at": self.step_at}

    trainer.callback_handler.callbacks.insert(0, Counts())
    fit(trainer)
