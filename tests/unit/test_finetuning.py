"""`rubberband init` of configs of TRL, Axolotl and LLaMA-Factory, and of the launchers of fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from rubberband import cli
from rubberband.errors import InputError
from rubberband.executor.training.programs.printed import last_checkpoint
from rubberband.running.first_file import text_of
from rubberband.running.programs.findings import findings_of, is_program
from rubberband.spec.experiment import Experiment
from rubberband.spec.loading import load_experiment
from rubberband.spec.program import Program
from tests.builders.finetuning_tools import stand_in
from tests.builders.program_folder import enter, rubberband
from tests.builders.tables import cases


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return enter(tmp_path, monkeypatch)


def init(files: Mapping[str, object], text: str) -> tuple[Experiment, list[str]]:
    """Return the experiment of a config, and the notes about it."""
    for name, content in files.items():
        Path(name).write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    assert is_program(text)
    seen = findings_of(text, path := Path("experiment.yaml"))
    path.write_text(text_of(seen, path))
    return load_experiment(path), list(seen.remarks)


@cases("files", "text", "words")
def test_a_config_becomes_the_experiment(files: Mapping[str, object], text: str, words: Mapping[str, object]) -> None:
    found, notes = init(files, text)
    program = found.entrypoint
    assert isinstance(program, Program)
    written = found.to_words()["search"]
    shown = {
        "command": program.command,
        "resume": program.resume or "",
        "launch": program.launch,
        "rank": program.rank,
        "space": written["space"],
        "scheduler": written["scheduler"],
        "metric": f"{written['metric']} {written['mode']}",
        "name": found.name,
        "notes": notes,
    }
    for key, value in words.items():
        assert shown[key] == value, key


@cases("files", "text", "refusal")
def test_a_config_that_is_not_known_is_refused_in_one_line(
    files: Mapping[str, object], text: str, refusal: str
) -> None:
    for name, content in files.items():
        Path(name).write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    done = CliRunner().invoke(cli.app, ["init", "--no-check", text])
    assert done.exit_code != 0
    assert said(done) == refusal


def said(done: Result) -> str:
    text = str(done.exception) if isinstance(done.exception, InputError) else done.output.strip()
    return text.replace(str(Path.cwd()), "HERE")


SFT = {"model_name_or_path": "m", "dataset_name": "d", "eval_strategy": "epoch"}


@pytest.mark.parametrize(("epochs", "most"), [(19, 32), (20, 20), (64, 64), (65, 32)])
def test_an_iteration_is_an_epoch_where_there_are_20_to_64(epochs: int, most: int) -> None:
    found, _ = init({"sft.yaml": {**SFT, "num_train_epochs": epochs}}, "trl sft --config sft.yaml")
    assert found.to_words()["search"]["scheduler"]["max_t"] == most


def test_a_trial_keeps_its_optimizer_and_words_of_the_command_count_before_the_file() -> None:
    config = {**SFT, "save_only_model": True, "per_device_train_batch_size": 4}
    command = "trl sft --config sft.yaml --per_device_train_batch_size 16"
    found, notes = init({"sft.yaml": config}, command)
    assert isinstance(found.entrypoint, Program)
    assert "--save_only_model False" in found.entrypoint.command
    assert "--per_device_train_batch_size ${16/workers}" in found.entrypoint.command
    assert any(note.startswith("save_only_model is False now") for note in notes)


def test_the_file_to_write_has_another_name_than_the_config() -> None:
    Path("sft.cfg.yaml").write_text("model_name_or_path: m\ndataset_name: d\nlearning_rate: 2e-4\n")
    rubberband("init", "--no-check", "sft.cfg.yaml")
    assert load_experiment("sft-search.yaml").name == "sft"


def test_a_tool_that_is_missing_is_named_with_both_remedies() -> None:
    Path("cfg.yml").write_text("base_model: m\nadapter: lora\nval_set_size: 0.1\n")
    done = CliRunner().invoke(cli.app, ["init", "cfg.yml"])
    assert done.exit_code == 1
    remedy = "pip install axolotl, or add --no-check to write the file as it is"
    assert f"axolotl is not installed here, so no run can be looked at; {remedy}" in str(done.exception or done.output)
    assert not Path("cfg-search.yaml").exists()


def test_the_last_checkpoint_is_the_folder_with_the_highest_number(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    assert last_checkpoint(folder) == folder
    for name in ("checkpoint-90", "checkpoint-500", "runs"):
        (folder / name).mkdir()
    (folder / "model-00700.safetensors").touch()
    assert last_checkpoint(folder) == folder / "checkpoint-500"


@pytest.mark.parametrize("tool", ["axolotl", "llamafactory"])
def test_a_search_resumes_a_tool_with_overrides_of_its_own_form(tool: str) -> None:
    done = rubberband("init", "--yes", stand_in(tool, Path.cwd()))
    again = "evaluates again after a restart: counted once" if tool == "axolotl" else "resumes exactly"
    assert f"resume      {again}" in done.output
    found = load_experiment("cfg-search.yaml")
    assert found.search.metric == "eval_loss"
    done = rubberband("check", "--quick", "cfg-search.yaml")
    assert "cfg-search.yaml passes" in done.output
    assert "eval_loss=4 " not in done.output, "an evaluation before any training is no iteration"
