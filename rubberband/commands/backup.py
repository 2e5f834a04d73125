"""`rubberband backup` and `rubberband restore`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

StoreUrl = Annotated[
    str | None,
    typer.Option("--store", help="The store's URL; without it, RUBBERBAND_STORE, or the files of the home."),
]


def backup(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder to write; it must be new or empty.")],
    store: StoreUrl = None,
) -> None:
    """Back up experiments, service and pools, while they run.

    The backup has all of RUBBERBAND_HOME: every experiment's journal with the checkpoints that it names, the service's
    store (SQLite or PostgreSQL), and the pools. Checkpoints that are kept elsewhere, as on S3, are named and not
    copied. The file manifest.json is written last: a backup without it is not whole.
    """
    from rubberband.installation import default_home, default_store
    from rubberband.running.backup import back_up
    from rubberband.units import counted

    made = back_up(default_home(), folder, store or default_store(), _say)
    size = f"{made.size_bytes / 1e6:.1f} MB"
    print(f"backed up {made.home} to {folder}: {counted(len(made.experiments), 'experiment')}, {size}")


def restore(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the backup.")],
    store: StoreUrl = None,
    keep_tokens: Annotated[
        bool, typer.Option("--keep-tokens", help="Keep tokens that the present store does not know.")
    ] = False,
    all_homes: Annotated[
        bool, typer.Option("--all-homes", help="Replace a store's experiments of other homes too.")
    ] = False,
) -> None:
    """Restore a home from a backup.

    Stop the service, the experiments and the pools first. Every file is compared with the backup's manifest before
    anything is replaced, and the present files of the home are moved aside. Browser sessions end. A token stays valid
    if the present store has it and it is not revoked there; the others are revoked, as they may have been revoked since
    the backup.
    """
    from rubberband.installation import default_store, restored_home
    from rubberband.running.restore import restore as put_back
    from rubberband.units import counted

    done = put_back(
        folder, restored_home(), store or default_store(), keep_tokens=keep_tokens, announce=_say, all_homes=all_homes
    )
    if done.before is not None:
        _say(f"the files that were there are in {done.before}; delete them when you need them no more")
    if done.revoked:
        _say(
            f"{counted(done.revoked, 'token')} revoked that the present store does not know as valid; make new ones "
            "with `rubberband token create`"
        )
    experiments = counted(len(done.manifest.experiments), "experiment")
    print(
        f"restored {done.manifest.home} from {folder}: {experiments}; continue "
        "those that ran with `rubberband resume NAME`, or start the service"
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
