"""A LightningModule in gangs of real processes: it learns on any number of workers what it learns on one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rubberband.executor import SegmentReport, open_store
from tests.builders import segments, trials
from tests.builders.processes.segment_worker import run_gang

pytest.importorskip("lightning.pytorch", reason="pip install 'rubberband-tune[lightning]'")

SEGMENT = replace(segments.SEGMENT, metric="val_loss", data_seed=3, until_iterations=4, max_iterations=4)


@pytest.mark.long
@pytest.mark.parametrize("name", ["Classifier", "OnAll"])
def test_a_resized_module_learns_what_one_never_resized_learns(workers, tmp_path, name):
    store = open_store(str(tmp_path))
    entrypoint = trials.entrypoint(f"lightning_trials:{name}")
    whole = run_gang(workers[:1], entrypoint, SEGMENT, store)[0][1:]
    parts: list[SegmentReport] = []
    for num_workers, until in ((1, 1), (2, 3), (1, 4)):
        before = parts[-1].checkpoint if parts else None
        segment = replace(SEGMENT, from_iterations=len(parts), until_iterations=until, checkpoint=before)
        first, *others = run_gang(workers[:num_workers], entrypoint, segment, store)
        assert all(isinstance(item, SegmentReport) for item in first[1:]), first
        assert others == [[]] * (num_workers - 1)
        parts += first[1:]
    assert len(parts) == 4
    for straight, resized in zip(whole, parts, strict=True):
        assert {"val_loss", "train_loss", "train_accuracy"} <= resized.metrics.keys()
        assert resized.metrics == pytest.approx(dict(straight.metrics), rel=1e-10)
