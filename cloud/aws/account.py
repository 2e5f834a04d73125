"""An account of AWS, set up for rubberband and cleared again: bucket, roles, quotas, budget.

Both ways first look, and return a plan of what is there and what is to be done; nothing is changed before the steps of
the plan are carried out. A second look after that finds nothing to do, and one after a cut finds the rest. Roles
and bucket are a stack of CloudFormation, which is made whole or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rubberband.cloud.aws.account_parts import (
    BUCKET,
    SPOT_ROLE,
    AccountChanges,
    Bounds,
    Document,
    Stack,
    account_plan,
    bucket_resource,
    check_given,
    content,
    empty_bucket,
    held_types,
    new_bucket_name,
    plan_budget,
    plan_no_budget,
    plan_quotas,
    plan_spot_role,
    plan_stack,
    role_resources,
    stack_of,
    text_of,
)
from rubberband.cloud.aws.calls import AwsSession
from rubberband.cloud.aws.cleanup import living, living_elsewhere
from rubberband.cloud.aws.client import pages
from rubberband.cloud.aws.errors import OF_AWS, denied_by, explain, missing_action
from rubberband.cloud.aws.preflight import sign_in
from rubberband.errors import InputError
from rubberband.spec.account import BUCKET_FILE, Remembered, remember, remembered
from rubberband.units import counted, format_bytes

FIRST_TYPE = "g4dn.xlarge"
"""Type whose quotas are asked for where no types are given: that of the first run in the documents."""


_SOUND = ("CREATE_COMPLETE", "UPDATE_COMPLETE", "UPDATE_ROLLBACK_COMPLETE")


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
    plan: AccountChanges
    resources: Document
    """Resources of the stack that it will have."""


def look_at(session: AwsSession, home: Path, wishes: Wishes) -> AccountState:
    """Return what the account has and lacks. Raises InputError in one line."""
    known = remembered(home)
    if known is not None and known.region != session.region:
        raise InputError(
            f"--region: {home / BUCKET_FILE} has bucket {known.bucket} in {known.region}, and roles name one bucket "
            f"and one region; give --region {known.region}, or run `rubberband aws teardown` first"
        )
    plan = AccountChanges()
    with _administrator():
        account, who = _signed_in(session)
        _check_types(session, wishes.types)
        account_plan(session, plan)
        stack = stack_of(session, wishes.owner)
        if stack.stack_id and stack.status not in _SOUND:
            raise InputError(
                f"stack {stack.name} of CloudFormation is {stack.status}; run `rubberband aws teardown` first"
            )
        given = wishes.bucket or (known.bucket if known is not None else None)
        bucket = given or stack.bucket or new_bucket_name(wishes.owner)
        types = () if wishes.types == ("*",) else wishes.types or held_types(stack.resources)
        bounds = Bounds(account=account, owner=wishes.owner, bucket=bucket, region=session.region, types=types)
        resources = {**stack.resources, **role_resources(bounds)}
        if given is None or given == stack.bucket:
            resources[BUCKET] = bucket_resource(bucket)
        else:
            plan.there.append(check_given(session, given, account))
        plan.there += [text_of(one) for name, one in resources.items() if one == stack.resources.get(name)]
        plan_stack(session, wishes.owner, stack, resources, plan)
        plan_spot_role(session, plan)
        plan_quotas(session, types or (FIRST_TYPE,), wishes.vcpus, plan)
        if wishes.budget_usd is not None and wishes.email is not None:
            plan_budget(session, account, wishes.owner, wishes.budget_usd, wishes.email, plan)
    here = Remembered(bucket=bucket, region=session.region)
    if known == here:
        plan.there.append(f"{home / BUCKET_FILE}, so that no file needs a bucket")
    else:
        plan.add(f"write {home / BUCKET_FILE}, so that no file needs a bucket", partial(remember, home, here))
    return AccountState(account=account, who=who, plan=plan, resources=resources)


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
        plan = AccountChanges(there=_require_none_alive(session, owner, open_session))
        plan.there.append(f"role {SPOT_ROLE} and quotas, which are the account's and cost nothing")
        stack = stack_of(session, owner)
        kept = _plan_content(session, stack, plan, with_checkpoints)
        plan_stack(session, owner, stack, kept, plan)
        plan_no_budget(session, account, owner, plan)
    known = remembered(home)
    if known is not None and known.region == session.region and not kept:
        plan.add(f"delete {home / BUCKET_FILE}", partial(remember, home, None))
    return AccountState(account=account, who=who, plan=plan, resources=kept)


def _require_none_alive(session: AwsSession, owner: str, open_session: Callable[[str], AwsSession]) -> list[str]:
    """Raise InputError if the owner has instances in any region. Return a line on each that does not say."""
    alive, unknown = living_elsewhere(session, owner, open_session)
    for region, found in {**alive, session.region: living(session, owner)}.items():
        if found:
            raise InputError(
                f"owner {owner} has {counted(len(found), 'instance')} in {region} ({found[0]}, …), which need the "
                f"roles; run `rubberband cloud down --owner {owner} --region {region}` first"
            )
    return [f"whether owner {owner} has instances in {why}" for why in unknown]


def _plan_content(
    session: AwsSession, stack: Stack, plan: AccountChanges, with_checkpoints: Callable[[str], bool]
) -> Document:
    """Add the step that empties the stack's bucket. Return the resources to keep: a bucket with checkpoints that may
    not go."""
    if stack.bucket is None:
        return {}
    held = content(session, stack.bucket)
    size = f"{counted(held.objects, 'object')} ({format_bytes(held.size_bytes)})"
    text = f"bucket {stack.bucket} with {size}, checkpoints too"
    if held.objects and not with_checkpoints(text):
        plan.there.append(f"{text}, which costs about 0.023 USD a GB and month")
        return {BUCKET: stack.resources[BUCKET]}
    text = text if held.objects else f"bucket {stack.bucket}"
    plan.add(f"delete all that is in {text}", partial(empty_bucket, session, stack.bucket))
    return {}


def carry_out(plan: AccountChanges) -> Iterator[str]:
    """Carry the steps out; yield the text of each that is done. Raises InputError, with what is left, for the first
    that fails."""
    for index, step in enumerate(plan.steps):
        try:
            with _administrator():
                step.carry_out()
        except InputError as error:
            left = len(plan.steps) - index
            raise InputError(f"{step.text}: {error}; {left} of {len(plan.steps)} are left, run it again") from None
        yield step.text


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
