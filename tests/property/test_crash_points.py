"""Wherever the driver dies, in whatever weather: no orphan, no double launch, nothing billed that the ledger misses."""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import replace
from random import Random

import pytest

from rubberband.cloud.aws import calls, cleanup, fleet, guards
from rubberband.cloud.aws.intents import Intents
from rubberband.executor import Controller
from tests.builders.budget import examples
from tests.harness import replay_command
from tests.harness.crash_cases import AFTERWARDS, HIDDEN_S, WEATHERS, Point, Then, parse, undisturbed
from tests.harness.crash_points import point_of, points, run_point, sample

SOME, FEW = examples(150), 40
BLOCKS = 4


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """A driver warns of what was given up and runs all the same; here that is often so."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def found_out(chosen: Iterable[Point], words: str) -> bool:
    """Whether a point ends as it must not, and these words say so; it is the last that is run."""
    return any(words in line for line in wrong_ends(chosen))


def failures(chosen: Iterable[Point]) -> list[str]:
    """One line for each point that ends as it must not, with the command that replays it."""
    return list(wrong_ends(chosen))


def wrong_ends(chosen: Iterable[Point]) -> Iterator[str]:
    for found in map(run_point, chosen):
        if found.wrong:
            yield f"{replay_command('crash_points', str(found.point))}  # {'; '.join(found.wrong)}"


@pytest.mark.by_default(3)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_at_some_points(block: int) -> None:
    found = failures(sample(SOME)[block::BLOCKS])
    assert not found, "\n".join(found)


def test_trials_that_have_ended_by_themselves_train_no_more_wherever_the_driver_dies() -> None:
    ending = [point for point in points() if point.markets == "ending"]
    found = failures(Random(0).sample(ending, SOME // 3))
    assert not found, "\n".join(found)


def test_a_rule_ends_trials_and_the_search_wherever_the_driver_dies() -> None:
    stopping = [point for point in points() if point.markets == "stopping"]
    found = failures(Random(0).sample(stopping, SOME // 3))
    assert not found, "\n".join(found)


def test_experiments_with_all_features_lose_nothing_wherever_the_driver_dies() -> None:
    found = failures(map(point_of, range(SOME // 10)))
    assert not found, "\n".join(found)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("block", range(8))
def test_many_experiments_with_all_features(block: int) -> None:
    found = failures(map(point_of, range(block, 2000, 8)))
    assert not found, "\n".join(found)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("block", range(8 * BLOCKS))
def test_at_every_point(block: int) -> None:
    found = failures(points()[block :: 8 * BLOCKS])
    assert not found, "\n".join(found)


def test_points_are_of_every_kind_and_one_is_what_its_words_say() -> None:
    every = points()
    assert len(every) > 10_000
    assert {point.weather for point in every} == set(WEATHERS)
    assert all(parse(str(point), Point) == point for point in every[:: len(every) // 100])


def test_a_point_is_one_story() -> None:
    def story(point: Point) -> list[str]:
        lines: list[str] = []
        run_point(point, lines.append)
        return lines

    for point in sample(3):
        assert story(point) == story(point)


def unseen(then: Then) -> list[Point]:
    """A few of those at which nothing that is launched is seen for long."""
    return [point for point in sample(5_000) if point.hidden_s == max(HIDDEN_S) and point.then == then][:FEW]


def test_a_driver_that_writes_nothing_down_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Intents, "_save", lambda *_: None)
    monkeypatch.setattr(calls, "client_token", lambda *_: secrets.token_hex(32))
    assert found_out(unseen("resume"), "was bought 2 times")
    assert found_out(unseen("sweep"), "lives on")


def test_a_driver_that_trusts_the_first_missing_answer_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "VISIBILITY_S", 0.0)
    monkeypatch.setattr(cleanup, "VISIBILITY_S", 0.0)
    assert found_out(unseen("sweep"), "lives on")


def test_a_driver_that_lets_leases_reach_beyond_the_budget_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Controller, "hold_until", lambda _: math.inf)
    gone = [replace(undisturbed("on_demand", "tight"), kill_at=at, then="nobody") for at in (60, 65, 70)]
    assert found_out(gone, "are billed of max_cost")


def test_a_ledger_that_counts_every_hour_at_the_first_price_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    dear_later = [undisturbed("hours", "roomy")]
    assert failures(dear_later) == []
    found = fleet._with_more
    monkeypatch.setattr(fleet, "_with_more", lambda *of: (hours := found(*of))[:1] * len(hours))
    assert found_out(dear_later, "USD are billed, and the ledger says")


def test_a_release_under_way_when_the_driver_dies_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user cancels a run of three instances; its driver dies at the first, second or third order to end one."""
    at = range(50, 70)
    dead = [replace(undisturbed("on_demand", "roomy"), kill_at=k, cancelled=3, after=k % 2 == 0) for k in at]
    releasing = [point for point in dead if run_point(point).died_in == ["TerminateInstances"]]
    assert len(releasing) > 5
    assert failures(replace(point, then=then) for point in releasing for then in AFTERWARDS) == []
    monkeypatch.setattr(fleet.Ec2Fleet, "terminate_all", lambda *_: [])
    assert found_out((replace(point, then="sweep") for point in releasing), "lives on")


def test_a_guest_that_hangs_when_its_driver_is_dead_is_ended_by_its_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    hung = [replace(undisturbed("on_demand", "roomy"), kill_at=at, then="nobody", hung=True) for at in (50, 55, 60)]
    assert failures(hung) == []
    monkeypatch.setattr(guards, "SLACK_S", 7200.0)
    assert found_out(hung, "lives on")
