"""The driver's connections: to the Ray cluster, and to each instance that is another machine."""

from __future__ import annotations

import ctypes
import logging
import math
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError

from rubberband.cloud.node import extend_lease, interruption
from rubberband.cloud.provider import INSTANCE_LABEL, Head
from rubberband.errors import ProviderError
from rubberband.executor.logs.trial_log import (
    Appender,
    TrialLog,
    begins_ranked,
    left_out_line,
    printed_bytes,
    read,
    whole_lines,
)
from rubberband.executor.ray.slot_worker import logs_folder

_OUTLIVE_HEAD = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""How long Ray waits for a head that does not answer before it ends this whole process, even after a disconnect (a
pending call leaves a client behind). Heads end normally here, so it must not. Such a client may be made at any later
time, so the variable stays in the environment. Nodes do not inherit it: see `cloud`."""
_FAREWELL_S = 1.0
"""A living head answers well within this time."""
_LOOK_S = 0.1
_TRIES = 10
_NOT_THERE_YET = "No node info found"


class Connection:
    """The driver's connection; Ray allows one at a time per process."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._address: str | None = None
        self._closed = False
        self._is_kept = False
        """Whether the process was connected before, and stays so."""
        self._asking = threading.Lock()
        """Never held while anything is waited for."""
        self._asked: Future[dict[str, bool]] | None = None
        """The latest request to the head; no new one is sent once this begins to leave."""
        self._former_variables: dict[str, str | None] = {}
        """Environment variables as they were before connecting."""

    @property
    def address(self) -> str | None:
        """The head that this is connected to."""
        return self._address

    def open(self, head: Head) -> None:
        """Connect to `head` unless connected; leave any other head.

        A process that was connected to it before stays connected in the end. Raises ProviderError if the head refuses,
        or if the process is connected to another one.
        """
        with self._mutex:
            if self._address == head.address:
                return
            if self._closed:
                raise ProviderError("the backend is closed")
            if self._address is not None:
                self._leave()
            require_none_but(head.address)
            self._is_kept = ray.is_initialized()
            if self._is_kept:
                self._address = head.address
            else:
                self._connect(head)

    def check(self) -> None:
        """Raise ProviderError if the process is connected to a Ray cluster of its own."""
        with self._mutex:
            if self._address is None:
                require_none_but("")

    def _connect(self, head: Head) -> None:
        self._former_variables = {key: os.environ.get(key) for key in head.environment}
        os.environ.update(head.environment)
        os.environ.setdefault(_OUTLIVE_HEAD, "1000000000")
        _read_environment_again()
        _silence_raylet_messages()
        _forbid_clusters_of_its_own()
        try:
            _join(head)
        except Exception as error:
            raise ProviderError(f"the Ray head at {head.address} did not let the driver in: {error}") from error
        self._address = head.address

    def dead_nodes(self, label: str = INSTANCE_LABEL) -> set[str]:
        """Return the values of `label` of Ray nodes that the head finds dead; none once this leaves the head.

        A request that is pending when Ray disconnects is never answered, so it has its own thread.
        """
        with self._asking:
            if self._address is None:
                return set()
            address, asked = self._address, _ask_for_nodes(label)
            self._asked = asked
        while not wait([asked], timeout=_LOOK_S).done:
            if self._address != address:
                return set()
        return {value for value, alive in asked.result().items() if not alive}

    def close(self) -> None:
        """Disconnect for good."""
        with self._mutex:
            self._closed = True
            self._leave()

    def leave(self) -> None:
        """Disconnect, because the head is gone."""
        with self._mutex:
            self._leave()

    def _leave(self) -> None:
        if self._address is not None:
            with self._asking:
                self._address, asked = None, self._asked
            if asked is not None:
                wait([asked], timeout=_FAREWELL_S)
            if self._is_kept:
                return
            with _signals_kept():
                ray.shutdown()
            for key, value in self._former_variables.items():
                if value is None:
                    os.environ.pop(key, None)
                else:
                    os.environ[key] = value
            _read_environment_again()


def _join(head: Head) -> None:
    """Attach to the head's node; on a busy machine it may take longer than Ray's timeout of a minute."""
    for tries_left in reversed(range(_TRIES)):
        try:
            with _signals_kept():
                ray.init(
                    address=head.address,
                    _temp_dir=head.temp_dir,  # which raylet of this machine to attach to: never an instance's
                    namespace=head.namespace,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                )
        except RuntimeError as error:
            if not tries_left or _NOT_THERE_YET not in str(error):
                raise
        else:
            return


