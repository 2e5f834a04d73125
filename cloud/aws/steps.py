"""Steps of `rubberband aws setup` and `teardown`: what is there already, and what is still to be made or deleted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountChange:
    """One change of the account."""

    text: str
    """Such as `make bucket rubberband-0123456789ab`."""
    carry_out: Callable[[], object]
    """Raises botocore's errors. Carried out again, it completes what was cut off."""


@dataclass(slots=True, kw_only=True)
class AccountChanges:
    """Result of a look at the account."""

    there: list[str] = field(default_factory=list)
    """Lines on parts that need no change."""
    steps: list[AccountChange] = field(default_factory=list)

    def add(self, text: str, carry_out: Callable[[], object]) -> None:
        """Add a step."""
        self.steps.append(AccountChange(text=text, carry_out=carry_out))
