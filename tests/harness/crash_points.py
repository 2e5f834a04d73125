"""Crash points: a driver on EC2 is killed before and after every call of a whole run, in all weathers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from random import Random

from tests.harness.crash_cases import CAP_USD, MARKETS, TOGETHER, Point, parse, point_together, points_of, undisturbed
from tests.harness.crash_story import Outcome, Story


@lru_cache(maxsize=1)
def points(seed: int = 0) -> Sequence[Point]:
    """All of them, which take longer to draw than a hundred take to run; another seed draws others."""
    return tuple(point for markets in MARKETS for point in points_of(markets, calls_of_a_run(markets), seed))


def point_of(seed: int) -> Point:
    """Return a point of the experiment that a seed draws, which runs undisturbed for that."""
    with folder() as here:
        story = Story(undisturbed(f"{TOGETHER}{seed}", "roomy"), here)
        story.tell()
        assert not story.wrong(), f"undisturbed, {seed}: {story.wrong()}"
        return point_together(seed, story.world.operations())


def sample(count: int) -> list[Point]:
    return Random(0).sample(points(), count)


@lru_cache
def calls_of_a_run(markets: str) -> Mapping[str, Sequence[str]]:
    """Cap -> the calls of a run that nothing disturbs, from its first look at the account to its end."""
    calls = {}
    for cap in CAP_USD:
        with folder() as here:
            story = Story(undisturbed(markets, cap), here)
            story.tell()
            assert (story.ended, story.wrong()) == ("done", [])
            calls[str(cap)] = story.world.operations()
    return calls


def folder() -> tempfile.TemporaryDirectory[str]:
    """In memory where there is such a place: what is written there is written for good at once."""
    return tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)


def run_point(point: Point, log: Callable[[str], None] = lambda line: None) -> Outcome:
    with folder() as here:
        story = Story(point, here, log)
        try:
            story.tell()
        except AssertionError as error:
            story.found.append(f"{error or 'an assertion failed'}")
            story.ended = "broken"
        return story.outcome()


def tell(words: str) -> None:
    outcome = run_point(parse(words, Point), print)
    print(f"{outcome.ended}: {outcome.drivers} drivers, {outcome.instances} instances bought")
    print(f"billed {outcome.billed_usd:.6f} USD, ledger {outcome.ledger_usd:.6f}")
    for what in outcome.wrong:
        print(f"WRONG: {what}")