_HAS_HANDLERS = "_ZN3ray6RayLog36is_failure_signal_handler_installed_E"
"""Ray's flag that it handles SIGTERM as a crash. It does not install what the flag says is there."""


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Keep the handler of SIGTERM while Ray connects or disconnects.

    Ray's own aborts the process after 3 s, from any thread, and at a disconnect Ray leaves the system's default: a
    driver would end without releasing its instances. A Ray without the flag has its handler for some milliseconds.
    """
    get, put = ctypes.pythonapi.PyOS_getsig, ctypes.pythonapi.PyOS_setsig
    get.restype = put.restype = ctypes.c_void_p
    put.argtypes = (ctypes.c_int, ctypes.c_void_p)
    from ray._private import utils

    utils.set_sigterm_handler = lambda _: None  # Python's handler, which exits from wherever the main thread is
    try:
        flag = ctypes.c_bool.in_dll(ctypes.CDLL(ray._raylet.__file__), _HAS_HANDLERS)
    except (OSError, ValueError):
        flag = ctypes.c_bool()
    before, flag.value = get(signal.SIGTERM), not ray.is_initialized()
    try:
        yield
    finally:
        flag.value = False
        put(signal.SIGTERM, before)


def require_none_but(address: str) -> None:
    """Raise ProviderError if this process is connected to another Ray cluster than that of `address`."""
    if not ray.is_initialized() or (other := ray.get_runtime_context().gcs_address) == address:
        return
    wanted = f"this experiment is on {address}" if address else "provider local uses its own"
    raise ProviderError(
        f"this process is already connected to a Ray cluster ({other}), and {wanted}: call ray.shutdown() first, run "
        f"rubberband in a process of its own, or train on that cluster (provider: ray, address: {other})"
    )


def _ask_for_nodes(label: str) -> Future[dict[str, bool]]:
    asked: Future[dict[str, bool]] = Future()

    def ask() -> None:
        try:
            asked.set_result(ray_nodes(label))
        except BaseException as error:
            asked.set_exception(error)

    threading.Thread(target=ask, daemon=True, name="ray-nodes").start()
    return asked


def ray_nodes(label: str = INSTANCE_LABEL) -> dict[str, bool]:
    """Return value of `label` -> whether a Ray node answers, for all such nodes that the head has ever seen."""
    nodes: list[Any] = ray.nodes()  # type: ignore[no-untyped-call]
    alive: dict[str, bool] = {}
    for node in nodes:
        if (instance := node["Labels"].get(label)) is not None:
            alive[instance] = alive.get(instance, False) or node["Alive"]
    return alive


def _read_environment_again() -> None:
    """Make Ray read the authentication mode and token again: it reads them once, when it is first imported."""
    with suppress(AttributeError):  # a Ray that knows no authentication
        core: Any = ray._raylet
        core.Config.initialize("")
        core.AuthenticationTokenLoader.instance().reset_cache()


def _forbid_clusters_of_its_own() -> None:
    """Keep Ray from starting a cluster when it is called while unconnected, as our threads may do after a head died."""
    from ray._private import auto_init_hook

    auto_init_hook.enable_auto_connect = False


def _silence_raylet_messages() -> None:
    """Keep pages of raylet state off the user's standard output whenever a worker or an instance ends."""
    from ray._private import worker

    worker.listen_error_messages = lambda *_: None


# Threads that call Ray. Ray ends the whole process if one calls it after `ray.shutdown()`, so `settle` waits for them.


_mutex = threading.Lock()
_started: set[threading.Thread] = set()


def start(target: Callable[[], None], name: str) -> threading.Thread:
    """Run `target` in a daemon thread that `settle` waits for."""
    thread = threading.Thread(target=target, daemon=True, name=name)
    thread.start()
    with _mutex:
        _started.difference_update([other for other in _started if not other.is_alive()])
        _started.add(thread)
    return thread


def settle(timeout_s: float) -> None:
    """Wait until all of these threads have ended, the caller left out, but no longer than `timeout_s` in all."""
    deadline = time.monotonic() + timeout_s
    with _mutex:
        waited_for = _started - {threading.current_thread()}
    for thread in waited_for:
        thread.join(max(0.0, deadline - time.monotonic()))


