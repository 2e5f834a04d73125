"""`rubberband submit`: hand an experiment to a service."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from rubberband.commands.estimate import FileArgument, Overrides, Policy, PolicyOption
from rubberband.commands.remote import ServiceOption, open_client


def submit(
    file: FileArgument,
    policy: PolicyOption = Policy.optimal,
    overrides: Overrides = None,
    server: ServiceOption = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Stay and show how it goes, until it is over.")] = False,
) -> None:
    """Submit an experiment to a service, which plans it and runs it.

    The service is --server, RUBBERBAND_SERVER, or the one on this machine; its token is RUBBERBAND_TOKEN. A deadline
    counts from now. The code that is trained must be installed at the service. Exit code 3: no plan is within the
    limits; nothing was started.
    """
    with open_client(server) as client:
        found = client.submit(file, overrides=overrides or [], policy=policy.value)
        name = found["name"]
        print(f"{name}: {found['state']} at {client.url}", file=sys.stderr)
        print(name)
        if watch:
            from rubberband.commands.status import watch_remote

            watch_remote(client, name)
        else:
            print(f"watch it with `rubberband status {name} --watch --server {client.url}`", file=sys.stderr)
