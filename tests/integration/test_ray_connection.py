"""The driver's connection to its head."""

import ctypes
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ray

from rubberband.cloud.provider import Head
from rubberband.executor import Connection, connection
from tests.builders import processes
from tests.builders.waiting import eventually


@pytest.mark.long
@pytest.mark.ray
def test_a_driver_outlives_its_head_and_finds_another(tmp_path: Path) -> None:
    command = [sys.executable, str(processes.FOLDER / "driver_outlives_head.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout) == (0, "it went on\n"), done.stderr[-2000:]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is called of Ray, in order; nothing of it is carried out."""
    made: list[str] = []
    monkeypatch.setattr(ray, "init", lambda address, **_: made.append(f"init {address}"))
    monkeypatch.setattr(ray, "shutdown", lambda: made.append("shutdown"))
    return made


def head(address: str) -> Head:
    return Head(address=address, temp_dir=None, environment={})


def test_a_silent_head_delays_no_other_instance(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answer = threading.Event(), threading.Event()

    def never(_label: str) -> dict[str, bool]:
        asked.set()
        answer.wait()
        return {"a": False}

    ours = Connection()
    ours.open(head("first"))
    monkeypatch.setattr(connection, "ray_nodes", never)
    with ThreadPoolExecutor() as pool:
        watching = pool.submit(ours.dead_nodes)
        asked.wait()
        ours.leave()
        assert watching.result() == set()
        monkeypatch.setattr(connection, "ray_nodes", lambda _label: {"b": False, "c": True})
        ours.open(head("second"))
        assert ours.dead_nodes() == {"b"}
        ours.close()
    answer.set()
    assert calls == ["init first", "shutdown", "init second", "shutdown"]


def test_it_disconnects_once_the_head_has_answered_and_asks_no_more(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answer = threading.Event(), threading.Event()

    def slow(_label: str) -> dict[str, bool]:
        asked.set()
        answer.wait()
        calls.append("answer")
        return {}

    monkeypatch.setattr(connection, "_FAREWELL_S", 60.0)
    monkeypatch.setattr(connection, "ray_nodes", slow)
    ours = Connection()
    ours.open(head("first"))
    with ThreadPoolExecutor() as pool:
        pool.submit(ours.dead_nodes)
        asked.wait()
        leaving = pool.submit(ours.leave)
        eventually(lambda: ours.address is None)
        assert ours.dead_nodes() == set()
        answer.set()
        leaving.result()
    assert calls == ["init first", "answer", "shutdown"]


def test_ray_reads_its_environment_again(calls: list[str]) -> None:
    config, ours = ray._raylet.Config, Connection()
    ours.open(Head(address="first", temp_dir=None, environment={"RAY_health_check_period_ms": "12345"}))
    assert config.health_check_period_ms() == 12345
    ours.close()
    assert config.health_check_period_ms() != 12345


def test_ray_takes_no_signal_over(monkeypatch: pytest.MonkeyPatch) -> None:
    get, put = ctypes.pythonapi.PyOS_getsig, ctypes.pythonapi.PyOS_setsig
    get.restype = put.restype = ctypes.c_void_p
    put.argtypes = (ctypes.c_int, ctypes.c_void_p)
    for name in ("init", "shutdown"):  # as a Ray does that has no flag
        monkeypatch.setattr(ray, name, lambda **_: put(signal.SIGTERM, None))
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        wanted, ours = get(signal.SIGTERM), Connection()
        ours.open(head("first"))
        connected = get(signal.SIGTERM)
        ours.close()
        assert [connected, get(signal.SIGTERM)] == [wanted, wanted]
    finally:
        signal.signal(signal.SIGTERM, before)
