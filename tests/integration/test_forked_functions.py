"""Functions whose processes are forked: they find what they would in one of their own, or have that; none is left."""

from __future__ import annotations

import json
import os
import signal
import sys
import textwrap
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rubberband.executor import Entrypoint, ForkServer, open_store, run_segment
from rubberband.values.environment import HASH_SEED, Environment
from tests.builders.processes.segment_worker import gang_of, run_gang
from tests.builders.segments import SEGMENT
from tests.builders.waiting import eventually

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="functions are forked on Linux only")

HEAD = """
    import json, os, random, signal, sys, time
    from pathlib import Path
    import rubberband

    IMPORTED_BY = int(os.readlink("/proc/self"))  # os.getpid() would bind it to its process
    HERE = Path(__file__).parent
"""
FINDS = """
    os.environ["OF_THE_IMPORT"] = "set"

    @rubberband.distributed
    def train(config):
        found = {
            "environment": {name: value for name, value in os.environ.items() if name != "MASTER_PORT"},
            "from outside": sorted(Path("/proc/self/environ").read_bytes().decode().strip("\\0 ").split("\\0")),
            "folder": os.getcwd(), "main": sys.modules["__main__"].__spec__.name, "arguments": sys.argv,
            "input": os.readlink("/proc/self/fd/0"), "files": sorted(os.listdir("/proc/self/fd"))[:3],
            "session": os.getsid(0) == os.getpid(), "draw": random.random(), "nice": os.nice(0),
            "signals": [str(signal.getsignal(each)) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)],
            "blocked": list(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "flags": sys.stdout.line_buffering,
        }
        print("half a line", end="")
        (HERE / f"found-{os.getpid() == IMPORTED_BY}.json").write_text(json.dumps(found))
        rubberband.report({"loss": 1.0})
"""
FORKED = """
    @rubberband.distributed
    def train(config):
        rubberband.report({"loss": float(IMPORTED_BY != os.getpid())})
"""


class Function:
    """A function in a folder, which may have a fork server, and its store."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.server: ForkServer | None = None
        self._monkeypatch = monkeypatch
        self.entrypoint = Entrypoint(module="", attribute="", search_path=())

    def write(self, source: str, **environment: str) -> None:
        """Write its module, and let it have these variables."""
        (self.folder / "forked_code.py").write_text(textwrap.dedent(HEAD) + textwrap.dedent(source))
        entrypoint = Entrypoint.parse("forked_code:train", search_path=[self.folder])
        self.entrypoint = replace(entrypoint, environment=Environment(variables={HASH_SEED: "0", **environment}))

    def serve(self) -> None:
        """Start the server."""
        self.server = ForkServer("test", self.folder, self.entrypoint)
        self._monkeypatch.setenv("RUBBERBAND_DIRECTORY", str(self.folder))

    def run(self) -> list[Any]:
        """Run a segment of one iteration in this process, as a worker does."""
        self.forget()
        segment = replace(SEGMENT, until_iterations=1, max_iterations=1)
        with self.entrypoint.environment.within():
            return list(run_segment(self.entrypoint, segment, open_store(str(self.folder / "store"))))

    def forget(self) -> None:
        """Let this process import the module again."""
        module = sys.modules.pop("forked_code", None)
        if hasattr(module, "FOLDER"):
            module.FOLDER.cleanup()

    def is_forked(self) -> bool:
        """Whether its process is, where it says so by its metric."""
        found = self.run()[-1].metrics
        return bool(found["loss"])


@pytest.fixture
def function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Function]:
    monkeypatch.delenv("RUBBERBAND_DIRECTORY", raising=False)
    found = Function(tmp_path, monkeypatch)
    yield found
    if found.server is not None:
        found.server.close()
    found.forget()


def of_this_start(found: Any) -> str:
    """What a process has found, without the names that each start has anew."""
    text = json.dumps(found, sort_keys=True)
    text = text.replace(found["environment"]["RUBBERBAND_ARTIFACTS"], "ARTIFACTS")
    for name in ("RUBBERBAND_CHECKPOINT", "RUBBERBAND_LINE"):
        text = text.replace(str(Path(found["environment"][name]).parent), "PLACE")
    return text


def test_a_forked_function_finds_what_it_finds_in_a_process_of_its_own(function: Function) -> None:
    function.write(FINDS, DATA="/data")
    function.serve()
    function.run()
    assert function.server is not None
    function.server.close()
    function.run()
    forked, fresh = (json.loads((function.folder / f"found-{own}.json").read_text()) for own in (False, True))
    outside, _ = forked.pop("from outside"), fresh.pop("from outside")
    assert {f"{name}={value}" for name, value in forked["environment"].items()} <= set(outside)
    assert json.loads(of_this_start(forked)) == json.loads(of_this_start(fresh))
    assert forked["environment"]["OF_THE_IMPORT"] == "set"


@pytest.mark.by_default(3)
@pytest.mark.parametrize(
    ("source", "forks"),
    [
        pytest.param("", True, id="nothing"),
        pytest.param("HOME = os.environ['PATH'], 'NO_SUCH' in os.environ\n", True, id="reads what is the same"),
        pytest.param("RANK = int(os.environ.get('RANK', -1))\n", False, id="reads its rank"),
        pytest.param("IS_GANG = 'WORLD_SIZE' in os.environ\n", False, id="asks for the gang"),
        pytest.param("BATCH = rubberband.per_worker(64)\n", False, id="shares its batch"),
        pytest.param("COPY = os.environ.copy()\n", False, id="copies the variables"),
        pytest.param("FILE = os.open(__file__, os.O_RDONLY)\n", False, id="leaves a file open"),
        pytest.param("import tempfile\nFOLDER = tempfile.TemporaryDirectory()\n", False, id="makes a temporary folder"),
    ],
)
def test_a_function_is_forked_only_if_its_imports_would_find_the_same(
    function: Function, source: str, forks: bool
) -> None:
    function.write(textwrap.indent(source, "    ") + FORKED)
    function.serve()
    assert function.is_forked() == forks
    assert function.is_forked() == forks  # the server serves on


@pytest.mark.by_default(1)
@pytest.mark.parametrize("victim", ["child", "guard", "worker"])
def test_nothing_is_left_of_a_forked_function_whose_process_is_killed(function: Function, victim: str) -> None:
    source = """
    @rubberband.distributed
    def train(config):
        pids = [os.getpid(), os.getppid()]
        if not (other := os.fork()):
            os.setsid()
            time.sleep(1000)
        (HERE / "draft").write_text(json.dumps([*pids, other]))
        (HERE / "draft").rename(HERE / "pids")
        time.sleep(1000)
    """
    function.write(source)
    function.serve()
    with gang_of(1, RUBBERBAND_DIRECTORY=str(function.folder), PYTHONHASHSEED="0") as (worker,):
        store = open_store(str(function.folder / "store"))
        thread = threading.Thread(target=run_gang, args=([worker], function.entrypoint, SEGMENT, store))
        thread.start()
        eventually((function.folder / "pids").exists, "the function")
        pids = json.loads((function.folder / "pids").read_text())
        assert Path(f"/proc/{pids[1]}/status").read_text().split("PPid:")[1].split()[0] != str(worker.pid)
        os.kill({"child": pids[0], "guard": pids[1], "worker": worker.pid}[victim], signal.SIGKILL)
        thread.join(30)
        left = pids[:2] if victim == "guard" else pids  # who has left the session is lost with its guard
        eventually(lambda: not any(Path("/proc", str(pid)).exists() for pid in left), "the end", within_s=5.0)
        if victim == "guard":
            os.kill(pids[2], signal.SIGKILL)
