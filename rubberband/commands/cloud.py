"""`rubberband cloud`: prices, the head and images on EC2."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rubberband.commands.aws import aws_region
from rubberband.commands.common import (
    ConfirmOption,
    FileArgument,
    Overrides,
    TableFormat,
    TableOption,
    YesOption,
    argument,
    confirm_bill,
    group,
    print_json,
    print_table,
)
from rubberband.commands.on_head import root_of
from rubberband.errors import InputError, RubberbandError
from rubberband.units import counted, format_duration, format_usd

if TYPE_CHECKING:
    from rubberband.cloud.aws.calls import AwsSession
    from rubberband.cloud.aws.cleanup import Ended, FoundInstance
    from rubberband.spec.resources import Resources


ChosenFile = Annotated[Path | None, argument("FILE", "An experiment file, for its region and owner.")]
RegionOption = Annotated[str | None, typer.Option("--region", "-r", help="The region of AWS.", show_default=False)]
OwnerOption = Annotated[
    str | None, typer.Option("--owner", help="The owner (resources.aws.owner).", show_default=False)
]


cloud = group("cloud", "Manage the head and images; show prices.")


@cloud.command()
def prices(
    types: Annotated[
        list[str] | None, argument("TYPE", "Only these types, with or without GPUs; default: all with GPUs.")
    ] = None,
    region: Annotated[str, typer.Option("--region", "-r", help="The region of AWS.")] = "us-east-1",
    refresh: Annotated[bool, typer.Option("--refresh", help="Ask AWS even if the last answers are recent.")] = False,
    output: TableOption = TableFormat.table,
) -> None:
    """Show EC2 instance types and their prices.

    On-demand prices are refreshed once a day, spot prices every ten minutes. If AWS does not answer, earlier prices, or
    those that come with rubberband, are shown with their age.
    """
    from rubberband.cloud.aws.prices import prices_of
    from rubberband.installation import default_home
    from rubberband.views.estimate.prices import HEADER, chosen, price_notes, price_rows, prices_json

    table = prices_of(types or None, region, default_home(), refresh=refresh)
    rows = chosen(table, types or [], region)
    notes = price_notes(table)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    if output is TableFormat.json:
        print_json(prices_json(rows, region, notes))
    else:
        print_table(HEADER, price_rows(rows, region, time.time()))


# `rubberband cloud up`: start the head, a machine in the VPC from which experiments run on EC2.


@cloud.command()
def up(file: FileArgument, overrides: Overrides = None, yes: YesOption = False) -> None:
    """Start the head on EC2, or find it.

    The head is an instance in your VPC with rubberband and the experiment's folder. Each owner has one in a region
    (resources.aws.owner, resources.region). `rubberband run FILE --on head` starts it too; `up` is for a head without a
    run, such as for a pool. The command checks the account as before a run (quota, rights, bucket, network), shows what
    the head costs, and on a terminal asks before it starts one. A stopped head is started again, and one with other
    code or packages is updated. It costs money until `rubberband cloud down`. It stops itself when nothing has run for
    resources.aws.head_idle (1 h); then only its disk costs money. The folder is copied if resources.checkpoints is a
    bucket (s3://...).
    """
    from rubberband.commands.on_head import checked_head, of_this_kind, remember
    from rubberband.spec.loading import load_experiment

    experiment = load_experiment(file, overrides or [])
    session, what, idles = checked_head(experiment, no_cap=True)
    from rubberband.cloud.aws.head import ensure_head, head_boot, upload_folder
    from rubberband.executor.ray.code import pack

    resources = experiment.resources
    bill = f"the head ({what}) costs money until `rubberband cloud down`, and {idles}"
    root = root_of(Path(os.path.abspath(file)))
    folder = upload_folder(session, resources.checkpoints, experiment.name, pack([str(root)]).archive)
    folders = [] if folder is None else [folder]
    head = ensure_head(session, resources, folders=folders, confirm=lambda: confirm_bill(bill, "start it", yes=yes))
    if head.started:
        state = "was started; it needs some minutes to install rubberband"
        made_of = head_boot(session, resources).made_of
    else:
        state = "was stopped and is started again" if head.restarted else "runs already"
        remote, made_of = of_this_kind(session, experiment, head)
        for each in folders:
            remote.fetch(each)
    remember(resources, experiment.name, made_of)
    print(f"head {head.instance_id} ({head.instance_type}, {head.zone}) {state}")
    print(bill)
    if folder is None:
        print("copy the experiment's folder to it yourself: resources.checkpoints names no bucket to send it through")
    else:
        settings = [word for override in overrides or [] for word in ("-s", override)]
        print(f"next:    {shlex.join(('rubberband', 'run', str(file), *settings, '--on', 'head'))}")
    print(f"get in:  aws ssm start-session --target {head.instance_id} --region {session.region}  (for a pool)")
    print(f"end all: rubberband cloud down --owner {resources.aws.owner} --region {session.region}")


# `rubberband cloud down`: end everything that an owner has on EC2.


@cloud.command()
def down(
    file: ChosenFile = None, region: RegionOption = None, owner: OwnerOption = None, yes: ConfirmOption = False
) -> None:
    """Terminate all that is ours on EC2.

    Terminates every instance of the owner in the region, workers and head, including those in use, after confirmation.
    Then it deletes the published Ray token and the security group. Checkpoint stores and images are kept, and the price
    of each image is shown. The journals and reports of a running head are copied to the bucket first; a head that
    stopped itself has copied them. The owner's instances in other regions are named and stay.
    """
    from rubberband.cloud.aws.calls import open_aws

    chosen_region, chosen_owner = meant(file, region, owner)
    session = open_aws(chosen_region)

    from rubberband.cloud.aws.cleanup import living

    found = living(session, chosen_owner)
    if found and not yes:
        _ask(found, chosen_owner, chosen_region)
    for line in _ended(session, found, file, chosen_owner):
        print(line)


def _ended(session: AwsSession, found: Sequence[FoundInstance], file: Path | None, owner: str) -> Iterator[str]:
    """Terminate everything of the owner, and iterate over lines on what was done, and on what is left."""
    from rubberband.cloud.aws.cleanup import end_everything
    from rubberband.cloud.aws.client import account_of
    from rubberband.executor.run.allowance import note_end_of_head
    from rubberband.installation import default_home

    yield from _copied(session, found, file, owner)
    account = account_of(session)
    until = time.time()  # EC2 charges nothing while an instance shuts down, which is waited for
    ended = end_everything(session, owner)
    yield from _counted(ended, owner, f"{session.region} of account {account}")
    note_end_of_head(default_home(), f"{account}.{session.region}.{owner}")
    yield from _spent_by_heads(session, found, until)
    if not ended:
        yield from _other_owners(session, owner)
    yield from _images(session, owner)
    yield from _elsewhere(session, owner)
    yield from _other_accounts(account)


def meant(file: Path | None, region: str | None, owner: str | None) -> tuple[str, str]:
    """Return region and owner: from the options, else the file, else the set-up, the environment and the defaults."""
    from rubberband.spec.loading import load_experiment
    from rubberband.spec.resources import Resources

    resources = Resources() if file is None else load_experiment(file, []).resources
    return region or (aws_region() if file is None else resources.region), owner or resources.aws.owner


def _copied(session: AwsSession, instances: Iterable[FoundInstance], file: Path | None, owner: str) -> list[str]:
    """Copy the home of each head that runs to the bucket, and return a line for each."""
    from rubberband.cloud.aws.network import own_place
    from rubberband.cloud.aws.s3 import is_bucket
    from rubberband.commands.on_head import remote_head
    from rubberband.installation import default_home
    from rubberband.spec.account import remembered
    from rubberband.spec.loading import load_experiment

    running = [one.instance_id for one in instances if one.role == "head" and one.runs]
    if not running or own_place() is not None:
        return []
    known = remembered(default_home())
    store = None if known is None else f"s3://{known.bucket}"
    store = store if file is None else load_experiment(file, []).resources.checkpoints
    if not is_bucket(store):
        return [
            "the journals of the head are not copied: no bucket is known (give FILE, or run `rubberband aws setup`)"
        ]
    lines = []
    for instance_id in running:
        try:
            lines.append(f"copied the head's journals to {remote_head(session, instance_id, store, owner).keep()}")
        except RubberbandError as error:
            lines.append(f"the journals of the head {instance_id} are not copied: {error}")
    return lines


def _ask(instances: Iterable[FoundInstance], owner: str, region: str) -> None:
    """Ask for confirmation. Raises InputError without a terminal, Abort if the answer is no."""
    running = Counter(one.experiment or "no experiment" for one in instances if one.role != "head")
    what = [f"{count} of {name}" for name, count in sorted(running.items())]
    what += [
        f"the head {one.instance_id}, whose disk has the journals and reports of its experiments"
        for one in instances
        if one.role == "head"
    ]
    found = f"instances of owner {owner} live in {region}: {', '.join(what)}"
    if not sys.stdin.isatty():
        raise InputError(f"{found}; terminate them anyway with --yes")
    typer.confirm(f"{found}; terminate them?", abort=True, err=True)


def _counted(ended: Ended, owner: str, region: str) -> list[str]:
    if not ended and not ended.kept_groups:
        return [f"owner {owner} has nothing running in {region}"]
    lines = [f"ended {one}" for one in ended.instances]
    if ended.token:
        lines.append("deleted the published Ray token")
    lines += [f"deleted security group {group}" for group in ended.security_groups]
    lines += [f"deleted placement group {group}" for group in ended.placement_groups]
    return [*lines, *(f"kept security group {group}, which is in use and costs nothing" for group in ended.kept_groups)]


def _spent_by_heads(session: AwsSession, instances: Iterable[FoundInstance], until: float) -> list[str]:
    """Return a line with the bill of each head that ran until then (Unix time), which no report has in full."""
    from rubberband.cloud.aws.errors import FAILURES
    from rubberband.cloud.aws.extras import ADDRESS_USD_PER_HOUR
    from rubberband.cloud.aws.quotes import on_demand_price

    lines = []
    for one in instances:
        if one.role != "head" or not one.runs or one.since is None:
            continue
        hours, price_usd = max(60.0, until - one.since) / 3600.0, None
        with suppress(*FAILURES):
            price_usd = on_demand_price(session, one.instance_type)
        cost = "its price is not known"
        if price_usd is not None:
            usd = format_usd(hours * (price_usd + ADDRESS_USD_PER_HOUR))
            cost = f"{usd} with its address, beside its disk; reports have the part of it while a run lasted"
        lines.append(f"the head ran for {format_duration(hours * 3600.0)} since its last start: {cost}")
    return lines


def _other_owners(session: AwsSession, owner: str) -> list[str]:
    """Return a line for each other owner who has instances in the region."""
    from rubberband.cloud.aws.client import other_owners

    return [
        f"owner {other} has {counted(count, 'instance')} there; `rubberband cloud down --region {session.region} "
        f"--owner {other}` terminates them"
        for other, count in sorted(other_owners(session, owner).items())
    ]


def _other_accounts(account: str) -> list[str]:
    """Return a line for each head in another account on which runs from here may still spend."""
    from rubberband.executor.run.allowance import heads_that_may_spend
    from rubberband.installation import default_home

    lines = []
    for key, usd in heads_that_may_spend(default_home()).items():
        other, region, owner = key.split(".", 2)
        if other != account:
            lines.append(
                f"not looked at: account {other} ({region}, owner {owner}), where runs from here may still spend "
                f"{format_usd(usd)}; run this with its credentials (AWS_PROFILE)"
            )
    return lines


def _elsewhere(session: AwsSession, owner: str) -> list[str]:
    """Return a line for each other region in which the owner has instances, or which does not answer."""
    from rubberband.cloud.aws.calls import open_aws
    from rubberband.cloud.aws.cleanup import living_elsewhere

    found, unknown = living_elsewhere(session, owner, open_aws)
    lines = [
        f"left in {region}: {', '.join(map(str, ones))}, until `rubberband cloud down --region {region} "
        f"--owner {owner}`"
        for region, ones in found.items()
    ]
    return [*lines, *(f"whether owner {owner} has instances in {why}" for why in unknown)]


def _images(session: AwsSession, owner: str) -> list[str]:
    """Return a line for each image that is kept."""
    from rubberband.cloud.aws.errors import FAILURES, explain
    from rubberband.cloud.aws.images import own_images

    try:
        return [
            f"kept image {one.key} ({one.image_id}), which costs up to {format_usd(one.usd_per_month(session.region))}"
            f"/month until `rubberband cloud image delete {one.key} --region {session.region} --owner {owner}`"
            for one in own_images(session, owner)
        ]
    except FAILURES as error:
        return [f"whether images of owner {owner} are left is not known: {explain(error)}"]


# `rubberband cloud image`: AMIs with the driver's environment, which save each instance the minutes of its set-up.


image = group("image", "Manage images with the driver's packages.")
cloud.add_typer(image)


@image.command()
def build(file: FileArgument, overrides: Overrides = None, yes: YesOption = False) -> None:
    """Build the image of an experiment.

    One instance of the cheapest type with the same GPUs installs the packages, in the versions of this environment, and
    the set-up commands; EC2 makes an image of it, and it ends. The command prints the cost, and on a terminal asks
    first. From then on, the image is used by every experiment with the same packages, Python, set-up commands and base
    image; the code of rubberband may change.
    """
    from rubberband.cloud.aws.calls import open_aws
    from rubberband.spec.loading import load_experiment

    resources = load_experiment(file, overrides or []).resources
    if resources.provider != "aws":
        raise InputError(f"resources.provider: {resources.provider} has no images; give -s resources.provider=aws")
    session = open_aws(resources.region)

    from rubberband.cloud.aws.errors import in_one_line
    from rubberband.cloud.aws.preflight import sign_in

    sign_in(session)
    with in_one_line():
        for line in _built(session, resources, yes=yes):
            print(line)


def _built(session: AwsSession, resources: Resources, *, yes: bool) -> list[str]:
    from rubberband.cloud.aws.boot import resolve
    from rubberband.cloud.aws.client import type_facts
    from rubberband.cloud.aws.images import (
        BOOT_S,
        Build,
        builder_type,
        described_image,
        image_key,
        most_usd,
        own_images,
    )
    from rubberband.cloud.aws.installing import what_to_install
    from rubberband.cloud.aws.provider import device_of
    from rubberband.cloud.aws.quotes import on_demand_price
    from rubberband.cloud.aws.s3 import Packages
    from rubberband.cloud.catalogue import table_of, types_of
    from rubberband.cloud.clock import Waiting
    from rubberband.executor.run.allowance import require_image
    from rubberband.installation import default_home

    words, name = resources.aws, types_of(resources)[0]
    installed = what_to_install(Packages(session, resources.checkpoints), words)
    if not installed.requirements:
        raise InputError("resources.aws.install: none installs nothing, so there is no image to build")
    key = image_key(words, installed, type_facts(session, name))
    known = next((one for one in own_images(session, words.owner, key) if one.state == "available"), None)
    if known is not None:
        return [f"image {key} is there: {known.image_id} ({format_usd(known.usd_per_month(session.region))}/month)"]
    builder = builder_type(table_of(resources), session.region, name)
    device = device_of(session, builder)
    machines = resolve(session, words, builder, checkpoints=resources.checkpoints, device=device, builds=True)
    base = described_image(session, machines.image)
    volume_gb = (machines.volume_gb or base.root_gb or 0) + base.further_gb
    price_usd = on_demand_price(session, builder)
    cost_usd = None if price_usd is None else most_usd(price_usd, session.region, volume_gb)
    require_image(resources, default_home(), builder, cost_usd)
    bill = f"the price of a {builder}, which builds it for about {format_duration(_USUAL_S)}, is not known"
    if price_usd is not None and cost_usd is not None:
        usual = format_usd(cost_usd * _USUAL_S / (BOOT_S + 600.0))
        bill = (
            f"a {builder} ({format_usd(price_usd)}/h) builds it for about {format_duration(_USUAL_S)} ({usual}); it "
            f"ends itself, after {format_usd(cost_usd)} at the most"
        )
    print(bill)
    confirm_bill(f"image {key} is not there", "build it", yes=yes)
    build = Build(session, machines, builder, key, resources.checkpoints, Waiting(), guard_role=words.guard_role)
    found = build.run()
    return [
        f"image {key} is built: {found.image_id}; instances of this environment boot it from now on",
        f"its snapshot costs up to {format_usd(found.usd_per_month(session.region))}/month until "
        f"`rubberband cloud image delete {key}`",
    ]


_USUAL_S = 600.0
"""Usual time of a build: booting, installing torch with CUDA, and rebooting."""


@image.command(name="list")
def list_images(file: ChosenFile = None, region: RegionOption = None, owner: OwnerOption = None) -> None:
    """List the images with their costs.

    Includes the remains of interrupted deletions, which `delete` removes.
    """
    session, chosen_owner = _opened(file, region, owner)
    from rubberband.cloud.aws.errors import in_one_line
    from rubberband.cloud.aws.images import listed_images

    with in_one_line():
        found = listed_images(session, chosen_owner)
    if not found:
        print(f"owner {chosen_owner} has no images in {session.region}")
    for one in found:
        cost = f"{one.volume_gb} GB, up to {format_usd(one.usd_per_month(session.region))}/month"
        print(f"{one.key}  {one.image_id}  {one.state:9}  {one.created[:16]}Z  {cost}")


@image.command()
def delete(
    key: Annotated[
        str, typer.Argument(metavar="KEY", help="The image's key, as `cloud image list` shows it.", show_default=False)
    ],
    file: ChosenFile = None,
    region: RegionOption = None,
    owner: OwnerOption = None,
) -> None:
    """Delete an image and its snapshots. Instances that use it keep running."""
    session, chosen_owner = _opened(file, region, owner)
    from rubberband.cloud.aws.errors import in_one_line
    from rubberband.cloud.aws.images import delete_image

    with in_one_line():
        deleted = delete_image(session, chosen_owner, key)
    if not deleted:
        raise InputError(
            f"owner {chosen_owner} has no image {key} in {session.region}; see `rubberband cloud image list`"
        )
    print(f"deleted {', '.join(deleted)}")


def _opened(file: Path | None, region: str | None, owner: str | None) -> tuple[AwsSession, str]:
    from rubberband.cloud.aws.calls import open_aws

    chosen_region, chosen_owner = meant(file, region, owner)
    return open_aws(chosen_region), chosen_owner
