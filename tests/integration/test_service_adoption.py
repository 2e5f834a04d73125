"""`kill -9` of the server: experiments go on, are adopted, and their events are told once each, in order."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from rubberband.client.client import Client
from rubberband.cloud.ray_head.ray_node import free_port  # one that Linux gives to nobody while the server is away
from rubberband.executor import ExperimentFolder, is_hosted, read_mark
from tests.builders import processes
from tests.builders.server_process import ServerProcess, serving
from tests.builders.service_runs import count_of, experiment, template
from tests.builders.waiting import eventually

ANSWERED_S = httpx.Timeout(60.0, read=3.0)
"""Read for as long at a time, so that who closes it need not wait for a heartbeat."""


class Listener:
    """Collects all events, in a thread of its own, whatever becomes of the server meanwhile."""

    def __init__(self, address: str) -> None:
        self.events: list[dict[str, Any]] = []
        self.connections = 0
        self._address = address
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def of(self, name: str) -> list[int]:
        """Places in an experiment's journal that were reported, in order."""
        return [event["seq"] for event in self.events if event["experiment"] == name and event["seq"] is not None]

    def ids(self) -> list[int]:
        """The ids of all events, in the order in which they came."""
        return [event["id"] for event in self.events]

    def ends(self) -> list[str]:
        """Experiments that were reported as done."""
        return [event["experiment"] for event in self.events if event["data"].get("state") == "done"]

    def reporting(self) -> set[str]:
        """The experiments whose trials have reported."""
        return {event["experiment"] for event in self.events if event["kind"] == "TrialReported"}

    def close(self) -> None:
        """Listen no longer."""
        self._closing.set()
        self._thread.join()

    def _listen(self) -> None:
        while not self._closing.wait(0.05):
            headers = {"Last-Event-ID": str(self.events[-1]["id"])} if self.events else {}
            try:
                with httpx.stream("GET", f"{self._address}/v1/events", headers=headers, timeout=ANSWERED_S) as answer:
                    self.connections += answer.status_code == 200
                    for line in answer.iter_lines():
                        if line.startswith("data: "):
                            self.events.append(json.loads(line.removeprefix("data: ")))
                        if self._closing.is_set():
                            return
            except httpx.HTTPError:
                continue


ROOT = Path(__file__).parents[2]
SERVER = (str(processes.FOLDER / "guarded_server.py"),)
STOOD_IN = {"STAND_IN": str(processes.FOLDER / "stand_in.py")}
KILLS = 20


def prepare(home: Path, *, pause_s: float = 0.0, ways: dict[str, str]) -> Path:
    """Say how stand-ins go; gives the journal that they copy."""
    journal = template(home / "template")
    words = {"template": str(journal), "now": time.time(), "pause_s": pause_s, "ways": ways}
    (home / "stand-in.json").write_text(json.dumps(words))
    return journal


def submit(address: str, name: str, *, planned: bool = True) -> int:
    """Submit an experiment, as often as it takes to have an answer; its status. What is not planned has no profile."""
    words = experiment(name).to_words()
    if not planned:
        del words["profile"]

    def post() -> int | None:
        with suppress(httpx.HTTPError):
            return httpx.post(f"{address}/v1/experiments", json=words, timeout=30.0).status_code
        return None

    return eventually(post, "a server that answers", within_s=600.0)


def state_of(address: str, name: str) -> str | None:
    """Where an experiment stands; None as long as the server does not tell."""
    try:
        return str(httpx.get(f"{address}/v1/experiments/{name}", timeout=30.0).json().get("state"))
    except httpx.HTTPError:
        return None


def starts(home: Path) -> Counter[str]:
    """Name -> how many processes began for it."""
    path = home / "starts.log"
    return Counter(line.split()[0] for line in path.read_text().splitlines()) if path.exists() else Counter()


def did_nothing_forbidden(home: Path) -> bool:
    return (home / "forbidden.log").read_text() == ""


def kill(server: ServerProcess) -> None:
    server.process.kill()
    server.process.wait()


