"""Tools of fine-tuning: TRL, Axolotl and LLaMA-Factory, with their keys and their way of overriding a config file.

Sources: trl 1.16 (scripts/*.py, scripts/utils.py), axolotl 0.19 (cli/config.py, utils/schemas/config.py,
core/builders/base.py), llamafactory 0.9.5 (hparams/parser.py, launcher.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from typing import Any

_TRAINER = {
    "lr": "learning_rate",
    "batch": "per_device_train_batch_size",
    "warmup_ratio": "warmup_ratio",
    "warmup_steps": "warmup_steps",
    "decay": "weight_decay",
    "epochs": "num_train_epochs",
    "output": "output_dir",
}
"""Role -> key of the Trainer of Hugging Face."""
_LORA = {"r": "lora_r", "alpha": "lora_alpha", "dropout": "lora_dropout", "targets": "lora_target_modules"}
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""All linear layers of a block of Llama, Mistral, Qwen and Gemma."""
ACCUMULATED = "gradient_accumulation_steps"
RESUME = "resume_from_checkpoint"
_STOPS = "its patience is a number of evaluations, which are others here, and the search stops trials itself"
SWITCHED_OFF = {
    "save_only_model": ("False", "without the optimizer, no trial goes on where it was"),
    "push_to_hub": ("False", "each trial would upload its model"),
    "load_best_model_at_end": ("False", "the model of a trial is that of its latest iteration, as its metric is"),
    "eval_delay": ("0", "each iteration is evaluated"),
    "early_stopping_patience": ("0", _STOPS),
    "early_stopping_steps": ("null", _STOPS),
}
"""Key of a config -> the value with which a trial is right, and why."""
_PREFERENCES = ("dpo", "ipo", "kto", "orpo", "simpo", "grpo", "rloo", "ppo")
_OF_TASKS = {
    "grpo": ("num_generations", "reward_funcs", "use_vllm", "reward_model_name_or_path"),
    "kto": ("desirable_weight", "undesirable_weight"),
    "dpo": ("precompute_ref_log_probs", "beta", "f_divergence_type", "use_weighting"),
    "reward": ("center_rewards_coefficient",),
}
"""Task of TRL -> keys that only its config has, beside those of the tasks before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool: its keys, and the form of its overrides."""

    name: str
    package: str
    keys: Mapping[str, str]
    """Role -> its key."""
    form: str
    """An override, of a key and a value; a space in it parts two words."""
    batch: int = 8
    """Batch of a GPU where a config has none."""

    @property
    def resume(self) -> list[str]:
        """Return the words at each start from a checkpoint: all three hand them to the Trainer of Hugging Face."""
        return self.option(RESUME, "${last_checkpoint}")

    def option(self, key: str, value: str) -> list[str]:
        """Return the words that override a key of the config file."""
        return [part.format(key=key, value=value) for part in self.form.split(" ")]

    def divided(self, config: Mapping[str, Any]) -> str:
        """Return the key whose value is divided among the workers of a gang, so that its batch is that of one.

        Batches that a GPU accumulates are, where there are some: its own batch fills its memory then.
        """
        return ACCUMULATED if _whole(config.get(ACCUMULATED)) > 1 else self.keys["batch"]

    def has_lora(self, config: Mapping[str, Any]) -> bool:
        """Whether an adapter is trained, and not all weights."""
        if self is AXOLOTL:
            return config.get("adapter") in ("lora", "qlora")
        if self is LLAMA_FACTORY:
            return str(config.get("finetuning_type", "lora")) == "lora"
        return is_true(config.get("use_peft"))

    def has_eval(self, config: Mapping[str, Any]) -> bool:
        """Whether the config has data to evaluate on."""
        if self is AXOLOTL:
            return bool(config.get("val_set_size") or config.get("test_datasets"))
        if self is LLAMA_FACTORY:
            return bool(config.get("val_size") or config.get("eval_dataset"))
        return str(config.get("eval_strategy", "no")).lower() not in ("no", "none", "false")

    def method(self, config: Mapping[str, Any], task: str) -> str:
        """Return what is trained: sft, dpo, grpo and so on."""
        return str(
            {AXOLOTL.name: config.get("rl"), LLAMA_FACTORY.name: config.get("stage")}.get(self.name, task) or "sft"
        )

    def targets(self, value: Any) -> list[str]:
        """Return the choices of modules with adapters around those of the config, each as one word."""
        texts = [str(each) for each in value] if isinstance(value, list) else str(value).split(",")
        every = {*texts} >= {*LINEAR} or texts in (["all-linear"], ["all"])
        if self is TRL:  # a text is a regular expression of whole names
            mine = texts[0] if len(texts) == 1 else rf".*\.({'|'.join(texts)})"
            return [r".*\.(q_proj|v_proj)" if every else mine, "all-linear"]
        if self is LLAMA_FACTORY:
            return ["q_proj,v_proj" if every else ",".join(texts), "all"]
        return [_listed(("q_proj", "v_proj") if every else texts), _listed(LINEAR)]


def _listed(names: Any) -> str:
    return f"[{','.join(names)}]"


