"""Workers that are forked off one process: they are what they would have been, and where that cannot be they start."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest

from rubberband.cloud.ray_head import worker_start
from rubberband.executor import Entrypoint, ForkServer
from rubberband.values.environment import Environment
from tests.builders.waiting import eventually

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")

_SCRIPT = """
import gc, json, os, sys
found = {
    "words": sys.argv[1:], "folder": os.getcwd(), "environment": dict(os.environ), "parent": os.getppid(),
    "seen": open("/proc/self/environ").read().rstrip(chr(0)).split(chr(0)), "imported": "code" in sys.modules,
    "oom_score": int(open("/proc/self/oom_score_adj").read()), "collects_every": gc.get_threshold()[0],
}
print("begun", flush=True)
with open(sys.argv[1] + ".draft", "w") as file:
    json.dump(found, file)
os.rename(sys.argv[1] + ".draft", sys.argv[1])
"""
_TRAIN = "def train(config):\n    pass\n"
_PATIENCE_S = 120.0

Serve = Callable[..., ForkServer]


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUBBERBAND_HOME", str(tmp_path / "home"))


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Starts a server for a module of that source, for workers on that device."""
    servers = []

    def start(source: str, device: Literal["cpu", "cuda"] = "cpu") -> ForkServer:
        (tmp_path / "fork_tests_code.py").write_text(source)
        entrypoint = Entrypoint.parse("fork_tests_code:train", search_path=[tmp_path])
        entrypoint = replace(entrypoint, environment=Environment(variables={"DATA": "/data"}))
        found = ForkServer("test", tmp_path, entrypoint, device=device, slots_on_machine=2)
        servers.append(found)
        return found

    yield start
    for server in servers:
        server.close()


def worker(tmp_path: Path, **extra: str) -> dict[str, Any]:
    """What a worker finds that Ray's raylet starts."""
    script, answer, folder = tmp_path / "script.py", tmp_path / "told.json", tmp_path / "folder"
    script.write_text(_SCRIPT.replace('"code"', '"fork_tests_code"'))
    folder.mkdir(exist_ok=True)
    answer.unlink(missing_ok=True)
    environment = os.environ | extra | {"RUBBERBAND_DIRECTORY": str(tmp_path), worker_start.WORKER_SCRIPT: str(script)}
    command = [sys.executable, worker_start.__file__, str(answer), "--two=2"]
    with open(tmp_path / "output", "wb") as output:
        subprocess.run(command, cwd=folder, env=environment, stdout=output, check=True, timeout=_PATIENCE_S)
    eventually(answer.exists, "what the worker says")
    found: dict[str, Any] = json.loads(answer.read_text())
    assert found["words"] == [str(answer), "--two=2"]
    assert found["folder"] == str(folder)
    assert found["environment"].items() >= environment.items()
    assert (tmp_path / "output").read_text() == "begun\n"
    return found


def test_a_forked_worker_finds_what_it_would_have_found(tmp_path: Path, serve: Serve) -> None:
    serve(_TRAIN)
    own = int(subprocess.check_output([sys.executable, "-c", "import gc; print(gc.get_threshold()[0])"]))
    for instance in ("i-1", "i-2"):
        found = worker(tmp_path, RUBBERBAND_INSTANCE=instance)
        assert found["imported"]
        assert found["parent"] != os.getpid()
        assert f"RUBBERBAND_INSTANCE={instance}" in found["seen"]
        assert sorted(found["seen"]) == sorted(f"{name}={value}" for name, value in found["environment"].items())
        assert "RUBBERBAND_PADDING" not in found["environment"]
        assert found["oom_score"] == int(Path("/proc/self/oom_score_adj").read_text())
        assert found["collects_every"] == own, "as often as in a process of its own"


@pytest.mark.by_default(1)
@pytest.mark.parametrize(
    "source",
    [
        pytest.param(
            "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n" + _TRAIN,
            id="a thread runs",
        ),
        pytest.param("import ray\n" + _TRAIN, id="Ray is imported"),
        pytest.param("raise ValueError('no')", id="it cannot be imported"),
        pytest.param("import os\nos._exit(1)", id="it ends the process"),
        pytest.param("FILE = open(__file__)\n" + _TRAIN, id="a file is open, and its place would be shared"),
        pytest.param("import os\nos.chdir('/')\n" + _TRAIN, id="its folder would be another"),
        pytest.param(
            "import numpy\nDRAWS = numpy.random.default_rng()\n" + _TRAIN, id="NumPy's generator would be shared"
        ),
        pytest.param("import random\nDRAWS = random.Random()\n" + _TRAIN, id="Python's generator would be shared"),
        pytest.param("import uuid\nNAME = uuid.uuid4()\n" + _TRAIN, id="a name would be shared"),
        pytest.param("import tempfile\nFOLDER = tempfile.mkdtemp()\n" + _TRAIN, id="a folder would be shared"),
    ],
)
def test_a_worker_starts_on_its_own_where_it_must_not_be_forked(tmp_path: Path, serve: Serve, source: str) -> None:
    serve(source)
    assert not worker(tmp_path)["imported"]


_STAND_IN = """
import os, sys, types
server = os.readlink("/proc/self")
cuda = types.SimpleNamespace(is_initialized=lambda: False, _is_in_bad_fork=lambda: {refuses})
sys.modules["torch"] = types.SimpleNamespace(cuda=cuda, __spec__=None)
sys.modules["torch._dynamo"] = types.ModuleType("torch._dynamo")
"""


