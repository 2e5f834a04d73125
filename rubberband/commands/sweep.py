"""`rubberband sweep`: end what drivers that died left running, on this machine and on EC2."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from rubberband.distribution import install_hint
from rubberband.errors import InputError, RubberbandError


def sweep(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Only this experiment.", show_default=False)
    ] = None,
) -> None:
    """End what dead drivers left running, here and on EC2.

    Instances of a living driver are left alone. Nothing is lost: `rubberband resume` starts new ones and goes on from
    the last reported iterations.
    """
    from rubberband.cloud.local.sweeping import sweep as sweep_local
    from rubberband.tuning import default_home

    home = default_home()
    ended = [
        f"{found.instance} of {found.experiment} ({found.processes} processes)" for found in sweep_local(home, name)
    ]
    for line in ended:
        print(f"ended {line}")
    ended += _sweep_ec2(home, name)
    if not ended:
        print("nothing was left behind")


def _sweep_ec2(home: Path, name: str | None) -> list[str]:
    """What was ended on EC2. Raises RubberbandError if something may still run there."""
    directories = [*home.glob("experiments/*/local"), *home.glob("profiling/experiments/*/local")]
    directories = [directory for directory in directories if any(directory.glob("ec2/*/run.json"))]
    if not directories:
        return []
    from rubberband.cloud.aws.extra import open_aws

    try:
        from rubberband.cloud.aws.sweeping import sweep
    except ModuleNotFoundError:
        raise InputError(f"boto3, which talks to AWS, is not installed; run {install_hint('aws')}") from None
    swept = sweep(directories, open_aws, name)
    for found in swept.ended:
        print(f"ended {found}")
    for note in swept.notes:
        print(note, file=sys.stderr)
    for found in swept.unknown:
        print(
            f"left alone: {found}, which no experiment here knows; `rubberband down` ends it if no driver does",
            file=sys.stderr,
        )
    if swept.troubles:
        raise RubberbandError("; ".join(swept.troubles))
    return [str(found) for found in swept.ended]
