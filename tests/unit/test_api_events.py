"""`/v1/events`: every event once, in order, from where a client was; ended by the service."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from rubberband.api.routes.events import PAGE, stream
from rubberband.api.service import Service
from rubberband.api.store.records import Entry, Principal, TokenRecord
from tests.fake_runs import FakeService, fake_service


@pytest.fixture
def service(tmp_path: Path) -> Iterator[FakeService]:
    with fake_service(tmp_path) as made:
        yield made


def entries(experiment: str, begin: int, count: int) -> list[Entry]:
    return [
        Entry(experiment=experiment, seq=seq, kind="TrialReported", occurred_at=1.0, data={"trial": seq})
        for seq in range(begin, begin + count)
    ]


def parts(service: FakeService) -> Service:
    found: Service = service.client.app.state.service
    return found


async def told(chunks: AsyncIterator[bytes], count: int) -> list[dict[str, Any]]:
    """The data of so many events."""
    found: list[dict[str, Any]] = []
    async for chunk in chunks:
        for block in chunk.decode().split("\n\n"):
            lines = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
            if "data" in lines:
                data = json.loads(lines["data"])
                assert (lines["id"], lines["event"]) == (str(data["id"]), data["kind"])
                found.append(data)
        if len(found) >= count:
            return found
    return found


def test_a_stream_tells_what_was_and_what_comes(service: FakeService) -> None:
    service.store.append(entries("a", 1, PAGE + 7))

    async def follow() -> list[dict[str, Any]]:
        chunks = stream(parts(service), 0, None)
        before = await told(chunks, PAGE + 7)
        waiting = asyncio.create_task(told(chunks, 5))
        await asyncio.sleep(0)
        await asyncio.to_thread(service.store.append, entries("b", 1, 5))
        service.feed.wake()
        return before + await waiting

    found = service.client.wait(follow())
    assert [(one["experiment"], one["seq"]) for one in found] == [("a", seq) for seq in range(1, PAGE + 8)] + [
        ("b", seq) for seq in range(1, 6)
    ]
    ids = [one["id"] for one in found]
    assert ids == sorted(set(ids))


def test_a_stream_goes_on_after_the_last_id_and_of_one_experiment(service: FakeService) -> None:
    service.store.append(entries("a", 1, 5) + entries("b", 1, 5))
    middle = service.store.feed(limit=3)[-1].id
    found = service.client.wait(told(stream(parts(service), middle, "a"), 2))
    assert [(one["experiment"], one["seq"]) for one in found] == [("a", 4), ("a", 5)]


def test_what_comes_between_looking_and_waiting_is_not_missed(service: FakeService) -> None:
    async def follow() -> bool:
        seen = service.feed.wakes
        service.feed.wake()
        await asyncio.sleep(0)
        return await service.feed.wait(seen, 60.0)

    assert service.client.wait(follow(), 5.0) is True


def test_a_quiet_stream_says_that_it_lives(service: FakeService) -> None:
    async def follow() -> list[bytes]:
        chunks = stream(parts(service), 0, None, heartbeat_s=0.001)
        return [await anext(chunks) for _ in range(3)]

    retry, *beats = service.client.wait(follow())
    assert retry == b"retry: 1000\n\n"
    assert all(beat.startswith(b":") and beat.endswith(b"\n\n") for beat in beats)


def test_streams_end_with_the_service(service: FakeService) -> None:
    async def follow() -> list[bytes]:
        chunks = stream(parts(service), 0, None)
        await anext(chunks)
        waiting = asyncio.create_task(_all(chunks))
        await asyncio.sleep(0)
        service.feed.close()
        return await waiting

    assert service.client.wait(follow(), 10.0) == []


def test_a_stream_ends_with_the_token_that_it_was_opened_with(service: FakeService) -> None:
    record = TokenRecord(id="t", name="ci", scope="read", created_at=1.0)
    service.store.add_token(record, "hash")
    reader = Principal(token="t", name="ci", scope="read")

    async def follow() -> list[bytes]:
        chunks = stream(parts(service), 0, None, reader)
        await anext(chunks)
        waiting = asyncio.create_task(_all(chunks))
        await asyncio.to_thread(service.store.revoke_token, "t", at=2.0)
        await asyncio.to_thread(service.store.append, entries("a", 1, 1))
        service.feed.wake()
        return await waiting

    assert len(service.client.wait(follow(), 10.0)) <= 1


async def _all(chunks: AsyncIterator[bytes]) -> list[bytes]:
    return [chunk async for chunk in chunks]


@pytest.mark.parametrize("last", ["x", "-1", "1.5", "", "٣", "9" * 20, "1 2"])
def test_a_last_id_that_is_no_number_is_malformed(service: FakeService, last: str) -> None:
    answer = service.client.get("/v1/events", headers=[(b"last-event-id", last.encode())])
    assert (answer.status_code, answer.json()["type"]) == (400, "/problems/malformed")


@pytest.mark.parametrize(
    ("query", "last", "expected"),
    [
        ("", None, [1, 2, 3]),
        ("?after=2", None, [3]),
        ("?after=0", "1", [2, 3]),
        ("?after=latest", None, []),
        ("", "999999", []),
        ("", str((1 << 63) - 1), []),
        ("?experiment=other", None, []),
    ],
)
def test_where_a_stream_begins(
    service: FakeService, monkeypatch: pytest.MonkeyPatch, query: str, last: str | None, expected: list[int]
) -> None:
    async def end(_seen: int, _timeout_s: float) -> bool:
        service.feed.close()
        return True

    service.store.append(entries("a", 1, 3))
    monkeypatch.setattr(service.feed, "wait", end)
    answer = service.client.get(f"/v1/events{query}", headers={} if last is None else {"last-event-id": last})
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = answer.text.splitlines()
    assert [json.loads(line[6:])["seq"] for line in lines if line.startswith("data: ")] == expected
