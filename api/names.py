"""The name of an experiment in a path: what could never be one is not found, like one that is not there."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import Depends, Path

from rubberband.api.problems import NOT_FOUND, Problem
from rubberband.api.service import Serving
from rubberband.units import shown
from rubberband.values.submission import Submission

NAME_PATTERN = "^[a-z0-9-]{1,63}$"
_NAME = re.compile(r"[a-z0-9-]{1,63}")

NameInPath = Annotated[
    str,
    Path(
        description="The experiment's name.",
        examples=["digits-sha"],
        json_schema_extra={"pattern": NAME_PATTERN},
    ),
]


async def checked_name(name: NameInPath) -> str:
    """A dependency: the name of the path. Raises Problem NOT_FOUND for what names nothing."""
    if _NAME.fullmatch(name) is None:
        raise unknown(name)
    return name


def known_experiment(name: Annotated[str, Depends(checked_name)], service: Serving) -> Submission:
    """A dependency: what is known of the experiment of the path. Raises Problem NOT_FOUND."""
    found = service.store.submission(name)
    if found is None:
        raise unknown(name)
    return found


def unknown(name: str) -> Problem:
    """That there is no experiment of the name."""
    return Problem(NOT_FOUND, f"experiment {shown(name)} not found; `rubberband ps` (GET /v1/experiments) lists all")


Name = Annotated[str, Depends(checked_name)]
Known = Annotated[Submission, Depends(known_experiment)]
