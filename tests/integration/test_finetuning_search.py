"""A real search from a config of TRL by `rubberband init`, `check` and `run`, on a Llama made on the spot."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rubberband.spec.loading import load_experiment
from tests.builders.finetuning_tools import stand_in
from tests.builders.small_llama import make_model

pytest.importorskip("trl", reason="pip install 'rubberband-tune[finetune]'")
pytest.importorskip("peft", reason="pip install 'rubberband-tune[finetune]'")
pytestmark = [pytest.mark.long, pytest.mark.ray, pytest.mark.timeout(900)]

CONFIG = """
model_name_or_path: model
dataset_name: data
learning_rate: 2.0e-4
num_train_epochs: 4
per_device_train_batch_size: 8
max_length: 32
use_peft: true
lora_r: 16
lora_alpha: 32
eval_strategy: steps
output_dir: out
report_to: none
bf16: false
"""
Run = Callable[..., str]


@pytest.fixture
def rubberband(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return what runs a command of RubberBand in a folder with a model, a dataset and a config."""
    make_model(tmp_path)
    (tmp_path / "sft.yaml").write_text(CONFIG)
    monkeypatch.setenv("RUBBERBAND_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def run(*words: str) -> str:
        command = [sys.executable, "-m", "rubberband.cli", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout if "json" in words else done.stdout + done.stderr

    return run


def steps_in(folder: Path) -> list[int]:
    """Return the steps of the evaluations that a trial's Trainer has in its state."""
    (state,) = folder.glob("checkpoint-*/trainer_state.json")
    return [each["step"] for each in json.loads(state.read_text())["log_history"] if "eval_loss" in each]


def test_a_search_of_trl_sft_goes_on_in_its_second_stage_where_the_first_has_ended(
    rubberband: Run, tmp_path: Path
) -> None:
    assert "resume      resumes exactly" in rubberband("init", "--yes", "trl sft --config sft.yaml")
    assert "sft-search.yaml passes" in rubberband("check", "--quick", "sft-search.yaml")
    file = tmp_path / "sft-search.yaml"
    two_stages = "scheduler: {type: sha, num_samples: 3, grace_period: 8, max_t: 32, reduction_factor: 3}"
    file.write_text(re.sub(r"scheduler: \{.*\}", two_stages, file.read_text()))
    assert {"learning_rate", "lora_r", "lora_alpha"} <= {*load_experiment(file).search.space}
    said = rubberband("run", "sft-search.yaml", "-s", "search.space.per_device_train_batch_size=8")
    assert "stage 1" in said
    assert "without a checkpoint" not in said
    assert "starts again" not in said
    rubberband("best", "sft", "--out", "best")
    assert steps_in(tmp_path / "best") == [16 * step for step in range(1, 33)]


@pytest.mark.parametrize("words", [("trl", "sft"), ("accelerate", "launch", "-m", "trl.scripts.sft")])
def test_a_launcher_trains_one_worker_at_a_port_of_its_own(
    words: tuple[str, ...], rubberband: Run, tmp_path: Path
) -> None:
    config = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", "use_cpu": True}
    (tmp_path / "acc.yaml").write_text(json.dumps({**config, "mixed_precision": "no", "num_processes": 1}))
    kept = ["--config_file", "acc.yaml"]
    line = [*words[:2], *kept, *words[2:]] if words[0] == "accelerate" else [*words, *kept]
    said = rubberband("init", "--yes", "--", *line, "--config", "sft.yaml")
    assert re.search("resume      (resumes exactly|was restored)", said), "or its start took too long to compare"
    entrypoint = load_experiment(tmp_path / "sft-search.yaml").to_words()["entrypoint"]
    assert entrypoint["launch"] == "machine"
    assert "--main_process_port ${master_port}" in entrypoint["command"]
    finish(rubberband)


@pytest.mark.parametrize("tool", ["axolotl", "llamafactory"])
def test_a_search_of_a_tool_that_is_not_here_finishes_with_a_stand_in(
    tool: str, rubberband: Run, tmp_path: Path
) -> None:
    rubberband("init", "--yes", stand_in(tool, tmp_path))
    finish(rubberband, "cfg-search.yaml")


def finish(rubberband: Run, file: str = "sft-search.yaml") -> None:
    """Run a search of three trials in two stages, as `init` wrote it."""
    few = "search.scheduler={type: sha, num_samples: 3, grace_period: 8, max_t: 32, reduction_factor: 3}"
    said = rubberband("run", file, "-s", few)
    assert "without a checkpoint" not in said
    assert "starts again" not in said
    name = file.removesuffix("-search.yaml")
    result = json.loads(rubberband("report", name, "-o", "json"))
    assert result["outcome"] == "done"
    assert max(trial["iterations"] for trial in result["trials"]) == 32
