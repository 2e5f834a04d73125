"""Loader workers: the samples that there would be without them, in order; their failures are the trial's alone."""

from __future__ import annotations

import copy
import multiprocessing
import os
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Subset

from rubberband.executor import Feed, GlobalBatchSampler, GradientNoise
from rubberband.executor.training.data import DatasetBatches
from rubberband.executor.training.loading import LoaderSettings, Part
from rubberband.executor.training.sampler import sample_keys
from rubberband.values.balance import even_shares
from tests.builders import segments
from tests.builders.loaders import Augmented, curve, made, raising, run
from tests.builders.segments import failure, reports

pytestmark = pytest.mark.usefixtures("one_thread")

SEGMENT = replace(segments.SEGMENT, until_iterations=3)


def test_batches_and_curve_do_not_depend_on_the_loader_workers_nor_on_a_resume_in_mid_epoch(store):
    alone = made(0, samples_per_iteration=8)
    expected = curve(reports(run(alone, store)))
    assert len({index for batch in alone.seen for index in batch}) == 22, "an epoch"
    before, after = made(1, samples_per_iteration=8), made(3, samples_per_iteration=8)
    (first,) = reports(run(before, store, until_iterations=1))
    rest = reports(run(after, store, from_iterations=1, checkpoint=first.checkpoint))
    assert curve([first, *rest]) == pytest.approx(expected, rel=1e-12)
    assert before.seen + after.seen == alone.seen


def test_parts_of_a_batch_are_loaded_ahead_too(store):
    whole = made(0)
    parts = made(2, max_batch_size_per_gpu=3)
    assert curve(reports(run(whole, store))) == pytest.approx(curve(reports(run(parts, store))), rel=1e-12)
    assert parts.seen[0] + parts.seen[1] + parts.seen[2] == whole.seen[0]