# The driver's presence on an instance that is another machine: a small actor there, and the thread that asks it.
#
# Every beat extends the machine's lease, and returns the cloud's notice of an interruption and the new output of
# trials. A failed beat changes nothing: an instance that cannot be reached is not dead, and its lease is long enough.


_log = logging.getLogger(__name__)

_PATIENCE_S = 20.0
"""The longest wait for the answer to a beat; then the next one is sent."""
_SILENT_BEATS = 3
"""After this many beats without an answer another actor is started."""
_NOTICED_INTERVAL_S = 0.5
"""Between beats once the instance is about to be reclaimed, so that few log lines are lost with it."""
_COLLECT_S = 20.0
"""The longest wait of a release for the last lines of the logs: a busy machine answers late, and they exist only there.

The margin of a release in `rubberband.values.kinds` covers it."""
_PART_BYTES = 2**18
_PARTS_BYTES = 2**20
_NAME = re.compile(r"[A-Za-z0-9_-]+\.log")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPart:
    """A stretch of a log file."""

    name: str
    offset: int
    content: bytes
    left_out: int = 0
    """Bytes before it that the driver does not get."""

    @property
    def end(self) -> int:
        """Offset at which the next part begins."""
        return self.offset + len(self.content)


def read_new(folder: Path, taken: Mapping[str, int], *, is_last: bool = False) -> Sequence[LogPart]:
    """Return the logs beyond what the driver has `taken` (name -> bytes), 1 MiB at most; finally, the end of each.

    The bytes that a driver has taken are noted beside the log, for the next driver.
    """
    parts: list[LogPart] = []
    room = _PARTS_BYTES
    paths = sorted(folder.glob("*.log"))
    most_bytes = min(_PART_BYTES, _PARTS_BYTES // max(1, len(paths))) if is_last else _PART_BYTES
    for path in paths:
        note = path.with_suffix(".taken")
        offset = taken.get(path.name)
        if offset is None:
            offset = _noted(note)
        elif offset != _noted(note):
            note.write_text(str(offset))
        begin = max(offset, printed_bytes(path) - most_bytes) if is_last else offset
        new = read(path, begin, min(most_bytes, room))
        content = new.content if is_last or new.is_cut else whole_lines(new.content)
        if content:
            left_out = new.begin - offset
            parts.append(LogPart(name=path.name, offset=new.begin, content=content, left_out=left_out))
            room -= len(content)
        if room <= 0:
            break
    return parts


def _noted(note: Path) -> int:
    with suppress(OSError, ValueError):
        return int(note.read_text())
    return 0


def append(folder: Path, part: LogPart, limit_bytes: int) -> None:
    """Add a part to the driver's log of that name, of which `limit_bytes` are kept. Raises OSError."""
    if _NAME.fullmatch(part.name) is None:
        return
    missing = f"\n{left_out_line(part.left_out)}\n".encode() if part.left_out else b""
    with closing(Appender(TrialLog(path=folder / part.name, limit_bytes=limit_bytes))) as log:
        log.write(missing + part.content, on_new_line=begins_ranked(part.content))


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """Answer of an instance."""

    interruption: float | None
    """Unix time at which the cloud reclaims it; None without a notice."""
    logs: Sequence[LogPart]


class AgentActor:
    """Runs on the instance."""

    def __init__(self, instance: str) -> None:
        self._instance = instance

    def beat(self, until: float | None, taken: Mapping[str, int], is_last: bool = False) -> Beat:
        """Extend the lease to `until` (None: leave it), and return what is new; `taken`: log -> bytes the driver has.

        The last beat returns the end of each log, even if that leaves a gap, and removes the logs: the machine may be
        lent on.
        """
        if until is not None:
            extend_lease(until)
        folder = logs_folder(self._instance)
        beat = Beat(interruption=interruption(), logs=read_new(folder, taken, is_last=is_last))
        if is_last:
            shutil.rmtree(folder, ignore_errors=True)
        return beat


@dataclass(eq=False)
class RemoteAgent:
    """The driver's side, for one instance. Any thread may call it."""

    instance: str
    until: Callable[[], float | None] = field(kw_only=True)
    """Gives the instant to which the lease is extended; None: it is left as it is."""
    interval_s: float = field(kw_only=True)
    logs: Path | None = field(kw_only=True)
    """The folder of the files to which the trials' output is added."""
    log_limit_bytes: int = field(kw_only=True)
    """Bytes of each file that are kept."""
    on_notice: Callable[[], None] = field(kw_only=True)
    """Called at every beat that reports an interruption."""
    on_answer: Callable[[], None] = field(default=lambda: None, kw_only=True)
    """Called at every beat that was answered."""
    node: Callable[[str], str] = field(default=lambda instance: instance, kw_only=True)
    """Gives the name of the Ray node that the instance is, or is a part of."""
    node_label: str = field(default=INSTANCE_LABEL, kw_only=True)
    """Key of the Ray label that has it."""
    options: Callable[[], Mapping[str, Any]] = field(default=dict, kw_only=True)
    """Gives further options of Ray for the actor."""

    def __post_init__(self) -> None:
        self._taken: dict[str, int] = {}
        self._mutex = threading.Lock()
        """Held while parts of logs are taken, so that none is taken twice."""
        self._dismissed = False
        self._wake = threading.Event()
        self.reaches = -math.inf
        """The latest instant at which the machine may end itself, as far as it was given one."""
        self._actor: Any = None
        self._answers = False
        """Whether the actor has answered: until then it may take longer to start than the lease is."""
        self._silent = 0

    def begin(self) -> None:
        """Start the actor once the instance has joined, and send beats until dismissed."""
        start(self._run, f"agent-{self.instance}")

    def dismiss(self) -> None:
        """Stop extending the lease."""
        self._dismissed = True
        self._wake.set()

    def end(self) -> None:
        """End the actor, on a node that stays: an autoscaler removes idle ones only."""
        self._discard()

    def hurry(self) -> None:
        """Do not wait for the next beat."""
        self._wake.set()

    def collect(self) -> None:
        """Take the end of the logs, unless the instance is gone; the lease is left as it is."""
        with suppress(Exception):  # it does not answer
            actor = self._actor or self._post()
            if actor is not None:
                self._ask(actor, None, _COLLECT_S, is_last=True)

    def _run(self) -> None:
        while not self._dismissed:
            self._wake.clear()
            try:
                actor = self._actor or self._post()
                if actor is not None:
                    has_answered = self._answers
                    self._ask(actor, self.until() if has_answered else None, _PATIENCE_S)
                    self._answers, self._silent = True, 0
                    if not has_answered:
                        continue
            except Exception as error:
                _log.debug("instance %s did not answer: %s: %s", self.instance, type(error).__name__, error)
                self._silent += 1
                if isinstance(error, RayActorError) or self._silent >= _SILENT_BEATS:
                    self._discard()
            if not self._dismissed:
                self._wake.wait(self.interval_s if self._actor is not None else min(1.0, self.interval_s))

    def _post(self) -> Any:
        """Start the actor if the instance has joined: one that waits for its node would keep the head busy."""
        node = self.node(self.instance)
        if not ray_nodes(self.node_label).get(node, False):
            return None
        # Ray orders an actor without needs from any node, even from one that has just ended, and waits until it notices
        # that. An actor with a need is ordered from the driver's node.
        label = {self.node_label: node}
        options = {"num_cpus": 0, "memory": 1, "max_restarts": 0, "label_selector": label, **self.options()}
        actor = ray.remote(AgentActor).options(**options)
        self._actor = actor.remote(self.instance)
        return self._actor

    def _discard(self) -> None:
        actor, self._actor, self._answers, self._silent = self._actor, None, False, 0
        with suppress(Exception):
            ray.kill(actor)

    def _ask(self, actor: Any, until: float | None, timeout_s: float, *, is_last: bool = False) -> None:
        give_up_at = time.monotonic() + timeout_s
        if not self._mutex.acquire(timeout=timeout_s):
            return
        try:
            if until is not None:
                self.reaches = max(self.reaches, until)
            asked = actor.beat.remote(until, dict(self._taken), is_last)
            beat: Beat = ray.get(asked, timeout=max(0.0, give_up_at - time.monotonic()))
            self.on_answer()
            if until is not None:
                self.reaches = until  # beats arrive in their order
            if beat.interruption is not None:
                self.interval_s = min(self.interval_s, _NOTICED_INTERVAL_S)
                self.on_notice()
            with suppress(OSError):  # a full disk; they are asked for again
                for part in beat.logs:
                    if self.logs is not None:
                        append(self.logs, part, self.log_limit_bytes)
                    self._taken[part.name] = part.end
        finally:
            self._mutex.release()
