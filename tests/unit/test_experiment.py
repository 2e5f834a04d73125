from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from rubberband.errors import InputError, ProfileMissingError
from rubberband.spec.experiment import Experiment
from rubberband.spec.fields import delay_of
from rubberband.spec.loading import load_profile, save_profile
from rubberband.values.adaptive import AdaptiveBatch, BatchLimits, Throughput
from rubberband.values.asynchronous import AsyncTraining
from rubberband.values.balance import Balance
from rubberband.values.plan import Stage
from rubberband.values.profile import FIXED, Profile, Spread, measured
from tests.builders.experiment_words import words
from tests.builders.tables import cases

GOODPUT: dict[str, Any] = {
    "throughput": {"alpha_grad_s": 0.02, "beta_grad_s": 0.001, "alpha_local_s": 0.004, "gamma": 2.0},
    "noise_scale": 300.0,
    "samples_per_iteration": 50_000,
    "limits": {"initial": 64, "max": 2048, "max_per_gpu": 512},
    "overhead_s": 1.5,
    "points": [{"instances": 1, "gpus": 2, "per_gpu": 32, "accumulation": 0, "step_s": 0.052}],
    "fit_error": 0.01,
}
NOW = datetime(2026, 11, 21, 12, tzinfo=UTC).timestamp()


def test_the_files_words_become_attributes_with_units() -> None:
    experiment = Experiment(
        **words(
            constraints__max_cost=40,
            resources__provision_delay="1m",
            resources__lease="2m",
            resources__log_limit="1MiB",
        )
    )
    assert experiment.constraints.deadline_s == 1200.0
    assert experiment.constraints.max_cost_usd == 40.0
    assert experiment.resources.provision_delay == 60.0
    assert experiment.resources.price_usd_per_hour == 3.6
    assert experiment.resources.lease_s == 120.0
    assert experiment.resources.log_limit_bytes == 2**20
    assert experiment.brackets() == ((Stage(trials=8, iterations=1), Stage(trials=2, iterations=8)),)
    assert len(experiment.configurations()) == 8


def test_defaults() -> None:
    experiment = Experiment(name="x", search=words()["search"])
    assert (experiment.resources.provider, experiment.resources.region) == ("local", "us-east-1")
    assert (experiment.resources.max_instances, experiment.resources.minimum_billed_s) == (16, 60.0)
    assert experiment.resources.provision_delay is None
    assert experiment.resources.log_limit_bytes == 64_000_000
    assert (experiment.constraints.confidence, experiment.constraints.max_failures) == (0.95, 1)
    assert experiment.loaded_profile() is None


def test_it_is_read_back_from_its_own_words() -> None:
    experiment = Experiment(**words(constraints__deadline="2026-11-21T20:00:00Z", search__space__none=None))
    assert Experiment(**experiment.to_words()) == experiment


def test_a_batch_that_adapts_is_plain_values_for_the_trials() -> None:
    asked = {"policy": "goodput", "initial": 128, "max": 4096, "max_per_gpu": 512, "lr_scaling": "rules.own:halved"}
    experiment = Experiment(**words(batch=asked))
    assert experiment.batch.to_plain() == AdaptiveBatch(
        initial=128, max=4096, max_per_gpu=512, lr_scaling="rules.own:halved"
    )
    assert Experiment(**experiment.to_words()) == experiment
    assert Experiment(**words(batch={"policy": "goodput"})).batch.to_plain() == AdaptiveBatch()


def test_training_is_synchronous_unless_asked() -> None:
    assert Experiment(**words()).training.to_plain() is None
    asked = Experiment(**words(training={"mode": "async", "servers": 3, "max_staleness": 2}))
    assert asked.training.to_plain() == AsyncTraining(servers=3, max_staleness=2)
    assert Experiment(**asked.to_words()) == asked
    assert Experiment(**words()).to_words()["training"] == {"mode": "sync"}


def test_a_trial_has_no_more_gpus_than_its_largest_batch_has_samples() -> None:
    gpus = {"resources__gpus_per_instance": 8, "resources__gpus_per_trial": {"min": 1, "max": 8}}
    experiment = Experiment(**words(batch={"policy": "goodput", "max": 6}, **gpus))
    assert experiment.planning_constraints(NOW, 8).max_gpus_per_trial == 6
    assert Experiment(**words(**gpus)).planning_constraints(NOW, 8).max_gpus_per_trial == 8


