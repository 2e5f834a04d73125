"""Instances that are other machines: this one pretends to be such an instance, which sees neither files nor code."""

from __future__ import annotations

import shutil
import socket
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rubberband.cloud.local import provider
from rubberband.cloud.local.provider import LocalProvider
from rubberband.cloud.node import LEASE_VARIABLE, METADATA_VARIABLE
from rubberband.executor import (
    Entrypoint,
    InstanceInterrupted,
    InstanceLost,
    InstanceReleased,
    RayBackend,
    ReleaseInstance,
    open_store,
)
from rubberband.executor.ray.code import pack
from tests.builders.conversation import Conversation, nothing_left
from tests.builders.sessions import run_spec
from tests.builders.waiting import eventually


class _Metadata(BaseHTTPRequestHandler):
    said: dict[str, str]

    def do_PUT(self) -> None:
        assert self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self._answer(200, "token")

    def do_GET(self) -> None:
        if self.headers["X-aws-ec2-metadata-token"] != "token":
            self._answer(401, "")
        elif (name := self.path.removeprefix("/machine/latest/meta-data/")) in self.said:
            self._answer(200, self.said[name])
        else:
            self._answer(404, "")

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def metadata_service() -> Iterator[tuple[str, dict[str, str]]]:
    """The address of a service, and what it says: path below meta-data -> text."""
    said: dict[str, str] = {}
    handler = type("Handler", (_Metadata,), {"said": said})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/machine/", said
    server.shutdown()
    thread.join()
    server.server_close()


pytestmark = [pytest.mark.ray, pytest.mark.long]

TRIAL = """
    from pathlib import Path

    import torch
    import rubberband
    from beside.lengths import LENGTH

    class Line(rubberband.TorchTrial):
        batch_size = 4

        def build_model(self, config):
            print("the model of", Path("words.txt").read_text())
            return torch.nn.Linear(1, 1)

        def build_optimizer(self, config, model):
            return torch.optim.SGD(model.parameters(), lr=0.01)

        def train_dataset(self, config):
            return torch.utils.data.TensorDataset(torch.arange(float(LENGTH)).reshape(-1, 1))

        def eval_dataset(self, config):
            return self.train_dataset(config)

        def loss(self, model, batch):
            return model(batch[0] / LENGTH).square().mean()

        def evaluate(self, model, loader):
            print("evaluated")
            return {"loss": 1.0}
"""


class RemoteProvider(LocalProvider):
    """Says that its instances are other machines."""

    @property
    def remote(self) -> bool:
        """They are not."""
        return True


def _address() -> str:
    """This machine's address beside the loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        address: str = probe.getsockname()[0]
    return address


def _project(folder: Path) -> Path:
    (folder / "beside").mkdir(parents=True)
    (folder / "line_trial.py").write_text(textwrap.dedent(TRIAL))
    (folder / "beside" / "lengths.py").write_text("LENGTH = 8\n")
    (folder / "words.txt").write_text("few words")
    return folder


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the driver."""
    return tmp_path_factory.mktemp("driver")


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the instance."""
    folder = tmp_path_factory.mktemp("machine")
    (folder / "lease").touch()
    return folder


@pytest.fixture(scope="module")
def said() -> Iterator[dict[str, str]]:
    """What the metadata service says; its address, and the lease, are in the environment of the Ray node."""
    with metadata_service() as (address, said), pytest.MonkeyPatch.context() as patch:
        patch.setenv(METADATA_VARIABLE, address)
        patch.setattr(provider, "RayHead", partial(provider.RayHead, host=_address()))
        yield said


@pytest.fixture(scope="module")
def talk(directory: Path, machine: Path, said: dict[str, str]) -> Iterator[Conversation]:
    """A backend that holds one instance of two slots, whose code is gone from this machine."""
    project = _project(directory / "project")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project)
        code = pack([str(project)])
        shutil.move(project / "line_trial.py", directory / "moved_away")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(LEASE_VARIABLE, str(machine / "lease"))
        backend = RayBackend(
            RemoteProvider("remote", directory / "local", 2),
            run_spec([{}], entrypoint=Entrypoint.parse("line_trial:Line", [str(project)]), lease=500),
            store=open_store(str(directory / "checkpoints")),
            gpus_per_instance=2,
            logs=directory / "logs",
            code=code,
        )
        talk = Conversation(backend)
        try:
            talk.launch("a")
            yield talk
        finally:
            talk.backend.close()
            assert nothing_left(directory / "local")


def test_the_code_is_sent_along_and_the_logs_come_back(talk: Conversation, directory: Path, machine: Path) -> None:
    talk.start(0, ("a", 0), ("a", 1), until=2)
    talk.report(0, 2)
    log = directory / "logs" / "trial-000.log"
    eventually(lambda: log.exists() and log.read_text().count("evaluated") == 2)
    assert log.read_text().count("the model of few words") == 2
    assert next(machine.glob("rubberband-*/logs/*/*/trial-000.log")).read_bytes() == log.read_bytes()


def test_the_lease_of_the_machine_is_put_off_as_far_as_the_budget_reaches(talk: Conversation, machine: Path) -> None:
    eventually(lambda: 400.0 < (machine / "lease").stat().st_mtime - time.time() <= 500.0)
    held_until = float(int(time.time()) + 100)
    talk.backend.hold_until(held_until)
    eventually(lambda: (machine / "lease").stat().st_mtime == held_until)
    assert [event for event in talk.listen(1.0) if isinstance(event, InstanceLost)] == []


def test_a_notice_is_heard_and_reported_once(talk: Conversation, said: dict[str, str]) -> None:
    said["spot/instance-action"] = '{"action": "terminate", "time": "2026-11-21T17:00:00Z"}'
    assert talk.until(InstanceInterrupted).instance == "a"
    assert [event for event in talk.listen(1.0) if isinstance(event, InstanceInterrupted)] == []


def test_a_release_loses_no_lines(talk: Conversation, directory: Path) -> None:
    talk.start(0, ("a", 0), until=3)
    talk.report(0, 3)
    talk.backend.execute(ReleaseInstance(instance="a"))
    assert talk.until(InstanceReleased).instance == "a"
    assert (directory / "logs" / "trial-000.log").read_text().count("evaluated") == 5
