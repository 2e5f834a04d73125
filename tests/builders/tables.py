"""Cases of a test from a table: tests/unit/tables/FILE.yaml has a list for each test, with a case a line."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

TABLES = Path(__file__).parents[1] / "unit" / "tables"


@cache
def table(name: str) -> dict[str, Any]:
    """The whole table of a file of tests."""
    found = yaml.load(
        (TABLES / f"{name}.yaml").read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    )
    assert isinstance(found, dict)
    return found


def cases(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Run a test with each of its cases in the table of its file; a case has a value for each of these names."""

    def mark(test: Callable[..., Any]) -> Callable[..., Any]:
        rows = table(test.__module__.rpartition(".")[2])[test.__name__]
        marked: Callable[..., Any] = pytest.mark.parametrize(names if len(names) > 1 else names[0], rows)(test)
        return marked

    return mark
