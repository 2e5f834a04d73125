"""The driver's connection to a Ray cluster."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any

import ray

from rubberband.cloud.provider import INSTANCE_LABEL, Head
from rubberband.errors import ProviderError

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
        self._asking = threading.Lock()
        """Never held while anything is waited for."""
        self._asked: Future[dict[str, bool]] | None = None
        """The latest request to the head; no new one is sent once this begins to leave."""
        self._found: dict[str, str | None] = {}
        """Environment variables as they were before connecting."""

    @property
    def address(self) -> str | None:
        """The head that this is connected to."""
        return self._address

    def open(self, head: Head) -> None:
        """Connect to `head` unless connected; leave any other head. Raises ProviderError if the head refuses."""
        with self._mutex:
            if self._address == head.address:
                return
            if self._closed:
                raise ProviderError("the backend is closed")
            if self._address is not None:
                self._leave()
            self._connect(head)

    def check(self) -> None:
        """Raise ProviderError if the process is connected to a Ray cluster of its own."""
        with self._mutex:
            if self._address is None and ray.is_initialized():
                raise ProviderError(
                    "this process is already connected to a Ray cluster, and rubberband uses its own: call "
                    "ray.shutdown() first, or run rubberband in a process of its own"
                )

    def _connect(self, head: Head) -> None:
        self._found = {key: os.environ.get(key) for key in head.environment}
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

    def dead_nodes(self) -> set[str]:
        """Return the labels of Ray nodes that have stopped answering the head; none once this leaves the head.

        A request that is pending when Ray disconnects is never answered, so it has its own thread.
        """
        with self._asking:
            if self._address is None:
                return set()
            address, asked = self._address, _ask_for_nodes()
            self._asked = asked
        while not wait([asked], timeout=_LOOK_S).done:
            if self._address != address:
                return set()
        return {label for label, alive in asked.result().items() if not alive}

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
            with _signals_kept():
                ray.shutdown()
            for key, value in self._found.items():
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


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Keep the handler of SIGTERM while Ray connects or disconnects.

    Ray's own aborts the process after 3 s, from any thread, and at a disconnect Ray leaves the system's default: a
    driver would end without releasing its instances. A Ray without the flag has its handler for some milliseconds.
    """
    get, put = ctypes.pythonapi.PyOS_getsig, ctypes.pythonapi.PyOS_setsig
    get.restype = put.restype = ctypes.c_void_p
    put.argtypes = (ctypes.c_int, ctypes.c_void_p)
    from ray._private import utils

    if hasattr(utils, "set_sigterm_handler"):
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


def _ask_for_nodes() -> Future[dict[str, bool]]:
    asked: Future[dict[str, bool]] = Future()

    def ask() -> None:
        try:
            asked.set_result(ray_nodes())
        except BaseException as error:
            asked.set_exception(error)

    threading.Thread(target=ask, daemon=True, name="ray-nodes").start()
    return asked


def ray_nodes() -> dict[str, bool]:
    """Return label -> whether a Ray node answers, for all instances that the head has ever seen."""
    nodes: list[Any] = ray.nodes()  # type: ignore[no-untyped-call]
    found: dict[str, bool] = {}
    for node in nodes:
        if (instance := node["Labels"].get(INSTANCE_LABEL)) is not None:
            found[instance] = found.get(instance, False) or node["Alive"]
    return found


def _read_environment_again() -> None:
    """Make Ray read the authentication mode and token again: it reads them once, when it is first imported."""
    with contextlib.suppress(AttributeError):  # a Ray that knows no authentication
        core: Any = ray._raylet
        core.Config.initialize("")
        core.AuthenticationTokenLoader.instance().reset_cache()


def _forbid_clusters_of_its_own() -> None:
    """Keep Ray from starting a cluster when it is called while unconnected, as our threads may do after a head died."""
    from ray._private import auto_init_hook

    if hasattr(auto_init_hook, "enable_auto_connect"):
        auto_init_hook.enable_auto_connect = False


def _silence_raylet_messages() -> None:
    """Keep pages of raylet state off the user's standard output whenever a worker or an instance ends."""
    from ray._private import worker

    if hasattr(worker, "listen_error_messages"):
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
