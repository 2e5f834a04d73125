"""Data order: every sample exactly once per epoch, whatever the shares, their changes and the restores."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rubberband.executor import GlobalBatchSampler
from rubberband.values.balance import even_shares, scale_shares

shares_lists = st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(lambda shares: sum(shares) > 0)


@settings(max_examples=150, deadline=None)
@given(
    num_samples=st.integers(1, 60),
    seed=st.integers(-(2**70), 2**70),
    steps=st.lists(st.tuples(shares_lists, st.booleans()), min_size=1, max_size=12),
)
def test_every_sample_comes_once_per_epoch_under_changing_shares_and_restores(num_samples, seed, steps):
    sampler = GlobalBatchSampler(num_samples, seed)
    epochs: dict[int, list[int]] = {}
    for step in range(1000):
        if sampler.epoch == 3:
            break
        shares, restore = steps[step % len(steps)]
        if restore:
            sampler = GlobalBatchSampler(num_samples, seed, sampler.epoch, sampler.position)
        epoch, left = sampler.epoch, sampler.remaining
        batch = sampler.next_batch(shares)
        assert batch.size == min(sum(shares), left)
        parts = [batch.of(rank) for rank in range(len(shares))]
        assert [len(part) for part in parts] == list(batch.shares)
        assert np.concatenate(parts).tolist() == batch.indices.tolist()
        epochs.setdefault(epoch, []).extend(batch.indices.tolist())
    for epoch in range(min(3, sampler.epoch)):
        assert sorted(epochs[epoch]) == list(range(num_samples))


@given(num_samples=st.integers(1, 60), batch_size=st.integers(1, 20), workers=st.integers(1, 6))
def test_global_batches_do_not_depend_on_the_workers(num_samples, batch_size, workers):
    alone, gang = GlobalBatchSampler(num_samples, 3), GlobalBatchSampler(num_samples, 3)
    for _ in range(5):
        expected = alone.next_shared(batch_size, 1, even_shares)
        assert gang.next_shared(batch_size, workers, even_shares).indices.tolist() == expected.indices.tolist()
        assert gang.samples_done == alone.samples_done


def test_epochs_and_seeds_have_orders_of_their_own():
    def order(seed, epoch):
        return GlobalBatchSampler(50, seed, epoch).next_batch([50]).indices.tolist()

    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(1, 1)
    assert order(1, 0) != order(2, 0)


@given(batch_size=st.integers(1, 100), workers=st.integers(1, 12))
def test_even_shares_are_as_equal_as_possible_without_a_batch_of_one(batch_size, workers):
    shares = even_shares(batch_size, workers)
    assert len(shares) == workers
    assert sum(shares) == batch_size
    used = [share for share in shares if share]
    assert max(used) - min(used) <= 1
    assert batch_size == 1 or min(used) >= 2
    assert len(used) == workers or batch_size < 2 * workers


@given(shares=shares_lists, data=st.data())
def test_scaled_shares_keep_the_proportion(shares, data):
    batch_size = data.draw(st.integers(1, sum(shares)))
    scaled = scale_shares(shares, batch_size)
    assert sum(scaled) == batch_size
    for share, part in zip(shares, scaled, strict=True):
        assert abs(part - share * batch_size / sum(shares)) < 1


@pytest.mark.parametrize("shares", [[], [0, 0], [3, -1]])
def test_impossible_shares_are_refused(shares):
    with pytest.raises(ValueError, match="shares"):
        GlobalBatchSampler(10, 0).next_batch(shares)


def test_an_empty_dataset_is_refused():
    with pytest.raises(ValueError, match="empty"):
        GlobalBatchSampler(0, 0)


@given(
    num_samples=st.integers(1, 60),
    seed=st.integers(0, 2**31),
    steps=st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=4).filter(any), min_size=1, max_size=40),
    cut=st.integers(0, 40),
)
def test_a_crossing_sampler_repeats_and_skips_nothing_and_gives_whole_batches(num_samples, seed, steps, cut):
    steps = [shares for shares in steps if sum(shares) <= num_samples] or [[1]]
    sampler = GlobalBatchSampler(num_samples, seed, crosses=True)
    seen = []
    for number, shares in enumerate(steps):
        if number == cut:
            sampler = GlobalBatchSampler(num_samples, seed, sampler.epoch, sampler.position, crosses=True)
        batch = sampler.next_batch(shares)
        assert batch.shares == tuple(shares)
        assert np.concatenate([batch.of(rank) for rank in range(len(shares))]).tolist() == batch.indices.tolist()
        seen += batch.indices.tolist()
    assert sampler.samples_done == len(seen)
    whole = GlobalBatchSampler(num_samples, seed)
    assert seen[: len(seen) // num_samples * num_samples] == [
        index for _ in range(len(seen) // num_samples) for index in whole.next_batch([num_samples]).indices.tolist()
    ]


def test_a_batch_of_several_epochs_is_full():
    sampler = GlobalBatchSampler(3, 0, crosses=True)
    batch = sampler.next_shared(10, 2, even_shares)
    assert sorted(batch.indices.tolist()) == sorted([0, 1, 2] * 3 + [int(batch.indices[-1])])
    assert (batch.shares, sampler.epoch, sampler.position, sampler.samples_done) == ((5, 5), 3, 1, 10)


def test_a_last_batch_that_is_full_is_not_dropped():
    sampler = GlobalBatchSampler(8, 0, drop_last=True)
    seen = [sampler.next_shared(4, 1, even_shares).indices.tolist() for _ in range(2)]
    assert sorted(seen[0] + seen[1]) == list(range(8))
    assert sampler.epoch == 1
    sampler = GlobalBatchSampler(7, 0, drop_last=True)
    sampler.next_shared(4, 1, even_shares)
    assert (sampler.epoch, sampler.samples_done) == (1, 7), "the rest counts as used"
