"""The use of machines for people: a sentence on the experiment, a chart on the trial's page, a field of REST."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rubberband.executor import Result
from rubberband.executor.result.batch_history import UseStretch
from rubberband.states import ExperimentState
from rubberband.values.submission import Summary
from rubberband.views.charts.machine_use import use_of_trials, use_over_time, use_px
from tests.builders.fake_runs import FakeService, fake_service
from tests.builders.results import a_result, render

ON_GPU: dict[str, Any] = {"gpu": 0.63, "gpu_memory_bytes": 40 * 10**9, "watts": 231.0, "peers_s": 1.8}


def stretch(end_s: float, **values: Any) -> UseStretch:
    usual = {"seconds": 60.0, "ago_s": 0.0, "cpu": 0.5, "memory_bytes": 2 * 10**9, "data_s": 12.6, "checkpoint_s": 0.1}
    return UseStretch(**{**usual, "stage": 0, "end_s": end_s, **values})


def with_use(*stretches: UseStretch) -> Result:
    """A result whose trial 3 has these stretches."""
    result = a_result()
    trials = list(result.trials)
    trials[3] = dataclasses.replace(trials[3], use=stretches)
    return dataclasses.replace(result, trials=tuple(trials))


def test_a_sentence_has_the_busy_share_and_the_waits_that_count() -> None:
    trials = with_use(stretch(60.0, **ON_GPU), stretch(120.0, **{**ON_GPU, "gpu": 0.43})).trials
    assert use_of_trials(trials) == (
        "While trials trained, GPUs were busy 53 % of the time, "
        "and workers waited 21 % for data, 3 % for other workers."
    )
    assert use_of_trials(with_use(stretch(60.0, cpu=0.97, data_s=0.0)).trials) == (
        "While trials trained, each worker used 97 % of a CPU, and waited less than 1 %."
    )
    assert use_of_trials(with_use(stretch(60.0, cpu=3.94, data_s=None, checkpoint_s=None)).trials) == (
        "While trials trained, each worker used 3.9 CPUs."
    )


def test_an_older_run_has_no_sentence_and_no_chart() -> None:
    result = a_result()
    assert use_of_trials(result.trials) == ""
    assert use_over_time(result, 3) is None
    assert use_px(()) == 0
    assert "While trials trained" not in render(result)


def test_the_whole_report_has_the_sentence() -> None:
    assert "GPUs were busy 63 % of the time" in render(with_use(stretch(60.0, **ON_GPU)))


def test_the_chart_has_a_panel_for_each_unit_and_a_gap_where_the_trial_waited() -> None:
    figure = use_over_time(with_use(stretch(60.0, **ON_GPU), stretch(300.0, **ON_GPU)), 3)
    assert figure is not None
    names = {trace["name"]: trace["yaxis"] for trace in figure["data"]}
    assert names == {
        "GPU busy": "y",
        "waits for data": "y",
        "waits for other workers": "y",
        "CPUs in use": "y2",
        "GPU memory": "y3",
        "memory": "y3",
        "GPU power": "y4",
    }
    assert figure["data"][0]["y"] == [63.0, 63.0, None, 63.0, 63.0]
    assert figure["layout"]["xaxis"]["anchor"] == "y4"
    assert figure["layout"]["meta"]["note"] == (
        "GPU: busy 63 % of the time, 40 GB of memory taken, 231 W. In 2m of training the worker used 50 % of a CPU and "
        "2 GB of memory, and waited 21 % for data, 3 % for other workers. "
        "Means over its gang, measured about every 5 s."
    )
    alone = use_over_time(with_use(stretch(60.0)), 3)
    assert alone is not None
    assert alone["layout"]["meta"]["note"].startswith("In 1m of training the worker used 50 % of a CPU and 2 GB")
    assert [trace["name"] for trace in alone["data"]] == ["waits for data", "CPUs in use", "memory"]
    assert alone["layout"]["height"] < figure["layout"]["height"]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[FakeService]:
    with fake_service(tmp_path) as made:
        made.add("one", state=ExperimentState.DONE, summary=Summary(started_at=1000.0, stages=3))
        made.runs.results["one"] = with_use(stretch(60.0, **ON_GPU))
        yield made


def test_pages_and_rest_have_it(service: FakeService) -> None:
    found = service.client.get("/v1/experiments/one/trials/3").json()
    assert found["use"][0]["gpu"] == 0.63
    assert service.client.get("/v1/experiments/one/trials/2").json()["use"] == []
    page = service.client.get("/experiments/one/trials/3").text
    assert '<h2 id="t-use">GPU use</h2>' in page
    assert '<section id="s-use" class="panel figure" data-keep aria' in page
    assert 'data-keep hidden aria-labelledby="t-use"' in service.client.get("/experiments/one/trials/2").text
    figures = service.client.get("/experiments/one/trials/3/figures/use").json()
    assert figures["use"]["layout"]["meta"]["note"].startswith("GPU: busy 63 % of the time")
    assert service.client.get("/experiments/one/trials/2/figures/use").json() == {}
    assert "GPUs were busy 63 % of the time, and workers waited" in service.client.get("/experiments/one").text