@pytest.mark.by_default(1)
@pytest.mark.parametrize(
    ("refuses", "forks"),
    [('os.readlink("/proc/self") != server', False), ("False", True), ("cuda.of_another_version", False)],
    ids=["it does", "it does not", "it cannot say"],
)
def test_a_worker_starts_on_its_own_where_torch_refuses_cuda_after_a_fork(
    tmp_path: Path, serve: Serve, refuses: str, forks: bool
) -> None:
    serve(_STAND_IN.format(refuses=refuses) + _TRAIN)
    assert worker(tmp_path)["imported"] == forks


@pytest.mark.parametrize(("device", "visible"), [("cpu", ""), ("cuda", "0")])
def test_imports_find_one_gpu_or_none_and_do_not_begin_to_use_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serve: Serve, device: str, visible: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    seen = tmp_path / "seen.json"
    serve(f"import json, os\nopen({str(seen)!r}, 'w').write(json.dumps(dict(os.environ)))\n{_TRAIN}", device)
    assert worker(tmp_path)["environment"]["CUDA_VISIBLE_DEVICES"] == "GPU-a,GPU-b"
    found = json.loads(seen.read_text())
    assert found["CUDA_VISIBLE_DEVICES"] == visible
    assert found["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"
    assert found["OMP_NUM_THREADS"] == "1"
    assert found["DATA"] == "/data", "a variable of resources.env"


@pytest.mark.by_default(1)
@pytest.mark.parametrize(
    "source",
    [
        "import numpy, random\nnumpy.random.default_rng(7), random.Random(7)\nnumpy.random.seed(7)\nrandom.seed(7)\n",
        "import logging, tempfile\nlogging.warning('a line')\nFOLDER = tempfile.gettempdir()\n",
        "FILE = open('/dev/null')\n",
    ],
    ids=["seeded generators", "a line and a name", "a device"],
)
def test_a_worker_is_forked_where_it_would_have_drawn_and_opened_the_same(
    tmp_path: Path, serve: Serve, source: str
) -> None:
    serve(source + _TRAIN)
    assert worker(tmp_path)["imported"]


def test_a_module_finds_no_input_and_no_arguments(tmp_path: Path, serve: Serve) -> None:
    seen = tmp_path / "seen"
    serve(f"import sys\nopen({str(seen)!r}, 'w').write(repr([sys.stdin.read(), sys.argv[1:]]))\n{_TRAIN}")
    assert worker(tmp_path)["imported"]
    assert seen.read_text() == "['', []]"


def test_a_forked_worker_has_the_variables_that_the_trial_s_module_sets(tmp_path: Path, serve: Serve) -> None:
    serve("import os\nos.environ['TOKENIZERS_PARALLELISM'] = 'false'\n" + _TRAIN)
    found = worker(tmp_path)
    assert found["imported"]
    assert found["environment"]["TOKENIZERS_PARALLELISM"] == "false"
    assert "TOKENIZERS_PARALLELISM=false" in found["seen"]


def test_a_worker_starts_on_its_own_where_no_server_is(tmp_path: Path, serve: Serve) -> None:
    assert not worker(tmp_path)["imported"]
    server = serve(_TRAIN)
    server.close()
    server.close()
    assert not worker(tmp_path)["imported"]


def test_asking_without_waiting_does_no_harm(tmp_path: Path, serve: Serve) -> None:
    serve(_TRAIN)
    for sent in (b"", b"1", b"\x00\x00\x00\x02{}"):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect("\0" + (tmp_path / worker_start.FORK_SERVER).read_text())
            client.sendall(sent)
    assert worker(tmp_path)["imported"]


def test_an_environment_that_has_no_room_is_not_forked(tmp_path: Path, serve: Serve) -> None:
    serve(_TRAIN)
    assert not worker(tmp_path, LARGE="x" * 20_000)["imported"]
    assert worker(tmp_path)["imported"]


@pytest.mark.parametrize("source", [_TRAIN, "import threading\nthreading.Event().wait()"], ids=["serving", "importing"])
def test_the_server_ends_with_a_driver_that_is_killed(tmp_path: Path, source: str) -> None:
    begun = "from pathlib import Path\nPath(__file__).with_name('begun').touch()\n"
    (tmp_path / "fork_tests_code.py").write_text(begun + source)
    driver = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys\nfrom pathlib import Path\n"
            "from rubberband.executor.ray.fork_server import ForkServer\n"
            "from rubberband.executor.training.entrypoint import Entrypoint\n"
            "entrypoint = Entrypoint.parse('fork_tests_code:train', search_path=[sys.argv[1]])\n"
            "server = ForkServer('test', Path(sys.argv[1]), entrypoint)\n"
            "print(server._process.pid, flush=True)\nsys.stdin.read()",
            str(tmp_path),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert driver.stdin is not None
    assert driver.stdout is not None
    server = psutil.Process(int(driver.stdout.readline()))
    eventually((tmp_path / "begun").exists, "the import of the user's code")
    driver.kill()
    driver.wait()
    driver.stdin.close()
    driver.stdout.close()
    eventually(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE, "the server's end")


@pytest.mark.long
def test_the_fork_server_of_a_pool_imports_torch_and_no_code_of_a_user(tmp_path: Path) -> None:
    server = ForkServer("team", tmp_path, None)
    try:
        found = worker(tmp_path)
        assert not found["imported"]
        assert found["parent"] != os.getpid(), "it was forked"
        log = (tmp_path / "fork-server.log").read_text()
        assert log == "", log
    finally:
        server.close()
