"""Tokens and sessions: what opens the door, what no longer does, and what is kept of them."""

from __future__ import annotations

import hmac
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rubberband.api.security import REMEMBERED_S, Bearer, Cookie, Credential, Tokens
from rubberband.api.store import Store, open_store
from rubberband.api.store.schema import Principal


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(None, tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tokens(store: Store, clock: Clock) -> Tokens:
    return Tokens(store, clock=clock)


def looked_up(tokens: Tokens, credential: Credential) -> Principal | None:
    return tokens.look_up([credential]).get(credential)


def signed_in(tokens: Tokens, text: str) -> str | None:
    principal = looked_up(tokens, Bearer(text))
    return None if principal is None else tokens.sign_in(principal)


def test_a_token_names_its_holder(tokens: Tokens) -> None:
    record, text = tokens.create("ci", "submit")
    found = looked_up(tokens, Bearer(text))
    assert found is not None
    assert (found.token, found.name, found.scope) == (record.id, "ci", "submit")
    assert tokens.recall(Bearer(text)) == found


@pytest.mark.parametrize(
    "text", ["", "rb_", "rb_0123456789ab_", "rb_0123456789ab_" + "0" * 64, "é\udc80", "x" * 10_000]
)
def test_an_invalid_token_opens_nothing(tokens: Tokens, text: str) -> None:
    tokens.create("ci", "submit")
    assert looked_up(tokens, Bearer(text)) is None
    assert looked_up(tokens, Cookie(text)) is None


def test_a_wrong_secret_opens_nothing_though_the_token_is_remembered(tokens: Tokens) -> None:
    _, text = tokens.create("ci", "submit")
    looked_up(tokens, Bearer(text))
    wrong = text[:-1] + ("0" if text[-1] != "0" else "1")
    assert tokens.recall(Bearer(wrong)) is None
    assert looked_up(tokens, Bearer(wrong)) is None


def test_only_hashes_are_on_disk(tokens: Tokens, store: Store, tmp_path: Path) -> None:
    _, text = tokens.create("ci", "submit")
    session = signed_in(tokens, text)
    assert session is not None
    store.close()
    kept = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"ci" in kept
    assert text.rpartition("_")[2].encode() not in kept
    assert session.encode() not in kept


@pytest.mark.parametrize("known", [True, False])
def test_secrets_are_compared_in_constant_time(tokens: Tokens, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    _, text = tokens.create("ci", "read")
    compared = []

    def compare(a: str, b: str) -> bool:
        compared.append((len(a), len(b)))
        return False

    monkeypatch.setattr(hmac, "compare_digest", compare)
    shown = text if known else "rb_0123456789ab_" + "0" * 64
    assert looked_up(tokens, Bearer(shown)) is None
    assert compared == [(64, 64)]


def test_an_expired_token_opens_nothing(tokens: Tokens, clock: Clock) -> None:
    _, text = tokens.create("ci", "read", lasts_s=60)
    session = signed_in(tokens, text)
    assert session is not None
    clock.now += 59
    assert looked_up(tokens, Bearer(text)) is not None
    clock.now += 1
    assert tokens.recall(Bearer(text)) is None
    assert looked_up(tokens, Bearer(text)) is None
    assert looked_up(tokens, Cookie(session)) is None


def test_a_revoked_token_opens_nothing_from_then_on(tokens: Tokens) -> None:
    record, text = tokens.create("ci", "read")
    session = signed_in(tokens, text)
    assert session is not None
    assert looked_up(tokens, Bearer(text)) == looked_up(tokens, Cookie(session)) is not None
    assert tokens.revoke(record.id)
    for credential in (Bearer(text), Cookie(session)):
        assert tokens.recall(credential) is None
        assert looked_up(tokens, credential) is None
    assert tokens.revoke("0123456789ab") is False


@pytest.mark.parametrize("what", ["revocation", "sign-out"])
def test_a_look_that_is_overtaken_is_not_remembered(store: Store, clock: Clock, what: str) -> None:
    shown: list[Credential] = []

    class Overtaken(Tokens):
        def _read(self, *asked: Any) -> Any:
            found = super()._read(*asked)
            if shown:
                self.revoke(record.id) if what == "revocation" else self.sign_out(session)
            return found

    tokens = Overtaken(store, clock=clock)
    record, text = tokens.create("me", "admin")
    session = signed_in(tokens, text) or ""
    tokens = Overtaken(store, clock=clock)  # which remembers nothing
    shown += [Bearer(text) if what == "revocation" else Cookie(session)]
    looked_up(tokens, shown[0])
    assert tokens.recall(shown[0]) is None


@pytest.mark.parametrize("later_s", [REMEMBERED_S, -86_400.0], ids=["seconds later", "the clock is set back"])
def test_a_revocation_by_another_process_takes_effect_within_seconds(
    store: Store, tokens: Tokens, clock: Clock, later_s: float
) -> None:
    record, text = tokens.create("ci", "read")
    looked_up(tokens, Bearer(text))
    Tokens(store, clock=clock).revoke(record.id)
    clock.now += later_s
    assert tokens.recall(Bearer(text)) is None
    assert looked_up(tokens, Bearer(text)) is None


def test_a_use_is_noted_once_a_minute(tokens: Tokens, clock: Clock) -> None:
    _, text = tokens.create("ci", "read")
    used = []
    for _ in range(13):
        looked_up(tokens, Bearer(text))
        tokens.note_use([Bearer(text)])
        used.append(tokens.records()[0].last_used_at)
        clock.now += 10
    assert sorted(set(used), key=str) == [1_000_000.0, 1_000_060.0, 1_000_120.0]


def test_a_session_ends_when_its_time_is_over_or_its_user_says_so(tokens: Tokens, clock: Clock) -> None:
    _, text = tokens.create("me", "admin")
    first, second = signed_in(tokens, text), signed_in(tokens, text)
    assert first is not None
    assert second is not None
    looked_up(tokens, Cookie(first))
    for _ in range(2):
        tokens.sign_out(first)
    assert tokens.recall(Cookie(first)) is None
    assert looked_up(tokens, Cookie(first)) is None
    assert looked_up(tokens, Cookie(second)) is not None
    clock.now += tokens.session_s
    assert looked_up(tokens, Cookie(second)) is None


def test_credentials_do_not_show_themselves() -> None:
    assert "secret" not in repr([Bearer("secret"), Cookie("secret")])
