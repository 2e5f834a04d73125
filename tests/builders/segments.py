"""A segment of a gang of one that training tests vary."""

from __future__ import annotations

from rubberband.executor.training.segment import Segment

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
