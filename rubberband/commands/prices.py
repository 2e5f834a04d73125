"""`rubberband prices`: what instance types have and cost, as AWS says now or said last."""

from __future__ import annotations

import sys
import time
from enum import StrEnum
from typing import Annotated

import typer


class PricesFormat(StrEnum):
    """How prices are printed."""

    table = "table"
    json = "json"


def prices(
    types: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TYPE]...",
            help="Only these types, with or without GPUs; default: all with GPUs.",
            show_default=False,
        ),
    ] = None,
    region: Annotated[str, typer.Option("--region", "-r", help="The region of AWS.")] = "us-east-1",
    refresh: Annotated[bool, typer.Option("--refresh", help="Ask AWS, however new the last answers are.")] = False,
    output: Annotated[PricesFormat, typer.Option("--output", "-o", help="Print a table or JSON.")] = PricesFormat.table,
) -> None:
    """Show the resources and prices of EC2 instance types.

    On-demand prices are refreshed once a day, spot prices every ten minutes. If AWS does not answer, earlier prices, or
    those that come with rubberband, are shown with their age.
    """
    from rubberband.cloud.prices import prices_of
    from rubberband.home import default_home
    from rubberband.views.price_table import HEADER, chosen, price_notes, price_rows, prices_json

    table = prices_of(types or None, region, default_home(), refresh=refresh)
    rows = chosen(table, types or [], region)
    notes = price_notes(table)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    if output is PricesFormat.json:
        from rubberband.commands.common import print_json

        print_json(prices_json(rows, region, notes))
    else:
        from rubberband.commands.common import print_table

        print_table(HEADER, price_rows(rows, region, time.time()))
