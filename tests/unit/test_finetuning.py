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


STAND_IN = '''
"""Trains nothing, and reads, saves, resumes and prints as {name} does: the Trainer saves after its line."""
import ast, json, pathlib, sys, time
import yaml
args = yaml.safe_load(pathlib.Path(sys.argv[1]).read_text())
for word in sys.argv[2:]:
    key, _, value = word.partition("=")
    assert key.startswith("--") == {dashed}, word
    args[key.removeprefix("--")] = yaml.safe_load(value)
assert args["save_steps"] == args["eval_steps"] == 0.03125, args
step, x, out = 0, 4.0, pathlib.Path(args["output_dir"])
if "resume_from_checkpoint" in args:
    step, x = json.loads(pathlib.Path(args["resume_from_checkpoint"], "state.json").read_text())
lr, rank = float(args["learning_rate"]), int(args["{rank}"])
def evaluate():
    print({{"eval_loss": f"{{x:.4g}}", "eval_runtime": "0.01", "epoch": f"{{step * 3 / 64:.4g}}"}}, flush=True)
if {on_start}:
    evaluate()
while step < 64:
    step, x = step + 1, x - 100 * lr * x / rank
    time.sleep(0.06)
    if step % 2 == 0:
        evaluate()
        time.sleep(0.02)
        folder = out / f"checkpoint-{{step}}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "state.json").write_text(json.dumps([step, x]))
        time.sleep(0.2)  # as long as a machine may need between two files
        (folder / "trainer_state.json").write_text("{{}}")
'''


@pytest.mark.parametrize("tool", ["axolotl", "llamafactory"])
def test_a_search_resumes_a_tool_with_overrides_of_its_own_form(tool: str) -> None:
    is_axolotl = tool == "axolotl"
    module = Path(tool, "cli/train.py" if is_axolotl else "launcher.py")
    module.parent.mkdir(parents=True)
    text = STAND_IN.format(
        name=tool, dashed=is_axolotl, rank="lora_r" if is_axolotl else "lora_rank", on_start=is_axolotl
    )
    module.write_text(text)
    config: dict[str, object] = {"learning_rate": 2e-4, "output_dir": "shared"}
    config |= (
        {"base_model": "m", "adapter": "lora", "val_set_size": 0.1, "num_epochs": 3, "lora_r": 16, "evals_per_epoch": 4}
        if is_axolotl
        else {"model_name_or_path": "m", "stage": "sft", "dataset": "d", "val_size": 0.1, "lora_rank": 16}
    )
    Path("cfg.yaml").write_text(yaml.safe_dump(config))
    done = rubberband("init", "--yes", "axolotl train cfg.yaml" if is_axolotl else "llamafactory-cli train cfg.yaml")
    again = "evaluates again after a restart: counted once" if is_axolotl else "resumes exactly"
    assert f"resume      {again}" in done.output
    found = load_experiment("cfg-search.yaml")
    assert found.search.metric == "eval_loss"
    done = rubberband("check", "--quick", "cfg-search.yaml")
    assert "cfg-search.yaml passes" in done.output
    assert "eval_loss=4 " not in done.output, "an evaluation before any training is no iteration"
