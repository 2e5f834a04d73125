"""LoRA adapters of a small Llama by TRL's SFTTrainer: rate, rank, alpha and dropout are searched.

    rubberband run examples/finetune.yaml

`train` is a script of TRL as it was, but for the three lines that are marked. The model, its tokenizer and the text are
small and made here, so nothing is downloaded: put `AutoModelForCausalLM.from_pretrained(NAME)`, its tokenizer and your
dataset in their place.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import rubberband
from rubberband.integrations.transformers import fit

EPOCHS = 13
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
NAMES = ["Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gina", "Hugo"]
THINGS = ["apples", "books", "coins", "pens", "stamps", "shells"]
WORDS = [*NUMBERS, *NAMES, *THINGS, "has", "and", "buys", "gives", "away", "more", "now", ".", "<pad>", "<eos>"]


def stories(size: int, seed: int) -> list[str]:
    """Return sums in words, always the same: `Ada has three pens and buys two more . now Ada has five pens .`"""
    draws = random.Random(seed)
    found = []
    for _ in range(size):
        name, thing = draws.choice(NAMES), draws.choice(THINGS)
        had, changed = draws.randrange(7), draws.randrange(6)
        buys = draws.random() < 0.5 or changed > had
        then = f"buys {NUMBERS[changed]} more" if buys else f"gives {NUMBERS[changed]} away"
        left = NUMBERS[had + changed if buys else had - changed]
        found.append(f"{name} has {NUMBERS[had]} {thing} and {then} . now {name} has {left} {thing} .")
    return found


def base_model() -> LlamaForCausalLM:
    """Return the model that all trials start from."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(WORDS),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
            pad_token_id=WORDS.index("<pad>"),
            eos_token_id=WORDS.index("<eos>"),
        )
    )


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each word."""
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


@rubberband.distributed  # 1
def train(config: dict[str, Any]) -> None:
    trainer = SFTTrainer(
        model=base_model(),
        processing_class=tokenizer(),
        args=SFTConfig(
            output_dir="adapter",
            learning_rate=config["lr"],
            per_device_train_batch_size=rubberband.per_worker(16),  # 2
            num_train_epochs=EPOCHS,
            warmup_steps=20,
            max_length=32,
            bf16=torch.cuda.is_available(),
            logging_strategy="epoch",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"text": stories(1024, seed=1)}),
        eval_dataset=Dataset.from_dict({"text": stories(128, seed=2)}),
        peft_config=LoraConfig(
            r=config["r"],
            lora_alpha=config["alpha"] * config["r"],
            lora_dropout=config["dropout"],
            target_modules="all-linear",
            modules_to_save=["embed_tokens", "lm_head"],  # this base model is not trained yet
        ),
    )
    fit(trainer)  # 3: it was trainer.train()
