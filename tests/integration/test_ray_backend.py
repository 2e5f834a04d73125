"""The Ray backend on real Ray nodes of this machine. One cluster serves all tests; each has trials of its own."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rubberband.cloud.local.provider import LocalProvider
from rubberband.errors import ProviderError
from rubberband.executor import (
    DiscardCheckpoint,
    InstanceLost,
    RayBackend,
    StopTrial,
    TrialFailed,
    TrialReported,
    TrialStarted,
    open_store,
)
from rubberband.executor.logs.pages import page
from rubberband.executor.logs.trial_log import printed_bytes, read
from rubberband.values.plan import Market
from tests.builders import trials
from tests.builders.conversation import Conversation, kinds, nothing_left, processes_of
from tests.builders.sessions import run_spec
from tests.builders.waiting import eventually
from tests.conformance.backend import BackendSuite

pytestmark = pytest.mark.ray

SILENT = "its Ray node stopped answering"
"""What Ray's head says of a dead node, if it finds out before the provider does."""
WELL, LONG, EXITS, RAISES, HANGS, OTHER_RANK_EXITS, SLOW, LOUD = range(8)
CONFIGURATIONS = (
    {},
    {"sleep_s": 0.1},
    {"fault": "exit", "sleep_s": 1.0},
    {"fault": "raise"},
    {"fault": "hang"},
    {"fault": "exit", "rank": 1, "sleep_s": 0.05},
    {"sleep_s": 0.1},
    {"fault": "exit", "print_bytes": 3_000_000},
    {"fault": "end"},
)
LOG_LIMIT_BYTES = 800_000


class ThreeInstances(LocalProvider):
    """Provider of this machine that has three instances at a time."""

    one_at_a_time = threading.Lock()

    def launch(self, instance: str, market: Market = "on_demand", *, first_lease_s: float | None = None) -> None:
        with self.one_at_a_time:
            if len([one for one in self.describe() if one.ended_at is None and one.instance != instance]) >= 3:
                raise ProviderError(f"instance {instance} refused: 3 are held")
            super().launch(instance, market, first_lease_s=first_lease_s)


