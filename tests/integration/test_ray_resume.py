"""A driver's death and its head's: what the next driver, or the same one, makes of what is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import ray

from rubberband.cloud.ray_head.instance import load
from rubberband.executor import InstanceLost, ReleaseInstance
from tests.builders.conversation import Conversation, make_backend, nothing_left, processes_of
from tests.builders.waiting import eventually
from tests.conformance.backend import require_adoption

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[2]


def _killed_driver(directory: Path) -> None:
    search = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "tests.builders.processes.ray_driver", str(directory)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": search}, cwd=ROOT, start_new_session=True
    ) as driver:
        try:
            assert driver.stdout is not None
            assert driver.stdout.readline() == b"training\n"
        finally:
            driver.kill()


@pytest.mark.long
def test_a_new_driver_adopts_what_it_knows_and_releases_the_rest(tmp_path: Path) -> None:
    _killed_driver(tmp_path)
    assert processes_of(tmp_path, "b")
    talk = Conversation(make_backend(tmp_path))
    try:
        require_adoption(talk, talk.backend.reconcile(["a", "never-launched"]), known="a", unknown="b")
        eventually(lambda: processes_of(tmp_path, "b") == [])

        _kill_head(tmp_path)
        lost = talk.until(InstanceLost)
        assert (lost.instance, lost.reason) == ("a", "the Ray head ended")
        talk.launch("c")
        talk.start(0, ("c", 0), until=1)
        talk.report(0, 1)
        talk.backend.execute(ReleaseInstance(instance="c"))
    finally:
        talk.backend.close()
        talk.backend.close()
    with pytest.raises(Exception, match="Ray has not been started"):
        ray.nodes()  # and not: Ray starts a cluster of its own, which nobody would end
    assert nothing_left(tmp_path)


def _kill_head(directory: Path) -> None:
    pid = load(directory / "heads" / "head-0.json").pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def test_a_backend_that_did_nothing_can_be_closed(tmp_path: Path) -> None:
    backend = make_backend(tmp_path)
    assert list(backend.next_events(backend.now() + 0.01)) == []
    backend.close()
    assert nothing_left(tmp_path)
