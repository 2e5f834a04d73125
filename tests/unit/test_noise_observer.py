"""The observer of real optimizer steps in one process: what it measures, with which P, and what it leaves out."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from rubberband.executor import GradientNoise, NoiseReading, Preconditioner

GRADIENT = torch.linspace(0.0, 0.2, 400, dtype=torch.float64)
SPREAD = torch.linspace(0.5, 1.5, 400, dtype=torch.float64)


class Known(nn.Module):
    """A model whose gradient is normal with mean `GRADIENT` and standard deviations `SPREAD` per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(100, dtype=torch.float64))
        self.second = nn.Parameter(torch.zeros(300, dtype=torch.float64))

    def loss_of(self, size: int) -> Tensor:
        """Mean over that many samples."""
        samples = GRADIENT + SPREAD * torch.randn(size, len(GRADIENT), dtype=torch.float64)
        return (samples @ torch.cat([self.first, self.second])).mean()


def observe(model: nn.Module, optimizer: torch.optim.Optimizer, **changes: object) -> GradientNoise:
    values = {"rank": 0, "num_workers": 1, "initial_batch": 32, "total": lambda tensor: tensor} | changes
    return GradientNoise(optimizer, model, **values)


def train(
    noise: GradientNoise,
    model: Known,
    optimizer: torch.optim.Optimizer,
    parts: Sequence[int],
    steps: int,
    scale: float = 1.0,
) -> NoiseReading:
    """Losses are multiplied by `scale`, and gradients divided by it again before the step."""
    for _ in range(steps):
        optimizer.zero_grad()
        noise.before_step([sum(parts)], parts)
        for size in parts:
            (model.loss_of(size) * (scale * size / sum(parts))).backward()
            noise.after_part()
        noise.before_update()
        for parameter in model.parameters():
            parameter.grad /= scale
        optimizer.step()
    return noise.reading()


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.mark.by_default(1)
@pytest.mark.parametrize(
    ("parts", "kind"), [((32,), "differenced"), ((16, 16), "accumulation"), ((13, 13, 6), "accumulation")]
)
def test_one_worker_measures_trace_and_norm(parts, kind):
    model = Known()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    reading = train(observe(model, optimizer, every=4), model, optimizer, parts, 800)
    assert (reading.kind, reading.estimates) == (kind, 200)
    assert reading.trace == pytest.approx(float(SPREAD.square().sum()), rel=0.15)
    assert reading.squared_norm == pytest.approx(float(GRADIENT.square().sum()), rel=0.15)
    assert reading.noise_scale == pytest.approx(float(SPREAD.square().sum() / GRADIENT.square().sum()), rel=0.05)


@pytest.mark.parametrize("parts", [(32,), (13, 13, 6)])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_the_scale_of_the_loss_changes_nothing(parts, kind):
    readings = []
    for scale in (None, 1024.0):
        torch.manual_seed(0)
        model = Known()
        optimizer = kind(model.parameters(), lr=0.001)
        tensor = None if scale is None else torch.tensor(scale)
        noise = observe(model, optimizer, gradient_scale=lambda tensor=tensor: tensor)
        readings.append(train(noise, model, optimizer, parts, 60, scale or 1.0))
    assert readings[0] == readings[1]


def test_parts_that_count_by_weight_give_the_noise_per_sample():
    model = Known()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    noise, fractions = observe(model, optimizer, every=2), torch.tensor([0.25, 0.75], dtype=torch.float64)
    for _ in range(400):  # of 32 samples, that count 96 together
        optimizer.zero_grad()
        noise.before_step([32], [16, 16])
        noise.weigh(fractions)
        for fraction in fractions.tolist():
            (model.loss_of(round(96 * fraction)) * fraction).backward()
            noise.after_part()
        noise.before_update()
    reading = noise.reading()
    assert (reading.kind, reading.estimates) == ("accumulation", 200)
    assert reading.trace == pytest.approx(float(SPREAD.square().sum()) / 3, rel=0.15)
    assert reading.squared_norm == pytest.approx(float(GRADIENT.square().sum()), rel=0.15)


OPTIMIZERS = {
    "Adam": lambda state: state["exp_avg_sq"].sqrt(),
    "AdamW": lambda state: state["exp_avg_sq"].sqrt(),
    "NAdam": lambda state: state["exp_avg_sq"].sqrt(),
    "RAdam": lambda state: state["exp_avg_sq"].sqrt(),
    "Adamax": lambda state: state["exp_inf"],
    "RMSprop": lambda state: state["square_avg"].sqrt(),
    "Adagrad": lambda state: state["sum"].sqrt(),
}


@pytest.mark.by_default(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_are_scaled_as_the_optimizer_scales_them(name):
    model = Known()
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.0)
    reading = train(observe(model, optimizer), model, optimizer, (16, 16), 200)
    scales = torch.cat([1 / OPTIMIZERS[name](optimizer.state[weight]) for weight in model.parameters()])
    expected = (scales * SPREAD).square().sum() / (scales * GRADIENT).square().sum()
    assert reading.noise_scale == pytest.approx(float(expected), rel=0.1)
    plain = float(SPREAD.square().sum() / GRADIENT.square().sum())
    assert abs(reading.noise_scale / plain - 1.0) > 0.15


