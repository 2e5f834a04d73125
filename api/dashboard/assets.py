"""The dashboard's scripts, styles and icon, and plotly's script: read once, told apart by their content."""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import Response

from rubberband import views
from rubberband.api.problems import NOT_FOUND, Problem
from rubberband.views.report_html import PLOTLY

_TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}
_FOREVER = "public, max-age=31536000, immutable"
_ASK_AGAIN = "no-cache"

router = APIRouter(include_in_schema=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asset:
    """A file as it is sent."""

    body: bytes
    zipped: bytes
    media_type: str
    version: str


@cache
def names() -> frozenset[str]:
    """What there is; nothing else is ever opened."""
    here = resources.files(__package__).joinpath("static")
    own = {file.name for file in here.iterdir() if Path(file.name).suffix in _TYPES}
    return frozenset(own | {PLOTLY})


@cache
def asset(name: str) -> Asset:
    """One of `names()`."""
    place = resources.files(views) if name == PLOTLY else resources.files(__package__).joinpath("static")
    body = place.joinpath(name).read_bytes()
    return Asset(
        body=body,
        zipped=gzip.compress(body, compresslevel=6, mtime=0),
        media_type=_TYPES[Path(name).suffix],
        version=hashlib.sha256(body).hexdigest()[:12],
    )


def address(name: str) -> str:
    """Where a page finds a file; another content has another address, so that it may be kept for ever."""
    return f"/static/{name}?v={asset(name).version}"


@router.get("/static/{name}")
def static(request: Request, name: str, v: str = "") -> Response:
    """A file of the dashboard. It needs no token: there is nothing of the user's in it."""
    if name not in names():
        raise Problem(NOT_FOUND, "the dashboard has no such file")
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
