"""The regions of EC2, as far as the installed boto3 knows them; nothing is asked of AWS."""

from __future__ import annotations

from functools import cache

import botocore.session

from rubberband.errors import InputError
from rubberband.units import nearest, shown


def check_region(region: str) -> None:
    """Raise InputError, naming near ones, unless boto3 knows the region."""
    known = _known()
    if region not in known:
        raise InputError(
            f"resources.region: {shown(region)} is no region of EC2 (a new one needs a newer boto3); "
            f"{nearest(region, known)}"
        )


@cache
def _known() -> tuple[str, ...]:
    session = botocore.session.get_session()
    return tuple(
        name
        for partition in session.get_available_partitions()
        for name in session.get_available_regions("ec2", partition_name=partition)
    )
