"""What a page owes to readers who do not see it as drawn, found in a real browser.

These are the rules of WCAG whose breach is serious and that a page can be measured for: contrast, names of controls,
headings in order, landmarks, references, scrolled regions that a keyboard reaches, and sizes of targets.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

_FAULTS = Path(__file__).with_suffix(".js").read_text("utf-8")


def faults(page: Any) -> list[str]:
    """Return the rules that a page breaks now, with the elements. Sizes come with the styles, so a load is awaited."""
    page.wait_for_load_state("load")
    found: list[str] = page.evaluate(_FAULTS)
    return found
