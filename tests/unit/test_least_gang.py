"""The fewest GPUs of a trial: those of the file, where the profile starts, or by memory."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from rubberband.cloud.catalogue import table_of
from rubberband.errors import InputError
from rubberband.planning.candidates import candidates, network_notes
from rubberband.planning.feasible import PlanningOptions, PricesAndQuotas, planned
from rubberband.planning.prices_and_quotas import answer
from rubberband.running.check import narrowest_gang, widest_gang
from rubberband.spec.experiment import Experiment
from rubberband.values.memory import TrialMemory
from rubberband.values.plan import Plan, StagePlan
from tests.builders.experiment_words import words
from tests.builders.tables import cases

NOW = 0.0


def experiment(table: dict[int, float], **changes: Any) -> Experiment:
    plain: dict[str, Any] = {
        "resources": {"provider": "virtual", "instance_type": "p3.16xlarge", "max_instances": 4},
        "profile": {"seconds_per_iteration": table},
    }
    return Experiment(**words(**{**plain, **changes}))


def limits(found: Experiment) -> tuple[int, int]:
    profile = found.loaded_profile()
    assert profile is not None
    constraints = candidates(found, profile, NOW)[0].constraints
    return constraints.min_gpus_per_trial, constraints.max_gpus_per_trial


@cases("starts", "asked", "least", "most")
def test_a_profile_that_starts_at_several_gpus_sets_the_least_gang(
    starts: int, asked: dict[str, Any], least: int, most: int
) -> None:
    found = experiment({starts: 10.0, 2 * starts: 6.0}, resources__gpus_per_trial=asked)
    assert limits(found) == (least, most)
    assert narrowest_gang(found, None, found.loaded_profile()) == least
    assert widest_gang(found, None, found.loaded_profile()) == most


@cases("changes", "reason")
def test_a_gang_below_the_profiles_first_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(reason)}$"):
        limits(experiment({16: 5.0}, **changes))


def test_a_function_has_no_gang_that_a_profile_could_start_at() -> None:
    with pytest.raises(InputError, match=r"starts at 16 GPUs, and a function has 1; write @rubberband.distributed"):
        limits(experiment({16: 5.0}).of_function())


def with_memory(billions: float, *, bytes_each: int = 16, is_divided: bool = True, **changes: Any) -> Experiment:
    """An experiment whose model has that many parameters. Its least gang is auto, unless `changes` has another."""
    number = round(billions * 1e9)
    memory = TrialMemory(
        parameters=number,
        weight_bytes=4 * number,
        gradient_bytes=4 * number,
        state_bytes=(bytes_each - 8) * number,
        optimizer="AdamW",
        is_divided=is_divided,
    )
    asked = {"resources__gpus_per_trial": {"min": "auto"}, **changes}
    return experiment({1: 40.0, 8: 8.0}, **asked).with_memory(memory)


@cases("billions", "changes", "least")
def test_auto_is_the_fewest_gpus_whose_memory_holds_the_parameters(
    billions: float, changes: dict[str, Any], least: int
) -> None:
    assert limits(with_memory(billions, **changes))[0] == least


@cases("billions", "changes", "reason")
def test_a_model_that_no_gang_holds_is_refused(billions: float, changes: dict[str, Any], reason: str) -> None:
    found = with_memory(billions, **changes)
    with pytest.raises(InputError, match=f"^{re.escape(reason)}$"):
        limits(found)
    with pytest.raises(InputError, match=f"^{re.escape(reason)}$"):
        widest_gang(found, None, found.loaded_profile())


@cases("memory", "changes", "reason")
def test_auto_needs_to_know_the_memory_or_a_profile(memory: str, changes: dict[str, Any], reason: str) -> None:
    known = with_memory(1, **changes)
    unknown = known.with_memory(memory) if memory else known
    with pytest.raises(InputError, match=f"^{re.escape(reason)}$"):
        widest_gang(unknown, None, None)
    assert limits(unknown)[0] == 1
    assert limits(unknown.model_copy(update={"profile": experiment({4: 1.0}).profile}))[0] == 4


def test_auto_is_1_on_instances_without_a_gpu() -> None:
    for resources in ({"provider": "local"}, {"provider": "virtual", "slots": 4, "price_per_hour": 1}):
        found = with_memory(7, resources=resources | {"gpus_per_trial": {"min": "auto"}})
        assert limits(found)[0] == 1


def test_a_type_whose_gangs_do_not_hold_the_model_is_left_out() -> None:
    changes = {
        "resources__instance_type": None,
        "resources__instance_types": ["p3.2xlarge", "p5.48xlarge"],
        "profile": {
            "by_instance_type": {
                "p3.2xlarge": {"seconds_per_iteration": {1: 1.0}},
                "p5.48xlarge": {"seconds_per_iteration": {1: 1.0}},
            }
        },
    }
    found = with_memory(7, **changes)
    profiles = found.loaded_profiles()
    assert profiles is not None
    answered = planned(found, profiles, PricesAndQuotas(), PlanningOptions(now=NOW))
    assert [each.offer.instance_type for each in answered.candidates] == ["p5.48xlarge"]
    left_out, chosen = answered.remarks
    assert left_out == (
        "gang: p3.2xlarge is left out. resources.gpus_per_trial.min: 7 billion parameters x 16 bytes (weights 4, "
        "gradients 4, AdamW 8) need 8 GPUs of 16 GiB, and 4 instances of p3.2xlarge have 4; raise "
        "resources.max_instances to 8."
    )
    assert chosen == (
        "gang: auto is 2 GPUs per trial: 7 billion parameters x 16 bytes (weights 4, gradients 4, AdamW 8) / 2 are "
        "52.2 GiB, within 90 % of the 80 GiB of a GPU of p5.48xlarge; activations are not measured and count 0."
    )
    assert widest_gang(found, None, profiles) == 2


def test_a_type_whose_gpu_does_not_hold_a_whole_model_is_left_out() -> None:
    types = ["p3.2xlarge", "p5.48xlarge"]
    profile = {"by_instance_type": {name: {"seconds_per_iteration": {1: 1.0}} for name in types}}
    changes = {"resources__instance_type": None, "resources__instance_types": types, "profile": profile}
    found = with_memory(4, is_divided=False, **changes)
    profiles = found.loaded_profiles()
    assert profiles is not None
    answered = planned(found, profiles, PricesAndQuotas(), PlanningOptions(now=NOW))
    assert [each.offer.instance_type for each in answered.candidates] == types[1:]
    assert answered.remarks[0].startswith("gang: p3.2xlarge is left out. resources.gpus_per_trial.min: 4 billion")


@cases("instance_type", "most", "remarks")
def test_gangs_over_instances_without_efa_have_a_remark(instance_type: str, most: int, remarks: list[str]) -> None:
    asked = {"resources__instance_type": instance_type, "resources__gpus_per_trial": {"min": most, "max": most}}
    found = experiment({1: 40.0, 16: 2.0}, **asked)
    profile = found.loaded_profile()
    assert profile is not None
    answered = answer(found, profile, PricesAndQuotas(), PlanningOptions(now=NOW))
    assert [note for note in answered.notes if note.startswith("gang:")] == remarks


@pytest.mark.parametrize("has_efa", [True, False, None])
def test_a_network_that_is_not_known_is_not_called_slow(has_efa: bool | None) -> None:
    found = experiment({1: 40.0, 16: 2.0})
    profile = found.loaded_profile()
    assert profile is not None
    offer = candidates(found, profile, NOW)[0].offer
    table = {offer.instance_type: replace(table_of(found.resources)[offer.instance_type], has_efa=has_efa)}
    assert len(network_notes(found, offer, 2 * offer.slots, table)) == (has_efa is False)


def test_a_given_plan_below_the_least_gang_is_refused() -> None:
    found = with_memory(7)
    profile = found.loaded_profile()
    assert profile is not None
    plan = Plan(stages=tuple(StagePlan(instances=1, gpus_per_trial=4) for _ in found.brackets()[0]))
    options = PlanningOptions(now=NOW, given=plan)
    with pytest.raises(InputError, match=r"^--plan: 4 GPUs per trial are fewer than 8, the least here .*; raise"):
        planned(found, profile, PricesAndQuotas(), options)


@pytest.mark.parametrize(("key", "or_auto"), [("min", ", or auto"), ("max", "")])
def test_a_number_that_may_be_auto_is_refused_with_that_word(key: str, or_auto: str) -> None:
    with pytest.raises(InputError, match=rf"{key}: 'automatic' is not a whole number; write one, such as 3{or_auto}$"):
        experiment({1: 40.0}, resources__gpus_per_trial={key: "automatic"})
