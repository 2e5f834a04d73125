"""The server process: one for a home and its store, one worker, an end that leaves the experiments alone."""

from __future__ import annotations

import fcntl
import gc
import logging
import os
import signal
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import sqlalchemy as sql
import uvicorn

from rubberband.api.app import create_app
from rubberband.api.feed import Feed
from rubberband.api.security.binding import url_of
from rubberband.api.security.connections import HEADERS_BYTES, PatientProtocol
from rubberband.api.security.tokens import is_live
from rubberband.api.settings import Settings
from rubberband.api.store.protocol import Store
from rubberband.api.store.sql import open_store
from rubberband.errors import InputError
from rubberband.executor.database import Database, parse_url

_SERVING = 0x52424253
"""The lock (in PostgreSQL) of the one server of a store."""
_GRACE_S = 3
"""So long requests that are being served have, once the service is to end."""
_CONNECTIONS = 500
"""Open at the same time; more are answered with 503."""
_KEEP_ALIVE_S = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """How bytes reach the service."""

    certfile: Path | None = None
    """With it, the service speaks HTTPS."""
    keyfile: Path | None = None
    proxies: Sequence[str] = ()
    """Addresses of proxies, whose X-Forwarded-For and X-Forwarded-Proto are believed."""


def serve(settings: Settings, transport: Transport, announce: Callable[[str, Store], None]) -> None:
    """Serve until SIGTERM or Ctrl-C. `announce` is told the address once the port is taken.

    Raises InputError where the port, the home or the store is taken, or a token is needed and there is none.
    """
    _make_home(settings.home)
    with _opened(settings) as store, only_server(settings):
        require_token(settings, store)
        with _listening(settings.host, settings.port) as listener:
            app = create_app(settings, store=store)
            server = _Server(_config(app, settings, transport), app.state.service.feed)
            port = listener.getsockname()[1]
            announce(url_of(settings.host, port, https=transport.certfile is not None), store)
            with _signals_are_an_end():
                server.run(sockets=[listener])


def require_token(settings: Settings, store: Store) -> None:
    """Raise InputError if tokens are needed and none would open the door."""
    now = time.time()
    if settings.auth and not any(is_live(record, at=now) for record in store.tokens()):
        raise InputError(
            "the service needs tokens (--auth, or a bind beyond loopback) and there is none; make one: "
            "rubberband token create NAME --scope admin"
        )


_GARBAGE = (700, 10, 10)
"""As often as Python itself looks for garbage: connections that have ended hold what was sent until then."""


class _Server(uvicorn.Server):
    """A server whose streams end when it is told to."""

    def __init__(self, config: uvicorn.Config, feed: Feed) -> None:
        super().__init__(config)
        self._feed = feed

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to serve. What there is by now stays for good: garbage collections pass it by, and stall nobody."""
        await super().startup(sockets)
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_GARBAGE)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end. Called by the signal."""
        self._feed.close()
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
        # Of a key that is encrypted OpenSSL would ask for on the terminal.
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
def _opened(settings: Settings) -> Iterator[Store]:
    store = open_store(settings.store, settings.home, settings.keeping)
    try:
        yield store
    finally:
        store.close()


@contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.create_server(address[:2], family=family, backlog=256)
    except (OSError, UnicodeError) as error:
        told = getattr(error, "strerror", None) or str(error)
        raise InputError(
            f"{host}:{port} cannot be listened on ({told}); choose another by --host and --port (0: any free port)"
        ) from None
    # What it accepts inherits this; asyncio sets it only where a socket was made with a protocol. Without it an event
    # of a stream waits until the one before was acknowledged, up to 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with listener:
        yield listener


@contextmanager
def _signals_are_an_end() -> Iterator[None]:
    """uvicorn raises its signals again when it has ended by them; what they asked for is done by then."""
    before = {number: signal.signal(number, _ignored) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ignored(_number: int, _frame: FrameType | None) -> None:
    return


def _make_home(home: Path) -> None:
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise InputError(f"{home} cannot be made ({error.strerror}); set RUBBERBAND_HOME to another folder") from None


@contextmanager
def only_server(settings: Settings) -> Iterator[None]:
    """Be the one server of a home and a store. Raises InputError if there is another."""
    with _file_lock(
        settings.home / "server.lock", f"the home {settings.home}", "set RUBBERBAND_HOME to another folder"
    ):
        if settings.store is None:
            yield
            return
        url = parse_url(settings.store)
        if url.get_backend_name() == "sqlite":
            with _file_lock(Path(f"{url.database}.lock"), f"the store {url.database}", "give another --store"):
                yield
        else:
            with _server_lock(url):
                yield


@contextmanager
def _file_lock(path: Path, what: str, otherwise: str) -> Iterator[None]:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}); {otherwise}") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"another server is at work on {what}; stop that one, or {otherwise}") from None
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _server_lock(url: sql.URL) -> Iterator[None]:
    """A lock that the database server lets go when the connection is gone."""
    database = Database(url, what="the service's store", remedy="see that the database server runs")
    try:
        with database.reading() as connection:
            taken = connection.execute(sql.select(sql.func.pg_try_advisory_lock(_SERVING))).scalar_one()
            connection.commit()
            if not taken:
                raise InputError(
                    f"another server is at work on the store {database.shown}; stop that one, or give another --store"
                )
            yield
    finally:
        database.close()
