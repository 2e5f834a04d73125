"""EC2: rent instances with real money, and get them back whatever happens. Only this package imports boto3."""

from __future__ import annotations

from pathlib import Path

from rubberband.cloud.provider import CleanedUp
from rubberband.installation import require


def clean_up_home(home: Path, experiment: str | None) -> CleanedUp:
    """Terminate what drivers of a home left; AWS is not asked where none rented from it. Raises InputError."""
    places = ("experiments/*/local", "profiling/experiments/*/local", "pools/*/local")
    directories = [directory for place in places for directory in home.glob(place)]
    directories = [directory for directory in directories if any(directory.glob("ec2/*/run.json"))]
    if not directories:
        return CleanedUp()
    require("AWS", "boto3")
    from rubberband.cloud.aws.calls import open_aws
    from rubberband.cloud.aws.cleanup import clean_up

    return clean_up(directories, open_aws, experiment)
