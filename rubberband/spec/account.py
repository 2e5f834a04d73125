"""An account as its home knows it: limits of whatever is rented (`policy.yaml`), and its bucket (`aws.yaml`)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field

from rubberband.errors import InputError
from rubberband.files import make_directories, write_atomically
from rubberband.spec.fields import Usd, Words

POLICY_FILE = "policy.yaml"

Names = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1, max_length=1000)]


class AgentPolicy(Words):
    """Limits of what agents start by `rubberband mcp`, beside those of the account. Only people write them."""

    max_usd_per_run: Usd | None = None
    """Highest max_cost of an experiment on any provider; without it an agent starts nothing that is charged."""
    max_usd_per_month: Usd | None = None
    """Highest bill of a calendar month (UTC) of all experiments of agents together, without simulated ones."""
    providers: Names = ("virtual", "local")
    """Providers on which an agent may start an experiment."""


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
    agents: AgentPolicy | None = None
    """Limits of agents; without them an agent starts nothing that is charged."""

    def refuses_type(self, name: str) -> bool:
        """Whether an instance type may not be rented."""
        return self.instance_types is not None and not any(fnmatchcase(name, known) for known in self.instance_types)


BUCKET_FILE = "aws.yaml"
"""Written by `rubberband aws setup`, so that no experiment file needs a region and a bucket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered:
    """The bucket of an account, and the region that both are set up for."""

    bucket: str
    region: str


def remembered(home: Path) -> Remembered | None:
    """Return what the home remembers; None before `rubberband aws setup`. Raises InputError for a broken file."""
    path = home / BUCKET_FILE
    try:
        words = yaml.safe_load(path.read_text(encoding="utf-8"))
        return Remembered(bucket=str(words["bucket"]), region=str(words["region"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        raise InputError(f"{path} does not say bucket and region; run `rubberband aws setup` again") from None


def remember(home: Path, what: Remembered | None) -> None:
    """Remember it, or forget it (None). Raises OSError."""
    if what is None:
        (home / BUCKET_FILE).unlink(missing_ok=True)
        return
    make_directories(home)
    write_atomically(home / BUCKET_FILE, yaml.safe_dump(asdict(what)).encode(), durable=True)


def fill(words: Any, name: Any, home: Path) -> None:
    """Give the words of an experiment's resources, or of a pool, on EC2 the region and the bucket that they lack."""
    if not isinstance(words, dict) or words.get("provider") != "aws" or {"region", "checkpoints"} <= words.keys():
        return
    known = remembered(home)
    if known is not None:
        words.setdefault("region", known.region)
        words.setdefault("checkpoints", f"s3://{known.bucket}/{name}")
