"""Guards: a schedule of AWS for each instance that terminates it some time after its lease, should all else fail.

An instance ends itself with its lease, which its boot script arms. The driver terminates a guest that never runs that
script; if the driver has died too, the schedule (EventBridge Scheduler) does. It is created once the instance's id is
known, moved while the lease is renewed, and deleted when the instance has ended. One that is left behind runs once,
finds no instance and deletes itself. It may terminate only instances with the owner's tag.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from rubberband.cloud.aws.calls import AwsSession
from rubberband.cloud.aws.errors import FAILURES, code_of, explain, ignoring, verdict

_log = logging.getLogger(__name__)

SLACK_S = 900.0
"""From the end of a lease to its guard, when that has just been created or moved."""
LEAST_SLACK_S = 300.0
"""A guard with less slack is moved: one call in ten minutes for each instance."""
_RETRY_S = 60.0
"""Pause after a request that the scheduler did not answer, or refused."""
_TRIES_S = 3600
"""The scheduler tries to terminate an instance for this long."""


def _in_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="guards", daemon=True).start()


class Schedules:
    """Schedules of one run's instances. While AWS refuses them, one warning reports it, and the run continues.

    They are requested again each minute, whatever the refusal was: those that exist run at their time, and would end
    healthy instances if they were not moved.
    """

    def __init__(
        self,
        session: AwsSession,
        role: str,
        *,
        clock: Callable[[], float],
        begin: Callable[[Callable[[], None]], None] = _in_thread,
    ) -> None:
        """`role` is the role that the scheduler assumes. `begin` starts a function in a thread, as an unreachable
        scheduler must delay nothing."""
        self._session, self._role, self._clock, self._begin = session, role, clock, begin
        self._at: dict[str, float] = {}
        """Instance id -> when its guard terminates it, for those that have one."""
        self._working = threading.Lock()
        self._not_before = 0.0
        self._has_warned = False

    def tend(self, ends: Mapping[str, float]) -> None:
        """Guard these instances (id -> latest end by itself) and no others. Does not wait."""
        is_due = self._at.keys() - ends.keys() or any(self._is_short(name, end) for name, end in ends.items())
        if is_due and self._clock() >= self._not_before:
            self._begin(lambda: self._tend(dict(ends)))

    def close(self) -> None:
        """Delete the remaining guards, if AWS answers; else they delete themselves."""
        self._tend({})

    def _is_short(self, instance_id: str, end: float) -> bool:
        return self._at.get(instance_id, 0.0) < end + LEAST_SLACK_S

    def _tend(self, ends: Mapping[str, float]) -> None:
        if not self._working.acquire(blocking=False):
            return
        try:
            errors = list(self._failures(ends))
        finally:
            self._working.release()
        if not errors:
            self._has_warned = False
            return
        self._not_before = self._clock() + _RETRY_S
        lasting = [error for error in errors if verdict(error) not in ("unknown", "throttled")]
        if lasting and not self._has_warned:
            self._has_warned = True
            _log.warning("AWS does not guard the instances: %s; it is asked again each minute", explain(lasting[0]))

    def _failures(self, ends: Mapping[str, float]) -> Iterator[Exception]:
        """Send the due requests, and yield their errors. A refusal for one instance does not hold up the others."""
        ended = [instance_id for instance_id in self._at if instance_id not in ends]
        for instance_id in (*ended, *(one for one, end in ends.items() if self._is_short(one, end))):
            try:
                self._set(instance_id, ends.get(instance_id))
            except FAILURES as error:
                yield error
                if verdict(error) == "throttled" or not code_of(error):  # nor would the next request be answered
                    return

    def _set(self, instance_id: str, end: float | None) -> None:
        if end is None:
            delete(self._session, instance_id)
            del self._at[instance_id]
        else:
            guard(self._session, self._role, instance_id, end + SLACK_S, moves=instance_id in self._at)
            self._at[instance_id] = end + SLACK_S


def guard(session: AwsSession, role: str, instance_id: str, at: float, *, moves: bool = False) -> None:
    """Have AWS terminate an instance at `at` (Unix time; up to a minute later). `moves`: it has a guard already.

    Raises botocore's errors.
    """
    scheduler, request = session.client("scheduler"), _request(session, role, instance_id, at)
    first, other, expected = scheduler.create_schedule, scheduler.update_schedule, "ConflictException"
    if moves:
        first, other, expected = other, first, "ResourceNotFoundException"
    try:
        first(**request)
    except FAILURES as error:  # an earlier driver made it, or it has run
        if code_of(error) != expected:  # a conflict of a move: an earlier request is not carried out yet
            raise
        other(**request)


def delete(session: AwsSession, instance_id: str) -> None:
    """Delete an instance's guard, if it has one. Raises botocore's errors."""
    with ignoring("ResourceNotFoundException"):
        session.client("scheduler").delete_schedule(Name=_name(instance_id))


def _name(instance_id: str) -> str:
    return f"rubberband-{instance_id}"


def _request(session: AwsSession, role: str, instance_id: str, at: float) -> dict[str, Any]:
    _, partition, _, _, account, _ = session.client("sts").get_caller_identity()["Arn"].split(":", 5)
    return {
        "Name": _name(instance_id),
        "Description": "Ends an instance of rubberband whose lease has expired",
        "ScheduleExpression": f"at({datetime.fromtimestamp(at, UTC):%Y-%m-%dT%H:%M:%S})",
        "FlexibleTimeWindow": {"Mode": "OFF"},
        "ActionAfterCompletion": "DELETE",
        "Target": {
            "Arn": f"arn:{partition}:scheduler:::aws-sdk:ec2:terminateInstances",
            "RoleArn": f"arn:{partition}:iam::{account}:role/{role}",
            "Input": json.dumps({"InstanceIds": [instance_id]}),
            "RetryPolicy": {"MaximumEventAgeInSeconds": _TRIES_S, "MaximumRetryAttempts": 20},
        },
    }
