"""Estimates of trials that train asynchronously: the words of a profile, the plan, the band, and the knee."""

from __future__ import annotations

from typing import Any

import pytest

from rubberband.errors import InputError
from rubberband.planner.queueing import knee, least_telling, seconds_per_iteration
from rubberband.planning.candidates import candidates
from rubberband.planning.feasible import PlanningOptions, PricesAndQuotas
from rubberband.planning.prices_and_quotas import EstimateAnswer, answer
from rubberband.planning.workers import lines as async_lines
from rubberband.planning.workers import notes as async_notes
from rubberband.spec.experiment import Experiment
from rubberband.values.asynchronous import AsyncProfile, AsyncTimes
from rubberband.values.profile import Profile
from rubberband.views.estimate.page import figures
from tests.builders.experiment_words import words

TIMES = {"compute_s": 0.029, "up_s": 0.072, "server_s": 0.018, "down_s": 0.072}
MODEL = AsyncProfile(times=AsyncTimes(**TIMES), updates_per_iteration=100)


def experiment(
    table: dict[int, float] | None = None, *, gpus: dict[str, int] | None = None, mode: str = "async", **model: Any
) -> Experiment:
    training = {"mode": "async", "servers": model.get("servers", 1)} if mode == "async" else {}
    block = {"times": TIMES, "updates_per_iteration": 100, **model}
    return Experiment(
        **words(
            profile={"seconds_per_iteration": table or {1: 19.1}, "asynchronous": block},
            resources__gpus_per_trial=gpus or {"max": 16},
            constraints__deadline="10h",
            training=training,
        )
    )


def estimated(asked: Experiment) -> EstimateAnswer:
    profile = asked.loaded_profiles()
    assert profile is not None
    return answer(asked, profile, PricesAndQuotas(), PlanningOptions(now=0.0, clock=lambda: 0.0))


def test_gangs_that_were_not_measured_are_planned_by_the_model():
    asked = experiment()
    profile = asked.loaded_profile()
    assert profile is not None
    table = candidates(asked, profile, 0.0)[0].profile.seconds_per_iteration
    modelled = seconds_per_iteration(MODEL, list(table))
    assert {1, 2, 4, 8, 16} <= set(table)
    assert table == pytest.approx(modelled)


def test_an_estimate_names_band_and_knee():
    found = estimated(experiment(gpus={"min": 2, "max": 2}))
    (note,) = (note for note in found.notes if note.startswith("async:"))
    assert "a trial with 2 workers is planned with 9.133 updates/s; the queueing model allows 8.098 to 10.47" in note
    assert f"knee is at {knee(MODEL)} workers" in note


def test_an_estimate_advises_the_smallest_gang_that_shows_how_its_workers_wait():
    idle = {"times": TIMES | {"compute_s": 0.5, "up_s": 0.02, "down_s": 0.02}}
    telling = least_telling(AsyncProfile(times=AsyncTimes(**idle["times"]), updates_per_iteration=100), 16)
    assert telling is not None
    assert telling > 2
    found = estimated(experiment({1: 55.8, 2: 28.0}, gpus={"min": 16, "max": 16}, **idle))
    note = next(note for note in found.notes if note.startswith("async:"))
    assert f"; profile {telling} GPUs to know better. The knee" in note
    small = estimated(experiment({1: 55.8}, gpus={"min": 2, "max": 2}, **idle))
    assert "to know better" not in " ".join(small.notes)
    assert "throughput of asynchronous workers" not in {one.name for one in small.assumptions}


def test_a_plan_beyond_the_knee_gets_a_warning():
    found = estimated(experiment(gpus={"min": 16, "max": 16}))
    notes = [note for note in found.notes if note.startswith("async:")]
    assert f"beyond the knee; lower resources.gpus_per_trial to {knee(MODEL)}." in notes[1]


def test_an_estimate_has_the_cost_of_the_low_end_until_a_gang_is_measured():
    name = "throughput of asynchronous workers"
    unsure = {one.name: one for one in estimated(experiment(gpus={"min": 2, "max": 2})).assumptions}
    assert unsure[name].effect_s > 0.0
    measured = experiment({1: 19.1, 2: 11.0}, gpus={"min": 2, "max": 2})
    assert name not in {one.name for one in estimated(measured).assumptions}


def test_workers_that_wait_for_each_other_are_not_planned_by_the_model():
    profile = Profile(seconds_per_iteration={1: 19.1, 4: 10.0}, asynchronous=MODEL)
    together = words(training={"mode": "async", "max_staleness": 0}, resources__gpus_per_trial={"max": 4})
    for asked in (experiment(mode="sync", gpus={"max": 4}), Experiment(**together)):
        found = candidates(asked, profile, 0.0)[0].profile
        assert found.seconds_per_iteration == profile.seconds_per_iteration
        assert found.asynchronous is None
        assert async_notes(asked, found, {4}) == []


def test_an_estimate_without_the_model_says_so():
    (note,) = async_notes(experiment(), Profile(seconds_per_iteration={1: 19.1}), {4})
    assert note.startswith("async: the profile has no model of the workers")


def test_a_measurement_is_reported_with_its_knee():
    first, second = async_lines(Profile(seconds_per_iteration={1: 19.1}, asynchronous=MODEL), 1)
    assert first == "an update of one worker: 29 ms to compute, 72 ms up, 18 ms at the server, 72 ms down"
    assert second == "the knee is at 4 workers: 10.6 to 13.9 updates/s there"


def test_the_page_draws_the_band_around_the_planned_throughput():
    drawn = figures(estimated(experiment(gpus={"min": 2, "max": 2})).estimate)["throughput"]
    low, high, planned = drawn["data"]
    assert low["y"][1] < planned["y"][1] < high["y"][1]
    assert drawn["layout"]["annotations"][0]["text"] == f"knee: {knee(MODEL)} workers"
    assert planned["marker"]["size"][1] > planned["marker"]["size"][0]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"times": dict.fromkeys(TIMES, 0.0)}, "an update takes no time; raise one of them"),
        ({"times": {**TIMES, "up_s": -1.0}}, "up_s"),
        ({"servers": 0}, "servers: 0 must be at least 1"),
        ({"servers": 3, "largest_shard": 0.2}, "raise it to at least 0.333333"),
        ({"blend": 1.5}, "blend"),
        ({"overhead_s": 19.1}, "overhead_s: 19.1 leaves no time for updates: with 1 GPU an iteration takes 19.1 s"),
        ({"updates_per_iteration": 0}, "updates_per_iteration"),
    ],
)
def test_wrong_words_get_one_line(wrong, message):
    with pytest.raises(InputError, match=message) as error:
        experiment(**wrong)
    assert all(": " in line for line in str(error.value).splitlines())
