"""`rubberband down`: end everything that an owner has on EC2."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rubberband.errors import InputError
from rubberband.units import format_usd

if TYPE_CHECKING:
    from rubberband.cloud.aws.ending import Ended, Owned
    from rubberband.cloud.aws.machines import Session


def down(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="An experiment file that names region and owner.", show_default=False),
    ] = None,
    region: Annotated[str | None, typer.Option("--region", "-r", help="The region of AWS.", show_default=False)] = None,
    owner: Annotated[
        str | None, typer.Option("--owner", help="Whose (resources.aws.owner).", show_default=False)
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask, even if an experiment runs.")] = False,
) -> None:
    """End everything on EC2: workers, head, and what belongs to them.

    Every instance of the owner in the region is ended, whoever drives it; then the published Ray token and the security
    group are deleted. What experiments have written to their checkpoint store stays, and so do images, each named with
    its price; journals on the head do not.
    """
    from rubberband.cloud.aws.extra import open_aws

    chosen_region, chosen_owner = meant(file, region, owner)
    session = open_aws(chosen_region)

    from rubberband.cloud.aws.ending import end_everything, living

    workers = [one for one in living(session, chosen_owner) if one.role != "head"]
    if workers and not yes:
        _ask(workers, chosen_owner, chosen_region)
    for line in _told(end_everything(session, chosen_owner), chosen_owner, chosen_region):
        print(line)
    for line in _images(session, chosen_owner):
        print(line)


def meant(file: Path | None, region: str | None, owner: str | None) -> tuple[str, str]:
    """Region and owner: what the options say, else the file, else the environment and the defaults."""
    from rubberband.files import load_experiment
    from rubberband.resources import Resources

    resources = Resources() if file is None else load_experiment(file, []).resources
    environment = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    fallback = environment if file is None and environment else resources.region
    return region or fallback, owner or resources.aws.owner


def _ask(workers: Iterable[Owned], owner: str, region: str) -> None:
    """Raises InputError if nobody can be asked, Abort if the answer is no."""
    running = Counter(one.experiment or "no experiment" for one in workers)
    what = ", ".join(f"{count} of {name}" for name, count in sorted(running.items()))
    told = f"instances of owner {owner} live in {region}: {what}"
    if not sys.stdin.isatty():
        raise InputError(f"{told}; end them all the same with --yes")
    typer.confirm(f"{told}; end them?", abort=True, err=True)


def _told(ended: Ended, owner: str, region: str) -> list[str]:
    if not ended and not ended.kept_groups:
        return [f"owner {owner} has nothing running in {region}"]
    lines = [f"ended {one}" for one in ended.instances]
    if ended.token:
        lines.append("deleted the published Ray token")
    lines += [f"deleted security group {group}" for group in ended.security_groups]
    lines += [f"deleted placement group {group}" for group in ended.placement_groups]
    return [*lines, *(f"kept security group {group}, which is in use and costs nothing" for group in ended.kept_groups)]


def _images(session: Session, owner: str) -> list[str]:
    """A line for each image that stays."""
    from rubberband.cloud.aws.errors import FAILURES, explain
    from rubberband.cloud.aws.own_images import own_images

    try:
        return [
            f"kept image {one.key} ({one.image_id}), which costs up to {format_usd(one.usd_per_month(session.region))}"
            f"/month until `rubberband image delete {one.key} --region {session.region} --owner {owner}`"
            for one in own_images(session, owner)
        ]
    except FAILURES as error:
        return [f"whether images of owner {owner} are left is not known: {explain(error)}"]
