"""Memory of `rubberband aws setup` in the home: the bucket and its region, so that no experiment file needs them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from rubberband.atomic import make_directories, write_atomically
from rubberband.errors import InputError

FILE = "aws.yaml"
"""In the home."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered:
    """The bucket of an account, and the region that both are set up for."""

    bucket: str
    region: str


def remembered(home: Path) -> Remembered | None:
    """Return what the home remembers; None before `rubberband aws setup`. Raises InputError for a broken file."""
    path = home / FILE
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
        (home / FILE).unlink(missing_ok=True)
        return
    make_directories(home)
    write_atomically(home / FILE, yaml.safe_dump(asdict(what)).encode(), durable=True)


def fill(words: Any, name: Any, home: Path) -> None:
    """Give the words of an experiment's resources, or of a pool, on EC2 the region and the bucket that they lack."""
    if not isinstance(words, dict) or words.get("provider") != "aws" or {"region", "checkpoints"} <= words.keys():
        return
    known = remembered(home)
    if known is not None:
        words.setdefault("region", known.region)
        words.setdefault("checkpoints", f"s3://{known.bucket}/{name}")
