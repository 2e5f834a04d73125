"""`rubberband prices`: what instance types have and cost, as AWS says now or said last."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rubberband.cloud.instance_types import InstanceType
    from rubberband.cloud.prices import LiveTable


class Output(StrEnum):
    """How prices are printed."""

    table = "table"
    json = "json"


def prices(
    types: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TYPE]...", help="Only these, GPUs or not; default: all with GPUs.", show_default=False
        ),
    ] = None,
    region: Annotated[str, typer.Option("--region", "-r", help="The region of AWS.")] = "us-east-1",
    refresh: Annotated[bool, typer.Option("--refresh", help="Ask AWS, however new the last answers are.")] = False,
    output: Annotated[Output, typer.Option("--output", "-o", help="Print a table or JSON.")] = Output.table,
) -> None:
    """Show what EC2's instance types have and cost.

    Prices on demand are asked for once a day and those on spot every ten minutes. Where AWS cannot be asked, those that
    it told before, or the ones that come with rubberband, are shown with their age.
    """
    from rubberband.cloud.prices import prices_of
    from rubberband.home import default_home
    from rubberband.views.price_table import HEADER, cheapest_first, price_json, price_rows

    table = prices_of(types or None, region, default_home(), refresh=refresh)
    rows = cheapest_first(_chosen(table, types or [], region), region)
    notes = _notes(table)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    if output is Output.json:
        from rubberband.commands.show import print_json

        listed = [price_json(row, region) for row in rows]
        print_json({"schema": "rubberband.prices/1", "region": region, "types": listed, "notes": notes})
    else:
        from rubberband.commands.show import print_table

        print_table(HEADER, price_rows(rows, region, time.time()))


def _notes(table: LiveTable) -> list[str]:
    return [
        f"prices of AWS are missing: {note}. Shown are those that it told before, or the catalogue's"
        for note in table.notes
    ]


def _chosen(table: LiveTable, types: Sequence[str], region: str) -> list[InstanceType]:
    """The types that were asked for, or all with GPUs that have a price. Raises InputError for what is not known."""
    from rubberband.errors import InputError

    if types:
        return [_row(table, name, region) for name in dict.fromkeys(types)]
    found = [row for row in table.values() if row.gpus and region in row.prices_usd_per_hour]
    if not found:
        known = dict.fromkeys(name for row in table.values() for name in row.prices_usd_per_hour)
        why = f"AWS could not be asked ({table.notes[0]})" if table.notes else "AWS told of none"
        raise InputError(f"--region {region}: no prices are known, and {why}; known are {', '.join(known)}")
    return found


def _row(table: LiveTable, name: str, region: str) -> InstanceType:
    import difflib

    from rubberband.errors import InputError
    from rubberband.units import shown

    if name in table:
        return table[name]
    close = " or ".join(shown(near) for near in difflib.get_close_matches(name[:100], table, n=3, cutoff=0.6))
    remedy = f"did you mean {close}?" if close else "`rubberband prices` lists the types with GPUs"
    if table.notes:
        why = f"is not in the catalogue, and AWS could not be asked ({table.notes[0]})"
        raise InputError(f"{shown(name)} {why}; {remedy}")
    raise InputError(f"AWS has no {shown(name)} in {region}; {remedy}")
