"""Waiting for the feed: who streams it is woken when there is more to read."""

from __future__ import annotations

import asyncio


class Feed:
    """Wakes the waiting streams of one event loop. The events themselves are in the store."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed: asyncio.Event = asyncio.Event()

    def open(self) -> None:
        """Belong to the running event loop."""
        self._loop = asyncio.get_running_loop()

    def wake(self) -> None:
        """There is more to read. May be called from any thread."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, timeout_s: float) -> None:
        """Return once there is more to read, or after `timeout_s`. Look at the store first, then wait."""
        changed = self._changed
        try:
            await asyncio.wait_for(changed.wait(), timeout_s)
        except TimeoutError:
            return
