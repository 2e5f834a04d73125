"""The comparison of two checkouts: a checkout is the same as itself, and what differs is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.compare_checkouts import differences, figures_of, main

ROOT = str(Path(__file__).parents[2])


@pytest.mark.long
def test_a_checkout_is_the_same_as_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([ROOT, ROOT, "--jobs", "3"]) == 0
    assert [line.split(" (")[0] for line in capsys.readouterr().out.splitlines()] == [
        f"{section}: same" for section in ("names", "flags", "service", "replays", "plans")
    ]


def test_a_figure_that_differs_is_shown_with_its_question() -> None:
    lines = list(differences({"a": 1, "b": {"cost_usd": 1.0}}, {"a": 1, "b": {"cost_usd": 1.5}}, allow_text=False))
    assert lines[:2] == ["--- old: b", "+++ new: b"]
    assert lines[-2:] == ['+ "cost_usd": 1.5', " }"]


def test_an_answer_of_one_side_alone_is_a_difference() -> None:
    assert "+1" in list(differences({}, {"a": 1}, allow_text=False))


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("lower it to 5 or less", "use 5 at most", True),
        ("lower it to 5 or less", "use 6 at most", False),
        ("done", "over", False),
        ({"help": "Done."}, {"help": "Over."}, True),
        ({"stdout": "a\nscreen 1"}, {"stdout": "another\nscreen"}, True),
        ({"stdout": {"state": "done"}}, {"stdout": {"state": "over"}}, False),
    ],
)
def test_sentences_may_differ_and_their_numbers_may_not(old: object, new: object, same: bool) -> None:
    assert (figures_of(old) == figures_of(new)) is same
