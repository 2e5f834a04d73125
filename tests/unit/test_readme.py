"""README says what is true: its file is the example's, and its Python says the same."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

import rubberband
from rubberband.spec.experiment import Experiment
from rubberband.spec.loading import load_experiment, parse_experiment

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def without_place(experiment: Experiment) -> dict[str, Any]:
    """The experiment without its name and its entry point."""
    words = experiment.to_words()
    return {key: words[key] for key in words if key not in ("name", "entrypoint")}


def test_the_file_is_the_example() -> None:
    (text,) = blocks("yaml")
    assert without_place(parse_experiment(text)) == without_place(load_experiment(ROOT / "examples" / "digits.yaml"))


def test_the_python_form_says_the_same(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Experiment] = []

    class Answer:
        best_config: Any = None
        actual_cost_usd = 0.0

    def tune(entrypoint: Any, **words: Any) -> Answer:
        seen.append(Experiment(entrypoint=entrypoint, **words))
        return Answer()

    monkeypatch.setattr(rubberband, "tune", tune, raising=False)
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setitem(sys.modules, "examples", type(sys)("examples"))
    sys.modules["examples"].__path__ = [str(ROOT / "examples")]
    exec(blocks("python")[0], {})
    assert [without_place(e) for e in seen] == [without_place(load_experiment(ROOT / "examples" / "digits.yaml"))]
    assert seen[0].entrypoint.__name__ == "DigitsTrial"
