"""The name of this package on a package index, where `rubberband` is another project. The import is `rubberband`."""

from __future__ import annotations

DISTRIBUTION = "rubberband-tune"


def requirement(*extras: str) -> str:
    """The distribution with these extras, such as `rubberband-tune[aws]`."""
    return f"{DISTRIBUTION}[{','.join(extras)}]"


def install_hint(*extras: str) -> str:
    """The command that adds what the extras bring: `pip install 'rubberband-tune[aws]'`."""
    return f"pip install '{requirement(*extras)}'"
