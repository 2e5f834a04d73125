"""`rubberband init` of SageMaker: a script in script mode, a tuning job's JSON, a `HyperparameterTuner`."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rubberband.errors import InputError
from rubberband.running.first_file import text_of
from rubberband.running.programs.findings import findings_of, is_program
from rubberband.spec.experiment import Experiment
from rubberband.spec.loading import load_experiment
from rubberband.spec.program import MetricsPlace, Program
from rubberband.values.command import ProgramCommand
from tests.builders.program_folder import enter, rubberband

SCRIPT = """
import argparse, json, os, time

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--optimizer", default="sgd")
parser.add_argument("--hosts", type=list, default=json.loads(os.environ["SM_HOSTS"]))
parser.add_argument("--current-host", type=str, default=os.environ["SM_CURRENT_HOST"])
parser.add_argument("--model-dir", type=str, default=os.environ["SM_MODEL_DIR"])
parser.add_argument("--data-dir", type=str, default=os.environ["SM_CHANNEL_TRAINING"])
parser.add_argument("--num-gpus", type=int, default=os.environ["SM_NUM_GPUS"])
args = parser.parse_args()
assert args.hosts == ["algo-1"] and os.path.isdir(args.model_dir) and args.data_dir == "/data", args
file = os.path.join(args.model_dir, "state")
epoch = int(open(file).read()) if os.path.exists(file) else 0
for epoch in range(epoch + 1, args.epochs + 1):
    time.sleep(0.1)
    open(file, "w").write(str(epoch))
    print(f"[{epoch}] val loss: {args.lr / epoch:.6f}; other 1.0", flush=True)
"""

JOB = {
    "HyperParameterTuningJobName": "my-Job",
    "HyperParameterTuningJobConfig": {
        "Strategy": "Bayesian",
        "HyperParameterTuningJobObjective": {"Type": "Minimize", "MetricName": "val:loss"},
        "ResourceLimits": {"MaxNumberOfTrainingJobs": 12, "MaxParallelTrainingJobs": 3},
        "ParameterRanges": {
            "ContinuousParameterRanges": [
                {"Name": "lr", "MinValue": "0.0001", "MaxValue": "0.1", "ScalingType": "Logarithmic"}
            ],
            "IntegerParameterRanges": [
                {"Name": "batch-size", "MinValue": "8", "MaxValue": "64", "ScalingType": "Linear"}
            ],
            "CategoricalParameterRanges": [{"Name": "optimizer", "Values": ['"sgd"', '"adam"']}],
        },
        "TrainingJobEarlyStoppingType": "Off",
    },
    "TrainingJobDefinition": {
        "StaticHyperParameters": {
            "epochs": "4",
            "sagemaker_program": '"train.py"',
            "sagemaker_region": '"eu-west-1"',
            "_tuning_objective_metric": "val:loss",
        },
        "AlgorithmSpecification": {
            "TrainingImage": "123.dkr.ecr/pytorch",
            "MetricDefinitions": [{"Name": "val:loss", "Regex": "val loss: ([0-9\\.]+)[;(]"}],
        },
        "InputDataConfig": [{"ChannelName": "training", "DataSource": {"S3DataSource": {"S3Uri": "s3://bucket/data"}}}],
        "ResourceConfig": {"InstanceType": "ml.p3.2xlarge", "InstanceCount": 1},
        "EnableManagedSpotTraining": True,
    },
}

TUNER = """
import sagemaker
from sagemaker.pytorch import PyTorch
from sagemaker.tuner import CategoricalParameter, ContinuousParameter, HyperparameterTuner, IntegerParameter

role = sagemaker.get_execution_role()
estimator = PyTorch(
    entry_point="train.py", role=role, instance_type="ml.m5.large", instance_count=1, hyperparameters={"epochs": 4}
)
hyperparameter_ranges = {
    "lr": ContinuousParameter(0.001, 0.1, scaling_type="Logarithmic"),
    "batch-size": IntegerParameter(8, 64),
    "optimizer": CategoricalParameter(["sgd", "adam"]),
}
tuner = HyperparameterTuner(
    estimator,
    "validation loss",
    hyperparameter_ranges,
    [{"Name": "validation loss", "Regex": "val loss: ([0-9\\\\.]+)"}],
    max_jobs=9,
    max_parallel_jobs=3,
    objective_type="Minimize",
)
tuner.fit({"training": "s3://bucket/data"})
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    return enter(tmp_path, monkeypatch, SM_CHANNEL_TRAINING="/data")


