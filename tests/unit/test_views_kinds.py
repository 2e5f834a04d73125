"""Batches that adapt, unequal workers, brackets, slots, extensions: what no screen of tests/unit/screens can show."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from typing import Any, Literal

import pytest

from rubberband.executor import Controller, Event, Faults, Result, result_html, summarise
from rubberband.values.adaptive import BatchLimits, BatchPoint
from rubberband.values.balance import BalanceUse
from rubberband.values.plan import Plan, Stage, StagePlan
from rubberband.views.charts.batches import batches_by_gpus, batches_over_time
from rubberband.views.charts.parts import MANY_POINTS, Figure
from rubberband.views.experiment import trial_view
from rubberband.views.formatting import slow_workers, worker_values
from rubberband.views.live.progress import stage_table
from rubberband.views.live.view import open_view, progress_html
from rubberband.views.report.headlines import headlines
from rubberband.views.report.page import charts_of, render_html, script_json
from rubberband.views.report.tables import batch_sizes, stages, workers
from rubberband.views.report.text import MOST_TRIALS
from rubberband.views.trial import gangs, lead, trial_cards
from tests.builders.adaptive_runs import MODEL, adaptive_result
from tests.builders.results import EVERY_RESULT, a_job, a_result, render
from tests.builders.special_results import (
    SLOTS,
    SLOW,
    SPECIAL_RESULTS,
    UNEQUAL,
    bracket_job,
    bracket_result,
    extended_result,
    planned,
)
from tests.builders.tables import cases
from tests.builders.timed_requests import extend
from tests.builders.virtual_runs import run_virtual
from tests.builders.watching import narration, pictures

RESULTS = {**EVERY_RESULT, **SPECIAL_RESULTS}


def drawn(figure: Figure | None) -> dict[str, Any]:
    assert figure is not None
    return figure


@pytest.mark.parametrize("kind", RESULTS)
def test_any_result_is_the_same_after_json(kind: str) -> None:
    result = RESULTS[kind]()
    assert Result.from_json(json.loads(json.dumps(result.to_json(), allow_nan=False))) == result


@pytest.mark.parametrize("kind", EVERY_RESULT)
def test_the_page_says_nothing_of_what_a_run_has_not(kind: str) -> None:
    page = render_html(EVERY_RESULT[kind]())
    assert not [word for word in ("Batch sizes", "unequal", "Unequal", "PREEMPTED") if word in page]


# Batches


def test_every_trial_has_its_batches_in_the_json() -> None:
    result = adaptive_result()
    trials = json.loads(json.dumps(result.to_json(), allow_nan=False))["trials"]
    first, *_, last = trials[0]["batches"]
    assert (first["batch_size"], first["gpus"], first["noise_scale"], first["efficiency"]) == (64, 1, None, 1.0)
    assert (last["gpus"], last["stage"], last["progress"]) == (2, 2, 7.0)
    assert last["goodput"] == pytest.approx(last["throughput"] * last["efficiency"])
    assert last["end_s"] == pytest.approx(result.actual_jct_s)
    assert all(len(trial["batches"]) == 2 * trial["iterations"] for trial in trials)


def test_the_efficiency_is_that_of_all_samples() -> None:
    trial = adaptive_result().trials[0]
    samples = [s.steps * s.batch_size for s in trial.batches]
    mean = sum(n * s.efficiency for n, s in zip(samples, trial.batches, strict=True)) / sum(samples)
    assert batch_sizes(adaptive_result(), None).rows[0][4] == f"{100 * mean:.0f} %"


def test_a_gain_compares_all_training_at_the_first_batch_and_at_the_last() -> None:
    result = adaptive_result()
    model, *_ = result.trials[0].batches
    lines = [(64, 100.0, 1.0), (128, 300.0, 0.5), (128, 100.0, 0.5)]
    batches = tuple(
        replace(model, batch_size=size, steps=round(6 * speed), throughput=speed, efficiency=part, goodput=speed * part)
        for size, speed, part in lines
    )
    best = replace(result.trials[0], batches=batches)
    assert batch_sizes(replace(result, trials=(best,), best=best), None).rows[0][5:] == ("200", "2.0x", "1.0x")


def test_before_any_noise_scale_is_known_it_is_a_dash_and_not_drawn() -> None:
    result = adaptive_result()
    blank: dict[str, Any] = {"noise_scale": None, "throughput": None, "goodput": None}
    trials = tuple(replace(trial, batches=tuple(replace(s, **blank) for s in trial.batches)) for trial in result.trials)
    result = replace(result, trials=trials, best=trials[0])
    assert batch_sizes(result, 1).rows[0][3] == "-"
    assert batch_sizes(result, 1).rows[0][5:] == ("-", "-", "-")
    assert headlines(result)[-1].startswith("batch size: 64 -> ")
    figure, points = drawn(batches_over_time(result)), drawn(batches_by_gpus(result))
    assert all(value is None for trace in figure["data"][-4:] for value in trace["y"])
    assert not [trace for trace in points["data"] if "model" in trace["name"]]
    assert script_json([figure, points])


def test_a_chart_of_many_stretches_draws_some_and_every_change() -> None:
    result = adaptive_result()
    times = 40 * MANY_POINTS // sum(len(trial.batches) for trial in result.trials)
    trials = tuple(replace(t, batches=tuple(s for s in t.batches for _ in range(times))) for t in result.trials)
    crowded = drawn(batches_over_time(replace(result, trials=trials)))
    assert sum(len(trace["x"]) for trace in crowded["data"] if trace["yaxis"] == "y2") < 2.5 * MANY_POINTS
    winner = next(t for t in crowded["data"] if t["yaxis"] == "y2" and t["legendgroup"] == "winner")
    assert set(winner["y"]) - {None} == {s.batch_size for s in result.trials[0].batches}
    assert all(trace["mode"] == "lines" for trace in crowded["data"])


@pytest.mark.parametrize(
    ("model", "drawn_gpus"),
    [
        (replace(MODEL, points=(BatchPoint(instances=2, gpus=4, per_gpu=64, accumulation=0, step_s=0.1),)), [1, 2, 4]),
        (replace(MODEL, limits=BatchLimits(initial=1, max=1)), [1]),
        (None, None),
    ],
    ids=["timed and not used", "one sample", "no model"],
)
def test_the_model_is_drawn_for_gpus_that_were_timed_and_can_have_a_sample(model: Any, drawn_gpus: Any) -> None:
    figure = drawn(batches_by_gpus(replace(adaptive_result(), goodput=model)))
    by_model = [trace["x"] for trace in figure["data"] if "model" in trace["name"]]
    assert by_model == ([] if drawn_gpus is None else [drawn_gpus] * 3)


# Unequal workers


def use(**changes: Any) -> BalanceUse:
    fields: dict[str, Any] = {"shares": (48, 0), "compute_s": (0.5, 0.7), "step_s": 0.5, "equal_step_s": 1.0}
    return BalanceUse(**{"steps": 30} | fields | changes)


def test_a_balanced_gang_is_as_fast_as_its_workers_together() -> None:
    slow, even = a_result(UNEQUAL, SLOW), a_result(UNEQUAL)
    longer_s = (slow.stages[2].actual_s or 0.0) - (even.stages[2].actual_s or 0.0)
    assert longer_s == pytest.approx(4 * 4.0 * (4 / (2 + 2 / 3) - 1.0))


def test_a_result_of_an_earlier_version_has_no_shares() -> None:
    plain = a_result(UNEQUAL, SLOW).to_json()
    last = plain["trials"][0]["balance"][-1]
    assert (list(last["shares"]), last["stage"], last["iterations"]) == ([96, 96, 32, 32], 2, 7)
    assert [worker["instance"] for worker in last["workers"]] == ["i-001", "i-001", "i-002", "i-002"]
    for trial in plain["trials"]:
        del trial["balance"]
    assert not workers(Result.from_json(plain), None).rows


def test_the_tables_count_the_trials_beyond_their_limits() -> None:
    unequal, result = a_result(UNEQUAL, SLOW), adaptive_result()
    stretch = unequal.trials[0].balance[-1]
    trials = tuple(replace(trial, balance=(stretch,)) for trial in unequal.trials)
    table = workers(replace(unequal, trials=trials), 2)
    assert (len(table.rows), table.notes[-1]) == (2, f"{len(trials) - 2} more trials not shown.")
    table = batch_sizes(result, MOST_TRIALS)
    assert (len(table.rows), table.notes[-1]) == (MOST_TRIALS, "2 more trials not shown.")


def test_slow_workers_are_named() -> None:
    result = a_result(UNEQUAL, SLOW)
    stretch = result.trials[0].balance[-1]
    gang, none = stretch.workers, "get no samples, which makes the step shorter"
    assert slow_workers(use(shares=(48, 0, 48, 0)), gang) == [f"i-001 GPU 1, i-002 GPU 1 {none}"]
    assert slow_workers(use(stragglers=(0,)), gang)[1] == "the step would be shorter without i-001 GPU 0"
    assert slow_workers(use(), ()) == ["worker 1 gets no samples, which makes the step shorter"]
    assert slow_workers(use(shares=(2, 1)), gang) == []
    assert use(step_s=1.1).saved == pytest.approx(-0.1), "a loss of time is no saving"
    trial = replace(result.trials[0], balance=(replace(stretch, shares=(128, 128, 0, 0)),))
    notes = workers(replace(result, trials=(trial,)), None).notes
    assert notes[1] == f"Trial 0: i-002 GPU 0, i-002 GPU 1 {none}."


@cases("values", "text")
def test_shares_and_times_are_short(values: tuple[float, ...], text: str) -> None:
    assert worker_values(values) == text


def test_workers_that_are_equal_for_a_while_make_no_further_line() -> None:
    class Fitful(Faults):
        def pace(self, instance: str, at: float) -> float:
            return 3.0 if instance == "i-002" and at // 20.0 % 2 else 1.0

    job = replace(UNEQUAL, stages=(*UNEQUAL.stages[:2], replace(UNEQUAL.stages[2], iterations=20)))
    stream = io.StringIO()
    with open_view(job, lambda: 0.0, stream, False) as view:
        run_virtual(job, Fitful(), observers=[view])
    assert stream.getvalue().count("unequal workers") == 1


# Brackets


def test_the_stages_of_brackets_and_the_head_node_add_up_to_the_bill() -> None:
    result = bracket_result()
    costs_usd = sum(stage.actual_cost_usd or 0.0 for stage in result.stages)
    assert costs_usd + result.head_cost_usd == pytest.approx(result.actual_cost_usd)


def test_a_stage_has_its_own_figures_also_while_others_have_not_begun() -> None:
    part: list[Result] = []

    def look(event: Event, controller: Controller) -> None:
        configured = {"configurations": [{"x": trial} for trial in range(controller.job.num_trials)]}
        part.append(summarise(controller.state, configured, event.occurred_at))

    run_virtual(bracket_job(), observers=[look])
    halfway = next(each for each in part if each.stages[0].promoted and each.stages[3].actual_s)
    assert [stage.actual_s is not None for stage in halfway.stages] == [True, True, False, True]
    assert [row[6] == "" for row in stages(halfway).rows][2:4] == [True, False]


def test_every_stage_of_the_moving_table_has_the_iterations_of_its_own_trials() -> None:
    now, last = pictures(bracket_job())[-1]
    stages = last.stages(now)
    assert [stage.name for stage in stages] == ["0.0", "0.1", "2.0", "1.0"]
    assert [stage.iterations_done for stage in stages] == [4, 2, 2, 6]


# Slots


def test_a_run_on_slots_names_no_gpu() -> None:
    result = a_result(SLOTS)
    trial = result.trials[0]
    texts = [render_html(result), render(result), result_html(result), str(charts_of(result))]
    texts += [str(trial_cards(result, trial)), str(gangs(result, trial)), str(trial_view(trial, curves=True))]
    at, last = pictures(SLOTS)[-1]
    texts += [str(stage_table(result.stages)), progress_html(last, at)]
    assert not [text for text in [*texts, narration(SLOTS)] if re.search(r"\bGPUs?\b", text)]
    assert '"instance : slot"' in texts[0]
    assert "slots per trial" in progress_html(last, at)


# Extensions


def test_the_page_and_the_json_have_every_extension() -> None:
    result = extended_result()
    assert "extended: deadline 30m instead of 20m, max_cost 2.50 USD instead of 1.00 USD" in render_html(result)
    assert [extension["deadline_s"] for extension in result.to_json()["extensions"]] == [1800.0, 2400.0]


def test_an_extension_without_effect_is_not_reported() -> None:
    ask = extend(60.0, deadline_s=600.0, max_cost_usd=7.0)
    assert "extended" not in narration(a_job(max_cost_usd=None), requests=[ask])


# One trial


@cases("mode", "values", "ours")
def test_the_lead_is_over_the_best_of_the_others(
    mode: Literal["min", "max"], values: tuple[float, ...], ours: str
) -> None:
    result = replace(a_result(), mode=mode)
    trials = tuple(
        replace(trial, iterations=3, metrics={result.metric: value})
        for trial, value in zip(result.trials, values, strict=False)
    )
    assert lead(replace(result, trials=trials), trials[0]).startswith(f"{ours} than trial 1")


def test_a_lead_is_that_where_both_had_trained_equally_long() -> None:
    result = replace(a_result(), mode="min")
    short, long, *_ = result.trials
    curve = tuple((float(at), at, {result.metric: 1.0 / at}) for at in range(1, 10))
    short = replace(short, iterations=1, metrics={result.metric: 1.3}, curve=(), status="stopped")
    long = replace(long, iterations=9, metrics={result.metric: 1.0 / 9}, curve=curve)
    both = replace(result, trials=(short, long))
    assert lead(both, short) == "0.3 (30 %) worse than trial 1, 1 after 1 iteration; stopped there"
    assert lead(both, long) == "0.3 (23 %) better than trial 0, 1.3 after 1 iteration"
    failed = replace(short, status="failed")
    assert lead(replace(result, trials=(failed, long)), failed) == ""
    assert lead(replace(both, outcome="failed"), long) == ""


def test_an_only_trial_has_all_of_the_bill() -> None:
    job = a_job(stages=(Stage(trials=1, iterations=2),), plan=Plan(stages=()))
    only = a_result(planned(job, StagePlan(instances=1, gpus_per_trial=1)))
    assert [card for card in trial_cards(only, only.trials[0]) if "100 % of the bill" in card.notes]
