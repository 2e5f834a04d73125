"""A row for each figure and table of a paper, printed as soon as it is there, with what was found."""

from __future__ import annotations

import argparse
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rubberband.errors import RubberbandError
from rubberband.views.formatting import aligned

Verdict = Literal["agrees", "partly", "differs"]
Cell = str | float | None


def verdict(*holds: bool) -> Verdict:
    """Return whether a statement holds in all, some or none of the cases."""
    return "agrees" if all(holds) else "partly" if any(holds) else "differs"


@dataclass(frozen=True, slots=True)
class Statement:
    """Words of the paper, whether they hold, and our result."""

    says: str
    verdict: Verdict
    found: str


@dataclass(frozen=True, slots=True)
class Table:
    """Table whose numbers have `digits` digits; whole ones have none, and None is a dash."""

    columns: Sequence[str]
    rows: Iterable[Sequence[Cell]]
    digits: int = 2

    def lines(self) -> list[str]:
        return aligned([self.columns, *([self._text(cell) for cell in row] for row in self.rows)])

    def _text(self, cell: Cell) -> str:
        return "-" if cell is None else f"{cell:.{self.digits}f}" if isinstance(cell, float) else str(cell)


def series(index: str, keys: Iterable[Cell], columns: Mapping[str, Sequence[Cell]], digits: int = 2) -> Table:
    """Return a table with a row for each key, which is in the column `index`."""
    return Table((index, *columns), list(zip(map(str, keys), *columns.values(), strict=True)), digits)


Found = Iterable[Statement | Table | str]
"""Statements, tables, and what was assumed."""
Part = Callable[[bool], Found]
"""Named as a figure or table, `figure_7`, with the title as its docstring; given True it computes less, for tests."""


def title(part: Part) -> str:
    return (part.__doc__ or "").splitlines()[0].rstrip(".")


def show(parts: Sequence[Part], description: str, argv: Sequence[str] | None = None) -> None:
    """Print the parts that are asked for, all by default, each assumption once, and the sum."""
    named = {part.__name__: part for part in parts}
    parser = argparse.ArgumentParser(
        description=description,
        epilog="parts:\n" + "\n".join(f"  {name:<13} {title(part)}" for name, part in named.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("part", nargs="*", help="one or more of those below; all by default")
    parser.add_argument("--small", action="store_true", help="compute less: fewer cases, which may agree less")
    asked = parser.parse_args(argv)
    if unknown := [name for name in asked.part if name not in named]:
        parser.error(f"no part {unknown[0]!r}; choose from {', '.join(named)}")
    counts: Counter[str] = Counter()
    assumed: set[str] = set()
    began_s, began_at = time.process_time(), time.monotonic()
    for name in asked.part or named:
        counts[_shown(named[name], asked.small, assumed)] += 1
    total = ", ".join(f"{counts[each]} {each}" for each in ("agrees", "partly", "differs"))
    lost = f", {counts['failed']} failed" if counts["failed"] else ""
    print(f"{total}{lost}; {time.process_time() - began_s:.0f} CPU s in {time.monotonic() - began_at:.0f} s")
    if lost:
        raise SystemExit(1)


def _shown(part: Part, small: bool, assumed: set[str]) -> str:
    """Print a part, or why it failed; return the verdict of all its statements together."""
    began_s, label = time.process_time(), part.__name__.replace("_", " ").capitalize()
    try:
        found = list(part(small))
    except ModuleNotFoundError as error:
        print(f"failed   {label}: it needs {error.name}; run pip install 'rubberband-tune[examples]'\n", flush=True)
        return "failed"
    except RubberbandError as error:
        print(f"failed   {label}: {error}\n", flush=True)
        return "failed"
    verdicts = {each.verdict for each in found if isinstance(each, Statement)}
    whole = verdicts.pop() if len(verdicts) == 1 else "partly"
    print(f"{whole:<8} {label}: {title(part)} ({time.process_time() - began_s:.1f} CPU s)")
    for each in found:
        if isinstance(each, Statement):
            print(_wrapped(f"[{each.verdict}] “{each.says}”", "  "), _wrapped(each.found, "    "), sep="\n")
    for each in found:
        if isinstance(each, Table):
            print("", *(f"    {line}" for line in each.lines()), sep="\n")
    for each in found:
        if isinstance(each, str) and each not in assumed:
            print(_wrapped(f"- {each}", "  "))
            assumed.add(each)
    print(flush=True)
    return whole


def percent(share: float) -> str:
    return f"{100.0 * share:.1f} %"


def listed(values: Iterable[float], digits: int = 2) -> str:
    return ", ".join(f"{each:.{digits}f}" for each in values)


def _wrapped(text: str, indent: str) -> str:
    return textwrap.fill(text, 116, initial_indent=indent, subsequent_indent=max(indent, "    "))
