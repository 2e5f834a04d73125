"""Where a command is carried out: on this machine's experiments, or by a service."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rubberband.client.client import Client

LOCAL = "local"

ServerOption = Annotated[
    str | None,
    typer.Option(
        "--server",
        metavar="URL",
        envvar="RUBBERBAND_SERVER",
        help="Ask this service instead of this machine's own experiments; `local` for these.",
        show_default=False,
        show_envvar=True,
    ),
]
"""Of commands that look at experiments, here or there. The token is RUBBERBAND_TOKEN's."""

ServiceOption = Annotated[
    str | None,
    typer.Option(
        "--server",
        metavar="URL",
        envvar="RUBBERBAND_SERVER",
        help="The service; `local` for the one on this machine. [default: http://127.0.0.1:8265]",
        show_default=False,
        show_envvar=True,
    ),
]
"""Of commands that only a service carries out."""


def client_of(server: str | None) -> Client | None:
    """A client of the service; None if the command is about this machine."""
    return None if not server or server == LOCAL else open_client(server)


def open_client(server: str | None) -> Client:
    """A client of the service, by default the one on this machine. Raises InputError without httpx.

    `local` is the one on this machine, also where RUBBERBAND_SERVER names another one.
    """
    try:
        from rubberband.client.client import Client
        from rubberband.client.sending import DEFAULT_SERVER
    except ImportError:
        from rubberband.distribution import install_hint
        from rubberband.errors import InputError

        raise InputError(f"a service is asked with httpx; {install_hint('client')}") from None
    return Client(DEFAULT_SERVER if server == LOCAL else server)
