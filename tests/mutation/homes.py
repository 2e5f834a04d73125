"""Planted bugs of the home: versions of its files, its modes and file systems, and its backups."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

_JOURNAL = ("tests/unit/test_journal.py",)
_FILE_SYSTEMS = ("tests/unit/test_file_systems.py",)

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
    Mutant(
        name="write-ahead-log-on-a-network",
        harm="a login node reads a journal of a compute node wrongly, or damages it",
        file="executor/journal/database.py",
        old="_prepare_shared if _is_shared(url) else _prepare",
        new="_prepare",
        tests=_FILE_SYSTEMS,
    ),
    Mutant(
        name="locks-that-are-not-there",
        harm="two drivers run one experiment, each with its own instances",
        file="rubberband/file_systems.py",
        old="        if error.errno not in _NO_LOCKS:\n            raise\n        number",
        new="        if error.errno in _NO_LOCKS:\n            return True\n        number",
        tests=_FILE_SYSTEMS,
    ),
    Mutant(
        name="journals-for-all-users",
        harm="other users of the machine read configurations and trace-backs",
        file="executor/journal/journal.py",
        old="os.O_EXCL | os.O_CLOEXEC, 0o600",
        new="os.O_EXCL | os.O_CLOEXEC, 0o644",
        tests=_FILE_SYSTEMS,
    ),
)
