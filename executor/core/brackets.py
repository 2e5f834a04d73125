"""Brackets of a job: chains of stages, each with trials of its own. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rubberband.values.plan import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Bracket:
    """One successive halving of a job: a chain of its stages, with trials of its own."""

    bracket: int = 0
    """Its number, as the scheduler lists them."""
    first_stage: int = 0
    num_stages: int
    first_trial: int = 0
    lane: int = 0

    @property
    def end_stage(self) -> int:
        """The stage after its last one."""
        return self.first_stage + self.num_stages


def brackets_of(stages: Sequence[Sequence[Stage]], lanes: Sequence[Sequence[int]]) -> tuple[Bracket, ...]:
    """Return the brackets of a job, in the order of its stages: lane by lane. Empty if there is only one.

    `stages` are those of each bracket, as the scheduler lists them; trials are numbered in that order. `lanes` are the
    brackets of each lane, by number.
    """
    if len(stages) == 1:
        return ()
    found, first_stage = list[Bracket](), 0
    for lane, numbers in enumerate(lanes):
        for number in numbers:
            first_trial = sum(bracket[0].trials for bracket in stages[:number])
            count = len(stages[number])
            found.append(
                Bracket(bracket=number, first_stage=first_stage, num_stages=count, first_trial=first_trial, lane=lane)
            )
            first_stage += count
    return tuple(found)
