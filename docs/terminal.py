"""Draws a command on a terminal: runs `rubberband` with the words behind the keys, which are typed at its question.

python docs/terminal.py FOLDER $'1\n' init train.py > docs/examples/init.svg
"""

from __future__ import annotations

import os
import re
import sys
from html import escape
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.builders.terminal import on_terminal

ROW, LEFT, TOP, COLUMN = 17, 16, 28, 7.3
PAPER, INK, DIM = "#1b1f27", "#e6e9ef", "#8b93a1"


def shown(folder: Path, keys: str, words: list[str]) -> tuple[list[str], list[str]]:
    """Return the last lines of the program while it runs, and the lines that stay."""
    with on_terminal(*words, folder=folder, environment=os.environ) as terminal:
        terminal.until(r"metric \[1\]: ")
        before, looked, question = terminal.shown.rpartition("looked at")
        terminal.type(keys.encode())
        terminal.end()
    folded = before.rpartition("looking at")[2].splitlines()[1:]
    answer = re.search(r"^wrote .*", terminal.shown, re.DOTALL | re.MULTILINE)
    assert answer is not None, terminal.shown
    stays = [*f"{looked}{question}{keys}".splitlines(), *answer[0].splitlines()]
    return folded, [line.rstrip() for line in stays if not line.startswith("note:")]


def svg(command: str, folded: list[str], lines: list[str]) -> str:
    """Return the picture, with the folded lines dimmed."""
    texts = [(f"$ {command}", INK), *((line, DIM) for line in folded), *((line, INK) for line in lines)]
    width = round(2 * LEFT + COLUMN * max(len(text) for text, _ in texts))
    height = TOP + ROW * len(texts) + 6
    body = "\n".join(
        f'<text x="{LEFT}" y="{TOP + ROW * row}" fill="{colour}" xml:space="preserve">{escape(text)}</text>'
        for row, (text, colour) in enumerate(texts)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" font-size="12" '
        f'font-family="ui-monospace, Menlo, Consolas, monospace"><title>{escape(command)}</title>\n'
        f'<rect width="{width}" height="{height}" rx="8" fill="{PAPER}"/>\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    place, typed, *arguments = sys.argv[1:]
    sys.stdout.write(svg(" ".join(["rubberband", *arguments]), *shown(Path(place), typed, arguments)))
