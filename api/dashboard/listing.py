"""The list of experiments: rows, filters, groups, and their addresses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, cast
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response

from rubberband.api.dashboard.frame import render
from rubberband.api.dashboard.list_groups import TITLES, By, groups_of
from rubberband.api.routes import Reader, Service, Serving
from rubberband.api.routes.queueing import queue_views
from rubberband.api.store.schema import Page
from rubberband.client.models import QueueView
from rubberband.states import ACTIVE, OVER, ExperimentState
from rubberband.units import counted, duration, instant_text
from rubberband.values.submission import Submission, Summary, search_words
from rubberband.views.formatting import number, printable, usd, usd_decimals

router = APIRouter(include_in_schema=False)


Choice = tuple[str, frozenset[ExperimentState] | None]

_MINOR_S = 1.0
"""A difference to the deadline below this is on time."""

CHOICES: Mapping[str, Choice] = {
    "all": ("All", None),
    "active": ("Active", ACTIVE),
    "done": ("Done", frozenset({ExperimentState.DONE})),
    "stopped": ("Stopped", frozenset({ExperimentState.CANCELLED, ExperimentState.BUDGET})),
    "attention": (
        "Needs attention",
        frozenset(
            {ExperimentState.INTERRUPTED, ExperimentState.FAILED, ExperimentState.REFUSED, ExperimentState.UNREADABLE}
        ),
    ),
}
"""Filters of the list: name in the address -> title and states. Beside them, `ARCHIVED` has the archived ones."""
ARCHIVED = "archived"


def counted_choices(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the number of experiments of each of `CHOICES`; `counts`: state -> number."""
    every = sum(counts.values())
    return {
        name: every if states is None else sum(counts.get(state, 0) for state in states)
        for name, (_, states) in CHOICES.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Row of the list. Empty texts are shown as a dash."""

    name: str
    state: str
    badge: tuple[str, str]
    """CSS class and text."""
    reason: str
    """Reason for its state, if the state needs one."""
    owner: str
    tags: Sequence[tuple[str, str]]
    """Each with the address of the list of those that have it."""
    note: str
    share: float
    """Share of the iterations, 0 to 1."""
    progress: str
    deadline: str
    slack: str
    mood: str
    """CSS class of the slack: good, warn, bad or faint."""
    rehearsal: bool
    cost_usd: float
    decimals: int
    """Digits after the point that its amounts need."""
    cost: str
    unit: str
    """Unit of the cost where it is not USD."""
    charged: bool
    cap: str
    spent: float | None
    """Share of the cap, may exceed 1; None without a cap."""
    best: str
    at: float
    """Unix time of the start, or else of the submission."""
    began: bool


_ON_ITS_WAY = frozenset({ExperimentState.RUNNING, ExperimentState.DONE})
"""States that need no reason. STARTING may wait for its checkpoint store, QUEUED for money."""


def badge(submission: Submission) -> tuple[str, str]:
    """Return CSS class and text of the badge of a state."""
    state, slack_s = submission.state, submission.slack_s() or 0.0
    return ("late", "done, late") if state is ExperimentState.DONE and slack_s < 0.0 else (state.value, state.value)


def row(submission: Submission, now: float, queue: QueueView | None = None) -> Row:
    """Return the row of an experiment at `now` (Unix time); `queue` is its place where it waits for a slot."""
    summary = submission.summary
    slack, mood = ("cannot be met", "bad") if queue is not None and queue["warning"] else _slack(submission, now)
    cap_usd, unit = _cap_usd(submission), "" if summary.unit == "USD" else f" {summary.unit}"
    decimals = usd_decimals(max(summary.cost_usd, summary.planned_cost_usd or 0.0))
    telling = submission.state not in _ON_ITS_WAY or bool(submission.home)
    return Row(
        name=submission.name,
        state=submission.state.value,
        badge=badge(submission),
        reason="; ".join(filter(None, (printable(submission.reason) if telling else "", submission.waiting))),
        owner=submission.owner,
        tags=tag_links(submission),
        note=submission.labels.note,
        share=_share(submission.state, summary),
        progress=_progress(submission, now) if queue is None else queue["text"],
        deadline=submission.deadline,
        slack=slack,
        mood=mood,
        rehearsal=submission.rehearsal,
        charged=submission.charged,
        cost_usd=summary.cost_usd,
        decimals=decimals,
        cost=f"{usd(summary.cost_usd, decimals)}{unit}",
        unit=unit,
        cap="" if cap_usd is None else usd(cap_usd),
        spent=summary.cost_usd / cap_usd if cap_usd else None,
        best=""
        if summary.best_value is None
        else f"{printable(summary.metric)} {number(summary.best_value)}"
        + (f", {summary.best_note}" if summary.best_note else ""),
        at=summary.started_at or submission.created_at,
        began=summary.started_at is not None,
    )


def _aligned(rows: Sequence[Row]) -> list[Row]:
    """Return rows whose costs have the same digits after the point, so that the points stand below each other."""
    decimals = max((one.decimals for one in rows), default=2)
    return [replace(one, cost=f"{usd(one.cost_usd, decimals)}{one.unit}") for one in rows]


def tag_links(submission: Submission) -> list[tuple[str, str]]:
    """Return each tag with the address of the list of those that have it."""
    return [(tag, _address("/", tags=[tag])) for tag in submission.labels.tags]


def _share(state: ExperimentState, summary: Summary) -> float:
    if state is ExperimentState.DONE:
        return 1.0
    return min(summary.iterations / summary.target_iterations, 1.0) if summary.target_iterations else 0.0


def _progress(submission: Submission, now: float) -> str:
    state, summary = submission.state, submission.summary
    if state is ExperimentState.QUEUED:
        return "waits" if submission.reason else "waits for a free slot"
    if state is ExperimentState.STARTING:
        return "is measuring or planning"
    if not summary.stages:
        return ""
    if state is ExperimentState.DONE:
        return f"{counted(summary.stages, 'stage')}, {counted(summary.trials, 'trial')}"
    done = f"{summary.iterations} of {counted(summary.target_iterations, 'iteration')}{_ends(submission, now)}"
    if summary.stages == 1:
        return done
    if summary.brackets > 1:
        return f"{summary.stage} of {counted(summary.stages, 'stage')}, {done}"
    return f"stage {summary.stage} ({summary.stage + 1} of {summary.stages}), {done}"


def _ends(submission: Submission, now: float) -> str:
    """Return when a running experiment is expected to end: `; ends 2026-11-21T20:00:00Z (in 13m)`."""
    summary = submission.summary
    if submission.state is not ExperimentState.RUNNING or summary.started_at is None or submission.rehearsal:
        return ""
    left_s = summary.started_at + summary.ends_s(elapsed_s=now - summary.started_at) - now
    return f"; ends {instant_text(now + left_s)} (in {duration(left_s)})" if left_s >= 1.0 else ""


def _slack(submission: Submission, now: float) -> tuple[str, str]:
    """Return the text and the CSS class of the time between its (expected) end and its deadline."""
    summary, state, slack_s = submission.summary, submission.state, submission.slack_s(now)
    if summary.deadline_s is None or slack_s is None:
        return ("no deadline" if summary.started_at is not None else "", "faint")
    is_done = state is ExperimentState.DONE
    if not is_done and (state in OVER or summary.planned_jct_s is None):
        return ("", "faint")
    if slack_s < -_MINOR_S:
        return (f"{duration(-slack_s)} late", "bad")
    mood = "good" if is_done or slack_s > 0.05 * summary.deadline_s else "warn"
    return ("on time" if slack_s < _MINOR_S else f"{duration(slack_s)} to spare", mood)


def _cap_usd(submission: Submission) -> float | None:
    if submission.summary.max_cost_usd is not None:
        return submission.summary.max_cost_usd
    asked = submission.words.get("constraints", {}).get("max_cost")
    return float(asked) if isinstance(asked, int | float) else None


Show = Annotated[str, Query(max_length=20)]
Cursor = Annotated[str | None, Query(max_length=200)]
Search = Annotated[str, Query(max_length=200)]
Tags = Annotated[Sequence[str], Query(alias="tag", max_length=20)]
_PAGE_SIZE = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedRows:
    """Part of the list that an address asks for."""

    show: str
    search: str
    tags: Sequence[str]
    cursor: str | None
    group: By | None
    """How experiments are put together; None: each has a row."""


def _asked(
    show: Show = "all", search: Search = "", tags: Tags = (), cursor: Cursor = None, group: Show = ""
) -> AskedRows:
    chosen, by = show if show in CHOICES or show == ARCHIVED else "all", group if group in TITLES else None
    words = " ".join(search_words(search))
    return AskedRows(show=chosen, search=words, tags=[*filter(None, tags)], cursor=cursor, group=cast("By | None", by))


AskedList = Annotated[AskedRows, Depends(_asked)]


@router.get("/")
def experiments(request: Request, service: Serving, _reader: Reader, asked: AskedList) -> Response:
    """Experiments, newest first."""
    after = service.store.last_feed_id()
    return render(request, "experiments.html", **_listed(service, request, asked), after=after)


@router.get("/fragments/experiments")
def experiment_rows(request: Request, service: Serving, _reader: Reader, asked: AskedList) -> Response:
    """Part of the page that reloads."""
    return render(request, "experiments_rows.html", **_listed(service, request, asked))


def _listed(service: Service, request: Request, asked: AskedRows) -> dict[str, Any]:
    store, now = service.store, service.settings.clock()
    show, search, tags = asked.show, asked.search, asked.tags
    at = partial(_address, search=search, tags=tags)
    alike = partial(at, group=asked.group or "")
    found = partial(
        store.submissions,
        states=CHOICES[show][1] if show in CHOICES else None,
        search=search,
        tags=tags,
        archived=show == ARCHIVED,
    )
    page = found(limit=_PAGE_SIZE, after=asked.cursor)
    places = queue_views(service, page.items)
    archived = sum(store.count_states(search=search, tags=tags, archived=True).values())
    counts = counted_choices(store.count_states(search=search, tags=tags, archived=False)) | {ARCHIVED: archived}
    titles = {name: title for name, (title, _) in CHOICES.items()}
    if archived or show == ARCHIVED:
        titles[ARCHIVED] = "Archived"
    return {
        "choices": [(name, f"{title} {counts[name]}", alike("/", show=name)) for name, title in titles.items()],
        "search": search,
        "asked": ", ".join([*([search] if search else []), *tags]),
        "tags": [(gone, alike("/", show=show, tags=[tag for tag in tags if tag != gone])) for gone in tags],
        "rows": _aligned([row(submission, now, places.get(submission.name)) for submission in page.items]),
        "group": asked.group,
        "grouped": [(by, title, at("/", show=show, group=by)) for by, title in TITLES.items()],
        **({"groups": [], "partial": 0} if asked.group is None else _groups(found, asked.group, asked)),
        "next": "" if asked.group else page.next,
        "later": asked.cursor is not None,
        "show": show,
        "here": at("/", show=show),
        "older": at("/", show=show, cursor=page.next),
        "address": alike("/fragments/experiments", show=show, cursor=asked.cursor),
        "origin": f"{request.url.scheme}://{request.url.netloc}",
    }


_MOST_GROUPED, _AT_ONCE = 5000, 500


def _groups(found: Callable[..., Page], by: By, asked: AskedRows) -> dict[str, Any]:
    """Return the groups of all experiments of the list, with the addresses of their lists.

    `partial` is the number of the newest ones that count, where there are more; else 0.
    """
    rows: list[Submission] = []
    cursor: str | None = ""
    while cursor is not None and len(rows) < _MOST_GROUPED:
        page = found(limit=_AT_ONCE, after=cursor or None)
        rows += page.items
        cursor = page.next
    groups = [
        (
            one,
            _address(
                "/",
                show=asked.show,
                search=" ".join(dict.fromkeys(filter(None, (asked.search, one.search)))),
                tags=[*dict.fromkeys(filter(None, (*asked.tags, one.tag)))],
            ),
        )
        for one in groups_of(rows, by)
    ]
    return {"groups": groups, "partial": 0 if cursor is None else len(rows)}


def _address(
    path: str,
    *,
    show: str = "all",
    search: str = "",
    tags: Sequence[str] = (),
    cursor: str | None = None,
    group: str = "",
) -> str:
    asked = {"show": "" if show == "all" else show, "search": search, "tag": tags, "cursor": cursor, "group": group}
    return f"{path}?{urlencode({key: value for key, value in asked.items() if value}, doseq=True)}".rstrip("?")
