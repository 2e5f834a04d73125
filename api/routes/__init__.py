"""The REST routes. Their dependencies are here: the service as `Serving`, the experiment of a path as `Known`.

Dependencies that need no thread are async: FastAPI runs all others in its pool of threads.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, Path, Request

from rubberband.api.experiments.admission import Admission
from rubberband.api.experiments.service import ExperimentRuns
from rubberband.api.plans.previews import Plans
from rubberband.api.problems import NOT_FOUND, HttpProblem
from rubberband.api.settings import Settings
from rubberband.api.store.sql import Store
from rubberband.units import shown
from rubberband.values.submission import Submission

if TYPE_CHECKING:
    from rubberband.api.routes.events import EventFeed

NAME_PATTERN = "^[a-z0-9-]{1,63}$"


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """Parts of the service, made once for each app."""

    settings: Settings
    store: Store
    plans: Plans
    runs: ExperimentRuns
    feed: EventFeed

    @property
    def admission(self) -> Admission | None:
        """Promises of the pool; None without a pool."""
        return self.runs.admission


async def service_of(request: Request) -> Service:
    """Return the service that the app was made with."""
    found: Service = request.app.state.service
    return found


Serving = Annotated[Service, Depends(service_of)]


async def checked_name(
    name: Annotated[
        str,
        Path(
            description="The experiment's name.",
            examples=["digits-sha"],
            json_schema_extra={"pattern": NAME_PATTERN},
        ),
    ],
) -> str:
    """Return the name in the path. Raises Problem NOT_FOUND, and no INVALID, for a name that no experiment can have."""
    if re.fullmatch(r"[a-z0-9-]{1,63}", name) is None:
        raise _unknown(name)
    return name


def known_experiment(name: Annotated[str, Depends(checked_name)], service: Serving) -> Submission:
    """Return the experiment of the path. Raises Problem NOT_FOUND."""
    found = service.store.submission(name)
    if found is None:
        raise _unknown(name)
    return found


def _unknown(name: str) -> HttpProblem:
    return HttpProblem(
        NOT_FOUND, f"experiment {shown(name)} not found; `rubberband ps` (GET /v1/experiments) lists all"
    )


Known = Annotated[Submission, Depends(known_experiment)]
