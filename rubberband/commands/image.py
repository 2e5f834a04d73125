"""`rubberband image`: AMIs with the driver's environment, which save every instance the minutes of its installation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rubberband.commands.estimate import Overrides
from rubberband.errors import InputError
from rubberband.units import format_duration, format_usd

if TYPE_CHECKING:
    from rubberband.cloud.aws.machines import Session
    from rubberband.resources import Resources

image = typer.Typer(
    name="image",
    help="Build, list and delete images that have the driver's environment installed.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="The experiment file.", show_default=False)]
ChosenFile = Annotated[
    Path | None,
    typer.Argument(metavar="[FILE]", help="An experiment file that names region and owner.", show_default=False),
]
RegionOption = Annotated[str | None, typer.Option("--region", "-r", help="The region of AWS.", show_default=False)]
OwnerOption = Annotated[str | None, typer.Option("--owner", help="Whose (resources.aws.owner).", show_default=False)]


@image.command()
def build(file: FileArgument, overrides: Overrides = None) -> None:
    """Build the image of an experiment's instances, unless it is there. Runs use it from then on.

    One instance of the cheapest type with the same GPUs installs the packages, in the versions of this environment, and
    the set-up commands; EC2 makes an image of it, and it ends. The command prints the cost first. The image is used by
    every experiment of the same packages, Python, set-up commands and base image; the code of rubberband may change.
    """
    from rubberband.cloud.aws.extra import open_aws
    from rubberband.files import load_experiment

    resources = load_experiment(file, overrides or []).resources
    if resources.provider != "aws":
        raise InputError(f"resources.provider: {resources.provider} has no images; give -s resources.provider=aws")
    session = open_aws(resources.region)

    from rubberband.cloud.aws.resolving import in_one_line

    with in_one_line():
        for line in _built(session, resources):
            print(line)


def _built(session: Session, resources: Resources) -> list[str]:
    from rubberband.cloud.aws.images import described_image, type_facts
    from rubberband.cloud.aws.opening import device_of
    from rubberband.cloud.aws.own_images import BOOT_S, Build, Passing, builder_type, image_key, most_usd, own_images
    from rubberband.cloud.aws.pricing import on_demand_price
    from rubberband.cloud.aws.resolving import resolve, what_to_install
    from rubberband.cloud.catalogue import table_of, types_of

    words, name = resources.aws, types_of(resources)[0]
    installed = what_to_install(session, words, resources.checkpoints)
    if not installed.requirements:
        raise InputError("resources.aws.install: none installs nothing, so there is no image to build")
    key = image_key(words, installed, type_facts(session, name))
    known = next((one for one in own_images(session, words.owner, key) if one.state == "available"), None)
    if known is not None:
        return [f"image {key} is there: {known.image_id} ({format_usd(known.usd_per_month(session.region))}/month)"]
    builder = builder_type(table_of(resources), session.region, name)
    device = device_of(session, builder)
    machines = resolve(session, words, builder, checkpoints=resources.checkpoints, device=device, builds=True)
    volume_gb = machines.volume_gb or described_image(session, machines.image).root_gb or 0
    price_usd = on_demand_price(session, builder)
    if price_usd is not None:
        most = format_usd(most_usd(price_usd, session.region, volume_gb))
        usual = format_usd(most_usd(price_usd, session.region, volume_gb) * _USUAL_S / (BOOT_S + 600.0))
        print(
            f"a {builder} ({format_usd(price_usd)}/h) builds it for about {format_duration(_USUAL_S)} ({usual}); it "
            f"ends itself, after {most} at the most"
        )
    found = Build(session, machines, builder, key, resources.checkpoints, Passing()).run()
    return [
        f"image {key} is built: {found.image_id}; instances of this environment boot it from now on",
        f"its snapshot costs up to {format_usd(found.usd_per_month(session.region))}/month until "
        f"`rubberband image delete {key}`",
    ]


_USUAL_S = 600.0
"""Booting, installing torch with CUDA, and being rebooted."""


@image.command(name="list")
def list_images(file: ChosenFile = None, region: RegionOption = None, owner: OwnerOption = None) -> None:
    """List the images, and what they cost; also what a deletion that was cut off left, which `delete` deletes."""
    session, chosen_owner = _opened(file, region, owner)
    from rubberband.cloud.aws.own_images import listed_images
    from rubberband.cloud.aws.resolving import in_one_line

    with in_one_line():
        found = listed_images(session, chosen_owner)
    if not found:
        print(f"owner {chosen_owner} has no images in {session.region}")
    for one in found:
        cost = f"{one.volume_gb} GB, up to {format_usd(one.usd_per_month(session.region))}/month"
        print(f"{one.key}  {one.image_id}  {one.state:9}  {one.created[:16]}Z  {cost}")


@image.command()
def delete(
    key: Annotated[str, typer.Argument(metavar="KEY", help="As `image list` shows it.", show_default=False)],
    file: ChosenFile = None,
    region: RegionOption = None,
    owner: OwnerOption = None,
) -> None:
    """Delete an image and its snapshots. Instances that run on it go on."""
    session, chosen_owner = _opened(file, region, owner)
    from rubberband.cloud.aws.own_images import delete_image
    from rubberband.cloud.aws.resolving import in_one_line

    with in_one_line():
        deleted = delete_image(session, chosen_owner, key)
    if not deleted:
        raise InputError(f"owner {chosen_owner} has no image {key} in {session.region}; see `rubberband image list`")
    print(f"deleted {', '.join(deleted)}")


def _opened(file: Path | None, region: str | None, owner: str | None) -> tuple[Session, str]:
    from rubberband.cloud.aws.extra import open_aws
    from rubberband.commands.down import meant

    chosen_region, chosen_owner = meant(file, region, owner)
    return open_aws(chosen_region), chosen_owner
