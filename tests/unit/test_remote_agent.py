"""What a driver believes of the lease of an instance whose answers may be lost."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from rubberband.executor.ray import remote_agent as module
from rubberband.executor.ray.remote_agent import Beat, RemoteAgent
from tests.builders.conversation import eventually


@pytest.mark.parametrize("answers", [True, False])
def test_a_lease_that_may_have_been_put_off_counts_as_put_off(monkeypatch: pytest.MonkeyPatch, answers: bool) -> None:
    def get(_asked: object, timeout: float) -> Beat:
        if not answers:
            raise TimeoutError("the answer was lost")
        return Beat(interruption=None, logs=())

    actor: Any = SimpleNamespace(beat=SimpleNamespace(remote=lambda *_: None))
    posted = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda _instance: actor))
    monkeypatch.setattr(
        module, "ray", SimpleNamespace(remote=lambda _: posted, get=get, kill=lambda _: None), raising=True
    )
    monkeypatch.setattr(module, "ray_nodes", lambda: {"a": True})
    agent = RemoteAgent("a", until=lambda: 40.0, interval_s=0.05, logs=None, log_limit_bytes=1, on_notice=lambda: None)
    assert agent.reaches == -math.inf
    agent.begin()
    try:
        eventually(lambda: agent.reaches == 40.0)
    finally:
        agent.dismiss()
