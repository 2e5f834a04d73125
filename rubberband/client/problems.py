"""The service's problems as the exceptions that the same mistake raises without a service."""

from __future__ import annotations

import json
from typing import Any

import httpx

from rubberband.errors import (
    InfeasibleError,
    InputError,
    NameTakenError,
    ProfileMissingError,
    RubberbandError,
    ServiceError,
)
from rubberband.values.plan import Change, Remedy

_TYPES: dict[str, type[RubberbandError]] = {
    "name-taken": NameTakenError,
    "profile-missing": ProfileMissingError,
    "invalid": InputError,
    "malformed": InputError,
    "not-allowed-here": InputError,
    "not-found": InputError,
    "conflict": InputError,
    "too-large": InputError,
    "planning-too-long": InputError,
    "idempotency-key-reused": InputError,
}


def raise_for(response: httpx.Response) -> None:
    """Raise what a response stands for, unless it is a success; its body must have been read.

    Raises InfeasibleError, NameTakenError, ProfileMissingError, InputError (all with the service's own words), or
    ServiceError.
    """
    if response.is_success:
        return
    problem = _problem(response)
    detail = str(problem.get("detail") or f"{response.status_code} {response.reason_phrase}")
    slug = str(problem.get("type", "")).rpartition("/")[2]
    nearest = problem.get("nearest")
    if slug == "infeasible" and isinstance(nearest, dict):
        raise InfeasibleError(
            detail,
            shortest_jct_s=nearest["jct_s"],
            cheapest_usd=nearest["cost_usd"],
            remedies=[_remedy(each) for each in problem.get("remedies", ())],
        )
    if response.status_code == 401:
        raise InputError(f"{detail}; set RUBBERBAND_TOKEN, or give token=")
    if response.status_code == 403:
        raise InputError(detail)
    if slug in _TYPES:
        raise _TYPES[slug](detail)
    raise ServiceError(f"{_where(response)} answered {response.status_code}: {detail}", status=response.status_code)


def unreachable(url: str, error: Exception) -> ServiceError:
    """What a service that does not answer is told as."""
    told = " ".join(str(error).split()) or type(error).__name__
    if "CERTIFICATE_VERIFY_FAILED" in told:
        remedy = "name the file of the authority that signed it in SSL_CERT_FILE"
    else:
        remedy = "start one with `rubberband serve`, or set RUBBERBAND_SERVER"
    return ServiceError(f"the service at {url} does not answer ({told}); {remedy}", status=None)


def _remedy(told: dict[str, Any]) -> Remedy:
    changes = tuple(Change(key=one["key"], value=one["value"], was=one["was"]) for one in told["changes"])
    figures = {name: told[name] for name in ("jct_s", "cost_usd", "later_s", "dearer_usd")}
    return Remedy(changes=changes, **figures)


def _problem(response: httpx.Response) -> dict[str, Any]:
    try:
        found = json.loads(response.content)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _where(response: httpx.Response) -> str:
    return f"{response.request.method} {response.request.url.copy_with(userinfo=None, query=None)}"
