"""Whether a request was meant for this service: its Host, and the page that sent it. Pure."""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import urlsplit

from rubberband.api.problems import FOREIGN_HOST, FOREIGN_ORIGIN, Problem
from rubberband.units import shown

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


def host_of(value: str) -> str:
    """The name in a Host header, lower-case, without port and final dot: `[::1]:80` -> `[::1]`."""
    name, colon, port = value.strip().rpartition(":")
    if not colon or not (port == "" or port.isdigit()):
        name = value.strip()
    return name.lower().removesuffix(".")


def require_host(values: Collection[str], served: Collection[str]) -> None:
    """Refuse a request for another host, which a page elsewhere may send by a name of its own. Raises Problem."""
    if "*" in served:
        return
    host = host_of(next(iter(values))) if len(values) == 1 else ""
    if host not in served:
        asked = shown(host) if host else "no single host"
        raise Problem(
            FOREIGN_HOST, f"this service is not {asked}; ask for one of its names, or start it with --host-name"
        )


def require_own_page(method: str, *, fetch_site: str | None, origin: str | None, host: str) -> None:
    """Refuse a change that a page of another site asks for, in the name of who looks at it. Raises Problem.

    Browsers say where a request comes from (Sec-Fetch-Site, or else Origin); other clients say neither.
    """
    if method in SAFE_METHODS:
        return
    if fetch_site is not None:
        own = fetch_site in {"same-origin", "none"}
    else:
        own = origin is None or _netloc(origin) == host.lower()
    if not own:
        raise Problem(
            FOREIGN_ORIGIN, "a page of another site asked for this; send it from this service's pages, or with a token"
        )


def _netloc(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def safe_next(wanted: str | None) -> str:
    """Where to go after signing in: a path of this service, whatever was asked for."""
    path = wanted or "/"
    plain = path.isascii() and path.isprintable() and "\\" not in path and " " not in path
    inside = path.startswith("/") and not path.startswith("//")
    return path if plain and inside and len(path) <= 2000 else "/"
