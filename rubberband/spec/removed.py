"""Words that were removed: keys of files (by their paths) and options of commands, each with what to use instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

REMOVED: Mapping[str, str] = {
    "constraints.spend": "was removed; write num_samples: auto (or max_t: auto) in search.scheduler, which sizes the "
    "search to the limits before it runs",
    "estimate --compare-to": "was removed; save both estimates with -o json, and compare them with diff",
    "export --csv": "is -o csv now",
    "export --json": "is -o json now",
    "export --parquet": "is -o parquet now",
    "profile --output": "is a format in other commands; write --out FILE",
    "profile -o": "is a format in other commands; write --out FILE",
}
"""Path of a key, or command and option -> the rest of the line that refuses it."""


def without_removed(words: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return words that an earlier version accepted, without the keys that were removed since."""
    kept = {key: value for key, value in words.items() if f"{above}{key}" not in REMOVED}
    return {
        key: without_removed(value, f"{above}{key}.") if isinstance(value, Mapping) else value
        for key, value in kept.items()
    }
