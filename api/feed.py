"""Waiting for the feed: who streams it is woken when there is more to read."""

from __future__ import annotations

import asyncio


class Feed:
    """Wakes the waiting streams of one event loop. The events themselves are in the store."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed: asyncio.Event = asyncio.Event()
        self._wakes = 0
        self._closed = False

    @property
    def wakes(self) -> int:
        """How often there was more to read. Take it before looking at the store, and give it to `wait`."""
        return self._wakes

    @property
    def closed(self) -> bool:
        """Whether streams are to end."""
        return self._closed

    def open(self) -> None:
        """Belong to the running event loop."""
        self._loop, self._closed = asyncio.get_running_loop(), False

    def close(self) -> None:
        """End every stream, for good. May be called from any thread, and from a signal handler. Idempotent."""
        self._closed = True
        self.wake()

    def wake(self) -> None:
        """There is more to read. May be called from any thread."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._wakes += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, seen: int, timeout_s: float) -> bool:
        """Return True once there was more to read since `wakes` was `seen`, or False after `timeout_s`."""
        if self._wakes != seen or self._closed:
            return True
        try:
            await asyncio.wait_for(self._changed.wait(), timeout_s)
        except TimeoutError:
            return False
        return True
