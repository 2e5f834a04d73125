"""`rubberband simulate`: try sharing policies on a workload, on a virtual clock. Nothing is started or spent."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from rubberband.commands.common import TableFormat, argument, option, print_json, print_table, write_page


class WorkloadFormat(StrEnum):
    """Format of a workload."""

    rubberband = "rubberband"
    adaptdl = "adaptdl"


def simulate(
    pool: Annotated[Path, argument("POOL", "The pool file.")],
    workload: Annotated[Path, argument("WORKLOAD", "The workload: a CSV file with one job per row.")],
    traces: Annotated[
        Path | None, typer.Argument(metavar="[TRACES_DIR]", help="Folder of traces, for --format adaptdl.")
    ] = None,
    policy: Annotated[
        list[str] | None,
        option("--policy", "NAME", "Simulate this policy; repeats. [default: the pool's own, and equal]"),
    ] = None,
    format: Annotated[
        WorkloadFormat,
        typer.Option("--format", help="rubberband: columns at, name, kind and iterations; adaptdl: that of Pollux."),
    ] = WorkloadFormat.rubberband,
    output: Annotated[TableFormat, typer.Option("--output", "-o", help="Print a table or JSON.")] = TableFormat.table,
    html: Annotated[Path | None, option("--html", "FILE", "Write a page with charts to FILE as well.")] = None,
) -> None:
    """Simulate a workload on a pool under several sharing policies.

    Shows the mean, median and 99th percentile of the job completion times (JCT), the makespan, finish-time fairness,
    and the use and cost of the pool for each policy. In a workload file, KIND.json beside it is the profile of jobs of
    that kind.
    """
    from rubberband.app.simulating import simulated
    from rubberband.errors import InputError
    from rubberband.spec.loading import load_pool

    if (format is WorkloadFormat.adaptdl) != (traces is not None):
        raise InputError("--format adaptdl and TRACES_DIR need each other; give both, or none")
    asked = load_pool(pool)
    policies = list(dict.fromkeys(policy or [asked.policy, "equal"]))
    found = simulated(asked, workload, policies, traces, lambda line: print(line, file=sys.stderr, flush=True))
    if output is TableFormat.json:
        print_json(found.to_json())
    else:
        from rubberband.views.simulation import policy_table

        table = policy_table(found)
        print(table.title)
        print_table(table.header, table.rows, words=table.words)
    if html is not None:
        from rubberband.views.simulation import render_simulation

        write_page(html, render_simulation(found))