def make_backend(directory: Path, entrypoint: str = "ray_trials:Counter", **options: object) -> RayBackend:
    """A backend on a local provider below `directory`."""
    provider = ThreeInstances("ray", directory, 2)
    return RayBackend(
        provider,
        run_spec(CONFIGURATIONS, entrypoint=trials.entrypoint(entrypoint), log_limit=LOG_LIMIT_BYTES),
        store=open_store(str(directory / "checkpoints")),
        gpus_per_instance=2,
        logs=directory / "logs",
        **options,  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the shared backend keeps everything."""
    return tmp_path_factory.mktemp("ray")


@pytest.fixture(scope="module")
def talk(directory: Path) -> Iterator[Conversation]:
    """A backend that holds the instances `a` and `b`, of two slots each, all tests long."""
    talk = Conversation(make_backend(directory))
    try:
        talk.launch("a", "b")
        yield talk
    finally:
        talk.backend.close()
        assert nothing_left(directory)


def test_a_trial_is_resized_on_warm_workers_and_its_discarded_checkpoint_is_gone(talk: Conversation) -> None:
    talk.start(WELL, ("a", 0), until=2)
    alone = talk.report(WELL, 2)
    talk.start(WELL, ("a", 0), ("a", 1), done=2, until=4, checkpoint=alone.checkpoint)
    gang = talk.report(WELL, 4)
    reports = [event for event in talk.of_trial(WELL) if isinstance(event, TrialReported)]
    assert len({report.metrics["pid"] for report in reports}) == 1
    talk.backend.execute(DiscardCheckpoint(checkpoint=alone.checkpoint))
    assert not Path(alone.checkpoint.url.removeprefix("file://")).exists()
    assert Path(gang.checkpoint.url.removeprefix("file://")).exists()


def test_the_output_of_a_trial_is_in_its_log(talk: Conversation, directory: Path) -> None:
    talk.start(LONG, ("b", 0), ("b", 1), until=3)
    talk.report(LONG, 1)
    assert "iteration 1" in (directory / "logs" / "trial-001.log").read_text()
    talk.report(LONG, 3)
    log = (directory / "logs" / "trial-001.log").read_text()
    assert "setup of trial 1, rank 0" in log
    assert "setup of trial 1, rank 1" in log
    lines, _ = page({LONG: directory / "logs" / "trial-001.log"}, (), cursor=None, limit=1000, is_whole=True)
    set_up = {(line.rank, line.text) for line in lines if "setup of trial" in line.text}
    assert set_up == {(rank, f"setup of trial 1, rank {rank}") for rank in (0, 1)}


def test_endless_output_of_a_trial_keeps_its_beginning_and_end(talk: Conversation, directory: Path) -> None:
    talk.start(LOUD, ("a", 0), until=5)
    assert talk.until(TrialFailed).kind == "died"
    path = directory / "logs" / f"trial-{LOUD:03d}.log"
    eventually(lambda: b"\niteration 2\n" in _end(path))
    assert sum(file.stat().st_size for file in [path, *path.with_suffix(".end").iterdir()]) <= LOG_LIMIT_BYTES
    lines, _ = page({LOUD: path}, (), cursor=None, limit=1000, is_whole=True)
    assert lines[0].text.startswith("setup of trial")
    assert sum("left out" in line.text for line in lines) == 1


def _end(path: Path) -> bytes:
    return read(path, printed_bytes(path) - 100, 100).content


def test_a_process_that_exits_fails_the_trial_and_its_slot_is_warm_again(talk: Conversation) -> None:
    talk.start(EXITS, ("a", 0), until=5)
    failed = talk.until(TrialFailed)
    assert (failed.trial, failed.attempt, failed.kind) == (EXITS, 1, "died")
    assert kinds(talk.of_trial(EXITS)) == ["TrialStarted", "TrialReported", "TrialFailed"]
    talk.start(WELL, ("a", 0), until=1)
    talk.report(WELL, 1)


def test_an_exception_fails_the_trial_and_leaves_the_worker_warm(talk: Conversation) -> None:
    talk.start(RAISES, ("a", 1), until=5)
    failed = talk.until(TrialFailed)
    assert (failed.kind, failed.message) == ("raised", "ValueError: boom")
    assert "ray_trials.py" in failed.details
    first = next(event for event in talk.of_trial(RAISES) if isinstance(event, TrialReported))
    talk.start(WELL, ("a", 1), until=1)
    assert talk.report(WELL, 1).metrics["pid"] == first.metrics["pid"]


def test_one_dead_worker_ends_its_whole_gang(talk: Conversation) -> None:
    talk.start(OTHER_RANK_EXITS, ("a", 0), ("b", 1), until=1000)
    failed = talk.until(TrialFailed)
    assert failed.kind == "died"
    assert "rank 1" in failed.details
    talk.start(WELL, ("a", 0), ("b", 1), until=1)
    talk.report(WELL, 1)
    assert [event for event in talk.listen(0.5) if getattr(event, "trial", None) == OTHER_RANK_EXITS] == []


def test_a_stopped_trial_says_no_more_and_its_slot_is_warm_again(talk: Conversation) -> None:
    attempt = talk.start(HANGS, ("a", 1), until=5)
    talk.report(HANGS, 1)
    talk.backend.execute(StopTrial(trial=HANGS, attempt=attempt))
    talk.backend.execute(StopTrial(trial=HANGS, attempt=attempt))
    talk.start(WELL, ("a", 1), until=1)
    talk.report(WELL, 1)
    assert kinds(talk.of_trial(HANGS)) == ["TrialStarted", "TrialReported"]


def test_a_trial_that_waits_for_its_slot_can_be_stopped(talk: Conversation) -> None:
    first = talk.start(SLOW, ("a", 1), until=1000)
    talk.report(SLOW, 1)
    talk.backend.execute(StopTrial(trial=SLOW, attempt=first))
    second = talk.start(SLOW, ("a", 1), until=1000)
    talk.backend.execute(StopTrial(trial=SLOW, attempt=second))
    assert [event for event in talk.listen(1.5) if getattr(event, "attempt", 0) == second] == []


def test_a_killed_instance_is_lost_and_its_trials_have_not_failed(talk: Conversation, directory: Path) -> None:
    talk.launch("c")
    talk.start(LONG, ("c", 0), until=1000)
    spread = talk.start(SLOW, ("b", 0), ("c", 1), until=1000)
    talk.report(SLOW, 2)
    record = json.loads((directory / "instances" / "c.json").read_text())
    os.kill(record["pid"], signal.SIGKILL)
    lost = talk.until(InstanceLost)
    assert lost.instance == "c"
    assert lost.reason in {"its process died", SILENT}
    assert record["running_at"] <= lost.ended_at <= lost.occurred_at
    talk.start(WELL, ("b", 0), until=1)
    talk.report(WELL, 1)
    eventually(lambda: not [event for event in talk.listen(2.0) if getattr(event, "trial", None) == SLOW])
    assert not [event for event in talk.of_trial(LONG) + talk.of_trial(SLOW) if isinstance(event, TrialFailed)]
    talk.backend.execute(StopTrial(trial=SLOW, attempt=spread))


@pytest.mark.long
def test_a_ray_node_that_dies_is_a_lost_instance_too(talk: Conversation, directory: Path) -> None:
    talk.launch("d")
    talk.start(LONG, ("d", 0), until=1000)
    talk.until(TrialStarted, lambda event: event.trial == LONG)
    raylet = next(pid for pid in processes_of(directory, "d") if "raylet/raylet" in _command(pid))
    os.kill(raylet, signal.SIGKILL)
    lost = talk.until(InstanceLost)
    assert lost.instance == "d"
    assert "its Ray node ended" in lost.reason or lost.reason == SILENT
    talk.listen(2.5)
    assert not [event for event in talk.of_trial(LONG) if isinstance(event, TrialFailed)]


@pytest.mark.long
def test_a_frozen_ray_node_is_a_lost_instance_too(talk: Conversation, directory: Path) -> None:
    talk.launch("g")
    talk.start(LONG, ("g", 0), until=1000)
    talk.until(TrialStarted, lambda event: event.trial == LONG)
    for pid in processes_of(directory, "g"):
        os.kill(pid, signal.SIGSTOP)
    assert talk.until(InstanceLost).instance == "g"
    assert not [event for event in talk.of_trial(LONG) if isinstance(event, TrialFailed)]
    eventually(lambda: processes_of(directory, "g") == [])


class TestRayBackend(BackendSuite):
    """What every backend promises; these come last, since they give `b` back."""

    def test_a_released_instance_leaves_no_process(self, directory: Path) -> None:
        eventually(lambda: processes_of(directory, "b") == [])


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()
