"""Requests that an experiment's state does not allow, as problems. rubberband.states has the table."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rubberband.api.problems import CONFLICT, Problem, problem_of
from rubberband.errors import InputError, JournalError
from rubberband.states import ExperimentState
from rubberband.values.submission import Submission

KEY_GOOD_S = 24 * 3600.0
"""So long a request that is sent again is known by its Idempotency-Key."""


def conflict(row: Submission, obstacle: str) -> Problem:
    """The problem that an action is not possible now; `obstacle` is why, and what to do instead."""
    why = row.reason if row.state is ExperimentState.UNREADABLE else obstacle
    return Problem(CONFLICT, f"experiment {row.name!r} is {row.state.value}: {why}", state=row.state.value)


def waits(row: Submission) -> bool:
    """Whether it was submitted, is queued, and was never started."""
    return row.state is ExperimentState.QUEUED and bool(row.words) and not row.attempt


def loses_profile(row: Submission) -> bool:
    """Whether starting it, though nothing is journalled, would measure a profile on EC2 once more.

    What measuring had cost is not known where it was cut off, and would be spent again beside max_cost.
    """
    rents = row.words.get("resources", {}).get("provider") == "aws"
    return bool(row.attempt) and rents and row.words.get("profile") is None


def limited(row: Submission) -> bool:
    """Whether it has a deadline or a max_cost."""
    constraints = row.words.get("constraints") or {}
    has = (row.summary.deadline_s, row.summary.max_cost_usd, constraints.get("deadline"), constraints.get("max_cost"))
    return any(limit is not None for limit in has)


@contextmanager
def told_as_problems() -> Iterator[None]:
    """Errors of the command line become problems."""
    try:
        yield
    except (InputError, JournalError) as error:
        raise problem_of(error) from None
