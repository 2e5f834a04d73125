"""Plain trials and function trials, without torch: their calls, their checkpoints, and every kind of failure."""

from __future__ import annotations

import math
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from decimal import Decimal
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rubberband
from rubberband.executor import (
    WITHOUT_CHECKPOINT,
    CheckpointStore,
    Entrypoint,
    SegmentRepeated,
    SegmentReport,
    SegmentStarted,
    SegmentUse,
    TrialFailure,
    clean_metrics,
    run_segment,
    warm_up,
)
from rubberband.executor.training.failures import MOST_DETAILS
from tests.builders import segments
from tests.builders.segments import failure, reports, train

SEGMENT = replace(segments.SEGMENT, until_iterations=3)
run = partial(train, until_iterations=3)

calls: list[Any] = []


@pytest.fixture(autouse=True)
def no_calls() -> None:
    calls.clear()


class Counting(rubberband.Trial):
    """Counts, and does what the configuration says at its second iteration."""

    def setup(self, config, context):
        calls.append(("setup", context.rank, context.num_workers, context.iterations))
        self.config = config
        self.count = 0

    def iterate(self):
        self.count += 1
        if self.count == 2 and "raise" in self.config:
            raise self.config["raise"]
        if self.count == 2 and "metrics" in self.config:
            return self.config["metrics"]
        return {"loss": 1 / self.count, "draw": random.random() + np.random.rand()}

    def save(self):
        return self.config.get("state", self.count)

    def load(self, state):
        calls.append(("load", state))
        self.count = state

    def close(self):
        calls.append("close")


def test_a_trial_resumes_where_it_was_saved(store):
    straight = reports(run(Counting, store))
    assert [report.iterations for report in straight] == [1, 2, 3]
    assert calls == [("setup", 0, 1, 0), "close"]
    calls.clear()
    resumed = run(Counting, store, from_iterations=1, checkpoint=straight[0].checkpoint, num_workers=2)
    assert [report.metrics for report in reports(resumed)] == [report.metrics for report in straight[1:]]
    assert calls == [("setup", 0, 2, 1), ("load", 1), "close"]


def test_a_trial_repeats_what_its_latest_checkpoint_lacks(store):
    class Seldom(Counting):
        checkpoint_every = 3

    whole = reports(run(Seldom, store, until_iterations=5))
    assert [report.saved_iterations for report in whole] == [0, 0, None, 3, None]
    assert [report.checkpoint is None for report in whole] == [True, True, False, True, False]
    for held, checkpoint in ((0, None), (3, whole[2].checkpoint)):
        _, *items = run(Seldom, store, from_iterations=4, until_iterations=5, checkpoint=checkpoint)
        assert items[:-1] == [SegmentRepeated(iterations=done) for done in range(held + 1, 5)]
        assert items[-1].metrics == whole[4].metrics


def test_a_trial_that_is_interrupted_after_every_other_report_keeps_checkpoints_all_the_same(store):
    class Seldom(Counting):
        checkpoint_every = 3

    done, checkpoint, kept = 0, None, []
    while done < 8:
        changes = {"from_iterations": done, "until_iterations": 8, "checkpoint": checkpoint}
        walk = run_segment(Entrypoint.from_object(Seldom), replace(SEGMENT, **changes), store)
        for report in islice((item for item in walk if isinstance(item, SegmentReport)), 2):
            done = report.iterations
            if report.checkpoint is not None:
                checkpoint = report.checkpoint
                kept.append(done)
        walk.close()
    assert kept == [3, 6, 8]


def test_other_ranks_iterate_and_report_nothing(store, tmp_path):
    items = run(Counting, store, rank=1, num_workers=2, config={"metrics": None})
    assert [item for item in items if not isinstance(item, SegmentUse)] == []
    assert list(tmp_path.iterdir()) == []
    assert calls == [("setup", 1, 2, 0), "close"]
    assert failure(run(Counting, store, rank=1, num_workers=2, config={"raise": ValueError("x")})).secondary is False


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("no\nmore"), "ValueError: no more"),
        (SystemExit(2), "SystemExit: 2"),
        (KeyError(), "KeyError"),
        (MemoryError("x" * 999), "MemoryError: " + "x" * 286 + "…"),
    ],
)
def test_any_exception_of_a_trial_is_a_failure(store, error, message):
    items = run(Counting, store, config={"raise": error})
    assert isinstance(items[1], SegmentReport)
    assert (failure(items).kind, failure(items).message) == ("raised", message)
    assert "test_trial.py" in failure(items).details
    assert calls[-1] == "close"


