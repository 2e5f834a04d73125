"""Screens as people see them: reports, rows, charts and narrations of every kind of result, estimates of the examples.

A change of any word or number shows here, and is right only if it was meant:
`RUBBERBAND_FREEZE_SCREENS=1 pytest tests/unit/test_screens.py` writes the screens anew, and `git diff` shows them.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from rubberband.api.dashboard.experiment_texts import cards, sentence, stage_rows, troubles
from rubberband.api.dashboard.trials_table import Asked, table_page
from rubberband.cli import app
from rubberband.executor import Faults, Result, report_rows, to_csv, trial_rows
from rubberband.states import ExperimentState
from rubberband.values.submission import Submission, Summary
from rubberband.views import document
from rubberband.views.charts.batches import batches_by_gpus
from rubberband.views.live.view import Progress, shown
from rubberband.views.report.page import result_charts
from rubberband.views.story import story
from rubberband.views.trial import gangs, lead, trial_cards
from tests.builders.adaptive_runs import adaptive_backend, an_adaptive_job
from tests.builders.cli_runs import CommandLine
from tests.builders.cli_runs import file as file
from tests.builders.cli_runs import rubberband as rubberband
from tests.builders.results import EVERY_RESULT, FAULTS, a_job, a_result, cut_short, render
from tests.builders.special_results import (
    EXTENSIONS,
    SLOTS,
    SLOW,
    SPECIAL_RESULTS,
    STRAGGLER,
    TAKEN,
    UNEQUAL,
    bracket_job,
    spot_job,
    straggling_job,
)
from tests.builders.timed_requests import extend
from tests.builders.watching import narration, pictures

RUNNING, DONE = ExperimentState.RUNNING, ExperimentState.DONE
WITH_LAYOUT = ("done", "unfinished", "adaptive", "brackets")
RESULTS = {**EVERY_RESULT, **SPECIAL_RESULTS}

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


def charts(result: Result, with_layout: bool) -> Iterator[str]:
    for name, figure in (result_charts(result) | {"batches by GPUs": batches_by_gpus(result)}).items():
        if figure is None:
            continue
        yield f"{name}:"
        yield from (json.dumps(drawn(trace)) for trace in figure["data"])
        if with_layout:
            yield from (f"{part}: {json.dumps(drawn(each))}" for part, each in figure["layout"].items())


@pytest.mark.parametrize("kind", RESULTS)
def test_a_result_has_its_screens(kind: str) -> None:
    result = RESULTS[kind]()
    rows = [to_csv(trial_rows(result)), to_csv(report_rows(result))]
    parts = [str(result), render(result), *rows, *charts(result, kind in WITH_LAYOUT)]
    is_as_kept(f"result-{kind}", "\n\n".join(parts) + "\n")


def lines_of(value: Any) -> Iterator[str]:
    """What a page is made of, a line for each."""
    for each in value if isinstance(value, list | tuple) else [value]:
        yield str(each)


@pytest.mark.parametrize("kind", RESULTS)
def test_a_result_has_its_words_on_the_pages_of_a_service(kind: str) -> None:
    result = RESULTS[kind]()
    running = kind in ("nothing yet", "unfinished")
    told = Summary(started_at=1000.0, stages=len(result.stages), forecast_jct_s=200.0, forecast_cost_usd=0.05)
    known = Submission(name="digits", state=RUNNING if running else DONE, created_at=1.0, changed_at=1.0, summary=told)
    trial = result.trials[0]
    parts = {
        "sentence": sentence(known, result),
        "troubles": troubles(result),
        "cards": cards(known, result),
        "stages": stage_rows(result),
        "story": story(result),
        "trials": table_page(result, Asked()).rows[:5],
        "trial 0": [lead(result, trial), *trial_cards(result, trial)],
        "gangs of trial 0": list(gangs(result, trial).rows),
    }
    text = "".join(f"{name}:\n" + "".join(f"  {line}\n" for line in lines_of(part)) for name, part in parts.items())
    is_as_kept(f"page-{kind}", text)


def test_every_state_of_an_experiment_has_a_sentence() -> None:
    def said(result: Result | None, **told: Any) -> Iterator[str]:
        for state in ExperimentState:
            found = Summary(**{"started_at": 1000.0 if result else None, "stages": 3} | told)
            made = {"created_at": 1.0, "changed_at": 1.0, "reason": "why it is so", "summary": found}
            yield f"  {state.value}: {sentence(Submission(name='digits', state=state, **made), result)}"

    soon = cut_short(30, job=a_job(deadline_s=300.0), cancel=False)
    without = cut_short(30, job=a_job(deadline_s=None, max_cost_usd=None), cancel=False)
    forecasts = [(0.0, 0.0), (200.0, 0.05), (300.0, 0.05), (400.0, 2.0)]
    parts = {
        "not begun": said(None),
        "done": said(a_result()),
        **{f"forecast {at} s": said(soon, forecast_jct_s=at, forecast_cost_usd=usd) for at, usd in forecasts},
        "virtual": said(replace(soon, provider="virtual"), forecast_jct_s=200.0, forecast_cost_usd=0.05),
        "no limits": said(without, forecast_jct_s=200.0),
    }
    is_as_kept("sentences", "".join(f"{name}:\n" + "\n".join(lines) + "\n" for name, lines in parts.items()))


def no_more_after(turns: int) -> Callable[[], bool]:
    """A user who cancels after so many looks."""
    looks = iter([False] * turns)
    return lambda: next(looks, True)


NARRATIONS: dict[str, Callable[[], str]] = {
    "plain": narration,
    "whole": lambda: narration(a_job(replan=True)),
    "faults": lambda: narration(a_job(replan=True), FAULTS),
    "kept plan": lambda: narration(a_job(replan=True, deadline_s=130.0)),
    "lost": lambda: narration(faults=Faults(lost_after_s={"i-002": 20.0})),
    "refused": lambda: narration(faults=Faults(refused={"i-003"})),
    "refused for good": lambda: narration(faults=Faults(refused={f"i-{n:03d}" for n in range(3, 30)})),
    "nowhere": lambda: narration(faults=Faults(refused={f"i-{n:03d}" for n in range(30)})),
    "cancelled": lambda: narration(cancelled=no_more_after(4)),
    "budget": lambda: narration(a_job(max_cost_usd=0.02)),
    "spot": lambda: narration(spot_job(), TAKEN),
    "brackets": lambda: narration(bracket_job()),
    "slots": lambda: narration(SLOTS),
    "unequal": lambda: narration(UNEQUAL, SLOW),
    "straggler": lambda: narration(straggling_job(), STRAGGLER),
    "hung": lambda: narration(replace(UNEQUAL, hung_replacements=1), Faults(slow={"i-002": 500.0})),
    "extended": lambda: narration(requests=EXTENSIONS),
    "extended at once": lambda: narration(requests=[extend(0.0, deadline_s=1800.0)]),
    "adaptive": lambda: narration(an_adaptive_job(), backend=adaptive_backend(an_adaptive_job())),
}


@pytest.mark.parametrize("kind", NARRATIONS)
def test_a_run_has_its_narration(kind: str) -> None:
    is_as_kept(f"narration-{kind}", NARRATIONS[kind]())


def seen_live(now: float, progress: Progress, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    with console.capture() as capture:
        document.print_drawn(console, document.drawn(*shown(progress, now), (), width=width))
    return capture.get()


LIVE: dict[str, Callable[[], list[tuple[float, Progress]]]] = {
    "faults": lambda: pictures(a_job(), FAULTS),
    "spot": lambda: pictures(spot_job(), TAKEN),
    "brackets": lambda: pictures(bracket_job()),
    "slots": lambda: pictures(SLOTS),
    "unequal": lambda: pictures(UNEQUAL, SLOW),
    "adaptive": lambda: pictures(an_adaptive_job(), backend=adaptive_backend(an_adaptive_job())),
}


@pytest.mark.parametrize("kind", LIVE)
def test_a_run_is_seen_live_within_80_columns(kind: str) -> None:
    taken = LIVE[kind]()
    looks = [(round(now), seen_live(now, progress)) for now, progress in taken]
    assert not [look for _, look in looks if "\N{HORIZONTAL ELLIPSIS}" in look or max(map(len, look.splitlines())) > 80]
    is_as_kept(f"live-{kind}", "\n".join(f"at {at} s:\n{look}" for at, look in [*looks[::7], looks[-1]]))


@pytest.mark.parametrize("example", ESTIMATED)
def test_an_example_has_its_estimate(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUBBERBAND_HOME", str(tmp_path))
    monkeypatch.chdir(EXAMPLES.parent)
    done = CliRunner().invoke(app, ["estimate", f"examples/{example}.yaml", "--frontier"])
    assert done.exit_code == 0, done.output
    is_as_kept(f"estimate-{example}", done.stdout)


NOISE = ("profile.trial_cv=0.1", "constraints.deadline=32m")
NO_TYPE = ("resources.gpus_per_instance=", "resources.price_per_hour=")
GOODPUT = (
    "{throughput: {alpha_grad_s: 0.06, beta_grad_s: 0.0016, alpha_local_s: 0.01, gamma: 2.0}, noise_scale: 2000.0, "
    "samples_per_iteration: 50000, limits: {initial: 128, max: 4096, max_per_gpu: 512}, overhead_s: 1.5}"
)
ESTIMATES: dict[str, tuple[str, ...]] = {
    "noise": NOISE,
    "spot": ("resources.market=spot", "resources.spot.price_per_hour=3.7", "constraints.deadline=1h"),
    "brackets": (
        "search.scheduler={type: hyperband, max_t: 9, reduction_factor: 3}",
        "constraints.deadline=2h",
        "resources.head_price_per_hour=0.5",
    ),
    "types": (
        "resources.instance_type=",
        "resources.instance_types=[p3.2xlarge, p3.8xlarge]",
        *NO_TYPE,
        "constraints.deadline=40m",
    ),
    "too late": ("constraints.deadline=5m",),
    "too dear": ("constraints.max_cost=5",),
    "fastest": ("constraints.objective=min_time", "constraints.max_cost=20"),
    "one stage": ("search.scheduler={type: stages, stages: [{trials: 8, iterations: 1}]}",),
    "free": ("resources.price_per_hour=0", "constraints.max_cost=null"),
    "per function": ("resources.billing=per_function", "resources.dataset_gb=100", "resources.data_price_per_gb=0.01"),
    "gap": ("profile.seconds_per_iteration={1: 110, 8: 18}",),
    "beyond the profile": ("profile.seconds_per_iteration={1: 10, 2: 6}", "resources.gpus_per_trial={min: 4, max: 4}"),
    "adaptive": ("batch={policy: goodput}", f"profile.goodput={GOODPUT}", "constraints.deadline=40m"),
    "only adaptive": ("batch={policy: goodput}", f"profile.goodput={GOODPUT}", "constraints.deadline=14m"),
    "no model": ("batch={policy: goodput}",),
}


@pytest.mark.parametrize("kind", ESTIMATES)
def test_an_estimate_has_its_text_and_its_json(kind: str, file: str, rubberband: CommandLine) -> None:
    words = ["estimate", file, *(word for each in ESTIMATES[kind] for word in ("-s", each))]
    code = 3 if kind.startswith("too ") else 0
    out = rubberband(*words, "--verbose", code=code) + rubberband.err
    answer = rubberband.json(*words, code=code)
    assert answer.pop("planning_s") < 60.0
    told = "".join(f"{key}: {json.dumps(value)}\n" for key, value in answer.items())
    is_as_kept(f"estimate-of-{kind}", f"{out}\n{told}".replace(file, "digits.yaml"))


@pytest.mark.parametrize("policy", ["static", "naive_elastic", "greedy"])
def test_an_estimate_by_another_policy_has_its_text(policy: str, file: str, rubberband: CommandLine) -> None:
    out = rubberband("estimate", file, "--policy", policy, "-s", "constraints.deadline=30m")
    is_as_kept(f"estimate-by-{policy}", out.replace(file, "digits.yaml"))


@pytest.mark.parametrize("name", ["digits", "digits-aws"])
def test_an_example_has_its_estimate_and_its_report(
    name: str, rubberband: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of examples/scaling.yaml are in docs/, and compared there."""
    monkeypatch.chdir(EXAMPLES.parent)
    monkeypatch.setenv("RUBBERBAND_HOME", str(tmp_path))
    words = [f"examples/{name}.yaml", *(["-s", "resources.market=on_demand"] if name == "digits-aws" else [])]
    estimate = rubberband("estimate", *words)
    rubberband("run", *words, "-s", "resources.provider=virtual", "-s", "resources.checkpoints=")
    report = rubberband("report", name)
    is_as_kept(name, f"{estimate}\n{report}")
    lines = [line for line in f"{estimate}{report}".splitlines() if not line.startswith("Next: ")]
    assert len(lines) < 60
    assert max(map(len, lines)) <= 100
