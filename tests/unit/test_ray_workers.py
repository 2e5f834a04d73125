"""Ray in this package: how its nodes and workers start, and what its threads may do."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rubberband.cloud.ray_head import ray_node, ray_start
from rubberband.executor import Entrypoint, Workers, connection, open_store
from rubberband.executor.ray import workers as module


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
    monkeypatch.setattr(module, "ray_nodes", lambda _label: {"a": True})
    monkeypatch.setattr(module, "placement_group", lambda *_, **__: group)
    monkeypatch.setattr(Workers, "_start", lambda _, place, gpu: (place, gpu))
    monkeypatch.setattr(Workers, "warm_up", lambda *_: None)
    workers = Workers(
        "a",
        2,
        Entrypoint.parse("a:b"),
        open_store(str(tmp_path)),
        device="cpu",
        slots_on_machine=2,
        timeout_s=0.0,
        on_sick=lambda *_: None,
        remote=remote,
    )
    workers.assemble()
    assert group.looks == 1
    assert [workers.worker(gpu).result() for gpu in range(2)] == [(group, 0), (group, 1)]


pytest.importorskip("ray")


def test_agents_are_replaced_without_waiting_for_their_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    started: list[list[str]] = []
    ports: dict[str, int] = {}
    monkeypatch.setattr(ray._raylet, "persist_port", lambda session, node, name, port: ports.update({name: port}))
    services = SimpleNamespace(start_ray_process=lambda command, kind: started.append(command))
    ray_start._start_without_agents(services)
    agents = ["--dashboard_agent_command", "--runtime_env_agent_command"]
    command = ["raylet", "--session_dir=/s", "--node_id=7", *(f"{agent}=python agent.py" for agent in agents)]
    services.start_ray_process(command, "raylet")
    services.start_ray_process(["gcs_server", "--port=1"], "gcs_server")
    raylet, head = started
    assert raylet[:3] == command[:3]
    assert [word.split("=", 1)[0] for word in raylet[3:]] == agents
    assert "agent.py" not in " ".join(raylet)
    assert len(ports) == 4
    assert set(ports.values()) == {-1}
    assert head == ["gcs_server", "--port=1"]


def test_another_ray_is_started_as_it_wants(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lacks(_: object) -> None:
        raise ImportError("cannot import name 'persist_port'")

    class Executed(Exception):
        pass

    def execute(path: str, words: list[str]) -> None:
        raise Executed(path, words)

    monkeypatch.setattr(ray_start, "_prepared", lacks)
    monkeypatch.setattr(os, "execv", execute)
    words = list(ray_node.instance_command("i-1", "127.0.0.1:6379", 1, "/tmp/rb-1")[3:])
    with pytest.raises(Executed) as executed:
        ray_start.main(words)
    assert executed.value.args == (sys.executable, [sys.executable, "-m", "ray.scripts.scripts", *words])
    assert "persist_port" in capsys.readouterr().out


def test_a_thread_that_still_works_is_waited_for() -> None:
    may_end, ended = threading.Event(), threading.Event()

    def work() -> None:
        may_end.wait(30.0)
        ended.set()

    connection.start(work, "works")
    connection.settle(0.0)
    assert not ended.is_set()
    may_end.set()
    connection.settle(30.0)
    assert ended.is_set()


def test_a_thread_does_not_wait_for_itself() -> None:
    thread = connection.start(lambda: connection.settle(30.0), "settles")
    thread.join(10.0)
    assert not thread.is_alive()
