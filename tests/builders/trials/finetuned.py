"""Trainers of TRL on a small Llama that is made here: `config` says which one, and which weights it trains."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from typing import Any

import torch
from datasets import Dataset
from peft import IA3Config, LoraConfig, PromptTuningConfig, TaskType, VeraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
from trl.trainer.kto_config import KTOConfig
from trl.trainer.kto_trainer import KTOTrainer

import rubberband
from rubberband.integrations.transformers import fit

WORDS = [*(f"w{number}" for number in range(24)), "<pad>", "<eos>"]
EPOCHS, BATCH = 3, 8
SAMPLES = 32
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    made.chat_template = TEMPLATE
    return made


def limit(model: Any, room: Mapping[str, int]) -> None:
    """Let a model pretend to run out of memory above some rows at once, in training and in evaluation."""

    def take(module: Any, args: Any, words: dict[str, Any]) -> None:
        if len(words["input_ids"]) > room["training" if module.training else "evaluation"]:
            raise torch.OutOfMemoryError("CUDA out of memory (pretended)")

    model.register_forward_pre_hook(take, with_kwargs=True)


def base_model(kind: str) -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(
        vocab_size=len(WORDS), max_position_embeddings=64, pad_token_id=24, eos_token_id=25, bos_token_id=25, **shape
    )
    if kind == "reward":
        config.num_labels = 1
        return LlamaForSequenceClassification(config)
    return LlamaForCausalLM(config)


def text(seed: int, length: int) -> str:
    draws = torch.Generator().manual_seed(seed)
    return " ".join(WORDS[number] for number in torch.randint(0, 24, (length,), generator=draws).tolist())


def rows(kind: str, first: int, count: int) -> Dataset:
    numbers = range(first, first + count)
    columns: dict[str, list[Any]] = {"prompt": [text(number, 4) for number in numbers]}
    if kind == "sft":
        columns = {"text": [text(number, 5 + number % 7) for number in numbers]}
    elif kind in ("dpo", "reward"):
        columns["chosen"] = [f" {text(number + 1000, 4)}" for number in numbers]
        columns["rejected"] = [f" {text(number + 2000, 4)}" for number in numbers]
    elif kind == "kto":
        columns["completion"] = [f" {text(number + 1000, 4)}" for number in numbers]
        columns["label"] = [number % 2 == 0 for number in numbers]
    return Dataset.from_dict(columns)


def adapter(name: str, kind: str) -> Any:
    task = TaskType.SEQ_CLS if kind == "reward" else TaskType.CAUSAL_LM
    lora = {"r": 4, "target_modules": "all-linear", "task_type": task}
    known = {
        "lora": lambda: LoraConfig(**lora),
        "dora": lambda: LoraConfig(**lora, use_dora=True),
        "saved": lambda: LoraConfig(**lora, modules_to_save=["lm_head"]),
        "ia3": lambda: IA3Config(
            task_type=task, target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
        ),
        "prompt": lambda: PromptTuningConfig(task_type=task, num_virtual_tokens=4),
        "random": lambda: VeraConfig(  # projections of its own in each process, which no checkpoint has
            task_type=task, r=4, target_modules=["q_proj"], save_projection=False, projection_prng_key=os.getpid()
        ),
        "all": lambda: None,
    }
    return known[name]()


CONFIGS = {"sft": SFTConfig, "dpo": DPOConfig, "reward": RewardConfig, "kto": KTOConfig, "grpo": GRPOConfig}
TRAINERS = {"sft": SFTTrainer, "dpo": DPOTrainer, "reward": RewardTrainer, "kto": KTOTrainer, "grpo": GRPOTrainer}


def longest(completions: list[str], **_: Any) -> list[float]:
    """Reward of GRPO: words that are even."""
    return [sum(int(word[1:]) % 2 == 0 for word in one.split() if word[1:].isdigit()) / 4.0 for one in completions]


def make(config: Mapping[str, Any]) -> Any:
    kind = config["kind"]
    words: dict[str, Any] = {
        "learning_rate": config.get("lr", 1e-2),
        "per_device_train_batch_size": rubberband.per_worker(BATCH),
        "num_train_epochs": EPOCHS,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "output_dir": tempfile.mkdtemp(),
        "logging_strategy": "epoch",
        **config.get("words", {}),
    }
    if kind == "grpo":
        words |= {"num_generations": 4, "max_completion_length": 4, "temperature": 1.0}
    train_set = rows(kind, 0, SAMPLES)
    if config.get("streams"):
        train_set = train_set.to_iterable_dataset(num_shards=1)
        words |= {"max_steps": EPOCHS * SAMPLES // BATCH}
    made: dict[str, Any] = {"reward_funcs": longest} if kind == "grpo" else {}
    if kind in ("dpo", "kto") and config.get("adapter") == "all":
        made["ref_model"] = base_model(kind)
    model = base_model(kind)
    if "room" in config:
        limit(model, config["room"])
    return TRAINERS[kind](
        model=model,
        args=CONFIGS[kind](**words),
        train_dataset=train_set,
        eval_dataset=rows(kind, 500, 16),
        processing_class=tokenizer(),
        peft_config=adapter(config.get("adapter", "lora"), kind),
        **made,
    )


@rubberband.distributed
def train(config: dict[str, Any]) -> None:
    fit(make(config), steps_per_iteration=SAMPLES // BATCH if config.get("streams") else None)
