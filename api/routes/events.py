"""What happens, as it happens: server-sent events from the store's feed, each once and in order."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import Field
from starlette.concurrency import run_in_threadpool

from rubberband.api.answers import HEAD
from rubberband.api.documenting import only_documented, refusals
from rubberband.api.names import NAME_PATTERN
from rubberband.api.problems import MALFORMED, Problem
from rubberband.api.security.access import Reader
from rubberband.api.security.tokens import is_live
from rubberband.api.service import Service, Serving
from rubberband.api.store.records import NOBODY, FeedEvent, Principal
from rubberband.api.views_json import feed_event, to_bytes
from rubberband.units import shown

router = APIRouter(tags=["events"], prefix="/v1", dependencies=[Depends(only_documented)])

HEARTBEAT_S = 15.0
"""A comment is sent when there was nothing else for so long, so that nobody on the way thinks that the stream died."""
PAGE = 200
"""Events that are read at a time: a slow client holds no more than these."""
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
    summary="Follow what happens",
    operation_id="streamEvents",
    response_class=StreamingResponse,
    response_model=None,
    responses={
        200: {
            "description": "A stream that ends when the service does; reconnect with the last id.",
            "content": {_MEDIA_TYPE: {"schema": {"type": "string"}, "example": _EXAMPLE}},
        },
        **refusals(MALFORMED),
    },
)
async def stream_events(
    request: Request,
    service: Serving,
    reader: Reader,
    experiment: Annotated[
        str | None, Query(pattern=NAME_PATTERN, description="Only of this experiment.", examples=["digits-sha"])
    ] = None,
    after: Annotated[
        Annotated[int, Field(ge=0, le=MAX_ID)] | Literal["latest"],
        Query(description="Only events past this id; `latest` for none of those that there are."),
    ] = 0,
    last_event_id: Annotated[
        str | None,
        Header(
            alias="Last-Event-ID",
            description="As `after`, and before it: browsers send it when they reconnect.",
            json_schema_extra={"pattern": "^[0-9]{1,19}$"},
        ),
    ] = None,
) -> Response:
    """Every event of every experiment, in one order. An id that is greater than any there is goes on from the end."""
    begin = after if last_event_id is None else _id(last_event_id)
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    if HEAD in request.scope:
        return Response(status_code=200, headers=headers, media_type=_MEDIA_TYPE)
    last = await run_in_threadpool(service.store.last_feed_id)
    start = last if begin == "latest" else min(begin, last)
    return StreamingResponse(stream(service, start, experiment, reader), headers=headers, media_type=_MEDIA_TYPE)


async def stream(
    service: Service,
    after: int,
    experiment: str | None,
    reader: Principal = NOBODY,
    heartbeat_s: float = HEARTBEAT_S,
) -> AsyncIterator[bytes]:
    """The events past `after` as they come, until the service ends or the reader's token does."""
    feed = service.feed
    yield b"retry: 1000\n\n"
    while not feed.closed and await run_in_threadpool(_may_read, service, reader):
        seen = feed.wakes
        events = await run_in_threadpool(service.store.feed, after=after, experiment=experiment, limit=PAGE)
        if events:
            after = events[-1].id
            yield b"".join(map(_event, events))
        elif not await feed.wait(seen, heartbeat_s):
            yield b": still here\n\n"


def _may_read(service: Service, reader: Principal) -> bool:
    """Whether the token that a stream was opened with is still good."""
    if not reader.token:
        return True
    known = service.store.token(reader.token)
    return known is not None and is_live(known[0], at=time.time())


def _event(event: FeedEvent) -> bytes:
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (event.id, event.kind.encode(), to_bytes(feed_event(event)))


def _id(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(MAX_ID))):
        raise Problem(
            MALFORMED, f"Last-Event-ID {shown(text)} is no id of an event; send the last id that came, or none"
        )
    return min(int(text), MAX_ID)
