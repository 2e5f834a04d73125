"""Whatever goes wrong is answered as a problem, in one shape, and tells nothing of the inside."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from rubberband.api.problems import KINDS, MOST_NAMED
from rubberband.errors import JournalError
from tests.builders.fake_runs import FakeService, fake_service, words


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeService]:
    with fake_service(tmp_path_factory.mktemp("home")) as made:
        made.add("there")
        yield made


def problem_of(answer: Any) -> tuple[int, str, str]:
    """The status, the kind and the detail of a problem."""
    assert answer.headers["content-type"] == "application/problem+json"
    body = answer.json()
    assert body["status"] == answer.status_code
    assert body["title"]
    assert "\n" not in body["detail"]
    return answer.status_code, body["type"].removeprefix("/problems/"), body["detail"]


@pytest.mark.parametrize(
    "path",
    [
        "/nothing",
        "/v1",
        "/v1/",
        "/v1/experiments/",
        "/v1/experiments/none",
        "/v1/experiments/none/trials",
        "/v1/experiments/none/nothing",
        "/v1/experiments/None",
        "/v1/experiments/..",
        "/v1/experiments/%2e%2e",
        "/v1/experiments/..%2f..%2fetc%2fpasswd",
        "/v1/experiments/a%00b",
        "/v1/experiments/a%0ab",
        "/v1/experiments/" + "a" * 64,
        "/v1/experiments/" + "a" * 5000,
        "/v1/experiments/%ff/costs",
        "/static/../../../etc/passwd",
        "/static/%2e%2e/%2e%2e/app.py",
        "/problems/none",
    ],
)
def test_a_missing_resource_is_not_found(service: FakeService, path: str) -> None:
    assert problem_of(service.client.get(path))[:2] == (404, "not-found")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("DELETE", "/v1/experiments", "GET, HEAD, POST"),
        ("OPTIONS", "/v1/experiments", "GET, HEAD, POST"),
        ("GET", "/v1/experiments/a/cancel", "POST"),
        ("PUT", "/v1/experiments/a", "DELETE, GET, HEAD, PATCH"),
        ("POST", "/healthz", "GET, HEAD"),
        ("BREW", "/v1/events", "GET, HEAD"),
    ],
)
def test_a_wrong_method_shows_the_right_ones(service: FakeService, method: str, path: str, allowed: str) -> None:
    answer = service.client.request(method, path)
    status, kind, detail = problem_of(answer)
    assert (status, kind) == (405, "method-not-allowed")
    assert answer.headers["allow"] == allowed
    assert allowed in detail


@pytest.mark.parametrize(
    ("path", "loc", "word"),
    [
        ("/v1/experiments?limit=0", "limit", "greater than or equal to 1"),
        ("/v1/experiments?limit=1e9", "limit", "integer"),
        ("/v1/experiments?state=asleep", "state", "'queued'"),
        ("/v1/experiments?stat=done", "stat", "is unknown"),
        ("/v1/experiments/there/logs?source=secrets", "source", "'trials' or 'process'"),
        ("/v1/experiments/there/trials?curves=perhaps", "curves", "boolean"),
        ("/v1/prices?region=../../etc", "region", "pattern"),
        ("/v1/events?after=-1", "after", "greater than or equal to 0"),
    ],
)
def test_a_wrong_query_names_itself(service: FakeService, path: str, loc: str, word: str) -> None:
    answer = service.client.get(path)
    status, kind, detail = problem_of(answer)
    assert (status, kind) == (422, "invalid")
    assert loc in detail
    assert word in detail
    assert answer.json()["errors"][0]["loc"][1] == loc


@pytest.mark.parametrize("cursor", ["x", "é", "AAAA", "eyJ4IjoxfQ", "W05hTiwgIngiXQ", "../../x", "a" * 399])
def test_a_forged_cursor_is_refused(service: FakeService, cursor: str) -> None:
    assert problem_of(service.client.get("/v1/experiments", params={"cursor": cursor}))[:2] == (422, "invalid")


BODIES: list[tuple[bytes, str, int]] = [
    (b"", "application/json", 400),
    (b"{", "application/json", 400),
    (b'{"name": "a", "name": "b"}', "application/json", 400),
    (b'{"name": "a", "constraints": {"max_cost": NaN}}', "application/json", 400),
    (b'{"name": "a", "constraints": {"max_cost": 1e999}}', "application/json", 400),
    (b"[" * 100_000, "application/json", 400),
    (b'{"a":' * 40_000, "application/json", 400),
    (b'{"a":' * 100_000, "application/json", 413),
    (b"[" * 100_000, "application/yaml", 422),
    (b"\xff\xfe", "application/json", 400),
    (b"[]", "application/json", 422),
    (b"null", "application/json", 422),
    (b"{}", "application/json", 422),
    (b"a: &x [*x]", "application/yaml", 422),
    (b"name: a\nname: b", "application/yaml", 422),
    (json.dumps(words(name="../up")).encode(), "application/json", 422),
    (json.dumps(words(constraints__max_cost=-1)).encode(), "application/json", 422),
    (json.dumps(words(entrypoint="os:system")).encode(), "application/json", 422),
    (json.dumps(words(profile="/etc/passwd")).encode(), "application/json", 422),
    (b"<experiment/>", "text/xml", 415),
    (b"{}", "", 415),
    (b"{}", "application/json; charset=utf-16", 415),
]


@pytest.mark.parametrize(("body", "media_type", "status"), BODIES)
@pytest.mark.parametrize("path", ["/v1/experiments", "/v1/plans"])
def test_a_body_that_does_not_fit_is_refused(
    service: FakeService, path: str, body: bytes, media_type: str, status: int
) -> None:
    headers = {"content-type": media_type} if media_type else {}
    answer = service.client.post(path, content=body, headers=headers)
    if b"os:system" in body and path == "/v1/plans":
        assert answer.status_code == 200
        return
    assert problem_of(answer)[0] == status
    assert [known.name for known in service.store.submissions().items] == ["there"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{}", 422),
        (b'{"dry_run": true}', 422),
        (b'{"max_cost": -1}', 422),
        (b'{"max_cost": "5 EUR"}', 422),
        (b'{"max_cost": Infinity}', 400),
        (b'{"max_cost": 5, "max_cost": 6}', 400),
        (b'{"max_cost": 5, "dry_run": "no"}', 422),
        (b'{"max_cost": true}', 422),
        (b'{"deadline": true}', 422),
        (b'{"deadline": ["40m"]}', 422),
        (b'{"max_cost": 5, "more": 1}', 422),
    ],
)
def test_limits_that_do_not_fit_are_refused(service: FakeService, body: bytes, status: int) -> None:
    answer = service.client.post(
        "/v1/experiments/there/extend", content=body, headers={"content-type": "application/json"}
    )
    assert problem_of(answer)[0] == status
    assert service.runs.extended == []


def test_limits_are_json(service: FakeService) -> None:
    answer = service.client.post("/v1/experiments/there/extend", content=b"max_cost: 5")
    assert problem_of(answer)[:2] == (415, "unsupported-media-type")


def test_an_unexpected_error_gives_a_reference_and_nothing_else(
    service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    service.add("broken")
    service.runs.failure = RuntimeError("the password is swordfish")
    with caplog.at_level(logging.ERROR, "rubberband.api"):
        answer = service.client.get("/v1/experiments/broken")
    status, kind, detail = problem_of(answer)
    assert (status, kind) == (500, "internal")
    assert "swordfish" not in answer.text
    assert answer.json()["reference"] in detail
    assert answer.json()["reference"] in caplog.text
    assert "swordfish" in caplog.text


def test_an_unexpected_error_is_a_page_for_a_browser(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_: Any) -> None:
        raise RuntimeError("the password is swordfish")

    monkeypatch.setattr(service.store, "submissions", broken)
    answer = service.client.get("/", headers={"accept": "text/html"})
    assert answer.status_code == 500
    assert answer.headers["content-type"].startswith("text/html")
    assert "swordfish" not in answer.text


def test_a_store_that_does_not_answer_is_unavailable(service: FakeService) -> None:
    service.add("away")
    service.runs.failure = JournalError("the store is away")
    assert problem_of(service.client.get("/v1/experiments/away"))[:2] == (503, "unavailable")


def test_a_browser_is_shown_a_page(service: FakeService) -> None:
    answer = service.client.get("/nothing", headers={"accept": "text/html,*/*"})
    assert answer.status_code == 404
    assert answer.headers["content-type"].startswith("text/html")
    assert "nothing" in answer.text


def test_a_program_is_never_shown_a_page(service: FakeService) -> None:
    assert problem_of(service.client.get("/v1/experiments/none", headers={"accept": "text/html"}))[0] == 404


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.slug)
def test_every_kind_of_problem_is_explained(service: FakeService, kind: Any) -> None:
    answer = service.client.get(f"/problems/{kind.slug}")
    assert answer.status_code == 200
    assert answer.json()["explanation"] == kind.explanation
    assert answer.json()["status"] == kind.status
    page = service.client.get(f"/problems/{kind.slug}", headers={"accept": "text/html"})
    assert page.headers["content-type"].startswith("text/plain")


@pytest.mark.parametrize("path", ["/v1/experiments", "/healthz", "/metrics", "/v1/events", "/openapi.json", "/"])
def test_head_is_get_without_a_body(service: FakeService, path: str) -> None:
    answer = service.client.request("HEAD", path)
    assert answer.status_code == 200
    assert answer.content == b""
    if path != "/v1/events":
        assert answer.headers["content-type"] == service.client.get(path).headers["content-type"]


def test_a_body_that_is_too_large_is_refused(service: FakeService) -> None:
    answer = service.client.post("/v1/plans", content=b" " * (50 << 20), headers={"content-type": "application/json"})
    assert problem_of(answer)[:2] == (413, "too-large")


def test_an_error_quotes_no_more_of_a_request_than_people_read(service: FakeService) -> None:
    answer = service.client.post("/v1/experiments", json={**words(), "x" * 200_000: 1})
    status, kind, detail = problem_of(answer)
    assert (status, kind) == (422, "invalid")
    assert 100 < len(detail) <= MOST_NAMED
