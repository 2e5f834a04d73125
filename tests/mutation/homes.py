"""Planted bugs of the home: versions of its files, its modes and file systems, and its backups."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

_JOURNAL = ("tests/unit/test_journal.py",)

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="unknown-fields-of-events-dropped",
        harm="after a downgrade, a run goes on without a limit that its journal has",
        file="executor/journal/journal.py",
        old='with_config(ConfigDict(extra="forbid"))(Event)',
        new='with_config(ConfigDict(extra="ignore"))(Event)',
        tests=_JOURNAL,
    ),
    Mutant(
        name="newer-journals-read",
        harm="a journal whose words mean something else is replayed as if they meant the same",
        file="executor/journal/journal.py",
        old='int(signed["version"]) > VERSION',
        new='int(signed["version"]) > 9',
        tests=_JOURNAL,
    ),
    Mutant(
        name="orders-of-newer-services-obeyed",
        harm="a process starts a run without the limit that its service ordered",
        file="executor/journal/hosting.py",
        old='@with_config(ConfigDict(extra="forbid"))',
        new='@with_config(ConfigDict(extra="ignore"))',
        tests=("tests/unit/test_service_runs_standing.py",),
    ),
)
