"""What the service asks of its store. One implementation (SQLAlchemy), one test suite on SQLite and on PostgreSQL.

All methods are synchronous and safe to call from several threads. Every write is durable when it returns, and whole or
not at all. They raise JournalError where the store cannot be reached, read or written. JSON values come back as JSON
has them: NaN and infinity as None, tuples as lists.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from rubberband.api.settings import Keeping
from rubberband.states import ExperimentState
from rubberband.values.submission import Submission, Summary

# The values that the store keeps. All instants are Unix time in seconds.


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


class Store(Protocol):
    """The memory of the service."""

    @property
    def keeping(self) -> Keeping:
        """How long what is kept."""
        ...

    # Experiments

    def add(self, submission: Submission) -> bool:
        """Remember a new experiment, and tell its state in the feed; False if the name is known already."""
        ...

    def submission(self, name: str) -> Submission | None:
        """What is known of an experiment; None if there is none of the name."""
        ...

    def submissions(
        self, *, states: Collection[ExperimentState] | None = None, limit: int = 50, after: str | None = None
    ) -> Page:
        """Newest first; `after` is the cursor of a page before. Raises InputError for what is no cursor."""
        ...

    def count_states(self) -> Mapping[str, int]:
        """State -> how many experiments are in it; those of none are missing."""
        ...

    def change(
        self,
        name: str,
        *,
        at: float,
        state: ExperimentState | None = None,
        expected: Collection[ExperimentState] | None = None,
        reason: str | None = None,
        summary: Summary | None = None,
        attempt: int | None = None,
        words: Mapping[str, Any] | None = None,
        request: str = "",
    ) -> bool:
        """Change what is given, and nothing else; False, and nothing is changed, if its state is not among `expected`.

        A change of state is told in the feed (kind `state`, data `{"state", "before", "reason"}`) in the same write;
        the state that it has already is no change. None leaves a value as it is, and `changed_at` becomes `at`. With
        `request`, that one has acted then.
        """
        ...

    def take_in(self, taken: Sequence[TakenIn]) -> Collection[str]:
        """Remember experiments that were run by hand, and tell of them in the feed, in one write; those that were new.

        Of a journal that the feed is not told, it is taken to have let it go.
        """
        ...

    # The feed

    def append(self, entries: Sequence[Entry]) -> None:
        """Add to the feed, in order, all or none. An (experiment, seq) that is in it already is left out."""
        ...

    def last_seqs(self, experiments: Collection[str] | None = None) -> Mapping[str, int]:
        """Experiment -> the last place of its journal that the feed ever had; those without any are missing."""
        ...

    def feed(self, *, after: int = 0, experiment: str | None = None, limit: int = 500) -> Sequence[FeedEvent]:
        """Events past `after`, in order. One that is not told here is never told later with a smaller id."""
        ...

    def last_feed_id(self) -> int:
        """The id of the last event; 0 if there never was one."""
        ...

    def prune_feed(self, *, at: float, limit: int = 1000) -> int:
        """Let up to `limit` events go whose experiments are long over (`Keeping.events_s`); how many went.

        The oldest of each go first. To be called by who appends, and until nothing is left to be let go.
        """
        ...

    def last_pruned_id(self, experiment: str | None = None) -> int:
        """The greatest id of all events that were let go (of an experiment); 0 if none was."""
        ...

    # Plans

    def keep_plans(self, plans: Sequence[StoredPlan]) -> None:
        """Keep previews (again). This write may be lost in a power failure. `prune` lets old ones go."""
        ...

    def plan(self, id: str) -> StoredPlan | None:
        """A preview; None if there is none."""
        ...

    def plan_ids(self) -> list[str]:
        """Ids of all previews, those that were made last at the end."""
        ...

    # Tokens and sessions of the dashboard

    def add_token(self, record: TokenRecord, secret_hash: str) -> None:
        """Keep a token."""
        ...

    def find_tokens(self, ids: Collection[str]) -> Mapping[str, tuple[TokenRecord, str]]:
        """Id -> a token and the hash of its secret; ids of none are left out."""
        ...

    def tokens(self) -> Sequence[TokenRecord]:
        """All tokens, revoked ones included, oldest first."""
        ...

    def revoke_token(self, id: str, *, at: float) -> bool:
        """Revoke a token and end its sessions; False if there is none."""
        ...

    def touch_token(self, id: str, *, at: float) -> None:
        """Note when it was used last. This write may be lost in a power failure."""
        ...

    def add_session(self, hash: str, *, token: str, expires_at: float) -> None:
        """A browser has signed in with a token."""
        ...

    def find_sessions(self, hashes: Collection[str], *, at: float) -> Mapping[str, TokenRecord]:
        """Hash -> the token of a browser's session; those that are over, or whose token is, are left out."""
        ...

    def end_session(self, hash: str) -> None:
        """A browser has signed out. Idempotent."""
        ...

    # Requests that spend money, sent again

    def claim_key(self, key: str, *, owner: str, request_hash: str, at: float) -> KeptAnswer | str | None:
        """Take an Idempotency-Key: None if it is free (it is taken now); the answer if it was given already.

        `busy` if a request with it is being served (for less than a minute), `reused` if it belongs to another request.
        """
        ...

    def keep_answer(self, key: str, *, owner: str, answer: KeptAnswer, at: float) -> None:
        """Keep the answer of a request whose key was taken."""
        ...

    def free_key(self, key: str, *, owner: str) -> None:
        """Let a key go whose request came to nothing."""
        ...

    def free_keys(self) -> None:
        """Let all keys go whose requests have no answer: nobody serves them when a server starts."""
        ...

    def has_acted(self, request: str, *, since: float) -> bool:
        """Whether the request with this id took effect at `since` or later, as `change` or `note_act` was told.

        What is older than 30 days is forgotten.
        """
        ...

    def note_act(self, request: str, *, at: float) -> None:
        """The request with this id took effect. Idempotent."""
        ...

    # The store itself

    def check(self) -> None:
        """Raise JournalError if the store does not answer."""
        ...

    def prune(self, *, at: float) -> None:
        """Forget what is old by `Keeping`: keys, sessions that are over, plans. For events there is `prune_feed`."""
        ...

    def close(self) -> None:
        """Let go of it. Idempotent."""
        ...
