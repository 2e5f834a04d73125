"""An account of AWS, set up for rubberband and cleared again: bucket, roles, quotas, budget.

Both ways first look, and return a plan of what is there and what is to be done; nothing is changed before the steps of
the plan are carried out. A second look after that finds nothing to do, and one after a cut finds the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rubberband.cloud.aws import account_parts
from rubberband.cloud.aws.account_parts import (
    SPOT_ROLE,
    AccountChange,
    AccountChanges,
    Bounds,
    Role,
    account_plan,
    held_types,
    plan_budget,
    plan_no_budget,
    plan_no_role,
    plan_quotas,
    plan_role,
    plan_spot_role,
    roles,
)
from rubberband.cloud.aws.calls import AwsSession
from rubberband.cloud.aws.cleanup import living, living_elsewhere
from rubberband.cloud.aws.client import pages
from rubberband.cloud.aws.errors import OF_AWS, code_of, denied_by, explain, missing_action
from rubberband.cloud.aws.preflight import sign_in
from rubberband.errors import InputError
from rubberband.spec.account import BUCKET_FILE, Remembered, remember, remembered
from rubberband.units import counted, format_bytes

FIRST_TYPE = "g4dn.xlarge"
"""Type whose quotas are asked for where no types are given: that of the first run in the documents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """Choices of `rubberband aws setup`."""

    owner: str = "rubberband"
    bucket: str | None = None
    """A bucket of the user's; None: one is made."""
    types: tuple[str, ...] = ()
    """The only types that the head may launch; empty: those of an earlier set-up, else any; `*`: any."""
    vcpus: int = 16
    """vCPUs to ask for, on each market."""
    budget_usd: float | None = None
    email: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountState:
    """An account as it was found."""

    account: str
    who: str
    roles: tuple[Role, ...]
    plan: AccountChanges


def look_at(session: AwsSession, home: Path, wishes: Wishes) -> AccountState:
    """Return what the account has and lacks. Raises InputError in one line."""
    known = remembered(home)
    if known is not None and known.region != session.region:
        raise InputError(
            f"--region: {home / BUCKET_FILE} has bucket {known.bucket} in {known.region}, and roles name one bucket "
            f"and one region; give --region {known.region}, or run `rubberband aws teardown` first"
        )
    with _administrator():
        account, who = _signed_in(session)
        _check_types(session, wishes.types)
        plan = AccountChanges()
        account_plan(session, plan)
        bucket = _bucket(session, account, wishes, known, plan)
        types = () if wishes.types == ("*",) else wishes.types or held_types(session, wishes.owner)
        bounds = Bounds(account=account, owner=wishes.owner, bucket=bucket, region=session.region, types=types)
        for role in roles(bounds):
            plan_role(session, role, wishes.owner, plan)
        plan_spot_role(session, plan)
        plan_quotas(session, types or (FIRST_TYPE,), wishes.vcpus, plan)
        if wishes.budget_usd is not None and wishes.email is not None:
            plan_budget(session, account, wishes.owner, wishes.budget_usd, wishes.email, plan)
    here = Remembered(bucket=bucket, region=session.region)
    if known == here:
        plan.there.append(f"{home / BUCKET_FILE}, so that no file needs a bucket")
    else:
        plan.add(f"write {home / BUCKET_FILE}, so that no file needs a bucket", partial(remember, home, here))
    return AccountState(account=account, who=who, roles=roles(bounds), plan=plan)


def look_to_clear(
    session: AwsSession,
    home: Path,
    owner: str,
    open_session: Callable[[str], AwsSession],
    *,
    with_checkpoints: Callable[[str], bool],
) -> AccountState:
    """Return what setup made for the owner and what is to be deleted. Raises InputError in one line.

    `open_session` opens AWS in another region: roles are those of all. `with_checkpoints` is asked, with what is in it,
    whether a bucket that is not empty may go too.
    """
    with _administrator():
        account, who = _signed_in(session)
        alive, unknown = living_elsewhere(session, owner, open_session)
        alive[session.region] = living(session, owner)
        for region, found in alive.items():
            if found:
                raise InputError(
                    f"owner {owner} has {counted(len(found), 'instance')} in {region} ({found[0]}, …), which need the "
                    f"roles; run `rubberband cloud down --owner {owner} --region {region}` first"
                )
        plan = AccountChanges(there=[f"whether owner {owner} has instances in {why}" for why in unknown])
        bounds = Bounds(account=account, owner=owner, bucket="BUCKET")
        for role in roles(bounds):
            plan_no_role(session, role, owner, plan)
        plan.there.append(f"role {SPOT_ROLE} and quotas, which are the account's and cost nothing")
        plan_no_budget(session, account, owner, plan)
        kept = _plan_no_bucket(session, owner, plan, with_checkpoints)
    if remembered(home) is not None and not kept:
        plan.add(f"delete {home / BUCKET_FILE}", partial(remember, home, None))
    return AccountState(account=account, who=who, roles=roles(bounds), plan=plan)


