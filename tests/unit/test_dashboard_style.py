"""The dashboard's colours can be read: WCAG's AA, in light and in dark."""

from __future__ import annotations

import re
from importlib import resources

import pytest

CSS = resources.files("rubberband.api.dashboard").joinpath("static", "dashboard.css").read_text(encoding="utf-8")
LIGHT, DARK = (
    dict(re.findall(r"--([\w-]+): (#[0-9a-f]{3,6});", part)) for part in re.findall(r":root \{(.*?)\}", CSS, re.S)
)
TEXTS = [
    *((ink, ground) for ink in ("text", "faint", "accent", "good", "warn", "bad") for ground in ("back", "raised")),
    *((ink, "sunk") for ink in ("text", "faint")),
    *((mood, f"{mood}-soft") for mood in ("good", "warn", "bad", "calm", "accent")),
    ("faint", "none-soft"),
    ("on-accent", "accent"),
    ("text", "warn-soft"),
    ("text", "bad-soft"),
    ("raised", "bad"),
    ("back", "text"),
]
EDGES = [("edge", "back"), ("edge", "raised"), ("accent", "raised"), ("accent", "none-soft"), ("bad", "raised")]


def luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [LIGHT, LIGHT | DARK], ids=["light", "dark"])
def test_text_stands_out_by_4_5_and_edges_by_3(theme: dict[str, str]) -> None:
    weak_texts = {pair: contrast(theme[pair[0]], theme[pair[1]]) for pair in TEXTS}
    weak_edges = {pair: contrast(theme[pair[0]], theme[pair[1]]) for pair in EDGES}
    assert {pair: ratio for pair, ratio in weak_texts.items() if ratio < 4.5} == {}
    assert {pair: ratio for pair, ratio in weak_edges.items() if ratio < 3.0} == {}


def test_black_on_white_is_twenty_one() -> None:
    assert contrast("#fff", "#000000") == pytest.approx(21.0)
