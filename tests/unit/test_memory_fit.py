"""Whether configurations fit into memory: what is measured for it, and what is said for each instance type."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rubberband.executor import Entrypoint
from rubberband.executor.training import peak
from rubberband.executor.training.check_findings import CheckOrder, TrialCheck
from rubberband.planning.memory_model import OutOfTime
from rubberband.running import memory_fit as module
from rubberband.running.check import check_experiment
from rubberband.running.memory_fit import Measuring, MemoryFit, Room, memory_fit, rooms
from rubberband.spec.experiment import Experiment
from tests.builders.segments import SEGMENT

GB = 1e9
SPACE = {
    "lr": {"type": "loguniform", "lower": 1e-5, "upper": 1e-3},
    "r": {"type": "choice", "values": [8, 64, 256]},
    "batch": {"type": "choice", "values": [4, 16]},
}


def experiment(**resources: Any) -> Experiment:
    return Experiment.model_validate(
        {
            "version": 1,
            "name": "lora",
            "entrypoint": "mine:train",
            "search": {
                "space": SPACE,
                "scheduler": {"type": "sha", "num_samples": 12, "grace_period": 1, "max_t": 4},
                "metric": "loss",
                "mode": "min",
            },
            "resources": {"provider": "aws", "instance_type": "g5.xlarge", **resources},
        }
    )


class Trial:
    """Memory of a trial: a base, and activations that follow from batch and rank. It counts what is measured."""

    def __init__(self, base: float, per_batch: float, *, until: int = 99) -> None:
        self.base, self.per_batch, self.until, self.measured = base, per_batch, until, 0

    def __call__(self, config: Mapping[str, Any]) -> float:
        self.measured += 1
        if self.measured > self.until:
            raise OutOfTime
        return self.memory(config)

    def memory(self, config: Mapping[str, Any]) -> float:
        return (self.base + self.per_batch * config["batch"] * (1.0 + config["r"] / 512)) * GB

    def fit(self, given: Experiment, *, begun: float = 0.0, **found: Any) -> MemoryFit:
        first = {"lr": 1e-4, "r": 8, "batch": 4}
        seen = TrialCheck(peak_bytes=int(self.memory(first)), begun_bytes=int(begun * GB), **found)
        return memory_fit(given, first, seen, self)


def test_where_there_is_plenty_nothing_more_is_measured() -> None:
    trial = Trial(2.0, 0.1)
    found = trial.fit(experiment())
    assert found == MemoryFit(["2.41 GB of 23.2 GB on g5.xlarge; no other one was measured"])
    assert trial.measured == 0


def test_where_the_largest_values_fit_one_measurement_suffices() -> None:
    trial = Trial(10.0, 0.5)
    found = trial.fit(experiment())
    assert found.lines == ["22 GB of 23.2 GB on g5.xlarge with the largest values: lr=0.000995405 r=256 batch=16"]
    assert trial.measured == 1
    assert not found.warning


def test_configurations_that_do_not_fit_are_named_by_what_counts() -> None:
    trial = Trial(10.0, 0.7)
    found = trial.fit(experiment(), takes_parts=True)
    assert found.lines == [
        "21.4 GB of 23.2 GB on g5.xlarge; 2 of 12 configurations do not fit: r=256 batch=16 takes 26.8 GB"
    ]
    assert found.warning == (
        "2 of 12 configurations do not fit on g5.xlarge: r=256 batch=16 takes 26.8 GB, and a worker has 23.2 GB; they "
        "will take fewer samples at once, and train longer"
    )
    assert trial.measured <= 7


def test_a_type_with_more_memory_ends_the_warning_but_not_the_line() -> None:
    given = experiment(instance_type=None, instance_types=["g5.xlarge", "p4d.24xlarge"])
    found = Trial(10.0, 0.7).fit(given)
    assert len(found.lines) == 2
    assert "do not fit" in found.lines[0]
    assert found.lines[1].endswith("on p4d.24xlarge")
    assert (found.warning, found.fault) == ("", "")


@pytest.mark.parametrize(("takes_parts", "begun"), [(False, 0.0), (True, 0.0), (False, 5.0)])
def test_where_none_fits_a_trial_that_cannot_take_less_is_refused(takes_parts: bool, begun: float) -> None:
    found = Trial(30.0, 1.0).fit(experiment(), takes_parts=takes_parts, begun=begun)
    is_sure = not takes_parts and not begun
    said = found.fault if is_sure else found.warning
    assert said.startswith("memory: 12 of 12" if is_sure else "12 of 12")
    assert bool(found.fault) != bool(found.warning)
    assert is_sure == ("use a smaller model or batch, or a type with more memory" in found.fault)
    assert all(line.startswith("about ") == (begun > 0) for line in found.lines)


def test_a_line_says_that_the_time_does_not_suffice_for_others() -> None:
    found = Trial(12.0, 0.7, until=0).fit(experiment())
    assert found.lines == [
        "14.8 GB of 23.2 GB on g5.xlarge; larger ones could not be measured here in the time (`rubberband check "
        "--limit` allows more)"
    ]


def test_memory_of_workers_is_that_of_their_type() -> None:
    assert [place.name for place in rooms(experiment())] == ["g5.xlarge"]
    (cpus,) = rooms(experiment(instance_type="c6i.4xlarge", slots=4))
    assert cpus == Room("c6i.4xlarge", 0.9 * 32 * 2**30 / 4, is_gpu=False)
    assert Trial(2.0, 0.1).fit(experiment(instance_type="c6i.4xlarge")) == MemoryFit(), "of a GPU alone it is not known"


def test_trials_that_share_a_gpu_or_this_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    (alone,), (shared,) = rooms(experiment()), rooms(experiment(trials_per_gpu=2))
    assert shared.room_bytes == alone.room_bytes / 2
    sizes = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**22}
    monkeypatch.setattr(module.os, "sysconf", sizes.__getitem__)
    (here,) = rooms(experiment(provider="local", instance_type="local", gpus_per_instance=4, max_instances=1))
    assert here == Room("this machine", 0.9 * 2**34 / 4, is_gpu=False)


def test_resident_memory_of_a_machine_without_gpus_has_the_imports_in_it() -> None:
    found = Trial(10.0, 0.1).fit(experiment(instance_type="c6i.4xlarge", slots=4), begun=9.0)
    assert found.lines[0].startswith("10.4 GB of 7.73 GB on c6i.4xlarge; 12 of 12 configurations do not fit")
    assert found.fault


def test_no_measurement_begins_that_would_not_end_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])

    def check(*_: Any, **words: Any) -> TrialCheck:
        now[0] += 40.0
        return TrialCheck(peak_bytes=7)

    monkeypatch.setattr(module, "check", check)
    order = CheckOrder(entrypoint=Entrypoint.parse("mine:train"), segment=SEGMENT, max_gpus=1)
    measure = Measuring(order, TrialCheck(seconds={"iteration": 1.0}), 70.0, lambda: False, None)
    assert measure({}) == 7.0
    with pytest.raises(OutOfTime):
        measure({})  # 30 s are left, and the last one took 40


def test_a_peak_is_of_this_trial_alone_and_in_bytes() -> None:
    assert len(b"x" * 300_000_000) == 3e8, "touched and freed before"
    measured = peak.Peak()
    begun, before, _ = measured.read()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    assert begun == pytest.approx(pages * os.sysconf("SC_PAGE_SIZE"), rel=0.01)
    assert before < begun + 100e6
    held = b"x" * 200_000_000
    assert measured.read()[1] - begun == pytest.approx(len(held), rel=0.1)


TRAIN = """
import rubberband, torch

