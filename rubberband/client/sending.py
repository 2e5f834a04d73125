"""How both clients send a call (where to, as whom, how often), and what its failure is raised as. No I/O here."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

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
"""A stream of events is never silent for longer than its heartbeats are apart."""
RECONNECT_S = 0.25
"""Before a stream that the service has ended is opened again."""
MOST_REOPENED = 30
"""A stream that was open once is opened again so often: for about as long as the service's store may be away."""
_AGAIN = (429, 502, 503, 504)


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where the service is, and as whom it is asked."""

    url: str
    token: str | None

    @classmethod
    def of(cls, url: str | None, token: str | None, environment: Mapping[str, str] = os.environ) -> Address:
        """What is given, or else RUBBERBAND_SERVER and RUBBERBAND_TOKEN. Raises InputError for what is no URL."""
        found = (url or environment.get("RUBBERBAND_SERVER") or DEFAULT_SERVER).rstrip("/")
        try:
            parsed = httpx.URL(found)
        except httpx.InvalidURL as error:
            raise _no_url(found, str(error)) from None
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise _no_url(found, "it has no scheme and host")
        return cls(url=found, token=token or environment.get("RUBBERBAND_TOKEN") or None)

    def options(self) -> dict[str, Any]:
        """What an httpx client is made with."""
        headers = {"User-Agent": f"rubberband/{rubberband.__version__}"}
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token}"
        return {"base_url": self.url, "headers": headers, "timeout": TIMEOUT}


def _no_url(url: str, why: str) -> InputError:
    return InputError(f"{url!r} is not the address of a service ({why}); write it as {DEFAULT_SERVER}")


def wait_s(call: Call[Any], tried: int, answer: httpx.Response | None) -> float | None:
    """How long to wait before a call is sent again, that was `tried` so often; None: it is not.

    `answer` is the service's; None if there was none. Waits grow and vary, so that clients do not come back as one.
    """
    if tried >= MOST_TRIES or not call.may_be_repeated:
        return None
    if answer is not None and answer.status_code not in _AGAIN and not _is_being_served(answer):
        return None
    told = None if answer is None else answer.headers.get("Retry-After", "")
    if told and told.isascii() and told.isdigit():
        return min(float(told), LONGEST_WAIT_S)
    longest_s: float = 0.25 * 2.0**tried
    return min(longest_s, LONGEST_WAIT_S) * random.uniform(0.5, 1.0)


def reopened_in_s(place: FeedPlace, failed: int, error: Exception) -> float | None:
    """How long to wait before a stream is opened again, which `failed` so often in a row; None: it is not."""
    if isinstance(error, ServiceError) and error.status not in _AGAIN:
        return None
    if failed >= (MOST_REOPENED if place.was_open else MOST_TRIES):
        return None
    longest_s: float = 0.25 * 2.0**failed
    return min(longest_s, LONGEST_WAIT_S) * random.uniform(0.5, 1.0)


def _is_being_served(answer: httpx.Response) -> bool:
    """Whether the same request came in before, and is not answered yet."""
    return answer.status_code == 409 and b"/problems/idempotency-key-busy" in answer.content


@dataclass(slots=True)
class FeedPlace:
    """Where a reader of the feed is: what comes again after a reconnection is left out."""

    last_id: int | None
    was_open: bool = False
    """Whether the service sent events, or was about to."""

    def headers(self) -> dict[str, str]:
        """Of the next connection."""
        return {} if self.last_id is None else {"Last-Event-ID": str(self.last_id)}

    def next(self, data: str) -> EventView | None:
        """The event that was sent, if it is a new one; how long to wait, say, is sent as well and is none."""
        if not data:
            return None
        event: EventView = json.loads(data)
        if self.last_id is not None and event["id"] <= self.last_id:
            return None
        self.last_id = event["id"]
        return event


# The service's problems as the exceptions that the same mistake raises without a service.


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
    """Raise what a response stands for, unless it is a success; its body must have been read.

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
    raise ServiceError(f"{_where(response)} answered {response.status_code}: {detail}", status=response.status_code)


def unreachable(url: str, error: Exception) -> ServiceError:
    """What a service that does not answer is told as."""
    told = " ".join(str(error).split()) or type(error).__name__
    if "CERTIFICATE_VERIFY_FAILED" in told:
        remedy = "name the file of the authority that signed it in SSL_CERT_FILE"
    else:
        remedy = "start one with `rubberband serve`, or set RUBBERBAND_SERVER"
    return ServiceError(f"the service at {url} does not answer ({told}); {remedy}", status=None)


def _remedy(told: dict[str, Any]) -> Remedy:
    changes = tuple(Change(key=one["key"], value=one["value"], was=one["was"]) for one in told["changes"])
    figures = {name: told[name] for name in ("jct_s", "cost_usd", "later_s", "dearer_usd")}
    return Remedy(changes=changes, **figures)


def _problem(response: httpx.Response) -> dict[str, Any]:
    try:
        found = json.loads(response.content)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _where(response: httpx.Response) -> str:
    return f"{response.request.method} {response.request.url.copy_with(userinfo=None, query=None)}"
