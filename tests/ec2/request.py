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
OPERATIONS: dict[tuple[str, str], Operation] = {}
"""(service, name in the API) -> what carries it out."""
_ACTIONS_OF = {"service-quotas": "servicequotas"}


def operation(service: str, name: str, *, checked: bool = False) -> Callable[[Operation], Operation]:
    """Let a function carry out an operation; `checked`: where the caller may do it, and it is no dry run."""

    def carried_out(work: Operation) -> Operation:
        def allowed(request: Request) -> dict[str, Any]:
            request.access.check(f"{_ACTIONS_OF.get(service, service)}:{name}")
            request.end_dry_run()
            return work(request)

        OPERATIONS[service, name] = allowed if checked else work
        return work

    return carried_out
