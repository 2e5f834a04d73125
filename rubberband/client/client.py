"""The synchronous client of the service.

with rubberband.Client("http://127.0.0.1:8265") as client:
    print(client.plan("digits.yaml")["prediction"]["cost_usd"]["mean"])
    client.submit("digits.yaml")
    print(client.wait("digits")["summary"]["best_value"])
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
from httpx_sse import SSEError, connect_sse

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

Answer = TypeVar("Answer")


class Client:
    """Asks a service of `rubberband serve`. Safe to use from several threads; close it, or use it in a `with`.

    Every method raises what the same mistake raises without a service (InputError, NameTakenError, InfeasibleError, …),
    and ServiceError where the service does not answer or fails. Calls that may be repeated are, a few times.
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
        self._address = Address.of(url, token)
        self._http = httpx.Client(**{**self._address.options(), "transport": transport, **options})
        self._sleep = sleep

    @property
    def url(self) -> str:
        """Of the service."""
        return self._address.url

    def plan(
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
        return self._send(calls.plan(experiment, overrides, policy, frontier, seed))

    def stored_plan(self, id: str) -> dict[str, Any]:
        """A plan of an earlier preview."""
        return self._send(calls.stored_plan(id))

    def submit(
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
        return self._send(calls.submit(experiment, overrides, policy, plan, idempotency_key))

    def experiments(self, *states: State) -> Iterator[ExperimentView]:
        """The experiments (in one of the states, if some are given), newest first."""
        cursor: str | None = None
        while True:
            page = self._send(calls.experiments(states, 100, cursor))
            yield from page["items"]
            cursor = page["next"]
            if cursor is None:
                return

    def experiment(self, name: str) -> ExperimentDetail:
        """One experiment: where it stands, its stages, its forecast."""
        return self._send(calls.experiment(name))

    def trials(self, name: str, *, curves: bool = False) -> Iterator[dict[str, Any]]:
        """Its trials, with their learning `curves` if asked."""
        cursor: str | None = None
        while True:
            page = self._send(calls.part(name, "trials", {"curves": curves, "limit": 500, "cursor": cursor}))
            yield from page["items"]
            cursor = page["next"]
            if cursor is None:
                return

    def allocations(self, name: str) -> dict[str, Any]:
        """Its instances, what their GPUs did, and what was planned."""
        return self._send(calls.part(name, "allocations"))

    def costs(self, name: str) -> dict[str, Any]:
        """Its bill, by stage and instance."""
        return self._send(calls.part(name, "costs"))

    def decisions(self, name: str) -> dict[str, Any]:
        """What was decided at each SYNC, and how its limits were extended."""
        return self._send(calls.part(name, "decisions"))

    def report(self, name: str) -> dict[str, Any]:
        """Its result, as `rubberband report -o json` prints it."""
        return self._send(calls.part(name, "report"))

    def logs(
        self,
        name: str,
        *,
        trial: int | None = None,
        source: str = "trials",
        follow: bool = False,
        every_s: float = 1.0,
    ) -> Iterator[LogLine]:
        """What its trials printed (or, with source="process", its process); to `follow` is to wait until it is over."""
        cursor: str | None = None
        last_look = False
        while True:
            page: LogPage = self._send(calls.logs(name, source, trial, cursor, 1000))
            yield from page["lines"]
            cursor = page["next"]
            if page["lines"]:
                continue
            if not follow or last_look:
                return
            last_look = self.experiment(name)["state"] not in ACTIVE
            if not last_look:
                self._sleep(every_s)

    def cancel(self, name: str, *, idempotency_key: str | None = None) -> ExperimentView:
        """Ask for a clean end: instances are given back, and the best so far is kept."""
        return self._send(calls.cancel(name, idempotency_key))

    def resume(self, name: str, *, idempotency_key: str | None = None) -> ExperimentView:
        """Go on with what was cut off."""
        return self._send(calls.resume(name, idempotency_key))

    def extend(
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
        return self._send(calls.extend(name, deadline, max_cost, dry_run, idempotency_key))

    def prices(self, *types: str, region: str = "us-east-1") -> dict[str, Any]:
        """Resources and prices of instance types."""
        return self._send(calls.prices(types, region))

    def events(self, experiment: str | None = None, *, after: int | None = None) -> Iterator[EventView]:
        """The feed from `after` (None: from its beginning) on, without an end, each event once and in order.

        A connection that is cut is made again, from where it was, also while the service's store is away. Raises
        ServiceError once that fails for long.
        """
        place, failed = FeedPlace(after), 0
        while True:
            try:
                for event in self._stream(experiment, place):
                    failed = 0
                    yield event
                self._sleep(RECONNECT_S)
            except (httpx.TransportError, SSEError, ServiceError) as error:
                failed += 1
                pause_s = reopened_in_s(place, failed, error)
                if pause_s is None:
                    raise error if isinstance(error, ServiceError) else unreachable(self.url, error) from None
                self._sleep(pause_s)

    def _stream(self, experiment: str | None, place: FeedPlace) -> Iterator[EventView]:
        params = {} if experiment is None else {"experiment": experiment}
        with connect_sse(
            self._http, "GET", "/v1/events", params=params, headers=place.headers(), timeout=STREAM_TIMEOUT
        ) as source:
            if not source.response.is_success:
                source.response.read()
                raise_for(source.response)
            place.was_open = True
            for sent in source.iter_sse():
                if (event := place.next(sent.data)) is not None:
                    yield event

    def wait(self, name: str, *, timeout_s: float | None = None, every_s: float = 1.0) -> ExperimentDetail:
        """The experiment once nothing but a resume changes it any more. Raises ServiceError after `timeout_s`."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            found = self.experiment(name)
            if found["state"] not in ACTIVE:
                return found
            if until is not None and time.monotonic() >= until:
                raise ServiceError(f"{name} is still {found['state']} after {timeout_s:g} s; wait longer", status=None)
            self._sleep(every_s)

    def _send(self, call: Call[Answer]) -> Answer:
        tried = 0
        while True:
            tried += 1
            answer: httpx.Response | None = None
            try:
                answer = self._http.request(
                    call.method, call.path, params=call.query(), content=call.content, headers=dict(call.headers)
                )
                failure: httpx.TransportError | None = None
            except httpx.TransportError as error:
                failure = error
            pause_s = None if answer is not None and answer.is_success else wait_s(call, tried, answer)
            if pause_s is not None:
                self._sleep(pause_s)
            elif answer is not None:
                raise_for(answer)
                return call.parse(answer)
            else:
                assert failure is not None, "there is an answer or a failure"
                raise unreachable(self.url, failure) from None

    def close(self) -> None:
        """Let go of the connections. Idempotent."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
