"""What `tune` shows: nothing, lines or a table, or a display in a notebook; and results and experiments as HTML."""

from __future__ import annotations

import html
import sys
import threading
import types
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import rubberband
from rubberband.errors import InputError
from rubberband.executor import Controller
from rubberband.views.live import view as live
from rubberband.views.live.view import NotebookView
from tests.builders.journalled_runs import words
from tests.builders.results import ATTACK, EVERY_RESULT, a_job, hostile
from tests.builders.virtual_runs import run_virtual


class Balanced(HTMLParser):
    """Checks that tags are closed, and collects text of a page, or of what a notebook shows of a value."""

    def __init__(self, shown: Any) -> None:
        super().__init__()
        page = shown if isinstance(shown, str) else shown._repr_html_()
        self.open: list[str] = []
        self.text: list[str] = []
        self.page = page
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.mark.parametrize("kind", sorted(EVERY_RESULT))
def test_a_result_is_html_in_a_notebook(kind: str) -> None:
    result = EVERY_RESULT[kind]()
    text = Balanced(result).text
    assert text[0].startswith("digits: ")
    if result.best is not None:
        assert any(line.startswith("best: score=") for line in text)


def test_values_of_users_never_become_markup() -> None:
    page = Balanced(hostile()).page
    assert ATTACK not in page
    assert html.escape(ATTACK) in page
    experiment = rubberband.Experiment(**words(search={"space": {ATTACK: {"type": "choice", "values": [ATTACK]}}}))
    assert ATTACK not in Balanced(experiment).page


def test_an_experiment_is_html_in_a_notebook() -> None:
    text = Balanced(rubberband.Experiment(**words(track=["csv"]))).text
    assert text[0] == "digits-sha: 27 trials"
    assert "loguniform(0.0001, 0.1)" in text
    assert text[text.index("constraints.max_cost") + 1] == "4.0"
    assert text[text.index("constraints.deadline") + 1] == "25m"
    assert text[text.index("track") + 1] == "csv"
    assert "resources.region" not in text


def estimated(**changes: Any) -> Any:
    return rubberband.estimate(**words(**changes))


def test_an_estimate_is_html_in_a_notebook_and_the_screen_in_print(tmp_path: Path) -> None:
    found = estimated(home=tmp_path)
    assert found.feasible
    text = Balanced(found).text
    lines = str(found).splitlines()
    assert text[0] == lines[0]
    assert text[0].startswith("digits-sha: ")
    assert "Options" in text
    assert "Options" in lines
    assert found.to_json()["feasible"]
    assert found.prediction.cost_usd == pytest.approx(found.to_json()["prediction"]["cost_usd"]["mean"])


def test_a_plan_is_html_in_a_notebook() -> None:
    plan = estimated().plan
    text = Balanced(plan).text
    assert text[0] == "plan"
    assert text[5:9] == ["0", str(plan.stages[0].instances), str(plan.stages[0].gpus_per_trial), "on demand"]


def test_an_estimate_without_a_plan_shows_remedies_and_a_sized_one_its_size() -> None:
    found = estimated(constraints={"deadline": "1m"})
    assert (found.feasible, found.plan, found.prediction) == (False, None, None)
    assert "Remedies" in Balanced(found).text
    assert " configurations fit " in Balanced(estimated(size=True)).text[0]


def test_an_estimate_needs_a_profile_and_one_experiment(tmp_path: Path) -> None:
    with pytest.raises(rubberband.ProfileMissingError, match="there is no profile; pass profile="):
        estimated(home=tmp_path, profile=None)
    with pytest.raises(InputError, match=r"estimate\(\) got an experiment and also name; give one of them"):
        rubberband.estimate(experiment=rubberband.Experiment(**words()), name="x")


@pytest.fixture
def silent(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., tuple[str, str]]:
    def tuned(**options: Any) -> tuple[str, str]:
        assert rubberband.tune(home=tmp_path, **words(), **options).outcome == "done"
        found = capsys.readouterr()
        return found.out, found.err

    return tuned


def test_tune_is_silent_if_asked(silent: Callable[..., tuple[str, str]]) -> None:
    assert silent(verbose=0) == ("", "")


def test_tune_shows_the_plan_and_a_line_for_each_stage(silent: Callable[..., tuple[str, str]]) -> None:
    out, err = silent()
    assert out == ""
    first, *others = err.splitlines()
    assert first.startswith("plan: ")
    assert sum(" SYNC " in line for line in others) == 4
    assert "instance" in others[0] or "digits-sha: 27 trials in 4 stages" in others[0]
    assert not any("ready after" in line for line in others)


def test_tune_shows_instances_with_verbose_2(silent: Callable[..., tuple[str, str]]) -> None:
    assert " ready after " in silent(verbose=2)[1]


def test_another_verbosity_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="verbose: 3 is not 0, 1 or 2"):
        rubberband.tune(home=tmp_path, **words(), verbose=3)
    assert not list(tmp_path.iterdir())


class Cell:
    """A notebook's cell: what it showed, one after another."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.grew = threading.Event()

    def show(self, text: str) -> Callable[[str], None]:
        self.shown.append(text)
        return self.update

    def update(self, text: str) -> None:
        self.shown.append(text)
        self.grew.set()


def test_a_display_is_updated_while_it_runs_and_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "REFRESH_S", 0.001)
    cell = Cell()

    def wait(_event: object, controller: Controller) -> None:
        if controller.state.stages and controller.state.stages[-1].stage == 1:
            assert cell.grew.wait(120.0)

    with NotebookView(a_job(), lambda: 117.0, show=cell.show) as view:
        run_virtual(a_job(), observers=[view, wait])
    assert Balanced(cell.shown[0]).text == ["digits", "starting"]
    last = Balanced(cell.shown[-1]).text
    assert any(line.startswith("best      score=0.875 (trial 0)") for line in last)
    assert any("done: best score=0.875" in line for line in last)
    assert len(cell.shown) >= 3


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Cell:
    """A process that is the kernel of a notebook, as IPython makes it known."""
    cell = Cell()
    handle = types.SimpleNamespace(update=lambda text: cell.update(text))
    display = types.ModuleType("IPython.display")
    display.HTML = lambda text: text  # type: ignore[attr-defined]
    display.display = lambda text, display_id: (cell.show(text), handle)[1]  # type: ignore[attr-defined]
    ipython = types.ModuleType("IPython")
    ipython.get_ipython = lambda: types.SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return cell


@pytest.mark.usefixtures("trained_runs")
def test_tune_shows_a_display_in_a_notebook(kernel: Cell, silent: Callable[..., tuple[str, str]]) -> None:
    out, err = silent()
    assert (out.splitlines()[0][:6], err) == ("plan: ", "")
    assert any("done: best accuracy=" in text for text in kernel.shown)
