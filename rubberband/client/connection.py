"""Connection of a client to its service: the address, and the place in the feed of events."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from httpx_sse import SSEError

import rubberband
from rubberband.client import calls
from rubberband.client.calls import unreachable
from rubberband.client.models import EventView, ExperimentDetail
from rubberband.errors import InputError, ServiceError

DEFAULT_SERVER = "http://127.0.0.1:8642"
TIMEOUT = httpx.Timeout(60.0, connect=5.0)
STREAM_TIMEOUT = httpx.Timeout(5.0, read=45.0)
"""A stream of events has heartbeats, closer together than this."""
RECONNECT_S = 0.25
"""Pause before a stream that the service has closed is opened again."""
MOST_REOPENED = 30
"""Attempts to reopen a stream that was open once: they last about as long as the service's store may be away."""


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
    return InputError(f"{_shown(url)!r} is not the address of a service ({why}); write it as {DEFAULT_SERVER}")


def _shown(url: str) -> str:
    """Return an address, also one that is none, without user and password."""
    return re.sub(r"//[^/?#]*@", "//", url)


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
        is_final = isinstance(error, ServiceError) and error.status not in calls.BUSY
        if is_final or self.failed >= (MOST_REOPENED if self.was_open else calls.MOST_TRIES):
            raise error if isinstance(error, ServiceError) else unreachable(self.url, error) from None
        return calls.varied_s(self.failed)


class Connected:
    """Client of a service at an address."""

    _url: str

    @property
    def url(self) -> str:
        """Address of the service, without user and password."""
        return _shown(self._url)


def require_time(found: ExperimentDetail, until: float | None, timeout_s: float | None) -> None:
    """Raise ServiceError once an experiment was waited for too long."""
    if until is not None and time.monotonic() >= until:
        text = f"{found['name']} is still {found['state']} after {timeout_s:g} s; wait longer"
        raise ServiceError(text, status=None)
