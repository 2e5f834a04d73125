"""Measured bandwidths of fetches: kept in the home, for plans."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from rubberband.cloud.fetch.cache import Fetched
from rubberband.files import make_directories, write_atomically
from rubberband.spec.resources import Resources

_log = logging.getLogger(__name__)
FILE = "fetches.json"
ASSUMED = 100e6
"""Bytes per second, where nothing was measured."""
_VERIFIED = 800e6
"""Bytes of which two cores make the digests in a second: an assumption. A measured bandwidth has that in it."""
_LATEST = 5
_LEAST_BYTES = 100_000_000
"""A smaller fetch is not kept: requests and imports take longer than its bytes."""


def place_of(resources: Resources, *, is_mirrored: bool = False) -> str:
    """Return the name under which bandwidths of a provider's instances are kept."""
    words = (resources.provider, resources.region if resources.kind.is_rented else "", "mirror" * is_mirrored)
    return " ".join(filter(None, words))


def measured(home: Path, resources: Resources) -> float | None:
    """Return the bytes per second of the latest fetches; None if there were none."""
    kept = _read(home)
    is_mirrored = resources.fetch is not None and resources.fetch.mirror is not None
    latest = (kept.get(place_of(resources, is_mirrored=True)) if is_mirrored else None) or kept.get(place_of(resources))
    return median(latest) if latest else None


def seconds_of(size: int, measured: float | None) -> float:
    """Return the seconds of fetching and verifying `size` bytes at a measured bandwidth, or else the assumed one."""
    return size / ASSUMED + size / _VERIFIED if measured is None else size / measured


def record(home: Path, resources: Resources, fetched: Fetched) -> None:
    """Keep the bandwidth of a fetch, and log the trouble with its mirror. One of two that end together may be lost."""
    if fetched.trouble:
        _log.warning("the mirror of resources.fetch is not used: %s", fetched.trouble)
    if fetched.size < _LEAST_BYTES or fetched.seconds <= 0.0:
        return
    kept, place = _read(home), place_of(resources, is_mirrored=fetched.is_mirrored)
    latest = [*kept.get(place, ()), fetched.size / fetched.seconds][-_LATEST:]
    with suppress(OSError):  # a full disk
        make_directories(home)
        write_atomically(home / FILE, json.dumps({**kept, place: latest}).encode(), durable=False)


def _read(home: Path) -> Mapping[str, Sequence[float]]:
    with suppress(OSError, ValueError, AttributeError, TypeError):
        plain: Mapping[str, Any] = json.loads((home / FILE).read_text())
        return {place: [float(each) for each in latest if each > 0.0] for place, latest in plain.items()}
    return {}
