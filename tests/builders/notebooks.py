"""A notebook without Jupyter: its cells are run in order, and what they show is compared with their outputs."""

from __future__ import annotations

import ast
import html
import io
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A cell of code, and what the notebook says that it shows."""

    source: str
    shown: str


def cells(path: Path) -> Iterator[Cell]:
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            yield Cell(source="".join(cell["source"]), shown="\n".join(filter(None, map(_shown, cell["outputs"]))))


def _shown(output: Mapping[str, Any]) -> str:
    """The text of an output; nothing of a display of progress, nor of what goes to stderr."""
    match output["output_type"]:
        case "stream":
            return _plain("".join(output["text"])) if output["name"] == "stdout" else ""
        case "execute_result":
            data = output["data"]
            return _text("".join(data["text/html"])) if "text/html" in data else _plain("".join(data["text/plain"]))
        case "display_data":
            return ""
    raise AssertionError(f"{output['output_type']}: a cell of the notebook failed")


def _text(page: str) -> str:
    return _plain(html.unescape(re.sub(r"<[^>]*>", " ", page)))


def _plain(text: str) -> str:
    return "\n".join(" ".join(line.split()) for line in text.splitlines() if line.strip())


def run(found: Sequence[Cell], names: dict[str, Any]) -> Iterator[str]:
    """Run the cells in a namespace; what each shows: what it prints, and the value of its last line."""
    for number, cell in enumerate(found, 1):
        tree, file = ast.parse(cell.source), f"cell {number}"
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        printed = io.StringIO()
        value = None
        with redirect_stdout(printed):
            exec(compile(tree, file, "exec"), names)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), file, "eval"), names)
        result = "" if value is None else _text(value._repr_html_()) if hasattr(value, "_repr_html_") else repr(value)
        yield "\n".join(filter(None, [_plain(printed.getvalue()), result]))


def main() -> None:
    """Run the notebook that is named, in the module of the program as a kernel does; print its outputs as JSON."""
    print(json.dumps(list(run(list(cells(Path(sys.argv[1]))), sys.modules["__main__"].__dict__))))
