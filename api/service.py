"""The parts of the service, put together once for each app; routes are given them as `Serving`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from rubberband.api.experiments.service import Runs
from rubberband.api.feed import Feed
from rubberband.api.plans.previews import Plans
from rubberband.api.settings import Settings
from rubberband.api.store.protocol import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """Everything that a route may need."""

    settings: Settings
    store: Store
    plans: Plans
    runs: Runs
    feed: Feed


async def service_of(request: Request) -> Service:
    """The service that the app was made with. Async, since FastAPI asks a thread for all that is not."""
    found: Service = request.app.state.service
    return found


Serving = Annotated[Service, Depends(service_of)]
