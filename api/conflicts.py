"""What may be done with an experiment in which state, and what to do instead where it may not. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rubberband.api.problems import CONFLICT, Problem, problem_of
from rubberband.api.store.records import OVER, ExperimentState, Submission
from rubberband.errors import InputError, JournalError

KEY_GOOD_S = 24 * 3600.0
"""So long a request that is sent again is known by its Idempotency-Key."""
AT_WORK = frozenset({ExperimentState.STARTING, ExperimentState.RUNNING})
RESUMED = frozenset(
    {ExperimentState.INTERRUPTED, ExperimentState.CANCELLED, ExperimentState.BUDGET, ExperimentState.FAILED}
)
EXTENDED = AT_WORK | {
    ExperimentState.QUEUED,
    ExperimentState.INTERRUPTED,
    ExperimentState.CANCELLED,
    ExperimentState.BUDGET,
    ExperimentState.FAILED,
}
NOT_CANCELLED: Mapping[ExperimentState, str] = {
    ExperimentState.INTERRUPTED: "nothing of it runs; resume it and cancel it then, to have what is left ended at once",
}
NOT_RESUMED: Mapping[ExperimentState, str] = {
    ExperimentState.BUDGET: "raise max_cost first: POST …/extend, and then resume it",
    ExperimentState.FAILED: "its trials failed by their own code; correct that, and submit it under another name",
    ExperimentState.REFUSED: "it never began; submit it again under another name",
    ExperimentState.QUEUED: "it goes on by itself as soon as fewer run than may",
}
NOT_EXTENDED: Mapping[ExperimentState, str] = {
    ExperimentState.REFUSED: "it never began; submit it again under another name",
}
_OVER = "it is over; submit it under another name to run it again"


def conflict(row: Submission, remedies: Mapping[ExperimentState, str]) -> Problem:
    """That an experiment is not in a state for what is asked; `remedies` tells what to do instead."""
    remedy = remedies.get(row.state, _OVER if row.state in OVER else "it is under way")
    if row.state is ExperimentState.UNREADABLE:
        remedy = row.reason
    return Problem(CONFLICT, f"experiment {row.name!r} is {row.state.value}: {remedy}", state=row.state.value)


def require_unmeasured(row: Submission) -> None:
    """Raise Problem where a profile would be measured on EC2 once more.

    What measuring had cost is not known where it was cut off, and would be spent again beside max_cost.
    """
    rents = row.words.get("resources", {}).get("provider") == "aws"
    if row.attempt and rents and "profile" not in row.words:
        raise conflict(row, dict.fromkeys(RESUMED, "it ended while its profile was measured; submit it again"))


@contextmanager
def told_as_problems() -> Iterator[None]:
    """Errors of the command line become problems."""
    try:
        yield
    except (InputError, JournalError) as error:
        raise problem_of(error) from None
