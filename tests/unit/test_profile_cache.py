"""Measured profiles are kept by their content, and used again by runs and estimates of the same content."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rubberband import cli
from rubberband.cloud.provider import ClusterRequest
from rubberband.executor import Entrypoint, ExperimentFolder, RunSpec, VirtualBackend
from rubberband.running.profile import measure_profile
from rubberband.running.profile_cache import cache_path, content_to_measure, find_profiles
from rubberband.running.starting import find_entrypoint
from rubberband.spec.experiment import Experiment
from rubberband.spec.loading import default_profile_path, dump_experiment, load_experiment, names_no_profile
from tests.builders.experiments import PROFILE, experiment

TRIAL = "import rubberband\ndef train(config):\n    while True: rubberband.report({'loss': 1.0}, checkpoint=1)\n"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An experiment file beside its trial; what is measured is on a virtual clock."""

    def make_backend(_folder: object, spec: RunSpec, request: ClusterRequest) -> VirtualBackend:
        return VirtualBackend("test", request.offer, PROFILE, metric=spec.experiment.search.metric)

    monkeypatch.setattr("rubberband.running.profile.make_ray_backend", make_backend)
    monkeypatch.setenv("RUBBERBAND_HOME", str(tmp_path / "home"))
    (tmp_path / "kept_trial.py").write_text(TRIAL)
    words = experiment(gpus_per_trial={"min": 1, "max": 1}).to_words() | {"entrypoint": "kept_trial:train"}
    path = tmp_path / "kept.yaml"
    path.write_text(dump_experiment(Experiment(**words)))
    return path


def content(file: Path, *overrides: str) -> Any:
    found = load_experiment(file, overrides)
    return content_to_measure(found, Entrypoint.parse("kept_trial:train", (file.parent,)))


def measured(file: Path, *overrides: str) -> None:
    """Measure it and keep it, as a first run does."""
    found = load_experiment(file, overrides)
    entrypoint = find_entrypoint(found, (file.parent,))
    home = file.parent / "home"
    profile = measure_profile(found, entrypoint, ExperimentFolder(home=home, name="test"), briefly=True)
    profile.keep(home)
    profile.save(default_profile_path(file))


def known(file: Path, *overrides: str) -> tuple[bool, list[str]]:
    """Whether a run would have a profile, and what it says."""
    said = list[str]()
    found = load_experiment(file, overrides)
    at = default_profile_path(file) if names_no_profile(file, overrides) else None
    entrypoint = Entrypoint.parse("kept_trial:train", (file.parent,))
    return find_profiles(found, entrypoint, file.parent / "home", at, said.append, to_run=True) is not None, said


def test_a_profile_is_used_again_while_its_content_is_the_same(file: Path) -> None:
    assert known(file) == (False, [])
    measured(file)
    is_known, (line,) = known(file)
    assert is_known
    assert line.startswith("profile: kept.profile.json, measured ")
    assert "--profile-again measures it afresh" in line
    default_profile_path(file).unlink()
    is_known, (line,) = known(file, "name=other")
    assert is_known
    assert "used again" in line


def test_a_change_of_the_trial_is_measured_again_and_its_undoing_is_not(file: Path) -> None:
    measured(file)
    (file.parent / "kept_trial.py").write_text(TRIAL + "# twice the layers\n")
    is_known, (line,) = known(file)
    assert not is_known
    assert "kept.profile.json was measured " in line
    assert "for another state of the trial" in line
    (file.parent / "kept_trial.py").write_text(TRIAL)
    assert known(file)[0]


@pytest.mark.parametrize(
    ("override", "is_other"),
    [
        ("search.space.x.upper=2", True),
        ("resources.gpus_per_instance=4", True),
        ("resources.gpus_per_trial.max=2", True),
        ("batch.policy=goodput", True),
        ("training.mode=async", True),
        ("constraints.deadline=3h", False),
        ("name=other", False),
        ("search.scheduler={type: sha, num_samples: 99, max_t: 9}", False),
    ],
)
def test_the_content_is_the_trial_its_space_and_the_hardware(file: Path, override: str, is_other: bool) -> None:
    assert (content(file).key != content(file, override).key) == is_other


@pytest.mark.parametrize(
    ("override", "is_other"),
    [
        ("resources.instance_type=g5.2xlarge", True),
        ("resources.region=eu-west-1", True),
        ("resources.aws={image: ami-0123456789abcdef0}", True),
        ("resources.aws={setup: [pip install more]}", True),
        ("resources.aws={install: requirements.txt}", True),
        ("resources.aws={owner: me}", False),
    ],
)
def test_on_ec2_the_content_is_the_machine_too(file: Path, override: str, is_other: bool) -> None:
    rented = ("resources.provider=aws", "resources.instance_type=g5.xlarge")
    assert (content(file, *rented).key != content(file, *rented, override).key) == is_other


def test_an_estimate_uses_the_kept_profile(file: Path) -> None:
    refused = CliRunner().invoke(cli.app, ["estimate", str(file)])
    assert "has no profile" in str(refused.exception)
    measured(file)
    default_profile_path(file).unlink()
    done = CliRunner().invoke(cli.app, ["estimate", str(file), "-o", "json"])
    assert done.exit_code == 0, done.output
    assert "profile: measured" in done.stderr
    assert json.loads(done.stdout)["feasible"]


def test_an_estimate_says_that_the_profile_beside_the_file_is_of_another_trial(file: Path) -> None:
    measured(file)
    assert CliRunner().invoke(cli.app, ["estimate", str(file)]).stderr == ""
    (file.parent / "kept_trial.py").write_text(TRIAL + "# twice the layers\n")
    done = CliRunner().invoke(cli.app, ["estimate", str(file)])
    assert done.exit_code == 0, done.output
    (line,) = done.stderr.splitlines()
    assert line.startswith("kept.profile.json was measured ")
    assert line.endswith(" ago for another state of the trial, its space or its hardware; a run measures it again")
    named = CliRunner().invoke(cli.app, ["estimate", str(file), "-s", f"profile={file.parent}/kept.profile.json"])
    assert named.stderr == ""
    measured(file)
    (file.parent / "kept_trial.py").write_text(TRIAL)
    assert "profile: measured" in CliRunner().invoke(cli.app, ["estimate", str(file)]).stderr


def test_a_damaged_or_named_profile_is_no_kept_one(file: Path) -> None:
    measured(file)
    cache_path(file.parent / "home", content(file)).write_text("{")
    default_profile_path(file).rename(file.parent / "mine.json")
    assert known(file) == (False, [])
    assert known(file, f"profile={file.parent}/mine.json") == (True, [])
