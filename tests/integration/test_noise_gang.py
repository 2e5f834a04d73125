"""The gradient noise of a gang of real processes: training is as it is without, and the numbers are right."""

from __future__ import annotations

import pytest
import torch

from rubberband.executor.training.goodput.noise_scale import moments
from tests.builders.processes.noise_worker import Model, Scenario, batch_of, loss_of, run_gang


def of_one_process(shares: tuple[int, ...], counts: tuple[int, ...] = ()) -> tuple[float, float]:
    """tr Sigma and |G|^2 of the first step, from the workers' mean gradients, which count by `counts` or shares."""
    model, batch_size = Model(), sum(shares)
    counts = counts or shares
    inputs, targets = batch_of(0, batch_size)
    mean_square, mean, first = 0.0, torch.zeros(()), 0
    for share, count in zip(shares, counts, strict=True):
        if not share:
            continue
        model.zero_grad()
        loss_of(model, inputs[first : first + share], targets[first : first + share]).backward()
        gradient = torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])
        mean_square += count / sum(counts) * float(gradient @ gradient)
        mean = mean + count / sum(counts) * gradient
        first += share
    num_parts = sum(share > 0 for share in shares)
    return moments(mean_square, float(mean @ mean), num_parts=num_parts, batch_size=batch_size)


@pytest.mark.parametrize(
    "scenarios",
    [
        [
            Scenario(shares=(8, 8), steps=1),
            Scenario(shares=(9, 3), steps=1, are_views=True),
            Scenario(shares=(6, 6), steps=1, counts=(20, 80)),
            Scenario(shares=(9, 3), steps=1, limit=4, has_unused=True),
            Scenario(shares=(9, 3), steps=1, limit=4, has_unused=True, are_views=True),
            Scenario(shares=(9, 3), steps=1, limit=4, scale=65536.0),
            *(Scenario(shares=(8, 8), steps=1, is_compressed=True, are_views=views) for views in (False, True)),
        ],
        [Scenario(shares=(9, 0, 3), steps=1, limit=4)],
    ],
    ids=["two workers", "one of three without samples"],
)
def test_the_gradients_of_all_workers_give_the_estimate(scenarios):
    for scenario, outcomes in zip(scenarios, run_gang(scenarios), strict=True):
        trace, squared_norm = of_one_process(tuple(scenario.shares), tuple(scenario.counts))
        first = outcomes[0].reading
        assert (first.kind, first.estimates) == ("workers", 1), scenario
        rounding = 0.005 * trace / sum(scenario.shares) if scenario.is_compressed else 0.0  # of A and B, in bfloat16
        assert first.trace == pytest.approx(trace, rel=0.005 if rounding else 1e-12), scenario
        assert first.squared_norm == pytest.approx(squared_norm, rel=1e-12, abs=rounding), scenario
        assert all(outcome.reading == first for outcome in outcomes), scenario


def test_training_is_the_same_as_without():
    scenarios = [
        Scenario(shares=(9, 3), steps=60, limit=4),
        Scenario(shares=(9, 3), steps=60, limit=4, are_views=True, optimizer="Adam"),
        Scenario(shares=(8, 8), steps=60, has_unused=True, optimizer="Adam"),
        Scenario(shares=(5, 0), steps=60),
        Scenario(shares=(9, 3), steps=60, optimizer="Adam", scale=1024.0, is_compressed=True),
    ]
    for scenario, outcomes in zip(scenarios, run_gang(scenarios), strict=True):
        for outcome in outcomes:
            assert outcome.weights == pytest.approx(outcome.plain_weights, rel=0.0, abs=1e-12), scenario
        first = outcomes[0].reading
        assert first.kind == ("workers" if all(scenario.shares) else "differenced")
        assert first.noise_scale is not None
        assert all(outcome.reading == first for outcome in outcomes), scenario
