"""`/v1/events`: every event once, in order, from where a client was; ended by the service."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest

from rubberband.api import security
from rubberband.api.routes import Service
from rubberband.api.routes import events as feed_module
from rubberband.api.routes.events import PAGE, Tail, stream
from rubberband.api.security import Authenticator, Bearer, Cookie, Tokens
from rubberband.api.store.schema import Entry, Principal
from rubberband.states import ExperimentState
from rubberband.values.submission import Submission
from tests.builders.fake_runs import FakeService


def entries(experiment: str, begin: int, count: int) -> list[Entry]:
    return [
        Entry(experiment=experiment, seq=seq, kind="TrialReported", occurred_at=1.0, data={"trial": seq})
        for seq in range(begin, begin + count)
    ]


def parts(service: FakeService) -> Service:
    found: Service = service.client.app.state.service
    return found


async def events_of(chunks: AsyncIterator[bytes], count: int) -> list[dict[str, Any]]:
    """Return the data of the next `count` events."""
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


@pytest.fixture
def ends_when_it_waits(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams of the service end with what there is."""

    async def end(_seen: int, _timeout_s: float) -> bool:
        service.feed.close()
        return True

    monkeypatch.setattr(service.feed, "wait", end)


def test_a_stream_shows_what_was_and_what_comes(service: FakeService) -> None:
    service.store.append(entries("a", 1, PAGE + 7))

    async def follow() -> list[dict[str, Any]]:
        chunks = stream(parts(service), 0, None)
        before = await events_of(chunks, PAGE + 7)
        waiting = asyncio.create_task(events_of(chunks, 5))
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


def test_a_stream_continues_after_the_last_id_and_of_one_experiment(service: FakeService) -> None:
    service.store.append(entries("a", 1, 5) + entries("b", 1, 5))
    middle = service.store.feed(limit=3)[-1].id
    found = service.client.wait(events_of(stream(parts(service), middle, "a"), 2))
    assert [(one["experiment"], one["seq"]) for one in found] == [("a", 4), ("a", 5)]


def test_an_event_between_looking_and_waiting_is_not_missed(service: FakeService) -> None:
    async def follow() -> bool:
        seen = service.feed.wakes
        service.feed.wake()
        await asyncio.sleep(0)
        return await service.feed.wait(seen, 60.0)

    assert service.client.wait(follow()) is True


def test_a_quiet_stream_says_that_it_lives_and_ends_with_the_service(service: FakeService) -> None:
    async def follow() -> tuple[list[bytes], list[bytes]]:
        quiet, chunks = stream(parts(service), 0, None, heartbeat_s=0.001), stream(parts(service), 0, None)
        beats = [await anext(quiet) for _ in range(3)]
        await anext(chunks)
        waiting = asyncio.create_task(_all(chunks))
        await asyncio.sleep(0)
        service.feed.close()
        return beats, await waiting

    (retry, *beats), rest = service.client.wait(follow())
    assert retry == b"retry: 1000\n\n"
    assert all(beat.startswith(b":") and beat.endswith(b"\n\n") for beat in beats)
    assert rest == []


