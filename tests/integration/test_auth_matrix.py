"""Every route, asked by everybody: who has no token, a wrong one, one that is over, and one of each scope.

The routes are those of the app: a new one without a scope fails here.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.routing import iter_route_contexts

from rubberband.api.app import create_app
from rubberband.api.security import COOKIE, Bearer, Tokens
from rubberband.api.settings import ServiceLimits, Settings
from rubberband.api.store import Store, open_store
from rubberband.api.store.schema import SCOPES, Scope

PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Began:
    """How an answer began."""

    status: int
    headers: Mapping[str, str]


async def ask(
    app: FastAPI,
    method: str,
    path: str,
    headers: Mapping[str, str] = {},
    body: bytes = b"",
    *,
    address: str = "127.0.0.1",
    scheme: str = "http",
) -> Began:
    """The status and headers of an answer. The client leaves when it has them."""
    began: asyncio.Future[Began] = asyncio.get_running_loop().create_future()
    unread = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        return unread.pop() if unread else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            found = {name.decode(): value.decode() for name, value in message["headers"]}
            began.set_result(Began(status=message["status"], headers=found))

    came = {"client": (address, 1234), "scheme": scheme}
    serving = asyncio.create_task(app(_scope(method, path, headers) | came, receive, send))
    await asyncio.wait([serving], timeout=PATIENCE_S)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    assert began.done(), f"{method} {path} is not answered"
    return began.result()


def _scope(method: str, path: str, headers: Mapping[str, str]) -> dict[str, Any]:
    sent = {"host": "localhost"} | {name.lower(): value for name, value in headers.items()}
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in sent.items()],
        "server": ("localhost", 80),
    }


PUBLIC = {"/healthz", "/readyz", "/login", "/logout"}
ANY_TOKEN = {"/openapi.json"}
"""Routes of the framework, which know no scopes: the middleware asks for a token."""
CHANGES_NOTHING = {("POST", "/v1/plans"), ("POST", "/plan/check")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """A method of a route, and the scope that it declares."""

    method: str
    path: str
    scope: Scope | None

    @property
    def public(self) -> bool:
        return self.path in PUBLIC or self.path.startswith("/static/")

    @property
    def is_page(self) -> bool:
        return self.method in {"GET", "HEAD"} and not self.path.startswith(
            ("/v1/", "/metrics", "/openapi.json", "/problems/")
        )

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


@dataclass(frozen=True, slots=True, kw_only=True)
class House:
    """The app with its doors, and what may open them: `bearer` or `cookie`, then whose."""

    app: FastAPI
    store: Store
    tokens: Tokens
    keys: dict[tuple[str, str], dict[str, str]]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    tmp_path = tmp_path_factory.mktemp("house")
    store = open_store(None, tmp_path)
    tokens = Tokens(store)
    limits = ServiceLimits(requests_per_s=0, concurrent=1000)
    app = create_app(Settings(home=tmp_path, auth=True, limits=limits), store=store)
    app.state.service.feed.close()
    keys: dict[tuple[str, str], dict[str, str]] = {}
    for scope in SCOPES:
        _, text = tokens.create(scope, scope)
        _add(keys, scope, text, _session(tokens, text))
    record, text = tokens.create("revoked", "admin")
    _add(keys, "revoked", text, _session(tokens, text))
    tokens.revoke(record.id)
    yesterday = Tokens(store, clock=lambda: time.time() - 86_400)
    _, text = yesterday.create("expired", "admin", lasts_s=60)
    _add(keys, "expired", text, _session(yesterday, text))
    _add(keys, "garbage", "rb_garbage", "garbage")
    keys["bearer", "other scheme"] = {"Authorization": "Basic cmI6cmI="}
    yield House(app=app, store=store, tokens=tokens, keys=keys)
    store.close()


def _session(tokens: Tokens, text: str) -> str | None:
    principal = tokens.look_up([Bearer(text)]).get(Bearer(text))
    return None if principal is None else tokens.sign_in(principal)


def _add(keys: dict[tuple[str, str], dict[str, str]], whose: str, text: str, session: str | None) -> None:
    assert session is not None
    keys["bearer", whose] = {"Authorization": f"Bearer {text}"}
    keys["cookie", whose] = {"Cookie": f"a=b; {COOKIE}={session}"}


def doors(app: FastAPI) -> list[Door]:
    """Every method of every route."""
    found = []
    for route in iter_route_contexts(app.routes):
        scopes = {scope for scope in SCOPES if hasattr(route, "dependant") and _needs(route.dependant, scope)}
        assert len(scopes) <= 1, f"{route.path} declares {scopes}"
        for method in sorted(route.methods or ()):
            found.append(
                Door(method=method, path=str(route.path).replace(":path}", "}"), scope=next(iter(scopes), None))
            )
    return found


def _needs(dependant: Any, scope: Scope) -> bool:
    called = getattr(dependant.call, "__name__", "")
    return called == f"needs_{scope}" or any(_needs(below, scope) for below in dependant.dependencies)


def _tried(house: House, headers: dict[str, str]) -> list[tuple[Door, Began]]:
    """What each door answers to one who sends these headers; as wrong tokens are slowed, from an address each."""

    async def tried() -> list[tuple[Door, Began]]:
        answers = []
        for number, door in enumerate(doors(house.app)):
            path = re.sub(r"\{[^}]+\}", "nothing-of-this-name", door.path)
            answers.append((door, await ask(house.app, door.method, path, headers, address=f"10.0.0.{number}")))
        return answers

    return asyncio.run(tried())


def test_every_route_declares_its_permissions(house: House) -> None:
    listed = doors(house.app)
    assert {door.path for door in listed} >= set(house.app.openapi()["paths"]) | PUBLIC | {"/", "/plan"}
    for door in listed:
        if door.public or door.path in ANY_TOKEN:
            assert door.scope is None, f"{door} is open to all"
        else:
            assert door.scope is not None, f"{door} declares no scope: add Reader, Submitter or Admin"
            harmless = door.method in {"GET", "HEAD"} or (door.method, door.path) in CHANGES_NOTHING
            assert harmless or door.scope != "read", f"{door} changes something and needs the scope read only"


def test_without_credentials_only_public_routes_are_open(house: House) -> None:
    strangers = {(way, whose): headers for (way, whose), headers in house.keys.items() if whose not in SCOPES} | {
        ("nothing", ""): {}
    }
    for (way, whose), headers in strangers.items():
        for door, began in _tried(house, headers):
            expected = f"{door} by {way} {whose}: {began.status}"
            if door.public:
                assert began.status not in {401, 403}, expected
            elif door.is_page and way != "bearer":
                assert began.status == 303, expected
                assert began.headers["location"].startswith("/login"), expected
            else:
                assert began.status == 401, expected
                assert began.headers["www-authenticate"].startswith("Bearer"), expected


@pytest.mark.by_default(3)
@pytest.mark.parametrize("whose", SCOPES)
@pytest.mark.parametrize("way", ["bearer", "cookie"])
def test_a_token_opens_what_its_scope_says(house: House, way: str, whose: Scope) -> None:
    ended = _session(house.tokens, house.keys["bearer", whose]["Authorization"].removeprefix("Bearer "))
    headers = house.keys[way, whose] if way == "bearer" else {"Cookie": f"{COOKIE}={ended}"}
    for door, began in _tried(house, headers):
        allowed = door.scope is None or SCOPES.index(whose) >= SCOPES.index(door.scope)
        expected = f"{door} ({door.scope}) by {way} {whose}: {began.status}"
        assert (began.status == 403) is not allowed, expected
        assert began.status != 401, expected
        assert not began.headers.get("location", "").startswith("/login") or door.public, expected


@pytest.mark.parametrize(
    "headers", [{"Sec-Fetch-Site": "cross-site"}, {"Origin": "http://evil.example"}, {"Origin": "null"}]
)
def test_a_page_of_another_site_changes_nothing_by_a_cookie(house: House, headers: dict[str, str]) -> None:
    for door, began in _tried(house, house.keys["cookie", "admin"] | headers):
        assert (began.status == 403) is (door.method not in {"GET", "HEAD"}), str(door)
        assert "access-control-allow-origin" not in began.headers, str(door)
    for door, began in _tried(house, house.keys["bearer", "admin"] | headers):
        assert began.status != 403, str(door)


def test_another_host_is_answered_nowhere(house: House) -> None:
    for door, began in _tried(house, house.keys["bearer", "admin"] | {"Host": "evil.example"}):
        assert began.status == 421, str(door)


def test_every_answer_carries_the_headers_that_guard_a_browser(house: House) -> None:
    for door, began in _tried(house, house.keys["bearer", "read"]):
        headers = began.headers
        assert headers["x-content-type-options"] == "nosniff", str(door)
        assert "default-src 'none'" in headers["content-security-policy"], str(door)
        assert headers["referrer-policy"] == "no-referrer", str(door)
        assert headers["x-request-id"], str(door)


def test_a_wrong_token_beside_a_good_cookie_is_wrong(house: House) -> None:
    keys = house.keys["cookie", "admin"] | house.keys["bearer", "garbage"]
    assert asyncio.run(ask(house.app, "GET", "/v1/tokens", keys)).status == 401


def test_where_no_token_is_needed_pages_of_other_sites_still_change_nothing(tmp_path: Path) -> None:
    store = open_store(None, tmp_path)
    app = create_app(Settings(home=tmp_path), store=store)
    foreign = {"Origin": "http://evil.example"}
    body = b'{"name": "x", "scope": "admin"}'
    assert asyncio.run(ask(app, "POST", "/v1/tokens", foreign, body)).status == 403
    assert asyncio.run(ask(app, "POST", "/v1/tokens", {"Host": "evil.example"}, body)).status == 421
    json = {"Content-Type": "application/json"}
    assert asyncio.run(ask(app, "POST", "/v1/tokens", json, body)).status == 201
    store.close()


@pytest.mark.by_default(2)
@pytest.mark.parametrize("many", [False, True], ids=["the same", "another each time"])
@pytest.mark.parametrize("way", ["bearer", "cookie", "form"])
def test_wrong_tokens_are_slowed_and_lock_no_right_one_of_their_address_out(
    house: House, way: str, many: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one address is that of many, as behind a NAT; right ones are looked up anew each time."""
    monkeypatch.setattr("rubberband.api.security.REMEMBERED_S", 0.0)
    address = f"10.2.{many:d}.{len(way)}"
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    _, text = house.tokens.create("right", "read")

    async def wrong(number: int) -> Began:
        token = f"rb_{number * many:012x}_{'0' * 64}"
        if way == "form":
            return await ask(house.app, "POST", "/login", form, f"token={token}".encode(), address=address)
        headers = {"Authorization": f"Bearer {token}"} if way == "bearer" else {"Cookie": f"{COOKIE}={token}"}
        return await ask(house.app, "GET", "/v1/experiments", headers, address=address)

    async def right() -> list[int]:
        signed_in = await ask(house.app, "POST", "/login", form, f"token={text}".encode(), address=address)
        cookie = {"Cookie": signed_in.headers["set-cookie"].partition(";")[0]}
        keys = [cookie, {"Authorization": f"Bearer {text}"}]
        return [(await ask(house.app, "GET", "/v1/experiments", key, address=address)).status for key in keys]

    async def scenario() -> list[Began]:
        answers = []
        for start in range(0, 150, 50):
            *some, fine = await asyncio.gather(*map(wrong, range(start, start + 50)), right())
            assert fine == [200, 200]
            answers += some
        return answers

    answers = asyncio.run(scenario())
    refused = {"bearer": {401, 429}, "cookie": {401}, "form": {303, 429}}[way]
    assert {began.status for began in answers} == refused
    assert all(int(began.headers["retry-after"]) >= 1 for began in answers if began.status == 429)


