"""Who calls the fake (the driver, what runs on a worker, an administrator) and the policies that the package ships."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from rubberband.cloud.aws.account_parts import GUARD, HEAD, WORKER, Bounds, policies
from tests.ec2.policy import Statement, statements
from tests.ec2.world import ACCOUNT

PRINCIPALS: Mapping[str, str] = {
    "driver": "assumed-role/rubberband-head/i-0d21fe20000000001",
    "worker": "assumed-role/rubberband-worker/i-0e02ce20000000001",
    "guard": "assumed-role/rubberband-guard/a-schedule",
    "admin": "user/admin",
}
BUCKET = "rubberband-fake-checkpoints"
"""The one bucket that the account has: it stands where a policy leaves the bucket open."""


def arn_of(principal: str) -> str:
    """As GetCallerIdentity tells it."""
    kind = PRINCIPALS[principal]
    return f"arn:aws:{'iam' if kind.startswith('user/') else 'sts'}::{ACCOUNT}:{kind}"


@lru_cache(maxsize=1)
def shipped_policies() -> Mapping[str, tuple[Statement, ...] | None]:
    """Principal -> the statements of its policy; None, which is everything, for one that has no policy file."""
    return {principal: _shipped(principal) for principal in PRINCIPALS}


def _shipped(principal: str) -> tuple[Statement, ...] | None:
    kind = {"driver": HEAD, "worker": WORKER, "guard": GUARD}.get(principal)
    if kind is None:
        return None
    bounds = Bounds(account=ACCOUNT, owner="rubberband", bucket=BUCKET)
    return tuple(each for document in policies(bounds)[kind].values() for each in statements(document))
