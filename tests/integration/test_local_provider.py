"""The local provider: guards, leases, and what a crash leaves. With stand-ins for Ray nodes."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import pytest

from rubberband.cloud.clock import experiment_clock
from rubberband.cloud.local.gpus import holder
from rubberband.cloud.local.provider import LocalProvider, clean_up
from rubberband.cloud.provider import HeadError
from rubberband.cloud.ray_head import ray_node
from rubberband.cloud.ray_head.instance import STARTED, cores, last_words, load
from rubberband.cloud.ray_head.ray_node import RayHead
from rubberband.errors import ProviderError
from tests.builders import fake_nodes
from tests.builders.conversation import nothing_left, processes_of
from tests.builders.waiting import eventually

DRIVER = """
import sys
from pathlib import Path
from rubberband.cloud.provider import HeadError
from rubberband.cloud.local.provider import LocalProvider
from rubberband.cloud.ray_head import ray_node
from tests.builders import fake_nodes
from tests.builders.waiting import eventually
ray_node.head_command, ray_node.instance_command = fake_nodes.head_command, fake_nodes.instance_command
directory = Path(sys.argv[1])
lease_s, devices, token_path = float(sys.argv[2]), sys.argv[3:], directory / "token"
provider = LocalProvider("crash", directory, 2, lease_s, devices=devices, token_path=token_path)
provider.launch("a")
eventually(lambda: provider.describe()[0].state != "pending", "its start")
print("launched", flush=True)
sys.stdin.read()
"""

Open = Callable[..., LocalProvider]


@pytest.fixture(autouse=True)
def _fake_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_node, "head_command", fake_nodes.head_command)
    monkeypatch.setattr(ray_node, "instance_command", fake_nodes.instance_command)


@pytest.fixture
def open_provider(tmp_path: Path) -> Iterator[Open]:
    """Opens providers on one directory, whose leases no slow test outlives; all are closed in the end."""
    opened: list[LocalProvider] = []

    def open_provider(**options: object) -> LocalProvider:
        provider = LocalProvider("local", tmp_path, 2, 600.0, token_path=tmp_path / "token", **options)  # type: ignore[arg-type]
        opened.append(provider)
        return provider

    yield open_provider
    for provider in opened:
        provider.close()


def _launch(provider: LocalProvider, *instances: str) -> None:
    for instance in instances:
        provider.launch(instance)
    eventually(lambda: all(status.state == "running" for status in provider.describe()))


def _crashed_driver(directory: Path, lease_s: float, devices: Sequence[str] = ()) -> None:
    """A driver that launched instance `a` and was killed with -9."""
    root = str(Path(__file__).parents[2])
    search = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-c", DRIVER, str(directory), str(lease_s), *devices]
    pipes, environment = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}, {**os.environ, "PYTHONPATH": search}
    with subprocess.Popen(command, env=environment, **pipes) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == b"launched\n"
        driver.kill()


def test_every_process_carries_the_tags_and_none_survives_close(open_provider: Open, tmp_path: Path) -> None:
    provider = open_provider()
    _launch(provider, "a", "b")
    eventually(lambda: len(processes_of(tmp_path, "a")) == 3)
    folders = [load(path).temp_dir for path in tmp_path.glob("*/*.json")]
    assert all(Path(folder).is_dir() for folder in folders)
    assert len(folders) == len(set(folders)) == 3
    provider.close()
    assert nothing_left(tmp_path)
    assert not any(Path(folder).exists() for folder in folders)


def test_a_guard_killed_with_minus_9_is_noticed_and_nothing_of_it_survives(open_provider: Open, tmp_path: Path) -> None:
    provider = open_provider()
    _launch(provider, "a", "b")
    pid = json.loads((tmp_path / "instances" / "a.json").read_text())["pid"]
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: provider.describe()[0].state == "terminated")
    status = provider.describe()[0]
    assert status.reason == "its process died"
    assert status.running_at is not None
    assert status.ended_at is not None
    assert status.running_at <= status.ended_at <= time.time()
    assert nothing_left(tmp_path, "a")
    assert provider.describe()[1].state == "running"


def test_a_node_that_ends_ends_its_instance(open_provider: Open, tmp_path: Path) -> None:
    provider = open_provider()
    _launch(provider, "a")
    guard = json.loads((tmp_path / "instances" / "a.json").read_text())["pid"]
    eventually(lambda: len(processes_of(tmp_path, "a")) == 3)
    node = next(pid for pid in processes_of(tmp_path, "a") if os.getpgid(pid) == pid and pid != guard)
    os.kill(node, signal.SIGKILL)
    eventually(lambda: provider.describe()[0].state == "terminated")
    assert "Ray node ended" in provider.describe()[0].reason
    eventually(lambda: processes_of(tmp_path, "a") == [])


def test_without_its_head_an_instance_is_lost_and_the_next_launch_starts_another(
    open_provider: Open, tmp_path: Path
) -> None:
    provider = open_provider()
    _launch(provider, "a")
    first = provider.ensure_head()
    record = next(iter((tmp_path / "heads").glob("*.json")))
    os.kill(load(record).pid or 0, signal.SIGTERM)
    eventually(lambda: provider.head() is None)
    assert provider.describe()[0].reason == "the Ray head ended"
    provider.launch("b")
    assert provider.ensure_head().address != first.address


def test_an_expired_lease_ends_everything_that_a_killed_driver_left(open_provider: Open, tmp_path: Path) -> None:
    _crashed_driver(tmp_path, lease_s=1.5)
    eventually(lambda: processes_of(tmp_path) == [])
    assert open_provider().describe()[0].reason in {"lease expired", "the Ray head ended"}  # whichever was first


def test_a_new_driver_finds_what_a_killed_one_left(open_provider: Open, tmp_path: Path) -> None:
    _crashed_driver(tmp_path, lease_s=120.0)
    provider = open_provider()
    (status,) = provider.describe()
    assert (status.instance, status.state, status.experiment) == ("a", "running", "crash")
    provider.launch("a")
    assert list(provider.describe()) == [status]
    assert provider.release("a").state == "terminated"


def test_sweep_ends_what_dead_drivers_left_and_nothing_else(open_provider: Open, tmp_path: Path) -> None:
    _crashed_driver(tmp_path / "dead", lease_s=120.0)
    provider = open_provider()
    _launch(provider, "a")
    eventually(lambda: len(processes_of(tmp_path / "dead", "a")) == 3)
    assert not clean_up(tmp_path, "another").ended
    ended = clean_up(tmp_path).ended
    assert {(found.experiment, found.instance) for found in ended} == {("crash", "a"), ("crash", "head-0")}
    assert all(found.processes >= 2 for found in ended)
    assert nothing_left(tmp_path / "dead")
    assert provider.describe()[0].state == "running"
    assert not clean_up(tmp_path).ended


def test_two_drivers_cannot_hold_one_directory(open_provider: Open) -> None:
    first = open_provider()
    with pytest.raises(ProviderError, match="another driver is running"):
        open_provider()
    first.close()
    open_provider()


def test_real_gpus_are_handed_out_without_overlap_and_taken_back(
    open_provider: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    provider = open_provider(devices=("0", "1", "2", "3"))
    assert provider.device == "cuda"
    _launch(provider, "a", "b")
    held = {name: load(tmp_path / "instances" / f"{name}.json").devices for name in ("a", "b")}
    assert held == {"a": ("0", "1"), "b": ("2", "3")}
    with pytest.raises(ProviderError, match="GPUs are free"):
        provider.launch("c")
    provider.release("a")
    provider.launch("c")
    assert load(tmp_path / "instances" / "c.json").devices == ("0", "1")


def test_runs_at_once_take_different_gpus_and_a_killed_one_gives_its_own_back(
    open_provider: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    gpus = ("GPU-0", "GPU-1", "GPU-2", "GPU-3")
    _crashed_driver(tmp_path / "other", lease_s=120.0, devices=gpus)  # its instance lives on, with two of them
    other = load(tmp_path / "other" / "instances" / "a.json")
    provider = open_provider(devices=gpus)
    provider.launch("a")
    assert other.devices == ("GPU-0", "GPU-1")
    assert load(tmp_path / "instances" / "a.json").devices == ("GPU-2", "GPU-3")
    assert [holder(gpu) for gpu in gpus[1:3]] == [("crash", str(tmp_path / "other")), ("local", str(tmp_path))]
    with pytest.raises(ProviderError, match=r"0 of this machine's 4 GPUs are free \(crash has others\)"):
        provider.launch("b")
    os.kill(other.pid or 0, signal.SIGKILL)
    eventually(lambda: holder("GPU-0") is None)
    provider.launch("b")
    assert load(tmp_path / "instances" / "b.json").devices == ("GPU-0", "GPU-1")
    assert clean_up(tmp_path / "other").ended, "nothing else ends what a killed driver and a killed guard left"


def test_the_port_of_a_head_is_neither_taken_nor_given_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    given_away = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    port = ray_node.free_port()
    assert port < int(given_away[0])
    with socket.create_server(("127.0.0.1", port)):
        monkeypatch.setattr(ray_node, "_QUIET_PORTS", [port])
        assert ray_node.free_port() != port
    with pytest.raises(OSError, match="address"):
        ray_node.free_port("192.0.2.1")


def test_the_token_is_for_this_user_only(open_provider: Open, tmp_path: Path) -> None:
    open_provider()
    token = tmp_path / "token"
    assert token.stat().st_mode & 0o777 == 0o600
    assert len(token.read_text()) == 64
    kept = token.read_text()
    ray_node.ensure_token(token)
    assert token.read_text() == kept


def test_the_token_lies_in_rubberband_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "/dev/null")
    monkeypatch.setenv("RUBBERBAND_HOME", str(tmp_path / "home"))
    with contextlib.closing(LocalProvider("local", tmp_path / "local", 2)):
        assert (tmp_path / "home" / "ray-token").stat().st_mode & 0o777 == 0o600
    monkeypatch.delenv("RUBBERBAND_HOME")
    with pytest.raises(ProviderError, match=r"/dev/null/.* cannot be written \(Not a directory\).*RUBBERBAND_HOME"):
        LocalProvider("local", tmp_path / "local", 2)
    monkeypatch.setenv("HOME", str(tmp_path))
    with contextlib.closing(LocalProvider("local", tmp_path / "local", 2)):
        assert (tmp_path / ".rubberband" / "ray-token").exists()


def test_a_disk_that_is_full_before_the_start_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(ray_node.tempfile, "mkstemp", _no_space)
        with pytest.raises(ProviderError, match=r"cannot be written \(No space left on device\); make room"):
            LocalProvider("local", tmp_path, 2, token_path=tmp_path / "token")
    LocalProvider("local", tmp_path, 2, token_path=tmp_path / "token").close()


def _no_space(*_: object, **__: object) -> NoReturn:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.long
@pytest.mark.parametrize("frozen", [False, True])
def test_on_a_full_disk_instances_are_given_back_all_the_same(
    open_provider: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, frozen: bool
) -> None:
    provider = open_provider()
    _launch(provider, "a", "b", "c")
    if frozen:  # so that no guard writes its own last record
        for name in ("a", "b", "c"):
            os.kill(load(tmp_path / "instances" / f"{name}.json").pid or 0, signal.SIGSTOP)
    with monkeypatch.context() as full:
        full.setattr(Path, "write_text", _no_space)
        full.setattr("rubberband.cloud.ray_head.instance.write_atomically", _no_space)
        assert provider.release("a").state == "terminated"
        eventually(lambda: processes_of(tmp_path, "a") == [])  # its guard may be on its way out
        provider.close()
        assert nothing_left(tmp_path)
    again = open_provider()
    ended = again.describe()
    assert [status.instance for status in ended] == ["a", "b", "c"]
    assert all(status.running_at is not None and status.ended_at is not None for status in ended)


def test_where_even_locks_cannot_be_opened_instances_are_given_back(
    open_provider: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = open_provider()
    _launch(provider, "a", "b")
    with monkeypatch.context() as read_only:
        read_only.setattr("rubberband.cloud.ray_head.ray_node.lock", _no_space)
        assert provider.release("a").state == "terminated"
        provider.close()
    assert nothing_left(tmp_path)


def test_the_first_lease_counts_from_when_it_began_to_run(open_provider: Open, tmp_path: Path) -> None:
    provider = open_provider()
    provider.ensure_head()
    until = time.time() + 1.0
    provider.renew_lease(until)
    provider.launch("a")
    record = tmp_path / "instances" / "a.json"
    eventually(lambda: load(record).ended_at is not None)  # nobody looks: who does ends it with its head
    (status,) = provider.describe()
    assert status.running_at is not None
    assert status.ended_at is not None
    assert status.reason == "lease expired"
    assert status.ended_at >= status.running_at + (until - status.requested_at) - 0.001


def test_a_head_is_found_by_the_next_driver_and_holds_its_directory(tmp_path: Path) -> None:
    first = RayHead("head", tmp_path, token_path=tmp_path / "token")
    assert first.living() is None
    head = first.ensure()
    with pytest.raises(ProviderError, match="another driver"):
        RayHead("head", tmp_path, token_path=tmp_path / "token")
    first._exclusive.close()  # as the kernel does when a driver dies
    second = RayHead("head", tmp_path, token_path=tmp_path / "token")
    assert second.living() == second.ensure() == head
    second.close()
    second.close()
    first.guards.wait()
    assert nothing_left(tmp_path)


def test_a_guard_that_is_slow_to_go_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_node, "_RELEASE_S", 0.01)
    guards = ray_node.Guards("slow", tmp_path, tmp_path / "token", 30.0, experiment_clock(tmp_path))
    slow = subprocess.Popen(["sleep", "1000"])
    guards.renew_lease(2e9)
    guards.write(tmp_path / "slow.json", ("true",), "", "127.0.0.1:1", ())
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: slow)
    guards.spawn(tmp_path / "slow.json")
    guards.wait()
    assert slow.returncode == -signal.SIGKILL


# How nodes start


def _patient_nodes(monkeypatch: pytest.MonkeyPatch, door: Path) -> None:
    """Nodes join once there is a file of their name in `door`."""
    # A process without this repository: it looks for its file by itself.
    wait = (
        "import pathlib, time\nwhile not pathlib.Path({file!r}).exists(): time.sleep(0.02)\nprint({said!r}, flush=1)\n"
    )

    def command(name: str, address: str, gpus: int, temp_dir: str) -> tuple[str, ...]:
        script = wait.format(file=str(door / name), said=STARTED)
        return (sys.executable, "-c", f"{script}time.sleep(1000)")

    door.mkdir()
    monkeypatch.setattr(ray_node, "instance_command", command)


def _has_begun(path: Path) -> Callable[[], bool]:
    return lambda: load(path).began_at is not None


def _runs(path: Path) -> Callable[[], bool]:
    return lambda: load(path).running_at is not None


def test_an_instance_runs_from_when_its_node_has_joined(
    open_provider: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _patient_nodes(monkeypatch, tmp_path / "door")
    provider = open_provider()
    for name in ("a", "b"):
        provider.launch(name)
        eventually(_has_begun(tmp_path / "instances" / f"{name}.json"))
    assert [status.state for status in provider.describe()] == ["pending", "pending"]
    joined_at = time.time()
    (tmp_path / "door" / "a").touch()
    eventually(lambda: provider.describe()[0].state == "running")
    assert (provider.describe()[0].running_at or 0.0) >= joined_at
    status = provider.release("b")
    assert (status.state, status.running_at) == ("terminated", None), "it is not metered"


def test_no_more_nodes_start_at_once_than_there_are_cores(
    open_provider: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _patient_nodes(monkeypatch, tmp_path / "door")
    provider, names = open_provider(), [f"i{number}" for number in range(cores() + 2)]
    for name in names:
        provider.launch(name)
    begun: list[str] = []

    def begin() -> None:
        records = {name: load(tmp_path / "instances" / f"{name}.json") for name in names}
        assert all(record.running_at is None for name, record in records.items() if name not in begun)
        starting = [name for name, record in records.items() if record.began_at and not record.running_at]
        assert len(starting) <= cores()
        for name in starting[:1]:
            begun.append(name)
            (tmp_path / "door" / name).touch()
            eventually(_runs(tmp_path / "instances" / f"{name}.json"))

    while len(begun) < len(names):
        begin()
    assert all(status.state == "running" for status in provider.describe())


def test_one_that_waits_for_its_turn_can_be_given_back(
    open_provider: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _patient_nodes(monkeypatch, tmp_path / "door")
    provider, names = open_provider(), [f"i{number}" for number in range(cores() + 1)]
    for name in names:
        provider.launch(name)
    records = lambda: [load(tmp_path / "instances" / f"{name}.json") for name in names]  # noqa: E731
    eventually(lambda: sum(record.began_at is not None for record in records()) == cores())
    (waiting,) = [record.name for record in records() if record.began_at is None]
    assert provider.release(waiting).running_at is None
    assert nothing_left(tmp_path, waiting)


_BROKEN = "import sys; print('Traceback (most recent call last):'); sys.exit('ImportError: libfoo.so.1: no such file')"


def test_the_cause_of_a_nodes_death_is_shown_and_it_never_ran(
    open_provider: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_node, "instance_command", lambda *_: (sys.executable, "-c", _BROKEN))
    provider = open_provider()
    provider.launch("a")
    eventually(lambda: provider.describe()[0].state == "terminated")
    (status,) = provider.describe()
    log = tmp_path / "instances" / "a.log"
    assert status.reason == f"ray start: ImportError: libfoo.so.1: no such file (exit status 1; see {log})"
    assert status.running_at is None


def test_the_cause_of_a_heads_death_is_shown(open_provider: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_node, "head_command", lambda *_, **__: (sys.executable, "-c", _BROKEN))
    with pytest.raises(HeadError, match=r"the Ray head did not start: ray start: ImportError: libfoo.*exit status 1"):
        open_provider().launch("a")


def test_one_whose_head_does_not_answer_can_be_given_back(
    open_provider: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_node, "head_command", lambda *_, **__: ("sleep", "1000"))
    provider, lines = open_provider(), list[ProviderError]()

    def launch() -> None:
        try:
            provider.launch("a")
        except ProviderError as error:
            lines.append(error)

    asking = threading.Thread(target=launch)
    asking.start()
    eventually(lambda: any(load(path).began_at for path in tmp_path.glob("heads/*.json")))
    with pytest.raises(ProviderError, match="never launched"):
        provider.release("a")
    asking.join()
    assert [str(error) for error in lines] == ["it was released while the Ray head started"]


RAISED = "Exception: The current node timed out during startup. This could happen because some of the raylet failed"
CHECKED = "[2026-01-02 03:04:05,678 C 10 10] (raylet) raylet.cc:12:  Check failed: no space left for the object store"
FATAL = "[2026-01-02 03:04:05,678 E 10 10] (raylet) main.cc:9: Failed to connect to GCS at 10.0.0.1:6379"


@pytest.mark.parametrize(
    ("session", "message"),
    [
        ({}, f"ray start: {RAISED}"),
        ({"raylet.out": "[2026-01-02 03:04:05,678 I 10 10] (raylet) main.cc:1: failed over"}, f"ray start: {RAISED}"),
        ({"raylet.err": FATAL}, "raylet: Failed to connect to GCS at 10.0.0.1:6379"),
        ({"raylet.err": f"{CHECKED}\n{FATAL}"}, "raylet: Check failed: no space left for the object store"),
    ],
)
def test_the_line_that_best_explains_why_a_node_did_not_start(
    tmp_path: Path, session: dict[str, str], message: str
) -> None:
    logs = tmp_path / "session_latest" / "logs"
    logs.mkdir(parents=True)
    for name, text in session.items():
        (logs / name).write_text(f"{text}\n")
    log = tmp_path / "a.log"
    log.write_text(f"Traceback (most recent call last):\n  File x\n{RAISED}\nsome more words\n")
    assert last_words(log, str(tmp_path)) == message
