"""`rubberband token`, `backup` and `restore`: tokens of the service, and copies of all that is kept."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rubberband.commands.common import argument, group, say
from rubberband.commands.serve import StoreOption
from rubberband.errors import InputError
from rubberband.units import instant_text, shown

if TYPE_CHECKING:
    from rubberband.api.security import Tokens
    from rubberband.api.store.schema import TokenRecord

token = group("token", "Manage the tokens of a service.")


class Scope(StrEnum):
    """Rights of a token; each scope includes those before it."""

    read = "read"
    submit = "submit"
    admin = "admin"


@token.command()
def create(
    name: Annotated[str, argument("NAME", "The token's owner or purpose.")],
    scope: Annotated[
        Scope,
        typer.Option(
            "--scope",
            help="read: see everything, preview plans; submit: start, extend, resume and cancel as well; admin: "
            "tokens as well.",
        ),
    ] = Scope.read,
    expires: Annotated[
        str | None,
        typer.Option("--expires", metavar="DURATION", help="Time until it expires, such as 90d. [default: never]"),
    ] = None,
    store: StoreOption = None,
) -> None:
    """Create a token and print it. It cannot be shown again, because only its hash is kept."""
    from rubberband.units import parse_duration

    if not name.strip() or not name.isprintable() or len(name) > 64:
        raise InputError(f"the name {shown(name)} must have 1 to 64 printable characters; name the token's owner")
    lasts_s = None if expires is None else parse_duration(expires)
    with _tokens(store) as tokens:
        record, text = tokens.create(name.strip(), scope.value, lasts_s=lasts_s)
    made = f"token {record.id} of {record.name}: {record.scope}, {_until(record)}; keep it, it is not shown again"
    print(made, file=sys.stderr)
    print(text)


@token.command(name="list")
def list_(store: StoreOption = None) -> None:
    """List the tokens, without their secrets."""
    from rich.console import Console
    from rich.table import Table

    table = Table("id", "name", "scope", "made", "state", "last used", box=None, pad_edge=False)
    with _tokens(store) as tokens:
        for record in tokens.records():
            used = "never" if record.last_used_at is None else instant_text(record.last_used_at)
            table.add_row(record.id, record.name, record.scope, instant_text(record.created_at), _state(record), used)
    Console(soft_wrap=True).print(table)


@token.command()
def revoke(id: Annotated[str, argument("ID", "The token's id, as listed.")], store: StoreOption = None) -> None:
    """Revoke a token and its browser sessions.

    A running service applies this within seconds.
    """
    with _tokens(store) as tokens:
        if not tokens.revoke(id):
            known = ", ".join(record.id for record in tokens.records()) or "none"
            raise InputError(f"there is no token {shown(id)}; there are: {known}")
    print(f"token {id} is revoked", file=sys.stderr)


@contextmanager
def _tokens(store: str | None) -> Iterator[Tokens]:
    from rubberband.api.security import Tokens
    from rubberband.api.store import open_store
    from rubberband.installation import default_home, default_store

    opened = open_store(store or default_store(), default_home())
    try:
        yield Tokens(opened)
    finally:
        opened.close()


def _state(record: TokenRecord) -> str:
    if record.revoked_at is not None:
        return f"revoked {instant_text(record.revoked_at)}"
    if record.expires_at is not None and record.expires_at <= time.time():
        return f"expired {instant_text(record.expires_at)}"
    return _until(record)


def _until(record: TokenRecord) -> str:
    return "never expires" if record.expires_at is None else f"expires {instant_text(record.expires_at)}"


StoreUrl = Annotated[
    str | None, typer.Option("--store", help="The store's URL; without it, RUBBERBAND_STORE, or the files of the home.")
]


def backup(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder to write; it must be new or empty.")],
    store: StoreUrl = None,
) -> None:
    """Back up experiments, service and pools.

    They may run meanwhile. The backup contains all of RUBBERBAND_HOME: every experiment's journal with the checkpoints
    that it names, the service's store (SQLite or PostgreSQL), and the pools. Checkpoints that are kept elsewhere, as on
    S3, are named and not copied. The file manifest.json is written last; a backup without it is incomplete.
    """
    from rubberband.installation import default_home, default_store
    from rubberband.running.backup import back_up
    from rubberband.units import counted

    made = back_up(default_home(), folder, store or default_store(), say)
    size = f"{made.size_bytes / 1e6:.1f} MB"
    print(f"backed up {made.home} to {folder}: {counted(len(made.experiments), 'experiment')}, {size}")


def restore(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the backup.")],
    store: StoreUrl = None,
    keep_tokens: Annotated[
        bool, typer.Option("--keep-tokens", help="Keep tokens that the current store does not have.")
    ] = False,
    all_homes: Annotated[
        bool, typer.Option("--all-homes", help="Also replace experiments of other homes in the store.")
    ] = False,
) -> None:
    """Restore a home from a backup.

    Stop the service, the experiments and the pools first. Every file is compared with the backup's manifest before
    anything is replaced, and the current files of the home are moved aside. Browser sessions end. A token stays valid
    if the current store has it and has not revoked it; the others are revoked, as they may have been since the backup.
    """
    from rubberband.installation import default_store, restored_home
    from rubberband.running.restore import restore as put_back
    from rubberband.units import counted

    done = put_back(
        folder, restored_home(), store or default_store(), keep_tokens=keep_tokens, announce=say, all_homes=all_homes
    )
    if done.before is not None:
        say(f"the files that were there are in {done.before}; delete them when you need them no more")
    if done.revoked:
        say(
            f"{counted(done.revoked, 'token')} revoked that the present store does not know as valid; make new ones "
            "with `rubberband token create`"
        )
    experiments = counted(len(done.manifest.experiments), "experiment")
    print(
        f"restored {done.manifest.home} from {folder}: {experiments}; continue "
        "those that ran with `rubberband resume NAME`, or start the service"
    )
