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
from tests.builders.results import a_result

STATUSES = {kind.slug: kind.status for kind in KINDS}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeService]:
    with fake_service(tmp_path_factory.mktemp("home")) as made:
        made.add("there")
        made.runs.results["there"] = a_result()
        yield made


def problem_of(answer: Any) -> tuple[int, str, str]:
    """The status, the kind and the detail of a problem."""
    assert answer.headers["content-type"] == "application/problem+json"
    body = answer.json()
    assert body["status"] == answer.status_code
    assert body["title"]
    assert "\n" not in body["detail"]
    return answer.status_code, body["type"].removeprefix("/problems/"), body["detail"]


JSON, YAML = "application/json", "application/yaml"
FORGED = ["x", "é", "AAAA", "eyJ4IjoxfQ", "W05hTiwgIngiXQ", "../../x", "a" * 399]


def sent(body: bytes, media_type: str = JSON) -> dict[str, Any]:
    return {"content": body, "headers": {"content-type": media_type} if media_type else {}}


def shown(name: bytes, value: str) -> dict[str, Any]:
    return {"headers": [(name, value.encode()), (b"content-type", JSON.encode())]}


BODIES: list[tuple[bytes, str, str]] = [
    (b"", JSON, "malformed"),
    (b"{", JSON, "malformed"),
    (b'{"name": "a", "name": "b"}', JSON, "malformed"),
    (b'{"name": "a", "constraints": {"max_cost": NaN}}', JSON, "malformed"),
    (b'{"name": "a", "constraints": {"max_cost": 1e999}}', JSON, "malformed"),
    (b'{"name": "\\ud800"}', JSON, "malformed"),
    (b"1" * 10_000, JSON, "malformed"),
    (b"[" * 100_000, JSON, "malformed"),
    (b'{"a":' * 40_000, JSON, "malformed"),
    (b'{"a":' * 5_000 + b"1" + b"}" * 5_000, JSON, "malformed"),
    (b'{"a":' * 100_000, JSON, "too-large"),
    (b"[" * 100_000, YAML, "invalid"),
    (b"\xff\xfe\x00", JSON, "malformed"),
    (b"[]", JSON, "invalid"),
    (b"null", JSON, "invalid"),
    (b"{}", JSON, "invalid"),
    (b"a: &x [*x]", YAML, "invalid"),
    (b"a: &a [1]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a]\nc: [*b,*b,*b,*b,*b,*b,*b,*b]\n", YAML, "invalid"),
    (b"!!python/object/apply:os.system ['id']", YAML, "invalid"),
    (b"name: x\0y", YAML, "invalid"),
    (b"name: a\nname: b", YAML, "invalid"),
    (json.dumps(words(name="../up")).encode(), JSON, "invalid"),
    (json.dumps(words(constraints__deadlin="1m")).encode(), JSON, "invalid"),
    (json.dumps(words(constraints__max_cost=-1)).encode(), JSON, "invalid"),
    (json.dumps(words(profile="/etc/passwd")).encode(), JSON, "not-allowed-here"),
    (b"<experiment/>", "text/xml", "unsupported-media-type"),
    (b"a=b", "application/x-www-form-urlencoded", "unsupported-media-type"),
    (b"--x", "multipart/form-data; boundary=x", "unsupported-media-type"),
    (b"{}", "", "unsupported-media-type"),
    (b"{}", "application/json; charset=utf-16", "unsupported-media-type"),
]
LIMITS: list[tuple[bytes, str]] = [
    (b"", "malformed"),
    (b"{}", "invalid"),
    (b'{"dry_run": true}', "invalid"),
    (b'{"max_cost": -1}', "invalid"),
    (b'{"max_cost": "5 EUR"}', "invalid"),
    (b'{"max_cost": Infinity}', "malformed"),
    (b'{"max_cost": 5, "max_cost": 6}', "malformed"),
    (b'{"max_cost": 5, "dry_run": "no"}', "invalid"),
    (b'{"max_cost": true}', "invalid"),
    (b'{"deadline": true}', "invalid"),
    (b'{"deadline": ["40m"]}', "invalid"),
    (b'{"max_cost": 5, "more": 1}', "invalid"),
]
MISSING = [
    *("/nothing", "/v1", "/v1/", "/v1/experiments/", "/v1/experiments/..", "/v1/experiments/%2e%2e"),
    *("/v1/experiments/..%2f..%2fetc%2fpasswd", "/v1/experiments/a%00b", "/v1/experiments/a%0ab"),
    *("/v1/experiments/" + "a" * 64, "/v1/experiments/" + "a" * 5000, "/v1/experiments/%ff/costs", "/problems/none"),
    *("/static/../../../etc/passwd", "/static/%2e%2e/%2e%2e/app.py", "/v1/experiments/none/nothing"),
    *("/experiments/..%2f..%2fetc/figures/curves", "/experiments/there/trials/0/figures/none"),
]
OF_NONE = [
    *("/v1/experiments/none", "/v1/experiments/none/trials", "/experiments/none", "/experiments/none/report"),
    *("/experiments/none/figures/curves", "/fragments/experiments/none"),
]
REFUSALS: list[tuple[str, dict[str, Any], str, str]] = [
    *((f"GET {path}", {}, "not-found", "") for path in MISSING),
    *((f"GET {path}", {}, "not-found", "experiment 'none' not found") for path in OF_NONE),
    ("GET /v1/experiments/None", {}, "not-found", "experiment 'None' not found"),
    *(
        (f"GET {path}/trials/{number}{part}", {}, "not-found", "has no trial")
        for path, part in (("/v1/experiments/there", "/checkpoint"), ("/experiments/there", ""))
        for number in ("99", "-1", "1.5", "x", "%D9%A3")
    ),
    ("GET /v1/experiments/there/trials/99", {}, "not-found", "it has 0 to 11"),
    ("GET /v1/plans/unknown", {}, "not-found", "POST /v1/plans makes one"),
    ("GET /v1/plans/unknown/options/asha", {}, "not-found", "POST /v1/plans makes one"),
    *((f"POST /v1/experiments/none/{act}", {}, "not-found", "not found") for act in ("cancel", "resume")),
    ("POST /v1/experiments/none/extend", {"json": {"max_cost": 1}}, "not-found", "not found"),
    ("POST /v1/experiments/none/limit", {"json": {"max_instances": 1}}, "not-found", "not found"),
    ("DELETE /v1/experiments", {}, "method-not-allowed", "GET, HEAD, POST"),
    ("OPTIONS /v1/experiments", {}, "method-not-allowed", "GET, HEAD, POST"),
    ("GET /v1/experiments/a/cancel", {}, "method-not-allowed", "POST"),
    ("PUT /v1/experiments/a", {}, "method-not-allowed", "DELETE, GET, HEAD, PATCH"),
    ("POST /healthz", {}, "method-not-allowed", "GET, HEAD"),
    ("BREW /v1/events", {}, "method-not-allowed", "GET, HEAD"),
    ("GET /v1/experiments?limit=0", {}, "invalid", "'limit': Input should be greater than or equal to 1"),
    ("GET /v1/experiments?limit=1e9", {}, "invalid", "'limit': Input should be a valid integer"),
    ("GET /v1/experiments?state=asleep", {}, "invalid", "'state.0': Input should be 'queued'"),
    ("GET /v1/experiments?stat=done", {}, "invalid", "query parameter 'stat' is unknown; did you mean 'state'?"),
    ("GET /v1/experiments/there/logs?source=secrets", {}, "invalid", "should be 'trials' or 'process'"),
    ("GET /v1/experiments/there/trials?curves=perhaps", {}, "invalid", "'curves': Input should be a valid boolean"),
    ("GET /v1/prices?region=../../etc", {}, "invalid", "'region': String should match pattern"),
    ("GET /v1/prices?region=xx-nowhere-9", {}, "invalid", "region xx-nowhere-9: no prices are known"),
    ("GET /v1/prices?type=p3.9xlarge", {}, "invalid", "did you mean 'p3.8xlarge'"),
    *((f"GET /v1/prices?type={kind}", {}, "invalid", "type") for kind in ("", "../x", "a" * 99 + ".b")),
    ("GET /v1/prices?region=", {}, "invalid", "region"),
    ("GET /v1/events?after=-1", {}, "invalid", "'after.constrained-int': Input should be greater than or equal to 0"),
    ("GET /v1/plans/unknown?x=1", {}, "invalid", "this path takes no parameters"),
    ("POST /v1/plans?policy=best", {"json": words()}, "invalid", "'policy': Input should be 'optimal'"),
    ("POST /v1/plans?seed=-1", {"json": words()}, "invalid", "'seed'"),
    ("POST /v1/plans?frontier=perhaps", {"json": words()}, "invalid", "'frontier'"),
    ("POST /v1/plans?polcy=static", {"json": words()}, "invalid", "did you mean 'policy'?"),
    ("POST /v1/plans?set=deadline", {"json": words()}, "invalid", "'deadline' is not key=value"),
    ("POST /v1/plans", {"json": words(profile=None)}, "profile-missing", "measure one with `rubberband profile`"),
    ("POST /v1/experiments?plan=nothing", {"json": words()}, "invalid", "plan: 'nothing' not found"),
    ("POST /v1/experiments", {"json": words(entrypoint="os:system")}, "not-allowed-here", "os:system"),
    *(("GET /v1/experiments", {"params": {"cursor": cursor}}, "invalid", "") for cursor in FORGED),
    *(
        (f"POST {path}", sent(body, kind), slug, "")
        for path in ("/v1/experiments", "/v1/plans")
        for body, kind, slug in BODIES
    ),
    *(("POST /v1/experiments/there/extend", sent(body), slug, "") for body, slug in LIMITS),
    ("POST /v1/experiments/there/extend", sent(b"max_cost: 5", ""), "unsupported-media-type", JSON),
    *(
        ("POST /v1/experiments/there/limit", {"json": wrong}, "invalid", "")
        for wrong in ({"max_instances": -1}, {"max_instances": "2"}, {"max_instances": 1.5}, {}, {"instances": 2})
    ),
    ("POST /v1/experiments/there/limit", sent(b"2", ""), "unsupported-media-type", JSON),
    *(
        ("GET /v1/events", shown(b"last-event-id", id), "malformed", "is not an event id")
        for id in ("x", "-1", "1.5", "", "٣", "9" * 20, "1 2")
    ),
    *(
        ("POST /v1/experiments/there/cancel", shown(b"idempotency-key", key), "invalid", "'Idempotency-Key'")
        for key in ("", "a b", "\t", "k" * 256, "é")
    ),
]


