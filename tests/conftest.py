"""What all tests share."""

import gc
import os
import socket
import time
import zlib
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import xdist.scheduler
from hypothesis import HealthCheck, settings

from rubberband.cloud.ray_head import ray_node
from tests.builders.databases import one_database as one_database
from tests.builders.databases import postgresql as postgresql
from tests.builders.databases import postgresql_url as postgresql_url
from tests.builders.databases import store_url as store_url

if TYPE_CHECKING:
    from rubberband.executor import CheckpointStore

# How long an example takes, and how fast examples are made, is the machine's to say.
settings.register_profile("long", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fixed", settings.get_profile("long"), max_examples=40)
settings.register_profile("few", settings.get_profile("long"), max_examples=20)
settings.register_profile("random", settings.get_profile("long"), derandomize=False, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "few"))

_FOR_TESTS = ("RUBBERBAND_TEST_", "RUBBERBAND_SCREENSHOTS", "RUBBERBAND_POOL_SEEDS", "RUBBERBAND_FREEZE_")
_OF_THE_USER = ("RUBBERBAND_", "RAY_", "AWS_", "CUDA_VISIBLE_DEVICES", "LC_", "LANG", "TZ", "COLUMNS")
# The user's choices, time zone and language change neither results nor output of tests; `own_home` has their files.
# The zone is one in which no hour is that of UTC: a time that is local where it must not be is seen by any test.
for _name in [name for name in os.environ if name.startswith(_OF_THE_USER) and not name.startswith(_FOR_TESTS)]:
    del os.environ[_name]
os.environ |= {"LC_ALL": "C.UTF-8", "TZ": "NPT-5:45"}
time.tzset()


def _is_quick(folder: str) -> bool:
    """Return whether a folder is in memory, has room, and programs in it can be started."""
    if not os.path.ismount(folder):
        return False
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize > 4 * 1024**3 and not found.f_flag & os.ST_NOEXEC


# A disk takes milliseconds for a commit, and tests make tens of thousands of them.
if _is_quick("/dev/shm"):
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")
# Workers of the tests share the cores: PyTorch's threads would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")


# A port is chosen a while before it is taken: processes of tests choose among different ones.
_process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
ray_node._QUIET_PORTS = ray_node._QUIET_PORTS[_process % 8 :: 8]

# The modules of all tests stay: walking through them again and again is a quarter of their collection.
gc.disable()


class ByWhatIsShared(xdist.scheduler.LoadFileScheduling):
    """Give a file to one process, and the files of gangs to the same one: it imports PyTorch once for all workers."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return "gangs" if file.startswith("tests/integration/") and ("gang" in file or "distributed" in file) else file


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add options: `--cpu`, and those of CI, which runs the long tests in parts."""
    parser.addoption("--cpu", action="store_true", help="print the CPU seconds of the run by kind and by file")
    parser.addoption("--part", metavar="K/N", default="1/1", help="run the K-th of N parts of the files")
    parser.addoption("--within", metavar="S", type=float, help="skip the tests that would begin later than this")
    parser.addoption(
        "--turn", metavar="N", type=int, default=0, help="begin with other files, so that each comes first"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Count CPU seconds where they are asked for."""
    if config.getoption("--cpu"):
        from tests.builders.cpu import CpuSeconds

        config.pluginmanager.register(CpuSeconds())


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByWhatIsShared:
    """Say which tests run in the same process."""
    return ByWhatIsShared(config, log)


@pytest.fixture(scope="session", autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Give this process a home: what the user's runs measured changes estimates, and credentials change errors."""
    os.environ["HOME"] = str(tmp_path_factory.mktemp("home"))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of this test's own, which commands use, too."""
    monkeypatch.setenv("RUBBERBAND_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def store(tmp_path: Path) -> "CheckpointStore":
    """Where the checkpoints of a test go."""
    from rubberband.executor import open_store

    return open_store(str(tmp_path))


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    """The address of moto's server."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture
def s3(moto: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A bucket of moto's that the environment leads to."""
    import boto3

    for key, value in {
        "AWS_ENDPOINT_URL": moto,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_DEFAULT_REGION": "us-east-1",
        "MOTO_S3_DEFAULT_MAX_KEYS": "1",  # lists come in pages of one
    }.items():
        monkeypatch.setenv(key, value)
    boto3.client("s3").create_bucket(Bucket="bucket")
    return "bucket"


@pytest.fixture(scope="module")
def emulator() -> Iterator[str]:
    """The address of an emulator of Google Cloud Storage."""
    servers = pytest.importorskip("gcp_storage_emulator.server", reason="pip install gcp-storage-emulator")
    pytest.importorskip("gcsfs", reason="pip install gcsfs")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = servers.create_server("127.0.0.1", port, in_memory=True, default_bucket="bucket")
    server.start()
    yield f"http://127.0.0.1:{port}"
    server.stop()


@pytest.fixture
def gcs(emulator: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A bucket of the emulator that the environment leads to."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", emulator)
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    return "bucket"


def pytest_collection_finish() -> None:
    """Collect garbage from here on, but never look at what the modules hold."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Never look again at what the tests of a file left: each segment of a trial collects garbage in its end."""
    result = yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return result


_BEGAN = time.monotonic()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what has no time left, and what needs a GPU where there is none."""
    within_s = item.config.getoption("--within")
    if within_s is not None and time.monotonic() - _BEGAN > within_s:
        pytest.skip(f"not run: {within_s:g} s were over")
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device here")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave cases to the long run, take the part that is asked for, and mix the files."""
    part, parts = map(int, config.getoption("--part").split("/"))
    items[:] = [item for item in items if zlib.crc32(item.path.name.encode()) % parts == part - 1]
    _leave_cases(items)
    _mix(items)
    files = list(dict.fromkeys(item.path for item in items))
    first = {path: (at - 7 * config.getoption("--turn")) % len(files) for at, path in enumerate(files)}
    items.sort(key=lambda item: first[item.path])


def _leave_cases(items: list[pytest.Item]) -> None:
    """Make those cases long that their test does not run by default."""
    cases: Counter[tuple[Path, str]] = Counter()
    for item in items:
        mark = item.get_closest_marker("by_default")
        if mark is not None:
            test = (item.path, item.nodeid.partition("[")[0])
            cases[test] += 1
            if cases[test] > mark.args[0]:
                item.add_marker(pytest.mark.long)


def _mix(items: list[pytest.Item]) -> None:
    """Mix the files with real parts, which mostly wait, with those that compute: together they use the cores best."""
    files = list(dict.fromkeys(item.path for item in items))
    real = [path for path in files if "integration" in path.parts]
    rest = [path for path in files if "integration" not in path.parts]
    turns = {path: 0.7 * at / len(real) for at, path in enumerate(real)}  # none of them comes last, as some are long
    turns |= {path: at / len(rest) for at, path in enumerate(rest)}
    items.sort(key=lambda item: turns[item.path])
