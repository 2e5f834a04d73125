"""What was submitted, as the page of an experiment tells it that has not begun (or never did). Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from rubberband.api.store.records import Submission
from rubberband.errors import InputError
from rubberband.units import parse_deadline
from rubberband.views.words import duration, printable, setting, usd

Fact = tuple[str, str]
"""What, and what is asked for."""
_SAME_DAY_S = 12 * 3600.0
"""So near, the time of day is enough."""


def facts(submission: Submission, now: float) -> list[Fact]:
    """Code, place, search and limits, as far as the file says; at `now` (Unix time)."""
    words = submission.words
    found = [
        ("runs", str(words.get("entrypoint") or "")),
        ("on", " ".join(_place(_part(words, "resources")))),
        ("searches", ", ".join(_search(_part(words, "search")))),
        *_limits(_part(words, "constraints"), now),
        ("policy", "" if submission.policy == "optimal" else submission.policy),
        ("profile", "" if words.get("profile") or not words else "measured first"),
    ]
    return [(what, printable(told)) for what, told in found if told]


def _part(words: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = words.get(name)
    return found if isinstance(found, Mapping) else {}


def _place(resources: Mapping[str, Any]) -> Iterator[str]:
    types = resources.get("instance_types") or resources.get("instance_type")
    if most := resources.get("max_instances"):
        yield f"up to {most} x" if types else f"up to {most} instances"
    if types:
        yield " or ".join(map(str, types)) if isinstance(types, list | tuple) else str(types)
    if resources.get("market") == "spot":
        yield "on spot"
    if provider := resources.get("provider"):
        yield f"({provider}, {resources['region']})" if provider == "aws" else f"({provider})"


def _search(search: Mapping[str, Any]) -> Iterator[str]:
    scheduler = _part(search, "scheduler")
    kind = f" ({scheduler['type']})" if scheduler.get("type") else ""
    if number := scheduler.get("num_samples"):
        yield f"{setting(number)} configurations{kind}"
    if metric := search.get("metric"):
        yield f"for the {'highest' if search.get('mode') == 'max' else 'lowest'} {metric}"


def _limits(constraints: Mapping[str, Any], now: float) -> Iterator[Fact]:
    yield "deadline", _deadline(constraints.get("deadline"), now)
    cap_usd = constraints.get("max_cost")
    yield "max_cost", f"{usd(cap_usd)} USD" if isinstance(cap_usd, int | float) else "none"


def _deadline(asked: Any, now: float) -> str:
    if asked is None:
        return "none"
    try:
        found = parse_deadline(asked)
    except InputError:
        return str(asked)
    if not isinstance(found, datetime):
        return f"{duration(found)} from the start"
    left_s = found.timestamp() - now
    when = f"{found:%H:%M} UTC" if abs(left_s) < _SAME_DAY_S else f"{found:%Y-%m-%d %H:%M} UTC"
    return f"in {duration(left_s)}, at {when}" if left_s >= 0 else f"passed {duration(-left_s)} ago, at {when}"
