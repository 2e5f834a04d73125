"""The policy of an account: `policy.yaml` in the home, limits of whatever is rented from it."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Annotated

from pydantic import Field

from rubberband.spec.fields import Usd, Words

POLICY_FILE = "policy.yaml"

Names = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1, max_length=1000)]


class AccountPolicy(Words):
    """Limits of what one home rents; a key that is left out limits nothing."""

    max_usd_per_run: Usd | None = None
    """Highest max_cost of an experiment, and highest cost of building an image."""
    max_usd_per_hour: Usd | None = None
    """Highest price of all instances of an experiment or a pool together, with their volumes and addresses."""
    max_usd_per_month: Usd | None = None
    """Highest bill of a calendar month (UTC): what was spent in it, and what runs and pools may still spend."""
    instance_types: Names | None = None
    """Types that may be rented; `*` is for any letters, as in `g5.*`."""
    regions: Names | None = None
    """Regions in which instances may be rented."""

    def refuses_type(self, name: str) -> bool:
        """Whether an instance type may not be rented."""
        return self.instance_types is not None and not any(fnmatchcase(name, known) for known in self.instance_types)
