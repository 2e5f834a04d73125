"""`rubberband serve` and `rubberband token`, as an operator uses them, and the server against rude clients."""

from __future__ import annotations

import asyncio
import http.client
import signal
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import uvicorn
from typer.testing import CliRunner, Result

from rubberband.api.app import serving as connections
from rubberband.api.app.serving import PatientProtocol, only_server
from rubberband.api.settings import Settings
from rubberband.api.store import open_store
from rubberband.cli import app
from rubberband.errors import InputError, JournalError
from tests.builders.server_process import ServerProcess, serving
from tests.builders.waiting import eventually

OPEN = ("--rate", "0")
PATIENT = (
    "-c",
    "from rubberband import cli; from rubberband.api.app import serving; serving._GRACE_S = 120; cli.main()",
)
"""`rubberband`, where a server that is ended has more than 3 s to end its streams: this machine may be busy."""


def run(*words: str) -> Result:
    """A command in this process."""
    return CliRunner().invoke(app, list(words))


def refused(*words: str) -> str:
    """The error of a command that is used wrongly."""
    result = run(*words)
    assert isinstance(result.exception, InputError), result
    return str(result.exception)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server without tokens, which all tests may be rude to."""
    with serving(tmp_path_factory.mktemp("served"), *OPEN) as started:
        yield started


def test_a_server_serves_holders_of_tokens_until_it_is_stopped(home: Path) -> None:
    assert "rubberband token create" in refused("serve", "--auth", "--port", "0")
    admin = run("token", "create", "me", "--scope", "admin").stdout.strip()
    with serving(home, "--auth", "--allow", "absent:Trial", program=PATIENT) as started:
        address, bearer = started.address, {"Authorization": f"Bearer {admin}"}
        assert f"absent:Trial from {home}" in started.log
        assert httpx.get(f"{address}/v1/tokens", timeout=60).status_code == 401
        assert httpx.get(f"{address}/healthz", timeout=60).status_code == 200
        secrets = [admin, _token_that_comes_and_goes(address, bearer), _session(address, admin)]
        note = "note: --allow absent:Trial: entrypoint absent:Trial: no module 'absent'"
        while note not in started.log:
            assert httpx.get(f"{address}/healthz", timeout=60).status_code == 200
        with httpx.stream("GET", f"{address}/v1/events", headers=bearer, timeout=60) as events:
            lines = events.iter_lines()
            assert next(lines) == "retry: 1000"
            assert started.end() == 0
            assert not any(lines), "the stream was ended, not broken off"
        for secret in secrets:
            assert secret[-12:] not in started.log
        assert "GET /v1/events 200" in started.log
        assert " me " in started.log
        assert "Traceback" not in started.log
        assert started.log.endswith("running experiments continue, and it finds them again when it starts\n")


def _token_that_comes_and_goes(address: str, bearer: dict[str, str]) -> str:
    wanted = {"name": "ci", "scope": "read", "expires": "1d"}
    made = httpx.post(f"{address}/v1/tokens", headers=bearer, json=wanted, timeout=60)
    assert (made.status_code, made.json()["scope"]) == (201, "read")
    assert made.headers["cache-control"] == "no-store"
    token: str = made.json()["token"]
    reader = {"Authorization": f"Bearer {token}"}
    assert httpx.get(f"{address}/v1/experiments", headers=reader, timeout=60).status_code == 200
    assert httpx.get(f"{address}/v1/tokens", headers=reader, timeout=60).status_code == 403
    assert httpx.delete(f"{address}{made.headers['location']}", headers=bearer, timeout=60).status_code == 204
    assert httpx.get(f"{address}/v1/experiments", headers=reader, timeout=60).status_code == 401
    return token


def _session(address: str, token: str) -> str:
    signed_in = httpx.post(f"{address}/login", data={"token": token}, timeout=60)
    assert signed_in.status_code == 303
    session = signed_in.cookies["rubberband_session"]
    cookies = {"rubberband_session": session}
    assert httpx.get(f"{address}/v1/experiments", cookies=cookies, timeout=60).status_code == 200
    return session


def test_tokens_are_made_listed_and_revoked_without_a_server(home: Path) -> None:
    made = run("token", "create", "ci", "--scope", "submit", "--expires", "90d")
    assert made.stdout.startswith("rb_")
    assert "not shown again" in made.stderr
    id = made.stdout.split("_")[1]
    assert all(word in run("token", "list").stdout for word in (id, "ci", "submit", "expires"))
    assert f"{id} is revoked" in run("token", "revoke", id).stderr
    assert "revoked" in run("token", "list").stdout
    assert id in refused("token", "revoke", "0123456789ab")
    assert "printable" in refused("token", "create", "a\nb")
    assert "duration" in refused("token", "create", "ci", "--expires", "soon")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--host", "0.0.0.0", "--no-auth"), "--no-auth"),
        (("--host", "0.0.0.0"), "--host-name"),
        (("--host", "0.0.0.0", "--host-name", "rb"), "rubberband token create"),
        (("--host", "no.such.host.invalid", "--auth"), "rubberband token create"),
        (("--host-name", "http://rb"), "without scheme"),
        (("--allow", "os.system"), "MODULE:ATTRIBUTE"),
        (("--allow", "os:system()"), "MODULE:ATTRIBUTE"),
        (("--code", "/no/such/folder"), "is not a folder"),
        (("--provider", "gcp"), "start Ray there, and write provider: ray"),
        (("--checkpoints", "s3:bucket"), "s3://bucket/folder/"),
        (("--checkpoints", "/"), "neither a URL nor a folder"),
        (("--max-cost", "nan"), "not an amount of money"),
        (("--max-cost", "0"), "greater than 0"),
        (("--rate", "-1"), "0 or more"),
        (("--keep-events", "5m"), "keep at least 1h"),
        (("--keep-events", "soon"), "soon"),
        (("--ssl-keyfile", "key.pem"), "--ssl-certfile"),
        (("--ssl-certfile", "/no/such/file.pem"), "PEM"),
        (("--store", "mysql://rb"), "postgresql"),
        (("--store", "sqlite://"), "is lost when"),
    ],
)
def test_nonsense_is_refused_in_one_line(home: Path, words: tuple[str, ...], text: str) -> None:
    error = refused("serve", "--port", "0", *words)
    assert text in error
    assert "\n" not in error


def test_a_store_that_does_not_answer_is_reported_without_its_password(home: Path) -> None:
    result = run("serve", "--port", "0", "--store", "postgresql+psycopg://rb:hunter2@127.0.0.1:1/rb")
    assert isinstance(result.exception, JournalError)
    assert "127.0.0.1:1/rb" in str(result.exception)
    assert "hunter2" not in str(result.exception)


def test_a_port_that_is_taken_is_reported(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        error = refused("serve", "--port", str(taken.getsockname()[1]))
    assert "is not available (" in error
    assert "--port" in error


def test_a_home_has_one_server(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUBBERBAND_HOME", str(server.home))
    assert "another server" in refused("serve", "--port", "0")


@pytest.mark.parametrize("is_linked", [False, True])
def test_a_store_has_one_server_under_all_of_its_names(store_url: str, is_linked: bool, tmp_path: Path) -> None:
    other = store_url
    if is_linked and store_url.startswith("sqlite"):
        (tmp_path / "link.db").symlink_to(tmp_path / "store.db")
        other = f"sqlite:///{tmp_path}/link.db"
    homes = {tmp_path / "a": store_url, tmp_path / "b": other}
    for folder in homes:
        folder.mkdir()
    first, second = (Settings(home=folder, store=url) for folder, url in homes.items())
    with closing(open_store(store_url, tmp_path)) as mine, closing(open_store(other, tmp_path)) as theirs:
        text = "another server uses the store"
        with only_server(first, mine), pytest.raises(InputError, match=text), only_server(second, theirs):
            pass
        mine.close()
        with only_server(second, theirs):
            pass


def test_a_large_body_is_refused_and_never_held(server: ServerProcess) -> None:
    process = psutil.Process(server.process.pid)
    httpx.post(f"{server.address}/v1/plans", content=b"{}", timeout=60)
    before = process.memory_info().rss
    largest = before

    def chunks() -> Iterator[bytes]:
        nonlocal largest
        for _ in range(50):
            yield b" " * (1 << 20)
            largest = max(largest, process.memory_info().rss)

    for content in (chunks(), b" " * (50 << 20)):
        answer = httpx.post(f"{server.address}/v1/plans", content=content, timeout=60)
        assert answer.status_code == 413
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.headers["connection"] == "close"
        assert answer.json()["limit_bytes"] == 1 << 20
    assert largest - before < 30 << 20, "less than one of these bodies"


def test_a_client_that_asks_first_is_not_made_to_send_too_much(server: ServerProcess) -> None:
    request = "POST /v1/plans HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999\r\nExpect: 100-continue\r\n\r\n"
    assert _exchange(server.port, request.encode()).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n" + b"X-A: " + b"a" * (1 << 20) + b"\r\n\r\n", b"400"),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n" + b"A: b\r\n" * (1 << 17) + b"\r\n", b"400"),
        (b"GET /healthz HTTP/1.1\r\n\r\n", b"400"),
        (b"GET /healthz HTTP/1.1\r\nHost: a\r\nHost: localhost\r\n\r\n", b"400"),
        (b"GET /healthz HTTP/1.0\r\nConnection: close\r\n\r\n", b"421"),
        (b"POST /v1/plans HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n", b"400"),
        (b"POST /v1/plans HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", b"400"),
        (b"GET http://evil.example/v1/tokens HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n", b"421"),
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b"400"),
    ],
)
def test_an_invalid_request_is_refused(server: ServerProcess, request_: bytes, status: bytes) -> None:
    assert _exchange(server.port, request_).startswith(b"HTTP/1.1 " + status)


def test_a_websocket_is_not_served(server: ServerProcess) -> None:
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Key": "a", "Sec-WebSocket-Version": "13"}
    assert httpx.get(f"{server.address}/v1/events-of-another-kind", headers=upgrade, timeout=60).status_code == 404


@asynccontextmanager
async def _patient(app: Any, **options: Any) -> AsyncIterator[tuple[str, int]]:
    """The address of an app that is served as the service is, in this process."""
    config = uvicorn.Config(app, http=PatientProtocol, lifespan="off", log_config=None, access_log=False, **options)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config.load()
        server.lifespan = config.lifespan_class(config)
        await server.startup(sockets=[listener])
        yield listener.getsockname()
        await server.shutdown()


async def _never(_scope: object, _receive: object, _send: object) -> None:
    raise AssertionError("the request is not whole")


def test_an_unfinished_request_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEADERS_S", 0.05)

    async def scenario() -> list[bytes]:
        async with _patient(_never) as address:
            return [await _sent(address, part) for part in (b"", b"GET / HTTP/1.1\r\nHost: a\r\n")]

    assert asyncio.run(scenario()) == [b"", b""]


def test_a_client_that_reads_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "UNREAD_S", 0.05)

    async def send_on(send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": b"x" * 100_000, "more_body": True})
            await asyncio.sleep(0)

    async def endless(_scope: object, receive: Any, send: Any) -> None:
        sending = asyncio.create_task(send_on(send))
        while (await receive())["type"] != "http.disconnect":
            pass
        sending.cancel()
        lost.set()

    async def scenario() -> None:
        async with _patient(endless) as address:
            with socket.create_connection(address) as client:
                client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
                await asyncio.wait_for(lost.wait(), 120.0)

    lost = asyncio.Event()
    asyncio.run(scenario())
    assert lost.is_set(), "the app hears that its client is gone"


@pytest.mark.parametrize("at_once", [150, 200])
def test_a_burst_of_whole_requests_of_one_address_is_answered(server: ServerProcess, at_once: int) -> None:
    begin, answers = threading.Barrier(at_once), list[int | str]()

    def ask() -> None:
        begin.wait()
        client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        try:
            client.request("GET", "/v1/experiments", headers={"Host": "localhost"})
            answers.append(client.getresponse().status)
        except OSError as error:
            answers.append(repr(error))
        finally:
            client.close()

    threads = [threading.Thread(target=ask) for _ in range(at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == at_once
    assert set(answers) <= {200, 429}, "none is reset"
    assert 200 in answers


@pytest.mark.parametrize("proxies", [[], ["127.0.0.1"]])
def test_unfinished_requests_are_counted_by_address_but_for_a_proxy(
    monkeypatch: pytest.MonkeyPatch, proxies: list[str]
) -> None:
    monkeypatch.setattr(connections, "MOST_WAITING", 2)
    monkeypatch.setattr(connections, "PATIENCE_S", 0.05)

    async def scenario() -> bool:
        async with _patient(_never, proxy_headers=bool(proxies), forwarded_allow_ips=proxies or None) as address:
            crowd = [await asyncio.open_connection(*address) for _ in range(3)]
            first = asyncio.create_task(crowd[0][0].read())
            await asyncio.wait([first], timeout=0.5 if proxies else 60.0)
            is_closed = first.done()
            for _, writer in crowd:
                writer.close()
            await first
        return is_closed

    assert asyncio.run(scenario()) is (not proxies)


def test_many_silent_connections_of_one_address_do_not_block_others(server: ServerProcess) -> None:
    crowd = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(600)]
    try:
        assert httpx.get(f"{server.address}/healthz", timeout=60).status_code == 200
        first = crowd[0]
        assert first.recv(1) == b"", "the oldest are cut off"
    finally:
        for silent in crowd:
            silent.close()


def test_a_planning_process_starts_with_the_service(home: Path) -> None:
    def planners() -> list[psutil.Process]:
        children = psutil.Process(started.process.pid).children()
        return [each for each in children if "rubberband.api.plans.process" in " ".join(each.cmdline())]

    with serving(home) as started:
        eventually(lambda: len(planners()) == 1, "a planner before any question")
        (planner,) = planners()
        started.process.kill()
        planner.wait(60.0)


@pytest.mark.long
def test_a_server_has_imported_no_code_of_trials_and_ctrl_c_ends_it_amid_a_request(server: ServerProcess) -> None:
    mapped = [region.path for region in psutil.Process(server.process.pid).memory_maps()]
    assert any("numpy" in path for path in mapped)
    assert [path for path in mapped if "/torch/" in path or "/ray/" in path] == []
    begun = "POST /v1/plans HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(begun.encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 100 ")
        assert server.end(signal.SIGINT) == 0
        assert connection.recv(4096).startswith(b"HTTP/1.1 503 ")
    assert "Traceback" not in server.log


async def _sent(address: tuple[str, int], part: bytes) -> bytes:
    """What comes back for a part of a request until the server hangs up."""
    reader, writer = await asyncio.open_connection(*address)
    read = b""
    with suppress(ConnectionResetError):  # where it hung up before it had read the part
        writer.write(part)
        read = await reader.read()
        writer.close()
        await writer.wait_closed()
    return read


def _exchange(port: int, request: bytes) -> bytes:
    """The beginning of the answer."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(request)
        return connection.recv(4096)
