"""Trials that share a GPU: what is refused, and what is counted in slots, in GPUs and in money."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
import torch

from rubberband.cloud.offers import offer
from rubberband.errors import InputError
from rubberband.executor import Entrypoint, TorchRunner, bill_usd, paid_time, summarise, trial_rows
from rubberband.executor import WorkerGang as Gang
from rubberband.executor.training.gpu_rows import MOST_OF_GPU, Residence
from rubberband.planner.exact.model import predict
from rubberband.running.profile_cache import content_to_measure
from rubberband.spec.experiment import Experiment
from rubberband.values.plan import Plan, Stage, StagePlan
from rubberband.views.story import cells
from tests.builders.jobs import JOB, OFFER, PROFILE
from tests.builders.results import configurations
from tests.builders.segments import SEGMENT
from tests.builders.virtual_runs import jct_s, run_virtual

SHARED = dataclasses.replace(OFFER, trials_per_gpu=2, billing="per_function")


def experiment(**words: Any) -> Experiment:
    resources = {"provider": "virtual", "instance_type": "p3.8xlarge", "trials_per_gpu": 2}
    search = {
        "metric": "loss",
        "mode": "min",
        "space": {"lr": {"type": "uniform", "lower": 0, "upper": 1}},
        "scheduler": {"type": "none", "num_samples": 16, "max_t": 4},
    }
    given = {"name": "small", "entrypoint": "tests.builders.trials:Tiny", "search": search, **words}
    return Experiment(**{**given, "resources": resources | given.get("resources", {})})


REFUSED = [
    ({"resources": {"trials_per_gpu": 17}}, "resources.trials_per_gpu: 17"),
    ({"resources": {"trials_per_gpu": 0}}, "resources.trials_per_gpu: 0"),
    ({"resources": {"trials_per_gpu": 1.5}}, "resources.trials_per_gpu: 1.5"),
    (
        {"resources": {"gpus_per_trial": {"max": 4}}},
        "resources.gpus_per_trial.max: 4 GPUs are a gang, and trials_per_gpu is 2: a trial has one GPU then; set it to",
    ),
    ({"resources": {"gpus_per_trial": {"sizes": [1, 2]}}}, "resources.gpus_per_trial.sizes: 2 GPUs are a gang"),
    (
        {"resources": {"slots": 3, "instance_type": "m7i.xlarge"}},
        "resources.trials_per_gpu: slots=3 has as many trials on an instance without GPUs, and trials_per_gpu is 2; "
        "leave it out and write slots: 6",
    ),
    ({"training": {"mode": "async"}}, "training.mode: async trains a trial on several GPUs, and resources.trials_per"),
    ({"batch": {"policy": "goodput"}}, "batch.policy: goodput fits batches to a GPU's speed, which trials beside chan"),
]


@pytest.mark.parametrize(("words", "why"), REFUSED)
def test_words_that_share_no_gpu_are_refused_in_one_line(words: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=re.escape(why)) as refused:
        experiment(**words)
    assert "\n" not in str(refused.value)


def test_an_instance_has_a_slot_for_each_trial_and_the_price_of_its_gpus() -> None:
    alone, shared = (offer(experiment(resources={"trials_per_gpu": count}).resources) for count in (1, 3))
    assert (alone.gpus, alone.slots) == (4, 4)
    assert (shared.gpus, shared.slots) == (4, 12)
    assert shared.price_usd_per_hour == alone.price_usd_per_hour
    assert shared.instance_cost_usd(3600.0) == alone.instance_cost_usd(3600.0)


def test_a_trial_of_a_shared_gpu_has_one_whatever_the_profile_knows() -> None:
    limits = experiment().planning_constraints(0.0, gpus_per_instance=4, known_gpus=4)
    assert (limits.min_gpus_per_trial, limits.max_gpus_per_trial) == (1, 1)
    assert experiment(resources={"trials_per_gpu": 1}).max_gpus_per_trial(4, 4) == 4


def test_eight_trials_of_two_to_a_gpu_train_at_once_on_two_instances_of_two_gpus() -> None:
    stages, plan = (Stage(trials=8, iterations=12),), Plan(stages=(StagePlan(instances=2, gpus_per_trial=1),))
    alone, shared = (predict(stages, plan, PROFILE, dataclasses.replace(OFFER, trials_per_gpu=k)) for k in (1, 2))
    assert (alone.stages[0].slots, shared.stages[0].slots) == (4, 8)
    assert shared.jct_s == alone.jct_s / 2
    assert shared.cost_usd == pytest.approx(alone.cost_usd / 2)


def test_a_plan_with_gangs_is_refused_where_trials_share_gpus() -> None:
    plan = Plan(stages=(StagePlan(instances=2, gpus_per_trial=2),))
    with pytest.raises(InputError, match="has gpus_per_trial=2, and 2 trials share each GPU; plan 1, or set resources"):
        predict((Stage(trials=8, iterations=2),), plan, PROFILE, SHARED)


def test_a_run_bills_half_a_gpu_for_each_trial_and_its_gpu_time_counts_so() -> None:
    plan = Plan(stages=tuple(StagePlan(instances=1, gpus_per_trial=1) for _ in JOB.stages))
    job = dataclasses.replace(JOB, offer=SHARED, plan=plan, prediction=predict(JOB.stages, plan, PROFILE, SHARED))
    controller, _, _ = run_virtual(job)
    state = controller.state
    assert jct_s(state) == job.prediction.jct_s == 30.0, "4 trials of 10 s at once, then 2 of 20 s"
    trial_s = 4 * 10.0 + 2 * 20.0
    assert paid_time(state, state.now).training_gpu_s == trial_s / 2
    assert bill_usd(state, state.now) == pytest.approx(trial_s / 2 * SHARED.price_usd_per_s / SHARED.gpus)
    result = summarise(state, configurations(job), state.now)
    assert sum(row["gpu_s"] for row in trial_rows(result)) == trial_s / 2
    assert cells(result.stages[0], 2)[4] == "1/2"


def test_profiles_of_other_numbers_of_trials_on_a_gpu_are_kept_apart() -> None:
    entrypoint = Entrypoint.parse("tests.builders.trials:Tiny")
    keys = {content_to_measure(experiment(resources={"trials_per_gpu": k}), entrypoint).key for k in (1, 2, 4)}
    assert len(keys) == 3


def test_data_on_a_shared_gpu_takes_its_part_of_the_memory() -> None:
    mib = 1 << 20
    data = torch.zeros(int(MOST_OF_GPU * 60 * mib / 4))
    alone, shared = (Residence(torch.device("cpu"), lambda: (100 * mib, 100 * mib), share=each) for each in (1.0, 0.5))
    for there in (alone, shared, alone, shared):
        there.begin_step()
    for there in (alone, shared):
        there.rows([data], np.array([0]))
    assert (alone.has_copies, shared.has_copies) == (True, False)


class Begun:
    """The part of a trial that its runner asks for first."""

    def global_batch_size(self, config: Any) -> int:
        raise StopIteration


@pytest.mark.parametrize(("count", "parts"), [(1, []), (4, [0.25])])
def test_a_torch_trial_takes_no_more_than_its_part_of_the_memory(
    monkeypatch: pytest.MonkeyPatch, count: int, parts: list[float]
) -> None:
    asked: list[float] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", asked.append)
    trial: Any = Begun()
    with pytest.raises(StopIteration):
        TorchRunner(trial, dataclasses.replace(SEGMENT, device="cuda", trials_per_gpu=count), Gang(0, 1, None))
    assert asked == parts
