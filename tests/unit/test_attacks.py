"""Ten minutes of attack on every route that the app has, found in its own table: no answer fails, echoes or escapes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute

from rubberband.api.settings import ServiceLimits
from rubberband.executor import PrintedLine
from rubberband.states import ExperimentState
from rubberband.values.submission import Summary
from tests.builders import results
from tests.builders.dashboard_site import service as live_service
from tests.builders.fake_runs import FakeService, words
from tests.builders.waiting import eventually

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
    """Method and path of all routes."""
    for route in service.client.app.routes:
        if isinstance(route, APIRoute):
            yield from ((method, route.path.replace(":path}", "}")) for method in sorted(route.methods))


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


@pytest.mark.by_default(5)
@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_names_are_refused_on_every_route(service: FakeService, text: str) -> None:
    for method, path in attacked(service):
        if "{" in path:
            check(service.client.request(method, fill(path, text)), f"{method} {path}")


@pytest.mark.by_default(5)
@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_queries_do_no_harm_on_every_route(service: FakeService, text: str) -> None:
    service.add("one", summary=Summary(trials=3))
    names = ["q", "sort", "state", "page", "tag", "limit", "cursor", "top", "x", "y", "brush", "next", "name", "set"]
    for method, path in attacked(service):
        if method == "GET":
            check(service.client.get(fill(path, "one"), params=dict.fromkeys(names, text)), f"{method} {path}")


BODIES: list[tuple[bytes, str]] = [
    *((body, "application/json") for body in (b"", b"{", b"[" * 20_000, b"\xff\xfe\x00", b"null", b'{"name": NaN}')),
    (b"&a [*a, *a]", "application/yaml"),
    (b"!!python/object/apply:os.system ['id']", "application/yaml"),
    (b"a=b", "application/x-www-form-urlencoded"),
    (b"--x", "multipart/form-data; boundary=x"),
    (b"{}", ""),
]


def test_malformed_bodies_are_refused_on_every_route(service: FakeService) -> None:
    service.add("one", state=ExperimentState.RUNNING)
    for method, path in attacked(service):
        if method in ("POST", "PUT", "PATCH", "DELETE"):
            for body, kind in BODIES:
                headers = {"content-type": kind}
                answer = service.client.request(method, fill(path, "one"), content=body, headers=headers)
                check(answer, f"{method} {path} {body[:9]!r}")


def test_bodies_of_ten_megabytes_are_refused_on_every_route(service: FakeService) -> None:
    body = b'{"name": "' + b"a" * 10_000_000 + b'"}'
    for method, path in attacked(service):
        if method in ("POST", "PUT", "PATCH"):
            headers = {"content-type": "application/json"}
            answer = service.client.request(method, fill(path, "one"), content=body, headers=headers)
            check(answer, f"{method} {path}")
            assert answer.status_code in (404, 413), f"{method} {path}: {answer.status_code}"


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


_BEGUN = Summary(trials=12, started_at=1000.0, metric="score", best_value=0.5)
_NUMBERS = {"{trial}": "3", "{chart}": "allocation", "{id}": "1", "{slug}": "invalid"}


def _with_results(service: FakeService) -> None:
    """An experiment whose journal, log and labels hold the attack."""
    service.add("one", summary=_BEGUN, state=ExperimentState.FAILED, reason=MARK)
    service.runs.results["one"] = results.hostile()
    service.runs.printed = [PrintedLine(trial=at % 3, text=text) for at, text in enumerate(HOSTILE)]


def test_stored_results_are_text_on_every_deep_page(service: FakeService) -> None:
    _with_results(service)
    queries: list[dict[str, Any]] = [
        {},
        {"page": 9_999_999, "sort": MARK, "name": "one"},
        {"status": "failed", "brush": f"{MARK}:1-99"},
    ]
    served = 0
    for method, path in attacked(service):
        if method == "GET" and not path.endswith("/importance"):  # computed by a process of its own
            for name, value in _NUMBERS.items():
                path = path.replace(name, value)
            for query in queries:
                answer = service.client.get(fill(path, "one"), params=query)
                check(answer, f"{method} {path} {query}")
                served += answer.status_code == 200
                if answer.headers.get("content-type", "").startswith("text/html"):
                    assert results.ATTACK not in answer.text, path
    assert served > 40, "most pages have something to show"
    page = service.client.get("/experiments/one/trials/3")
    assert page.status_code == 200
    assert "&lt;/script&gt;" in page.text, "the attack is there, as text"


def test_hostile_lines_of_a_log_are_json_that_no_browser_takes_for_a_page(service: FakeService) -> None:
    _with_results(service)
    answer = service.client.get("/v1/experiments/one/logs")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("application/json")
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert MARK in [line["text"] for line in answer.json()["lines"]]


@pytest.mark.by_default(5)
@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_tags_and_notes_are_refused_or_text_on_every_page(service: FakeService, text: str) -> None:
    _with_results(service)
    body = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    for words_of in ({"add_tags": [body]}, {"note": body}):
        answer = service.client.request("PATCH", "/v1/experiments/one", json=words_of)
        check(answer, f"{words_of}")
        assert answer.status_code in (200, 422)
    for path in ("/", "/experiments/one", "/v1/experiments", "/v1/experiments/one", "/experiments/one/trials/3"):
        answer = service.client.get(path)
        assert answer.status_code == 200
        check(answer, path)
    check(service.client.get("/", params={"search": body, "tag": body}), "search")


def test_streams_that_are_held_open_leave_room_for_pages_and_are_given_back(tmp_path: Path) -> None:
    most = ServiceLimits().streams
    with live_service(tmp_path) as site, httpx.Client(base_url=site.address, timeout=60) as client:
        client_limits = httpx.Limits(max_connections=None)
        with httpx.Client(base_url=site.address, timeout=60, limits=client_limits) as holder, ExitStack() as held:
            answers = [held.enter_context(holder.stream("GET", "/v1/events")) for _ in range(most + 10)]
            assert [answer.status_code for answer in answers] == [200] * most + [429] * 10
            assert "retry-after" in answers[-1].headers
            assert client.get("/").status_code == 200
            assert client.get("/v1/experiments").status_code == 200
            assert f"rubberband_event_streams {most}.0" in client.get("/metrics").text

        def is_free() -> bool:
            with client.stream("GET", "/v1/events") as again:
                return again.status_code == 200

        eventually(is_free, "a stream that is free again")
