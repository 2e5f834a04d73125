"""Every route, asked by everybody: who has no token, a wrong one, one that is over, and one of each scope.

The routes are those of the app: a new one without a scope fails here.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.routing import iter_route_contexts

from rubberband.api.app import create_app
from rubberband.api.security.authentication import COOKIE
from rubberband.api.security.tokens import Tokens
from rubberband.api.settings import Limits, Settings
from rubberband.api.store.records import SCOPES, Scope
from rubberband.api.store.sql import open_store
from tests.integration.asgi import Began, ask

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
    tokens: Tokens
    keys: dict[tuple[str, str], dict[str, str]]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    tmp_path = tmp_path_factory.mktemp("house")
    store = open_store(None, tmp_path)
    tokens = Tokens(store)
    limits = Limits(requests_per_s=0, concurrent=1000)
    app = create_app(Settings(home=tmp_path, auth=True, limits=limits), store=store)
    app.state.service.feed.close()
    keys: dict[tuple[str, str], dict[str, str]] = {}
    for scope in SCOPES:
        _, text = tokens.create(scope, scope)
        _add(keys, scope, text, tokens.sign_in(text))
    record, text = tokens.create("revoked", "admin")
    _add(keys, "revoked", text, tokens.sign_in(text))
    tokens.revoke(record.id)
    yesterday = Tokens(store, clock=lambda: time.time() - 86_400)
    _, text = yesterday.create("expired", "admin", lasts_s=60)
    _add(keys, "expired", text, yesterday.sign_in(text))
    _add(keys, "garbage", "rb_garbage", "garbage")
    keys["bearer", "other scheme"] = {"Authorization": "Basic cmI6cmI="}
    yield House(app=app, tokens=tokens, keys=keys)
    store.close()


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
            found.append(Door(method=method, path=str(route.path), scope=next(iter(scopes), None)))
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


def test_every_route_declares_who_may_use_it(house: House) -> None:
    listed = doors(house.app)
    assert {door.path for door in listed} >= set(house.app.openapi()["paths"]) | PUBLIC | {"/", "/plan"}
    for door in listed:
        if door.public or door.path in ANY_TOKEN:
            assert door.scope is None, f"{door} is open to all"
        else:
            assert door.scope is not None, f"{door} declares no scope: add Reader, Submitter or Admin"
            harmless = door.method in {"GET", "HEAD"} or (door.method, door.path) in CHANGES_NOTHING
            assert harmless or door.scope != "read", f"{door} changes something and needs the scope read only"


def test_who_shows_nothing_good_is_let_into_nothing_but_what_is_public(house: House) -> None:
    strangers = {(way, whose): headers for (way, whose), headers in house.keys.items() if whose not in SCOPES} | {
        ("nothing", ""): {}
    }
    for (way, whose), headers in strangers.items():
        for door, began in _tried(house, headers):
            told = f"{door} by {way} {whose}: {began.status}"
            if door.public:
                assert began.status not in {401, 403}, told
            elif door.is_page and way != "bearer":
                assert began.status == 303, told
                assert began.headers["location"].startswith("/login"), told
            else:
                assert began.status == 401, told
                assert began.headers["www-authenticate"].startswith("Bearer"), told


@pytest.mark.parametrize("whose", SCOPES)
@pytest.mark.parametrize("way", ["bearer", "cookie"])
def test_a_token_opens_what_its_scope_says(house: House, way: str, whose: Scope) -> None:
    ended = house.tokens.sign_in(house.keys["bearer", whose]["Authorization"].removeprefix("Bearer "))
    headers = house.keys[way, whose] if way == "bearer" else {"Cookie": f"{COOKIE}={ended}"}
    for door, began in _tried(house, headers):
        allowed = door.scope is None or SCOPES.index(whose) >= SCOPES.index(door.scope)
        told = f"{door} ({door.scope}) by {way} {whose}: {began.status}"
        assert (began.status == 403) is not allowed, told
        assert began.status != 401, told
        assert not began.headers.get("location", "").startswith("/login") or door.public, told


@pytest.mark.parametrize("headers", [{"Sec-Fetch-Site": "cross-site"}, {"Origin": "http://evil.example"}])
def test_a_page_of_another_site_changes_nothing_by_a_cookie(house: House, headers: dict[str, str]) -> None:
    for door, began in _tried(house, house.keys["cookie", "admin"] | headers):
        assert (began.status == 403) is (door.method not in {"GET", "HEAD"}), str(door)
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


def test_one_address_that_tries_wrong_tokens_is_slowed_but_good_ones_go_on(house: House) -> None:
    good = house.keys["bearer", "read"]

    async def scenario() -> tuple[list[Began], Began]:
        await ask(house.app, "GET", "/v1/experiments", good)
        wrong = [await ask(house.app, "GET", "/v1/experiments", house.keys["bearer", "garbage"]) for _ in range(40)]
        return wrong, await ask(house.app, "GET", "/v1/experiments", good)

    wrong, last = asyncio.run(scenario())
    assert {began.status for began in wrong} == {401, 429}
    slowed = next(began for began in wrong if began.status == 429)
    assert int(slowed.headers["retry-after"]) >= 1
    assert last.status == 200


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
