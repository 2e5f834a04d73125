"""How many examples a property is tried with: a tenth by default, a fifth for planted bugs, all for a release."""

from __future__ import annotations

import os

_SHARE = {"long": 1, "fixed": 5, "random": 5}.get(os.environ.get("HYPOTHESIS_PROFILE", ""), 10)


def examples(number: int) -> int:
    """The number for the present profile; `number` is that of the long one."""
    return max(1, number // _SHARE)
