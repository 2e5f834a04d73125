"""Ten minutes of attack on every route that the app has, found in its own table: no answer fails, echoes or escapes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.routing import APIRoute

from rubberband.states import ExperimentState
from rubberband.values.submission import Summary
from tests.builders.fake_runs import FakeService, words

MARK = "<script>alert(1)</script>"
HOSTILE = [
    MARK,
    "&quot;&#39;--><svg/onload=alert(1)>",
    "\u202egnp.exe\u200f",
    "nul\x00bell\x07",
    "../../../../etc/passwd",
    "..%2f..%2f..%2fetc%2fpasswd",
    "%00",
    "a" * 2000,
    "$(id)`id`;|'\"",
    "{{7*7}}${7*7}%n%s",
    "-1",
    "99999999999999999999999999",
    "\U0001f980\ud7ff",
]
_STREAMS = {"/v1/events"}
"""Routes whose answer goes on; tests of streams have them."""
_FORMAT = re.compile(r"\{[^}]+\}")
_LEAKS = ("Traceback (most recent call last)", "root:x:0:0")


def routes(service: FakeService) -> Iterator[tuple[str, str]]:
    """Method and path of all routes, also those that included routers bring."""
    pending: list[Any] = list(service.client.app.routes)
    while pending:
        route = pending.pop()
        if isinstance(route, APIRoute):
            yield from ((method, route.path) for method in sorted(route.methods))
        pending += getattr(getattr(route, "original_router", None), "routes", ())


def attacked(service: FakeService) -> list[tuple[str, str]]:
    """The routes whose answers end."""
    return [(method, path) for method, path in routes(service) if path not in _STREAMS]


def fill(path: str, text: str) -> str:
    """The path with `text` in place of each parameter, as a client has to write it."""
    from urllib.parse import quote

    return _FORMAT.sub(lambda _: quote(text, safe=""), path)


def check(answer: Any, what: str) -> None:
    """Refused or served, but neither failed nor echoed as markup."""
    assert answer.status_code < 500 or answer.status_code in (501, 503), (
        f"{what}: {answer.status_code} {answer.text[:300]}"
    )
    assert not any(leak in answer.text for leak in _LEAKS), what
    if answer.headers.get("content-type", "").startswith("text/html"):
        assert MARK not in answer.text, what
        assert "<svg/onload" not in answer.text, what
    if answer.status_code != 304:
        assert answer.headers["x-content-type-options"] == "nosniff", what
        assert "content-security-policy" in answer.headers, what


def test_the_table_of_routes_is_found_whole(service: FakeService) -> None:
    found = {path for _, path in routes(service)}
    assert {"/experiments/{name}", "/v1/experiments", "/healthz", "/pool", "/compare", "/plan"} <= found
    documented = set(service.client.get("/openapi.json").json()["paths"])
    assert documented <= found


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_names_are_refused_on_every_route(service: FakeService, text: str) -> None:
    for method, path in attacked(service):
        if "{" in path:
            check(service.client.request(method, fill(path, text)), f"{method} {path}")


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_queries_do_no_harm_on_every_route(service: FakeService, text: str) -> None:
    service.add("one", summary=Summary(trials=3))
    names = ["q", "sort", "state", "page", "tag", "limit", "cursor", "top", "x", "y", "brush", "next", "name", "set"]
    for method, path in attacked(service):
        if method == "GET":
            check(service.client.get(fill(path, "one"), params=dict.fromkeys(names, text)), f"{method} {path}")


BODIES: list[tuple[bytes, str]] = [
    (b"", "application/json"),
    (b"{", "application/json"),
    (b"[" * 20_000, "application/json"),
    (b'{"a":' * 5_000 + b"1" + b"}" * 5_000, "application/json"),
    (b"\xff\xfe\x00", "application/json"),
    (b"null", "application/json"),
    (b'{"name": NaN}', "application/json"),
    (b'{"name": "\\ud800"}', "application/json"),
    (b"1" * 10_000, "application/json"),
    (b"&a [*a, *a]", "application/yaml"),
    (b"a: &a [1]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a]\nc: [*b,*b,*b,*b,*b,*b,*b,*b]\n", "application/yaml"),
    (b"!!python/object/apply:os.system ['id']", "application/yaml"),
    (b"name: x\0y", "application/yaml"),
    (b"a=b", "application/x-www-form-urlencoded"),
    (b"--x", "multipart/form-data; boundary=x"),
    (b"{}", ""),
]


@pytest.mark.parametrize(("body", "kind"), BODIES, ids=range(len(BODIES)))
def test_malformed_bodies_are_refused_on_every_route(service: FakeService, body: bytes, kind: str) -> None:
    service.add("one", state=ExperimentState.RUNNING)
    for method, path in attacked(service):
        if method in ("POST", "PUT", "PATCH", "DELETE"):
            answer = service.client.request(method, fill(path, "one"), content=body, headers={"content-type": kind})
            check(answer, f"{method} {path}")


def test_bodies_of_ten_megabytes_are_refused_on_every_route(service: FakeService) -> None:
    body = b'{"name": "' + b"a" * 10_000_000 + b'"}'
    for method, path in attacked(service):
        if method in ("POST", "PUT", "PATCH"):
            headers = {"content-type": "application/json"}
            answer = service.client.request(method, fill(path, "one"), content=body, headers=headers)
            check(answer, f"{method} {path}")
            assert answer.status_code in (404, 413), f"{method} {path}: {answer.status_code}"


def test_changes_from_pages_of_other_sites_are_refused_on_every_route(service: FakeService) -> None:
    service.add("one")
    for method, path in attacked(service):
        if method in ("POST", "PUT", "PATCH", "DELETE"):
            for headers in ({"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"}, {"origin": "null"}):
                answer = service.client.request(method, fill(path, "one"), json={}, headers=headers)
                assert answer.status_code == 403, f"{method} {path} {headers}: {answer.status_code}"


def test_stored_words_are_text_on_every_page(service: FakeService) -> None:
    for at, text in enumerate(HOSTILE[:5]):
        service.add(f"one-{at}", reason=text, words=words(name=text, entrypoint=text, search__metric=text))
    for method, path in attacked(service):
        if method == "GET":
            for at in range(5):
                check(service.client.get(fill(path, f"one-{at}")), f"{method} {path}")


def test_many_requests_at_once_are_all_answered(service: FakeService) -> None:
    service.add("one")
    asked = [("GET", fill(path, "one"), {}) for method, path in attacked(service) if method == "GET"]
    for answer in service.client.together(*asked * 3):
        check(answer, str(answer.request.url))
