"""The forecast: while all goes as predicted, it is the prediction."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from rubberband.executor import Controller, Event, Forecast, Job, Journal, VirtualBackend, drive, forecast
from tests.builders.budget import examples
from tests.builders.strategies import jobs


@given(jobs())
@settings(deadline=None, max_examples=examples(250))
def test_whenever_it_is_asked_the_forecast_of_an_undisturbed_run_is_the_prediction(job: Job) -> None:
    seen: list[Forecast] = []

    def look(event: Event, controller: Controller) -> None:
        seen.append(forecast(controller.state, event.occurred_at))

    backend = VirtualBackend(job.name, job.offer, job.profile, metric=job.metric)
    journal = Journal("sqlite://", job.name, create=True)
    try:
        drive(Controller(job), backend, journal, observers=[look])
    finally:
        journal.close()
    for expected in seen:
        assert expected.jct_s == pytest.approx(job.prediction.jct_s, abs=1e-3)
        assert expected.cost_usd == pytest.approx(job.prediction.cost_usd, abs=0.005)
