"""Small pieces of HTML for notebooks: cards with lines and tables. Text is escaped; the notebook's theme is kept."""

from __future__ import annotations

import html
from collections.abc import Collection, Sequence

_TABLE = "border-collapse:collapse;margin:.4em 0;font-size:.9em"
_CELL = "padding:.1em .7em .1em 0;border-bottom:1px solid rgba(128,128,128,.3)"


def card(title: str, *parts: str) -> str:
    """Return parts below a title."""
    return f"<div><b>{html.escape(title)}</b>{''.join(parts)}</div>"


def lines(texts: Sequence[str]) -> str:
    """Return lines of text, one below the other."""
    return "".join(f"<div>{html.escape(text)}</div>" for text in texts)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, words: Collection[int] = (0,)) -> str:
    """Return a table: figures to the right, the columns in `words` to the left; empty without rows."""
    if not rows:
        return ""
    head = "".join(_cell("th", name, column in words) for column, name in enumerate(header))
    body = "".join(
        f"<tr>{''.join(_cell('td', text, column in words) for column, text in enumerate(row))}</tr>" for row in rows
    )
    return f'<table style="{_TABLE}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _cell(tag: str, text: str, is_words: bool) -> str:
    align = "left" if is_words else "right"
    return f'<{tag} style="text-align:{align};{_CELL}">{html.escape(text)}</{tag}>'
