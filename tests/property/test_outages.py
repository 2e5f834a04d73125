"""Whatever part of AWS is away, for how long: no healthy instance ends, nothing is left, the bill is what was told."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

import pytest

from tests.harness import replay_command
from tests.harness.outages import OUTAGES, case_of, run_seed

TELLING = (104, 212, 281, 373, 405, 565, 1041, 10688)
"""Seeds that once went wrong."""
SOME, MANY, BLOCKS = 2, 400, 8


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


def failures(seeds: Iterable[int]) -> list[str]:
    """One line for each run that goes wrong, with the command that replays it."""
    found = [one for one in map(run_seed, seeds) if one.outcome.wrong]
    return [f"{replay_command('outages', one.seed)}  # {'; '.join(one.outcome.wrong)}" for one in found]


@pytest.mark.long
def test_no_harm_is_done_in_some_outages() -> None:
    found = failures([*TELLING, *range(SOME)])
    assert not found, "\n".join(found)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_no_harm_is_done_in_many_outages(block: int) -> None:
    found = failures(range(SOME + block, MANY, BLOCKS))
    assert not found, "\n".join(found)


def test_every_kind_of_outage_is_met() -> None:
    assert {stretch.kind for seed in range(200) for stretch in case_of(seed).stretches} == set(OUTAGES)
