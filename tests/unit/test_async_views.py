"""Asynchronous updates in the report and the live view, and the profile made of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rubberband.executor.core.events import TrialReported
from rubberband.executor.profiling.points import UpdateReports
from rubberband.values.asynchronous import AsyncUse
from rubberband.views.report.tables import update_line
from tests.builders.results import UPDATES


def reported(use: AsyncUse) -> TrialReported:
    return TrialReported(
        occurred_at=1.0, trial=0, attempt=1, iterations=1, metrics={"loss": 1.0}, checkpoint=None, updates=use
    )


def test_an_iteration_says_its_speed_its_staleness_and_where_the_time_goes() -> None:
    assert update_line(UPDATES) == (
        "100 updates/s of 2 workers and 1 server; staleness 1.0 (at most 4); 1 gradient lost; compute 50 %, up 10 %, "
        "waiting 5 %, server 20 %, down 15 %"
    )


def test_the_times_of_workers_that_train_alone_make_the_model() -> None:
    reports = UpdateReports()
    reports.add(reported(UPDATES), 0.5)
    assert reports.model() is None
    alone = replace(UPDATES, workers=1, lost=0)
    reports.add(reported(alone), None)  # it was not timed
    assert reports.model() is None
    reports.add(reported(alone), 1.25)
    model = reports.model()
    assert model is not None
    assert model.times.update_s == pytest.approx(0.020)
    assert model.times.server_s == pytest.approx(0.005)
    assert (model.updates_per_iteration, model.servers, model.largest_shard) == (50.0, 1, 0.7)
    assert model.overhead_s == pytest.approx(0.25)
