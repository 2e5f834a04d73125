"""Repeats, limits, the best iteration and artifacts of a search on real Ray, through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.builders.command_line import EXPERIMENT, CommandLine

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(420)]

TRAIN = """
from pathlib import Path
import rubberband


def train(config):
    state = rubberband.get_checkpoint() or {"done": 0}
    for iteration in range(state["done"] + 1, 100):
        score = config["x"] * (5 - abs(4 - iteration))  # the fourth iteration is the best
        Path("note.txt").write_text(f"iteration {iteration}")
        rubberband.artifact("note.txt", name="notes/latest.txt")
        if iteration == 2:
            rubberband.artifact("note.txt", name="second.txt")
        metrics = {"score": score, "latency_ms": 30.0 if config["x"] > 0.6 else 10.0}
        rubberband.report(metrics, checkpoint={"done": iteration})
"""


def test_a_search_ranks_means_within_limits_and_keeps_the_best_iteration_and_files(tmp_path: Path) -> None:
    command_line = CommandLine(tmp_path)
    (tmp_path / "kept.py").write_text(TRAIN)
    stages = "stages: [{trials: 4, iterations: 4}, {trials: 2, iterations: 10}]"
    text = EXPERIMENT.replace(stages, "stages: [{trials: 3, iterations: 2}, {trials: 1, iterations: 5}]")
    text = text.replace("sleepy:Sleepy", "kept:train").replace("name: sleepy", "name: kept")
    text = text.replace("  mode: max\n", "  mode: max\n  repeats: 2\n  also: [{metric: latency_ms, at_most: 20}]\n")
    (tmp_path / "kept.yaml").write_text(text)
    command_line("run", "kept.yaml", "-s", "resources.keep=best")
    result = command_line.result("kept")
    assert result.outcome == "done"
    assert len(result.trials) == 6
    best = result.best
    assert best is not None
    within = [one for one in result.trials if one.configuration["x"] <= 0.6]
    assert best.configuration["x"] == max(one.configuration["x"] for one in within)
    assert best.standing is not None
    assert (best.feasible, best.standing.repeats, best.standing.spread) == (True, 2, 0.0)
    pair = result.trials[best.trial // 2 * 2 : best.trial // 2 * 2 + 2]
    assert pair[0].configuration == pair[1].configuration
    assert pair[0].seed != pair[1].seed
    assert [(one.iterations, one.status) for one in pair] == [(7, "completed")] * 2
    assert [(saved.iterations, saved.best) for saved in best.checkpoints] == [(7, False), (6, False), (4, True)]

    shown = json.loads(command_line.shows("best", "kept", "--iteration", "best", "-o", "json"))
    assert (shown["iterations"], shown["metrics"]["score"]) == (4, pytest.approx(5 * best.configuration["x"]))
    assert result.best_at("best").checkpoint == best.checkpoints[2].checkpoint

    assert [one.name for one in best.artifacts] == ["notes/latest.txt", "second.txt"]
    command_line("artifacts", "kept", "--to", "files")
    assert (tmp_path / "files" / "notes" / "latest.txt").read_text() == "iteration 7"
    assert (tmp_path / "files" / "second.txt").read_text() == "iteration 2"
    assert "second.txt" in command_line.shows("artifacts", "kept", str(pair[0].trial))
    files = (
        [path for path in (tmp_path / "home").rglob("*.ckpt") if path.is_file()] if (tmp_path / "home").exists() else []
    )
    names = {ref.url.rpartition("/")[2] for trial in result.trials for ref in _refs(trial)}
    assert {path.name for path in files} <= names


GANG = """
import os
import torch
import rubberband


@rubberband.distributed
def train(config):
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    for iteration in range(1, 3):
        with open(f"of-{rank}.txt", "w") as file:
            file.write(f"rank {rank} after {iteration}")
        rubberband.artifact(f"of-{rank}.txt", name="same.txt")
        rubberband.artifact(f"of-{rank}.txt")
        torch.distributed.barrier()
        rubberband.report({"score": config["x"]})
"""
MODULE = """
from pathlib import Path
import torch
from torch.utils.data import TensorDataset
import rubberband


class Line(rubberband.TorchTrial):
    batch_size = 8

    def build_model(self, config):
        return torch.nn.Linear(2, 1)

    def build_optimizer(self, config, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def train_dataset(self, config):
        return TensorDataset(torch.ones(16, 2), torch.ones(16, 1))

    def eval_dataset(self, config):
        return TensorDataset(torch.ones(16, 2), torch.ones(16, 1))

    def loss(self, model, batch):
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

    def evaluate(self, model, batches):
        Path("line.txt").write_text("a line")
        rubberband.artifact("line.txt")
        return {"score": 1.0}
"""
PROGRAM = """
echo "x=$1" > "$RUBBERBAND_ARTIFACTS/given.txt"
mkdir -p "$RUBBERBAND_ARTIFACTS/plots"
for iteration in 1 2; do
  echo "$iteration" > "$RUBBERBAND_ARTIFACTS/plots/latest.txt"
  sleep 0.2
  echo "score=$1"
done
echo "the end" > "$RUBBERBAND_ARTIFACTS/end.txt"
"""
KINDS = {
    "gang": ("kept:train", {"of-0.txt": "rank 0 after 2", "same.txt": "rank 0 after 2"}),
    "torch": ("kept:Line", {"line.txt": "a line"}),
    "program": (
        "{command: 'bash kept.sh ${x}', metrics: stdout}",
        {"end.txt": "the end\n", "given.txt": None, "plots/latest.txt": "2\n"},
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_trial_keeps_files_in_an_object_store(kind: str, tmp_path: Path, s3: str) -> None:
    command_line = CommandLine(tmp_path)
    (tmp_path / "kept.py").write_text(GANG if kind == "gang" else MODULE)
    (tmp_path / "kept.sh").write_text(PROGRAM)
    entrypoint, files = KINDS[kind]
    gpus = 2 if kind == "gang" else 1
    settings = (
        f"entrypoint={entrypoint}",
        "name=kept",
        "search.scheduler={type: stages, stages: [{trials: 2, iterations: 2}]}",
        f"resources.gpus_per_trial={{min: {gpus}, max: {gpus}}}",
        f"profile.seconds_per_iteration={{{gpus}: 0.4}}",
        f"resources.checkpoints=s3://{s3}/{kind}",
    )
    command_line("run", "sleepy.yaml", "--no-check", *(word for setting in settings for word in ("-s", setting)))
    result = command_line.result("kept")
    assert result.best is not None
    assert [one.status for one in result.trials] == ["completed"] * 2
    assert [one.name for one in result.best.artifacts] == sorted(files)
    assert {one.file.url.partition("/kept")[0] for one in result.best.artifacts} == {f"s3://{s3}/{kind}"}
    command_line("artifacts", "kept", "--to", "files")
    for name, text in files.items():
        assert text in (None, (tmp_path / "files" / name).read_text())
    if kind == "gang":
        why = "rank 1 of a gang gave it, and the files of rank 0 are"
        assert f"is not kept: {why}" in command_line.shows("logs", "kept")


def _refs(trial):  # type: ignore[no-untyped-def]
    yield from (saved.checkpoint for saved in trial.checkpoints)
    yield from (one.file for one in trial.artifacts)
