"""The pages for people: their frame (templates, static files), the list, the form, the page to sign in.

They show what the REST API answers. Templates escape all values. Filters format figures as all views do: `duration`,
`usd`, `number`, `instant`.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache, partial
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, cast
from urllib.parse import quote, urlencode

import yaml
from fastapi import APIRouter, Depends, Form, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from rubberband import views
from rubberband.api.body import read_experiment, require_allowed
from rubberband.api.dashboard.list_groups import TITLES, By, Group, groups_of
from rubberband.api.dashboard.reference import groups, prose, schemas
from rubberband.api.problems import NOT_FOUND, HttpProblem
from rubberband.api.routes import NAME_PATTERN, Reader, Service, Serving, authenticator_of, caller_of, principal_of
from rubberband.api.routes.queueing import place_if_submitted, previewing, queue_views
from rubberband.api.security import COOKIE, STRANGER, cookie_of, safe_next
from rubberband.api.store.schema import Page, Principal
from rubberband.client.models import QueueView
from rubberband.errors import InputError
from rubberband.executor.core.events import Event
from rubberband.spec.experiment import Experiment
from rubberband.spec.loading import Dumper
from rubberband.spec.resources import Aws
from rubberband.states import ACTIVE, OVER, ExperimentState
from rubberband.units import counted, duration, format_bytes, format_duration, in_unit, instant_text, parse_deadline
from rubberband.values.plan import Policy
from rubberband.values.submission import Submission, Summary, search_words
from rubberband.views.formatting import number, printable, timed, usd, usd_decimals
from rubberband.views.report.page import DENSE, NARROW, PLOTLY

# Static files of the dashboard, and plotly's script: read once, versioned by their content.

_TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}
_FOREVER = "public, max-age=31536000, immutable"
_ASK_AGAIN = "no-cache"

router = APIRouter(include_in_schema=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asset:
    """Static file, plain and compressed."""

    body: bytes
    zipped: bytes
    media_type: str
    version: str


@cache
def asset_names() -> frozenset[str]:
    """Return all file names; nothing else is ever opened."""
    here = resources.files(__package__).joinpath("static")
    own = {file.name for file in here.iterdir() if Path(file.name).suffix in _TYPES}
    return frozenset(own | {DENSE, NARROW, PLOTLY})


@cache
def asset(name: str) -> Asset:
    """Return one of `asset_names()`."""
    place = (
        resources.files(views) if name in (DENSE, NARROW, PLOTLY) else resources.files(__package__).joinpath("static")
    )
    body = place.joinpath(name).read_bytes()
    return Asset(
        body=body,
        zipped=gzip.compress(body, compresslevel=6, mtime=0),
        media_type=_TYPES[Path(name).suffix],
        version=hashlib.sha256(body).hexdigest()[:12],
    )


def asset_address(name: str) -> str:
    """Return the address of a file. It changes with the content, so that browsers may cache it without limit."""
    return f"/static/{name}?v={asset(name).version}"


@router.get("/static/{name}")
def static(request: Request, name: str, v: str = "") -> Response:
    """File of the dashboard. Public: it holds no user data."""
    if name not in asset_names():
        raise HttpProblem(NOT_FOUND, "the dashboard has no such file")
    found = asset(name)
    headers = {
        "Cache-Control": _FOREVER if v == found.version else _ASK_AGAIN,
        "ETag": f'"{found.version}"',
        "Vary": "Accept-Encoding",
    }
    if found.version in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(found.zipped, headers=headers | {"Content-Encoding": "gzip"}, media_type=found.media_type)
    return Response(found.body, headers=headers, media_type=found.media_type)


def render(request: Request, template: str, *, status: int = 200, unit: str = "USD", **values: Any) -> HTMLResponse:
    """Render a template; `unit` is that of its amounts."""
    body, headers = zipped(request, in_unit(_rendered(request, template, status=status, **values), unit).encode())
    return HTMLResponse(body, status, headers)


def frame_of(request: Request, name: str) -> str:
    """Return the top of the site as markup for the report of an experiment, with the way back to its page."""
    return _rendered(request, "report_frame.html", name=name)


def _rendered(request: Request, template: str, *, status: int = 200, **values: Any) -> str:
    """Render a template; all get `path`, `who`, `stranger`, `shares_pool`, `now` and `status`."""
    who, settings = principal_of(request), request.app.state.service.settings
    shared = {
        "path": request.url.path,
        "who": who,
        "stranger": who is STRANGER,
        "shares_pool": settings.pool is not None,
        "now": settings.clock(),
        "status": status,
    }
    return _templates.get_template(template).render(shared | values)


_MANY_BYTES = 8192


def zipped(request: Request, body: bytes) -> tuple[bytes, dict[str, str]]:
    """Return a body, compressed if it is large and the browser takes that, and its headers."""
    headers = {"Vary": "Accept-Encoding"}
    if len(body) <= _MANY_BYTES or "gzip" not in request.headers.get("accept-encoding", ""):
        return body, headers
    return gzip.compress(body, compresslevel=4, mtime=0), headers | {"Content-Encoding": "gzip"}


def sentence(text: str) -> str:
    """Capitalise a line and end it with a full stop."""
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith(('.', '!', '?')) else '.'}"


def ago(at: float, now: float) -> str:
    """Format the time since `at`, in the largest unit."""
    passed_s = max(now - at, 0.0)
    for unit, unit_s in (("d", 86400.0), ("h", 3600.0), ("m", 60.0)):
        if passed_s >= unit_s:
            return f"{int(passed_s / unit_s)}{unit} ago"
    return "just now" if passed_s < 10 else f"{int(passed_s)}s ago"


def _environment() -> Environment:
    templates = Environment(
        loader=PackageLoader("rubberband.api.dashboard"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {"duration": duration, "usd": usd, "number": number, "counted": counted}
    templates.filters |= {
        "instant": instant_text,
        "sentence": sentence,
        "timed": lambda text: Markup(timed(text)),
        "bytes": format_bytes,
        "prose": prose,
    }
    kinds = " ".join(["state", *sorted({kind.__name__ for kind in Event.__subclasses__()})])
    templates.globals |= {"asset": asset_address, "ago": ago, "kinds": kinds}
    return templates


_templates = _environment()


def wants_page(request: Request) -> bool:
    """Whether a browser asks for a page outside of REST."""
    return not request.url.path.startswith("/v1/") and "text/html" in request.headers.get("accept", "")


def problem_page(request: Request, problem: HttpProblem) -> Response:
    """Render a problem as a page, with its status and headers."""
    kind = problem.kind
    page = render(request, "problem.html", status=kind.status, title=kind.title, detail=problem.detail)
    page.headers.update(problem.headers)
    return page


# The file of a stored experiment, to be planned and submitted again. Pure.


_PLAIN_AWS = ("aws", Aws().model_dump(mode="json", by_alias=True, exclude_none=True))


def file_of(submission: Submission) -> str:
    """Return the experiment file, its deadline as a duration from the start; empty if none is stored."""
    words = file_words(submission)
    if not words:
        return ""
    resources = words.get("resources")
    if isinstance(resources, Mapping):
        words["resources"] = {key: value for key, value in _given(resources).items() if (key, value) != _PLAIN_AWS}
    return yaml.dump(_given(words), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)


def file_words(submission: Submission) -> dict[str, Any]:
    """Return the words of its file, its deadline as a duration from the start."""
    words, constraints = dict(submission.words), submission.words.get("constraints")
    if isinstance(constraints, Mapping):
        words["constraints"] = _given(constraints) | _deadline(constraints.get("deadline"), submission.created_at)
    return words


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


def preflight(service: Service, principal: Principal, experiment: Experiment) -> dict[str, Any]:
    """Return the expected effect of a submission, which is not made, for the form.

    `free_name` is the name, or a similar one if it is taken. `deadline_s` counts from now. `measures` says whether a
    profile is measured first, and `reason` why it cannot be submitted.
    """
    deadline_s, reason = None, ""
    try:
        deadline_s = experiment.constraints.deadline_from(service.settings.clock())
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


# The pages of the dashboard, but for those of one experiment, of a comparison and of the pool.

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
Like = Annotated[str, Query(pattern=NAME_PATTERN)]
Overrides = Annotated[Sequence[str], Query()]
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
        "choices": [(name, f"{title} {counts[name]}", at("/", show=name)) for name, title in titles.items()],
        "search": search,
        "asked": ", ".join([*([search] if search else []), *tags]),
        "tags": [(gone, at("/", show=show, tags=[tag for tag in tags if tag != gone])) for gone in tags],
        "rows": _aligned([row(submission, now, places.get(submission.name)) for submission in page.items]),
        "group": asked.group,
        "grouped": [(by, title, at("/", show=show, group=by)) for by, title in TITLES.items()],
        "groups": [] if asked.group is None else _groups(found, asked.group, asked),
        "next": "" if asked.group else page.next,
        "later": asked.cursor is not None,
        "show": show,
        "here": at("/", show=show),
        "older": at("/", show=show, cursor=page.next),
        "address": at("/fragments/experiments", show=show, cursor=asked.cursor, group=asked.group or ""),
        "origin": f"{request.url.scheme}://{request.url.netloc}",
    }


_MOST_GROUPED, _AT_ONCE = 5000, 500


def _groups(found: Callable[..., Page], by: By, asked: AskedRows) -> list[tuple[Group, str]]:
    """Return the groups of all experiments of the list, the newest of very many, with the addresses of their lists."""
    rows: list[Submission] = []
    cursor: str | None = ""
    while cursor is not None and len(rows) < _MOST_GROUPED:
        page = found(limit=_AT_ONCE, after=cursor or None)
        rows += page.items
        cursor = page.next
    return [
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


@router.get("/plan")
def plan(request: Request, service: Serving, _reader: Reader, like: Like = "") -> Response:
    """Form that previews a plan; `like` names an experiment whose file it starts with."""
    known = service.store.submission(like) if like else None
    return render(request, "plan.html", text="" if known is None else file_of(known))


@router.get("/docs")
def docs(request: Request, _reader: Reader) -> Response:
    """The REST API, as /openapi.json describes it."""
    document = request.app.openapi()
    found = groups(document, str(request.base_url).rstrip("/"))
    return render(request, "docs.html", info=document["info"], groups=found, schemas=schemas(document))


@router.get("/login")
def login(request: Request, next: Annotated[str, Query(max_length=2000)] = "/", problem: Show = "") -> Response:
    """Form that signs in; a signed-in browser is redirected."""
    wanted = safe_next(next)
    if principal_of(request) is not STRANGER and not problem:
        return RedirectResponse(wanted, 303)
    text = "The token is unknown, expired or revoked; check it, or ask for another." if problem else ""
    return render(request, "login.html", next=wanted, problem=text)


@router.post("/plan/check")
async def check(
    request: Request, service: Serving, reader: Reader, set: Overrides = (), policy: Policy = "optimal"
) -> Response:
    """Expected effect of submitting the body, as JSON for the form; `queue` is its place where no slot is free."""
    body, media_type = await request.body(), request.headers.get("content-type", "")
    experiment = await run_in_threadpool(read_experiment, body, media_type, set)
    told = await run_in_threadpool(preflight, service, reader, experiment)
    if told["reason"]:
        return JSONResponse({**told, "queue": None})
    plan = previewing(service, policy, caller_of(request))
    return JSONResponse({**told, "queue": await place_if_submitted(service, experiment, plan, owner=reader.name)})


# Signing in and out: requests of the form at /login.


@router.post("/login")
async def sign_in(
    request: Request,
    token: Annotated[str, Form(max_length=1000)] = "",
    next: Annotated[str, Form(max_length=2000)] = "/",
) -> Response:
    """Sign in and redirect to `next`; with a wrong token back to the form (`problem=token`)."""
    address = request.client.host if request.client else ""
    authenticator = authenticator_of(request)
    wanted = safe_next(next)
    session = await authenticator.sign_in(token, address) if authenticator.required else ""
    if session is None:
        return RedirectResponse(f"/login?problem=token&next={quote(wanted, safe='')}", 303)
    answer = RedirectResponse(wanted, 303)
    if session:
        answer.set_cookie(
            COOKIE,
            session,
            max_age=int(authenticator.tokens.session_s),
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
    return answer


@router.post("/logout")
async def sign_out(request: Request) -> Response:
    """Sign out. Copies of the cookie are invalid, too."""
    session = cookie_of(request.headers.get("cookie", ""))
    if session is not None:
        await authenticator_of(request).sign_out(session)
    answer = RedirectResponse("/login", 303)
    answer.delete_cookie(COOKIE, httponly=True, samesite="strict", secure=request.url.scheme == "https")
    return answer
