"""The examples of both Trainers in gangs: resized, they learn what they learn on one worker."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rubberband.executor import Entrypoint, SegmentReport, open_store, read_manifest
from tests.builders import segments
from tests.builders.processes.segment_worker import run_gang

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


def resized(workers: Any, store: Any, name: str, parts: Any, **changes: Any) -> list[SegmentReport]:
    entrypoint = Entrypoint.parse(f"{name}:train", [EXAMPLES])
    found: list[SegmentReport] = []
    for num_workers, until in parts:
        before = found[-1].checkpoint if found else None
        segment = replace(segments.SEGMENT, max_iterations=9, from_iterations=len(found), checkpoint=before, **changes)
        first, *others = run_gang(workers[:num_workers], entrypoint, replace(segment, until_iterations=until), store)
        assert all(isinstance(item, SegmentReport) for item in first[1:]), first
        assert others == [[]] * (num_workers - 1)
        found += first[1:]
    return found


def test_a_resized_trainer_of_hugging_face_learns_what_one_worker_learns(workers, tmp_path):
    pytest.importorskip("transformers", reason="pip install 'rubberband-tune[transformers]'")
    store, words = open_store(str(tmp_path)), {"metric": "eval_loss", "config": {"lr": 0.01, "weight_decay": 0.01}}
    whole = resized(workers, store, "hf", [(1, 3)], **words)
    parts = resized(workers, store, "hf", [(1, 1), (2, 2), (1, 3)], **words)
    for straight, again in zip(whole, parts, strict=True):
        for name in ("eval_loss", "loss", "eval_accuracy", "epoch"):
            assert again.metrics[name] == pytest.approx(straight.metrics[name], abs=1e-6)


def test_a_resized_trainer_of_lightning_learns_what_one_worker_learns(workers, tmp_path):
    pytest.importorskip("lightning.pytorch", reason="pip install 'rubberband-tune[lightning]'")
    store, words = open_store(str(tmp_path)), {"metric": "val_loss", "config": {"lr": 0.01, "width": 16}}
    whole = resized(workers, store, "lightning_trainer", [(1, 3)], **words)
    parts = resized(workers, store, "lightning_trainer", [(1, 1), (2, 2), (1, 3)], **words)
    for straight, again in zip(whole, parts, strict=True):
        assert again.metrics == pytest.approx(dict(straight.metrics), abs=1e-6)
    files = {file["path"] for file in read_manifest(store.load(parts[-1].checkpoint))["files"]}
    assert files == {"trainer.ckpt", "random-states.pt", "kept/checkpoints-0/best.ckpt"}
