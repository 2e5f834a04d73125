"""One process that has imported what training needs, and forks the workers of all instances of this machine.

Imports are most of a worker's start, and all workers import the same. `cloud/ray_head/worker_start.py` asks for a
worker; the forked one replaces it, with its arguments, environment, folder and streams, so that leases, cleanups and
logs work as usual. It forks only if that is safe: no thread may hold a lock, and no GPU may be in use. Otherwise, and
on other systems than Linux, workers start on their own. It ends with the driver, without its workers.

Functions in gangs have processes of their own, which a worker asks for (`guarded_process.py` of training). They are
forked as well, below a guard, if their imports would have found the same in a process of their own (`imports.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import pickle
import runpy
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rubberband.cloud.ray_head import ray_node
from rubberband.cloud.ray_head.instance import DIRECTORY_TAG, EXPERIMENT_TAG, INSTANCE_TAG
from rubberband.cloud.ray_head.worker_start import FORK_SERVER, FORKED, READY, is_ready, peer_uid
from rubberband.errors import EntrypointError
from rubberband.executor.ray.imports import Imports
from rubberband.executor.training import guard
from rubberband.executor.training.entrypoint import Entrypoint
from rubberband.executor.training.trial import Device
from rubberband.executor.training.worker_process import worker_settings
from rubberband.files import private, write_atomically
from rubberband.values.environment import HASH_SEED, Environment

_NAME = "fork-server"
_PADDING = "RUBBERBAND_PADDING"
_PADDING_BYTES = 16 * 1024
"""How much larger a worker's environment may be than this process's, which it overwrites."""
_A_GPU: dict[Device, tuple[str, ...]] = {"cpu": (), "cuda": ("0",)}
"""GPUs that imports find: as many as in a worker. torch counts a number without opening a GPU, unlike an id."""
_UNTOUCHED = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Lets modules call `torch.cuda.is_available()` without a begin of CUDA, which no forked process could use then."""
_CONTROL = "/dev/nvidiactl"
"""NVML opens it to count the GPUs."""
_COLLECT_EVERY = 1_000_000
"""Objects between two garbage collections of the imports, which take a fifth of their time and free next to nothing."""
_QUEUE = 256
_FAREWELL_S = 3.0
_ORDER_S = 10.0
_HARMLESS_THREADS = {"jemalloc_bg_thd"}
"""Threads that handle a fork themselves (jemalloc's, in pyarrow)."""
_RAY_IMPORTS = ("google.protobuf.json_format", "jsonschema", "msgpack", "psutil", "requests", "yaml")
"""Imports of Ray, which itself is not imported: it reads only once of which raylet and job it is a worker."""
_ENVIRONMENT_FIELDS = slice(47, 49)
"""Fields of /proc/self/stat after the command's name that hold the addresses of the environment."""


