"""The way in for commands: AWS if boto3 is installed, and one line that says how to install it if it is not.

It imports nothing of AWS's itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rubberband.distribution import install_hint
from rubberband.errors import InputError

if TYPE_CHECKING:
    from rubberband.cloud.aws.machines import Session


def open_aws(region: str) -> Session:
    """A session in `region`. Raises InputError if boto3 is missing, or if boto3 knows no such region."""
    try:
        from rubberband.cloud.aws import session
        from rubberband.cloud.aws.regions import check_region
    except ModuleNotFoundError as error:
        if error.name not in ("boto3", "botocore"):
            raise
        raise InputError(f"boto3, which talks to AWS, is not installed; run {install_hint('aws')}") from None
    check_region(region)
    return session.open_session(region)