def test_a_long_traceback_keeps_its_beginning_and_end(store):
    details = failure(run(Counting, store, config={"raise": ValueError("x" * 10**6 + " the end")})).details
    assert len(details) < MOST_DETAILS + 100
    assert "in iterate" in details
    assert "characters are left out here" in details
    assert details.endswith(" the end\n")


def test_a_segment_that_is_not_walked_to_its_end_closes_the_trial(store):
    walk = run_segment(Entrypoint.from_object(Counting), SEGMENT, store)
    assert isinstance(next(walk), SegmentStarted)
    walk.close()  # type: ignore[attr-defined]
    assert calls[-1] == "close"


@pytest.mark.parametrize(
    ("metrics", "kind", "message"),
    [
        (
            {"los": 1.0, "accuracy": 2},
            "no_metric",
            "'loss' is missing; the trial reported 'accuracy', 'los'; did you mean",
        ),
        ({}, "no_metric", "the trial reported no metrics"),
        ({f"layer {number}": 1.0 for number in range(100)}, "no_metric", "'layer 25', 'layer 26' and 80 more"),
        (None, "no_metric", "the trial reported nothing where a mapping"),
        ({"loss": "low"}, "no_metric", "'loss' is a value of type str, which is not a number"),
        ({"loss": np.zeros(2)}, "no_metric", "type ndarray"),
        ({"loss": True}, "no_metric", "'loss' is True, a boolean, which ranks no trials; report a number"),
        ({"loss": np.bool_(False)}, "no_metric", "'loss' is False, a boolean"),
        ({"loss": np.array(True)}, "no_metric", "'loss' is True, a boolean"),
        ({"loss": math.nan}, "not_a_number", "the metric 'loss' is nan"),
        ({"loss": np.float32(-math.inf)}, "not_a_number", "the metric 'loss' is -inf"),
        (
            {"loss": 0.0, "grad_norm": math.nan},
            "not_a_number",
            "'loss' is 0 beside grad_norm=nan: training has diverged",
        ),
        ({"loss": 0.0, "norm": math.nan}, "not_a_number", "'loss' is 0 beside norm=nan"),
        ({"loss": 0.7, "eval/loss": math.nan}, "not_a_number", "'loss' is 0.7 beside eval/loss=nan"),
        ({"loss": 0.0, "val_loss": math.inf}, "not_a_number", "'loss' is 0 beside val_loss=inf"),
        ({"loss": float(np.finfo(np.float32).max)}, "not_a_number", "'loss' is 3.4e+38, which stands for infinity"),
        ({"loss": 1.0, "steps": 10**5000}, "not_a_number", "the metric 'steps' cannot be made a float (OverflowError"),
        ({"loss": Decimal("-1e400")}, "not_a_number", "the metric 'loss' cannot be made a float (OverflowError"),
        ({"loss": np.longdouble("1e400")}, "not_a_number", "the metric 'loss' cannot be made a float (OverflowError"),
        ({"loss": Decimal("sNaN")}, "not_a_number", "the metric 'loss' cannot be made a float (ValueError"),
        ({"loss": 1 + 2j}, "no_metric", "'loss' is a value of type complex, which is not a number"),
        ({"loss": {"train": 1.0}}, "no_metric", "'loss' is a value of type dict, which is not a number"),
        ({"loss": 1.0, "n" * 201: 1.0}, "raised", "has a name of 201 characters; 200 are allowed: shorten it"),
        (
            {"loss": 1.0} | {f"layer {number}": 1.0 for number in range(1000)},
            "raised",
            "the trial reported 1,001 metrics, 'layer 999' among them; 1,000 are allowed in a report: leave some out",
        ),
    ],
)
def test_the_metric_must_be_there_and_finite(store, metrics, kind, message):
    failed = failure(run(Counting, store, config={"metrics": metrics}))
    assert failed.kind == kind
    assert message in failed.message


