"""`rubberband token`: the tokens of the service. Works on the service's store; no running server is needed."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from rubberband.commands.common import argument
from rubberband.commands.serve import StoreOption
from rubberband.errors import InputError
from rubberband.units import shown

if TYPE_CHECKING:
    from rubberband.api.security.authentication import Tokens
    from rubberband.api.store.schema import TokenRecord

token = typer.Typer(
    name="token",
    help="Make, list and revoke the tokens of the service.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)


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
    """Make a token and print it. It cannot be shown again, because only its hash is kept."""
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
            used = "never" if record.last_used_at is None else _instant(record.last_used_at)
            table.add_row(record.id, record.name, record.scope, _instant(record.created_at), _state(record), used)
    Console(soft_wrap=True).print(table)


@token.command()
def revoke(
    id: Annotated[str, argument("ID", "The token's id, as listed.")],
    store: StoreOption = None,
) -> None:
    """Revoke a token and the browser sessions that use it; a running service follows within seconds."""
    with _tokens(store) as tokens:
        if not tokens.revoke(id):
            known = ", ".join(record.id for record in tokens.records()) or "none"
            raise InputError(f"there is no token {shown(id)}; there are: {known}")
    print(f"token {id} is revoked", file=sys.stderr)


@contextmanager
def _tokens(store: str | None) -> Iterator[Tokens]:
    from rubberband.api.security.authentication import Tokens
    from rubberband.api.store.sql import open_store
    from rubberband.installation import default_home, default_store

    opened = open_store(store or default_store(), default_home())
    try:
        yield Tokens(opened)
    finally:
        opened.close()


def _state(record: TokenRecord) -> str:
    if record.revoked_at is not None:
        return f"revoked {_instant(record.revoked_at)}"
    if record.expires_at is not None and record.expires_at <= time.time():
        return f"expired {_instant(record.expires_at)}"
    return _until(record)


def _until(record: TokenRecord) -> str:
    return "never expires" if record.expires_at is None else f"expires {_instant(record.expires_at)}"


def _instant(at: float) -> str:
    from rubberband.units import format_instant

    return format_instant(datetime.fromtimestamp(int(at), UTC))
