"""Bugs in what a new user meets first: the installation, the first commands, and their words."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="tests-in-the-users-home",
        harm="after a run, tests fail by the start times that it measured",
        file="tests/conftest.py",
        old='os.environ["HOME"] = str(tmp_path_factory.mktemp("home"))',
        new="pass",
        tests=("tests/unit/test_documents.py::test_tests_read_nothing_of_the_users_home",),
    ),
)
