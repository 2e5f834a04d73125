"""Edges of bounds: the least and the largest value, and both sides of every limit, of what is rounded or divided."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from rubberband.cloud.aws.calls import share
from rubberband.cloud.pool.state import Machine
from rubberband.executor import Means
from rubberband.executor import WorkerGang as Gang
from rubberband.executor.training.balancing import Balancing, at_least
from rubberband.executor.training.goodput.agent import BatchAgent, ChoiceBudget
from rubberband.executor.training.step import micro_batches
from rubberband.planner.balancing.shares import ShareLimits, held, keeps
from rubberband.spec.space import parse
from rubberband.values.adaptive import BatchLimits
from rubberband.values.balance import Balance, even_shares, scale_shares
from rubberband.values.offer import Offer
from tests.builders import segments
from tests.builders.filled import filled


def edges(*cases: Any) -> Callable[[Any], Any]:
    """Let a property be tried with these cases too, each an argument or a tuple of them."""
    examples = [example(*(case if isinstance(case, tuple) else (case,))) for case in cases]
    return lambda test: reduce(lambda made, one: one(made), reversed(examples), test)


LOWEST, HIGHEST = 2.0**-53, 1.0 - 2.0**-53


@pytest.mark.parametrize(
    ("domain", "least", "largest"),
    [
        ({"type": "uniform", "lower": 0.1, "upper": 0.5}, 0.1, 0.5),
        ({"type": "quniform", "lower": 0.1, "upper": 0.5, "q": 0.1}, 0.1, 0.5),
        ({"type": "quniform", "lower": 0.15, "upper": 0.55, "q": 0.1}, 0.2, 0.5),
        ({"type": "loguniform", "lower": 0.1, "upper": 0.5}, 0.1, 0.5),
        ({"type": "qloguniform", "lower": 0.1, "upper": 0.5, "q": 0.1}, 0.1, 0.5),
        ({"type": "randint", "lower": 1, "upper": 9}, 1, 8),
        ({"type": "randint", "lower": 8, "upper": 9}, 8, 8),
        ({"type": "lograndint", "lower": 16, "upper": 1025}, 16, 1024),
        ({"type": "qrandint", "lower": 16, "upper": 256, "q": 16}, 16, 256),
        ({"type": "qrandint", "lower": 17, "upper": 255, "q": 16}, 32, 240),
        ({"type": "qlograndint", "lower": 16, "upper": 256, "q": 16}, 16, 256),
        ({"type": "choice", "values": [3, 1, 2]}, 3, 2),
    ],
    ids=str,
)
def test_a_domain_reaches_both_its_ends_and_nothing_beyond(domain, least, largest):
    made = parse(domain)
    assert made.draw(LOWEST) == pytest.approx(least, rel=1e-12)
    assert made.draw(HIGHEST) == pytest.approx(largest, rel=1e-12)
    drawn = [made.draw(u) for u in (LOWEST, 0.25, 0.5, 0.75, HIGHEST)]
    assert [made.find(value) for value in drawn] == drawn
    if "q" in domain:
        assert all(abs(value / domain["q"] - round(value / domain["q"])) < 1e-9 for value in drawn)
        assert [made.rounded(value) for value in drawn] == drawn


@given(st.integers(1, 200), st.integers(1, 16))
@edges((1, 1), (1, 8), (2, 2), (3, 2), (15, 8), (16, 8), (17, 8))
def test_even_shares_are_as_even_as_can_be_and_none_is_one(batch_size, num_workers):
    found = even_shares(batch_size, num_workers)
    used = [each for each in found if each]
    assert (sum(found), len(found)) == (batch_size, num_workers)
    assert max(used) - min(used) <= 1
    assert 1 not in used or batch_size == 1
    assert list(found) == sorted(found, reverse=True)
    assert len(used) == num_workers or batch_size < 2 * num_workers


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8).filter(any), st.integers(0, 400))
@edges(([1, 1], 1), ([1, 1, 1], 2), ([0, 5], 3), ([3, 3, 3], 10), ([7], 0))
def test_scaled_shares_are_within_one_of_the_proportion_and_ties_go_to_the_lower_rank(shares, batch_size):
    found = scale_shares(shares, batch_size)
    assert sum(found) == batch_size
    for rank, (one, now) in enumerate(zip(shares, found, strict=True)):
        assert abs(now - one * batch_size / sum(shares)) < 1.0
        assert all(now >= then for other, then in zip(shares[rank:], found[rank:], strict=True) if other == one)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=5), st.integers(1, 200))
@edges(([4, 4], 7), ([4, 4], 8), ([4, 4], 9), ([4, 4], 16), ([4, 4], 17), ([0, 0], 3))
def test_held_limits_hold_the_batch_in_as_few_passes_as_suffice(caps, batch_size):
    found = held(batch_size, ShareLimits(caps=tuple(caps)))
    assert max(found.caps) <= batch_size <= sum(found.caps)
    if any(caps):
        passes = max(1, -(-batch_size // sum(min(cap, batch_size) for cap in caps)))
        assert found.caps == tuple(
            min(passes * min(cap, batch_size) if passes > 1 else cap, batch_size) for cap in caps
        )


@given(st.lists(st.integers(0, 12), min_size=2, max_size=6).filter(any), st.integers(0, 4))
@edges(([1, 5], 2), ([2, 5], 2), ([1, 1], 2))
def test_shares_of_at_least_so_many_keep_their_sum_and_the_largest_takes_the_rest(shares, least):
    found = at_least(shares, least)
    assert sum(found) == sum(shares)
    largest = shares.index(max(shares))
    assert all(found[rank] in (0, shares[rank]) for rank in range(len(shares)) if rank != largest)
    assert keeps(found, ShareLimits(caps=(sum(shares),) * len(shares), least=min(least, max(found))))


@given(st.integers(0, 100), st.integers(1, 40), st.integers(1, 2))
@edges((8, 8, 1), (9, 8, 1), (7, 8, 2), (3, 2, 2), (5, 4, 2), (1, 1, 1), (3, 1, 2), (0, 4, 2))
def test_micro_batches_are_few_and_within_the_limit(size, limit, least):
    parts = micro_batches(torch.arange(size).numpy(), limit, least)
    assert [each for part in parts for each in part] == list(range(size))
    sizes = [len(part) for part in parts]
    if size >= least and limit >= 2 * least - 1:
        assert all(least <= each <= limit for each in sizes)
        assert len(parts) == -(-size // limit)
    if limit <= least:
        assert all(each <= limit + size % limit for each in sizes)
    assert max(sizes, default=0) - min(sizes, default=0) <= 1


@given(st.integers(1, 500), st.integers(1, 60) | st.none(), st.integers(1, 4))
@edges((64, 16, 4), (65, 16, 4), (63, 16, 4), (16, 16, 1), (17, 16, 1), (33, 16, 1))
def test_a_batch_is_split_into_as_few_passes_as_the_memory_holds(batch_size, most, gpus):
    agent = BatchAgent(BatchLimits(initial=1, max=500, max_per_gpu=most), instances=1, gpus=gpus, clock=lambda: 0.0)
    found = agent.split(batch_size)
    passes, share_of_one = found.accumulation + 1, max(even_shares(batch_size, gpus))
    assert found.per_gpu <= (most or math.inf)
    assert passes == -(-share_of_one // (most or share_of_one))
    assert (passes - 1) * found.per_gpu < share_of_one <= passes * found.per_gpu


@given(st.integers(1, 100), st.integers(1, 100), st.booleans())
@edges((3, 4, False), (4, 4, False), (5, 4, False), (100, 100, True))
def test_an_attainable_size_is_within_the_limits(size, most, accumulates):
    limits = BatchLimits(initial=4, max=64, max_per_gpu=most, accumulation=accumulates)
    found = BatchAgent(limits, instances=1, gpus=2, clock=lambda: 0.0).attainable(size)
    cap = 64 if accumulates else max(4, min(64, 2 * most))
    assert found == max(4, min(size, cap))


@given(st.integers(2, 500), st.integers(1, 400))
@edges((2, 1), (3, 1), (4, 3), (5, 3), (100, 75), (100, 76), (100, 99))
def test_a_forbidden_pass_is_not_tried_again_and_a_proven_one_may_be(per_gpu, proven):
    proven = min(proven, per_gpu - 1)
    agent = BatchAgent(BatchLimits(initial=1, max=500), instances=1, gpus=1, clock=lambda: 0.0)
    agent.forbid(per_gpu, proven)
    assert proven <= agent.limits.max_per_gpu < per_gpu
    assert agent.limits.max_per_gpu <= max(proven, 0.75 * per_gpu)


@given(st.floats(0.01, 1.0), st.integers(1, 200), st.integers(2, 8))
@edges((0.5, 4, 2), (0.5, 5, 2), (0.1, 8, 4), (1.0, 7, 2))
def test_a_largest_share_is_never_less_than_an_equal_one(max_share, batch_size, num_workers):
    balancing: Any = Balancing.__new__(Balancing)
    balancing._segment = replace(segments.SEGMENT, num_workers=num_workers, balance=Balance(max_share=max_share))
    balancing._loop = SimpleNamespace(step=SimpleNamespace(least=1, can_skip=True))
    (cap,) = set(balancing.limits(batch_size).caps)
    assert cap == min(batch_size, max(math.floor(max_share * batch_size), -(-batch_size // num_workers)))


@given(st.lists(st.integers(1, 120), min_size=1, max_size=30))
@edges([256, 1], [257], [100, 155], [100, 156], [84, 84, 86], [84, 84, 87])
def test_the_names_of_one_request_fit_into_a_tag(lengths):
    names = ["x" * length for length in lengths]
    found = share(names, "on_demand")
    assert len(" ".join(names[:found])) <= 256 or found == 1
    assert found == len(names) or len(" ".join(names[: found + 1])) > 256
    assert share(names, "spot") == 1


@given(st.floats(0.0, 300.0))
@edges(59.999, 60.0, 60.001, 0.0)
def test_an_instance_is_billed_for_its_minimum_and_then_by_the_second(held_s):
    offer = Offer(instance_type="t", gpus=1, price_usd_per_hour=3600.0, max_instances=1, minimum_billed_s=60.0)
    assert offer.instance_cost_usd(held_s) == pytest.approx(max(60.0, held_s))


@given(st.integers(0, 4 * 3600), st.integers(0, 3))
@edges((3599, 1), (3600, 1), (3601, 1), (7200, 2), (7201, 2))
def test_the_hours_of_a_machine_are_billed_each_at_its_price_and_unknown_ones_at_the_cap(seconds, known):
    prices = (1.0, 2.0, 5.0)[:known]
    machine = filled(
        Machine,
        hour_prices_usd=prices,
        cap_usd_per_hour=9.0,
        running_at=100.0,
        ended_at=None,
        once_usd=0.0,
        minimum_billed_s=0.0,
        slices=[],
    )
    hours = [*prices, *[9.0] * 4]
    expected = math.fsum(hours[second // 3600] for second in range(seconds)) / 3600.0
    assert machine.bill_usd(100.0 + seconds) == pytest.approx(expected)


@given(st.floats(0.0, 10.0), st.floats(1e-4, 10.0), st.floats(0.0, 1e4))
@edges((0.0, 1.0, 0.0), (1.0, 0.01, 0.0))
def test_the_steps_between_looks_are_never_fewer_than_asked(look_s, step_s, remaining_s):
    budget = ChoiceBudget()
    budget.spend(look_s)
    assert budget.interval(20, step_s, remaining_s) >= 20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_sums_of_losses_in_16_bits_are_those_of_64(dtype):
    """300 losses of about 100: the sum of them, and a weight of theirs, has no room in 16 bits."""
    losses = [torch.tensor(100.0 + 0.37 * at, dtype=dtype) for at in range(300)]
    weights: list[Any] = [257 + at % 3 for at in range(300)]
    exact = math.fsum(weight * loss.double().item() for weight, loss in zip(weights, losses, strict=True))
    for counted in (weights, [torch.tensor(float(each), dtype=torch.float64) for each in weights]):
        means, rest = Means(torch.device("cpu")), Means(torch.device("cpu"))
        for at, (weight, loss) in enumerate(zip(counted, losses, strict=True)):
            (means if at % 2 else rest).add(weight, loss, {"error": loss})
        means.join(rest)
        total, sums = means.sums()
        assert total == sum(weights)
        assert sums["loss"] == pytest.approx(exact, rel=1e-13)
        assert sums["error"] == pytest.approx(exact, rel=1e-13)
        assert means.reduce(Gang(0, 1, None))["loss"] == pytest.approx(exact / sum(weights), rel=1e-13)
