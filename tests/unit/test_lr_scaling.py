"""Rules for the learning rate, and that the schedule's own values come back."""

from __future__ import annotations

import math

import pytest
import torch

from rubberband.executor import TrialFailure, make_lr_scaling, scaled_lr

WEIGHTS = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))]
SGD = torch.optim.SGD(WEIGHTS, lr=0.1)
RULES = """
def good(initial, batch_size, noise_scale):
    return 1.0 + noise_scale / batch_size

def nan(initial, batch_size, noise_scale):
    return float("nan")

def negative(initial, batch_size, noise_scale):
    return -1

def fails(initial, batch_size, noise_scale):
    raise KeyError("oops")

def words(initial, batch_size, noise_scale):
    return "fast"

def of_two(initial, batch_size):
    return 1.0

number = 3
"""


@pytest.fixture
def _rules(tmp_path, monkeypatch):
    (tmp_path / "my_rules.py").write_text(RULES)
    (tmp_path / "my_broken_rules.py").write_text("import no_such_module")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    ("name", "noise_scale", "expected"),
    [
        ("linear", 100.0, 4.0),
        ("sqrt", 100.0, 2.0),
        ("adascale", 0.0, 1.0),
        ("adascale", 256.0, 4 * (256 + 64) / (256 + 256)),
        ("adascale", None, 1.0),
        ("adascale", 1e12, 4.0),
    ],
)
def test_rules_give_the_formula(name, noise_scale, expected):
    assert make_lr_scaling(name, SGD, 1.0).factor(64, 256, noise_scale, 3.0) == pytest.approx(expected)


@pytest.mark.parametrize(("epochs", "expected"), [(0.0, 1.0), (4.0, 1.5), (8.0, 2.0), (100.0, 2.0)])
def test_legw_warms_up_over_as_many_more_epochs_as_the_batch_is_larger(epochs, expected):
    assert make_lr_scaling("legw", SGD, 2.0).factor(64, 256, None, epochs) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["linear", "sqrt", "adascale", "legw"])
def test_at_the_initial_batch_size_the_rate_is_the_users_own(name):
    assert make_lr_scaling(name, SGD, 5.0).factor(64, 64, 1000.0, 0.5) == 1.0


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("SGD", "adascale"), ("Adam", "sqrt"), ("AdamW", "sqrt"), ("RMSprop", "sqrt"), ("ASGD", "adascale")],
)
def test_the_default_goes_by_the_optimizer(kind, expected):
    assert make_lr_scaling(None, getattr(torch.optim, kind)(WEIGHTS), 1.0).name == expected


@pytest.mark.usefixtures("_rules")
def test_a_users_own_rule():
    scaling = make_lr_scaling("my_rules:good", SGD, 1.0)
    assert scaling.factor(64, 128, 256.0, 0.0) == 3.0


@pytest.mark.usefixtures("_rules")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_rules:nan", "lr_scaling=my_rules:nan for M0=64, M=128, phi=256 gave nan; it must give a positive number"),
        ("my_rules:negative", "gave -1.0; it must"),
        ("my_rules:fails", "failed: KeyError: 'oops'"),
        ("my_rules:words", "failed: ValueError: could not convert string to float"),
    ],
)
def test_an_unscalable_learning_rate_is_refused(name, message):
    with pytest.raises(TrialFailure) as caught:
        make_lr_scaling(name, SGD, 1.0).factor(64, 128, 256.0, 0.0)
    assert message in str(caught.value)
    assert caught.value.kind == "raised"
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("_rules")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("adscale", "use one of adascale, linear, sqrt, legw, or module:function; did you mean 'adascale'?"),
        ("my_rules:missing", "lr_scaling=my_rules:missing cannot be imported: AttributeError"),
        ("my_broken_rules:good", "cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"),
        ("nowhere:good", "cannot be imported: ModuleNotFoundError"),
        ("my_rules:number", "is no function of (M0, M, phi)"),
        ("my_rules:of_two", "is no function of (M0, M, phi)"),
    ],
)
def test_rules_that_are_not_there(name, message):
    with pytest.raises(TrialFailure) as caught:
        make_lr_scaling(name, SGD, 1.0)
    assert message in str(caught.value)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_the_rate_is_scaled_for_one_step_and_comes_back_exactly(as_tensor):
    rates: list[float | torch.Tensor] = [0.1, 0.3]
    if as_tensor:
        rates = [torch.tensor(rate, dtype=torch.float64) for rate in rates]
    groups = [{"params": [weight], "lr": rate} for weight, rate in zip(WEIGHTS, rates, strict=True)]
    optimizer = torch.optim.SGD(groups)
    with scaled_lr(optimizer, math.pi):
        assert [float(group["lr"]) for group in optimizer.param_groups] == [0.1 * math.pi, 0.3 * math.pi]
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.1, 0.3]
    assert all(group["lr"] is rate for group, rate in zip(optimizer.param_groups, rates, strict=True))


def test_the_rate_comes_back_where_the_step_fails():
    optimizer = torch.optim.SGD(WEIGHTS, lr=0.1)
    with pytest.raises(RuntimeError), scaled_lr(optimizer, 2.0):
        raise RuntimeError
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_schedule_sees_its_own_values_only():
    optimizer = torch.optim.SGD(WEIGHTS, lr=1.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(3):
        with scaled_lr(optimizer, 8.0):
            optimizer.step()
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.125