def test_a_fixed_batch_is_the_default_and_has_no_other_words() -> None:
    experiment = Experiment(**words())
    assert experiment.batch.to_plain() is None
    assert experiment.to_words()["batch"] == {"policy": "fixed"}
    assert Experiment(**words(batch={"policy": "fixed"})) == experiment


def test_the_division_of_a_batch_is_the_trials_own_choice_unless_written() -> None:
    assert Experiment(**words()).batch.balance.to_plain() == Balance(policy="auto")
    for policy in ("fixed", "goodput"):
        experiment = Experiment(**words(batch={"policy": policy, "balance": {"policy": "paper", "max_share": 0.5}}))
        assert experiment.batch.balance.to_plain() == Balance(policy="paper", max_share=0.5)
        assert Experiment(**experiment.to_words()) == experiment


class SomeTrial:
    pass


def test_the_entry_point_may_be_a_class() -> None:
    experiment = Experiment(**words(entrypoint=SomeTrial))
    assert experiment.entrypoint is SomeTrial
    assert experiment.to_words()["entrypoint"] == f"{__name__}:SomeTrial"


@cases("change", "message")
def test_bad_input_has_a_line_with_the_key_path_and_the_remedy(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        Experiment(**words(**change))
    assert message in str(caught.value).splitlines()[0]


GRID = {"lr": {"type": "grid", "values": [0.1, 0.01, 0.001]}, "momentum": {"type": "grid", "values": [0, 0.9]}}


@pytest.mark.parametrize("sampler", [{}, {"seed": 7}, {"type": "grid"}])
def test_a_grid_gives_the_number_of_trials_and_its_sampler(sampler: dict[str, Any]) -> None:
    scheduler = {"type": "sha", "max_t": 9}
    document = words(search__space=GRID, search__sampler=sampler, search__scheduler=scheduler)
    experiment = Experiment(**document)
    assert experiment.brackets()[0][0].trials == 6 == len(experiment.configurations())
    assert Experiment(**experiment.to_words()) == experiment
    assert scheduler == {"type": "sha", "max_t": 9}


@cases("scheduler", "why")
def test_another_number_of_trials_than_the_grid_has_is_refused(scheduler: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        Experiment(**words(search__space=GRID, search__scheduler=scheduler))


def test_one_of_several_instance_types_is_that_type() -> None:
    assert Experiment(**words(resources__instance_types=["g5.xlarge"])).resources.instance_type == "g5.xlarge"


def test_delays_are_durations_distributions_or_samples() -> None:
    resources = Experiment(
        **words(resources__provision_delay={"mean": "30s", "cv": 0.5}, resources__init_delay={"samples": ["12s", 28]})
    ).resources
    assert resources.provision_delay is not None
    assert resources.init_delay is not None
    assert delay_of(resources.provision_delay) == (30.0, Spread(cv=0.5))
    assert delay_of(resources.init_delay) == (20.0, Spread(samples=(0.6, 1.4)))
    assert resources.init_delay_s == 20.0
    assert delay_of(7.0) == (7.0, FIXED)


HYPERBAND = {"type": "hyperband", "max_t": 9}
EC2 = {"resources__provider": "aws", "resources__checkpoints": "s3://bucket"}
LOCAL = {"resources__provider": "local"}


def test_the_brackets_of_hyperband_share_one_list_of_trials() -> None:
    experiment = Experiment(**words(search__scheduler=HYPERBAND))
    assert [bracket[0].trials for bracket in experiment.brackets()] == [9, 5, 3]
    assert len(experiment.configurations()) == 17
    experiment.require_runnable()
    assert len(Experiment(**words()).brackets()) == 1


@cases("change", "message")
def test_plans_that_cannot_be_run(change: dict[str, Any], message: str) -> None:
    Experiment(**words()).require_runnable()
    with pytest.raises(InputError) as caught:
        Experiment(**words(**change)).require_runnable()
    assert str(caught.value).startswith(message)


def test_the_missing_driver_of_a_store_is_named_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rubberband.installation.find_spec", lambda name: None if name == "gcsfs" else object())
    with pytest.raises(InputError) as caught:
        Experiment(**words(**LOCAL, resources__checkpoints="gs://bucket/x")).require_runnable()
    assert str(caught.value) == (
        "the checkpoint store gs://bucket/x needs gcsfs; run pip install 'rubberband-tune[gcs]'"
    )


def test_a_profile_forevery_instance_type(tmp_path: Path) -> None:
    save_profile(Profile(seconds_per_iteration={1: 5.0}, source="file"), tmp_path / "b.json")
    written = {"by_instance_type": {"a": {"seconds_per_iteration": {1: 9}}, "b": str(tmp_path / "b.json")}}
    experiment = Experiment(**words(resources={"instance_types": ["a", "b"]}, profile=written))
    one, other = experiment.loaded_profile("a"), experiment.loaded_profile("b")
    assert one is not None
    assert other is not None
    assert (one.iteration_s(1), other.iteration_s(1)) == (9.0, 5.0)
    assert experiment.loaded_profiles() == {"a": one, "b": other}
    with pytest.raises(InputError, match="which of a, b is meant"):
        experiment.loaded_profile()
    with pytest.raises(ProfileMissingError, match="'c' has none; known are a, b"):
        experiment.loaded_profile("c")
    assert Experiment(**experiment.to_words()) == experiment
    alone = Experiment(**words(resources={"instance_type": "b"}, profile=written))
    assert alone.loaded_profile() == other


def test_planning_constraints() -> None:
    experiment = Experiment(**words(constraints__max_cost=5))
    constraints = experiment.planning_constraints(NOW, gpus_per_instance=4)
    assert (constraints.deadline_s, constraints.max_cost_usd) == (1200.0, 5.0)
    assert (constraints.min_gpus_per_trial, constraints.max_gpus_per_trial) == (1, 4)


@cases("known", "gpus_per_instance", "max_instances", "widest")
def test_by_default_a_trial_may_have_all_that_the_profile_knows_and_the_instances_have(
    known: int | None, gpus_per_instance: int, max_instances: int, widest: int
) -> None:
    resources = {"provider": "local", "max_instances": max_instances, "gpus_per_trial": {"min": 2}}
    experiment = Experiment(**words(resources=resources))
    assert experiment.planning_constraints(NOW, gpus_per_instance, known).max_gpus_per_trial == widest


def test_an_absolute_deadline_counts_from_now() -> None:
    experiment = Experiment(**words(constraints__deadline="2026-11-21T12:10:00Z"))
    assert experiment.planning_constraints(NOW, 1).deadline_s == 600.0
    with pytest.raises(InputError, match=r"has passed .* give a later one"):
        experiment.planning_constraints(NOW + 600, 1)


@pytest.mark.parametrize("key", ["min", "max"])
def test_a_gang_wider_than_an_instance_takes_whole_instances(key: str) -> None:
    experiment = Experiment(**words(resources__gpus_per_trial={"max": 6, key: 6}))
    with pytest.raises(InputError, match=rf"gpus_per_trial.{key}: 6 GPUs are more .* \(4\) .*; use 4 or 8"):
        experiment.planning_constraints(NOW, gpus_per_instance=4)
    assert experiment.planning_constraints(NOW, gpus_per_instance=3).max_gpus_per_trial == 6


def test_a_list_of_sizes_limits_plans_to_those_that_fit() -> None:
    experiment = Experiment(**words(resources__gpus_per_trial={"sizes": [4, 1, 2, 16]}, resources__max_instances=2))
    assert Experiment(**experiment.to_words()) == experiment
    constraints = experiment.planning_constraints(NOW, gpus_per_instance=4)
    assert constraints.gang_sizes(4) == [1, 2, 4]
    with pytest.raises(InputError, match=r"gpus_per_trial.sizes: 4 GPUs are more .* \(3\) .*; use 3 or 6"):
        experiment.planning_constraints(NOW, gpus_per_instance=3)
    only = Experiment(**words(resources__gpus_per_trial={"sizes": [16]}, resources__max_instances=2))
    with pytest.raises(InputError, match=r"gpus_per_trial.sizes: 16 GPUs are more than 2 instances have \(8\)"):
        only.planning_constraints(NOW, gpus_per_instance=4)


def test_a_gang_wider_than_the_cluster_is_refused() -> None:
    experiment = Experiment(**words(resources__gpus_per_trial={"min": 32}))
    with pytest.raises(InputError, match="lower it to 16 or raise max_instances"):
        experiment.planning_constraints(NOW, gpus_per_instance=1)
    experiment = Experiment(**words(resources__gpus_per_trial={"min": 32}, resources__pool="team"))
    with pytest.raises(InputError, match="lower it to 16 or use a larger pool"):
        experiment.planning_constraints(NOW, gpus_per_instance=1)


def test_a_profile_file_reads_back_what_was_saved(tmp_path: Path) -> None:
    profile = Profile(
        seconds_per_iteration={1: 10.0, 2: 6.0}, trial_startup_s=2.0, iteration_cv=0.1, init_delay_s=8.0, source="file"
    )
    path = tmp_path / "x.profile.json"
    save_profile(
        profile, path, measured_at=datetime(2026, 1, 1, tzinfo=UTC), entrypoint="a:B", iteration_spread={1: 0.1}
    )
    assert load_profile(path) == profile
    assert Experiment(**words(profile=str(path))).loaded_profile() == profile
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.profile.json"]


def test_every_component_of_the_noise_is_written_inline_or_in_a_file(tmp_path: Path) -> None:
    same: Any = {
        "seconds_per_iteration": {1: 10.0},
        "trial_cv": 0.1,
        "iteration_cv": 0.2,
        "startup_cv": 0.3,
        "mean_cv": 0.05,
    }
    extras = {"trial_startup": "2s", "first_iteration_extra": "1s", "cold_iteration_extra": "1.5s"}
    delays = {"provision_delay": {"mean": "20s", "cv": 0.4}, "init_delay": {"samples": ["10s", 30]}}
    found = Experiment(**words(profile={**same, **extras, **delays})).loaded_profile()
    assert found == Profile(
        **same, trial_startup_s=2.0, first_iteration_extra_s=1.0, cold_iteration_extra_s=1.5, provision_delay_s=20.0,
        provision_spread=Spread(cv=0.4), init_delay_s=20.0, init_spread=Spread(samples=(0.5, 1.5)),
    )  # fmt: skip
    save_profile(found, tmp_path / "x.json")
    assert load_profile(tmp_path / "x.json") == replace(found, source="file")


@pytest.mark.parametrize("value", [{"mean": "9s", "cv": -1}, {"samples": []}, "soon"])
def test_a_profiles_delays_are_read_as_strictly_as_those_of_resources(value: object) -> None:
    with pytest.raises(InputError, match=r"profile\.init_delay"):
        Experiment(**words(profile__init_delay=value))


def test_the_model_of_adaptive_batches_is_kept_and_may_be_written_inline(tmp_path: Path) -> None:
    inline = Experiment(**words(profile__goodput=GOODPUT)).loaded_profile()
    assert inline is not None
    assert inline.goodput is not None
    assert inline.goodput.throughput == Throughput(alpha_grad_s=0.02, beta_grad_s=0.001, alpha_local_s=0.004, gamma=2.0)
    assert inline.goodput.limits == BatchLimits(initial=64, max=2048, max_per_gpu=512)
    save_profile(inline, tmp_path / "x.json")
    assert load_profile(tmp_path / "x.json") == replace(inline, source="file")


def test_measured_delays_are_kept_one_by_one(tmp_path: Path) -> None:
    mean_s, spread = measured([12.0, 15.0, 33.0])
    profile = Profile(
        seconds_per_iteration={1: 1.0}, law="normal", provision_delay_s=mean_s, provision_spread=spread, source="file"
    )
    save_profile(profile, tmp_path / "x.json")
    again = load_profile(tmp_path / "x.json")
    assert (again.law, again.init_spread) == ("normal", FIXED)
    assert again.provision_delay_s == pytest.approx(20.0)
    assert again.provision_spread.samples == pytest.approx((0.6, 0.75, 1.65))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is not a JSON file of schema"),
        (b"[]", "is not a mapping"),
        (b"{}", "seconds_per_iteration: is required; add it, and schema"),
        (b"\xff", "is not a JSON file"),
        (b"[" * 10_000, "is not a JSON file"),
        (b'{"schema": "rubberband.profile/1", "seconds_per_iteration": {"1": NaN}}', "nan is not a finite number"),
        (b'{"schema": "rubberband.profile/1", "seconds_per_iteration": {"1": 1}, "trial_cvs": 1}', "did you mean"),
        (b"0" * (2 << 20), "is larger than 1 MiB"),
    ],
)
def test_invalid_profile_files(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=why) as caught:
        load_profile(path)
    assert "\n" not in str(caught.value)


def test_a_profile_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ProfileMissingError, match="rubberband profile"):
        load_profile(tmp_path / "x.json")
    with pytest.raises(InputError, match="cannot be read as a profile"):
        load_profile(tmp_path)
