"""The examples that train, run whole on local instances, and the notebook."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.builders import notebooks
from tests.builders.command_line import CommandLine
from tests.builders.documents import ROOT, Reader, blocks

EXAMPLES = ROOT / "examples"
NOTEBOOK = EXAMPLES / "notebook.ipynb"


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "least"), [("images", 0.3), ("text", 0.55)])
def test_an_example_of_a_model_learns(command_line: CommandLine, name: str, least: float) -> None:
    command_line("run", str(EXAMPLES / f"{name}.yaml"), "-s", "constraints.deadline=1h")
    result = command_line.result(name)
    assert result.outcome == "done"
    assert result.best is not None
    assert result.best.iterations == 13
    assert result.best.metrics["accuracy"] > least


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_example_of_a_divided_model_learns_and_gives_a_whole_one(
    command_line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    example = importlib.import_module("examples.sharded")
    command_line("run", str(EXAMPLES / "sharded.yaml"), "-s", "constraints.deadline=1h")
    best = command_line.result("sharded").best
    assert best is not None
    assert best.checkpoint is not None
    assert len(best.checkpoint.parts) in (1, 3)
    assert best.metrics["accuracy"] > 0.8
    command_line("best", "sharded", "--out", "model.pt")
    model = example.GPT(width=48, layers=3)
    model.load_state_dict(torch.load(command_line.folder / "model.pt", weights_only=True))
    file = command_line.result("sharded").save_best(command_line.folder / "model.safetensors")
    torch.testing.assert_close(load_file(file), dict(model.state_dict()), rtol=0, atol=0)
    trial = command_line.result("sharded").load_best("examples.sharded:GPTTrial")
    torch.testing.assert_close(dict(trial.model.named_parameters()), dict(model.named_parameters()), rtol=0, atol=0)
    (numbers,) = example.sequences(256, seed=1).tensors
    hits = (model.eval()(numbers[:, :-1]).argmax(-1) == numbers[:, 1:]).float().mean().item()
    assert hits == pytest.approx(best.metrics["accuracy"], abs=1e-3)


def test_the_example_of_a_divided_model_does_not_fit_one_worker(command_line: CommandLine) -> None:
    check = ("check", str(EXAMPLES / "sharded.yaml"))
    output, errors = command_line(*check)
    assert "passes; run it" in output
    assert "one worker has too little memory" in errors
    assert "a gang has at least 2" in errors
    _, errors = command_line(*check, "-s", "resources.gpus_per_trial.min=1", "-s", "profile=", exit_code=1)
    assert "MB do not fit a worker; set resources.gpus_per_trial.min higher\n" in errors


@pytest.mark.long
def test_the_text_model_is_replaced_by_one_of_hugging_face(tmp_path: Path) -> None:
    """The block of the page, with a small model in a folder in place of the one that it downloads."""
    (block,) = [block for block in blocks(ROOT / "docs/examples/text.md") if block.title == "pretrained.py"]
    reader = Reader(tmp_path)
    (reader.folder / "make.py").write_text(SMALL_MODEL, encoding="utf-8")
    reader.shell("python make.py")
    name = str(reader.folder / "small")
    text = block.text.replace("distilbert-base-uncased", name)
    assert name in text
    (reader.folder / "pretrained.py").write_text(text, encoding="utf-8")
    file = (reader.folder / "examples/text.yaml").read_text(encoding="utf-8")
    file = file.replace("examples.text:TextTrial", "pretrained:PretrainedTrial")
    (reader.folder / "pretrained.yaml").write_text(file, encoding="utf-8")
    assert "pretrained.yaml passes" in reader.shell("rubberband check pretrained.yaml")


SMALL_MODEL = """
import pathlib
from transformers import DistilBertConfig, DistilBertForSequenceClassification, DistilBertTokenizerFast
from examples.text import WORDS

pathlib.Path("small").mkdir()
pathlib.Path("vocab.txt").write_text("\\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
DistilBertTokenizerFast("vocab.txt").save_pretrained("small")
small = DistilBertConfig(vocab_size=50, dim=16, n_layers=1, n_heads=2, hidden_dim=32, pad_token_id=0)
DistilBertForSequenceClassification(small).save_pretrained("small")
"""


def masked(text: str) -> str:
    """A text without its numbers and durations."""
    return re.sub(r"\b\d[\w.%]*", "N", text)


def test_the_notebook_shows_what_its_first_cells_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those before the run: the estimate, a deadline that is too short, and the rehearsal on the virtual clock."""
    monkeypatch.setenv("RUBBERBAND_HOME", str(tmp_path))
    found = list(notebooks.cells(NOTEBOOK))
    before = found[: next(at for at, cell in enumerate(found) if cell.source.startswith("result = "))]
    assert [*notebooks.run(before, {"__name__": "__main__"})] == [cell.shown for cell in before]
    assert len(before) == 4


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_notebook_runs_whole(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from tests.builders.notebooks import main; main()", str(NOTEBOOK)],
        cwd=tmp_path,
        env={**os.environ, "RUBBERBAND_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        check=True,
    )
    expected = list(notebooks.cells(NOTEBOOK))
    for cell, found in zip(expected, json.loads(done.stdout), strict=True):
        if not cell.source.startswith("result = "):  # in a kernel, `tune` shows its progress in the cell
            assert masked(found) == masked(cell.shown), cell.source
    right = re.search(r"([\d.]+)% of new points are right", found)
    assert right is not None
    assert float(right[1]) > 60