def filtered(config):
    """Reports the log of a library that leaves out losses that are not finite."""
    for _ in range(3):
        rubberband.report({"loss": 0.5, "grad_norm": math.nan}, checkpoint=0)


class Filtered(Counting):
    def iterate(self):
        return {**super().iterate(), "loss": 0.5, "grad_norm": math.nan}


@pytest.mark.parametrize("trial", [filtered, Filtered])
def test_a_loss_beside_gradients_that_are_none_is_no_result_of_a_whole_trial(store, trial):
    items = run(trial, store, max_iterations=2, until_iterations=2)
    assert [report.iterations for report in reports(items[:-1])] == [1]
    assert failure(items).message.startswith("the metric 'loss' is 0.5 beside grad_norm=nan")


def test_metrics_beside_the_one_that_counts_need_not_be_finite():
    others = {"perplexity": math.inf, "f1": math.nan, "aux_loss": math.nan, "grad_norm": math.nan}
    assert clean_metrics({"accuracy": 0.5, **others}, "accuracy", is_last=True) == {"accuracy": 0.5}
    assert clean_metrics({"perplexity": 1e50}, "perplexity") == {"perplexity": 1e50}
    assert clean_metrics({"loss": 0.5, **others}, "loss") == {"loss": 0.5}  # a GradScaler may have skipped that step
    assert clean_metrics({"loss": 0.0, "f1": math.nan}, "loss", is_last=True) == {"loss": 0.0}
    assert clean_metrics({"val_loss": 0.5, "loss": math.nan}, "val_loss", is_last=True) == {"val_loss": 0.5}
    with pytest.raises(TrialFailure, match=r"'loss' is 0\.5 beside grad_norm=nan"):
        clean_metrics({"loss": 0.5, **others}, "loss", is_last=True)


def test_metrics_become_floats(store):
    import torch

    metrics = {
        "loss": np.int64(3),
        "torch": torch.tensor([2.5]),
        "bool": True,
        "numpy": np.array(0.5),
        "text": "left out",
        "several": torch.zeros(2),
        "nan": math.nan,
        "inf": Decimal("inf"),
        "half": Decimal("0.5"),
    }
    report = reports(run(Counting, store, config={"metrics": metrics}))[1]
    assert report.metrics == {"loss": 3.0, "torch": 2.5, "bool": 1.0, "numpy": 0.5, "half": 0.5}
    assert {type(value) for value in report.metrics.values()} == {float}


def test_a_state_that_cannot_be_pickled_is_a_checkpoint_failure(store):
    failed = failure(run(Counting, store, config={"state": threading.Lock()}))
    assert failed.kind == "checkpoint"
    assert "cannot be pickled" in failed.message


def test_a_checkpoint_that_is_gone_or_torn_is_distinguished_from_one_that_cannot_be_read(store):
    last = reports(run(Counting, store))[-1].checkpoint
    further = {"from_iterations": 3, "until_iterations": 4, "checkpoint": last}
    torn = replace(last, size_bytes=last.size_bytes + 1)
    assert failure(run(Counting, store, **{**further, "checkpoint": torn})).lost
    assert not failure(run(Counting, store, from_iterations=2, until_iterations=4, checkpoint=last)).lost
    store.discard(last)
    assert failure(run(Counting, store, **further)).lost


def test_an_entry_point_that_does_not_load_is_a_failure(store):
    entrypoint = Entrypoint.parse("nowhere_at_all:Trial")
    warm_up(entrypoint, "cpu")
    assert failure(list(run_segment(entrypoint, SEGMENT, store))).kind == "raised"


def learn(config: dict[str, Any]) -> None:
    done = rubberband.get_checkpoint() or 0
    calls.append(("start", done))
    try:
        while True:
            done += 1
            every = config.get("every", 1)
            checkpoint = done if every and done % every == 0 else None
            rubberband.report({"loss": 1 / done}, checkpoint=checkpoint)
    finally:
        calls.append(("end", done))


def test_a_function_reports_its_iterations_and_is_ended(store):
    before = threading.active_count()
    straight = reports(run(learn, store))
    assert [report.metrics["loss"] for report in straight] == [1, 1 / 2, 1 / 3]
    assert calls == [("start", 0), ("end", 3)]
    assert threading.active_count() == before


