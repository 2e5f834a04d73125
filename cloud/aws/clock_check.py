"""Whether this machine's clock agrees with AWS's: leases end, and bills are reckoned, by the one and by the other."""

from __future__ import annotations

from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any

from rubberband.errors import InputError

MOST_S = 15.0
"""Half of what is kept clear of max_cost for giving instances back."""


def check_clock(answer: Mapping[str, Any], now: float) -> None:
    """Compare the date of an answer of AWS with `now` (Unix time). Raises InputError if they are far apart."""
    told = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", "")
    try:
        off_s = now - parsedate_to_datetime(told).timestamp()
    except (TypeError, ValueError):  # whatever answered does not tell the time
        return
    if abs(off_s) > MOST_S:
        raise InputError(
            f"this machine's clock is {abs(off_s):.0f} s {'ahead of' if off_s > 0 else 'behind'} AWS's, by which "
            f"instances are billed and end themselves, and may be off by {MOST_S:.0f} s; set it right (chrony, or "
            "`timedatectl set-ntp true`)"
        )
