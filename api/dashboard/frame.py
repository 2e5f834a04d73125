"""Frame of the pages: templates, static files and compression.

Static files and plotly's script are read once, and versioned by their content. Templates escape all values. Filters
format figures as all views do: `duration`, `usd`, `number`, `instant`.
"""

from __future__ import annotations

import gzip
import hashlib
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, Response
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from rubberband import views
from rubberband.api.problems import NOT_FOUND, HttpProblem
from rubberband.api.routes import principal_of
from rubberband.api.security import STRANGER
from rubberband.executor.core.events import Event
from rubberband.units import counted, duration, format_bytes, in_unit, instant_text
from rubberband.views.formatting import number, timed, usd
from rubberband.views.report.page import DENSE, NARROW, PLOTLY

router = APIRouter(include_in_schema=False)


_TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}
_FOREVER = "public, max-age=31536000, immutable"
_ASK_AGAIN = "no-cache"


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


def prose(text: str) -> Markup:
    """Return a description, escaped, with its code and paragraphs marked."""
    paragraphs = re.split(r"\n\s*\n", text.strip())
    coded = (re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(one.replace("\n", " ")))) for one in paragraphs)
    return Markup("".join(f"<p>{one}</p>" for one in coded if one))


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
