"""The instance metadata service of the fake's machines, version 2 only: a token by PUT, then everything else with it.

One service for all of them, each under a path of its own, which stands where http://169.254.169.254 would be.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from tests.ec2.wire import Response

CREDENTIALS_S = 6 * 3600.0
_LONGEST_TOKEN_S = 21600
_TOKEN_PATH = "api/token"
_TOKEN_HEADER = "X-aws-ec2-metadata-token"
_LIFE_HEADER = "X-aws-ec2-metadata-token-ttl-seconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    instance_id: str
    address: str
    """Its private IPv4 address."""
    zone: str
    vpc_id: str
    subnet_id: str
    security_groups: tuple[str, ...]
    role: str | None
    """Of its instance profile; None: it has no credentials."""
    access_key: str
    """What its role's credentials are known by."""
    launch_index: int = 0
    """Its place among the instances of one request."""


class Metadata:
    """The service. `facts`: of a machine by its id, None once it has ended; `reclaim_at`: an announced end."""

    def __init__(
        self,
        clock: Callable[[], float],
        facts: Callable[[str], Facts | None],
        reclaim_at: Callable[[str], float | None],
    ) -> None:
        self._clock, self._facts, self._reclaim_at = clock, facts, reclaim_at
        self._tokens: dict[str, tuple[str, float]] = {}

    def handle(self, machine: str, method: str, path: str, headers: Mapping[str, str]) -> Response:
        """Answer a request of `machine`; `path` is what follows its address, such as `latest/meta-data/mac`."""
        _, _, rest = path.strip("/").partition("/")
        facts = self._facts(machine)
        if facts is None:
            return _plain(404, "no such machine")
        if method == "PUT" and rest == _TOKEN_PATH:
            return self._new_token(machine, headers.get(_LIFE_HEADER))
        if method != "GET":
            return _plain(405, "method not allowed")
        if not self._may_read(machine, headers.get(_TOKEN_HEADER)):
            return _plain(401, "unauthorized: this machine wants IMDSv2; get a token first")
        return _found(self._entries(facts, self._reclaim_at(machine)), rest)

    def _new_token(self, machine: str, life_s: str | None) -> Response:
        if life_s is None or not life_s.isdigit() or not 1 <= int(life_s) <= _LONGEST_TOKEN_S:
            return _plain(400, f"{_LIFE_HEADER} must be 1 to {_LONGEST_TOKEN_S}")
        token = secrets.token_urlsafe(42)
        self._tokens[token] = (machine, self._clock() + int(life_s))
        return Response(headers={"Content-Type": "text/plain", _LIFE_HEADER: life_s}, body=token.encode())

    def _may_read(self, machine: str, token: str | None) -> bool:
        owner, until = self._tokens.get(token or "", ("", 0.0))
        return owner == machine and self._clock() < until

    def _entries(self, facts: Facts, reclaim_at: float | None) -> dict[str, str]:
        mac = _mac(facts.instance_id)
        region = facts.zone[:-1]
        interface = f"meta-data/network/interfaces/macs/{mac}"
        entries = {
            "meta-data/ami-launch-index": str(facts.launch_index),
            "meta-data/instance-id": facts.instance_id,
            "meta-data/local-ipv4": facts.address,
            "meta-data/mac": mac,
            "meta-data/placement/availability-zone": facts.zone,
            "meta-data/placement/region": region,
            f"{interface}/security-group-ids": "\n".join(facts.security_groups),
            f"{interface}/subnet-id": facts.subnet_id,
            f"{interface}/vpc-id": facts.vpc_id,
        }
        if facts.role is not None:
            entries[f"meta-data/iam/security-credentials/{facts.role}"] = self._credentials(facts.access_key)
        if reclaim_at is not None:
            action = {"action": "terminate", "time": _iso8601(reclaim_at)}
            entries["meta-data/spot/instance-action"] = json.dumps(action)
        return entries

    def _credentials(self, access_key: str) -> str:
        now = self._clock()
        credentials = {
            "Code": "Success",
            "LastUpdated": _iso8601(now),
            "Type": "AWS-HMAC",
            "AccessKeyId": access_key,
            "SecretAccessKey": "no-secret",
            "Token": "no-token",
            "Expiration": _iso8601(now + CREDENTIALS_S),
        }
        return json.dumps(credentials)


def _found(entries: Mapping[str, str], path: str) -> Response:
    """The entry at `path`, or the names under it, as the real service lists them."""
    path = path.rstrip("/")
    if path in entries:
        return _plain(200, entries[path])
    under = f"{path}/" if path else ""
    rests = [name.removeprefix(under) for name in sorted(entries) if name.startswith(under)]
    names = dict.fromkeys(rest.partition("/")[0] + ("/" if "/" in rest else "") for rest in rests)
    return _plain(200, "\n".join(names)) if names else _plain(404, "not found")


def _mac(instance_id: str) -> str:
    digits = f"{sum(ord(letter) * 257**place for place, letter in enumerate(instance_id)) % 16**10:010x}"
    return ":".join(["0e", *(digits[place : place + 2] for place in range(0, 10, 2))])


def _iso8601(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _plain(status: int, text: str) -> Response:
    return Response(status=status, headers={"Content-Type": "text/plain"}, body=text.encode())
