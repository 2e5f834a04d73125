"""Streams: the same samples in the same order for every gang, number of loader workers, and after a resume."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from rubberband.executor.training.data import Stream
from rubberband.executor.training.loading import Part
from rubberband.values.adaptive import AdaptiveBatch
from tests.builders.loaders import curve, made, raising, run
from tests.builders.segments import content, failure, reports

pytestmark = pytest.mark.usefixtures("one_thread")


def item(index: int) -> dict[str, Any]:
    noise = random.random() + float(np.random.rand()) + float(torch.rand(()))
    x = torch.full((3,), index / 22, dtype=torch.float64) + 0.1 * noise
    return {"index": index, "x": x, "pid": os.getpid()}


class Lines(IterableDataset[Any]):
    """22 samples, in another order each time, drawn from the global random state as a careless reader does."""

    def __iter__(self):
        assert torch.utils.data.get_worker_info() is None
        order = list(range(22))
        random.shuffle(order)
        return map(item, order)


class Plain:
    """Something that can be iterated over, and no more."""

    def __iter__(self):
        return map(item, range(22))


class Sharded(IterableDataset[Any]):
    """22 samples in five shards, as a Hugging Face dataset is divided."""

    num_shards = 5

    def __init__(self, part: range = range(22)) -> None:
        self.part = part

    def shard(self, num_shards, index):
        return Sharded(self.part[index::num_shards])

    def __iter__(self):
        return map(item, self.part)


class Stateful(IterableDataset[Any]):
    """Knows where it is, and says how many samples were read."""

    read = 0

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]

    def __iter__(self):
        while self.at < 22:
            self.at += 1
            type(self).read += 1
            yield item(self.at - 1)
        self.at = 0


STREAMS = [Lines, Plain, Sharded, Stateful]


def streaming(num_workers: int | None, kind: type, **words: Any) -> type:
    words = {"samples_per_iteration": 16, **words}
    return made(num_workers, train_dataset=lambda self, config: kind(), **words)


@pytest.mark.by_default(1)
@pytest.mark.parametrize("kind", STREAMS)
def test_batches_and_curve_do_not_depend_on_the_loader_workers_nor_on_a_resume(store, kind):
    alone = streaming(0, kind)
    expected = curve(reports(run(alone, store)))
    assert [len(batch) for batch in alone.seen] == [8] * 6, "an iteration is two batches; there are no epochs"
    assert len({index for batch in alone.seen for index in batch}) > 12
    before, after = streaming(3, kind), streaming(2, kind)
    (first,) = reports(run(before, store, until_iterations=1))
    rest = reports(run(after, store, from_iterations=1, checkpoint=first.checkpoint))
    assert curve([first, *rest]) == pytest.approx(expected, rel=1e-12)
    assert before.seen + after.seen == alone.seen


@pytest.mark.long
def test_a_reader_with_a_state_does_not_read_again_what_was_trained(store):
    (first,) = reports(run(streaming(1, Stateful), store, until_iterations=1))
    assert content(store, first)["readers"] == {0: (16, 0, {"at": 16})}
    Stateful.read = 0
    reports(run(streaming(0, Stateful), store, from_iterations=1, until_iterations=2, checkpoint=first.checkpoint))
    assert Stateful.read == 16


@given(shards=st.integers(1, 40), batch_size=st.integers(1, 50), steps=st.integers(1, 60))
def test_every_sample_of_each_shard_is_used_once_and_in_order(shards, batch_size, steps):
    dataset = Sharded()
    dataset.num_shards = shards
    stream = Stream(dataset, None, seed=1, batch_size=batch_size)
    seen: dict[int, list[int]] = {}
    for number in range(steps * batch_size):
        shard, index = stream.place(number)
        assert 0 <= shard < shards
        seen.setdefault(shard, []).append(index)
    for indices in seen.values():
        assert indices == list(range(len(indices)))


def test_loader_workers_and_gangs_share_the_shards():
    dataset = Sharded()
    dataset.num_shards = 16
    stream = Stream(dataset, None, seed=1, batch_size=32)
    assert stream.num_turns == 4
    turns = [{stream.place(number)[0] for number in range(32 * step, 32 * step + 32)} for step in range(4)]
    assert [len(shards) for shards in turns] == [4] * 4
    assert set.union(*turns) == set(range(16)), "a loader worker of four reads a quarter of the shards"
    halves = [{stream.place(number)[0] for number in range(start, 32 * 8, 32)} for start in (0, 31)]
    assert not halves[0] & halves[1], "so does a worker of the gang"


def test_a_part_that_was_read_can_be_read_again():
    stream = Stream(Plain(), None, seed=1, batch_size=8)
    parts = [Part(indices=np.arange(start, start + 4), epoch=0) for start in (8, 12, 8, 40)]
    loaded = [stream.load(part)[0]["index"].tolist() for part in parts]
    assert loaded == [[8, 9, 10, 11], [12, 13, 14, 15], [8, 9, 10, 11], [18, 19, 20, 21]]
    again = [stream.load(part)[0]["x"] for part in parts[:2]]
    assert torch.equal(again[0], stream.load(parts[0])[0]["x"])


class Empty(IterableDataset[Any]):
    def __iter__(self):
        return iter(())


class Sized(Lines):
    def __len__(self):
        return 8


class Torn(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from map(item, range(5))
        raising(OSError, "the archive is torn")()


def test_a_stream_that_cannot_be_used_is_refused_with_the_remedy(store):
    endless = failure(run(streaming(0, Lines, samples_per_iteration=None), store)).message
    assert endless == (
        "train_dataset() returned Lines, which has no length; set samples_per_iteration, the training samples of one "
        "iteration"
    )
    assert failure(run(streaming(1, Empty), store)).message == "train_dataset() returned Empty, which is empty"
    adaptive = failure(run(streaming(0, Lines), store, batch=AdaptiveBatch())).message
    assert adaptive == (
        "train_dataset() returned Lines, which is read from front to end and cannot have adaptive batches; leave out "
        "batch in the experiment, or return a dataset with len and [i]"
    )
    torn = failure(run(streaming(1, Torn), store))
    assert torn.message == "OSError: the archive is torn"
    assert "while reading sample 5 of Torn" in torn.details
    assert len(reports(run(streaming(0, Sized, samples_per_iteration=None), store))) == 3
