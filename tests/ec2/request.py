"""One call as an operation carries it out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.ec2.access import Access
from tests.ec2.faults import FakeError, Fault
from tests.ec2.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The parameters are those of boto3 (UserData in base64, as it travels)."""

    world: World
    params: Mapping[str, Any]
    now: float
    access: Access
    """What the caller may do."""
    fault: Fault

    def end_dry_run(self) -> None:
        """Stop here if nothing is to be done: raises FakeError, which is how EC2 says that it would have worked."""
        if self.params.get("DryRun"):
            raise FakeError("DryRunOperation", "Request would have succeeded, but DryRun flag is set.", 412)


Operation = Callable[[Request], dict[str, Any]]
