"""Other limits for an experiment, as a request carries them: read as strictly as an experiment."""

from __future__ import annotations

from pydantic import ValidationError

from rubberband.api.answers import invalid
from rubberband.api.experiment_body import JSON_TYPE, json_object
from rubberband.api.problems import INVALID, MEDIA, Problem
from rubberband.api.schemas import ExtendBody
from rubberband.units import shown


def read_limits(body: bytes, media_type: str) -> ExtendBody:
    """The limits of a request's body. Raises Problem: MEDIA, MALFORMED, or INVALID."""
    if media_type.partition(";")[0].strip().lower() != JSON_TYPE:
        raise Problem(MEDIA, f"Content-Type {shown(media_type)} is not read here; send {JSON_TYPE}")
    words = json_object(body, "what extends an experiment; send an object: deadline, max_cost or both, and dry_run")
    try:
        limits = ExtendBody.model_validate(words)
    except ValidationError as error:
        faults = [{"loc": ["body", *map(str, fault["loc"])], "message": fault["msg"]} for fault in error.errors()]
        raise invalid(faults) from None
    if limits.deadline is None and limits.max_cost is None:
        raise Problem(INVALID, "neither deadline nor max_cost is there; give the one that is to be raised, or both")
    return limits