def init(text: str) -> tuple[Experiment, list[str]]:
    seen = findings_of(text, path := Path("experiment.yaml"))
    path.write_text(text_of(seen if seen.metric else replace(seen, metric="loss"), path))
    rubberband("estimate", "experiment.yaml")
    return load_experiment("experiment.yaml"), list(seen.remarks)


def job(change: tuple[str, ...] = (), value: Any = None) -> str:
    """The file of the tuning job, with another value at the end of these keys."""
    found = json.loads(json.dumps(JOB))
    within = found
    for key in change[:-1]:
        within = within[key]
    if change:
        within[change[-1]] = value
    Path("job.json").write_text(json.dumps(found))
    return "job.json"


ENV = {
    "SM_HOSTS": '["algo-1"]',
    "SM_CURRENT_HOST": "algo-1",
    "SM_MODEL_DIR": "${checkpoint}",
    "SM_CHANNEL_TRAINING": "/data",
    "SM_NUM_GPUS": "${gpus}",
}


def test_a_script_gets_the_variables_that_it_reads() -> None:
    found, _ = init("train.py")
    assert found.resources.env == ENV
    assert isinstance(found.entrypoint, Program)
    assert "--lr" in found.entrypoint.command
    assert {"lr", "batch_size"} <= found.search.space.keys()


def test_a_script_passes_its_check_with_them() -> None:
    init(job())
    report = json.loads(rubberband("check", "experiment.yaml", "--quick", "--output", "json").stdout)
    assert report["problems"] == []
    assert list(report["metrics"]) == ["val_loss"]
    assert report["checkpoint_bytes"]


def test_a_folder_of_data_that_is_not_known_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SM_CHANNEL_TRAINING")
    with pytest.raises(InputError, match=r"reads SM_CHANNEL_TRAINING, which is not set; run `export SM_CHANNEL_TRAI"):
        findings_of("train.py", Path("experiment.yaml"))
    Path("train.py").write_text(SCRIPT.replace('environ["SM_CHANNEL_TRAINING"]', 'environ.get("SM_CHANNEL_TRAINING")'))
    with pytest.raises(InputError, match=r"reads SM_CHANNEL_TRAINING, which is not set"):
        findings_of("train.py", Path("experiment.yaml"))
    found = findings_of("python train.py --data-dir here", Path("experiment.yaml"))
    assert "SM_CHANNEL_TRAINING" not in found.env
    with pytest.raises(InputError, match=r"SM_CHANNEL_TRAINING, the folder of s3://bucket/data here; run `export"):
        findings_of(job(), Path("experiment.yaml"))


def test_a_tuning_job_becomes_the_experiment() -> None:
    found, notes = init(job())
    search = found.to_words()["search"]
    assert found.name == "my-job"
    assert search["space"] == {
        "lr": {"type": "loguniform", "lower": 0.0001, "upper": 0.1, "base": 10},
        "batch-size": {"type": "randint", "lower": 8, "upper": 65},
        "optimizer": {"type": "choice", "values": ["sgd", "adam"]},
    }
    assert search["scheduler"] == {"type": "none", "num_samples": 12, "max_t": 4}
    assert search["sampler"] == {"type": "optuna", "sampler": "tpe", "seed": 1}
    assert (search["metric"], search["mode"]) == ("val_loss", "min")
    assert isinstance(found.entrypoint, Program)
    words = "python train.py --epochs ${max_t} --batch-size ${batch-size} --lr ${lr} --optimizer ${optimizer}"
    assert found.entrypoint.command == words
    assert isinstance(found.entrypoint.metrics, MetricsPlace)
    assert found.entrypoint.metrics.pattern is not None
    line = re.search(found.entrypoint.metrics.pattern, "[1] val loss: 0.25; other 1.0")
    assert line is not None
    assert line["val_loss"] == "0.25"
    assert found.resources.env == ENV
    assert [note[:34] for note in notes] == ["the job's instances are not read: "]


def test_a_tuner_in_python_says_the_same() -> None:
    Path("tuner.py").write_text(TUNER)
    found, notes = init("tuner.py")
    search = found.to_words()["search"]
    assert search["space"] == {
        "lr": {"type": "loguniform", "lower": 0.001, "upper": 0.1, "base": 10},
        "batch-size": {"type": "randint", "lower": 8, "upper": 65},
        "optimizer": {"type": "choice", "values": ["sgd", "adam"]},
    }
    assert search["scheduler"] == {"type": "none", "num_samples": 9, "max_t": 4}
    assert (search["metric"], search["mode"]) == ("validation_loss", "min")
    assert found.entrypoint.metrics == MetricsPlace(pattern=r"val loss: (?P<validation_loss>[0-9\.]+)")  # type: ignore[union-attr]
    assert len(notes) == 1
    maximum, _ = init(_tuner('    objective_type="Minimize",\n', ""))
    assert maximum.search.mode == "max", "SageMaker's default"


