"""Answers of AWS that come in pages, as one stream; it stops where its time is up, however many pages are left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from botocore.exceptions import ReadTimeoutError

from rubberband.cloud.aws.errors import FAILURES, explain
from rubberband.cloud.aws.machines import Session
from rubberband.errors import ProviderError

MOST_PAGES = 1000
"""A listing that is longer goes in circles."""


def pages(
    operation: Callable[..., Any], key: str, *, in_time: Callable[[], bool] = lambda: True, **words: Any
) -> Iterator[Any]:
    """What an operation lists under `key`, page after page.

    Raises ReadTimeoutError (which botocore raises for a single page that is late) once `in_time` is false, and what
    the operation raises.
    """
    token = None
    for _ in range(MOST_PAGES):
        if not in_time():
            break
        answer = operation(**words, **({"NextToken": token} if token else {}))
        yield from answer.get(key, ())
        token = answer.get("NextToken")
        if not token:
            return
    raise ReadTimeoutError(endpoint_url=f"the rest of {key}")


def described(session: Session, wanted: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The instances that pass the filters. Raises ProviderError if EC2 does not answer."""
    try:
        reservations = pages(session.client("ec2").describe_instances, "Reservations", Filters=wanted)
        return [machine for reservation in reservations for machine in reservation["Instances"]]
    except FAILURES as error:
        raise ProviderError(f"EC2 does not say what there is: {explain(error)}") from error
