"""examples/balancing.py: the comparison that it prints."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_comparison_is_printed_side_by_side(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = importlib.import_module("balancing")
    try:
        equal = example.Course(ends_s=[4.0, 8.0, 12.0], accuracy=[0.5, 0.7, 0.9], shares=[32] * 4)
        balanced = example.Course(ends_s=[3.0, 5.0, 7.0], accuracy=[0.5, 0.7, 0.9], shares=[47, 46, 23, 12])
        example.show(equal, balanced)
    finally:
        for name in ("balancing", "digits"):
            sys.modules.pop(name, None)
    printed = capsys.readouterr().out
    assert "32 / 32 / 32 / 32 equal, 47 / 46 / 23 / 12 balanced" in printed
    assert "100.0 ms equal, 50.0 ms balanced (2.00 times as fast)" in printed
    assert "final accuracy    0.9000 equal, 0.9000 balanced (+0.00 points)" in printed
