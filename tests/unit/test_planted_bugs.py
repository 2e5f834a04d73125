"""Every bug of tests/mutation can still be planted: its text is where it says, and so are its tests."""

from __future__ import annotations

from functools import cache

from tests.mutation.__main__ import ROOT
from tests.mutation.all import MUTANTS


@cache
def text(file: str) -> str:
    path = ROOT / file
    return path.read_text("utf-8") if path.is_file() else ""


def test_the_text_that_a_planted_bug_replaces_occurs_once_in_its_file() -> None:
    counts = {(bug.name, bug.file): text(bug.file).count(bug.old) for bug in MUTANTS}
    assert {place: count for place, count in counts.items() if count != 1} == {}


def test_the_tests_that_should_notice_a_planted_bug_exist() -> None:
    named = {(bug.name, test) for bug in MUTANTS for test in bug.tests}
    missing = set()
    for bug, test in named:
        file, _, function = test.partition("::")
        if f"def {function.split('[')[0]}(" not in text(file) if function else not text(file):
            missing.add((bug, test))
    assert missing == set()
