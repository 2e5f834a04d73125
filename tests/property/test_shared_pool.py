"""Pools in random weather: tenants, real controllers, promises and budgets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders.budget import examples
from tests.harness import replay_command
from tests.harness.pool_runs import PoolRun
from tests.harness.shared_pool import SharedRun, wrong_end

FEW, MANY = 5, 1_000


def failures(seeds: Iterable[int], seen: Counter[str], *, odd: bool = False, sick: bool = False) -> list[str]:
    """Return a line for each seed that ends as it must not, with the command that replays it."""
    found = []
    for seed in seeds:
        run = SharedRun(seed, odd=odd, sick=sick)
        if wrong := wrong_end(run):
            found.append(f"{replay_command('shared_pool', seed, odd=odd, sick=sick)}  # {wrong}")
        seen.update(run.seen)
    return found


def test_experiments_that_share_a_pool_get_what_they_were_promised_and_pay_what_they_held() -> None:
    seen: Counter[str] = Counter()
    found = failures(range(FEW), seen)
    assert not found, "\n".join(found)
    assert {"broker dies", "driver dies", "promise kept", "refused", "ended done", "scaled"} <= set(seen)


def test_a_pool_keeps_its_caps_in_odd_orders_too() -> None:
    seen: Counter[str] = Counter()
    found = failures(range(2), seen, odd=True)
    assert not found, "\n".join(found)
    odd = {"answer lost", "limit by hand", "service restarts"}
    assert odd <= set(seen)


@pytest.mark.long
def test_a_sick_machine_costs_an_experiment_its_own_time_only() -> None:
    seen: Counter[str] = Counter()
    found = failures([0, 57, 110], seen, sick=True)
    assert not found, "\n".join(found)
    assert {"cut off", "its workers did not start", "its Ray node stopped answering", "retired as silent"} <= set(seen)


@pytest.mark.parametrize("seed", [929, 2218, 2509, 3587, 20837, 21357])
def test_a_promised_deadline_is_kept_whatever_others_do(seed: int) -> None:
    assert not failures([seed], Counter())


def test_an_instance_that_is_lent_no_more_does_not_block_the_pool() -> None:
    assert not failures([2342], Counter())


@pytest.mark.parametrize("seed", [1235, 8683])
def test_nothing_is_billed_after_a_lease_though_driver_and_broker_were_dead_as_it_ended(seed: int) -> None:
    assert not failures([seed], Counter())


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, 10 * MANY, MANY))
def test_ten_thousand_of_them(first: int) -> None:
    found = failures(range(first, first + MANY), Counter()) + failures(range(first, first + MANY), Counter(), sick=True)
    assert not found, "\n".join(found)


@pytest.mark.long
def test_a_broker_that_expires_no_lease_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rubberband.cloud.pool.broker.Broker.expiries", lambda broker, at: [])
    assert any(failures([seed], Counter()) for seed in range(FEW))


@given(st.integers(0, 2**32))
@settings(deadline=None, max_examples=examples(30))
def test_a_pool_keeps_its_promises_in_random_weather(seed: int) -> None:
    PoolRun(seed).run()
