"""The values that the store keeps. All instants are Unix time in seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rubberband.values.submission import Submission

Scope = Literal["read", "submit", "admin"]
"""read: see everything and preview plans; submit: start, extend, resume and cancel as well; admin: tokens as well.
Each includes those before it."""
SCOPES: tuple[Scope, ...] = ("read", "submit", "admin")


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedEvent:
    """One line of the feed: what happened to an experiment."""

    id: int
    """Its place in the feed: greater than that of every event before it. It is what Last-Event-ID names."""
    experiment: str
    seq: int | None
    """Its place in the experiment's journal; None for what the service itself tells (a change of state)."""
    kind: str
    """The journal's kind of event (`TrialReported`, …), or `state`."""
    occurred_at: float
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What is to be added to the feed: a `FeedEvent` that has no place yet."""

    experiment: str
    seq: int | None
    kind: str
    occurred_at: float
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenIn:
    """An experiment that was run by hand and that nobody is at work on, as it becomes known."""

    submission: Submission
    entries: Sequence[Entry]
    """What the feed is to tell of its journal: all of it, or nothing."""
    last_seq: int
    """The last place of its journal; -1 if it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPlan:
    """A preview that was made."""

    id: str
    created_at: float
    words: Mapping[str, Any]
    options: Mapping[str, Any]
    """policy, frontier, seed."""
    status: int
    """Of the answer: 200, or 422 where it is infeasible."""
    body: bytes
    """The answer, as it was sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRecord:
    """A token, without its secret."""

    id: str
    name: str
    """Whose, or what for."""
    scope: Scope
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None
    last_used_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """Who asks."""

    token: str
    """Id of the token; empty where none is required."""
    name: str
    scope: Scope

    def may(self, scope: Scope) -> bool:
        """Whether what needs `scope` is allowed."""
        return SCOPES.index(self.scope) >= SCOPES.index(scope)


NOBODY = Principal(token="", name="", scope="admin")
"""Who asks where no token is required."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptAnswer:
    """The answer to a request with an Idempotency-Key."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page of a list."""

    items: Sequence[Submission]
    next: str | None
    """The cursor of the next page; None on the last one."""
