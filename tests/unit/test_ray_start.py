"""How a node of Ray is started: with what nobody asks of it left out, where this Ray can be started so."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest

from rubberband.cloud.ray_head import ray_node, ray_start

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
