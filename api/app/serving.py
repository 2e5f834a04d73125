"""The server process: one for a home and its store, with one worker. Experiments outlive it."""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import logging
import os
import re
import secrets
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from rubberband.api.app import create_app
from rubberband.api.routes import Service
from rubberband.api.security import is_live
from rubberband.api.settings import Settings
from rubberband.api.store import Store, open_store
from rubberband.errors import InputError
from rubberband.executor.journal.database import parse_url
from rubberband.files import EXCLUSIVE, make_directories, require_home, try_lock, write_atomically
from rubberband.interrupts import heeded
from rubberband.units import shown

# Where the service listens, and which host names it answers. Pure.

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
ANY_NAME = "*"
_NAME = re.compile(r"[0-9a-z]([0-9a-z.-]*[0-9a-z])?|\[[0-9a-f:.]+\]", re.ASCII)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the host."""
    address = _address(host)
    return host.lower() == "localhost" if address is None else address.is_loopback


def require_auth(host: str, auth: bool | None, proxies: Sequence[str] = ()) -> bool:
    """Return whether tokens are needed: always beyond loopback. Raises InputError if that was declined."""
    if is_loopback(host) and not proxies:
        return bool(auth)
    if auth is False:
        way = f"by the proxy {proxies[0]}" if proxies else f"at {host}"
        raise InputError(
            f"--no-auth: {way} other machines reach the service, and all of them could spend your money; leave "
            "--no-auth out, or listen on 127.0.0.1 without a proxy"
        )
    return True


def served_names(host: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return the accepted values of the Host header: `names`, `host`, and those of loopback.

    Raises InputError for an invalid name, and if the service listens on every address without a name.
    """
    given = tuple(_checked(name) for name in names)
    address = _address(host)
    if address is not None and address.is_unspecified:
        if not given:
            raise InputError(
                f"--host {host} listens on every address; give the host names that it answers for: --host-name "
                f"tuning.example.org (or --host-name '{ANY_NAME}', which lets any page on the web try)"
            )
        own: tuple[str, ...] = ()
    else:
        own = (host.lower() if address is None or address.version == 4 else f"[{address}]",)
    return tuple(dict.fromkeys((*given, *own, *LOOPBACK_NAMES)))


def url_of(host: str, port: int, *, https: bool) -> str:
    """Return the URL for a browser on this machine."""
    address = _address(host)
    if address is not None and address.is_unspecified:
        host = "127.0.0.1" if address.version == 4 else "::1"
    shown_host = f"[{host}]" if ":" in host else host
    return f"{'https' if https else 'http'}://{shown_host}:{port}"


def _checked(name: str) -> str:
    lowered = name.strip().lower().removesuffix(".")
    if lowered != ANY_NAME and not _NAME.fullmatch(lowered):
        raise InputError(
            f"--host-name {shown(name)} is not a host name; write it without scheme and port: tuning.example.org"
        )
    return lowered


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


# HTTP connections with time limits for clients that do not send a whole request or do not read the answer.

HEADERS_S = 10.0
"""Time limit of the headers of a request; that of a body is in rubberband.api.security.middleware."""
HEADERS_BYTES = 32 << 10
"""Largest size of all headers; more is answered with 400."""
UNREAD_S = 30.0
"""A client that reads nothing for this long is disconnected, since it holds memory."""
MOST_WAITING = 64
"""Connections of one address with an incomplete request; beyond that, those are closed that wait for `PATIENCE_S`."""
PATIENCE_S = 1.0
"""The whole requests of a burst are read by then."""
_MOST_AT_ONCE = 400
"""Connections of one address with an incomplete request of which the oldest is closed at once: others need room too."""


