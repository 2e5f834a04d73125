"""The list of experiments as a reader wants it: each on a line of words and shares. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rubberband.states import ACTIVE, ExperimentState
from rubberband.values.submission import Submission, Summary
from rubberband.views.words import counted, duration, number, printable, usd, usd_decimals

Choice = tuple[str, frozenset[ExperimentState] | None]

_MINOR_S = 1.0
"""So much before or after the deadline is on time."""

CHOICES: Mapping[str, Choice] = {
    "all": ("All", None),
    "active": ("Active", ACTIVE),
    "done": ("Done", frozenset({ExperimentState.DONE})),
    "stopped": ("Stopped", frozenset({ExperimentState.CANCELLED, ExperimentState.BUDGET})),
    "attention": (
        "Needs attention",
        frozenset(
            {
                ExperimentState.INTERRUPTED,
                ExperimentState.FAILED,
                ExperimentState.REFUSED,
                ExperimentState.UNREADABLE,
            }
        ),
    ),
}
"""What of the list can be looked at: its name in the address -> its title and the states."""


def counted_choices(standing: Mapping[str, int]) -> dict[str, int]:
    """How many experiments each of `CHOICES` has; `standing`: state -> how many are in it."""
    every = sum(standing.values())
    return {
        name: every if states is None else sum(standing.get(state, 0) for state in states)
        for name, (_, states) in CHOICES.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """An experiment on one line. Empty words are shown as a dash."""

    name: str
    state: str
    badge: tuple[str, str]
    """The class of its badge, and its words."""
    reason: str
    """Why it is where it is, if that needs telling."""
    owner: str
    share: float
    """Of the iterations: 0 to 1."""
    progress: str
    slack: str
    mood: str
    """of the slack: good, warn, bad or faint."""
    cost: str
    cap: str
    spent: float | None
    """Of the cap: 0 to 1, or more; None without one."""
    best: str
    at: float
    """When it started, or was submitted: Unix time."""
    began: bool


_ON_ITS_WAY = frozenset({ExperimentState.QUEUED, ExperimentState.RUNNING, ExperimentState.DONE})
"""States that say enough; what starts may wait for its checkpoint store."""


def row(submission: Submission, now: float) -> Row:
    """How an experiment stands at `now` (Unix time)."""
    summary = submission.summary
    slack, mood = _slack(submission, now)
    cap_usd = _cap_usd(submission)
    telling = submission.state not in _ON_ITS_WAY
    return Row(
        name=submission.name,
        state=submission.state.value,
        badge=("late", "done, late") if _is_late(submission) else (submission.state.value, submission.state.value),
        reason=printable(submission.reason) if telling else "",
        owner=submission.owner,
        share=_share(submission.state, summary),
        progress=_progress(submission.state, summary),
        slack=slack,
        mood=mood,
        cost=usd(summary.cost_usd, usd_decimals(max(summary.cost_usd, summary.planned_cost_usd or 0.0))),
        cap="" if cap_usd is None else usd(cap_usd),
        spent=summary.cost_usd / cap_usd if cap_usd else None,
        best="" if summary.best_value is None else f"{printable(summary.metric)} {number(summary.best_value)}",
        at=summary.started_at or submission.created_at,
        began=summary.started_at is not None,
    )


def _is_late(submission: Submission) -> bool:
    """Whether it is done, and was so after its deadline."""
    summary = submission.summary
    is_done = submission.state is ExperimentState.DONE and summary.deadline_s is not None
    return is_done and summary.jct_s > (summary.deadline_s or 0.0)


def _share(state: ExperimentState, summary: Summary) -> float:
    if state is ExperimentState.DONE:
        return 1.0
    return min(summary.iterations / summary.target_iterations, 1.0) if summary.target_iterations else 0.0


def _progress(state: ExperimentState, summary: Summary) -> str:
    if state is ExperimentState.QUEUED:
        return "waits for a free slot"
    if state is ExperimentState.STARTING:
        return "is measuring or planning"
    if not summary.stages:
        return ""
    if state is ExperimentState.DONE:
        return f"{counted(summary.stages, 'stage')}, {counted(summary.trials, 'trial')}"
    done = f"{summary.iterations} of {summary.target_iterations} iterations"
    return f"stage {summary.stage} ({summary.stage + 1} of {summary.stages}), {done}"


def _slack(submission: Submission, now: float) -> tuple[str, str]:
    """Time between the end (expected, while it runs) and the deadline, in words and in how good that is."""
    summary = submission.summary
    if summary.deadline_s is None:
        return ("no deadline" if summary.started_at is not None else "", "faint")
    over = submission.state not in ACTIVE and submission.state is not ExperimentState.INTERRUPTED
    if over and submission.state is not ExperimentState.DONE:
        return ("", "faint")
    expected_s = summary.jct_s if over else summary.forecast_jct_s or summary.planned_jct_s
    if expected_s is None:
        return ("", "faint")
    elapsed_s = now - summary.started_at if summary.started_at is not None and not over else 0.0
    slack_s = summary.deadline_s - max(expected_s, elapsed_s)
    if slack_s < -_MINOR_S:
        return (f"{duration(-slack_s)} late", "bad")
    mood = "good" if over or slack_s > 0.05 * summary.deadline_s else "warn"
    return ("on time" if slack_s < _MINOR_S else f"{duration(slack_s)} to spare", mood)


def _cap_usd(submission: Submission) -> float | None:
    if submission.summary.max_cost_usd is not None:
        return submission.summary.max_cost_usd
    asked = submission.words.get("constraints", {}).get("max_cost")
    return float(asked) if isinstance(asked, int | float) else None
