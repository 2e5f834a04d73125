"""An experiment's file as it may be planned and submitted anew, of what the service keeps of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import yaml

from rubberband.api.store.records import Submission
from rubberband.errors import InputError
from rubberband.units import format_duration, parse_deadline
from rubberband.yaml_reader import Dumper


def file_of(submission: Submission) -> str:
    """The experiment file, its deadline as long after a start as it was after the first one; empty if none is kept."""
    words = dict(submission.words)
    if not words:
        return ""
    constraints, resources = words.get("constraints"), words.get("resources")
    if isinstance(constraints, Mapping):
        words["constraints"] = _given(constraints) | _deadline(constraints.get("deadline"), submission.created_at)
    if isinstance(resources, Mapping):
        elsewhere = {"aws"} if resources.get("provider") != "aws" else set()
        words["resources"] = {key: value for key, value in _given(resources).items() if key not in elsewhere}
    return yaml.dump(_given(words), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)


def _given(words: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in words.items() if value is not None}


def _deadline(asked: Any, created_at: float) -> dict[str, Any]:
    try:
        found = parse_deadline(asked)
    except InputError:
        return {}
    if not isinstance(found, datetime):
        return {}
    return {"deadline": format_duration(max(1, round(found.timestamp() - created_at)))}
