"""`/v1/events`: server-sent events from the feed, each once and in order."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import Field
from pydantic.json_schema import SkipJsonSchema
from starlette.concurrency import run_in_threadpool

from rubberband.api.problems import EVENTS_GONE, MALFORMED, HttpProblem
from rubberband.api.routes import NAME_PATTERN, Reader, Service, Serving, always, still_allowed
from rubberband.api.routes.answers import HEAD, only_documented, refusals
from rubberband.api.store import Store
from rubberband.api.store.schema import FeedEvent
from rubberband.errors import JournalError
from rubberband.units import shown
from rubberband.views.experiment import plain, to_bytes

# The newest events, read from the store once for all streams that wait for them.

PAGE = 200
"""Events that a stream gets at a time; a slow client holds no more in memory."""
PAGE_BYTES = 256 << 10
"""Likewise in bytes; a larger event comes alone."""
KEPT = 2000
"""At least this many of the newest events are cached, and fewer than twice as many."""
KEPT_BYTES = 8 << 20
FRESH_S = 1.0
"""Interval of looking at the store without a wake-up."""
GAP_S, GAP_OF_EACH_S = 0.05, 0.002
"""Shortest time between wake-ups: a constant, or a share for each waiting stream if that is longer."""
_CATCHING_UP = 2
"""Streams that may read the store at the same time; other requests need its threads, too."""


@dataclass(frozen=True, slots=True)
class FeedLine:
    """Event as streams send it."""

    id: int
    experiment: str
    text: bytes


@dataclass(frozen=True, slots=True)
class FeedPage:
    """Next events of a stream."""

    text: bytes
    """Whole events; empty if there are none."""
    upto: int
    """The stream has sent all events up to this id."""


class EventFeed:
    """Wakes the waiting streams of one event loop, and gives them new events."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tail: Tail | None = None
        self._changed: asyncio.Event = asyncio.Event()
        self.wakes = 0
        """Number of wake-ups. Read it before looking for events, and pass it to `wait`."""
        self._waiting = 0
        self.closed = False
        """Whether streams must end."""
        self._due: asyncio.TimerHandle | None = None
        self._next_at = 0.0

    def open(self, store: Store) -> None:
        """Attach to the running event loop, and to a store."""
        self._loop, self._tail, self.closed = asyncio.get_running_loop(), Tail(store), False

    def close(self) -> None:
        """End all streams. Safe in any thread and in signal handlers. Idempotent."""
        self.closed = True
        self.wake()

    def wake(self) -> None:
        """Wake all streams to look for events. Safe in any thread."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._wake_soon)

    def _wake_soon(self) -> None:
        assert self._loop is not None, "it was opened"
        if self.closed or self._loop.time() >= self._next_at:
            self._wake()
        elif self._due is None:
            self._due = self._loop.call_at(self._next_at, self._wake)

    def _wake(self) -> None:
        assert self._loop is not None, "it was opened"
        if self._due is not None:
            self._due.cancel()
            self._due = None
        self._next_at = self._loop.time() + max(GAP_S, GAP_OF_EACH_S * self._waiting)
        self.wakes += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, seen: int, timeout_s: float) -> bool:
        """Return True after a wake-up since `wakes` was `seen`, or False after `timeout_s`."""
        if self.wakes != seen or self.closed:
            return True
        self._waiting += 1
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        finally:
            self._waiting -= 1
        return True

    async def past(self, after: int, experiment: str | None) -> FeedPage:
        """Return the page of events past `after`. Raises JournalError if the store cannot be read."""
        assert self._tail is not None, "it was opened"
        return await self._tail.past(after, experiment, self.wakes)


class Tail:
    """Cache of the newest events of a store, ready to be sent. For one event loop."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lines: list[FeedLine] = []
        self._floor = self._last = -1
        """`_lines` has all events with `_floor` < id <= `_last`."""
        self._seen, self._read_at = -1, 0.0
        self._reading, self._catching_up = asyncio.Lock(), asyncio.Semaphore(_CATCHING_UP)

    async def past(self, after: int, experiment: str | None, wakes: int) -> FeedPage:
        """Return the page of events past `after`; `wakes` is the number of wake-ups by now."""
        await self._refresh(wakes)
        last = self._last
        if after >= self._floor:
            since = self._lines[bisect_right(self._lines, after, key=lambda line: line.id) :]
            return _page([line for line in since if experiment in (None, line.experiment)], max(after, last))
        async with self._catching_up:
            found = await run_in_threadpool(self._read, after, experiment, PAGE)
        # A page that is not full has all events up to `last`.
        upto = found[-1].id if found else after
        return _page(found, upto if len(found) == PAGE else max(upto, last))

    async def _refresh(self, wakes: int) -> None:
        """Read new events unless another stream did so since the last wake-up."""
        if self._is_fresh(wakes):
            return
        async with self._reading:
            if self._is_fresh(wakes):
                return
            if self._last < 0:
                self._floor = self._last = await run_in_threadpool(self._store.last_feed_id)
            while len(found := await run_in_threadpool(self._read, self._last, None, KEPT)) == KEPT:
                # Too many for the cache: streams that are behind read them by themselves.
                self._lines = []
                self._floor = self._last = await run_in_threadpool(self._store.last_feed_id)
            self._keep(found)
            self._seen, self._read_at = wakes, asyncio.get_running_loop().time()

    def _is_fresh(self, wakes: int) -> bool:
        return wakes <= self._seen and asyncio.get_running_loop().time() - self._read_at < FRESH_S

    def _keep(self, found: Sequence[FeedLine]) -> None:
        if not found:
            return
        self._lines += found
        self._last = found[-1].id
        if len(self._lines) >= 2 * KEPT or sum(len(line.text) for line in self._lines) > KEPT_BYTES:
            gone = len(self._lines) - KEPT if len(self._lines) > KEPT else (len(self._lines) + 1) // 2
            self._floor = self._lines[gone - 1].id
            del self._lines[:gone]

    def _read(self, after: int, experiment: str | None, limit: int) -> list[FeedLine]:
        return [line_of(event) for event in self._store.feed(after=after, experiment=experiment, limit=limit)]


