"""What the process that plans makes of a question: its identity, and its answer."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rubberband.api.plans.process import Question, planned, question_of, serve
from rubberband.api.problems import PROFILE_MISSING, REFUSED, HttpProblem
from rubberband.cloud.provider import ClusterNode
from rubberband.cloud.ray_cluster import view
from rubberband.cloud.ray_cluster.view import ClusterView
from rubberband.planning.feasible import PlanningOptions, PricesAndQuotas
from rubberband.planning.prices_and_quotas import answer
from rubberband.spec.experiment import Experiment
from tests.builders.experiment_words import words

NOWHERE, ROOT = Path("/nowhere"), str(Path(__file__).parents[2])


def asked(document: dict[str, Any], **changes: Any) -> dict[str, Any]:
    plain = {"media_type": "application/json", "overrides": [], "policy": "optimal", "seed": 0}
    plain |= {"frontier": False, "size": False}
    return {"body": json.dumps(document), "now": 1000.0, "planning_s": 60.0, "most_usd": None} | plain | changes


def question(document: dict[str, Any], **changes: Any) -> Question:
    return question_of(asked(document, **changes), NOWHERE, live=False)


def test_the_same_question_has_the_same_id_however_it_is_written() -> None:
    known = question(words()).id
    text = yaml.safe_dump(words(constraints__deadline=1200))
    assert question({}, body=text, media_type="text/yaml").id == known
    assert question(words(constraints__deadline="99h"), overrides=["constraints.deadline=1200s"]).id == known
    assert question(words(), now=5000.0).id == known


@pytest.mark.parametrize(
    ("document", "changes"),
    [
        (words(constraints__deadline="21m"), {}),
        (words(name="other"), {}),
        (words(), {"policy": "static"}),
        (words(), {"frontier": True}),
        (words(), {"size": True}),
        (words(), {"seed": 1}),
    ],
)
def test_another_question_has_another_id(document: dict[str, Any], changes: dict[str, Any]) -> None:
    assert question(document, **changes).id != question(words()).id


def test_where_the_least_gang_is_auto_other_code_has_another_id(tmp_path: Path) -> None:
    document = words(entrypoint="model:Model", resources__gpus_per_trial={"min": "auto"})
    asked_for, seen = asked(document), list[Question]()
    for width in (8, 16):
        (tmp_path / "model.py").write_text(
            f"from tests.builders.trials.counted_trials import Adam\n\n\nclass Model(Adam):\n"
            f"    def build_model(self, config):\n        return super().build_model({{'width': {width}}})\n"
        )
        seen.append(question_of(asked_for, NOWHERE, live=False, code=[str(tmp_path), ROOT], allowed=["model:*"]))
    assert [getattr(each.experiment.memory, "parameters", each.experiment.memory) for each in seen] == [64, 256]
    assert seen[0].id != seen[1].id
    assert seen[0].good_s is not None


@pytest.mark.parametrize("allowed", [[], ["model:Other"], ["other:*"]])
def test_code_that_is_not_allowed_does_not_run_to_find_the_least_gang(allowed: list[str], tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    document = words(entrypoint="model:Model", resources__gpus_per_trial={"min": "auto"})
    found = question_of(asked(document), NOWHERE, live=False, code=[str(tmp_path)], allowed=allowed)
    assert found.experiment.memory == "entrypoint 'model:Model' is not allowed to run here"
    assert not (tmp_path / "ran").exists()


def test_code_runs_without_the_variables_of_a_preview(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPERATOR", "hidden")
    (tmp_path / "model.py").write_text(
        f"import os\nopen({str(tmp_path / 'ran')!r}, 'w').write(os.environ.get('GIVEN', 'no'))\n"
    )
    document = words(
        entrypoint="model:Model",
        resources__gpus_per_trial={"min": "auto"},
        resources__env={"GIVEN": "yes"},
        resources__secrets=["OPERATOR"],
    )
    question_of(asked(document), NOWHERE, live=False, code=[str(tmp_path)], allowed=["model:Model"])
    assert (tmp_path / "ran").read_text() == "no"


def test_a_table_of_prices_is_part_of_the_question(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    document = words(resources={"instance_type": "p3.2xlarge", "provider": "virtual"})
    known = question(document).id
    table = tmp_path / "types.csv"
    table.write_text("instance_type,gpus,us-east-1\np3.2xlarge,1,1.0\n")
    monkeypatch.setenv("RUBBERBAND_CATALOGUE", str(table))
    assert question(document).id != known


def test_with_an_absolute_deadline_the_answer_holds_for_a_second() -> None:
    document = words(constraints__deadline="2030-01-01T00:00:00Z")
    now, later = question(document), question(document, now=1001.0)
    assert now.good_s == 1.0
    assert now.id == question(document).id != later.id
    assert question(words()).good_s is None


def test_a_feasible_answer_is_the_estimate_and_its_id() -> None:
    asking = question(words())
    status, body = planned(asking)
    experiment = Experiment(**words())
    profiles = experiment.loaded_profiles()
    assert profiles is not None
    expected = answer(experiment, profiles, PricesAndQuotas(), PlanningOptions(now=0.0, clock=lambda: 0.0)).to_json()
    assert status == 200
    found, whole = json.loads(body), json.loads(json.dumps(expected)) | {"id": asking.id}
    (at,) = [at for at, option in enumerate(found["options"]) if option.get("pending")]
    url = found["options"][at]["url"]
    assert url == f"/v1/plans/{asking.id}/options/asha"
    assert planned(question(words(), option="asha")) == (200, json.dumps(whole["options"][at]).encode())
    found["options"][at] = whole["options"][at]
    assert found | {"planning_s": 0.0} == whole


def test_an_option_that_the_plan_has_not_is_refused() -> None:
    with pytest.raises(HttpProblem, match="has no option with scheduler 'pbt'"):
        planned(question(words(), option="pbt"))


@pytest.mark.parametrize("changes", [{"constraints__deadline": "10s"}, {"constraints__max_cost": 0.001}])
def test_the_named_remedy_for_infeasible_limits_is_enough_for_a_plan(changes: dict[str, Any]) -> None:
    status, body = planned(question(words(**changes)))
    problem = json.loads(body)
    assert status == problem["status"] == 422
    assert problem["type"] == "/problems/infeasible"
    assert problem["estimate"]["feasible"] is False
    assert set(problem["nearest"]) == {"jct_s", "cost_usd"}
    key = next(iter(changes)).removeprefix("constraints__")
    granted = words(**{f"constraints__{key}": problem["nearest_words"][key]})
    assert planned(question(granted))[0] == 200


def test_a_remedy_that_is_reported_is_enough_and_none_passes_what_may_be_spent() -> None:
    tight = words(constraints__deadline="10s", constraints__max_cost=1.0)
    _, body = planned(question(tight))
    remedies = json.loads(body)["remedies"]
    assert remedies == json.loads(body)["estimate"]["remedies"]
    dear = max(each["cost_usd"] for each in remedies)
    for each in remedies:
        status, plan = planned(question(tight, overrides=each["set"]))
        assert status == 200
        assert json.loads(plan)["prediction"]["cost_usd"]["mean"] == pytest.approx(each["cost_usd"])
    _, limited = planned(question(tight, most_usd=dear - 0.0001))
    assert all(each["cost_usd"] < dear for each in json.loads(limited)["remedies"])
    _, none = planned(question(tight, most_usd=0.0001))
    assert json.loads(none)["detail"].endswith("; no remedy was found within 0.0001 USD, the limit here")


def test_a_question_without_a_profile_or_with_a_file_of_the_server_is_refused() -> None:
    with pytest.raises(HttpProblem) as missing:
        planned(question(words(profile=None)))
    assert missing.value.kind is PROFILE_MISSING
    with pytest.raises(HttpProblem) as refused:
        question(words(profile="/etc/passwd"))
    assert refused.value.kind is REFUSED


@pytest.mark.parametrize(
    ("has_cluster", "resources", "reason"),
    [
        (False, {"price_per_hour": 4}, "ray is not allowed here"),
        (True, {"price_per_hour": 4, "address": "10.0.0.1:6379"}, "resources.address: the service uses its own"),
        (True, {}, "resources.price_per_hour: a service counts in USD"),
        (True, {"price_per_hour": 0}, "resources.price_per_hour: a service counts in USD"),
    ],
)
def test_a_question_on_a_ray_cluster_is_refused_unless_it_is_the_services_own_and_has_a_price(
    has_cluster: bool, resources: dict[str, Any], reason: str
) -> None:
    document = words(resources={"provider": "ray", **resources})
    with pytest.raises(HttpProblem) as refused:
        question_of(asked(document), NOWHERE, live=False, has_cluster=has_cluster)
    assert refused.value.kind is REFUSED
    assert reason in refused.value.detail


def test_a_plan_on_a_ray_cluster_is_of_the_nodes_that_are_there_now(monkeypatch: pytest.MonkeyPatch) -> None:
    document = words(resources={"provider": "ray", "price_per_hour": 2, "gpus_per_trial": {"max": 1}})
    found = []
    for nodes in (1, 3):
        at = ClusterNode(node="n", address="a", gpus=2, free_gpus=2, cpus=2, free_cpus=2, accelerator="", labels={})
        seen = ClusterView(address="a:1", nodes=(at,) * nodes, ray_version="", python_version="")
        monkeypatch.setenv("RAY_ADDRESS", "a:1")
        monkeypatch.setattr(view, "view", lambda address, seen=seen: seen)
        found.append(question_of(asked(document), NOWHERE, live=False, has_cluster=True))
    assert [each.experiment.resources.max_instances for each in found] == [1, 3]
    assert found[0].id != found[1].id
    assert found[0].words == found[1].words
    assert planned(found[0])[0] == 200


def conversation(*lines: str) -> list[dict[str, Any]]:
    """What is answered, without the bodies."""
    questions, answers = io.BytesIO("".join(f"{line}\n" for line in lines).encode()), io.BytesIO()
    serve(questions, answers, NOWHERE, live=False)
    answers.seek(0)
    found = []
    while line := answers.readline():
        found.append(json.loads(line))
        answers.read(found[-1].get("length", 0))
    return found


def test_questions_are_answered_in_turn_until_there_are_none() -> None:
    good, bad = json.dumps(asked(words())), json.dumps(asked(words(), body="{"))
    without = json.dumps(asked(words(profile=None)))
    text = conversation(good, "plan", good, "skip", bad, without, "plan", good, "plan")
    known = {"id": text[0]["id"], "good_s": None}
    assert [each.get("problem") or each.get("status") or each for each in text] == [
        *(known, 200, known, "malformed"),
        *({"id": text[4]["id"], "good_s": None}, "profile-missing"),
        *(known, 200),
    ]
    assert Experiment(**text[1]["words"]) == Experiment(**words())