def test_with_amsgrad_the_largest_second_moment_counts():
    model = Known()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0, amsgrad=True)
    train(observe(model, optimizer), model, optimizer, (32,), 12)
    for weight in model.parameters():
        optimizer.state[weight]["max_exp_avg_sq"].mul_(4.0)
    state = optimizer.state[model.first]
    vector = Preconditioner(optimizer).now().apply([model.first], [torch.ones_like(model.first)])
    expected = (state["max_exp_avg_sq"] / (1 - 0.999**12)).sqrt() + 1e-8
    torch.testing.assert_close(vector, 1 / expected, rtol=1e-4, atol=0.0)


def test_adam_gives_no_estimate_before_its_second_moments_mean_something():
    model = Known()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    noise = observe(model, optimizer)
    assert train(noise, model, optimizer, (16, 16), 10).estimates == 0
    assert train(noise, model, optimizer, (16, 16), 10).estimates > 0


def test_coordinates_that_never_had_a_gradient_do_not_drown_the_others():
    model = Known()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    train(observe(model, optimizer), model, optimizer, (32,), 20)
    optimizer.state[model.first]["exp_avg_sq"][:50] = 0.0
    vector = Preconditioner(optimizer).now().apply([model.first], [torch.ones_like(model.first)])
    assert not vector[:50].any()
    assert vector[50:].all()


@pytest.mark.parametrize(("kind", "warns"), [("SGD", False), ("ASGD", True)])
def test_an_unknown_optimizer_is_said_to_be_one(kind, warns, caplog):
    model = Known()
    with caplog.at_level(logging.WARNING):
        observe(model, getattr(torch.optim, kind)(model.parameters(), lr=0.0))
    assert ("how ASGD scales them is not known" in caplog.text) == warns


def test_no_pair_reaches_across_a_change_of_the_batch():
    model = Known()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    noise = observe(model, optimizer, every=2)
    for _ in range(20):
        for size in (8, 32):
            reading = train(noise, model, optimizer, (size,), 1)
    assert reading.estimates == 0
    for _ in range(200):
        for size in (8, 8, 32, 32):
            reading = train(noise, model, optimizer, (size,), 1)
    assert reading.trace == pytest.approx(float(SPREAD.square().sum()), rel=0.1)


def test_a_state_travels_to_another_estimator_and_phi_is_kept_until_it_has_its_own():
    model = Known()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    noise = observe(model, optimizer)
    before = train(noise, model, optimizer, (32,), 400)
    other = observe(model, optimizer)
    other.load_state_dict(noise.state_dict())
    assert other.reading() == before
    after = train(other, model, optimizer, (16, 16), 8)
    assert after.kind == "accumulation"
    assert after.noise_scale == before.noise_scale
    assert after.uncertainty >= before.uncertainty


def test_a_loss_that_is_not_a_number_leaves_phi_as_it_is():
    model = Known()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    noise = observe(model, optimizer)
    before = train(noise, model, optimizer, (16, 16), 200)
    model.first.data.fill_(1.0)
    optimizer.zero_grad()
    noise.before_step([32], [16, 16])
    for _ in range(2):
        (model.loss_of(16) * float("nan")).backward()
        noise.after_part()
    noise.before_update()
    assert noise.reading() == before


def test_frozen_unused_sparse_and_complex_parameters():
    table = nn.Embedding(8, 4, sparse=True).double()
    plain = nn.Parameter(torch.zeros(400, dtype=torch.float64))
    paired = nn.Parameter(torch.zeros(200, dtype=torch.complex128))
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    unused = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = torch.optim.SGD([table.weight, plain, frozen, unused, paired], lr=0.0)
    noise = observe(table, optimizer)
    for _ in range(400):
        optimizer.zero_grad()
        noise.before_step([32], [16, 16])
        for _ in range(2):
            samples = (GRADIENT + SPREAD * torch.randn(16, 400, dtype=torch.float64)).mean(dim=0)
            real, imaginary = torch.view_as_real(paired).reshape(-1)[:200], torch.view_as_real(paired).reshape(-1)[200:]
            loss = samples @ plain + samples[:200] @ real + samples[200:] @ imaginary
            ((loss + table(torch.tensor([1, 3])).sum() * 1000.0) / 2).backward()
            noise.after_part()
        noise.before_update()
    reading = noise.reading()
    # The complex parameter's real coordinates have the gradient of the plain one again, and the table is left out.
    assert reading.trace == pytest.approx(2 * float(SPREAD.square().sum()), rel=0.05)
    assert reading.squared_norm == pytest.approx(2 * float(GRADIENT.square().sum()), rel=0.1)
