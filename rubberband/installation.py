"""This installation of rubberband: the name of its distribution, its home folder, and the database of its journals."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from rubberband.errors import InputError

DISTRIBUTION = "rubberband-tune"
"""Its name on a package index, where `rubberband` is another project. The import is `rubberband`."""


def requirement(*extras: str) -> str:
    """The distribution with these extras, such as `rubberband-tune[aws]`."""
    return f"{DISTRIBUTION}[{','.join(extras)}]"


def install_hint(*extras: str) -> str:
    """The command that adds what the extras bring: `pip install 'rubberband-tune[aws]'`."""
    return f"pip install '{requirement(*extras)}'"


def default_home(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the home folder: RUBBERBAND_HOME, or `~/.rubberband`. Raises InputError without a `~`."""
    try:
        return Path(environment.get("RUBBERBAND_HOME") or Path.home() / ".rubberband").expanduser().resolve()
    except RuntimeError as error:
        raise InputError(f"this user has no home folder ({error}); set RUBBERBAND_HOME to a folder") from None


def default_store(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the SQLAlchemy URL of the database of journals: RUBBERBAND_STORE; None: each is a file of its own."""
    return environment.get("RUBBERBAND_STORE") or None
