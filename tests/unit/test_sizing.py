"""The search sized to its limits: words, sizes, refusals, and what an estimate, a run and the service say of them."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from rubberband.api.experiments.recording import Recorder
from rubberband.api.plans.process import planned, question_of
from rubberband.api.store import open_store
from rubberband.errors import InfeasibleError, InputError
from rubberband.executor import JournalFollower, open_folder
from rubberband.planning.candidates import candidates
from rubberband.planning.feasible import PlanningOptions, PricesAndQuotas, size
from rubberband.planning.prices_and_quotas import EstimateAnswer, answer
from rubberband.running.run import run_experiment
from rubberband.running.starting import RunOptions
from rubberband.spec.experiment import Experiment
from rubberband.spec.schedulers import Sha
from rubberband.states import ExperimentState
from rubberband.values.profile import Profile
from rubberband.values.submission import Submission
from rubberband.views.formatting import size_line
from tests.builders.clocks import Clock
from tests.builders.plans import plan_job

PROFILE = Profile(seconds_per_iteration={1: 10.0, 2: 6.0}, trial_startup_s=1.0)
SPACE = {"x": {"type": "uniform", "lower": 0, "upper": 1}}
AUTO = {"type": "sha", "num_samples": "auto", "max_t": 13}


def words(scheduler: dict[str, Any] | None = None, limits: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "name": "sized",
        "search": {"space": SPACE, "scheduler": scheduler or AUTO, "metric": "loss", "mode": "min", **more},
        "constraints": {"deadline": "10m", "max_cost": 2} if limits is None else limits,
        "resources": {"provider": "virtual", "instance_type": "p3.8xlarge", "max_instances": 4, "minimum_billed": "0s"},
        "profile": {"seconds_per_iteration": {1: 10.0, 2: 6.0}, "trial_startup": "1s"},
    }


def experiment(*args: Any, **more: Any) -> Experiment:
    return Experiment(**words(*args, **more))


def estimated(asked: Experiment, **more: Any) -> EstimateAnswer:
    return answer(asked, PROFILE, PricesAndQuotas(), PlanningOptions(now=0.0, clock=lambda: 0.0, **more))


@pytest.mark.parametrize(
    ("scheduler", "more", "says"),
    [
        ({**AUTO, "max_t": "auto"}, {}, "num_samples and max_t are both auto, and one follows from the other"),
        ({**AUTO, "num_samples": "many"}, {}, "num_samples: 'many' is not a whole number"),
        ({"type": "stages", "stages": [{"trials": "auto", "iterations": 1}]}, {}, "'auto' is not a whole number"),
        (AUTO, {"sampler": {"type": "grid"}, "space": {"x": {"type": "grid", "values": [1, 2]}}}, "2 configurations"),
        (
            {"type": "hyperband", "max_t": "auto"},
            {"space": {"x": {"type": "grid", "values": [1]}}},
            "use the scheduler",
        ),
    ],
)
def test_a_search_that_cannot_be_sized_is_refused_in_a_line(scheduler: Any, more: Any, says: str) -> None:
    with pytest.raises(InputError, match=says) as refused:
        experiment(scheduler, **more)
    assert all(": " in line for line in str(refused.value).splitlines())


@pytest.mark.parametrize("scheduler", [AUTO, {"type": "hyperband", "max_t": "auto"}])
def test_auto_without_a_limit_is_refused(scheduler: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"auto is sized to the limits, and there are none; set constraints\.deadline"):
        experiment(scheduler, {})


def test_an_unsized_search_has_no_stages() -> None:
    with pytest.raises(InputError, match="num_samples: auto is sized when the experiment is planned"):
        experiment().brackets()
    assert Experiment(**experiment().to_words()) == experiment()


@pytest.mark.by_default(4)
@pytest.mark.parametrize(
    "scheduler",
    [
        AUTO,
        {**AUTO, "max_t": 2, "reduction_factor": 2},
        {"type": "sha", "num_samples": 9, "max_t": "auto", "grace_period": 2},
        {"type": "hyperband", "max_t": "auto"},
    ],
)
@pytest.mark.parametrize("limits", [{"deadline": "10m"}, {"max_cost": 2}, {"deadline": "7m", "max_cost": 1}])
def test_the_size_is_the_largest_that_a_run_accepts(scheduler: dict[str, Any], limits: dict[str, Any]) -> None:
    asked = experiment(scheduler, limits)
    found, sized = size(asked, candidates(asked, PROFILE, 0.0))
    assert found.number is not None
    assert sized == asked.sized(found.key, found.number)
    plan_job(sized, PROFILE)
    for more in (1, 2, 5):
        with pytest.raises(InfeasibleError):
            plan_job(asked.sized(found.key, found.number + more), PROFILE)


def test_where_a_larger_search_needs_less_the_size_lies_beyond_a_gap() -> None:
    """Two trials that both train to max_t need more than four, one of which does."""
    assert Sha(type="sha", num_samples="auto", max_t=14).falls("num_samples") == [1, 3, 9, 27]
    assert Sha(type="sha", num_samples="auto", max_t=13).falls("num_samples") == [1, 3, 9]
    scheduler = {"type": "sha", "num_samples": "auto", "max_t": 100, "reduction_factor": 4}
    one_usd = 12.24 * 1001.0 / 3600.0
    resources = {"provider": "virtual", "instance_type": "p3.8xlarge", "gpus_per_trial": {"min": 4, "max": 4}}
    asked = Experiment(**(words(scheduler, {"max_cost": 1.4 * one_usd}) | {"resources": resources}))
    profile = Profile(seconds_per_iteration={4: 10.0}, trial_startup_s=1.0)
    accepted = []
    for number in range(1, 40):
        try:
            plan_job(asked.sized("num_samples", number), profile)
            accepted.append(number)
        except InfeasibleError:
            continue
    found, _ = size(asked, candidates(asked, profile, 0.0))
    assert found.number == accepted[-1]
    assert accepted[:2] == [1, 4], "two and three all train to the end"


def test_limits_that_allow_no_search_name_the_smallest_that_do() -> None:
    found = estimated(experiment(limits={"deadline": "30s"}))
    assert found.size is not None
    assert found.size.number is None
    assert not found.estimate.feasible
    assert found.estimate.reason is not None
    assert found.estimate.reason.startswith(
        "no search fits, not even 1 configuration: deadline 30s cannot be met: the shortest plan takes"
    )
    (deadline,) = [
        change.value
        for remedy in found.estimate.remedies
        for change in remedy.changes
        if change.key.endswith("deadline")
    ]
    enough = estimated(experiment(limits={"deadline": deadline}))
    assert enough.estimate.feasible
    assert enough.size is not None
    assert enough.size.number == 1 or enough.estimate.job is not None


def test_limits_that_size_nothing_are_refused() -> None:
    free = words(limits={"max_cost": 1})
    free["resources"] = {"provider": "local", "price_per_hour": 0}
    with pytest.raises(
        InputError, match="num_samples: the limits allow more than 1,000,000, so that they size nothing"
    ):
        estimated(Experiment(**free))


@pytest.mark.parametrize(
    ("limits", "within"),
    [
        ({"deadline": "10m"}, "10m"),
        ({"max_cost": 2}, "2.00 USD"),
        ({"deadline": "10m", "max_cost": 2}, "10m and 2.00 USD"),
    ],
)
def test_a_line_says_the_size(limits: dict[str, Any], within: str) -> None:
    found = estimated(experiment({"type": "sha", "num_samples": 5, "max_t": 13}, limits), to_size=True)
    assert found.size is not None
    number = found.size.number
    expected = f"{number} configurations fit {within} (num_samples: {number}); no more do"
    assert size_line("sized", found.estimate.constraints, found.size) == f"sized: {expected}"
    assert found.estimate.brackets[0][0].trials == number
    assert found.to_json()["size"] == {"key": "num_samples", "number": number, "trials": number}


@pytest.mark.parametrize(
    ("scheduler", "says"),
    [({"type": "stages", "stages": [{"trials": 2, "iterations": 1}]}, "stages written out cannot be sized")],
)
def test_a_scheduler_without_a_size_is_refused(scheduler: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        estimated(experiment(scheduler), to_size=True)
    with pytest.raises(InputError, match="there are no limits to size the search to"):
        estimated(experiment({"type": "sha", "num_samples": 2, "max_t": 9}, {}), to_size=True)


def test_a_plan_file_is_not_sized() -> None:
    job = plan_job(experiment({**AUTO, "num_samples": 3}), PROFILE)
    with pytest.raises(InputError, match="a plan file is for one size"):
        estimated(experiment(), given=job.plan)


def test_a_run_is_sized_before_it_starts_and_its_journal_has_the_number(tmp_path: Path) -> None:
    asked = experiment()
    found, _ = size(asked, candidates(asked, PROFILE, 0.0))
    said: list[str] = []
    result = run_experiment(asked, open_folder("sized", tmp_path), RunOptions(announce=said.append))
    assert f"num_samples: auto is {found.number}, the largest search within the limits" in said
    assert len(result.trials) == found.number
    assert result.actual_jct_s <= 600.0
    assert result.actual_cost_usd <= 2.0
    with contextlib.closing(JournalFollower(open_folder("sized", tmp_path))) as follower:
        scheduled = follower.header.setup["experiment"]["search"]["scheduler"]
    assert scheduled["num_samples"] == found.number
    with pytest.raises(InfeasibleError, match=r"no search fits, not even 1 configuration: max_cost 0\.0010"):
        run_experiment(experiment(limits={"max_cost": 0.001}), open_folder("other", tmp_path))


def test_the_service_plans_an_auto_size_and_a_size_that_is_asked_for() -> None:
    asked = {"media_type": "application/json", "overrides": [], "policy": "optimal", "frontier": False, "seed": 0}
    asked |= {"now": 0.0, "most_usd": None, "size": False}
    of = lambda document, **more: planned(  # noqa: E731
        question_of({**asked, "body": json.dumps(document), **more}, Path("/nowhere"), live=False)
    )
    status, body = of(words())
    assert status == 200
    number = json.loads(body)["size"]["number"]
    assert json.loads(body)["plan"]["stages"][0]["trials"] == number
    status, body = of(words({**AUTO, "num_samples": 2}), size=True)
    assert (status, json.loads(body)["size"]["number"]) == (200, number)
    status, body = of(words(limits={"deadline": "20s"}))
    assert status == 422
    assert json.loads(body)["detail"].startswith("no search fits, not even 1 configuration")
    assert json.loads(body)["remedies"]


def test_the_service_shows_the_size_once_a_run_has_it(tmp_path: Path) -> None:
    asked = experiment()
    folder, store = open_folder("sized", tmp_path), open_store(None, tmp_path)
    store.add(
        submission := Submission(
            name="sized",
            state=ExperimentState.RUNNING,
            created_at=0.0,
            changed_at=0.0,
            words=asked.to_words(),
            attempt=1,
        )
    )
    result = run_experiment(asked, folder)
    recorder = Recorder(folder, store, lambda: None, clock=Clock())
    seen = recorder.look(submission)
    assert seen is not None
    for found in (recorder.keep(submission, seen), store.submission("sized")):
        assert found is not None
        assert found.words["search"]["scheduler"]["num_samples"] == len(result.trials)
        assert found.words["constraints"] == asked.to_words()["constraints"]
    recorder.close()
    store.close()