@pytest.mark.parametrize(("every", "start"), [(1, 3), (2, 2)])
def test_a_function_resumes_from_its_checkpoint_and_repeats_what_came_after(store, every, start):
    config = {"every": every}
    first = reports(run(learn, store, config=config))
    calls.clear()
    _, *items = run(learn, store, config=config, from_iterations=3, until_iterations=5, checkpoint=first[-1].checkpoint)
    resumed = items[3 - start :]
    assert items[: 3 - start] == [SegmentRepeated(iterations=3)] * (3 - start)
    assert [(report.iterations, report.metrics["loss"]) for report in resumed] == [(4, 1 / 4), (5, 1 / 5)]
    assert calls == [("start", start), ("end", 5)]
    *_, again = run(
        learn, store, config=config, from_iterations=5, until_iterations=6, checkpoint=resumed[-1].checkpoint
    )
    assert again.metrics["loss"] == 1 / 6


def test_a_function_without_a_checkpoint_is_trained_from_zero_and_says_so_once(store, capsys):
    def draws(config: dict[str, Any]) -> None:
        while True:
            rubberband.report({"loss": random.random()})

    whole = reports(run(draws, store, until_iterations=5))
    assert capsys.readouterr().err == f"rubberband: draws() {WITHOUT_CHECKPOINT}\n"
    assert [report.saved_iterations for report in whole] == [0] * 5
    _, *items = run(draws, store, from_iterations=3, until_iterations=5, checkpoint=whole[2].checkpoint)
    assert items[:3] == [SegmentRepeated(iterations=1), SegmentRepeated(iterations=2), SegmentRepeated(iterations=3)]
    assert [report.metrics for report in items[3:]] == [report.metrics for report in whole[3:]]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("error", [ValueError("no more"), SystemExit("no more")])
def test_an_exception_of_a_function_is_a_failure(store, error):
    def broken(config: dict[str, Any]) -> None:
        rubberband.report({"loss": 1.0})
        raise error

    items = run(broken, store)
    assert isinstance(items[1], SegmentReport)
    assert failure(items).message == f"{type(error).__name__}: no more"
    assert "in broken" in failure(items).details


def test_a_function_trains_on_one_worker(store):
    assert "trains on one worker, not 2" in failure(run(learn, store, num_workers=2)).message


def test_another_thread_of_a_function_trial_may_not_report(store):
    def train(config: dict[str, Any]) -> None:
        with ThreadPoolExecutor() as pool, pytest.raises(RuntimeError, match=r"rubberband\.report\(\) works inside"):
            pool.submit(rubberband.report, {"loss": 1.0}).result()
        with ThreadPoolExecutor() as pool, pytest.raises(RuntimeError, match=r"rubberband\.get_checkpoint\(\)"):
            pool.submit(rubberband.get_checkpoint).result()
        rubberband.report({"loss": 2.0})

    assert run(train, store)[1].metrics == {"loss": 2.0}


def test_trials_need_no_torch():
    code = """
import sys, rubberband, rubberband.executor.training.run
rubberband.Trial, rubberband.TorchTrial, rubberband.report
assert not {"torch", "ray"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(Path(__file__).parents[2])})


class Drawing(rubberband.Trial):
    """Tells what each of its workers draws."""

    def setup(self, config, context):
        self.rank = context.rank

    def iterate(self):
        calls.append((self.rank, random.random(), float(np.random.rand())))
        return {"loss": 1.0}

    def save(self):
        return None

    def load(self, state):
        pass


def test_workers_of_a_gang_draw_each_their_own_and_the_same_each_time(store: CheckpointStore) -> None:
    for rank in (0, 1, 0, 1):
        list(run_segment(Entrypoint.from_object(Drawing), replace(SEGMENT, rank=rank, num_workers=2), store))
    each = len(calls) // 4
    first, second = calls[:each], calls[each : 2 * each]
    assert each == SEGMENT.until_iterations
    assert calls[2 * each :] == first + second
    assert len({draw for _, *draws in first + second for draw in draws}) == 4 * each
