"""An experiment on slots, without GPUs: every view counts slots, and none names a GPU."""

from __future__ import annotations

import dataclasses
import re

from rubberband.executor import Result
from rubberband.executor.result.rows import result_html
from rubberband.views.experiment import trial_view
from rubberband.views.live.status import stage_table
from rubberband.views.live.view import progress_html
from rubberband.views.report.page import charts_of, render_html
from rubberband.views.trial import gangs, trial_cards
from tests.builders.results import a_job, a_result, render
from tests.builders.watching import narration, pictures

JOB = dataclasses.replace(a_job(replan=True), offer=dataclasses.replace(a_job().offer, place="slot"))


def test_reports_and_pages_of_slots_name_no_gpu() -> None:
    result = a_result(JOB)
    trial = result.trials[0]
    assert "slots/trial" in render(result)
    assert "slot-seconds" in render(result)
    assert gangs(result, trial).rows[0][-1].endswith(" slot 0")
    page = render_html(result)
    assert ">Instances and slots</h2>" in page
    assert '"instance : slot"' in page
    texts = [page, render(result), result_html(result), str(charts_of(result)), str(trial_cards(result, trial))]
    stages = [dataclasses.asdict(stage) for stage in result.stages]
    texts += [str(gangs(result, trial)), str(stage_table(stages)), str(trial_view(trial, curves=True))]
    assert not [text for text in texts if re.search(r"\bGPUs?\b", text)]
    assert Result.from_json(result.to_json()).place == "slot"


def test_the_live_view_of_slots_names_no_gpu() -> None:
    (at, last) = pictures(JOB)[-1]
    assert "slots per trial" in progress_html(last, at)
    assert "GPU" not in narration(JOB) + progress_html(last, at)


def test_trials_that_share_a_gpu_are_on_its_slots() -> None:
    offer = dataclasses.replace(a_job().offer, gpus=1, trials_per_gpu=2)
    result = a_result(dataclasses.replace(a_job(replan=True), offer=offer))
    assert {row[-1].split()[1] for trial in result.trials for row in gangs(result, trial).rows} == {"slot"}