def all_done(address: str, names: list[str]) -> bool:
    return all(state_of(address, name) == "done" for name in names)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_kills_at_any_moment_lose_and_repeat_nothing(tmp_path: Path) -> None:
    seed = int(os.environ.get("RUBBERBAND_TEST_SEED", "") or random.randrange(10**6))
    print(f"RUBBERBAND_TEST_SEED={seed}")
    chance = random.Random(seed)
    journal, port = prepare(tmp_path, pause_s=0.02, ways={}), str(free_port())
    with serving(tmp_path, "--port", port, program=SERVER, environment=STOOD_IN) as server:
        address = server.address
    listener, is_over = Listener(address), threading.Event()
    answers: dict[str, int] = {}

    def keep_submitting() -> None:
        while not is_over.is_set():
            name = f"n-{len(answers):03d}"
            answers[name] = submit(address, name, planned=False)

    submitter = threading.Thread(target=keep_submitting)
    submitter.start()
    for _ in range(KILLS):
        with serving(tmp_path, "--port", port, program=SERVER, environment=STOOD_IN) as server:
            time.sleep(chance.uniform(0.0, 2.0))  # what is tested is that any moment is as good
            server.process.send_signal(signal.SIGKILL)
            server.process.wait()
    with serving(tmp_path, "--port", port, "--max-running", "4", program=SERVER, environment=STOOD_IN) as server:
        is_over.set()
        submitter.join()
        names = list(answers)
        eventually(lambda: all_done(address, names), within_s=300.0)
        eventually(lambda: all(len(listener.of(name)) == count_of(journal) for name in names), within_s=300.0)
        with Client(address) as client:
            listed = list(client.experiments())
        listener.close()
    lost = sum(status == 409 for status in answers.values())
    print(f"{KILLS} kills, {len(names)} submissions, {lost} answers lost, {len(listener.events)} events")
    assert len(names) >= KILLS
    assert set(answers.values()) <= {201, 409}, "409: it was accepted, and the answer was lost"
    assert sorted(item["name"] for item in listed) == sorted(names)
    assert starts(tmp_path) == Counter(dict.fromkeys(names, 1))
    assert all(listener.of(name) == list(range(count_of(journal))) for name in names)
    assert listener.ids() == sorted(set(listener.ids()))
    assert did_nothing_forbidden(tmp_path)


def digits(name: str) -> dict[str, Any]:
    """Real training on an instance of its own."""
    words = experiment(name, deadline="40m", max_cost=5.0).to_words()
    words["entrypoint"] = "examples.digits:DigitsTrial"
    words["search"] |= {
        "space": {"lr": {"type": "loguniform", "lower": 1e-3, "upper": 0.3}, "width": 8, "weight_decay": 1e-5},
        "scheduler": {"type": "sha", "num_samples": 6, "grace_period": 6, "max_t": 12, "reduction_factor": 2},
        "metric": "accuracy",
        "mode": "max",
    }
    words["search"]["space"]["momentum"] = 0.9
    words["resources"] = {"provider": "local", "instance_type": "p3.2xlarge", "max_instances": 1}
    words["profile"] = {"seconds_per_iteration": {1: 2}, "trial_startup": "3s"}
    return words


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(1200)
def test_real_training_resumes_while_the_server_is_killed_and_restarted(tmp_path: Path) -> None:
    names = ["digits-a", "digits-b", "digits-c"]
    root = str(ROOT)
    options = ("--allow", "examples.digits:DigitsTrial", "--code", root)
    port = str(free_port())
    with serving(tmp_path, "--port", port, *options, program=SERVER) as server:
        address = server.address
        listener = Listener(address)
        answers = [httpx.post(f"{address}/v1/experiments", json=digits(name), timeout=120.0) for name in names]
        assert [answer.status_code for answer in answers] == [201, 201, 201], answers[0].text
        eventually(lambda: listener.reporting() >= set(names), within_s=400.0)
        marks = [read_mark(ExperimentFolder(home=tmp_path, name=name)) for name in names]
        kill(server)
    assert all(is_hosted(ExperimentFolder(home=tmp_path, name=name)) for name in names)
    with serving(tmp_path, "--port", port, *options, program=SERVER) as server:
        eventually(lambda: all_done(address, names), within_s=600.0)
        eventually(lambda: set(listener.ends()) == set(names))
        views = [httpx.get(f"{address}/v1/experiments/{name}", timeout=60.0).json() for name in names]
        listener.close()
    assert [read_mark(ExperimentFolder(home=tmp_path, name=name)) for name in names] == marks
    assert [(view["state"], view["attempt"]) for view in views] == [("done", 1)] * 3
    for name in names:
        count = count_of(ExperimentFolder(home=tmp_path, name=name).journal)
        assert listener.of(name) == list(range(count))
    assert listener.ids() == sorted(set(listener.ids()))
    assert did_nothing_forbidden(tmp_path)
