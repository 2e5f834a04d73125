"""What is told of a trial whose process the kernel ended for want of memory."""

from __future__ import annotations

import os
from pathlib import Path

from rubberband.cloud.local.ray_node import SETTINGS, environment
from rubberband.cloud.node import memory_kills
from rubberband.executor.ray.attempt import RAN_OUT, Gathered
from rubberband.executor.training.segment import SegmentFailure


def test_the_kernel_s_count_is_read(tmp_path: Path) -> None:
    counters = tmp_path / "vmstat"
    counters.write_text("pgfault 7\noom_kill 3\nnr_oom_kill_x 9\n")
    assert memory_kills(counters) == 3
    counters.write_text("pgfault 7\n")
    assert memory_kills(counters) == memory_kills(tmp_path / "none") == 0


def test_a_death_by_lack_of_memory_is_distinguished_from_other_deaths() -> None:
    echo = SegmentFailure(kind="raised", message="gloo lost a peer", details="", secondary=True)
    died = Gathered(failures=[echo], deaths=["rank 0: The actor is dead"])
    assert "its process exited" in died.cause()[1]
    died.ran_out = True
    assert died.cause() == ("died", RAN_OUT, "rank 0: The actor is dead")
    raised = SegmentFailure(kind="raised", message="boom", details="", secondary=False)
    assert Gathered(failures=[raised], deaths=["rank 0"], ran_out=True).cause()[1] == "boom"


def test_the_kernel_chooses_the_process_that_lack_of_memory_ends(tmp_path: Path) -> None:
    """Ray would end the worker that came last, on every instance of this machine at once."""
    assert SETTINGS["RAY_memory_monitor_refresh_ms"] == "0"
    assert environment(os.environ, tmp_path, {}, ())["RAY_memory_monitor_refresh_ms"] == "0"
