"""Events and jobs as JSON, and back. The journal holds nothing else; an unknown or broken record is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from rubberband.errors import DamagedJournalError, JournalError
from rubberband.executor.events import Event
from rubberband.executor.state import Job

_KINDS: dict[str, type[Event]] = {kind.__name__: kind for kind in Event.__subclasses__()}


_adapters: dict[str, TypeAdapter[Any]] = {}


def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    if kind.__name__ not in _adapters:
        _adapters[kind.__name__] = TypeAdapter(kind)
    return _adapters[kind.__name__]


def encode_event(event: Event) -> tuple[str, str]:
    """An event as (kind, JSON object)."""
    return type(event).__name__, _adapter(type(event)).serializer.to_json(event).decode()


def decode_event(kind: str, body: str) -> Event:
    """The event that `encode_event` made these of. Raises JournalError if it is none that is known, or broken."""
    if kind not in _KINDS:
        raise JournalError(f"the journal holds an event {kind!r}, which this version does not know; use the newer one")
    event: Event = _decode(_KINDS[kind], body)
    return event


def encode_job(job: Job) -> str:
    """A job as a JSON object."""
    return _adapter(Job).dump_json(job).decode()


def decode_job(body: str) -> Job:
    """The job that `encode_job` made this of. Raises JournalError if it is none.

    A job without `replan` is of a version that did not plan again: its journal goes on from SYNC to stage at once.
    """
    job: Job = _decode(Job, body)
    return job if '"replan":' in body else replace(job, replan=False)


def _decode(kind: type[Any], body: str) -> Any:
    try:
        return _adapter(kind).validator.validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the record"
        raise DamagedJournalError(f"it holds a broken {kind.__name__}: {where}: {first['msg']}") from None