class _Gathering:
    """Transport that sends head and body of an answer, which uvicorn writes apart, in one system call."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._written: list[bytes] = []

    def write(self, data: bytes) -> None:
        """Send before the next turn of the event loop."""
        if not data:
            return
        if not self._written:
            self._loop.call_soon(self._flush)
        self._written.append(data)

    def close(self) -> None:
        """Send what was written, and close."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        written, self._written = self._written, []
        if written:
            self._transport.write(b"".join(written))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class PatientProtocol(H11Protocol):
    """uvicorn's protocol with time limits for headers and for clients that do not read."""

    _late: asyncio.TimerHandle | None = None
    _since = 0.0
    """Time of the loop from which on it waits."""
    _unread: asyncio.TimerHandle | None = None
    _waiting: ClassVar[dict[str, dict[PatientProtocol, None]]] = {}
    """Address -> its connections with an incomplete request, the oldest first."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Expect the first request."""
        super().connection_made(cast(asyncio.Transport, _Gathering(transport, self.loop)))
        self._expect()

    def data_received(self, data: bytes) -> None:
        """Expect the rest of the headers from their first byte on, or the rest of a body that the app ignores."""
        super().data_received(data)
        if not self._is_owed():
            self._stop_waiting()
        elif self._late is None:
            self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the time limits."""
        self._stop_waiting()
        self._stop_watching()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Watch a client that reads more slowly than the app writes."""
        super().pause_writing()
        self._watch(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """Stop watching: the client has read most of it."""
        self._stop_watching()
        super().resume_writing()

    def _watch(self, owed: int) -> None:
        self._stop_watching()
        self._unread = self.loop.call_later(UNREAD_S, self._look, owed)

    def _look(self, owed: int) -> None:
        now_owed = self.transport.get_write_buffer_size()
        if now_owed < owed:
            self._watch(now_owed)
        else:
            self.transport.abort()

    def _stop_watching(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _is_owed(self) -> bool:
        answered = self.cycle is not None and self.cycle.response_complete
        return self.conn.their_state is h11.IDLE or (answered and self.conn.their_state is h11.SEND_BODY)

    @property
    def _is_of_proxy(self) -> bool:
        """Whether it may be of any client: the proxy before the service counts those."""
        return self.config.proxy_headers and self._address in (self.config.forwarded_allow_ips or ())

    @property
    def _address(self) -> str:
        return self.client[0] if self.client else ""

    def _expect(self) -> None:
        self._late, self._since = self.loop.call_later(HEADERS_S, self._cut_off), self.loop.time()
        if self._is_of_proxy:
            return
        waiting = self._waiting.setdefault(self._address, {})
        waiting[self] = None
        if len(waiting) > _MOST_AT_ONCE:
            next(iter(waiting))._cut_off()
        elif len(waiting) > MOST_WAITING:  # a timer comes after what has arrived meanwhile is read
            self.loop.call_later(PATIENCE_S, self._cut_off_oldest, waiting)

    @staticmethod
    def _cut_off_oldest(waiting: dict[PatientProtocol, None]) -> None:
        for oldest in list(waiting)[: max(0, len(waiting) - MOST_WAITING)]:
            if oldest._since <= oldest.loop.time() - PATIENCE_S:
                oldest._cut_off()

    def _stop_waiting(self) -> None:
        if self._late is None:
            return
        self._late.cancel()
        self._late = None
        waiting = self._waiting.get(self._address, {})
        waiting.pop(self, None)
        if not waiting:
            self._waiting.pop(self._address, None)

    def _cut_off(self) -> None:
        self._stop_waiting()
        if not self.transport.is_closing():
            self.transport.close()


_GRACE_S = 3
"""Time for running requests at the end of the service."""
_CONNECTIONS = 500
"""Connections at the same time; more are answered with 503."""
_KEEP_ALIVE_S = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """TLS and proxies of the service."""

    certfile: Path | None = None
    """Certificate; with it, the service speaks HTTPS."""
    keyfile: Path | None = None
    proxies: Sequence[str] = ()
    """Addresses of proxies whose X-Forwarded-For and X-Forwarded-Proto are trusted."""


def serve(settings: Settings, transport: Transport, announce: Callable[[str, Store], None]) -> None:
    """Serve until Ctrl-C, SIGTERM or SIGHUP. `announce` is called with the address once the port is open.

    Raises InputError if the port, the home or the store is taken, or if tokens are needed and none exists.
    """
    for note in require_home(settings.home):
        print(note, file=sys.stderr, flush=True)
    store = open_store(settings.store, settings.home, settings.keeping)
    with closing(store), only_server(settings, store):
        require_token(settings, store)
        with _listening(settings.host, settings.port) as listener:
            app = create_app(settings, store=store)
            server = _HttpServer(_config(app, settings, transport), app.state.service)
            port = listener.getsockname()[1]
            with _signals_are_an_end(server):
                announce(url_of(settings.host, port, https=transport.certfile is not None), store)
                server.run(sockets=[listener])


def require_token(settings: Settings, store: Store) -> None:
    """Raise InputError if tokens are needed and none is valid."""
    now = settings.clock()
    if settings.auth and not any(is_live(record, at=now) for record in store.tokens()):
        raise InputError(
            "the service needs tokens (--auth, or a bind beyond loopback) and none exists; make one: rubberband "
            "token create NAME --scope admin"
        )


_GARBAGE = (700, 10, 10)
"""Python's default: closed connections hold their data until a collection."""


class _HttpServer(uvicorn.Server):
    """Server that ends its streams of events on a signal."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, with a planning process beside. Garbage collections skip all present objects, which stay, and so cause
        no pauses.
        """
        self._service.plans.warm_up()
        await super().startup(sockets)
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_GARBAGE)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End the streams, then the server."""
        self._service.feed.close()
        super().handle_exit(sig, frame)


def _config(app: object, settings: Settings, transport: Transport) -> uvicorn.Config:
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]
        host=settings.host,
        http=PatientProtocol,
        ws="none",
        lifespan="on",
        workers=1,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=bool(transport.proxies),
        forwarded_allow_ips=list(transport.proxies) or None,
        limit_concurrency=_CONNECTIONS,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_GRACE_S,
        h11_max_incomplete_event_size=HEADERS_BYTES,
        ssl_certfile=transport.certfile,
        ssl_keyfile=transport.keyfile,
        # Otherwise OpenSSL would ask for the password of an encrypted key on the terminal.
        ssl_keyfile_password="none" if transport.certfile else None,
    )
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        raise InputError(
            f"the certificate {transport.certfile} cannot be used ({error}); give --ssl-certfile and --ssl-keyfile "
            "in PEM, the key without a password"
        ) from None
    return config


@contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.create_server(address[:2], family=family, backlog=256)
    except (OSError, UnicodeError) as error:
        text = getattr(error, "strerror", None) or str(error)
        raise InputError(
            f"{host}:{port} is not available ({text}); choose another by --host and --port (0: any free port)"
        ) from None
    # Accepted sockets inherit this; asyncio sets it only on sockets that it makes. Without it, an event of a stream
    # waits for the acknowledgement of the one before, up to 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with listener:
        yield listener


@contextmanager
def _signals_are_an_end(server: _HttpServer) -> Iterator[None]:
    """End the server on those that uvicorn does not handle, or not yet; it raises its own again after it has ended."""
    before = {number: signal.signal(number, server.handle_exit) for number in heeded()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def only_server(settings: Settings, store: Store) -> Iterator[None]:
    """Lock a home and its store for one server. Raises InputError if another one has them."""
    with ExitStack() as stack:
        otherwise = "set RUBBERBAND_HOME to another folder"
        stack.enter_context(_file_lock(settings.home / "server.lock", f"the home {settings.home}", otherwise))
        if settings.store is not None:
            url = parse_url(settings.store)
            if url.get_backend_name() == "sqlite":
                path = Path(f"{os.path.realpath(str(url.database))}.lock")
                stack.enter_context(_file_lock(path, f"the store {url.database}", "give another --store"))
            store.take(_mark_of(settings.home), lambda name: (settings.home / "experiments" / name).is_dir())
        yield


def _mark_of(home: Path) -> str:
    """Return `ID HOST:PATH` of a home. The id is in the folder that is backed up: a restored home is the same one."""
    path = home / "experiments" / "home.id"
    try:
        if not path.exists():
            make_directories(path.parent)
            write_atomically(path, f"{secrets.token_hex(8)}\n".encode(), durable=True)
        return f"{path.read_text().strip()} {socket.gethostname()}:{home.resolve()}"
    except OSError as error:
        raise InputError(f"{path} cannot be used ({error.strerror}); make room or give access") from None


@contextmanager
def _file_lock(path: Path, what: str, otherwise: str) -> Iterator[None]:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}); {otherwise}") from None
    try:
        if not try_lock(descriptor, EXCLUSIVE):
            raise InputError(f"another server uses {what}; stop that one, or {otherwise}")
        yield
    finally:
        os.close(descriptor)