@pytest.mark.parametrize(("asked", "options", "slug", "word"), REFUSALS, ids=range(len(REFUSALS)))
def test_a_refusal_is_a_problem_that_changes_nothing(
    service: FakeService, asked: str, options: dict[str, Any], slug: str, word: str
) -> None:
    for _ in range(2):  # it is remembered as such
        answer = service.client.request(*asked.split(" ", 1), **options)
        status, kind, detail = problem_of(answer)
        assert (kind, status) == (slug, STATUSES[slug]), detail
        assert word in detail
    assert ("allow" in answer.headers) == (status == 405)
    assert answer.headers.get("allow", word) == word
    assert [known.name for known in service.store.submissions().items] == ["there"]
    assert service.runs.extended == service.runs.limited == []


def test_a_refused_query_is_named_for_programs_too(service: FakeService) -> None:
    assert service.client.get("/v1/experiments?limit=0").json()["errors"][0]["loc"] == ["query", "limit"]


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


def test_an_error_quotes_no_more_of_a_request_than_people_read(service: FakeService) -> None:
    answer = service.client.post("/v1/experiments", json={**words(), "x" * 200_000: 1})
    status, kind, detail = problem_of(answer)
    assert (status, kind) == (422, "invalid")
    assert 100 < len(detail) <= MOST_NAMED
