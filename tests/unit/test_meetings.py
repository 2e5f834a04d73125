"""Where the workers of a gang wait for each other during a segment, and what a plain trial finds at its rendezvous."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import rubberband
from rubberband.executor import Entrypoint, Runner, Steps, open_store, run_segment, worker_process
from rubberband.executor.training import run
from tests.builders.segments import SEGMENT, reports


class Counting(Runner):
    """Notes the iterations after which it meets the others."""

    def __init__(self, every: int, ends_after: int) -> None:
        self.checkpoint_every = every
        self._ends_after = ends_after
        self._done = 0
        self.met: list[int] = []

    def restore(self, payload: Any) -> int:
        raise NotImplementedError

    def steps(self, iterations: int) -> Steps:
        self._done, self.ended = iterations, iterations == self._ends_after
        yield
        return {"loss": 1.0}

    def dump(self, iterations: int, metrics: Mapping[str, float], *, is_last: bool = False) -> bytes:
        return b"state"

    def meet(self) -> None:
        self.met.append(self._done)

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("every", "ends_after", "met"), [(1, 9, [1, 2, 3, 4]), (2, 9, [2, 4]), (2, 3, [2]), (9, 9, []), (1, 1, [])]
)
def test_all_workers_meet_after_the_same_iterations(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, every: int, ends_after: int, met: list[int]
) -> None:
    """A worker that meets more often than the others waits without end."""
    for rank in range(2):
        runner = Counting(every, ends_after)
        monkeypatch.setattr(run, "make_runner", lambda *_, made=runner: made)
        segment = replace(SEGMENT, rank=rank, num_workers=2, until_iterations=5)
        list(run_segment(Entrypoint.parse("a:b"), segment, open_store(str(tmp_path))))
        assert runner.met == met, f"rank {rank}"


class Listening(rubberband.Trial):
    """Forms a group of its own at its rendezvous."""

    def setup(self, config, context):
        with socket.create_server(("", urlsplit(context.rendezvous).port)):
            pass

    def iterate(self):
        return {"loss": 1.0}

    def save(self):
        return None

    def load(self, state):
        pass


def test_a_trial_can_listen_at_its_rendezvous(tmp_path: Path) -> None:
    place = f"tcp://127.0.0.1:{worker_process.reserve_port()}"
    segment = replace(SEGMENT, num_workers=2, rendezvous=place, until_iterations=1)
    assert len(reports(list(run_segment(Entrypoint.from_object(Listening), segment, open_store(str(tmp_path)))))) == 1