def _tuner(old: str, new: str) -> str:
    assert old in TUNER
    Path("tuner.py").write_text(TUNER.replace(old, new))
    return "tuner.py"


@pytest.mark.parametrize(
    ("change", "value", "expected"),
    [
        (("Strategy",), "Random", ("random", "none")),
        (("Strategy",), "Hyperband", ("random", "hyperband")),
        (("TrainingJobEarlyStoppingType",), "Auto", ("optuna", "asha")),
    ],
)
def test_strategies(change: tuple[str, ...], value: str, expected: tuple[str, str]) -> None:
    found, _ = init(job(("HyperParameterTuningJobConfig", *change), value))
    assert (found.search.sampler.type, found.search.scheduler.type) == expected  # type: ignore[union-attr]


@pytest.mark.parametrize(("scaling", "kind"), [("Linear", "randint"), ("Logarithmic", "lograndint")])
def test_whole_numbers_of_a_job_reach_both_ends(scaling: str, kind: str) -> None:
    sizes = [{"Name": "batch-size", "MinValue": "8", "MaxValue": "64", "ScalingType": scaling}]
    found, _ = init(job(("HyperParameterTuningJobConfig", "ParameterRanges", "IntegerParameterRanges"), sizes))
    domain = found.search.space["batch-size"]
    assert (domain.kind, domain.draw(1e-9), domain.draw(1 - 1e-9)) == (kind, 8, 64)


def test_a_grid_is_walked() -> None:
    ranges = {
        "CategoricalParameterRanges": [{"Name": "lr", "Values": ["0.1", "0.2"]}, {"Name": "o", "Values": ["a", "true"]}]
    }
    text = job(("HyperParameterTuningJobConfig", "ParameterRanges"), ranges)
    content = json.loads(Path(text).read_text())
    content["HyperParameterTuningJobConfig"]["Strategy"] = "Grid"
    Path(text).write_text(json.dumps(content))
    found, _ = init(text)
    assert found.search.num_trials == 4
    assert isinstance(found.entrypoint, Program)
    line = ProgramCommand(words=tuple(found.entrypoint.command.split()), booleans="True/False")
    assert line.line({"lr": 0.1, "o": True}, {"max_t": "1"})[-1] == "True", "as SageMaker writes it"
    assert found.entrypoint.booleans.style == "True/False"


_TRAINING = "TrainingJobDefinition"


@pytest.mark.parametrize(
    ("change", "value", "line"),
    [
        ((_TRAINING, "StaticHyperParameters"), {"num_round": "10"}, "trains an algorithm or an image of SageMaker"),
        ((_TRAINING, "StaticHyperParameters"), {"sagemaker_program": '"other.py"'}, "its program other.py is not here"),
        ((_TRAINING, "AlgorithmSpecification"), {}, "the objective val:loss has no metric definition"),
        (("HyperParameterTuningJobConfig", "ParameterRanges"), {}, "has no ranges of hyperparameters"),
        (("TrainingJobDefinitions",), [{}, {}], "has 2 training jobs"),
    ],
)
def test_a_job_without_counterpart_is_refused_in_one_line(change: tuple[str, ...], value: Any, line: str) -> None:
    with pytest.raises(InputError) as caught:
        findings_of(job(change, value), Path("experiment.yaml"))
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        (
            "max_jobs=9",
            "max_jobs=jobs",
            "max_jobs is jobs, which its source does not say; write it plainly, or give its JSON",
        ),
        ('entry_point="train.py", ', "", "its estimator has no entry_point"),
        ("IntegerParameter(8, 64)", "IntegerParameter(*sizes)", "hyperparameter_ranges is"),
    ],
)
def test_a_tuner_whose_source_does_not_say_it_is_refused(old: str, new: str, line: str) -> None:
    with pytest.raises(InputError) as caught:
        findings_of(_tuner(old, new), Path("experiment.yaml"))
    assert line in str(caught.value)


def test_other_files_are_no_jobs(here: Path) -> None:
    (here / "other.json").write_text("{}")
    assert not is_program("other.json")
    assert is_program(job())
