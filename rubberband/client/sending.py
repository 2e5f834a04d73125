"""Rules that both clients share: address and token, retries, and errors. No I/O here."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
from httpx_sse import SSEError

import rubberband
from rubberband.client.calls import Call, EventView
from rubberband.errors import (
    InfeasibleError,
    InputError,
    NameTakenError,
    ProfileMissingError,
    RubberbandError,
    ServiceError,
)
from rubberband.values.plan import Change, Remedy

DEFAULT_SERVER = "http://127.0.0.1:8265"
MOST_TRIES = 4
LONGEST_WAIT_S = 10.0
TIMEOUT = httpx.Timeout(60.0, connect=5.0)
STREAM_TIMEOUT = httpx.Timeout(5.0, read=45.0)
"""A stream of events has heartbeats, closer together than this."""
RECONNECT_S = 0.25
"""Pause before a stream that the service has closed is opened again."""
MOST_REOPENED = 30
"""Attempts to reopen a stream that was open once: they last about as long as the service's store may be away."""
_AGAIN = (429, 502, 503, 504)

T = TypeVar("T")


def connection(url: str | None, token: str | None, environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the options of an httpx client of the service.

    By default, `url` is RUBBERBAND_SERVER and `token` RUBBERBAND_TOKEN. Raises InputError if the URL is invalid.
    """
    found = (url or environment.get("RUBBERBAND_SERVER") or DEFAULT_SERVER).rstrip("/")
    try:
        parsed = httpx.URL(found)
    except httpx.InvalidURL as error:
        raise _no_url(found, str(error)) from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise _no_url(found, "it has no scheme and host")
    headers = {"User-Agent": f"rubberband/{rubberband.__version__}"}
    if token := token or environment.get("RUBBERBAND_TOKEN"):
        headers["Authorization"] = f"Bearer {token}"
    return {"base_url": found, "headers": headers, "timeout": TIMEOUT}


def _no_url(url: str, why: str) -> InputError:
    return InputError(f"{url!r} is not the address of a service ({why}); write it as {DEFAULT_SERVER}")


def wait_s(call: Call[Any], tried: int, outcome: httpx.Response | httpx.TransportError) -> float | None:
    """Return the pause before a call is sent again after `tried` times, or None if it is not sent again.

    Pauses grow and vary, so that clients do not come back at the same time.
    """
    if tried >= MOST_TRIES or not call.may_be_repeated:
        return None
    if isinstance(outcome, httpx.Response):
        if outcome.is_success or (outcome.status_code not in _AGAIN and not _is_being_served(outcome)):
            return None
        wanted = outcome.headers.get("Retry-After", "")
        if wanted.isascii() and wanted.isdigit():
            return min(float(wanted), LONGEST_WAIT_S)
    return _varied_s(tried)


def _varied_s(tried: int) -> float:
    longest_s: float = 0.25 * 2.0**tried
    return min(longest_s, LONGEST_WAIT_S) * random.uniform(0.5, 1.0)


def _is_being_served(answer: httpx.Response) -> bool:
    """Whether the same request came in before, and is not answered yet."""
    return answer.status_code == 409 and b"/problems/idempotency-key-busy" in answer.content


def answer_of(call: Call[T], outcome: httpx.Response | httpx.TransportError, url: str) -> T:
    """Return the answer to a call. Raises what `raise_for` raises, and ServiceError if there is no answer."""
    if not isinstance(outcome, httpx.Response):
        raise unreachable(url, outcome) from None
    raise_for(outcome)
    answer: T = outcome.json()
    return answer


FEED_FAILURES = (httpx.TransportError, SSEError, ServiceError)
"""Errors that end a connection to the feed."""


@dataclass(slots=True)
class FeedPlace:
    """Place of a reader in the feed. Events that are sent again after a reconnection are left out."""

    last_id: int | None
    url: str
    was_open: bool = False
    """Whether the service accepted a connection."""
    failed: int = 0
    """Failures since the last event."""

    def request(self, experiment: str | None) -> dict[str, Any]:
        """Return the options of the next connection."""
        return {
            "method": "GET",
            "url": "/v1/events",
            "params": {} if experiment is None else {"experiment": experiment},
            "headers": {} if self.last_id is None else {"Last-Event-ID": str(self.last_id)},
        }

    def next(self, data: str) -> EventView | None:
        """Return the event that was sent; None for one that is known, and for control messages such as `retry`."""
        if not data:
            return None
        event: EventView = json.loads(data)
        if self.last_id is not None and event["id"] <= self.last_id:
            return None
        self.last_id, self.failed = event["id"], 0
        return event

    def pause_s(self, error: httpx.TransportError | SSEError | ServiceError) -> float:
        """Return the pause before the feed is opened again. Raises ServiceError if that would be in vain."""
        self.failed += 1
        is_final = isinstance(error, ServiceError) and error.status not in _AGAIN
        if is_final or self.failed >= (MOST_REOPENED if self.was_open else MOST_TRIES):
            raise error if isinstance(error, ServiceError) else unreachable(self.url, error) from None
        return _varied_s(self.failed)


# Problem of the service -> the exception of the same mistake without a service.
_TYPES: dict[str, type[RubberbandError]] = {
    "name-taken": NameTakenError,
    "profile-missing": ProfileMissingError,
    "invalid": InputError,
    "malformed": InputError,
    "not-allowed-here": InputError,
    "not-found": InputError,
    "conflict": InputError,
    "too-large": InputError,
    "planning-too-long": InputError,
    "idempotency-key-reused": InputError,
}


def raise_for(response: httpx.Response) -> None:
    """Raise the error that a response reports, if any; its body must have been read.

    Raises InfeasibleError, NameTakenError, ProfileMissingError, InputError (all with the service's own words), or
    ServiceError.
    """
    if response.is_success:
        return
    problem = _problem(response)
    detail = str(problem.get("detail") or f"{response.status_code} {response.reason_phrase}")
    slug = str(problem.get("type", "")).rpartition("/")[2]
    nearest = problem.get("nearest")
    if slug == "infeasible" and isinstance(nearest, dict):
        raise InfeasibleError(
            detail,
            shortest_jct_s=nearest["jct_s"],
            cheapest_usd=nearest["cost_usd"],
            remedies=[_remedy(each) for each in problem.get("remedies", ())],
        )
    if response.status_code == 401:
        raise InputError(f"{detail}; set RUBBERBAND_TOKEN, or give token=")
    if response.status_code == 403:
        raise InputError(detail)
    if slug in _TYPES:
        raise _TYPES[slug](detail)
    where = f"{response.request.method} {response.request.url.copy_with(userinfo=None, query=None)}"
    raise ServiceError(f"{where} answered {response.status_code}: {detail}", status=response.status_code)


def unreachable(url: str, error: Exception) -> ServiceError:
    """Return the error for a service that does not answer."""
    told = " ".join(str(error).split()) or type(error).__name__
    if "CERTIFICATE_VERIFY_FAILED" in told:
        remedy = "name the file of the authority that signed it in SSL_CERT_FILE"
    else:
        remedy = "start one with `rubberband serve`, or set RUBBERBAND_SERVER"
    return ServiceError(f"the service at {url} does not answer ({told}); {remedy}", status=None)


def _remedy(words: dict[str, Any]) -> Remedy:
    changes = tuple(Change(key=one["key"], value=one["value"], was=one["was"]) for one in words["changes"])
    figures = {name: words[name] for name in ("jct_s", "cost_usd", "later_s", "dearer_usd")}
    return Remedy(changes=changes, **figures)


def _problem(response: httpx.Response) -> dict[str, Any]:
    try:
        found = json.loads(response.content)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
