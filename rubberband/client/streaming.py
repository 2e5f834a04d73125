"""What comes of an asynchronous generator that holds a connection; whoever leaves its loop ends it in order.

A plain generator that is left by `break` is ended by the event loop at some time, and its parts at once with it, each
in the way of the other. Here the client waits until it is ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from typing import Any, Self, TypeVar
from weakref import WeakSet

Item = TypeVar("Item")


class Streams:
    """Those of one client that have not ended."""

    def __init__(self) -> None:
        self._open: WeakSet[Stream[Any]] = WeakSet()
        self._ending: set[asyncio.Task[None]] = set()

    def of(self, items: AsyncGenerator[Item]) -> Stream[Item]:
        """What the generator gives, until it is left or these are closed."""
        stream = Stream(items, self)
        self._open.add(stream)
        return stream

    def left(self, items: AsyncGenerator[Item]) -> None:
        """End what nobody reads any more, if an event loop runs that can."""
        with suppress(RuntimeError):
            loop = asyncio.get_running_loop()
            task = loop.create_task(_end(items))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """Wait until all are ended; one that is being read at this moment ends with its connection. Idempotent."""
        for stream in tuple(self._open):
            with suppress(RuntimeError):
                await stream.aclose()
        while self._ending:
            await asyncio.wait(tuple(self._ending))


class Stream(AsyncIterator[Item]):
    """Of one generator."""

    def __init__(self, items: AsyncGenerator[Item], streams: Streams) -> None:
        self._items, self._streams, self._is_over = items, streams, False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Item:
        try:
            return await anext(self._items)
        except BaseException:
            self._is_over = True
            raise

    async def aclose(self) -> None:
        """End it. Idempotent; raises RuntimeError while somebody reads it."""
        await self._items.aclose()
        self._is_over = True

    def __del__(self) -> None:
        if not self._is_over:
            self._streams.left(self._items)


async def _end(items: AsyncGenerator[Item]) -> None:
    await items.aclose()
