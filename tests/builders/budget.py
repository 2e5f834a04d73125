"""How many examples a property is tried with: a fifth by default, all of them with HYPOTHESIS_PROFILE=long."""

from __future__ import annotations

import os


def examples(number: int) -> int:
    """The number for the present profile; `number` is that of the long one."""
    return number if os.environ.get("HYPOTHESIS_PROFILE") == "long" else max(1, number // 5)
