"""Requests that spend money, sent again: the same Idempotency-Key has the same answer, and one effect."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated

from fastapi import Header, Request
from fastapi.responses import Response
from starlette.concurrency import run_in_threadpool

from rubberband.api.problems import KEY_BUSY, KEY_REUSED, Problem
from rubberband.api.store.protocol import Store
from rubberband.api.store.records import KeptAnswer, Principal

IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        pattern="^[!-~]{1,255}$",
        description=(
            "Chosen by the client, anew for each thing that it wants done. A request that is sent again with it (after "
            "a lost answer, say) is not done again: the first answer is sent again, with `Idempotency-Replayed: true`."
        ),
        examples=["8e03978e-40d5-43dd-bc93-6894a57f9324"],
    ),
]
REPLAYED = "Idempotency-Replayed"
_KEPT_HEADERS = ("content-type", "location", "content-location", "cache-control")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request, as far as another one with its key must be the same."""

    key: str | None
    owner: str
    """Id of the token; keys of different tokens have nothing to do with each other."""
    digest: str

    @property
    def request(self) -> str:
        """An id of what is asked for, the same each time it is asked with its key; empty without a key."""
        if self.key is None:
            return ""
        return hashlib.sha256(f"{self.owner}\n{self.digest}\n{self.key}".encode()).hexdigest()[:32]


def asked(request: Request, principal: Principal, key: str | None, body: bytes = b"") -> Asked:
    """What a request asks for."""
    digest = hashlib.sha256()
    for part in (request.method, request.url.path, request.url.query, request.headers.get("content-type", "")):
        digest.update(part.encode() + b"\n")
    digest.update(body)
    return Asked(key=key, owner=principal.token, digest=digest.hexdigest())


async def once(store: Store, request: Asked, act: Callable[[], Awaitable[Response]]) -> Response:
    """The answer of `act`, or the one that it gave when the same was asked before.

    What came to nothing (an error) is not kept: it may be asked again. Raises Problem KEY_REUSED and KEY_BUSY.
    """
    key, owner = request.key, request.owner
    if key is None:
        return await act()
    found = await run_in_threadpool(store.claim_key, key, owner=owner, request_hash=request.digest, at=time.time())
    if isinstance(found, KeptAnswer):
        return Response(found.body, found.status, {**found.headers, REPLAYED: "true"})
    if found is not None:
        raise _refusal(found)
    try:
        answer = await act()
    except Exception:
        await run_in_threadpool(store.free_key, key, owner=owner)
        raise
    if answer.status_code >= 400:
        await run_in_threadpool(store.free_key, key, owner=owner)
    else:
        await run_in_threadpool(store.keep_answer, key, owner=owner, answer=_kept(answer), at=time.time())
    return answer


def _kept(answer: Response) -> KeptAnswer:
    headers = {name: value for name, value in answer.headers.items() if name in _KEPT_HEADERS}
    return KeptAnswer(status=answer.status_code, headers=headers, body=bytes(answer.body))


def _refusal(found: str) -> Problem:
    if found == "reused":
        return Problem(KEY_REUSED, "another request had this Idempotency-Key; make a new one for each new request")
    return Problem(
        KEY_BUSY, "the request with this Idempotency-Key is being served; ask again soon", headers={"Retry-After": "1"}
    )
