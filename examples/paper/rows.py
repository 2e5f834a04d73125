"""A row for each figure and table of a paper, printed as soon as it is there, with what was found."""

from __future__ import annotations

import argparse
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["agrees", "partly", "differs"]


def verdict(*holds: bool) -> Verdict:
    """Return whether a statement holds in all, some or none of the cases."""
    return "agrees" if all(holds) else "partly" if any(holds) else "differs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """Words of the paper and our result."""

    says: str
    verdict: Verdict
    found: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Table of text."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def lines(self) -> list[str]:
        """Return the columns, to the right, and the rows."""
        rows = [self.columns, *self.rows]
        widths = [max(len(row[at]) for row in rows) for at in range(len(self.columns))]
        return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Figure or table of a paper, as it comes out here."""

    title: str
    statements: Sequence[Statement]
    tables: Sequence[Table] = ()
    assumptions: Sequence[str] = ()

    @property
    def verdict(self) -> Verdict:
        """Verdict of all statements together."""
        verdicts = {each.verdict for each in self.statements}
        return verdicts.pop() if len(verdicts) == 1 else "partly"

    def lines(self) -> list[str]:
        """Return the statements and tables as lines of a terminal."""
        found = []
        for each in self.statements:
            found += [*_wrapped(f"[{each.verdict}] “{each.says}”", "  "), *_wrapped(each.found, "    ")]
        for table in self.tables:
            found += ["", *(f"    {line}" for line in table.lines())]
        return found


Part = Callable[[bool], Row]
"""Named as a figure or table, `figure_7`; given True it computes less, for tests."""


def label(part: Part) -> str:
    """Return `Figure 7` for `figure_7`."""
    return part.__name__.replace("_", " ").capitalize()


def show(parts: Sequence[Part], description: str, argv: Sequence[str] | None = None) -> None:
    """Print the parts that are asked for, all by default, each assumption once, and the sum."""
    named = {part.__name__: part for part in parts}
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("part", nargs="*", help=f"one of {', '.join(named)}; all by default")
    parser.add_argument("--small", action="store_true", help="compute less: fewer cases, which may agree less")
    asked = parser.parse_args(argv)
    if unknown := [name for name in asked.part if name not in named]:
        parser.error(f"no part {unknown[0]!r}; choose from {', '.join(named)}")
    counts: Counter[Verdict] = Counter()
    assumed: set[str] = set()
    began_s, began_at = time.process_time(), time.monotonic()
    for name in asked.part or named:
        before_s = time.process_time()
        row = named[name](asked.small)
        spent = f"{time.process_time() - before_s:.1f} CPU s"
        print(f"{row.verdict:<8} {label(named[name])}: {row.title} ({spent})", *row.lines(), sep="\n")
        for each in (each for each in row.assumptions if each not in assumed):
            print(*_wrapped(f"- {each}", "  "), sep="\n")
        print(flush=True)
        assumed |= set(row.assumptions)
        counts[row.verdict] += 1
    total = ", ".join(f"{counts[each]} {each}" for each in ("agrees", "partly", "differs"))
    print(f"{total}; {time.process_time() - began_s:.0f} CPU s in {time.monotonic() - began_at:.0f} s")


def percent(share: float) -> str:
    """Return a share as a percentage."""
    return f"{100.0 * share:.1f} %"


def listed(values: Sequence[float], digits: int = 2) -> str:
    """Return numbers with a comma between them."""
    return ", ".join(f"{each:.{digits}f}" for each in values)


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, 116, initial_indent=indent, subsequent_indent=max(indent, "    "))
