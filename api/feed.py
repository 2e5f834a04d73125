"""What streams of events wait for and read: the newest events, read from the store once for all of them.

The events themselves are in the store. A stream that is far behind reads there by itself, few at a time.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.concurrency import run_in_threadpool

from rubberband.api.models import feed_event
from rubberband.api.store.protocol import FeedEvent, Store
from rubberband.views.experiment import to_bytes

PAGE = 200
"""Events that a stream is given at a time: one whose client is slow holds no more than these."""
PAGE_BYTES = 256 << 10
"""Likewise, but for an event that is larger by itself."""
KEPT = 2000
"""Of the newest events at least so many are remembered (and less than twice as many), if there are so many."""
KEPT_BYTES = 8 << 20
FRESH_S = 1.0
"""The store is looked at again after so long, though nobody said that there is more."""
GAP_S, GAP_OF_EACH_S = 0.05, 0.002
"""Streams are woken at most so often: the first, and the second for each that waits, as waking it takes time."""
_CATCHING_UP = 2
"""Streams that read the store at the same time; threads that do so take turns with all other requests."""


@dataclass(frozen=True, slots=True)
class FeedLine:
    """An event as streams send it."""

    id: int
    experiment: str
    text: bytes


@dataclass(frozen=True, slots=True)
class Told:
    """What a stream is to send next."""

    text: bytes
    """Of whole events; empty if there are none."""
    upto: int
    """All that is to be told up to this id is told then."""


class Feed:
    """Wakes the waiting streams of one event loop, and gives them what is new."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tail: Tail | None = None
        self._changed: asyncio.Event = asyncio.Event()
        self._wakes = self._waiting = 0
        self._closed = False
        self._due: asyncio.TimerHandle | None = None
        self._next_at = 0.0

    @property
    def wakes(self) -> int:
        """How often there was more to read. Take it before looking, and give it to `wait`."""
        return self._wakes

    @property
    def closed(self) -> bool:
        """Whether streams are to end."""
        return self._closed

    def open(self, store: Store) -> None:
        """Belong to the running event loop, and to a store."""
        self._loop, self._tail, self._closed = asyncio.get_running_loop(), Tail(store), False

    def close(self) -> None:
        """End every stream, for good. May be called from any thread, and from a signal handler. Idempotent."""
        self._closed = True
        self.wake()

    def wake(self) -> None:
        """There is more to read, or to look at. May be called from any thread."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._wake_soon)

    def _wake_soon(self) -> None:
        assert self._loop is not None, "it was opened"
        if self._closed or self._loop.time() >= self._next_at:
            self._wake()
        elif self._due is None:
            self._due = self._loop.call_at(self._next_at, self._wake)

    def _wake(self) -> None:
        assert self._loop is not None, "it was opened"
        if self._due is not None:
            self._due.cancel()
            self._due = None
        self._next_at = self._loop.time() + max(GAP_S, GAP_OF_EACH_S * self._waiting)
        self._wakes += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, seen: int, timeout_s: float) -> bool:
        """Return True once there was more to read since `wakes` was `seen`, or False after `timeout_s`."""
        if self._wakes != seen or self._closed:
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

    async def past(self, after: int, experiment: str | None) -> Told:
        """The next events past `after`, a page of them. Raises JournalError if the store cannot be read."""
        assert self._tail is not None, "it was opened"
        return await self._tail.past(after, experiment, self._wakes)


class Tail:
    """The newest events of a store, ready to be sent. For one event loop."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lines: list[FeedLine] = []
        self._floor = self._last = -1
        """All events past the one, up to the other, are in `_lines`."""
        self._seen, self._read_at = -1, 0.0
        self._reading, self._catching_up = asyncio.Lock(), asyncio.Semaphore(_CATCHING_UP)

    async def past(self, after: int, experiment: str | None, wakes: int) -> Told:
        """The next events past `after`; `wakes` is how often there was more to read by now."""
        await self._refresh(wakes)
        last = self._last
        if after >= self._floor:
            since = self._lines[bisect_right(self._lines, after, key=_id) :]
            return _page([line for line in since if experiment in (None, line.experiment)], max(after, last))
        async with self._catching_up:
            found = await run_in_threadpool(self._read, after, experiment, PAGE)
        # What is not among fewer than were asked for is not there, as far as the store was known before.
        upto = found[-1].id if found else after
        return _page(found, upto if len(found) == PAGE else max(upto, last))

    async def _refresh(self, wakes: int) -> None:
        """Read what is new, unless that was done since there was more; of many streams that ask, one does."""
        if self._is_fresh(wakes):
            return
        async with self._reading:
            if self._is_fresh(wakes):
                return
            if self._last < 0:
                self._floor = self._last = await run_in_threadpool(self._store.last_feed_id)
            while len(found := await run_in_threadpool(self._read, self._last, None, KEPT)) == KEPT:
                # So much at once is not kept: streams that are behind read it by themselves.
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
    """An event as a stream tells it."""
    text = b"id: %d\nevent: %s\ndata: %s\n\n" % (event.id, event.kind.encode(), to_bytes(feed_event(event)))
    return FeedLine(event.id, event.experiment, text)


def _page(lines: Sequence[FeedLine], upto: int) -> Told:
    """As many of them as are sent at a time; all of them tell what is up to `upto`."""
    size, texts = 0, list[bytes]()
    for line in lines[:PAGE]:
        if texts and size + len(line.text) > PAGE_BYTES:
            break
        texts.append(line.text)
        size += len(line.text)
    return Told(b"".join(texts), upto if len(texts) == len(lines) else lines[len(texts) - 1].id)


def _id(line: FeedLine) -> int:
    return line.id