class Wide(rubberband.TorchTrial):
    batch_size, num_workers = 4, 0
    def build_model(self, config): return torch.nn.Linear(config["width"] * 1000, 1000)
    def build_optimizer(self, config, model): return torch.optim.Adam(model.parameters())
    def train_dataset(self, config):
        return torch.utils.data.TensorDataset(torch.zeros(8, config["width"] * 1000), torch.zeros(8, 1000))
    def loss(self, model, batch): return torch.nn.functional.mse_loss(model(batch[0]), batch[1])
"""


def test_the_check_measures_a_wide_model_by_its_largest_width(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wide.py").write_text(TRAIN)
    monkeypatch.syspath_prepend(tmp_path)
    words = experiment().to_words()
    words |= {"entrypoint": "wide:Wide", "resources": {"provider": "local", "instance_type": "local"}}
    words["search"]["space"] = {"width": {"type": "choice", "values": [1, 20]}}
    words["search"]["metric"] = "train_loss"
    given = Experiment.model_validate(words)
    monkeypatch.setattr(module, "rooms", lambda *_: [Room("small.type", 0.6e9, is_gpu=False)])
    report = check_experiment(given, home=tmp_path, search_path=[tmp_path])
    assert report.ok, report.problems
    (line,) = report.memory
    assert "of 600 MB on small.type" in line
    assert "do not fit: width=20 takes " in line
    (warning,) = [remark for remark in report.remarks if remark.startswith("memory: ")]
    assert warning.endswith("and a worker has 600 MB; they will take fewer samples at once, and train longer")
    assert report.to_json()["memory"] == [line]