TRL = Tool(name="TRL", package="trl", keys={**_TRAINER, **_LORA}, form="--{key} {value}")
AXOLOTL = Tool(
    name="Axolotl",
    package="axolotl",
    keys={**_TRAINER, **_LORA, "batch": "micro_batch_size", "epochs": "num_epochs"},
    form="--{key}={value}",
    batch=1,
)
LLAMA_FACTORY = Tool(
    name="LLaMA-Factory",
    package="llamafactory",
    keys={**_TRAINER, **_LORA, "r": "lora_rank", "targets": "lora_target"},
    form="{key}={value}",
)


def _whole(value: Any) -> int:
    return int(text) if (text := str(value)).isdecimal() else 0


def as_words(config: Mapping[str, Any]) -> list[str]:
    """Return the plain values of a config as options."""
    plain = {key: value for key, value in config.items() if not isinstance(value, dict | list)}
    return [word for key, value in plain.items() for word in (f"--{key}", str(value))]


def number_of(value: Any) -> float | None:
    """Return the finite number of a value of YAML, which may be a text; None: it has none."""
    with suppress(TypeError, ValueError):
        return number if isfinite(number := float(value)) else None
    return None


def is_set(value: Any) -> bool:
    """Whether a value of YAML or of an option is neither false, nor empty, nor zero."""
    return str(value).lower() not in ("none", "null", "", "~", "false", "no", "off", "0", "0.0")


def is_true(value: Any) -> bool:
    """Whether a value of YAML or of an option means true."""
    return str(value).lower() in ("true", "yes", "1")


def tool_of(config: Mapping[str, Any]) -> Tool | None:
    """Return the tool whose config file has these keys; None: that of none."""
    keys = {*config}
    if "base_model" in keys and keys & {"micro_batch_size", "sequence_len", "adapter", "num_epochs"}:
        return AXOLOTL
    if "model_name_or_path" not in keys:
        return None
    if keys & {"finetuning_type", "template", "cutoff_len", "stage"} and keys & {"dataset", "dataset_dir", "stage"}:
        return LLAMA_FACTORY
    return TRL if keys & {"dataset_name", "datasets"} else None


def task_of(config: Mapping[str, Any], name: str) -> str:
    """Return the task of a config of TRL, by the name of its file and by its keys."""
    for task in _OF_TASKS:
        if re.search(rf"(?<![a-z]){task}(?![a-z])", name.lower()):
            return task
    return next((task for task, keys in _OF_TASKS.items() if any(key in config for key in keys)), "sft")


def domains(tool: Tool, config: Mapping[str, Any], method: str) -> list[tuple[str, str, str]]:
    """Return key, domain and comment of each parameter that may be searched, the most important first.

    Ranges are around the config's values, by the field's practice: a learning rate for adapters is ten times that for
    all weights (Schulman et al., "LoRA Without Regret", 2025), and for preferences a tenth of that for texts.
    """
    has_lora = tool.has_lora(config)
    lower = 1e-5 / (1 if has_lora else 10) / (10 if method in _PREFERENCES else 1)
    found = list[tuple[str, str, str]]()

    def add(role: str, domain: str, comment: str = "") -> None:
        key = tool.keys[role]
        said = f"the config has {config[key]}" if key in config and not isinstance(config[key], list) else ""
        found.append((key, domain, "; ".join(filter(None, (said, comment)))))

    def number(role: str) -> float | None:
        return number_of(config.get(tool.keys[role]))

    lr = number("lr") or lower * 7
    add("lr", f"{{type: loguniform, lower: {min(lower, lr):.3g}, upper: {max(lower * 50, lr):.3g}}}")
    if has_lora:
        for role, usual in (("r", (8, 16, 32, 64)), ("alpha", (16, 32, 64, 128))):
            values = sorted({*usual, *([int(value)] if (value := number(role)) else [])})
            add(role, f"{{type: choice, values: {values}}}")
        add("dropout", f"{{type: uniform, lower: 0.0, upper: {max(0.1, number('dropout') or 0.0):g}}}")
    if batch := int(number("batch") or 0):
        values = sorted({max(1, batch // 2), batch, 2 * batch})
        add(
            "batch",
            f"{{type: choice, values: {values}}}",
            "on each GPU" if tool.divided(config) == ACCUMULATED else "of a whole gang",
        )
    if has_lora and config.get(tool.keys["targets"]):
        texts = ", ".join(f"'{text}'" for text in dict.fromkeys(tool.targets(config[tool.keys["targets"]])))
        add("targets", f"{{type: choice, values: [{texts}]}}")
    if (ratio := number("warmup_ratio")) is not None:
        add("warmup_ratio", f"{{type: uniform, lower: 0.0, upper: {max(0.1, 2 * ratio):g}}}")
    if steps := number("warmup_steps"):
        whole = f"{{type: randint, lower: 0, upper: {int(2 * steps) + 1}}}"
        add("warmup_steps", whole if steps >= 1 else f"{{type: uniform, lower: 0.0, upper: {2 * steps:g}}}")
    if (decay := number("decay")) is not None:
        spread = (
            f"loguniform, lower: {decay / 10:g}, upper: {decay * 10:g}" if decay else "uniform, lower: 0.0, upper: 0.1"
        )
        add("decay", f"{{type: {spread}}}")
    return found
