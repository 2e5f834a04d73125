"""Screens as people see them: reports, rows, charts and narrations of every kind of result, estimates of the examples.

A change of any word or number shows here, and is right only if it was meant:
`RUBBERBAND_FREEZE_SCREENS=1 pytest tests/unit/test_screens.py` writes the screens anew, and `git diff` shows them.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rubberband.cli import app
from rubberband.executor import Result
from rubberband.executor.result.rows import report_rows, to_csv, trial_rows
from rubberband.views.report.page import result_charts
from tests.builders.results import EVERY_RESULT, FAULTS, a_job, render
from tests.builders.watching import narration

SCREENS = Path(__file__).with_name("screens")
EXAMPLES = Path(__file__).parents[2] / "examples"
ESTIMATED = ("digits", "fits", "hyperband", "scaling", "spot")


def is_as_kept(name: str, text: str) -> None:
    """Compare a screen with the one that is kept."""
    path = SCREENS / f"{name.replace(' ', '-')}.txt"
    text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\d+\.\d{10,}(e-?\d+)?", lambda found: f"{float(found[0]):.9g}", text)  # rounding differs by machine
    if os.environ.get("RUBBERBAND_FREEZE_SCREENS"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def drawn(value: Any) -> Any:
    """A chart without its long columns: their lengths, and the sums of their numbers."""
    if isinstance(value, Mapping):
        return {key: drawn(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        if len(value) > 6:
            numbers = [each for each in value if isinstance(each, int | float) and math.isfinite(each)]
            ends = f"from {drawn(value[0])} to {drawn(value[-1])}"
            return f"{len(value)} values {ends}, {drawn(float(sum(numbers)))} in all"
        return [drawn(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def charts(result: Result) -> Iterator[str]:
    for name, figure in result_charts(result).items():
        yield f"{name}:"
        yield from (json.dumps(drawn(trace)) for trace in figure["data"])


@pytest.mark.parametrize("kind", EVERY_RESULT)
def test_a_result_has_its_screens(kind: str) -> None:
    result = EVERY_RESULT[kind]()
    parts = [str(result), render(result), to_csv(trial_rows(result)), to_csv(report_rows(result)), *charts(result)]
    is_as_kept(f"result-{kind}", "\n\n".join(parts) + "\n")


@pytest.mark.parametrize("faults", [None, FAULTS], ids=["whole", "faults"])
def test_a_run_has_its_narration(faults: Any) -> None:
    is_as_kept(f"narration-{'whole' if faults is None else 'faults'}", narration(a_job(replan=True), faults))


@pytest.mark.parametrize("example", ESTIMATED)
def test_an_example_has_its_estimate(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUBBERBAND_HOME", str(tmp_path))
    monkeypatch.chdir(EXAMPLES.parent)
    done = CliRunner().invoke(app, ["estimate", f"examples/{example}.yaml", "--frontier"])
    assert done.exit_code == 0, done.output
    is_as_kept(f"estimate-{example}", done.stdout)