class CannotBeReadBack(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


class Broken(Augmented):
    """Does what it is told at sample 5."""

    def __init__(self, act):
        self.act = act

    def __getitem__(self, index):
        if index == 5:
            self.act()
        return super().__getitem__(index)


@pytest.mark.by_default(2)
@pytest.mark.parametrize(
    ("act", "kind", "message"),
    [
        (raising(KeyError, "no picture"), "raised", "KeyError: 'no picture'"),
        (raising(CannotBeReadBack, 1, 2), "raised", "CannotBeReadBack: 1 and 2"),
        (raising(SystemExit, "enough"), "raised", "SystemExit: enough"),
        (lambda: os._exit(3), "died", "a loader worker ended with exit code 3; raise an exception instead"),
        (
            lambda: os.kill(os.getpid(), 9),
            "died",
            "a loader worker was killed, as where memory runs out; use fewer of them (num_workers), or smaller batches",
        ),
    ],
    ids=["raises", "raises what cannot be pickled", "exits", "ends its process", "is killed"],
)
def test_a_failing_loader_worker_fails_the_trial_and_leaves_no_process(store, act, kind, message):
    trial = made(2, train_dataset=lambda self, config: Broken(act))
    failed = failure(run(trial, store))
    assert (failed.kind, failed.message, failed.secondary) == (kind, message, False)
    if kind == "raised":
        assert "in act\n    raise error(*words)" in failed.details
    assert len(reports(run(made(2), store))) == 3, "the process is well"


def test_a_loader_worker_that_ends_at_once_is_named_as_well_as_a_later_one(store, monkeypatch):
    honest = torch._C._remove_worker_pids

    def late(*words):
        time.sleep(0.5)  # a busy machine: loader workers start, and would end, before torch's own watch is off
        honest(*words)

    monkeypatch.setattr(torch._C, "_remove_worker_pids", late)
    trial = made(2, train_dataset=lambda self, config: Broken(lambda: os._exit(3)))
    failed = failure(run(trial, store))
    assert failed.kind == "died", failed
    assert failed.message.startswith("a loader worker ended with exit code 3")


def test_a_sample_that_cannot_be_loaded_is_named(store):
    trial = made(1, train_dataset=lambda self, config: Broken(raising(ValueError, "torn")))
    assert "while loading sample 5 of Broken" in failure(run(trial, store)).details


def test_a_loader_worker_that_hangs_is_ended_after_its_trace_is_printed(store, capfd):
    trial = made(2, train_dataset=lambda self, config: Broken(lambda: threading.Event().wait()), loader_timeout_s=3)
    failed = failure(run(trial, store))
    assert failed.kind == "hung"
    assert failed.message.startswith("loader workers gave no batch in loader_timeout_s=3 s; the trial's log shows")
    printed = capfd.readouterr().err
    hanging = [trace for trace in printed.split("loader worker ")[1:] if f'File "{__file__}"' in trace]
    assert hanging, printed


@pytest.mark.long
def test_a_loader_worker_is_prepared_with_its_copy_of_the_dataset(store):
    def prepare(self, worker, dataset):
        assert multiprocessing.parent_process() is not None
        dataset.offset = 1 + worker // 2

    class Offset(Augmented):
        offset = 0

        def __getitem__(self, index):
            return {"index": index, "x": torch.full((3,), float(self.offset), dtype=torch.float64)}

    def loss(self, model, batch):
        assert (batch["x"] == 1.0).all()
        return (model(batch["x"]) ** 2).mean()

    words = {"train_dataset": lambda self, config: Offset(), "loss": loss}
    assert len(reports(run(made(2, worker_init=prepare, **words), store))) == 3
    broken = made(2, worker_init=lambda self, worker, dataset: raising(OSError, "no disk")())
    assert failure(run(broken, store)).message == "OSError: no disk"


@pytest.mark.parametrize("change", ["attribute", "of a subset", "in place", "nothing"])
def test_loader_workers_see_a_new_attribute_and_what_the_trial_reloads(store, change):
    class Curriculum(Augmented):
        epoch = 0

        def __init__(self):
            self.table = np.zeros(2)

        def __getitem__(self, index):
            told = torch.full((3,), float(self.epoch + self.table[0]), dtype=torch.float64)
            return {"index": index, "x": told, "pid": os.getpid()}

    def dataset(self, config):
        self.data = Curriculum()
        return Subset(self.data, range(len(self.data))) if change == "of a subset" else self.data

    def on_iteration(self, model, iterations):
        if change == "in place":
            self.data.table.fill(iterations)
            self.reload_data()
        elif change != "nothing":
            self.data.epoch = iterations

    def loss(self, model, batch):
        self.seen.append((float(batch["x"][0, 0]), int(batch["pid"][0])))
        return (model(batch["x"]) ** 2).mean()

    trial = made(1, train_dataset=dataset, on_iteration=on_iteration, loss=loss)
    assert len(reports(run(trial, store))) == 3
    is_changed = change != "nothing"
    assert [told for told, _ in trial.seen] == ([1.0] * 3 + [2.0] * 3 + [3.0] * 3 if is_changed else [0.0] * 9)
    assert len({pid for _, pid in trial.seen}) == (3 if is_changed else 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"num_workers": -1}, "num_workers=-1 is no integer of at least 0; use one"),
        ({"num_workers": 1.5}, "num_workers=1.5 is no integer of at least 0; use one"),
        ({"prefetch_factor": 0}, "prefetch_factor=0 is no integer of at least 1; use one"),
        ({"loader_timeout_s": 0}, "loader_timeout_s=0 is no positive number; use seconds"),
        (
            {"drop_last": True, "batch_size": 23},
            "drop_last leaves nothing of the 22 samples of train_dataset() in batches of 23; use smaller batches, or "
            "drop_last = False",
        ),
    ],
)
def test_bad_words_are_refused_in_a_line(store, words, message):
    assert failure(run(made(**{"num_workers": 0, **words}), store)).message == message


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_last_batch_of_an_epoch_may_be_dropped(store, num_workers):
    trial = made(num_workers, drop_last=True)
    assert len(reports(run(trial, store))) == 3
    assert [len(batch) for batch in trial.seen] == [8, 8] * 3


@pytest.mark.parametrize(
    ("cpus", "in_memory", "expected"), [(1, False, 0), (4, False, 3), (64, False, 8), (4, True, 0)]
)
def test_by_default_there_are_as_many_as_cpus_without_one(cpus, in_memory, expected):
    wanted = LoaderSettings(
        num_workers=None, prefetch_factor=2, timeout_s=9.0, cpus=cpus, start=lambda worker, dataset: None
    )
    assert wanted.count(0 if in_memory else None) == expected
    assert replace(wanted, num_workers=5).count(0 if in_memory else None) == 5


class Changing:
    """A feed whose batches change their size, as adaptive ones do."""

    def __init__(self, num_workers: int) -> None:
        wanted = LoaderSettings(
            num_workers=num_workers, prefetch_factor=2, timeout_s=60.0, cpus=1, start=lambda worker, dataset: None
        )
        self.feed = Feed(Augmented(), device=torch.device("cpu"), collate=None, seed=3, batch_size=4, settings=wanted)
        self.feed.ahead = self._ahead
        self.sampler = GlobalBatchSampler(22, 3, crosses=True)
        self.size = 4

    def _ahead(self) -> Iterator[Part]:
        sampler = copy.copy(self.sampler)

        def parts() -> Iterator[Part]:
            while True:
                batch = sampler.next_shared(self.size, 1, even_shares)
                yield Part(indices=batch.indices, epoch=batch.epoch)

        return parts()

    def step(self, size: int) -> dict[str, Any]:
        self.size = size
        batch = self.sampler.next_shared(size, 1, even_shares)
        self.feed.expect([batch.indices], batch.epoch)
        loaded: dict[str, Any] = self.feed.load(batch.indices)
        assert loaded["index"].tolist() == batch.indices.tolist()
        return loaded


