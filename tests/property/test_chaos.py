"""Whatever goes wrong: the bill never passes the cap, nothing outlives its lease, every run ends, little stops it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal

import pytest

from rubberband.executor import Controller
from rubberband.executor.core import limits
from tests.harness import replay_command
from tests.harness.chaos import Outcome, run_seed
from tests.harness.chaos_cases import LEARNING, Family

FEW, BLOCK = 80, 40
AnyFamily = Family | Literal["together"] | None


def failures(
    seeds: Iterable[int], family: AnyFamily = None, *, check_every: int = 5, stops_at: int = 9, **options: Any
) -> str:
    """A line for each seed that ends as it must not, with the command that replays it; a few of them are enough."""
    lines = list[str]()
    for seed in seeds:
        if wrong := run_seed(seed, family, check_every=check_every, **options).wrong:
            lines.append(f"{replay_command('chaos', seed, family, **options)}  # {'; '.join(wrong)}")
        if len(lines) >= stops_at:
            break
    return "\n".join(lines)


@pytest.mark.by_default(1)
@pytest.mark.parametrize("first", range(0, FEW, BLOCK))
def test_in_any_weather_no_run_costs_more_than_its_cap_or_leaves_anything_behind(first: int) -> None:
    assert not failures(range(first, first + BLOCK), check_every=10)


SOME: list[tuple[AnyFamily, int, dict[str, bool]]] = [
    ("brackets", 15, {"replan": False}),
    ("asha", 25, {}),
    ("caps", 15, {"replan": False}),
    ("caps", 8, {"replan": False, "odd": True}),
    (None, 10, {"replan": False, "ends": True}),
    (None, 2, {"replan": True, "ends": True}),
    *((family, 5, dict[str, bool]()) for family in LEARNING),
    ("random", 6, {"replan": True, "listed": True}),
    ("caps", 20, {"replan": False, "listed": True}),
    *((family, 8, {"replan": False, "stops": True}) for family in (None, "brackets", "asha")),
    ("together", 60, {}),
]
"""Families with options of `run_seed`, and how many of each."""
MORE: list[tuple[AnyFamily, int, dict[str, bool]]] = [
    *((family, 3, {"replan": True}) for family in (None, "brackets", "caps")),
    *((family, 10, {"replan": False, "ends": True}) for family in ("brackets", "asha", "caps")),
    *((family, 2, {"replan": True, "ends": True}) for family in ("brackets", "asha", "caps")),
    ("random", 40, {"replan": False, "listed": True}),
    ("brackets", 40, {"listed": True}),
    *((family, 10, {"replan": True, "stops": True}) for family in (None, "brackets", "caps")),
]


@pytest.mark.parametrize(
    ("family", "seeds", "options"), [*SOME, *(pytest.param(*case, marks=pytest.mark.long) for case in MORE)], ids=str
)
def test_runs_of_every_kind_obey_their_plans_and_caps_and_lose_nothing(
    family: AnyFamily, seeds: int, options: dict[str, bool]
) -> None:
    """Lanes, rungs, caps that change, odd orders, trials that end by themselves or by rules, samplers, listed sizes.

    Together: all of these, and trials that are added, clones, repeats, limits, populations.
    """
    assert not failures(range(seeds), family, check_every=1 if "listed" in options else 5, **options)


MANY: list[tuple[AnyFamily, int, int, dict[str, bool]]] = [
    (None, 10, 1, {}),
    ("brackets", 4, 1, {"replan": False}),
    ("asha", 4, 10, {}),
    ("caps", 3, 5, {"replan": False}),
    ("caps", 20, 10, {"replan": False, "odd": True}),
    *((family, 1, 10, dict[str, bool]()) for family in LEARNING),
    ("together", 10, 5, {}),
    *((family, 1, 10, {"replan": True}) for family in (None, "brackets", "caps")),
    *((family, 1, 10, {"replan": False, "ends": True}) for family in (None, "brackets", "asha", "caps")),
    *((family, 1, 10, {"replan": False, "stops": True}) for family in (None, "brackets", "asha", "caps")),
]
"""Families, how many thousands of them, and after how many events each is looked at."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "thousand", "check_every", "options"),
    [(family, at, every, options) for family, count, every, options in MANY for at in range(count)],
    ids=str,
)
def test_many_thousands(family: AnyFamily, thousand: int, check_every: int, options: dict[str, bool]) -> None:
    seeds = range(1000 * thousand, 1000 * (thousand + 1))
    assert not failures(seeds, family, check_every=check_every, **options)


@pytest.mark.parametrize(
    ("family", "seeds"),
    [
        pytest.param("brackets", (4066, 12389, 16615), id="leases that expired while a driver slept failed no start"),
        pytest.param("27 trials", (50188, 50483, 50734), id="trials that hang on one instance do not fail the run"),
        pytest.param("caps", (90113,), id="rungs go on once there may be instances again"),
        pytest.param("27 trials", (20458,), id="what the driver before gave back as it started failed no start"),
        pytest.param("asha that learns", (22156,), id="nor where rungs learn"),
        pytest.param("together", (954,), id="a bracket that is added has a plan where the planner refuses"),
        pytest.param("together", (1635,), id="no instance is held where no gang fits"),
    ],
)
def test_seeds_that_once_went_wrong(family: AnyFamily, seeds: tuple[int, ...]) -> None:
    assert not failures(seeds, family, **({} if family == "together" else {"replan": False}))


def test_a_climbing_trial_that_is_interrupted_moves_to_the_instance_bought_for_it() -> None:
    outcome = run_seed(50541, "asha", replan=False)
    assert (outcome.ended, outcome.wrong) == ("done", ())
    assert outcome.num_instances == 1 + outcome.seen["taken away by the provider"]


def test_lanes_do_not_hand_an_idle_instance_to_and_fro_once_trials_have_ended() -> None:
    assert not failures([120], "brackets", replan=False, ends=True)


def test_a_seed_is_one_run() -> None:
    def story(outcome: Outcome) -> tuple[object, ...]:
        return outcome.case, outcome.ended, outcome.bill_usd, outcome.num_events, outcome.story

    for seed in range(5):
        assert story(run_seed(seed, keeps_story=True)) == story(run_seed(seed, keeps_story=True))


@pytest.mark.long
def test_the_weather_brings_everything_that_it_names() -> None:
    seen: Counter[str] = Counter()
    ended: Counter[str] = Counter()
    for seed in range(150):
        outcome = run_seed(seed, check_every=1000)
        seen += outcome.seen
        ended[outcome.ended] += 1
    assert set(ended) == {"done", "budget", "failed", "cancelled", "abandoned"}
    assert len(seen) == 26, sorted(seen)


def test_a_controller_that_reserves_nothing_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "affordable", lambda state, wanted=1: wanted)
    monkeypatch.setattr(Controller, "hold_until", lambda controller: float("inf"))
    assert "the provider bills" in failures(range(60), check_every=1000, stops_at=1)


def test_a_controller_that_watches_no_budget_is_stopped_by_its_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's own stop is gone; the leases, cut at the budget's end, still hold the bill below the cap."""
    monkeypatch.setattr(limits, "over_budget", lambda state, ticked: None)
    assert "the provider bills" not in failures(range(20), check_every=10_000, stops_at=20)