def test_however_many_show_something_at_once_the_store_is_asked_once_at_a_time(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    read = house.store.find_tokens

    def counted(ids: Collection[str]) -> Any:
        looks.append(len(ids))
        return read(ids)

    monkeypatch.setattr(house.store, "find_tokens", counted)

    async def scenario() -> None:
        headers = [{"Authorization": f"Bearer rb_{number:012x}_{'0' * 64}"} for number in range(300)]
        await asyncio.gather(*[ask(house.app, "GET", "/v1/experiments", one, address="10.3.0.1") for one in headers])

    asyncio.run(scenario())
    assert sum(looks) == 300
    assert len(looks) < 30


def test_a_page_that_stays_open_after_its_session_is_sent_to_sign_in_however_often_it_asks(house: House) -> None:
    async def scenario() -> set[int]:
        over = house.keys["cookie", "expired"]
        return {(await ask(house.app, "GET", "/", over, address="10.1.0.3")).status for _ in range(150)}

    assert asyncio.run(scenario()) == {303}


def test_signing_in_and_out(house: House) -> None:
    _, token = house.tokens.create("me", "submit")

    async def scenario() -> None:
        form = {"Content-Type": "application/x-www-form-urlencoded", "Sec-Fetch-Site": "same-origin"}
        refused = await ask(house.app, "POST", "/login", form, b"token=rb_wrong&next=/plan", address="10.1.0.1")
        assert refused.headers["location"] == "/login?problem=token&next=%2Fplan"
        assert "set-cookie" not in refused.headers
        entered = await ask(
            house.app, "POST", "/login", form, f"token={token}&next=//evil.example".encode(), address="10.1.0.1"
        )
        assert (entered.status, entered.headers["location"]) == (303, "/")
        cookie = entered.headers["set-cookie"]
        assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(cookie.split("; "))
        session = {"Cookie": cookie.partition(";")[0]}
        asked = [("GET", "/v1/experiments"), ("POST", "/logout"), ("GET", "/v1/experiments")]
        answers = [await ask(house.app, *each, session, address="10.1.0.1") for each in asked]
        assert [began.status for began in answers] == [200, 303, 401]

    asyncio.run(scenario())


def test_over_https_a_browser_keeps_to_it(house: House) -> None:
    _, token = house.tokens.create("me", "read")

    async def scenario() -> Began:
        form = {"Content-Type": "application/x-www-form-urlencoded"}
        return await ask(
            house.app, "POST", "/login", form, f"token={token}".encode(), address="10.1.0.2", scheme="https"
        )

    began = asyncio.run(scenario())
    assert began.headers["strict-transport-security"].startswith("max-age=")
    assert "Secure" in began.headers["set-cookie"].split("; ")
