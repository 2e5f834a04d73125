"""The use of machines: rows of looks, the GPU by NVML, and the waits of a segment; by a stand-in driver and clocks."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import rubberband
from rubberband.executor import CheckpointStore, make_store
from rubberband.executor.core.events import TrialReported
from rubberband.executor.journal.journal import decode_event, encode_event
from rubberband.executor.result.batch_history import UseStretch, use_history
from rubberband.executor.training import metering
from rubberband.executor.training.metering import Gpu, Look, Meter, Processes, Rows, make_meter
from rubberband.executor.training.waits import WaitClock
from rubberband.values.machine_use import MachineUse, mean_use
from tests.builders.fake_nvml import FakeNvml
from tests.builders.segments import SEGMENT, reports, train


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    made = FakeNvml()
    forget = made.put(monkeypatch)
    yield made
    forget()


def look(at_s: float, **values: Any) -> Look:
    return Look(**{"at_s": at_s, "cpu_s": 2.0 * at_s, "memory_bytes": 100, **values})


def test_a_row_covers_a_minute_and_the_last_one_the_rest() -> None:
    rows = Rows()
    for at_s in range(0, 150, 5):
        rows.add(look(float(at_s)))
    first = rows.take(150.0)
    assert [(row.seconds, row.ago_s, row.cpu) for row in first] == [(60.0, 90.0, 2.0), (60.0, 30.0, 2.0)]
    rows.add(look(147.0), is_last=True)
    assert [(row.seconds, row.ago_s) for row in rows.take(150.0)] == [(27.0, 3.0)]
    assert rows.take(150.0) == ()


def test_a_row_weighs_looks_by_their_time_and_has_the_most_memory() -> None:
    rows = Rows()
    rows.add(look(0.0, memory_bytes=900, waited_s={"data": 7.0, "checkpoint": 1.0}))
    rows.add(look(5.0, gpu=1.0, watts=300.0, gpu_memory_bytes=40))
    rows.add(look(20.0, gpu=0.2, watts=100.0, gpu_memory_bytes=30))
    rows.add(look(25.0, waited_s={"data": 12.5, "checkpoint": 0.5}), is_last=True)
    (row,) = rows.take(25.0)
    assert (row.gpu, row.watts, row.gpu_memory_bytes, row.memory_bytes) == (0.4, 150.0, 40, 900)
    assert (row.data_s, row.peers_s, row.checkpoint_s) == (5.5, None, 0.0)


def test_a_segment_that_ends_at_once_has_no_row() -> None:
    rows = Rows()
    rows.add(look(1.0))
    rows.add(look(1.0), is_last=True)
    assert rows.take(2.0) == ()


@pytest.mark.parametrize(("visible", "asked"), [("1,0", "GPU-bb"), ("GPU-aa", "GPU-aa")])
def test_a_gpu_is_found_by_its_number_and_by_its_id(nvml: FakeNvml, visible: str, asked: str) -> None:
    gpu = Gpu.find(visible)
    assert gpu is not None
    assert gpu.read() == {"gpu": 0.63, "gpu_memory_bytes": 40 * 10**9, "watts": 231.0}
    assert f"nvmlDeviceGetUtilizationRates {asked}" in nvml.asked


def test_a_part_of_a_gpu_has_its_memory_alone(nvml: FakeNvml) -> None:
    gpu = Gpu.find("MIG-cc")
    assert gpu is not None
    assert gpu.read() == {"gpu_memory_bytes": 40 * 10**9}


@pytest.mark.parametrize("visible", ["", "GPU-gone", "7"])
def test_a_gpu_that_is_not_there_is_none(nvml: FakeNvml, visible: str) -> None:
    assert Gpu.find(visible) is None
    assert ("nvmlInit" in nvml.asked) == bool(visible), "without a GPU no driver is asked"


@pytest.mark.parametrize("fails", ["nvmlInit", "nvmlDeviceGetHandle", "nvmlDeviceGet"])
def test_a_broken_driver_leaves_the_cpu(nvml: FakeNvml, fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metering, "FIRST_S", 0.02)
    nvml.fails = fails
    (row,) = measured(visible="0")
    assert row.gpu is None
    assert row.cpu > 0.0


def measured(visible: str = "", busy_s: float = 0.2) -> tuple[MachineUse, ...]:
    meter = Meter({}, visible=visible)
    until = time.monotonic() + busy_s
    while time.monotonic() < until:
        pass
    rows = meter.take(is_last=True)
    meter.close()
    return rows


def test_a_working_driver_is_asked_while_it_trains(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metering, "FIRST_S", 0.02)
    monkeypatch.setattr(metering, "LOOKS_SHARE", 1.0)
    (row,) = measured(visible="0")
    assert (row.gpu, row.gpu_memory_bytes, row.watts) == (0.63, 40 * 10**9, 231.0)


def test_a_meter_that_fails_lets_training_go_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Once(Processes):
        reads = 0

        def read(self) -> tuple[float, int]:
            self.reads += 1
            if self.reads > 1:
                raise OSError("no /proc")
            return super().read()

    assert Meter({}, processes=Once).take(is_last=True) == ()
    assert "the use of this machine is not measured any more" in caplog.text
    monkeypatch.setattr(Meter.__init__, "__kwdefaults__", {"visible": "", "clock": time.monotonic, "processes": None})
    assert make_meter(SEGMENT, {}) is None


def test_a_wait_counts_while_it_lasts() -> None:
    now = 10.0
    clock = WaitClock(lambda: now)
    with clock:
        now = 12.0
        assert clock.seconds() == 2.0
        now = 13.0
    now = 20.0
    assert clock.seconds() == 3.0


class Slow(Dataset[Any]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, place: int) -> torch.Tensor:
        time.sleep(0.02)
        return torch.ones(2)


class Waits(rubberband.TorchTrial):
    batch_size = 8

    def build_model(self, config: Any) -> torch.nn.Module:
        return torch.nn.Linear(2, 1)

    def build_optimizer(self, config: Any, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def train_dataset(self, config: Any) -> Slow:
        return Slow()

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = model(batch).square().mean()
        return loss


class SlowStore:
    """Takes a while to save."""

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store

    def save(self, *values: Any) -> Any:
        time.sleep(0.3)
        return self._store.save(*values)


def test_the_last_report_of_a_segment_has_its_waits(tmp_path: Path) -> None:
    store: Any = SlowStore(make_store(tmp_path.as_uri()))
    every = reports(train(Waits, store, metric="train_loss", until_iterations=2))
    assert [len(report.use) for report in every] == [0, 1]
    (row,) = every[-1].use
    assert row.data_s == pytest.approx(2 * 16 * 0.02, rel=0.5)
    assert row.checkpoint_s is not None
    assert 0.25 < row.checkpoint_s < 0.9, "the first one is written while it trains, the last one is waited for"
    assert row.peers_s is None
    assert row.seconds > row.data_s
    assert row.memory_bytes > 10**7


USE = MachineUse(seconds=60.0, ago_s=2.0, cpu=0.5, memory_bytes=10**9, gpu=0.63, data_s=12.0, checkpoint_s=0.1)
REPORTED = TrialReported(
    occurred_at=100.0, trial=0, attempt=1, iterations=1, metrics={}, checkpoint=None, use=(USE, USE)
)


def test_a_report_with_its_use_is_journalled_and_an_older_one_has_none() -> None:
    kind, body = encode_event(REPORTED)
    assert decode_event(kind, body) == REPORTED
    older = {name: value for name, value in json.loads(body).items() if name != "use"}
    assert decode_event(kind, json.dumps(older)) == dataclasses.replace(REPORTED, use=())


def test_an_hour_of_a_trial_adds_little_to_its_journal() -> None:
    _, body = encode_event(REPORTED)
    _, without = encode_event(dataclasses.replace(REPORTED, use=()))
    assert 60 * (len(body) - len(without)) / 2 < 15_000, "bytes; a row a minute"


def test_the_use_of_a_gang_is_the_mean_over_its_workers() -> None:
    other = dataclasses.replace(USE, seconds=30.0, cpu=1.5, memory_bytes=3 * 10**9, gpu=0.33, data_s=0.0, peers_s=3.0)
    found = mean_use(USE, [other, dataclasses.replace(USE, gpu=None)])
    assert (found.seconds, found.gpu, found.memory_bytes) == (60.0, 0.48, 3 * 10**9)
    assert (found.cpu, found.data_s, found.peers_s) == (0.833, 8.0, 6.0)
    assert mean_use(USE, []) == USE


def test_a_stretch_ends_where_its_report_says() -> None:
    from rubberband.executor.core.trial_state import TrialReport

    report = TrialReport(reported_at=100.0, iterations=1, metrics={}, stage=2, use=(USE,))
    (stretch,) = use_history([report], 40.0)
    assert isinstance(stretch, UseStretch)
    assert (stretch.stage, stretch.end_s, stretch.gpu) == (2, 58.0, 0.63)
