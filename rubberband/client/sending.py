"""How a call is sent: where to, as whom, and how often it is tried. Shared by both clients; no I/O here."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

import rubberband
from rubberband.client.calls import Call
from rubberband.client.words import EventView
from rubberband.errors import InputError, ServiceError

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
    return InputError(f"{url!r} is no address of a service ({why}); write it as {DEFAULT_SERVER}")


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


def reopened_in_s(place: Place, failed: int, error: Exception) -> float | None:
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
class Place:
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
