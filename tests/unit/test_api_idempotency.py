"""A request that is sent again with its Idempotency-Key has the same answer, and one effect."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from rubberband.api.routes.answers import REPLAYED
from rubberband.api.security import Tokens
from rubberband.api.store.schema import TokenRecord
from tests.builders.fake_runs import FakeService, fake_service, words


@pytest.fixture
def service(tmp_path: Path) -> Iterator[FakeService]:
    with fake_service(tmp_path) as made:
        made.add("there")
        yield made


@pytest.fixture
def strict(store_url: str, tmp_path: Path) -> Iterator[FakeService]:
    """One that asks for tokens, on SQLite and on PostgreSQL."""
    with fake_service(tmp_path, auth=True, store=store_url) as made:
        made.add("there")
        yield made


def ask(service: FakeService, path: str, document: Any = None, key: str = "k", token: str = "") -> Any:
    headers = {"idempotency-key": key} | ({"authorization": f"Bearer {token}"} if token else {})
    return service.client.post(f"/v1/experiments{path}", json=document, headers=headers)


def forget_answers(service: FakeService) -> None:
    """As if the server had been killed before it kept them."""
    service.store.prune(at=service.clock() + service.store.keeping.answers_s)


ACTIONS: list[tuple[str, Any]] = [
    ("", words()),
    ("/there/cancel", None),
    ("/there/extend", {"max_cost": 5, "dry_run": False}),
    ("/there/limit", {"max_instances": 2}),
]


@pytest.mark.parametrize(("path", "document"), ACTIONS)
def test_the_first_answer_is_sent_again(service: FakeService, path: str, document: Any) -> None:
    first, second = ask(service, path, document), ask(service, path, document)
    assert first.is_success
    assert REPLAYED not in first.headers
    assert second.headers[REPLAYED] == "true"
    assert (second.status_code, second.content) == (first.status_code, first.content)
    for name in ("content-type", "location"):
        assert second.headers.get(name) == first.headers.get(name)
    assert len(service.runs.extended) == (1 if "extend" in path else 0)


def test_another_request_may_not_have_the_key(service: FakeService) -> None:
    assert ask(service, "", words()).status_code == 201
    service.add("other")
    assert ask(service, "/there/cancel", key="c").is_success
    others = [("", words(name="other"), "k"), ("?policy=static", words(), "k"), ("/there/cancel", None, "k")]
    for path, document, key in [*others, ("/other/cancel", None, "c")]:
        answer = ask(service, path, document, key)
        assert (answer.status_code, answer.json()["type"]) == (422, "/problems/idempotency-key-reused")
    assert ask(service, "", words(), "b").json()["type"] == "/problems/name-taken", "it is another request"


def test_a_failed_request_may_be_repeated(service: FakeService) -> None:
    service.runs.failure = RuntimeError("no")
    assert ask(service, "", words()).status_code == 500
    infeasible = words(name="hasty", constraints__deadline="10s")
    for _ in range(2):
        answer = ask(service, "", infeasible, "hasty")
        assert (answer.status_code, REPLAYED in answer.headers) == (422, False)
    assert ask(service, "", words()).status_code == 201


def test_sent_many_times_at_once_it_happens_once(service: FakeService) -> None:
    request = ("POST", "/v1/experiments", {"json": words(), "headers": {"idempotency-key": "k"}})
    answers = service.client.together(*[request] * 10)
    for answer in answers:
        assert answer.status_code in (201, 409)
        if answer.status_code == 409:
            assert answer.json()["type"] == "/problems/idempotency-key-busy"
            assert answer.headers["retry-after"] == "1"
    assert ask(service, "", words()).status_code == 201


@pytest.mark.parametrize(("path", "document"), ACTIONS)
def test_after_a_crash_before_the_answer_was_kept_it_is_not_done_again(
    service: FakeService, path: str, document: Any
) -> None:
    first = ask(service, path, document)
    forget_answers(service)
    second = ask(service, path, document)
    assert second.status_code == first.status_code
    assert second.headers.get("location") == first.headers.get("location")
    assert len(service.runs.extended) == (1 if "extend" in path else 0)
    assert len(service.store.submissions().items) == (2 if path == "" else 1)


def test_an_accepted_request_is_not_refused_later(service: FakeService) -> None:
    soon = datetime.fromtimestamp(service.clock() + 3600.0, UTC)
    document = words(constraints__deadline=soon.isoformat())
    assert ask(service, "", document).status_code == 201
    forget_answers(service)
    service.clock.now = soon.timestamp() + 1.0
    assert ask(service, "", document).status_code == 201
    assert ask(service, "", words(name="late", constraints__deadline=soon.isoformat()), "late").status_code == 422


def test_a_look_needs_no_key(service: FakeService) -> None:
    for _ in range(2):
        answer = ask(service, "/there/extend", {"max_cost": 5})
        assert (answer.status_code, REPLAYED in answer.headers) == (200, False)


@pytest.mark.parametrize("is_lost", [False, True], ids=["answered", "the answer was lost"])
def test_the_key_of_one_token_is_nothing_to_another(strict: FakeService, is_lost: bool) -> None:
    """Though it has the same name; what it asks is done, or refused for what it asks."""
    (_, first_token), (_, second_token) = _two(Tokens(strict.store))
    refusals = ["/problems/name-taken", None, None, None, "/problems/conflict"]
    for (path, document), refused in zip([*ACTIONS, ("/there/resume", None)], refusals, strict=True):
        key = f"key-of{path}"
        begun = ask(strict, path, document, key, first_token)
        assert begun.is_success
        if is_lost:
            forget_answers(strict)
        other = ask(strict, path, document, key, second_token)
        assert (REPLAYED in other.headers, other.json().get("type")) == (False, refused)
        again = ask(strict, path, document, key, first_token)
        assert (REPLAYED in again.headers) is not is_lost
    assert len(strict.runs.extended) == 2
    assert ask(strict, "", words(name="another"), "key-of", second_token).status_code == 201


def test_the_keys_of_a_token_that_was_revoked_are_nothing_to_the_next_of_its_name(strict: FakeService) -> None:
    (first, first_token), _ = _two(Tokens(strict.store))
    admin = {"authorization": f"Bearer {Tokens(strict.store).create('admin', 'admin')[1]}"}
    assert ask(strict, "/there/cancel", token=first_token).is_success
    assert strict.client.request("DELETE", f"/v1/tokens/{first.id}", headers=admin).status_code == 204
    assert ask(strict, "/there/cancel", token=first_token).status_code == 401
    made = strict.client.post("/v1/tokens", json={"name": first.name, "scope": "submit"}, headers=admin)
    assert ask(strict, "", words(), token=made.json()["token"]).status_code == 201


def test_a_key_that_is_being_served_holds_up_no_other_token(strict: FakeService) -> None:
    (first, first_token), (_, second_token) = _two(Tokens(strict.store))
    assert strict.store.claim_key("k", owner=first.id, request_hash="h", at=strict.clock()) is None
    assert ask(strict, "", words(), token=first_token).json()["type"] == "/problems/idempotency-key-reused"
    assert ask(strict, "", words(), token=second_token).status_code == 201


def _two(tokens: Tokens) -> list[tuple[TokenRecord, str]]:
    return [tokens.create("ann", "submit") for _ in range(2)]