class ForkServer:
    """The driver's end."""

    def __init__(
        self,
        experiment: str,
        directory: Path,
        entrypoint: Entrypoint | None,
        *,
        device: Device = "cpu",
        slots_on_machine: int = 1,
    ) -> None:
        """Start it, if possible, for the provider's `directory`; it imports what `entrypoint` needs.

        None: what any trial with torch needs, and no code of a user, as experiments of a pool have different code.
        The imports find what they would find in a worker on `device`, on a machine of `slots_on_machine` slots.
        """
        self._directory = directory.resolve()
        self._process: subprocess.Popen[bytes] | None = None
        self._environment = Environment() if entrypoint is None else entrypoint.environment
        if sys.platform == "linux":
            with contextlib.suppress(OSError, RuntimeError):  # too many processes, or no home
                self._start(experiment, entrypoint, device, slots_on_machine)

    def _start(self, experiment: str, entrypoint: Entrypoint | None, device: Device, slots_on_machine: int) -> None:
        tags = {EXPERIMENT_TAG: experiment, DIRECTORY_TAG: str(self._directory), INSTANCE_TAG: _NAME}
        environment = ray_node.environment(os.environ, ray_node.default_token_path(), tags, _A_GPU[device])
        named = {**environment, **self._environment.variables}
        environment |= worker_settings(named, device, slots_on_machine) | _UNTOUCHED
        environment[HASH_SEED] = self._environment.hash_seed
        environment.setdefault("OMP_NUM_THREADS", "1")  # as in Ray's workers; a pool of threads cannot be forked
        environment[_PADDING] = " " * _PADDING_BYTES
        name = secrets.token_hex(16)
        path = self._directory / f"{_NAME}.log"
        with socket.socket(socket.AF_UNIX) as listener, open(path, "wb", opener=private) as log:
            listener.bind(f"\0{name}")
            listener.listen(_QUEUE)  # early clients wait for the imports
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-P", "-m", "rubberband.executor.ray.fork_server", str(listener.fileno())],
                env=environment,
                pass_fds=[listener.fileno()],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        pickle.dump(entrypoint, self._process.stdin)
        self._process.stdin.flush()
        write_atomically(self._directory / FORK_SERVER, name.encode(), durable=False)

    def forks(self) -> bool:
        """Whether its imports are over, and workers can be forked."""
        looks = iter((True, False))
        return is_ready(self._directory, lambda: next(looks))

    def close(self) -> None:
        """End it. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(OSError):
            (self._directory / FORK_SERVER).unlink(missing_ok=True)
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(_FAREWELL_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if self._environment.secrets:  # which imports may have printed
            log = self._directory / f"{_NAME}.log"
            with contextlib.suppress(OSError):
                log.write_text(self._environment.masked(log.read_text("utf-8", "replace")), "utf-8")


def main() -> None:
    """Run the server; in a forked process, run the worker."""
    entrypoint: Entrypoint | None = pickle.load(sys.stdin.buffer)
    driver = os.dup(0)
    with open(os.devnull) as nothing:  # a module that reads its input would wait for the driver's end
        os.dup2(nothing.fileno(), 0)
    _end_with_driver(driver)
    if entrypoint is not None:
        entrypoint.environment.put()
    imports, thresholds = Imports("" if entrypoint is None else entrypoint.module), gc.get_threshold()
    gc.set_threshold(_COLLECT_EVERY)
    with socket.socket(fileno=int(sys.argv[1])) as listener:
        with imports:
            if not _import(entrypoint):
                return
        if imports.binding:
            print(f"workers start on their own: {imports.binding}", flush=True)
            return
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # workers are not waited for
        gc.freeze()
        gc.set_threshold(*thresholds)
        order = _serve(listener, driver, imports)
    if order is not None:
        os.close(driver)
        _become(order, imports)


def _end_with_driver(driver: int) -> None:
    """Let the kernel end this process when the driver is gone, at the pipe's other end, also during an import."""
    fcntl.fcntl(driver, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(driver, fcntl.F_SETFL, fcntl.fcntl(driver, fcntl.F_GETFL) | os.O_ASYNC)  # SIGIO at its end
    if select.select([driver], [], [], 0.0)[0]:
        sys.exit()


def _import(entrypoint: Entrypoint | None) -> bool:
    """Import what a worker imports, except Ray; return whether this process may be forked."""
    from rubberband.executor.ray import slot_worker as worker  # noqa: F401 - workers are made of it
    from rubberband.executor.training.run import preload

    for name in _RAY_IMPORTS:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    try:
        preload(entrypoint)
    except EntrypointError as error:  # a worker reports it better
        print(error, flush=True)
        return False
    if why_not := unforkable():
        print(f"workers start on their own: {why_not}", flush=True)
    return not why_not


def unforkable() -> str:
    """Return why this process must not be forked; empty if it may be."""
    if "ray" in sys.modules:
        return "Ray is imported, which takes in its process's environment then"
    threads = [Path("/proc/self/task", thread, "comm").read_text().strip() for thread in os.listdir("/proc/self/task")]
    others = [thread for thread in threads if thread not in _HARMLESS_THREADS]
    if len(others) > 1:
        return f"{len(others) - 1} threads run beside the main one ({', '.join(sorted(others))})"
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{number}")
            if path.startswith("/dev/nvidia") and path != _CONTROL:
                return "CUDA is in use"
    return "CUDA is in use" if _cuda_refuses_a_fork() else ""


def _cuda_refuses_a_fork() -> bool:
    """Whether torch could not use CUDA in a forked process; it knows only there."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    child = os.fork()
    if not child:
        refuses = True
        try:
            refuses = torch.cuda.is_initialized() or torch.cuda._is_in_bad_fork()
        finally:
            os._exit(int(refuses))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0


def _serve(listener: socket.socket, driver: int, imports: Imports) -> Mapping[str, Any] | None:
    """Fork workers until the driver is gone (None); in a worker, return its order."""
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    while True:
        readable = select.select([driver, listener.fileno()], [], [])[0]
        if driver in readable:
            return None
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError, ValueError, KeyError):
            order = _take(connection, imports)
            if order is not None:
                return order


def _take(connection: socket.socket, imports: Imports) -> Mapping[str, Any] | None:
    """Fork the requested worker; in the worker, return its order."""
    if peer_uid(connection) != os.getuid():
        return None
    connection.settimeout(_ORDER_S)
    connection.sendall(READY)
    header, streams, _, _ = socket.recv_fds(connection, 4, 3)
    try:
        if len(header) < 4 or len(streams) < 3:  # it has not waited
            return None
        content = connection.makefile("rb").read(struct.unpack("!I", header)[0])
        order: dict[str, Any] = json.loads(content)
        begin, end = _environment_place()
        if any(len(_block(imports.added_to(order[key] or {}))) > end - begin for key in ("environment", "program")):
            return None
        if order["program"] is not None and not imports.suit(order["program"]):
            return None
        if os.fork():
            connection.sendall(FORKED)
            return None
        try:
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
        except OSError:  # it must not go on as a second server
            os._exit(1)
        return order
    finally:
        for stream in streams:
            os.close(stream)


def _block(environment: Mapping[str, str]) -> bytes:
    """Return the environment as the kernel lays it out."""
    return b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())


def _environment_place() -> tuple[int, int]:
    """Return where in memory others (ps, `rubberband cleanup`) read the environment of this process's start."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = map(int, fields[_ENVIRONMENT_FIELDS])
    return begin, end


def _become(order: Mapping[str, Any], imports: Imports) -> None:
    """Continue as the worker, or as the guard of a function's process."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN if order["ignores_children"] else signal.SIG_DFL)
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    Path("/proc/self/oom_score_adj").write_text(str(order["oom_score"]))
    os.nice(order["nice"] - os.nice(0))
    os.chdir(order["folder"])
    _take_over(imports.added_to(order["environment"]))
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # Python's own generator has been seeded at the fork
    sys.argv = list(order["argv"])
    if order["program"] is None:
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        guard.main(lambda program: _call(program, imports))
        os._exit(0)  # what the imports do in the end is for the function's process


def _call(order: Mapping[str, Any], imports: Imports) -> None:
    """Run the module at the end of a function's command line, as `python -m` does."""
    _take_over(imports.added_to(order["environment"]))
    imports.go_on()
    sys.argv = [""]  # `runpy` puts the module's path there
    runpy.run_module(order["words"][-1], run_name="__main__", alter_sys=True)


def _take_over(environment: Mapping[str, str]) -> None:
    """Set the environment, for this process and for others that read it from outside.

    The first variable stays in its place: a process sets its title in the memory before it.
    """
    first = next(iter(os.environ))
    for name in list(os.environ):
        if name not in environment:
            del os.environ[name]
    for name, value in environment.items():
        if name != first or os.environ[name] != value:
            os.environ[name] = value
    content = _block({name: environment[name] for name in (*os.environ, *environment) if name in environment})
    begin, end = _environment_place()
    ctypes.memmove(begin, content.ljust(end - begin, b"\0"), end - begin)


if __name__ == "__main__":
    main()
