"""Other limits as requests ask for them: planned in a process of its own, and granted if nothing changed meanwhile."""

from __future__ import annotations

import asyncio
from functools import partial

from starlette.concurrency import run_in_threadpool

from rubberband.api.problems import UNAVAILABLE, Problem
from rubberband.api.schemas import ExtendBody
from rubberband.api.service import Service
from rubberband.executor.extending import Extension

_TRIES = 5
_PAUSE_S = 0.2
"""The watcher reads a journal somewhat later than the process that plans."""


async def looked_at(service: Service, name: str, limits: ExtendBody, caller: str) -> Extension:
    """What the limits would change. Raises Problem."""
    asked = await run_in_threadpool(
        partial(service.runs.extensions.question, name, deadline=limits.deadline, max_cost_usd=limits.max_cost)
    )
    return asked if isinstance(asked, Extension) else (await service.plans.rest(asked, caller)).extension


async def granted(service: Service, name: str, limits: ExtendBody, caller: str, *, request: str) -> Extension:
    """What they change, and that they are in force; `request` is an id that makes it happen once. Raises Problem.

    What is granted is what was planned: if the experiment has other limits by then, it is planned again.
    """
    extensions = service.runs.extensions
    question = partial(
        extensions.question, name, deadline=limits.deadline, max_cost_usd=limits.max_cost, request=request
    )
    for _ in range(_TRIES):
        asked = await run_in_threadpool(question)
        if isinstance(asked, Extension):
            return asked
        answer = await service.plans.rest(asked, caller)
        found = await run_in_threadpool(extensions.grant, asked, answer, request)
        if found is not None:
            return found
        await asyncio.sleep(_PAUSE_S)
    raise Problem(UNAVAILABLE, f"the limits of {name!r} are changed by others; ask again", headers={"Retry-After": "2"})
