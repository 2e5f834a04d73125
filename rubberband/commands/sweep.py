"""`rubberband sweep`: end what drivers that died left running on this machine."""

from __future__ import annotations

from typing import Annotated

import typer


def sweep(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Only this experiment.", show_default=False)
    ] = None,
) -> None:
    """End what dead drivers left running.

    Instances of a living driver are left alone. Nothing is lost: `rubberband resume` starts new ones and goes on from
    the last reported iterations.
    """
    from rubberband.cloud.local.sweeping import sweep as sweep_local
    from rubberband.tuning import default_home

    ended = sweep_local(default_home(), name)
    for found in ended:
        print(f"ended {found.instance} of {found.experiment} ({found.processes} processes)")
    if not ended:
        print("nothing was left behind")
