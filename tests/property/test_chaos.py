"""Whatever goes wrong: the bill never passes the cap, nothing outlives its lease, every run ends, little stops it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import pytest

from rubberband.executor import Controller
from rubberband.executor.core import limits
from tests.harness.chaos import Outcome, replay_command, run_seed
from tests.harness.chaos_cases import LEARNING, Family

FEW, MANY, BLOCK = 160, 1_000, 80


def failures(
    seeds: Iterable[int],
    *,
    check_every: int,
    replan: bool | None = None,
    family: Family | None = None,
    ends: bool = False,
    odd: bool = False,
) -> list[str]:
    """One line for each seed that ends as it must not, with the command that replays it."""
    return list(wrong_ends(seeds, check_every=check_every, replan=replan, family=family, ends=ends, odd=odd))


def wrong_ends(
    seeds: Iterable[int],
    *,
    check_every: int,
    replan: bool | None = None,
    family: Family | None = None,
    ends: bool = False,
    odd: bool = False,
) -> Iterator[str]:
    for seed in seeds:
        wrong = run_seed(seed, family, check_every=check_every, replan=replan, ends=ends, odd=odd).wrong
        if wrong:
            yield f"{replay_command(seed, family, replan=replan, ends=ends, odd=odd)}  # {'; '.join(wrong)}"


@pytest.mark.by_default(1)
@pytest.mark.parametrize("first", range(0, FEW, BLOCK))
def test_in_any_weather_no_run_costs_more_than_its_cap_or_leaves_anything_behind(first: int) -> None:
    found = failures(range(first, first + BLOCK), check_every=10)
    assert not found, "\n".join(found)


@pytest.mark.long
def test_replanning_at_every_sync_obeys_its_plans_and_loses_nothing() -> None:
    found = failures(range(10), check_every=10, replan=True)
    assert not found, "\n".join(found)


@pytest.mark.by_default(1)
@pytest.mark.parametrize(("seeds", "replan"), [(30, False), (3, True)])
def test_brackets_in_lanes_keep_all_that_one_does(seeds: int, replan: bool) -> None:
    found = failures(range(seeds), check_every=5, replan=replan, family="brackets")
    assert not found, "\n".join(found)


def test_a_driver_that_slept_while_instances_started_goes_on() -> None:
    """Their leases expired meanwhile, which is no failure to start."""
    seeds = (4066, 12389, 16615)
    found = failures(seeds, check_every=5, replan=False, family="brackets")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("seed", [50188, 50483, 50734])
def test_an_instance_on_which_trials_hang_does_not_fail_the_run(seed: int) -> None:
    assert not failures([seed], check_every=5, replan=False, family="27 trials")


def test_a_climbing_trial_that_is_interrupted_moves_to_the_instance_bought_for_it() -> None:
    outcome = run_seed(50541, "asha", replan=False)
    assert (outcome.ended, outcome.wrong) == ("done", ())
    assert outcome.num_instances == 1 + outcome.seen["taken away by the provider"]


def test_an_experiment_with_rungs_goes_on_once_it_may_have_instances_again() -> None:
    assert not failures([90113], check_every=5, replan=False, family="caps")


@pytest.mark.parametrize(("seed", "family"), [(20458, "27 trials"), (22156, "asha that learns")])
def test_instances_that_the_driver_before_gave_back_as_they_started_failed_no_start(seed: int, family: Family) -> None:
    found = failures([seed], check_every=5, replan=False, family=family)
    assert not found, "\n".join(found)


def test_trials_that_climb_rungs_keep_all_that_stages_do() -> None:
    found = failures(range(50), check_every=5, family="asha")
    assert not found, "\n".join(found)


@pytest.mark.by_default(1)
@pytest.mark.parametrize(("seeds", "replan"), [(30, False), (3, True)])
def test_an_instance_cap_is_kept_from_checkpoint_to_checkpoint_and_nothing_is_lost(seeds: int, replan: bool) -> None:
    found = failures(range(seeds), check_every=5, replan=replan, family="caps")
    assert not found, "\n".join(found)


@pytest.mark.long
@pytest.mark.parametrize(("first", "replan"), [(0, False), (1, False), (2, False), (3, False), (0, True)])
def test_four_thousand_with_caps_that_change(first: int, replan: bool) -> None:
    count = MANY // 4 if replan else MANY
    found = failures(range(first * MANY, first * MANY + count), check_every=5, replan=replan, family="caps")
    assert not found, "\n".join(found)


def test_resumes_with_other_caps_lost_answers_and_clocks_that_step_back_harm_no_run() -> None:
    found = failures(range(15), check_every=5, replan=False, family="caps", odd=True)
    assert not found, "\n".join(found)


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, 20 * MANY, MANY))
def test_twenty_thousand_in_odd_orders(first: int) -> None:
    found = failures(range(first, first + MANY), check_every=10, replan=False, family="caps", odd=True)
    assert not found, "\n".join(found)


@pytest.mark.by_default(1)
@pytest.mark.parametrize(("family", "seeds"), [(None, 20), ("brackets", 10), ("asha", 15), ("caps", 10)])
def test_trials_that_end_by_themselves_train_no_more_and_keep_their_rank(family: Family | None, seeds: int) -> None:
    found = failures(range(seeds), check_every=5, replan=False, family=family, ends=True)
    found += failures(range(2), check_every=5, replan=True, family=family, ends=True)
    assert not found, "\n".join(found)


def test_lanes_do_not_hand_an_idle_instance_to_and_fro_once_trials_have_ended() -> None:
    assert not failures([120], check_every=5, replan=False, family="brackets", ends=True)


@pytest.mark.long
@pytest.mark.parametrize("family", [None, "brackets", "asha", "caps"])
def test_four_thousand_whose_trials_end_by_themselves(family: Family | None) -> None:
    found = failures(range(MANY), check_every=10, replan=False, family=family, ends=True)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("family", LEARNING)
def test_configurations_that_follow_from_results_are_drawn_once_each(family: Family) -> None:
    found = failures(range(10), check_every=5, family=family)
    assert not found, "\n".join(found)


@pytest.mark.long
@pytest.mark.parametrize("family", LEARNING)
def test_a_thousand_that_learn(family: Family) -> None:
    found = failures(range(MANY), check_every=10, family=family)
    assert not found, "\n".join(found)


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, 4 * MANY, MANY))
def test_four_thousand_that_climb_rungs(first: int) -> None:
    found = failures(range(first, first + MANY), check_every=10, family="asha")
    assert not found, "\n".join(found)


@pytest.mark.long
@pytest.mark.parametrize("family", [None, "brackets"])
def test_a_thousand_that_are_planned_again(family: Family | None) -> None:
    found = failures(range(MANY), check_every=10, replan=True, family=family)
    assert not found, "\n".join(found)


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, 4 * MANY, MANY))
def test_four_thousand_of_several_brackets(first: int) -> None:
    found = failures(range(first, first + MANY), check_every=1, replan=False, family="brackets")
    assert not found, "\n".join(found)


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, 10 * MANY, MANY))
def test_ten_thousand(first: int) -> None:
    found = failures(range(first, first + MANY), check_every=1)
    assert not found, "\n".join(found)


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
    assert any("the provider bills" in line for line in wrong_ends(range(60), check_every=1000))


def test_a_controller_that_watches_no_budget_is_stopped_by_its_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's own stop is gone; the leases, cut at the budget's end, still hold the bill below the cap."""
    monkeypatch.setattr(limits, "over_budget", lambda state, ticked: None)
    found = failures(range(30), check_every=10_000)
    assert not any("the provider bills" in line for line in found), "\n".join(found)


@pytest.mark.by_default(2)
@pytest.mark.parametrize(
    ("family", "replan"), [("random", False), ("random", True), ("caps", False), ("brackets", None)]
)
def test_no_gang_and_no_plan_has_a_number_of_gpus_that_is_not_listed(family: Family, replan: bool | None) -> None:
    seeds = range(12 if replan else 40)
    outcomes = [run_seed(seed, family, check_every=1, replan=replan, listed=True) for seed in seeds]
    wrong = [
        f"{replay_command(seed, family, replan=replan, listed=True)}  # {'; '.join(outcome.wrong)}"
        for seed, outcome in zip(seeds, outcomes, strict=True)
        if outcome.wrong
    ]
    assert not wrong, "\n".join(wrong)
