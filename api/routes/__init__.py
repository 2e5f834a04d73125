"""The REST routes, and their dependencies: `Serving` (the service), `Known` (an experiment), `Reader` (the caller).

Dependencies that need no thread are async: FastAPI runs all others in its pool of threads.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, Path, Request

from rubberband.api.experiments import ExperimentRuns
from rubberband.api.experiments.admission import Admission
from rubberband.api.plans.previews import Plans
from rubberband.api.problems import FORBIDDEN, NOT_FOUND, UNAUTHENTICATED, HttpProblem
from rubberband.api.security import SIGN_IN, STRANGER, Authenticator
from rubberband.api.settings import Settings
from rubberband.api.store import Store
from rubberband.api.store.schema import NOBODY, Principal, Scope
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
            description="The experiment's name.", examples=["digits-sha"], json_schema_extra={"pattern": NAME_PATTERN}
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


# Scopes of routes. The middleware (rubberband.api.security.middleware) has authenticated the caller. Without it, a
# route is open only if the service needs no tokens.


def principal_of(request: Request) -> Principal:
    """Return the caller; STRANGER if it is unknown and the service requires tokens."""
    found: Principal | None = getattr(request.state, "principal", None)
    if found is not None:
        return found
    service = getattr(request.app.state, "service", None)
    return STRANGER if service is not None and service.settings.auth else NOBODY


async def always() -> bool:
    """Return True: the caller needs no token."""
    return True


def still_allowed(request: Request) -> Callable[[], Awaitable[bool]]:
    """Return a check whether the credential of a long request is still valid.

    It reads the store at most every few seconds. It raises JournalError if the store cannot be read.
    """
    found: Callable[[], Awaitable[bool]] = getattr(request.state, "still_allowed", always)
    return found


def caller_of(request: Request) -> str:
    """Return the key for limits and turns: the token's id, or the address."""
    found: str = getattr(request.state, "caller", "")
    return found


def needs(scope: Scope) -> Callable[[Request], Awaitable[Principal]]:
    """Return a dependency: the caller, if it has `scope`. Raises Problem otherwise."""

    async def allowed(request: Request) -> Principal:
        principal = principal_of(request)
        if principal is STRANGER:
            raise HttpProblem(UNAUTHENTICATED, SIGN_IN, headers={"WWW-Authenticate": "Bearer"})
        if not principal.may(scope):
            raise HttpProblem(
                FORBIDDEN, f"this needs the scope {scope}; the token {principal.name!r} has {principal.scope}"
            )
        return principal

    allowed.__name__ = f"needs_{scope}"
    return allowed


Reader = Annotated[Principal, Depends(needs("read"))]
Submitter = Annotated[Principal, Depends(needs("submit"))]
Admin = Annotated[Principal, Depends(needs("admin"))]


def authenticator_of(request: Request) -> Authenticator:
    """Return the authenticator of the app."""
    found: Authenticator = request.state.authenticator
    return found
