"""Clients of the service: `Client`, and `AsyncClient` for event loops of asyncio.

with rubberband.Client("http://127.0.0.1:8265") as client:
    print(client.plan("digits.yaml")["prediction"]["cost_usd"]["mean"])
    client.submit("digits.yaml")
    print(client.wait("digits")["summary"]["best_value"])
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, suppress
from itertools import count
from typing import Any, Self, TypeVar
from weakref import WeakSet

import httpx
from httpx_sse import aconnect_sse, connect_sse

from rubberband.client.calls import Call, Calls, EventView, ExperimentDetail, Items, waiting
from rubberband.client.sending import (
    FEED_FAILURES,
    RECONNECT_S,
    STREAM_TIMEOUT,
    FeedPlace,
    answer_of,
    connection,
    raise_for,
    wait_s,
)

T = TypeVar("T")


class Client(Calls):
    """Client of a `rubberband serve`, safe to use from several threads. Close it, or use it in a `with`.

    A method that is shown to return `Call[X]` returns an `X`; with `Items[X]` it is an iterator over `X`.

    Every method raises the same errors as without a service (InputError, NameTakenError, InfeasibleError, …), and
    ServiceError if the service does not answer or fails. Calls are retried a few times where that is safe.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
        **options: Any,
    ) -> None:
        """By default `url` is RUBBERBAND_SERVER, `token` RUBBERBAND_TOKEN; `options` go to httpx.Client."""
        found = connection(url, token)
        self._url = found["base_url"]
        self._http = httpx.Client(**{**found, "transport": transport, **options})
        self._sleep = sleep

    def wait(self, name: str, *, timeout_s: float | None = None, every_s: float = 1.0) -> ExperimentDetail:
        """Wait until the experiment has ended, or only a resume continues it. Raises ServiceError after `timeout_s`."""
        (found,) = self._each(waiting(name, timeout_s, every_s))
        return found

    def events(self, experiment: str | None = None, *, after: int | None = None) -> Iterator[EventView]:
        """Iterate without end over the events of the feed after the id `after`, or over all; each once and in order.

        A lost connection is opened again where it was, also while the service's store is away. Raises ServiceError
        if that fails for long.
        """
        place = FeedPlace(after, self.url)
        while True:
            try:
                yield from self._stream(experiment, place)
                self._sleep(RECONNECT_S)
            except FEED_FAILURES as error:
                self._sleep(place.pause_s(error))

    def _stream(self, experiment: str | None, place: FeedPlace) -> Iterator[EventView]:
        with connect_sse(self._http, **place.request(experiment), timeout=STREAM_TIMEOUT) as source:
            if not source.response.is_success:
                source.response.read()
                raise_for(source.response)
            place.was_open = True
            for sent in source.iter_sse():
                if (event := place.next(sent.data)) is not None:
                    yield event

    def _each(self, steps: Items[T]) -> Iterator[T]:
        """Take the steps, and yield the items."""
        answer: Any = None
        with suppress(StopIteration):
            while True:
                step = steps.send(answer)
                answer = None
                if isinstance(step, Call):
                    answer = self._send(step)
                elif isinstance(step, list):
                    yield from step
                else:
                    self._sleep(step)

    def _send(self, described: Call[T] | Callable[[], Call[T]]) -> T:
        call = described if isinstance(described, Call) else described()
        for tried in count(1):
            outcome: httpx.Response | httpx.TransportError
            try:
                outcome = self._http.request(call.method, call.path, **call.options())
            except httpx.TransportError as error:
                outcome = error
            pause_s = wait_s(call, tried, outcome)
            if pause_s is None:
                break
            self._sleep(pause_s)
        return answer_of(call, outcome, self.url)

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient(Calls):
    """Client of a `rubberband serve` for an event loop. Close it, or use it in an `async with`.

    A method that is shown to return `Call[X]` returns an `X` if awaited; with `Items[X]` it is for `async for`.

    Every method raises the same errors as without a service (InputError, NameTakenError, InfeasibleError, …), and
    ServiceError if the service does not answer or fails. Calls are retried a few times where that is safe.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        **options: Any,
    ) -> None:
        """By default `url` is RUBBERBAND_SERVER, `token` RUBBERBAND_TOKEN; `options` go to httpx.AsyncClient."""
        found = connection(url, token)
        self._url = found["base_url"]
        self._http = httpx.AsyncClient(**{**found, "transport": transport, **options})
        self._sleep = sleep
        self._streams = _Streams()

    async def wait(self, name: str, *, timeout_s: float | None = None, every_s: float = 1.0) -> ExperimentDetail:
        """Wait until the experiment has ended, or only a resume continues it. Raises ServiceError after `timeout_s`."""
        (found,) = [item async for item in self._each(waiting(name, timeout_s, every_s))]
        return found

    def events(self, experiment: str | None = None, *, after: int | None = None) -> AsyncIterator[EventView]:
        """Iterate without end over the events of the feed after the id `after`, or over all; each once and in order.

        A lost connection is opened again where it was, also while the service's store is away. Raises ServiceError
        if that fails for long.
        """
        return self._streams.of(self._events(experiment, FeedPlace(after, self.url)))

    async def _events(self, experiment: str | None, place: FeedPlace) -> AsyncGenerator[EventView]:
        while True:
            try:
                async with aclosing(self._stream(experiment, place)) as events:
                    async for event in events:
                        yield event
                await self._sleep(RECONNECT_S)
            except FEED_FAILURES as error:
                await self._sleep(place.pause_s(error))

    async def _stream(self, experiment: str | None, place: FeedPlace) -> AsyncGenerator[EventView]:
        async with aconnect_sse(self._http, **place.request(experiment), timeout=STREAM_TIMEOUT) as source:
            if not source.response.is_success:
                await source.response.aread()
                raise_for(source.response)
            place.was_open = True
            async with aclosing(source.aiter_sse()) as all_sent:
                async for sent in all_sent:
                    if (event := place.next(sent.data)) is not None:
                        yield event

    async def _each(self, steps: Items[T]) -> AsyncIterator[T]:
        """Take the steps, and yield the items."""
        answer: Any = None
        with suppress(StopIteration):
            while True:
                step = steps.send(answer)
                answer = None
                if isinstance(step, Call):
                    answer = await self._send(step)
                elif isinstance(step, list):
                    for item in step:
                        yield item
                else:
                    await self._sleep(step)

    async def _send(self, described: Call[T] | Callable[[], Call[T]]) -> T:
        call = described if isinstance(described, Call) else described()
        for tried in count(1):
            outcome: httpx.Response | httpx.TransportError
            try:
                outcome = await self._http.request(call.method, call.path, **call.options())
            except httpx.TransportError as error:
                outcome = error
            pause_s = wait_s(call, tried, outcome)
            if pause_s is None:
                break
            await self._sleep(pause_s)
        return answer_of(call, outcome, self.url)

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        await self._streams.close()
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _Streams:
    """Open streams of a client.

    When a loop leaves an asynchronous generator by `break`, the event loop closes it later. It then also closes the
    generators inside it at the same time, which fails. Here each is closed in order, and `close` waits for all.
    """

    def __init__(self) -> None:
        self._open: WeakSet[_Stream[Any]] = WeakSet()
        self._closing: set[asyncio.Task[None]] = set()

    def of(self, items: AsyncGenerator[T]) -> _Stream[T]:
        """Return the generator's items as a stream."""
        stream = _Stream(items, self)
        self._open.add(stream)
        return stream

    def left(self, items: AsyncGenerator[Any]) -> None:
        """Close a generator that has no reader any more, if an event loop runs."""
        with suppress(RuntimeError):
            task = asyncio.get_running_loop().create_task(_close(items))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Wait until all are closed. One that is being read at this moment ends with its connection. Idempotent."""
        for stream in tuple(self._open):
            with suppress(RuntimeError):
                await stream.aclose()
        while self._closing:
            await asyncio.wait(tuple(self._closing))


class _Stream(AsyncIterator[T]):
    """Items of a generator that holds a connection."""

    def __init__(self, items: AsyncGenerator[T], streams: _Streams) -> None:
        self._items, self._streams, self._is_over = items, streams, False

    async def __anext__(self) -> T:
        try:
            return await anext(self._items)
        except BaseException:
            self._is_over = True
            raise

    async def aclose(self) -> None:
        """Close it. Idempotent; raises RuntimeError while it is being read."""
        await self._items.aclose()
        self._is_over = True

    def __del__(self) -> None:
        if not self._is_over:
            self._streams.left(self._items)


async def _close(items: AsyncGenerator[Any]) -> None:
    await items.aclose()
