"""An experiment as lists show it: its state, its words, and its summary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rubberband.states import ACTIVE, ExperimentState
from rubberband.values.labels import NO_LABELS, Labels
from rubberband.values.offer import Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Figures of an experiment for a list; all zero or None before it started."""

    trials: int = 0
    stages: int = 0
    stage: int = 0
    """The current (or last begun) stage; of several brackets, how many stages are over."""
    brackets: int = 1
    iterations: int = 0
    """Done by all trials together."""
    target_iterations: int = 0
    """Planned by the scheduler, over all stages."""
    instances: int = 0
    """Held now."""
    max_instances: int | None = None
    """The most that it may hold since it was limited while it ran; None: it was not."""
    started_at: float | None = None
    ended_at: float | None = None
    jct_s: float = 0.0
    """From the start to the last SYNC; to now while it runs."""
    unit: Unit = "USD"
    """Unit of its amounts, also of those named usd: GPU-hours on a Ray cluster without a price."""
    cost_usd: float = 0.0
    """The bill so far. Like every cost here, and max_cost, it includes the measuring of the profile."""
    profiling_cost_usd: float = 0.0
    """The part of `cost_usd` for which the profile was measured."""
    month_at: float | None = None
    """Begin of the calendar month (UTC) in which it spent last."""
    month_cost_usd: float = 0.0
    """The part of `cost_usd` that was spent in that month."""
    planned_jct_s: float | None = None
    planned_cost_usd: float | None = None
    forecast_jct_s: float | None = None
    forecast_cost_usd: float | None = None
    deadline_s: float | None = None
    """From the start."""
    max_cost_usd: float | None = None
    metric: str = ""
    mode: Literal["max", "min"] = "max"
    best_value: float | None = None
    best_trial: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """An experiment that the service knows: one that was submitted, or that was run in its home by hand."""

    name: str
    state: ExperimentState
    created_at: float
    changed_at: float
    owner: str = ""
    """Name of the token that submitted it; empty if it was started by hand, or without tokens."""
    words: Mapping[str, Any] = field(default_factory=dict)
    """The experiment in the file's words, deadline made absolute; empty if it was started by hand."""
    policy: str = "optimal"
    plan: str | None = None
    """Id of the plan with which it was submitted."""
    request: str = ""
    """Id of the request that submitted it, to recognise it if it is sent again after a crash; may be empty."""
    reason: str = ""
    """Cause of its state, in one line: an error, or how it ended."""
    attempt: int = 0
    """Number of processes started for it."""
    summary: Summary = Summary()
    home: str = ""
    """`HOST:PATH` of the home whose service drives it; empty where that is the service that was asked."""
    admitted_usd: float = 0.0
    """Whole cost for which it was admitted last: of its plan, a resume or an extension."""
    labels: Labels = NO_LABELS

    @property
    def is_archived(self) -> bool:
        """Whether lists leave it out: it was archived, and does not run."""
        return self.labels.archived and self.state not in ACTIVE


def search_words(search: str) -> list[str]:
    """Return the words of a search in lower case; no database takes a zero character."""
    return search.replace("\0", " ").lower().split()


def matches(search: str, *texts: str) -> bool:
    """Whether every word of `search` is part of one of `texts`, such as name, state and tags; case does not count."""
    return all(any(word in text.lower() for text in texts) for word in search_words(search))
