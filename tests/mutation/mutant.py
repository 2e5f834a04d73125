"""One planted bug."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A bug to plant: one text in one file becomes another, and some test must notice."""

    name: str
    harm: str
    """What it would cost a user."""
    file: str
    """Relative to the repository's root."""
    old: str
    """Occurs exactly once in the file."""
    new: str
    tests: tuple[str, ...]
    """Files or node ids of pytest that should notice. Narrow ones: each planted bug runs them anew."""
    hangs: bool = False
    """Whether tests that do not end have noticed it; else a timeout counts as not caught."""
