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


def _refs(trial):  # type: ignore[no-untyped-def]
    yield from (saved.checkpoint for saved in trial.checkpoints)
    yield from (one.file for one in trial.artifacts)
