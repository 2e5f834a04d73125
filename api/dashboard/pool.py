"""The page of the pool that experiments share: who holds what, what is promised, the shares of tokens, and the bill."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from markupsafe import Markup

from rubberband.api.dashboard.frame import render
from rubberband.api.experiments.admission import Admission
from rubberband.api.routes import Reader, Service, Serving
from rubberband.api.routes.service import pool_view
from rubberband.api.settings import SharedPool
from rubberband.cloud.pool import RemotePool
from rubberband.errors import ProviderError
from rubberband.pools.report import (
    CHARTS,
    PoolStatus,
    colours_of,
    experiments_table,
    money_table,
    pool_cards,
    pool_charts,
    promises_chart,
)
from rubberband.spec.pool import PoolFolder
from rubberband.units import counted, duration, format_usd, month_begin
from rubberband.views.formatting import Card, TextTable
from rubberband.views.report.page import script_json

router = APIRouter(include_in_schema=False)


@router.get("/pool")
def pool(request: Request, service: Serving, _reader: Reader) -> Response:
    """The pool as of now. 404 without one."""
    return render(request, "pool.html", **_shown(service))


@router.get("/fragments/pool")
def pool_live(request: Request, service: Serving, _reader: Reader) -> Response:
    """Part of the page that reloads."""
    return render(request, "pool_live.html", **_shown(service))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pool:
    """A pool as of now, as its service and its broker have it."""

    shared: SharedPool
    admission: Admission
    view: Mapping[str, Any]
    """The answer of `GET /v1/pool`."""
    status: PoolStatus | None
    """None while its broker does not answer, and for a pool that has none."""
    now: float


def _shown(service: Service) -> dict[str, Any]:
    now = service.settings.clock()
    view = pool_view(service, now)
    shared, admission = service.settings.pool, service.admission
    assert shared is not None, "there is a view"
    assert admission is not None, "there is a view"
    found = _Pool(shared=shared, admission=admission, view=view, status=_status(shared), now=now)
    tenants = () if found.status is None else found.status["tenants"]
    known = service.store.existing({tenant["experiment"] for tenant in tenants})
    known |= {member["name"] for member in view["experiments"]}
    return {
        "pool": view,
        "cards": _cards(found),
        "members": [_member(member, now) for member in view["experiments"]],
        "tables": list(_tables(service, found)),
        "charts": CHARTS,
        "known": known,
        "is_silent": shared.folder is not None and found.status is None,
        "figures": Markup(script_json(_figures(found, known))),
    }


def _status(pool: SharedPool) -> PoolStatus | None:
    if pool.folder is None:
        return None
    try:
        return RemotePool(PoolFolder(path=Path(pool.folder))).glance()
    except ProviderError:
        return None


def _figures(pool: _Pool, known: Collection[str]) -> dict[str, Any]:
    """Return the charts; what is drawn of experiments that the service knows leads to their pages."""
    loans = [] if pool.status is None else pool.status["loans"]
    calendar = pool.admission.calendar()
    colours = colours_of([*(loan["experiment"] for loan in loans), *calendar.promises])
    promised = promises_chart(calendar, pool.now, colours)
    drawn = {} if promised is None else {"promises": promised}
    drawn |= {} if pool.status is None else pool_charts(pool.status, colours)
    for trace in (trace for figure in drawn.values() for trace in figure["data"]):
        if trace.get("name") in known:
            trace["meta"] = {"href": f"/experiments/{trace['name']}"}
    return drawn


def _cards(pool: _Pool) -> list[Card]:
    shared, members, status = pool.shared, pool.view["experiments"], pool.status
    gpus = sum(member["promised_gpus"] for member in members)
    promised = Card("promised now", f"{gpus} of {counted(shared.gpus, 'GPU')}", (_until(pool),))
    if status is None:
        held = sum(member["instances"] for member in members)
        return [Card("instances", f"{held} of {shared.instances}"), promised]
    month_usd = status["usd"]["month"]
    planned_usd = pool.admission.budgets.committed_usd(pool.now, bill_usd=month_usd)[month_begin(pool.now)] - month_usd
    first, *rest = pool_cards(status, planned=f"{format_usd(max(0.0, planned_usd))} more planned")
    return [first, promised, *rest]


def _until(pool: _Pool) -> str:
    ends = [member["promise"]["end_at"] for member in pool.view["experiments"] if member["promise"]]
    last_s = max(ends, default=pool.now) - pool.now
    return f"the last one ends in {duration(last_s)}" if last_s > 0 else "nothing is promised from now on"


def _member(member: Mapping[str, Any], now: float) -> dict[str, Any]:
    """Return the row of an experiment: GET /v1/pool's, with its promise in words."""
    promise = member["promise"]
    if promise is None:
        return {**member, "promised": ""}
    if promise["end_at"] <= now:
        return {**member, "promised": f"ended {duration(now - promise['end_at'])} ago"}
    begins = "now" if promise["start_at"] <= now else f"starts in {duration(promise['start_at'] - now)}"
    return {**member, "promised": f"{begins}, ends in {duration(promise['end_at'] - now)}"}


def _tables(service: Service, pool: _Pool) -> Iterator[TextTable]:
    owners = {
        *service.store.owners(since=month_begin(pool.now)),
        *(one["owner"] for one in pool.view["experiments"]),
        *pool.shared.weights,
        *pool.shared.budgets_usd,
    }
    if any(owners):
        yield _shares(service, pool, sorted(owners))
    if pool.status is not None and pool.status["tenants"]:
        yield replace(experiments_table(pool.status), title="Loans and cost by experiment")
        yield money_table(pool.status)


def _shares(service: Service, pool: _Pool, owners: Sequence[str]) -> TextTable:
    """Return a row for each token: what it holds and used this month beside its weight and its budget."""
    since = month_begin(pool.now)
    gpu_s = {
        owner: _gpu_s(pool.status, {row.name for row in service.store.submitted_by(owner, since=since)})
        for owner in owners
    }
    total_s = sum(gpu_s.values())
    rows = []
    for owner in owners:
        budget_usd = pool.shared.budgets_usd.get(owner)
        rows.append(
            (
                owner or "(no token)",
                f"{pool.shared.weights.get(owner, 1.0):g}",
                str(sum(one["instances"] for one in pool.view["experiments"] if one["owner"] == owner)),
                f"{gpu_s[owner] / 3600.0:.2f}",
                f"{100.0 * gpu_s[owner] / total_s:.0f} %" if total_s else "-",
                format_usd(pool.admission.budgets.used_usd(owner, pool.now)),
                "none" if budget_usd is None else format_usd(budget_usd),
            )
        )
    header = ("token", "weight", "instances", "GPU hours", "share", "spent or planned", "budget")
    note = "GPU hours of experiments that were submitted this month (UTC); money that is spent or planned in it."
    return TextTable(title="Shares", header=header, rows=tuple(rows), notes=(note,))


def _gpu_s(status: PoolStatus | None, experiments: set[str]) -> float:
    if status is None:
        return 0.0
    return math.fsum(
        loan["gpus"] * ((loan["ended_at"] or status["now"]) - loan["running_at"])
        for loan in status["loans"]
        if loan["experiment"] in experiments
    )
