"""The dashboard's scripts, styles and icon, and plotly's script: read once, told apart by their content."""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import Response

from rubberband.api.problems import NOT_FOUND, Problem

PLOTLY = "plotly.js"
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
    return frozenset(own | ({PLOTLY} if _plotly() is not None else set()))


@cache
def asset(name: str) -> Asset:
    """One of `names()`."""
    plotly = _plotly()
    if name == PLOTLY and plotly is not None:
        body = plotly.read_bytes()
    else:
        body = resources.files(__package__).joinpath("static", name).read_bytes()
    return Asset(
        body=body,
        zipped=gzip.compress(body, compresslevel=6, mtime=0),
        media_type=_TYPES[Path(name).suffix],
        version=hashlib.sha256(body).hexdigest()[:12],
    )


def address(name: str) -> str:
    """Where a page finds a file; another content has another address, so that it may be kept for ever."""
    return f"/static/{name}?v={_version(name)}"


@cache
def _version(name: str) -> str:
    """Plotly's is its release's: its four megabytes are read when they are asked for."""
    plotly = _plotly()
    if name == PLOTLY and plotly is not None:
        return str(plotly.stat().st_size)
    return asset(name).version


@cache
def _plotly() -> Path | None:
    """Plotly's script inside of its package, which need not be imported for it."""
    spec = find_spec("plotly")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0]) / "package_data" / "plotly.min.js"
    return path if path.is_file() else None


@router.get("/static/{name}")
def static(request: Request, name: str, v: str = "") -> Response:
    """A file of the dashboard. It needs no token: there is nothing of the user's in it."""
    if name not in names():
        raise Problem(NOT_FOUND, "the dashboard has no such file")
    found = asset(name)
    headers = {
        "Cache-Control": _FOREVER if v == _version(name) else _ASK_AGAIN,
        "ETag": f'"{found.version}"',
        "Vary": "Accept-Encoding",
    }
    if found.version in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(found.zipped, headers=headers | {"Content-Encoding": "gzip"}, media_type=found.media_type)
    return Response(found.body, headers=headers, media_type=found.media_type)
