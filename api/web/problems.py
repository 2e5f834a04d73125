"""The kinds of problems, which the service answers as `application/problem+json` (RFC 9457).

Every problem has `type` (a path of this service that explains it), `title`, `status`, `detail` (one line: problem,
value, limit, remedy), and fields for programs, such as `nearest` of an infeasible plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rubberband.errors import (
    DamagedJournalError,
    InfeasibleError,
    InputError,
    JournalError,
    NameTakenError,
    ProfileMissingError,
    ProviderError,
    RubberbandError,
)

MEDIA_TYPE = "application/problem+json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Kind of problem."""

    slug: str
    """Last part of its type: `/problems/{slug}`."""
    status: int
    title: str

    def to_json(self) -> dict[str, Any]:
        """Return the fields that all problems of this kind have."""
        return {"type": f"/problems/{self.slug}", "title": self.title, "status": self.status}


MALFORMED = Kind(slug="malformed", status=400, title="The request cannot be read")
UNAUTHENTICATED = Kind(slug="unauthenticated", status=401, title="A token is needed")
FORBIDDEN = Kind(slug="forbidden", status=403, title="The token does not allow this")
FOREIGN_HOST = Kind(slug="foreign-host", status=421, title="This host is not served")
FOREIGN_ORIGIN = Kind(slug="foreign-origin", status=403, title="A page of another site sent this")
NOT_FOUND = Kind(slug="not-found", status=404, title="Not found")
METHOD = Kind(slug="method-not-allowed", status=405, title="The method is not allowed")
TOO_SLOW = Kind(slug="too-slow", status=408, title="The request timed out")
EVENTS_GONE = Kind(slug="events-gone", status=410, title="Some of these events were deleted")
TOO_LARGE = Kind(slug="too-large", status=413, title="The body is too large")
MEDIA = Kind(slug="unsupported-media-type", status=415, title="The content type is not supported")
INVALID = Kind(slug="invalid", status=422, title="The input is not valid")
REFUSED = Kind(slug="not-allowed-here", status=422, title="The operator does not allow this here")
PROFILE_MISSING = Kind(slug="profile-missing", status=422, title="Planning needs a profile")
INFEASIBLE = Kind(slug="infeasible", status=422, title="No plan meets the constraints")
NAME_TAKEN = Kind(slug="name-taken", status=409, title="The name is taken")
CONFLICT = Kind(slug="conflict", status=409, title="The experiment's state does not allow this")
KEY_REUSED = Kind(slug="idempotency-key-reused", status=422, title="The Idempotency-Key belongs to another request")
KEY_BUSY = Kind(slug="idempotency-key-busy", status=409, title="The request with this Idempotency-Key is being served")
RATE = Kind(slug="too-many-requests", status=429, title="Too many requests")
PROVIDER = Kind(slug="provider", status=502, title="The cloud provider failed")
UNAVAILABLE = Kind(slug="unavailable", status=503, title="The service is unavailable")
TOO_LONG = Kind(slug="planning-too-long", status=422, title="Planning took too long")
INTERNAL = Kind(slug="internal", status=500, title="The service failed")

KINDS: tuple[Kind, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Kind))


class HttpProblem(Exception):
    """Raised by routes; answered as problem+json with the status of its kind."""

    def __init__(
        self,
        kind: Kind,
        detail: str,
        *,
        headers: Mapping[str, str] | None = None,
        **extensions: Any,
    ) -> None:
        super().__init__(detail)
        self.kind = kind
        detail = " ".join(detail.split())
        self.detail = detail if len(detail) <= MOST_TOLD else f"{detail[: MOST_TOLD - 1]}…"
        self.headers = dict(headers or {})
        self.extensions = extensions

    def to_json(self) -> dict[str, Any]:
        """Return the body of the answer."""
        return self.kind.to_json() | {"detail": self.detail} | self.extensions


MOST_TOLD = 2000
"""Longest detail in characters; it may quote a request."""


def problem_of(error: RubberbandError) -> HttpProblem:
    """Return an error with a message for users as a problem."""
    detail = str(error)
    match error:
        case InfeasibleError():
            nearest = {"jct_s": error.shortest_jct_s, "cost_usd": error.cheapest_usd}
            return HttpProblem(INFEASIBLE, detail, nearest=nearest)
        case NameTakenError():
            return HttpProblem(NAME_TAKEN, detail)
        case ProfileMissingError():
            return HttpProblem(PROFILE_MISSING, detail)
        case InputError():
            return HttpProblem(INVALID, detail)
        case ProviderError():
            return HttpProblem(PROVIDER, detail)
        case DamagedJournalError():
            return HttpProblem(CONFLICT, detail)
        case JournalError():
            return HttpProblem(UNAVAILABLE, detail, headers={"Retry-After": "5"})
    return HttpProblem(INTERNAL, detail)
