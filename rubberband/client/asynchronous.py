"""Client of the service for event loops of asyncio. Its methods are those of `Client`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import aclosing, suppress
from functools import wraps
from itertools import count
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self
from weakref import WeakSet

import httpx
from httpx_sse import aconnect_sse

from rubberband.client import calls, models
from rubberband.client.calls import (
    FEED_FAILURES,
    RECONNECT_S,
    STREAM_TIMEOUT,
    Call,
    Connected,
    FeedPlace,
    T,
    connection,
    raise_for,
    require_time,
)
from rubberband.client.client import Client
from rubberband.client.models import EventView, ExperimentDetail
from rubberband.states import ACTIVE

P = ParamSpec("P")


def _awaited(
    method: Callable[Concatenate[Client, P], T],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    """Return a method of `Client` for the client whose requests are awaited."""

    @wraps(method)
    async def ask(client: Any, *args: P.args, **options: P.kwargs) -> T:
        answer: Awaitable[T] = method(client, *args, **options)  # type: ignore[assignment]
        return await answer

    return ask  # type: ignore[return-value]


def _iterated(
    method: Callable[Concatenate[Client, P], Iterator[T]],
) -> Callable[Concatenate[AsyncClient, P], AsyncIterator[T]]:
    """Return a method of `Client` that iterates over pages for the client that awaits each."""
    return method  # type: ignore[return-value]


class AsyncClient(Connected):
    """Client of a `rubberband serve` for an event loop. Close it, or use it in an `async with`.

    Its methods are those of `Client`, to be awaited; those that iterate are for `async for`.

    Every method raises the same errors as without a service (InputError, NameTakenError, InfeasibleError, …), and
    ServiceError if the service does not answer or fails. Calls are retried a few times where that is safe.

    Examples:
        >>> import asyncio
        >>> async def names():
        ...     async with rubberband.AsyncClient() as client:
        ...         return [experiment["name"] async for experiment in client.experiments()]
        >>> asyncio.run(names())
        []
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

    plan = _awaited(Client.plan)
    stored_plan = _awaited(Client.stored_plan)
    plan_option = _awaited(Client.plan_option)
    submit = _awaited(Client.submit)
    experiments = _iterated(Client.experiments)
    experiment = _awaited(Client.experiment)
    trials = _iterated(Client.trials)
    allocations = _awaited(Client.allocations)
    costs = _awaited(Client.costs)
    decisions = _awaited(Client.decisions)
    report = _awaited(Client.report)
    save_artifact = _awaited(Client.save_artifact)
    save_checkpoint = _awaited(Client.save_checkpoint)
    cancel = _awaited(Client.cancel)
    resume = _awaited(Client.resume)
    extend = _awaited(Client.extend)
    add = _awaited(Client.add)
    limit = _awaited(Client.limit)
    stop = _awaited(Client.stop)
    tag = _awaited(Client.tag)
    delete = _awaited(Client.delete)
    prices = _awaited(Client.prices)

    async def logs(
        self,
        name: str,
        *,
        trial: int | None = None,
        rank: int | None = None,
        source: str = "trials",
        follow: bool = False,
        every_s: float = 1.0,
    ) -> AsyncIterator[models.LogLine]:
        """Iterate over the output of the trials, as `Client.logs` does."""
        cursor: str | None = None
        is_over = not follow
        while True:
            page = await self._send(calls.logs(name, source, trial, rank, cursor))
            for line in page["lines"]:
                yield line
            goes_on, cursor = bool(page["lines"]) or page["next"] != cursor, page["next"]
            if goes_on:
                continue
            if is_over:
                return
            is_over = (await self.experiment(name))["state"] not in ACTIVE
            if not is_over:
                await self._sleep(every_s)

    async def wait(self, name: str, *, timeout_s: float | None = None, every_s: float = 1.0) -> ExperimentDetail:
        """Wait until the experiment has ended, or only a resume continues it. Raises ServiceError after `timeout_s`."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            found = await self.experiment(name)
            if found["state"] not in ACTIVE:
                return found
            require_time(found, until, timeout_s)
            await self._sleep(every_s)

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

    async def _pages(self, path: str, **params: Any) -> AsyncIterator[Any]:
        cursor: str | None = None
        while True:
            page: dict[str, Any] = await self._send(calls.get(path, cursor=cursor, **params))
            for item in page["items"]:
                yield item
            cursor = page["next"]
            if cursor is None:
                return

    async def _send(self, call: Call[T]) -> T:
        if call.asks_first:
            await self._send(calls.WHO)
        for tried in count(1):
            outcome: httpx.Response | httpx.TransportError
            try:
                outcome = await self._http.request(call.method, call.path, **call.options())
            except httpx.TransportError as error:
                outcome = error
            pause_s = calls.wait_s(call, tried, outcome)
            if pause_s is None:
                break
            await self._sleep(pause_s)
        return calls.answer_of(call, outcome, self.url)

    async def _save(self, call: Call[Any], place: Path) -> Path:
        try:
            with calls.download(place) as file:
                async with self._http.stream(call.method, call.path, **call.options()) as answer:
                    if not answer.is_success:
                        await answer.aread()
                    raise_for(answer)
                    async for part in answer.aiter_bytes():
                        file.write(part)
        except httpx.TransportError as error:
            raise calls.unreachable(self.url, error) from None
        return place

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
