"""Who calls, and what the caller may do: the policies asked about an action on a resource."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.ec2.faults import FakeError
from tests.ec2.policy import Statement, decided

EVERYTHING = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    arn: str
    region: str
    policies: Sequence[Statement] | None = None

    def check(
        self, action: str, resource: str = EVERYTHING, context: Mapping[str, str | Sequence[str]] | None = None
    ) -> None:
        """Raises FakeError, as AWS words it, unless the caller may."""
        if self.policies is None:
            return
        known = {"aws:RequestedRegion": self.region, "aws:PrincipalArn": self.arn, **(context or {})}
        decision = decided(self.policies, action, resource, known)
        if decision == "allowed":
            return
        because = (
            "with an explicit deny in an identity-based policy"
            if decision == "denied"
            else f"because no identity-based policy allows the {action} action"
        )
        where = "" if resource == EVERYTHING else f" on resource: {resource}"
        message = f"User: {self.arn} is not authorized to perform: {action}{where} {because}"
        if action.startswith("ec2:") or known.get("iam:PassedToService") == "ec2.amazonaws.com":
            message = f"You are not authorized to perform this operation. {message}"
            raise FakeError("UnauthorizedOperation", message, 403)
        if action.startswith("s3:"):
            raise FakeError("AccessDenied", message, 403)
        raise FakeError("AccessDeniedException", message, 400)