@settings(max_examples=4, deadline=None)
@given(sizes=st.lists(st.sampled_from([1, 4, 9]), min_size=1, max_size=12))
def test_a_change_of_the_batch_takes_effect_at_once_and_nothing_is_skipped_or_repeated(sizes):
    loaded, alone = Changing(2), Changing(0)
    try:
        for size in sizes:
            ours, expected = loaded.step(size), alone.step(size)
            assert (ours["pid"] != os.getpid()).all()
            assert torch.equal(ours["x"], expected["x"])
    finally:
        loaded.feed.close()


def test_unforeseen_parts_are_loaded_in_this_process_and_are_the_same_samples():
    feed = Changing(1)
    try:
        whole = feed.step(8)
        halves = [feed.feed.load(half)["x"] for half in np.array_split(whole["index"].numpy(), 2)]
        assert torch.equal(torch.cat(halves), whole["x"])
        assert (feed.step(8)["pid"] != os.getpid()).all(), "the loader workers go on"
    finally:
        feed.feed.close()


@pytest.mark.parametrize("every", [2, 3, 7])
def test_batches_in_halves_are_foreseen(every):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    noise = GradientNoise(optimizer, model, rank=0, num_workers=1, initial_batch=8, total=lambda values: values)
    noise.halves_every = every
    for _ in range(4):  # from any state
        foreseen = [noise.wants_halves(8, steps) for steps in range(12)]
        found = []
        for _ in range(11):
            found.append(noise.wants_halves(8))
            noise.before_step([8], [4, 4] if found[-1] else [8])
        assert found == foreseen[:11]
        assert any(found)
    noise.close()


@pytest.mark.long
def test_the_evaluation_set_is_loaded_by_workers_too_as_often_as_it_is_evaluated(store):
    def evaluate(self, model, loader):
        batches = list(loader)
        assert (batches[0]["pid"] == os.getpid()).all() == (self.num_workers == 0)
        assert [batch["index"].tolist() for batch in loader][1:] == [list(range(8, 16)), list(range(16, 22))]
        next(iter(loader))  # and goes no further
        return {"x": float(sum(batch["x"].sum() for batch in batches))}

    words = {"eval_dataset": lambda self, config: Augmented(), "evaluate": evaluate}
    found = [
        [report.metrics["x"] for report in reports(run(made(count, **words), store, until_iterations=2))]
        for count in (0, 2)
    ]
    assert found[0] == pytest.approx(found[1], rel=1e-12)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: [random.getrandbits(32) for _ in range(624)],
        lambda: random.gauss(),
        lambda: np.random.randint(0, 2**32, 624, dtype=np.uint32).tolist(),
        lambda: torch.randint(2**31, (624,)).tolist(),
    ],
    ids=["as many as Python's generator holds", "normal", "as many as numpy's holds", "as many as torch's holds"],
)
def test_any_draw_is_seen_and_follows_from_the_sample_alone(draw):
    class Drawing(list[Any]):
        def __getitem__(self, index):
            return {"x": torch.tensor(draw(), dtype=torch.float64)}

    keys = sample_keys(3, 0, np.arange(4))
    alone, together = (DatasetBatches(Drawing([0] * 4), None) for _ in range(2))  # type: ignore[arg-type]
    expected = together.batch(np.arange(4), keys)["x"]
    found = [alone.batch(np.array([place]), [keys[place]])["x"] for place in (2, 0, 3, 1)]
    assert torch.equal(torch.cat(found), expected[[2, 0, 3, 1]])


def test_cheap_samples_are_seeded_only_if_they_draw():
    samples = DatasetBatches(Augmented(), None)
    keys = sample_keys(3, 0, np.arange(4))
    torch.manual_seed(1)
    first = samples.batch(np.arange(4), keys)["x"]
    torch.manual_seed(2)
    assert torch.equal(samples.batch(np.arange(4), keys)["x"], first)
    assert torch.equal(DatasetBatches(Augmented(), None).batch(np.arange(2, 4), keys[2:])["x"], first[2:])
    torch.manual_seed(2)
    state = torch.get_rng_state()
    quiet = DatasetBatches([{"x": torch.ones(2)}] * 9, None)  # type: ignore[arg-type]
    quiet.batch(np.arange(4), keys)
    assert torch.equal(torch.get_rng_state(), state)
