"""The workers of an instance are ordered at the first look that can see their place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rubberband.executor.checkpoints import open_store
from rubberband.executor.ray import workers as module
from rubberband.executor.ray.workers import Workers
from rubberband.executor.training.entrypoint import Entrypoint


class WholeSeconds:
    """A placement group that is there, of which Ray's `wait` sees nothing in less than a second (ray 2.60)."""

    def __init__(self) -> None:
        self.looks = 0

    def wait(self, timeout_seconds: float) -> bool:
        self.looks += 1
        return int(timeout_seconds) >= 1


@pytest.mark.parametrize("remote", [True, False])
def test_workers_start_at_the_first_look_at_a_place_that_is_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, remote: bool
) -> None:
    group: Any = WholeSeconds()
    monkeypatch.setattr(module, "ray_nodes", lambda: {"a": True})
    monkeypatch.setattr(module, "placement_group", lambda *_, **__: group)
    monkeypatch.setattr(Workers, "_start", lambda _, place, gpu: (place, gpu))
    monkeypatch.setattr(Workers, "_warm_up", lambda *_: None)
    workers = Workers(
        "a",
        2,
        Entrypoint.parse("a:b"),
        open_store(str(tmp_path)),
        device="cpu",
        gpus_on_machine=2,
        timeout_s=0.0,
        on_sick=lambda *_: None,
        remote=remote,
    )
    workers.assemble()
    assert group.looks == 1
    assert [workers.worker(gpu).result() for gpu in range(2)] == [(group, 0), (group, 1)]
