"""Loader workers of trials on real Ray nodes: they start in forked slot workers, and none outlives its trial."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from rubberband.cloud.local.provider import LocalProvider
from rubberband.executor import ForkServer, RayBackend, StopTrial, TrialFailed, TrialReported, open_store
from tests.builders import trials
from tests.builders.conversation import Conversation, nothing_left
from tests.builders.sessions import run_spec
from tests.builders.waiting import eventually

pytestmark = [pytest.mark.ray, pytest.mark.long]

WELL, RAISES, EXITS, HANGS, KILLED, STOPPED = range(6)


def talk_about(directory: Path) -> Conversation:
    """A backend whose slot workers are forked, and whose trials' loader workers leave their pids in `pids`."""
    entrypoint = trials.entrypoint("loader_trials:Loaded")
    (directory / "pids").mkdir()
    slow = {"sleep_s": 0.2}
    faults = [{}, {"fault": "raise"}, {"fault": "exit"}, {"fault": "hang"}, slow, slow]
    backend = RayBackend(
        LocalProvider("ray", directory, 2),
        run_spec([{"folder": str(directory / "pids"), **fault} for fault in faults], entrypoint=entrypoint),
        store=open_store(str(directory / "checkpoints")),
        gpus_per_instance=2,
        logs=directory / "logs",
        fork_server=ForkServer("ray", directory, entrypoint),
    )
    return Conversation(backend)


def loaders(directory: Path) -> set[int]:
    """Return the pids of the loader workers that run."""
    return {pid for pid in map(int, os.listdir(directory / "pids")) if psutil.pid_exists(pid)}


def test_loader_workers_start_fail_alone_and_end_with_their_trial(tmp_path: Path) -> None:
    talk = talk_about(tmp_path)
    try:
        talk.launch("a")
        _trains_resized(talk, tmp_path)
        _fails_alone(talk, tmp_path)
        _dies_with_its_slot_worker(talk, tmp_path)
        talk.start(WELL, ("a", 0), until=1)
        talk.report(WELL, 1)
    finally:
        talk.backend.close()
        assert nothing_left(tmp_path)
    assert loaders(tmp_path) == set()


def _trains_resized(talk: Conversation, directory: Path) -> None:
    talk.start(WELL, ("a", 0), until=1)
    alone = talk.report(WELL, 1)
    talk.start(WELL, ("a", 0), ("a", 1), done=1, until=3, checkpoint=alone.checkpoint)
    assert talk.report(WELL, 3).metrics["pid"] == alone.metrics["pid"]
    assert len(os.listdir(directory / "pids")) == 10, "two for each GPU of each attempt, and two to evaluate"
    eventually(lambda: loaders(directory) == set(), within_s=20.0)


def _fails_alone(talk: Conversation, directory: Path) -> None:
    for trial, kind, message in (
        (RAISES, "raised", "ValueError: sample 40 is torn"),
        (EXITS, "died", "a loader worker ended with exit code 5; raise an exception instead"),
        (HANGS, "hung", "loader workers gave no batch in loader_timeout_s=2 s; the trial's log shows where"),
    ):
        talk.start(WELL, ("a", 1), until=4)
        talk.start(trial, ("a", 0), until=2)
        failed = talk.until(TrialFailed)
        assert (failed.trial, failed.kind) == (trial, kind)
        assert failed.message.startswith(message)
        log = (directory / "logs" / f"trial-{trial:03d}.log").read_text()
        assert "sample 40 goes wrong" in log
        assert "loader_trials.py" in (failed.details if kind == "raised" else log) or kind == "died"
        if not any(isinstance(event, TrialReported) and event.iterations == 4 for event in talk.of_trial(WELL)[-4:]):
            talk.report(WELL, 4)
        eventually(lambda: loaders(directory) == set(), within_s=20.0)


def _dies_with_its_slot_worker(talk: Conversation, directory: Path) -> None:
    talk.start(KILLED, ("a", 0), until=2)
    eventually(lambda: len(loaders(directory)) == 2)
    (parent,) = {psutil.Process(loader).ppid() for loader in loaders(directory)}
    os.kill(parent, signal.SIGKILL)
    assert talk.until(TrialFailed).trial == KILLED
    eventually(lambda: loaders(directory) == set(), within_s=5.0)
    attempt = talk.start(STOPPED, ("a", 1), until=2)
    eventually(lambda: len(loaders(directory)) == 2)
    talk.backend.execute(StopTrial(trial=STOPPED, attempt=attempt))
    eventually(lambda: loaders(directory) == set(), within_s=20.0)