def line_of(event: FeedEvent) -> FeedLine:
    """Format an event for streams."""
    data = to_bytes({"id": event.id} | plain(event))
    text = b"id: %d\nevent: %s\ndata: %s\n\n" % (event.id, event.kind.encode(), data)
    return FeedLine(event.id, event.experiment, text)


def _page(lines: Sequence[FeedLine], upto: int) -> FeedPage:
    """Return the first page of lines, which together cover all events up to `upto`."""
    size, texts = 0, list[bytes]()
    for line in lines[:PAGE]:
        if texts and size + len(line.text) > PAGE_BYTES:
            break
        texts.append(line.text)
        size += len(line.text)
    return FeedPage(b"".join(texts), upto if len(texts) == len(lines) else lines[len(texts) - 1].id)


# The route, and the stream of one reader.

router = APIRouter(tags=["events"], prefix="/v1", dependencies=[Depends(only_documented)])

HEARTBEAT_S = 15.0
"""A silent stream sends a comment at this interval, so that proxies keep it open."""
CHECK_S = 2.0
"""Interval of checking that the reader's token or session is still valid."""
MAX_ID = (1 << 63) - 1
_MEDIA_TYPE = "text/event-stream"
_EXAMPLE = """\
retry: 1000

id: 42
event: TrialReported
data: {"id":42,"experiment":"digits-sha","seq":17,"kind":"TrialReported","occurred_at":1767225600.0,"data":{"trial":3}}

"""


@router.get(
    "/events",
    summary="Follow events",
    operation_id="streamEvents",
    response_class=StreamingResponse,
    response_model=None,
    responses={
        200: {
            "description": "A stream that ends with the service, your token or session; reconnect with the last id.",
            "content": {_MEDIA_TYPE: {"schema": {"type": "string"}, "example": _EXAMPLE}},
        },
        **refusals(MALFORMED, EVENTS_GONE),
    },
)
async def stream_events(
    request: Request,
    service: Serving,
    _reader: Reader,
    experiment: Annotated[
        str | None, Query(pattern=NAME_PATTERN, description="Only events of this experiment.", examples=["digits-sha"])
    ] = None,
    after: Annotated[
        Annotated[int, Field(ge=0, le=MAX_ID)] | Literal["latest"] | SkipJsonSchema[None],
        Query(
            description="Only events after this id, all of which must still be kept; `latest` for new events only. "
            "Default: all kept events."
        ),
    ] = None,
    last_event_id: Annotated[
        str | None,
        Header(
            alias="Last-Event-ID",
            description="Same as `after`, and takes precedence over it. Browsers send it when they reconnect.",
            json_schema_extra={"pattern": "^[0-9]{1,19}$"},
        ),
    ] = None,
) -> Response:
    """Every event of every experiment, in one order. An id that is greater than any there is goes on from the end."""
    begin = after if last_event_id is None else _id(last_event_id)
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    start = await run_in_threadpool(_start, service.store, begin, experiment)
    if HEAD in request.scope:
        return Response(status_code=200, headers=headers, media_type=_MEDIA_TYPE)
    events = stream(service, start, experiment, still_allowed(request))
    return StreamingResponse(events, headers=headers, media_type=_MEDIA_TYPE)


async def stream(
    service: Service,
    after: int,
    experiment: str | None,
    may_read: Callable[[], Awaitable[bool]] = always,
    heartbeat_s: float = HEARTBEAT_S,
) -> AsyncIterator[bytes]:
    """Yield events past `after` as they arrive, until the service or the reader's token or session ends."""
    feed, clock = service.feed, asyncio.get_running_loop().time
    yield b"retry: 1000\n\n"
    sent_at = clock()
    try:
        while not feed.closed and await may_read():
            seen = feed.wakes
            page = await feed.past(after, experiment)
            after = page.upto
            quiet_s = heartbeat_s - (clock() - sent_at)
            if not page.text and quiet_s > 0:
                await feed.wait(seen, min(quiet_s, CHECK_S))
                continue
            yield page.text or b": still here\n\n"
            sent_at = clock()
    except JournalError:
        return  # the watcher has logged it; the client reconnects, and gets the error


def _start(store: Store, begin: int | Literal["latest"] | None, experiment: str | None) -> int:
    """Return the id after which a stream begins. Raises Problem if events after `begin` were deleted."""
    if isinstance(begin, int) and begin < (gone := store.last_pruned_id(experiment)):
        raise HttpProblem(
            EVENTS_GONE,
            f"the events after {begin} up to {gone} were deleted; leave out `after` and Last-Event-ID for all kept "
            "events, or give after=latest, and read earlier events from the experiments",
            oldest=gone,
        )
    last = store.last_feed_id()
    return last if begin == "latest" else min(begin or 0, last)


def _id(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(MAX_ID))):
        raise HttpProblem(
            MALFORMED, f"Last-Event-ID {shown(text)} is not an event id; send the last id received, or none"
        )
    return min(int(text), MAX_ID)
