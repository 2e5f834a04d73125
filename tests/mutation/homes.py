"""Planted bugs of the home: versions of its files, its modes and file systems, and its backups."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

_JOURNAL = ("tests/unit/test_journal.py",)
_BACKUP = ("tests/unit/test_backup.py",)
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
    # Backups.
    Mutant(
        name="checkpoints-of-the-next-instant",
        harm="a backup lacks checkpoints that its journal names: trials train again from zero",
        file="rubberband/app/backup.py",
        old="            if lost <= before:  #",
        new="            if True:  #",
        tests=_BACKUP,
    ),
    Mutant(
        name="databases-copied-as-files",
        harm="a backup of a home in use has databases without their latest rows, or damaged ones",
        file="api/store/copying.py",
        old="        live.backup(copy)\n",
        new="        Path(target).write_bytes(source.read_bytes())\n",
        tests=_BACKUP,
    ),
    Mutant(
        name="revoked-tokens-come-back",
        harm="who was shut out since the backup may spend money again",
        file="api/store/copying.py",
        old="known.get(record.id, not keep)",
        new="not keep and record.id not in known",
        tests=_BACKUP,
    ),
    Mutant(
        name="half-a-backup-is-restored",
        harm="a backup that a full disk or a bad disk cut replaces a home",
        file="rubberband/app/restore.py",
        old="if (length, found.hexdigest()) != (size, digest):",
        new="if length != size:",
        tests=_BACKUP,
    ),
    Mutant(
        name="homes-in-use-are-replaced",
        harm="a run loses its folder under way, and its instances are paid until their leases end",
        file="rubberband/app/restore.py",
        old="if experiment.driven or is_hosted(experiment):",
        new="if is_hosted(experiment):",
        tests=_BACKUP,
    ),
    Mutant(
        name="used-client-tokens-after-a-restore",
        harm="a restored run gets an instance of EC2 that has ended for each name that it had used",
        file="cloud/aws/launching.py",
        old='f"{run.run}{self._intents.restored}"',
        new="run.run",
        tests=("tests/unit/test_aws_launching.py",),
    ),
)
