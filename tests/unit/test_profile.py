from __future__ import annotations

import pytest

from rubberband.values.profile import Profile


@pytest.mark.parametrize(
    ("table", "lines"),
    [
        ({1: 10.0}, []),
        ({1: 10.0, 2: 6.0, 4: 4.0}, []),
        ({1: 10.0, 2: 10.0}, []),
        ({1: 10.0, 2: 6.0, 16: 2.0}, ["nothing is measured between 2 and 16 GPUs; times there are interpolated"]),
        ({4: 3.0, 1: 10.0, 2: 6.0, 8: 4.5}, ["slower with 8 GPUs (4.5 s) than with 4 (3 s)"]),
        ({1: 1.0, 8: 2.0}, ["nothing is measured between 1 and 8 GPUs", "slower with 8 GPUs (2 s) than with 1 (1 s)"]),
    ],
)
def test_gaps_and_times_that_go_up_are_legal_and_reported(table: dict[int, float], lines: list[str]) -> None:
    notes = Profile(seconds_per_iteration=table).notes()
    assert len(notes) == len(lines)
    assert all(part in note and "\n" not in note for note, part in zip(notes, lines, strict=True))


def test_a_gap_is_linear_in_throughput() -> None:
    assert Profile(seconds_per_iteration={1: 12.0, 4: 4.0}).iteration_s(2) == pytest.approx(
        1 / (1 / 12 + (1 / 4 - 1 / 12) / 3)
    )
