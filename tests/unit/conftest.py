"""What several files of tests begin with; each fixture imports its own, as the service takes half a second."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rubberband.cloud import wheel
from tests.builders.fake_cuda import fake_cuda as fake_cuda
from tests.builders.trained import trained_runs as trained_runs

if TYPE_CHECKING:
    from tests.builders.aws_account import Account
    from tests.builders.fake_ec2 import World
    from tests.builders.fake_runs import FakeService
    from tests.builders.service_runs import House


@pytest.fixture(scope="module")
def done_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The journal of a run that is done, which the processes of a house's experiments take theirs from."""
    from tests.builders.service_runs import template

    return template(tmp_path_factory.mktemp("template"))


@pytest.fixture
def house(tmp_path: Path, done_run: Path) -> Iterator[House]:
    """A home with its store, and experiments whose processes are stood in for."""
    from tests.builders.service_runs import House

    made = House(tmp_path, done_run)
    yield made
    made.store.close()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[FakeService]:
    """The service in this process, over experiments that no process runs."""
    from tests.builders.fake_runs import fake_service

    with fake_service(tmp_path) as made:
        yield made


@pytest.fixture
def world(tmp_path: Path) -> World:
    """An account of the fake EC2 and a driver's folder."""
    from tests.builders.fake_ec2 import World

    return World(tmp_path)


@pytest.fixture(params=["America/Los_Angeles", "Pacific/Kiritimati"])
def zone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine far to the west, or to the east, where another day or month has begun, or has not."""
    with monkeypatch.context() as changed:
        changed.setenv("TZ", request.param)
        time.tzset()
        yield
    time.tzset()


@pytest.fixture
def off_ec2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of the test's own, on a machine that is no instance of EC2."""
    monkeypatch.setenv("RUBBERBAND_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://127.0.0.1:9")
    return tmp_path / "home"


@pytest.fixture
def account(off_ec2: Path) -> Account:
    """An account of the fake EC2, seen from a machine outside."""
    from tests.builders.aws_account import Account

    return Account()


@pytest.fixture(scope="session", autouse=True)
def _each_wheel_is_compressed_once() -> Iterator[None]:
    compressed = lru_cache(lambda *files: _zipped(dict(files)))
    _zipped = wheel.zipped
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wheel, "zipped", lambda content: compressed(*content.items()))
        yield


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Let PyTorch compute in one thread, so that sums have one order."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
