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
from rubberband.values.submission import NoteChangedError

MEDIA_TYPE = "application/problem+json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Kind of problem."""

    slug: str
    """Last part of its type: `/problems/{slug}`."""
    status: int
    title: str
    explanation: str
    """Cause and remedy, for people."""
    example: str = "…"
    """A detail of it."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields that all problems of this kind have."""
        return {"type": f"/problems/{self.slug}", "title": self.title, "status": self.status}


MALFORMED = Kind(
    slug="malformed",
    status=400,
    title="The request cannot be read",
    explanation=(
        "The body is not JSON or YAML, has a key twice, NaN or an infinity, or is nested too deep; or a header is "
        "wrong. The detail says where. Correct it and try again."
    ),
    example="the body is not JSON: Expecting ',' delimiter (line 3, column 5); check quotes and commas",
)
UNAUTHENTICATED = Kind(
    slug="unauthenticated",
    status=401,
    title="A token is needed",
    explanation=(
        "The request has no token, or one that is unknown, expired or revoked. Send `Authorization: Bearer TOKEN`; "
        "`rubberband token create NAME` on the service's machine makes one."
    ),
    example="a token is needed; send it as Authorization: Bearer rb_…",
)
FORBIDDEN = Kind(
    slug="forbidden",
    status=403,
    title="The token does not allow this",
    explanation=(
        "The token's scope is too small for this. Scopes are read, submit and admin; each includes those before it. "
        "Ask the operator of the service for another token."
    ),
    example="this needs the scope submit; the token 'ci' has read",
)
FOREIGN_HOST = Kind(
    slug="foreign-host",
    status=421,
    title="This host is not served",
    explanation=(
        "The Host header names a host that the service does not answer for. The operator adds a name with `rubberband"
        " serve --host-name NAME`."
    ),
    example="this service does not answer for the host 'example.org'",
)
FOREIGN_ORIGIN = Kind(
    slug="foreign-origin",
    status=403,
    title="A page of another site sent this",
    explanation="A browser sent this from a page of another site, which is refused. Use the service's own page.",
)
NOT_FOUND = Kind(
    slug="not-found",
    status=404,
    title="Not found",
    explanation="No experiment, plan, token or page has this name. Plans expire: preview again.",
    example="experiment 'digits-sha' not found",
)
METHOD = Kind(
    slug="method-not-allowed",
    status=405,
    title="The method is not allowed",
    explanation="The path exists, but not for this method; the Allow header lists the methods.",
)
TOO_SLOW = Kind(
    slug="too-slow",
    status=408,
    title="The request timed out",
    explanation="The request's body did not arrive in time. Send it faster, or send less.",
    example="the body did not arrive within 30 s; send it faster",
)
EVENTS_GONE = Kind(
    slug="events-gone",
    status=410,
    title="Some of these events were deleted",
    explanation=(
        "The service deletes events of experiments that ended long ago (`rubberband serve --keep-events`). Some "
        "events after the given id are among them. Leave out `after` and Last-Event-ID for all kept events, or give "
        "after=latest; read earlier events from the experiments."
    ),
)
TOO_LARGE = Kind(
    slug="too-large",
    status=413,
    title="The body is too large",
    explanation="The body is larger than the service reads. Shorten it, or ask the operator to raise the limit.",
    example="the body has more than 1,048,576 bytes",
)
MEDIA = Kind(
    slug="unsupported-media-type",
    status=415,
    title="The content type is not supported",
    explanation=(
        "The service does not accept this Content-Type. Send application/json, or application/yaml for an experiment "
        "file."
    ),
    example="Content-Type 'text/csv' is not supported; send application/json",
)
INVALID = Kind(
    slug="invalid",
    status=422,
    title="The input is not valid",
    explanation=(
        "The request can be read, but a value in it is not valid. The detail names the key (and in YAML the line), "
        "the value, the limit and the remedy; `errors` lists faults of the query and headers."
    ),
    example="constraints.deadline: '20 bananas' is not a duration; write 90s, 20m, 1h30m or seconds",
)
REFUSED = Kind(
    slug="not-allowed-here",
    status=422,
    title="The operator does not allow this here",
    explanation=(
        "The operator does not allow this on this service: an entry point that is not installed, a provider, a file "
        "of the server, or a budget beyond the limit. `key` names the key of the experiment."
    ),
    example="entrypoint: 'os:system' is not allowed here",
)
PROFILE_MISSING = Kind(
    slug="profile-missing",
    status=422,
    title="Planning needs a profile",
    explanation=(
        "A plan needs to know how long an iteration takes. Write `profile` into the experiment, or submit it without "
        "one: it is then measured first."
    ),
    example="planning needs a profile",
)
INFEASIBLE = Kind(
    slug="infeasible",
    status=422,
    title="No plan meets the constraints",
    explanation=(
        "No plan keeps the deadline and the budget. `nearest` gives the shortest possible time and the lowest "
        "possible cost. `remedies` are the smallest changes that make a plan possible: first those that need no more "
        "time or money, then the cheapest. Each has its `changes`, in the form that `set` takes, and the time and "
        "cost of its plan. The list is empty if none was found in time."
    ),
    example="no plan meets deadline 10m; the fastest takes 14m2s and costs 18.40 USD",
)
NAME_TAKEN = Kind(
    slug="name-taken",
    status=409,
    title="The name is taken",
    explanation="Another experiment has this name. Choose another, for instance by `?set=name=NAME-2`.",
    example="the name 'digits-sha' is taken by another experiment; choose another",
)
NOTE_CHANGED = Kind(
    slug="note-changed",
    status=409,
    title="The note was changed meanwhile",
    explanation="The note is not `note_before` any more. `note` is the present one: send it so to replace it.",
    example="the note was changed meanwhile, to 'The baseline.'; read it, then replace that",
)
CONFLICT = Kind(
    slug="conflict",
    status=409,
    title="The experiment's state does not allow this",
    explanation="The experiment's state does not allow this: the detail names the state and the allowed actions.",
    example="experiment 'digits-sha' is done; there is nothing to resume",
)
KEY_REUSED = Kind(
    slug="idempotency-key-reused",
    status=422,
    title="The Idempotency-Key belongs to another request",
    explanation="An Idempotency-Key belongs to one request. Make a new key for each new request.",
    example="another request had this Idempotency-Key; make a new one for each new request",
)
KEY_BUSY = Kind(
    slug="idempotency-key-busy",
    status=409,
    title="The request with this Idempotency-Key is being served",
    explanation="The request with this key is being served. Ask again after Retry-After seconds.",
    example="the request with this Idempotency-Key is being served; ask again soon",
)
RATE = Kind(
    slug="too-many-requests",
    status=429,
    title="Too many requests",
    explanation="The caller sent more requests than are allowed. Wait for Retry-After seconds.",
    example="more than 200 requests a second; wait a second",
)
PROVIDER = Kind(
    slug="provider",
    status=502,
    title="The cloud provider failed",
    explanation="The cloud refused, or did not answer. Nothing was started. Try again later.",
    example="EC2 refused: RequestLimitExceeded; try again later",
)
UNAVAILABLE = Kind(
    slug="unavailable",
    status=503,
    title="The service is unavailable",
    explanation=(
        "A part of the service (its store, its planner) does not answer now. Nothing was changed. Try again after "
        "Retry-After seconds."
    ),
    example="the store does not answer; try again soon",
)
TOO_LONG = Kind(
    slug="planning-too-long",
    status=422,
    title="Planning took too long",
    explanation=(
        "Planning took longer than the limit. Allow fewer instance types, instances or GPUs per trial, or leave "
        "`frontier` out."
    ),
    example="planning took more than 30s; allow fewer instances or types",
)
INTERNAL = Kind(
    slug="internal",
    status=500,
    title="The service failed",
    explanation="An unexpected error occurred. The service's log has the details under `reference`.",
    example="an internal error occurred; the service's log has details under 5f0c1d2e3a4b",
)

KINDS: tuple[Kind, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Kind))


class HttpProblem(Exception):
    """Raised by routes; answered as problem+json with the status of its kind."""

    def __init__(self, kind: Kind, detail: str, *, headers: Mapping[str, str] | None = None, **extensions: Any) -> None:
        super().__init__(detail)
        self.kind = kind
        detail = " ".join(detail.split())
        self.detail = detail if len(detail) <= MOST_NAMED else f"{detail[: MOST_NAMED - 1]}…"
        self.headers = dict(headers or {})
        self.extensions = extensions

    def to_json(self) -> dict[str, Any]:
        """Return the body of the answer."""
        return self.kind.to_json() | {"detail": self.detail} | self.extensions


MOST_NAMED = 2000
"""Longest detail in characters; it may quote a request."""


def problem_of(error: RubberbandError) -> HttpProblem:
    """Return an error with a message for users as a problem."""
    detail = "; ".join(str(error).splitlines())
    match error:
        case InfeasibleError():
            nearest = {"jct_s": error.shortest_jct_s, "cost_usd": error.cheapest_usd}
            return HttpProblem(INFEASIBLE, detail, nearest=nearest)
        case NoteChangedError():
            return HttpProblem(NOTE_CHANGED, detail, note=error.note)
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
