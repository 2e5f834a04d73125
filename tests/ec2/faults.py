"""What a call to the fake can end with, instead of an answer, and the hook's words for asking for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Lost = Literal["connect_timeout", "read_timeout", "connection_closed"]


class FakeError(Exception):
    """An error that AWS answers with: boto3 makes a ClientError of it."""

    def __init__(self, code: str, message: str, http_status: int = 400) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.http_status = http_status


class FakeDisconnect(Exception):
    """No answer comes: whether the call took effect, the caller cannot know."""

    def __init__(self, kind: Lost) -> None:
        super().__init__(kind)
        self.kind: Lost = kind


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeCall:
    """One call, as the fault hook sees it before it happens and as the log keeps it."""

    index: int
    """0 for the first call to this fake."""
    service: str
    """As boto3 names it: `ec2`, `ssm`, …"""
    operation: str
    """As the API names it: `RunInstances`, …"""
    params: Mapping[str, Any]
    principal: str
    at: float
    region: str = ""
    outcome: str = ""
    """`ok`, AWS's error code, or how the connection was lost; empty while it is not known."""
    took_effect: bool = False
    """Whether it was carried out, answered or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What the hook makes of a call. `Fault(error=…)` may hold any exception, such as the death of the caller."""

    error: BaseException | None = None
    """Raised instead of the answer; None: the call is answered."""
    took_effect: bool = False
    """Whether the call is carried out before `error` is raised."""
    visible_after_s: float | None = None
    """What the call launches is invisible to other calls for so long; None: as long as the fake is set to."""
    launches_at_most: int | None = None
    """The zone has capacity for so many just now; None: as many as the fake is set to."""
    stale_s: float = 0.0
    """DescribeInstances shows what was there so long ago."""

    @classmethod
    def throttled(cls) -> Fault:
        """Refused for the rate of calls."""
        return cls(error=FakeError("RequestLimitExceeded", "Request limit exceeded.", 503))

    @classmethod
    def server_error(cls, *, took_effect: bool = False) -> Fault:
        """500, whether or not the call was carried out."""
        return cls(error=FakeError("InternalError", "An internal error has occurred", 500), took_effect=took_effect)

    @classmethod
    def unavailable(cls, *, took_effect: bool = False) -> Fault:
        """503, whether or not the call was carried out."""
        message = "The service is unavailable. Please try again shortly."
        return cls(error=FakeError("Unavailable", message, 503), took_effect=took_effect)

    @classmethod
    def no_capacity(cls) -> Fault:
        """The machines are not there. (A 500, which is what EC2 answers.)"""
        message = "There is no capacity available that matches your request."
        return cls(error=FakeError("InsufficientInstanceCapacity", message, 500))

    @classmethod
    def timeout(cls, *, took_effect: bool) -> Fault:
        """No answer: before the call was carried out (no connection) or after it (the answer was lost)."""
        return cls(error=FakeDisconnect("read_timeout" if took_effect else "connect_timeout"), took_effect=took_effect)

    @classmethod
    def stale(cls, seconds: float) -> Fault:
        """A look is answered with what was there so long ago: later ends are not seen, nor later launches."""
        return cls(stale_s=seconds)
