"""Tokens of one address on a real server, on SQLite and on PostgreSQL: none stands in another one's way."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import count, takewhile
from pathlib import Path

import httpx
import pytest

from rubberband.api.security import Tokens
from rubberband.api.store import open_store
from tests.builders import processes
from tests.builders.fake_runs import words
from tests.builders.server_process import serving


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.long)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of a new store."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/store.db"
    found: str = request.getfixturevalue("postgresql_url")
    return found


@pytest.fixture
def tokens(url: str, tmp_path: Path) -> Iterator[Tokens]:
    with closing(open_store(url, tmp_path)) as store:
        yield Tokens(store)


@pytest.mark.long
def test_neither_wrong_tokens_nor_idempotency_keys_of_others_block_a_right_token(
    url: str, tokens: Tokens, tmp_path: Path
) -> None:
    (tmp_path / "stand-in.json").write_text(json.dumps({"template": "", "ways": {"small": "vanish", "tiny": "vanish"}}))
    stand_in = {"STAND_IN": str(processes.FOLDER / "stand_in.py")}
    tokens.create("first", "submit")
    guarded = (str(processes.FOLDER / "guarded_server.py"),)
    options = ("--auth", "--rate", "0", "--store", url)
    with serving(tmp_path, *options, environment=stand_in, program=guarded) as server:
        with httpx.Client(base_url=server.address, timeout=120) as client, ThreadPoolExecutor(8) as crowd:

            def wrong(number: int) -> int:
                token = f"rb_{number:012x}_{'0' * 64}"
                if number % 2:
                    return client.post("/login", data={"token": token}).status_code
                return client.get("/v1/experiments", headers={"Authorization": f"Bearer {token}"}).status_code

            def right(name: str) -> list[int]:
                text = tokens.create(name, "submit")[1]  # one that the server has never seen
                keyed = {"Authorization": f"Bearer {text}", "Idempotency-Key": "k"}
                made = client.post("/v1/experiments", json=words(name=name), headers=keyed)
                found = client.post("/v1/experiments", json=words(name=name), headers=keyed)
                assert [answer.headers.get("Idempotency-Replayed") for answer in (made, found)] == [None, "true"]
                signed_in = httpx.post(f"{server.address}/login", data={"token": text}, timeout=120)
                return [made.status_code, found.status_code, len(signed_in.cookies)]

            tried = takewhile(lambda status: status != 429, map(wrong, count()))
            assert set(tried) == {303, 401}
            crowded = crowd.map(wrong, range(1000, 1200))
            assert [right(name) for name in ("small", "tiny")] == [[201, 201, 1]] * 2
            assert 429 in set(crowded) <= {303, 401, 429}
        assert "Traceback" not in server.log
