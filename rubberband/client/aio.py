"""The client of the service for event loops of asyncio.

async with rubberband.AsyncClient("http://127.0.0.1:8265") as client:
    print((await client.plan("digits.yaml"))["prediction"]["cost_usd"]["mean"])
    await client.submit("digits.yaml")
    print((await client.wait("digits"))["summary"]["best_value"])
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from types import TracebackType
from typing import Any, Self, TypeVar
from weakref import WeakSet

import httpx
from httpx_sse import SSEError, aconnect_sse

from rubberband.client import calls
from rubberband.client.calls import (
    Call,
    EventView,
    ExperimentDetail,
    ExperimentView,
    ExtensionView,
    LogLine,
    LogPage,
    Submittable,
)
from rubberband.client.sending import (
    RECONNECT_S,
    STREAM_TIMEOUT,
    Address,
    FeedPlace,
    raise_for,
    reopened_in_s,
    unreachable,
    wait_s,
)
from rubberband.errors import ServiceError
from rubberband.states import ACTIVE, State

# What comes of an asynchronous generator that holds a connection; whoever leaves its loop ends it in order.
#
# A plain generator that is left by `break` is ended by the event loop at some time, and its parts at once with it,
# each in the way of the other. Here the client waits until it is ended.


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


Answer = TypeVar("Answer")


class AsyncClient:
    """Asks a service of `rubberband serve` from an event loop; close it, or use it in an `async with`.

    Every method raises what the same mistake raises without a service (InputError, NameTakenError, InfeasibleError, …),
    and ServiceError where the service does not answer or fails. Calls that may be repeated are, a few times.
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
        self._address = Address.of(url, token)
        self._http = httpx.AsyncClient(**{**self._address.options(), "transport": transport, **options})
        self._sleep = sleep
        self._streams = Streams()

    @property
    def url(self) -> str:
        """Of the service."""
        return self._address.url

    async def plan(
        self,
        experiment: Submittable,
        *,
        overrides: Sequence[str] = (),
        policy: str = "optimal",
        frontier: bool = False,
        seed: int = 0,
    ) -> dict[str, Any]:
        """Predict what an experiment takes and costs (`rubberband.estimate/1`, and the plan's `id`). Spends nothing.

        `experiment` is one, its words, or the path of its file. Raises InfeasibleError, with the nearest limits.
        """
        return await self._send(calls.plan(experiment, overrides, policy, frontier, seed))

    async def stored_plan(self, id: str) -> dict[str, Any]:
        """A plan of an earlier preview."""
        return await self._send(calls.stored_plan(id))

    async def submit(
        self,
        experiment: Submittable,
        *,
        overrides: Sequence[str] = (),
        policy: str = "optimal",
        plan: str | None = None,
        idempotency_key: str | None = None,
    ) -> ExperimentView:
        """Plan an experiment and start it. Sent again with the same key, it is still started once.

        Raises InfeasibleError if no plan meets its constraints, NameTakenError if there is one of its name.
        """
        return await self._send(calls.submit(experiment, overrides, policy, plan, idempotency_key))

    async def experiments(self, *states: State) -> AsyncIterator[ExperimentView]:
        """The experiments (in one of the states, if some are given), newest first."""
        cursor: str | None = None
        while True:
            page = await self._send(calls.experiments(states, 100, cursor))
            for item in page["items"]:
                yield item
            cursor = page["next"]
            if cursor is None:
                return

    async def experiment(self, name: str) -> ExperimentDetail:
        """One experiment: where it stands, its stages, its forecast."""
        return await self._send(calls.experiment(name))

    async def trials(self, name: str, *, curves: bool = False) -> AsyncIterator[dict[str, Any]]:
        """Its trials, with their learning `curves` if asked."""
        cursor: str | None = None
        while True:
            page = await self._send(calls.part(name, "trials", {"curves": curves, "limit": 500, "cursor": cursor}))
            for item in page["items"]:
                yield item
            cursor = page["next"]
            if cursor is None:
                return

    async def allocations(self, name: str) -> dict[str, Any]:
        """Its instances, what their GPUs did, and what was planned."""
        return await self._send(calls.part(name, "allocations"))

    async def costs(self, name: str) -> dict[str, Any]:
        """Its bill, by stage and instance."""
        return await self._send(calls.part(name, "costs"))

    async def decisions(self, name: str) -> dict[str, Any]:
        """What was decided at each SYNC, and how its limits were extended."""
        return await self._send(calls.part(name, "decisions"))

    async def report(self, name: str) -> dict[str, Any]:
        """Its result, as `rubberband report -o json` prints it."""
        return await self._send(calls.part(name, "report"))

    async def logs(
        self,
        name: str,
        *,
        trial: int | None = None,
        source: str = "trials",
        follow: bool = False,
        every_s: float = 1.0,
    ) -> AsyncIterator[LogLine]:
        """What its trials printed (or, with source="process", its process); to `follow` is to wait until it is over."""
        cursor: str | None = None
        last_look = False
        while True:
            page: LogPage = await self._send(calls.logs(name, source, trial, cursor, 1000))
            for line in page["lines"]:
                yield line
            cursor = page["next"]
            if page["lines"]:
                continue
            if not follow or last_look:
                return
            last_look = (await self.experiment(name))["state"] not in ACTIVE
            if not last_look:
                await self._sleep(every_s)

    async def cancel(self, name: str, *, idempotency_key: str | None = None) -> ExperimentView:
        """Ask for a clean end: instances are given back, and the best so far is kept."""
        return await self._send(calls.cancel(name, idempotency_key))

    async def resume(self, name: str, *, idempotency_key: str | None = None) -> ExperimentView:
        """Go on with what was cut off."""
        return await self._send(calls.resume(name, idempotency_key))

    async def extend(
        self,
        name: str,
        *,
        deadline: str | float | None = None,
        max_cost: str | float | None = None,
        dry_run: bool = True,
        idempotency_key: str | None = None,
    ) -> ExtensionView:
        """What a later deadline or a larger budget would change; with dry_run=False it is granted.

        A `deadline` is a duration from the start, as in the experiment's file, or a time with its zone; `max_cost` is
        in US dollars, such as 5 or "$5".
        """
        return await self._send(calls.extend(name, deadline, max_cost, dry_run, idempotency_key))

    async def prices(self, *types: str, region: str = "us-east-1") -> dict[str, Any]:
        """Resources and prices of instance types."""
        return await self._send(calls.prices(types, region))

    def events(self, experiment: str | None = None, *, after: int | None = None) -> AsyncIterator[EventView]:
        """The feed from `after` (None: from its beginning) on, without an end, each event once and in order.

        A connection that is cut is made again, from where it was, also while the service's store is away. Raises
        ServiceError once that fails for long.
        """
        return self._streams.of(self._events(experiment, FeedPlace(after)))

    async def _events(self, experiment: str | None, place: FeedPlace) -> AsyncGenerator[EventView]:
        failed = 0
        while True:
            try:
                async with aclosing(self._stream(experiment, place)) as events:
                    async for event in events:
                        failed = 0
                        yield event
                await self._sleep(RECONNECT_S)
            except (httpx.TransportError, SSEError, ServiceError) as error:
                failed += 1
                pause_s = reopened_in_s(place, failed, error)
                if pause_s is None:
                    raise error if isinstance(error, ServiceError) else unreachable(self.url, error) from None
                await self._sleep(pause_s)

    async def _stream(self, experiment: str | None, place: FeedPlace) -> AsyncGenerator[EventView]:
        params = {} if experiment is None else {"experiment": experiment}
        async with aconnect_sse(
            self._http, "GET", "/v1/events", params=params, headers=place.headers(), timeout=STREAM_TIMEOUT
        ) as source:
            if not source.response.is_success:
                await source.response.aread()
                raise_for(source.response)
            place.was_open = True
            async with aclosing(source.aiter_sse()) as all_sent:
                async for sent in all_sent:
                    if (event := place.next(sent.data)) is not None:
                        yield event

    async def wait(self, name: str, *, timeout_s: float | None = None, every_s: float = 1.0) -> ExperimentDetail:
        """The experiment once nothing but a resume changes it any more. Raises ServiceError after `timeout_s`."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            found = await self.experiment(name)
            if found["state"] not in ACTIVE:
                return found
            if until is not None and time.monotonic() >= until:
                raise ServiceError(f"{name} is still {found['state']} after {timeout_s:g} s; wait longer", status=None)
            await self._sleep(every_s)

    async def _send(self, call: Call[Answer]) -> Answer:
        tried = 0
        while True:
            tried += 1
            answer: httpx.Response | None = None
            try:
                answer = await self._http.request(
                    call.method, call.path, params=call.query(), content=call.content, headers=dict(call.headers)
                )
                failure: httpx.TransportError | None = None
            except httpx.TransportError as error:
                failure = error
            pause_s = None if answer is not None and answer.is_success else wait_s(call, tried, answer)
            if pause_s is not None:
                await self._sleep(pause_s)
            elif answer is not None:
                raise_for(answer)
                return call.parse(answer)
            else:
                assert failure is not None, "there is an answer or a failure"
                raise unreachable(self.url, failure) from None

    async def close(self) -> None:
        """Let go of the connections. Idempotent."""
        await self._streams.close()
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
