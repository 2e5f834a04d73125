"""The roles that EC2 needs, with the least rights: the shipped policies, filled in for one account. Pure.

Policies are files in `policies`. OWNER and BUCKET in them are replaced here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

Document = dict[str, Any]

HEAD, WORKER, GUARD = "head", "worker", "guard"
POLICY = "rubberband"
"""Name of the inline policy of each role."""
_LAUNCH = "LaunchOnlyTaggedInstances"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Reach of the roles of one owner."""

    account: str
    owner: str
    bucket: str
    region: str | None = None
    """The only region in which the head may launch instances; None: any."""
    types: tuple[str, ...] = ()
    """Types that the head may launch, such as `g5.*`; empty: any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """A role of IAM."""

    name: str
    trust: Document
    policies: Mapping[str, Document]
    """Name -> inline policy."""
    has_profile: bool
    """Whether instances have it, through an instance profile of the same name."""


def roles(bounds: Bounds) -> tuple[Role, ...]:
    """Return the roles of the head, of workers, and of the schedules that guard instances."""
    driver = policy("driver", bounds)
    launch = _launch_of(driver)
    if bounds.types:
        launch["Condition"]["StringLike"] = {"ec2:InstanceType": list(bounds.types)}
    if bounds.region is not None:
        launch["Condition"]["StringEquals"]["ec2:Region"] = bounds.region
    policies = {
        HEAD: {POLICY: driver, "session": policy("session", bounds)},
        WORKER: {POLICY: policy("worker", bounds)},
        GUARD: {POLICY: policy("guard", bounds)},
    }
    return tuple(
        Role(
            name=f"{bounds.owner}-{kind}",
            trust=_trust(bounds.account if kind == GUARD else None),
            policies=of_kind,
            has_profile=kind != GUARD,
        )
        for kind, of_kind in policies.items()
    )


def types_in(driver: Document) -> tuple[str, ...]:
    """Return the types to which a head's policy limits launches; empty: to none."""
    return tuple(_launch_of(driver)["Condition"].get("StringLike", {}).get("ec2:InstanceType", ()))


def _launch_of(driver: Document) -> Any:
    return next((one for one in driver["Statement"] if one.get("Sid") == _LAUNCH), {"Condition": {}})


def policy(name: str, bounds: Bounds) -> Document:
    """Return a shipped policy, filled in."""
    text = files("rubberband.cloud.aws").joinpath("policies", f"{name}.json").read_text(encoding="utf-8")
    document: Document = json.loads(text.replace("BUCKET", bounds.bucket).replace("OWNER", bounds.owner))
    return document


def _trust(scheduled_by: str | None) -> Document:
    """Return the policy that lets EC2 assume a role, or the schedules of one account only."""
    statement: Document = {
        "Effect": "Allow",
        "Principal": {"Service": "ec2.amazonaws.com" if scheduled_by is None else "scheduler.amazonaws.com"},
        "Action": "sts:AssumeRole",
    }
    if scheduled_by is not None:
        statement["Condition"] = {"StringEquals": {"aws:SourceAccount": scheduled_by}}
    return {"Version": "2012-10-17", "Statement": [statement]}
