"""Reports of the experiments on LB-BSP and Pollux: tables, statements, and a page with a plot."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from page import Figure, write_page

COLOURS = ("#3b82c4", "#e08a1e", "#2a9d6f", "#b565a7")

Verdict = Literal["agrees", "agrees in part", "differs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Statement of the paper and our result."""

    says: str
    verdict: Verdict
    found: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Table of text with a title."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Printed and drawn results of one experiment."""

    title: str
    tables: Sequence[Table]
    figure: Figure
    findings: Sequence[Finding]
    assumptions: Sequence[str]


def verdict(*holds: bool) -> Verdict:
    """Return whether a statement holds in all, some or none of the cases."""
    return "agrees" if all(holds) else "agrees in part" if any(holds) else "differs"


def line(name: str, x: Sequence[Any], y: Sequence[Any], colour: str, axis: int = 1, **more: Any) -> dict[str, Any]:
    """Return a line with markers in panel `axis` (from 1); its name is in the legend once."""
    dash, width = more.pop("dash", "solid"), more.pop("width", 2.5)
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "legendgroup": name,
        "showlegend": axis == 1,
        "x": list(x),
        "y": list(y),
        "xaxis": f"x{axis}",
        "yaxis": f"y{axis}",
        "line": {"color": colour, "width": width, "dash": dash},
        "marker": {"color": colour, "size": 4 + 1.3 * width},
        **more,
    }


def show(compute: Callable[..., Report], *, data: str = "") -> None:
    """Run an example: print the report, and with --html write it as one self-contained page.

    With `data`, its help, the example has an argument: a folder that `compute` gets.
    """
    parser = argparse.ArgumentParser(description="One of the paper's simulated experiments.")
    if data:
        parser.add_argument("data", metavar="DATA", type=Path, help=data)
    parser.add_argument("--html", metavar="PATH", help="write tables and plot as one page, too")
    asked = parser.parse_args()
    report = compute(asked.data) if data else compute()
    print(as_text(report))
    if asked.html:
        try:
            write_page(asked.html, report)
        except OSError as error:
            raise SystemExit(f"--html {asked.html}: {error}; choose a path that can be written") from None
        print(f"\nwritten: {asked.html}")


def as_text(report: Report) -> str:
    """Return the report for a terminal."""
    blocks = [report.title, *(_text_table(table) for table in report.tables)]
    blocks.append("The paper's words, and what was found")
    blocks += [
        f"{_wrapped(f'[{each.verdict}] “{each.says}”', '  ')}\n{_wrapped(each.found, '    ')}"
        for each in report.findings
    ]
    blocks.append("\n".join(["Assumptions", *(_wrapped(f"- {each}", "  ") for each in report.assumptions)]))
    return "\n\n".join(blocks)


def _text_table(table: Table) -> str:
    rows = [table.columns, *table.rows]
    widths = [max(len(row[at]) for row in rows) for at in range(len(table.columns))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([table.title, *(f"  {text}" for text in lines)])


def _wrapped(text: str, indent: str) -> str:
    return textwrap.fill(text, 116, initial_indent=indent, subsequent_indent=max(indent, "    "))