def carry_out(plan: AccountChanges) -> Iterator[str]:
    """Carry the steps out; yield the text of each that is done. Raises InputError, with what is left, for the first
    that fails."""
    for index, step in enumerate(plan.steps):
        try:
            with _administrator():
                _carried_out(step)
        except InputError as error:
            left = len(plan.steps) - index
            raise InputError(f"{step.text}: {error}; {left} of {len(plan.steps)} are left, run it again") from None
        yield step.text


_PAUSES_S = (1.0, 2.0, 4.0, 8.0)
_UNSETTLED = ("NoSuchEntity", "NoSuchBucket", "OperationAborted", "ConcurrentModification", "EntityTemporarily")
"""Errors of IAM and S3 for a role or a bucket that was made or changed some seconds before."""


def _carried_out(step: AccountChange) -> None:
    """Carry a step out, again while the account has not settled. Raises botocore's errors."""
    for pause_s in _PAUSES_S:
        try:
            step.carry_out()
        except OF_AWS as error:
            if not code_of(error).startswith(_UNSETTLED):
                raise
            time.sleep(pause_s)
        else:
            return
    step.carry_out()


def _bucket(session: AwsSession, account: str, wishes: Wishes, known: Remembered | None, plan: AccountChanges) -> str:
    """Return the name of the bucket, and add the steps that it needs."""
    given = wishes.bucket or (known.bucket if known is not None else None)
    if given is not None and not account_parts.is_own(given, wishes.owner):
        plan.there.append(account_parts.check_given(session, given, account))
        return given
    found = account_parts.own_bucket(session, wishes.owner)
    if given is not None and given != found:
        account_parts.check_given(session, given, account)
        found = given
    name = found or account_parts.new_name(wishes.owner)
    account_parts.plan_bucket(session, name, plan, exists=found is not None)
    return name


def _plan_no_bucket(
    session: AwsSession, owner: str, plan: AccountChanges, with_checkpoints: Callable[[str], bool]
) -> bool:
    """Add the step that deletes the owner's bucket, and return whether one is kept instead."""
    bucket = account_parts.own_bucket(session, owner)
    if bucket is None:
        return False
    held = account_parts.content(session, bucket)
    text = f"bucket {bucket} with {counted(held.objects, 'object')} ({format_bytes(held.size_bytes)}), checkpoints too"
    if held.objects and not with_checkpoints(text):
        plan.there.append(f"{text}, which costs about 0.023 USD a GB and month")
        return True
    plan.add(
        f"delete {text if held.objects else f'bucket {bucket}'}", partial(account_parts.delete_bucket, session, bucket)
    )
    return False


def _signed_in(session: AwsSession) -> tuple[str, str]:
    """Return the account and who asks."""
    sign_in(session)
    identity = session.client("sts").get_caller_identity()
    return str(identity["Account"]), str(identity["Arn"])


def _check_types(session: AwsSession, types: tuple[str, ...]) -> None:
    for name in types:
        offered = session.client("ec2").describe_instance_type_offerings
        wanted = [{"Name": "instance-type", "Values": [name]}]
        if not any(pages(offered, "InstanceTypeOfferings", Filters=wanted)):
            raise InputError(
                f"--types: {session.region} has no {name}; choose other types (`rubberband cloud prices --region "
                f"{session.region}`), or another --region"
            )


@contextmanager
def _administrator() -> Iterator[None]:
    """Turn errors of AWS into InputError; what is missing is no role's right but the user's."""
    try:
        yield
    except OF_AWS as error:
        action = missing_action(error)
        raise InputError(
            f"these credentials may not {action}, which making roles and a bucket needs; use an administrator's "
            "(AWS_PROFILE), or give an administrator the output of `rubberband aws setup --dry-run`"
            if action and denied_by(error) is None
            else explain(error)
        ) from None
