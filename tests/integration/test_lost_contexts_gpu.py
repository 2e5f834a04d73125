"""A real CUDA context that a label out of range ends, and one that a failed function's memory would fill."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import rubberband
from rubberband.executor import Entrypoint, SegmentReport, open_store
from tests.builders.processes.segment_worker import Worker
from tests.builders.segments import SEGMENT

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def labels(config: dict[str, Any]) -> None:
    """Trains on labels of which one may be out of range; a failure of another kind leaves half a GiB."""
    model = torch.nn.Linear(4, 3).cuda()
    held = torch.zeros(2**27, device="cuda")
    target = torch.full((8,), 7 if config.get("bad") else 1, device="cuda")
    loss = torch.nn.functional.cross_entropy(model(torch.ones(8, 4, device="cuda")), target)
    if config.get("raises"):
        raise ValueError(f"{held.numel()} numbers stay")
    rubberband.report({"loss": loss.item(), "held": torch.cuda.memory_allocated() / 2**20}, checkpoint=1)


def test_a_label_out_of_range_fails_its_trial_with_a_fix_and_says_that_the_context_is_lost(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    entrypoint = Entrypoint.parse("tests.integration.test_lost_contexts_gpu:labels", [Path(__file__).parents[2]])
    segment = replace(SEGMENT, device="cuda", until_iterations=1)

    def train(worker: Worker, **config: Any) -> Any:
        worker.send(entrypoint, replace(segment, config=config), store)
        return worker.receive()[-1]

    worker = Worker()
    try:
        assert not train(worker, raises=True).context_lost
        good = train(worker)
        assert isinstance(good, SegmentReport)
        assert good.metrics["held"] < 600.0
        bad = train(worker, bad=True)
        assert bad.context_lost
        assert "device-side assert triggered; a label or index is probably out of range" in bad.message
    finally:
        worker.stop()
