"""`rubberband aws`: set an account up for EC2, check it, and clear it again."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rubberband.commands.common import ConfirmOption, argument, group
from rubberband.errors import InputError

if TYPE_CHECKING:
    from rubberband.cloud.aws.account import AccountState
    from rubberband.cloud.aws.calls import AwsSession

aws = group("aws", "Set up an account of AWS, or check it.")

RegionOption = Annotated[
    str | None,
    typer.Option(
        "--region",
        "-r",
        help="The region of AWS. By default the one that was set up, else AWS_REGION, else us-east-1.",
        show_default=False,
    ),
]
OwnerOption = Annotated[
    str, typer.Option("--owner", help="The owner (resources.aws.owner), which is the prefix of the roles.")
]


@aws.command()
def setup(
    region: RegionOption = None,
    bucket: Annotated[
        str | None, typer.Option("--bucket", metavar="NAME", help="An existing bucket. By default one is created.")
    ] = None,
    types: Annotated[
        str | None,
        typer.Option(
            "--types",
            metavar="LIST",
            help="The only types that the head may rent, such as g4dn.*,g5.*; '*' for any. Quotas are requested "
            "for these families. By default those of an earlier set-up, else any.",
        ),
    ] = None,
    vcpus: Annotated[
        int, typer.Option("--vcpus", min=1, help="The quota of vCPUs to have or to request, on spot and on demand.")
    ] = 16,
    budget: Annotated[
        float | None,
        typer.Option("--budget", metavar="USD", min=1, help="Create a monthly budget of the account; needs --email."),
    ] = None,
    email: Annotated[
        str | None, typer.Option("--email", metavar="ADDRESS", help="Address for the alerts of the budget.")
    ] = None,
    owner: OwnerOption = "rubberband",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Change nothing, and print the template.")] = False,
    yes: ConfirmOption = False,
) -> None:
    """Create what runs on EC2 need.

    That is a bucket, roles with the least rights, and quotas. Shows what it will create, and asks once. Run again, it
    completes a set-up that was interrupted, or changes nothing. Quotas are requested. The bucket is private, has a
    random name, and is remembered in the home, so that experiment files need none. Needs an administrator's
    credentials.
    """
    from rubberband.cloud.aws.account import Wishes, carry_out, look_at

    if (budget is None) != (email is None):
        raise InputError("--budget and --email need each other: a budget sends mail and stops nothing")
    session, home = _opened(region)
    listed = tuple(word.strip() for word in (types or "").split(",") if word.strip())
    wishes = Wishes(owner=_owner(owner), bucket=bucket, types=listed, vcpus=vcpus, budget_usd=budget, email=email)
    look = look_at(session, home, wishes)
    _show(look, session, "make")
    if dry_run:
        print(json.dumps({"Resources": look.resources}, indent=2))
        return
    if not look.plan.steps:
        print("nothing to do: the account is set up")
        return
    _ask("make these", yes)
    for done in carry_out(look.plan):
        print(f"done: {done}")
    if owner != "rubberband":
        print(
            f"write into experiment files: resources.aws: {{owner: {owner}, head_profile: {owner}-head, "
            f"worker_profile: {owner}-worker, guard_role: {owner}-guard}}"
        )


@aws.command()
def check(
    file: Annotated[Path | None, argument("FILE", "An experiment file, to check for its run as well.")] = None,
    region: RegionOption = None,
    owner: OwnerOption = "rubberband",
) -> None:
    """Check that the account is set up.

    With FILE, also that its experiment can run there.

    Checks of a file are those before a run: region, types, image, quota, rights, network and bucket; nothing is rented.
    """
    from rubberband.cloud.aws.account import Wishes, look_at

    session, home = _opened(region)
    look = look_at(session, home, Wishes(owner=_owner(owner), vcpus=1))
    _show(look, session, "missing")
    if look.plan.steps:
        raise InputError(f"{len(look.plan.steps)} of these are missing; run `rubberband aws setup`")
    if file is not None:
        for note in _checked(file, home):
            print(f"note: {note}")
    print("all is there")


def _checked(file: Path, home: Path) -> list[str]:
    """Return the notes of the checks before a run. Raises InputError for the first problem."""
    from rubberband.executor.run.allowance import require_rate, require_runnable
    from rubberband.planning.fetching import with_fetch
    from rubberband.planning.prices_and_quotas import cloud_prices_and_quotas
    from rubberband.spec.loading import load_experiment

    experiment, notes = load_experiment(file), list[str]()
    resources = experiment.resources
    if resources.provider != "aws":
        raise InputError(f"resources.provider: {resources.provider} rents nothing; write provider: aws")
    require_runnable(experiment, home)
    with_fetch(experiment, home, is_required=True)
    require_rate(experiment, home, cloud_prices_and_quotas(experiment, home, notes.append, on_head=False).table)
    return notes


@aws.command()
def teardown(
    region: RegionOption = None,
    owner: OwnerOption = "rubberband",
    checkpoints: Annotated[
        bool, typer.Option("--delete-checkpoints", help="Delete the bucket with its checkpoints, without asking.")
    ] = False,
    yes: ConfirmOption = False,
) -> None:
    """Delete what `rubberband aws setup` created.

    Shows the roles, profiles, budget and bucket that it will delete, and asks once. It asks separately about
    checkpoints in the bucket, which stay with --yes. Refused while instances of the owner run. A bucket of your own,
    quotas and EC2's role for spot stay.
    """
    from rubberband.cloud.aws.account import carry_out, look_to_clear
    from rubberband.cloud.aws.calls import open_aws

    session, home = _opened(region)

    def may_go(what: str) -> bool:
        return checkpoints or (not yes and sys.stdin.isatty() and typer.confirm(f"delete {what}?", err=True))

    look = look_to_clear(session, home, _owner(owner), open_aws, with_checkpoints=may_go)
    _show(look, session, "delete")
    if not look.plan.steps:
        print("nothing to delete")
        return
    _ask("delete these", yes)
    for done in carry_out(look.plan):
        print(f"done: {done}")


def aws_region() -> str:
    """Return the region where no option or file names one: that of `rubberband aws setup`, else the environment's."""
    from rubberband.installation import default_home
    from rubberband.spec.account import remembered
    from rubberband.spec.resources import Resources

    known = remembered(default_home())
    environment = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    return (known.region if known else environment) or Resources().region


def _opened(region: str | None) -> tuple[AwsSession, Path]:
    """Return AWS in the region that is meant, and the home."""
    from rubberband.cloud.aws.calls import open_aws
    from rubberband.installation import default_home

    return open_aws(region or aws_region()), default_home()


def _owner(owner: str) -> str:
    from rubberband.spec.resources import Aws

    try:
        return Aws(owner=owner).owner
    except ValueError:
        raise InputError(f"--owner: {owner} is no owner; write letters, digits, and any of . - _") from None


def _show(look: AccountState, session: AwsSession, verb: str) -> None:
    print(f"account {look.account}, region {session.region}, as {look.who}")
    for line in look.plan.there:
        print(f"  there:   {line}")
    for step in look.plan.steps:
        print(f"  {verb + ':':<8} {step.text.removeprefix(verb + ' ')}")
        for part in step.parts:
            print(f"             {part}")


def _ask(question: str, yes: bool) -> None:
    """Ask for confirmation. Raises InputError without a terminal, Abort if the answer is no."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise InputError(f"{question}? This is no terminal; answer with --yes")
    typer.confirm(f"{question}?", abort=True, err=True)