def test_an_event_that_comes_while_a_reader_catches_up_is_on_its_next_page(
    service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.store.append(entries("a", 1, 5))
    read = service.store.feed

    async def follow() -> list[int]:
        tail, loop = Tail(service.store), asyncio.get_running_loop()
        last = (await tail.past(service.store.last_feed_id(), None, 0)).upto

        def meanwhile(**asked: Any) -> Any:
            found = read(**asked)
            if asked["after"] == 0:  # another one, which is not behind, reads what comes now
                service.store.append(entries("a", 6, 1))
                asyncio.run_coroutine_threadsafe(tail.past(last, None, 1), loop).result()
            return found

        monkeypatch.setattr(service.store, "feed", meanwhile)
        first = await tail.past(0, None, 0)
        second = await tail.past(first.upto, None, 1)
        return [page.text.count(b"event: TrialReported") for page in (first, second)]

    assert service.client.wait(follow()) == [5, 1]


@pytest.mark.parametrize("way", ["token revoked", "signed out", "revoked by another process"])
def test_a_stream_ends_with_what_it_was_opened_with(
    service: FakeService, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(security, "REMEMBERED_S", 0.05)
    monkeypatch.setattr(feed_module, "CHECK_S", 0.02)
    tokens = Tokens(service.store, ended=service.feed.wake)
    doorkeeper = Authenticator(tokens, required=True)
    record, text = tokens.create("ci", "read")
    session = tokens.sign_in(Principal(token=record.id, name="ci", scope="read"))

    def end() -> None:
        if way == "signed out":
            tokens.sign_out(session)
        else:
            (tokens if way == "token revoked" else Tokens(service.store)).revoke(record.id)

    async def follow() -> list[bytes]:
        shown = Cookie(session) if way == "signed out" else Bearer(text)
        chunks = stream(parts(service), 0, None, partial(doorkeeper.still_good, shown))
        await anext(chunks)
        waiting = asyncio.create_task(_all(chunks))
        await asyncio.to_thread(end)
        return await waiting

    assert service.client.wait(follow()) == []


def test_many_streams_of_one_token_ask_the_store_together_and_not_for_each_event(
    service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = Tokens(service.store, clock=lambda: 1.0)
    doorkeeper = Authenticator(tokens, required=True)
    _, text = tokens.create("ci", "read")
    asked = {"find_tokens": 0, "feed": 0}

    def counted(name: str) -> None:
        ask = getattr(service.store, name)

        def count(*args: Any, **options: Any) -> Any:
            asked[name] += 1
            return ask(*args, **options)

        monkeypatch.setattr(service.store, name, count)

    counted("find_tokens")
    counted("feed")

    async def follow() -> list[list[dict[str, Any]]]:
        may_read = partial(doorkeeper.still_good, Bearer(text))
        streams = [asyncio.create_task(events_of(stream(parts(service), 0, None, may_read), 30)) for _ in range(20)]
        for begin in range(1, 31):
            await asyncio.to_thread(service.store.append, entries("a", begin, 1))
            service.feed.wake()
        return await asyncio.gather(*streams)

    found = service.client.wait(follow())
    assert all([one["seq"] for one in events] == list(range(1, 31)) for events in found)
    assert asked["find_tokens"] == 1
    assert asked["feed"] <= 20 + 30


def test_streams_that_are_behind_read_what_is_remembered_no_longer(
    service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "KEPT", 5)
    monkeypatch.setattr(feed_module, "PAGE", 3)

    async def follow() -> list[list[dict[str, Any]]]:
        slow, quick, picky = (stream(parts(service), 0, only) for only in (None, None, "b"))
        for chunks in (slow, quick, picky):
            await anext(chunks)
        waiting = [asyncio.create_task(events_of(quick, 40)), asyncio.create_task(events_of(picky, 20))]
        for begin in range(1, 21):
            await asyncio.to_thread(service.store.append, entries("a", begin, 1) + entries("b", begin, 1))
            service.feed.wake()
            await asyncio.sleep(0)
        await asyncio.gather(*waiting)
        return [await events_of(slow, 40), *(task.result() for task in waiting)]

    slow, quick, picky = service.client.wait(follow())
    assert slow == quick
    assert [(one["experiment"], one["seq"]) for one in quick] == [(name, seq) for seq in range(1, 21) for name in "ab"]
    assert picky == [one for one in quick if one["experiment"] == "b"]


@pytest.mark.parametrize(("only", "sizes"), [(None, [3, 3, 2]), ("b", [3, 1])])
def test_remembered_events_are_sent_whole_a_page_at_a_time(service, monkeypatch, only, sizes):
    monkeypatch.setattr(feed_module, "PAGE", 3)

    async def follow() -> list[int]:
        tail = feed_module.Tail(service.store)
        begin = upto = (await tail.past(0, only, 1)).upto
        for seq in range(1, 5):
            await asyncio.to_thread(service.store.append, entries("a", seq, 1) + entries("b", seq, 1))
        wanted = service.store.feed(after=begin, experiment=only, limit=9)
        pages = []
        while (page := await tail.past(upto, only, 2)).text:
            pages.append(page.text)
            upto = page.upto
        assert b"".join(pages) == b"".join(feed_module.line_of(event).text for event in wanted)
        return [page.count(b"data: ") for page in pages]

    assert service.client.wait(follow()) == sizes


def test_large_events_are_sent_few_at_a_time(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "PAGE_BYTES", 300)
    service.store.append(entries("a", 1, 9))

    async def follow() -> list[bytes]:
        found = []
        async for chunk in stream(parts(service), 0, None, heartbeat_s=0.001):
            if chunk.startswith(b":"):
                break
            found.append(chunk)
        return found

    _, *pages = service.client.wait(follow())
    assert b"".join(pages).count(b"data: ") == 9
    assert 1 < len(pages) <= 9
    assert max(map(len, pages)) <= 300


@pytest.mark.parametrize(
    ("query", "last", "status"),
    [
        ("?after=latest", None, 200),
        ("", None, 200),
        ("?after=1", None, 410),
        ("", "1", 410),
        ("?after=0", None, 410),
        ("?after=3", None, 200),
        ("?after=0&experiment=kept", None, 200),
        ("?after=0&experiment=old", None, 410),
    ],
)
def test_a_reader_of_deleted_events_gets_the_reason(
    service: FakeService, ends_when_it_waits: None, query: str, last: str | None, status: int
) -> None:
    service.store.append(entries("old", 1, 2))
    service.store.add(Submission(name="old", state=ExperimentState.DONE, created_at=1.0, changed_at=1.0))
    service.store.append(entries("kept", 1, 2))
    assert service.store.prune_feed(at=service.clock()) == 3
    answer = service.client.get(f"/v1/events{query}", headers={} if last is None else {"last-event-id": last})
    assert answer.status_code == status
    if status == 410:
        assert (answer.json()["type"], answer.json()["oldest"]) == ("/problems/events-gone", 3)


async def _all(chunks: AsyncIterator[bytes]) -> list[bytes]:
    return [chunk async for chunk in chunks]


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
    service: FakeService, ends_when_it_waits: None, query: str, last: str | None, expected: list[int]
) -> None:
    service.store.append(entries("a", 1, 3))
    answer = service.client.get(f"/v1/events{query}", headers={} if last is None else {"last-event-id": last})
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = answer.text.splitlines()
    assert [json.loads(line[6:])["seq"] for line in lines if line.startswith("data: ")] == expected
