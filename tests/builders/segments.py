"""A segment of a gang of one that training tests vary."""

from __future__ import annotations

from typing import Any

from rubberband.executor.training.segment import Segment, SegmentReport, SegmentStarted

SEGMENT = Segment(
    trial=4,
    attempt=1,
    config={},
    seed=11,
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
    """The reports of a segment of which nothing failed."""
    assert isinstance(items[0], SegmentStarted), items
    assert all(isinstance(item, SegmentReport) for item in items[1:]), items
    return items[1:]
