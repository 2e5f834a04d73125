"""The pages of the dashboard, but for those of one experiment, of a comparison and of the pool."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any
from urllib.parse import urlencode

import yaml
from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, RedirectResponse, Response

from rubberband.api.dashboard import compare, experiment, pool
from rubberband.api.dashboard.frame import render
from rubberband.api.dashboard.frame import router as assets_router
from rubberband.api.experiments.body import read_experiment, require_allowed
from rubberband.api.security.authentication import STRANGER, Reader, principal_of
from rubberband.api.security.checks import safe_next
from rubberband.api.service import NAME_PATTERN, Service, Serving
from rubberband.api.store.schema import Principal
from rubberband.api.web.problems import HttpProblem
from rubberband.errors import InputError
from rubberband.spec.loading import Dumper
from rubberband.states import ACTIVE, ExperimentState
from rubberband.units import counted, duration, format_duration, parse_deadline
from rubberband.values.kinds import KINDS
from rubberband.values.submission import Submission, Summary, search_words
from rubberband.views.formatting import number, printable, usd, usd_decimals

# The file of a stored experiment, to be planned and submitted again. Pure.


def file_of(submission: Submission) -> str:
    """Return the experiment file, its deadline as a duration from the start; empty if none is stored."""
    words = dict(submission.words)
    if not words:
        return ""
    constraints, resources = words.get("constraints"), words.get("resources")
    if isinstance(constraints, Mapping):
        words["constraints"] = _given(constraints) | _deadline(constraints.get("deadline"), submission.created_at)
    if isinstance(resources, Mapping):
        provider = KINDS.get(resources.get("provider", ""))
        foreign = set() if provider is not None and provider.is_rented else {"aws"}
        words["resources"] = {key: value for key, value in _given(resources).items() if key not in foreign}
    return yaml.dump(_given(words), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)


def _given(words: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in words.items() if value is not None}


def _deadline(asked: Any, created_at: float) -> dict[str, Any]:
    try:
        found = parse_deadline(asked)
    except InputError:
        return {}
    if not isinstance(found, datetime):
        return {}
    return {"deadline": format_duration(max(1, round(found.timestamp() - created_at)))}


_LONGEST_NAME = 63
_MOST_TRIED = 100


def preflight(
    service: Service, principal: Principal, body: bytes, media_type: str, overrides: Sequence[str]
) -> dict[str, Any]:
    """Return the expected effect of a submission, which is not made, for the form.

    `free_name` is the name, or a similar one if it is taken. `deadline_s` counts from now. `measures` says whether a
    profile is measured first, and `reason` why it cannot be submitted. Raises Problem if the body is no experiment.
    """
    experiment = read_experiment(body, media_type, overrides)
    deadline_s, reason = None, ""
    try:
        deadline_s = experiment.constraints.deadline_from(time.time())
    except InputError as passed:
        reason = str(passed)
    try:
        require_allowed(experiment, service.settings)
        if service.admission is not None:
            service.admission.require_room(experiment)
    except HttpProblem as problem:
        reason = problem.detail
    if not principal.may("submit"):
        reason = f"the token {principal.name!r} may only read; sign in with one that has the scope submit"
    return {
        "name": experiment.name,
        "free_name": _free(service, experiment.name),
        "entrypoint": str(experiment.entrypoint or ""),
        "provider": experiment.resources.provider,
        "region": experiment.resources.region,
        "deadline_s": deadline_s,
        "max_cost_usd": experiment.constraints.max_cost_usd,
        "measures": experiment.profile is None,
        "reason": reason,
    }


def _free(service: Service, name: str) -> str:
    """Return `digits`, or `digits-2` if that is taken, and so on."""
    tried = (name if at == 1 else f"{name[: _LONGEST_NAME - 4].rstrip('-')}-{at}" for at in itertools.count(1))
    free = (one for one in itertools.islice(tried, _MOST_TRIED) if service.store.submission(one) is None)
    return next(free, name)


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
            {
                ExperimentState.INTERRUPTED,
                ExperimentState.FAILED,
                ExperimentState.REFUSED,
                ExperimentState.UNREADABLE,
            }
        ),
    ),
}
"""Filters of the list: name in the address -> title and states."""


def counted_choices(standing: Mapping[str, int]) -> dict[str, int]:
    """Return the number of experiments of each of `CHOICES`; `standing`: state -> number."""
    every = sum(standing.values())
    return {
        name: every if states is None else sum(standing.get(state, 0) for state in states)
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
    share: float
    """Share of the iterations, 0 to 1."""
    progress: str
    slack: str
    mood: str
    """CSS class of the slack: good, warn, bad or faint."""
    cost: str
    cap: str
    spent: float | None
    """Share of the cap, may exceed 1; None without a cap."""
    best: str
    at: float
    """Unix time of the start, or else of the submission."""
    began: bool


_ON_ITS_WAY = frozenset({ExperimentState.RUNNING, ExperimentState.DONE})
"""States that need no reason. STARTING may wait for its checkpoint store, QUEUED for money."""


def row(submission: Submission, now: float) -> Row:
    """Return the row of an experiment at `now` (Unix time)."""
    summary = submission.summary
    slack, mood = _slack(submission, now)
    cap_usd = _cap_usd(submission)
    telling = submission.state not in _ON_ITS_WAY or bool(submission.home)
    return Row(
        name=submission.name,
        state=submission.state.value,
        badge=("late", "done, late") if _is_late(submission) else (submission.state.value, submission.state.value),
        reason=printable(submission.reason) if telling else "",
        owner=submission.owner,
        share=_share(submission.state, summary),
        progress=_progress(submission),
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
    """Whether it finished after its deadline."""
    summary = submission.summary
    is_done = submission.state is ExperimentState.DONE and summary.deadline_s is not None
    return is_done and summary.jct_s > (summary.deadline_s or 0.0)


def _share(state: ExperimentState, summary: Summary) -> float:
    if state is ExperimentState.DONE:
        return 1.0
    return min(summary.iterations / summary.target_iterations, 1.0) if summary.target_iterations else 0.0


def _progress(submission: Submission) -> str:
    state, summary = submission.state, submission.summary
    if state is ExperimentState.QUEUED:
        return "waits" if submission.reason else "waits for a free slot"
    if state is ExperimentState.STARTING:
        return "is measuring or planning"
    if not summary.stages:
        return ""
    if state is ExperimentState.DONE:
        return f"{counted(summary.stages, 'stage')}, {counted(summary.trials, 'trial')}"
    done = f"{summary.iterations} of {counted(summary.target_iterations, 'iteration')}"
    if summary.stages == 1:
        return done
    if summary.brackets > 1:
        return f"{summary.stage} of {counted(summary.stages, 'stage')}, {done}"
    return f"stage {summary.stage} ({summary.stage + 1} of {summary.stages}), {done}"


def _slack(submission: Submission, now: float) -> tuple[str, str]:
    """Return the text and the CSS class of the time between its (expected) end and its deadline."""
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


router = APIRouter(include_in_schema=False)
router.include_router(assets_router)
router.include_router(experiment.router)
router.include_router(compare.router)
router.include_router(pool.router)

Show = Annotated[str, Query(max_length=20)]
Cursor = Annotated[str | None, Query(max_length=200)]
Search = Annotated[str, Query(max_length=200)]
Like = Annotated[str, Query(pattern=NAME_PATTERN)]
Overrides = Annotated[Sequence[str], Query()]
_PAGE_SIZE = 25


@router.get("/")
def experiments(
    request: Request, service: Serving, _reader: Reader, show: Show = "all", search: Search = "", cursor: Cursor = None
) -> Response:
    """Experiments, newest first."""
    after = service.store.last_feed_id()
    return render(request, "experiments.html", **_listed(service, request, show, search, cursor), after=after)


@router.get("/fragments/experiments")
def experiment_rows(
    request: Request, service: Serving, _reader: Reader, show: Show = "all", search: Search = "", cursor: Cursor = None
) -> Response:
    """Part of the page that reloads."""
    return render(request, "experiments_rows.html", **_listed(service, request, show, search, cursor))


def _listed(service: Service, request: Request, show: str, search: str, cursor: str | None) -> dict[str, Any]:
    chosen = show if show in CHOICES else "all"
    search = " ".join(search_words(search))
    page = service.store.submissions(states=CHOICES[chosen][1], search=search, limit=_PAGE_SIZE, after=cursor)
    counts = counted_choices(service.store.count_states(search=search))
    now = time.time()
    return {
        "choices": [
            (name, f"{title} {counts[name]}", _address("/", show=name, search=search))
            for name, (title, _) in CHOICES.items()
        ],
        "search": search,
        "rows": [row(submission, now) for submission in page.items],
        "next": page.next,
        "later": cursor is not None,
        "show": chosen,
        "here": _address("/", show=chosen, search=search),
        "older": _address("/", show=chosen, search=search, cursor=page.next),
        "address": _address("/fragments/experiments", show=chosen, search=search, cursor=cursor),
        "origin": f"{request.url.scheme}://{request.url.netloc}",
    }


def _address(path: str, *, show: str, search: str, cursor: str | None = None) -> str:
    asked = {"show": "" if show == "all" else show, "search": search, "cursor": cursor}
    return f"{path}?{urlencode({key: value for key, value in asked.items() if value})}".rstrip("?")


@router.get("/plan")
def plan(request: Request, service: Serving, _reader: Reader, like: Like = "") -> Response:
    """Form that previews a plan; `like` names an experiment whose file it starts with."""
    known = service.store.submission(like) if like else None
    return render(request, "plan.html", text="" if known is None else file_of(known))


@router.get("/docs")
def docs(request: Request, _reader: Reader) -> Response:
    """The REST API, as /openapi.json describes it."""
    return render(request, "docs.html")


@router.get("/login")
def login(request: Request, next: Annotated[str, Query(max_length=2000)] = "/", problem: Show = "") -> Response:
    """Form that signs in; a signed-in browser is redirected."""
    wanted = safe_next(next)
    if principal_of(request) is not STRANGER and not problem:
        return RedirectResponse(wanted, 303)
    told = "The token is unknown, expired or revoked; check it, or ask for another." if problem else ""
    return render(request, "login.html", next=wanted, problem=told)


@router.post("/plan/check")
async def check(request: Request, service: Serving, reader: Reader, set: Overrides = ()) -> Response:
    """Expected effect of submitting the body, as JSON for the form."""
    body, media_type = await request.body(), request.headers.get("content-type", "")
    return JSONResponse(await run_in_threadpool(preflight, service, reader, body, media_type, set))
