"""A GPU that really runs out of memory, of which this process may use a part: a step is divided and learns the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import rubberband
from rubberband.executor import Entrypoint, SegmentReport, SegmentStarted, open_store, run_segment
from rubberband.values.adaptive import AdaptiveBatch
from tests.builders import segments

pytestmark = pytest.mark.gpu

WIDTH, LAYERS = 1024, 8
ROWS = 2048
"""Of a sample, so that one takes about 64 MiB of activations."""
BYTES = 1 << 30
"""Memory of this process: a batch of 4 fits, one of 16 does not."""


class Wide(rubberband.TorchTrial):
    """Layers on samples of many rows."""

    batch_size = 16
    num_workers = 0

    def build_model(self, config: Mapping[str, Any]) -> torch.nn.Module:
        layers = [layer for _ in range(LAYERS) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())]
        return torch.nn.Sequential(*layers)

    def build_optimizer(self, config: Mapping[str, Any], model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01)

    def train_dataset(self, config: Mapping[str, Any]) -> TensorDataset:
        return TensorDataset(torch.randn(64, WIDTH))

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        (rows,) = batch
        return model(rows[:, None, :].expand(-1, ROWS, -1)).square().mean()


@pytest.fixture
def little_memory() -> Iterator[None]:
    whole = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(BYTES / whole)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def run(folder: Path, batch: AdaptiveBatch | None) -> list[SegmentReport]:
    segment = replace(segments.SEGMENT, metric="train_loss", config={}, until_iterations=3, device="cuda", batch=batch)
    entrypoint = Entrypoint.parse(f"{Path(__file__).stem}:Wide", [Path(__file__).parent])
    first, *reports = list(run_segment(entrypoint, segment, open_store(str(folder))))
    assert isinstance(first, SegmentStarted), first
    assert all(isinstance(report, SegmentReport) for report in reports), reports
    return reports


def test_a_fixed_batch_is_accumulated(tmp_path, little_memory):
    limited = run(tmp_path / "limited", None)
    torch.cuda.set_per_process_memory_fraction(1.0)
    whole = run(tmp_path / "whole", None)
    for one, other in zip(limited, whole, strict=True):
        assert one.metrics == pytest.approx(dict(other.metrics), rel=1e-3)


def test_adaptive_batches_stay_within_the_memory(tmp_path, little_memory):
    reports = run(tmp_path, AdaptiveBatch(max=64, interval=2))
    limit = reports[-1].batch.limits.max_per_gpu
    assert limit is not None
    assert 1 <= limit < 16
