"""`/v1/events`: server-sent events from the feed, each once and in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import Field
from pydantic.json_schema import SkipJsonSchema
from starlette.concurrency import run_in_threadpool

from rubberband.api.security.authentication import Reader, always, still_allowed
from rubberband.api.service import NAME_PATTERN, Service, Serving
from rubberband.api.store.sql import Store
from rubberband.api.web.answers import HEAD
from rubberband.api.web.openapi import only_documented, refusals
from rubberband.api.web.problems import EVENTS_GONE, MALFORMED, HttpProblem
from rubberband.errors import JournalError
from rubberband.units import shown

router = APIRouter(tags=["events"], prefix="/v1", dependencies=[Depends(only_documented)])

HEARTBEAT_S = 15.0
"""A silent stream sends a comment at this interval, so that proxies keep it open."""
CHECK_S = 2.0
"""Interval of checking that the reader's token or session is still valid."""
MAX_ID = (1 << 63) - 1
_MEDIA_TYPE = "text/event-stream"
_EXAMPLE = """\
retry: 1000

id: 42
event: TrialReported
data: {"id":42,"experiment":"digits-sha","seq":17,"kind":"TrialReported","occurred_at":1767225600.0,"data":{"trial":3}}

"""


@router.get(
    "/events",
    summary="Follow events",
    operation_id="streamEvents",
    response_class=StreamingResponse,
    response_model=None,
    responses={
        200: {
            "description": "A stream that ends with the service, your token or session; reconnect with the last id.",
            "content": {_MEDIA_TYPE: {"schema": {"type": "string"}, "example": _EXAMPLE}},
        },
        **refusals(MALFORMED, EVENTS_GONE),
    },
)
async def stream_events(
    request: Request,
    service: Serving,
    _reader: Reader,
    experiment: Annotated[
        str | None, Query(pattern=NAME_PATTERN, description="Only events of this experiment.", examples=["digits-sha"])
    ] = None,
    after: Annotated[
        Annotated[int, Field(ge=0, le=MAX_ID)] | Literal["latest"] | SkipJsonSchema[None],
        Query(
            description="Only events after this id, all of which must still be kept; `latest` for new events only. "
            "Default: all kept events.",
        ),
    ] = None,
    last_event_id: Annotated[
        str | None,
        Header(
            alias="Last-Event-ID",
            description="Same as `after`, and takes precedence over it. Browsers send it when they reconnect.",
            json_schema_extra={"pattern": "^[0-9]{1,19}$"},
        ),
    ] = None,
) -> Response:
    """Every event of every experiment, in one order. An id that is greater than any there is goes on from the end."""
    begin = after if last_event_id is None else _id(last_event_id)
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    start = await run_in_threadpool(_start, service.store, begin, experiment)
    if HEAD in request.scope:
        return Response(status_code=200, headers=headers, media_type=_MEDIA_TYPE)
    told = stream(service, start, experiment, still_allowed(request))
    return StreamingResponse(told, headers=headers, media_type=_MEDIA_TYPE)


async def stream(
    service: Service,
    after: int,
    experiment: str | None,
    may_read: Callable[[], Awaitable[bool]] = always,
    heartbeat_s: float = HEARTBEAT_S,
) -> AsyncIterator[bytes]:
    """Yield events past `after` as they arrive, until the service or the reader's token or session ends."""
    feed, clock = service.feed, asyncio.get_running_loop().time
    yield b"retry: 1000\n\n"
    told_at = clock()
    try:
        while not feed.closed and await may_read():
            seen = feed.wakes
            told = await feed.past(after, experiment)
            after = told.upto
            quiet_s = heartbeat_s - (clock() - told_at)
            if not told.text and quiet_s > 0:
                await feed.wait(seen, min(quiet_s, CHECK_S))
                continue
            yield told.text or b": still here\n\n"
            told_at = clock()
    except JournalError:
        return  # the watcher has logged it; the client reconnects, and gets the error


def _start(store: Store, begin: int | Literal["latest"] | None, experiment: str | None) -> int:
    """Return the id after which a stream begins. Raises Problem if events after `begin` were deleted."""
    if isinstance(begin, int) and begin < (gone := store.last_pruned_id(experiment)):
        raise HttpProblem(
            EVENTS_GONE,
            f"the events after {begin} up to {gone} were deleted; leave out `after` and Last-Event-ID for all kept "
            "events, or give after=latest, and read earlier events from the experiments",
            oldest=gone,
        )
    last = store.last_feed_id()
    return last if begin == "latest" else min(begin or 0, last)


def _id(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(MAX_ID))):
        raise HttpProblem(
            MALFORMED, f"Last-Event-ID {shown(text)} is not an event id; send the last id received, or none"
        )
    return min(int(text), MAX_ID)
