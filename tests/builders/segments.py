"""A segment of a gang of one that training tests vary."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import torch

from rubberband.executor import (
    CheckpointStore,
    Entrypoint,
    Segment,
    SegmentFailure,
    SegmentReport,
    SegmentStarted,
    run_segment,
)

SEGMENT = Segment(
    trial=4,
    attempt=1,
    config={},
    seed=11,
    data_seed=11,
    metric="loss",
    rank=0,
    num_workers=1,
    rendezvous=None,
    device="cpu",
    from_iterations=0,
    until_iterations=4,
    checkpoint=None,
)


def reports(items: list[Any]) -> list[SegmentReport]:
    assert isinstance(items[0], SegmentStarted), items
    assert all(isinstance(item, SegmentReport) for item in items[1:]), items
    return items[1:]


def train(trial: Any, store: CheckpointStore, **changes: Any) -> list[Any]:
    """Everything that a segment of a trial in this process says."""
    return list(run_segment(Entrypoint.from_object(trial), replace(SEGMENT, **changes), store))


def failure(items: list[Any]) -> SegmentFailure:
    """How a segment failed; its message is one line."""
    assert isinstance(items[-1], SegmentFailure), items
    assert "\n" not in items[-1].message
    return items[-1]


def content(store: CheckpointStore, report: SegmentReport) -> dict[str, Any]:
    """The checkpoint of a report."""
    loaded: dict[str, Any] = torch.load(io.BytesIO(store.load(report.checkpoint)), weights_only=False)
    return loaded


def variant(trial: type, **members: Any) -> type:
    """Return a subclass that is sent to workers by value."""
    return type("Variant", (trial,), {"__module__": __name__, "__qualname__": "<made>.Variant", **members})
