"""Where rubberband keeps what outlives a command: experiments, and prices that were asked for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from rubberband.errors import InputError


def default_home(environment: Mapping[str, str] = os.environ) -> Path:
    """Where experiments are kept: RUBBERBAND_HOME, or `~/.rubberband`. Raises InputError where there is no `~`."""
    try:
        return Path(environment.get("RUBBERBAND_HOME") or Path.home() / ".rubberband").expanduser().resolve()
    except RuntimeError as error:
        raise InputError(f"this user has no home folder ({error}); set RUBBERBAND_HOME to a folder") from None


def default_store(environment: Mapping[str, str] = os.environ) -> str | None:
    """The SQLAlchemy URL of the database that holds the journals: RUBBERBAND_STORE; None: each is a file of its own."""
    return environment.get("RUBBERBAND_STORE") or None
