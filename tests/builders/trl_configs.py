"""Configs of TRL's own scripts, with a model and data made on the spot, as `rubberband init` takes them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rubberband.executor import Entrypoint
from rubberband.executor.training.entrypoint import entrypoint_of
from rubberband.running.first_file import text_of
from rubberband.running.programs.findings import findings_of
from rubberband.spec.loading import load_experiment
from tests.builders.trials import finetuned

BATCH, SAMPLES = 8, 256
_REWARD = """
def longest(completions, **_):
    return [sum(int(word[1:]) % 2 == 0 for word in one.split() if word[1:].isdigit()) / 4.0 for one in completions]
"""


def make(folder: Path, kind: str, adapter: str) -> tuple[Entrypoint, dict[str, Any]]:
    """Write a config of `trl KIND`; return the entrypoint that `init` makes of it, and a configuration."""
    finetuned.base_model(kind).save_pretrained(folder / "model")
    finetuned.tokenizer().save_pretrained(folder / "model")
    (folder / "data").mkdir()
    for name, first, count in (("train", 0, SAMPLES), ("test", 500, 16)):
        rows = finetuned.rows(kind, first, count)
        (folder / "data" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(_REWARD)
    config: dict[str, Any] = {
        "model_name_or_path": "model",
        "dtype": "float32",
        "dataset_name": "data",
        "num_train_epochs": 8,
        "per_device_train_batch_size": BATCH,
        "learning_rate": 1e-3,
        "eval_strategy": "epoch",
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        **({} if adapter == "all" else {"use_peft": True, "lora_r": 4, "lora_target_modules": "all-linear"}),
        **({"use_dora": True} if adapter == "dora" else {}),
        **({"lora_task_type": "SEQ_CLS"} if kind == "reward" and adapter != "all" else {}),
    }
    if kind == "grpo":
        config |= {"reward_funcs": ["rewards.longest"], "num_generations": 4, "max_completion_length": 4}
    (folder / f"{kind}.yaml").write_text(yaml.safe_dump(config))
    path = folder / "search.yaml"
    with contextlib.chdir(folder):
        path.write_text(text_of(findings_of(f"{kind}.yaml", path), path))
        experiment = load_experiment(path)
        return entrypoint_of(experiment, [folder]), {**_middle(experiment.search.space, config)}


def _middle(space: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config's own value of each parameter that is searched, else a usual one."""
    usual = {"lora_alpha": 16, "lora_dropout": 0.0}
    return {name: config.get(name, usual.get(name)) for name in space}
