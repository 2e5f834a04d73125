"""AWS as boto3 reaches it: one region, the credentials of the environment (or of this machine's role), few retries."""

from __future__ import annotations

import threading
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError

import rubberband
from rubberband.cloud.aws.errors import explain
from rubberband.errors import InputError

_RETRIES = {"mode": "adaptive", "total_max_attempts": 5}
_CONNECT_S, _READ_S = 5.0, 20.0
_CONNECTIONS = 32
"""At once: as many launches as run in parallel share a client."""


class BotoSession:
    """A `rubberband.cloud.aws.machines.Session` of boto3. Safe to use from several threads, as its clients are."""

    def __init__(self, region: str) -> None:
        """Raises InputError if the environment's settings of AWS do not hold together."""
        self._region = region
        self._mutex = threading.Lock()
        self._clients: dict[str, Any] = {}
        self._config = Config(
            connect_timeout=_CONNECT_S,
            read_timeout=_READ_S,
            retries=_RETRIES,
            max_pool_connections=_CONNECTIONS,
            user_agent_extra=f"rubberband/{rubberband.__version__}",
        )
        try:
            self._boto = boto3.session.Session(region_name=region)
        except BotoCoreError as error:
            raise InputError(explain(error)) from error

    @property
    def region(self) -> str:
        """Such as `us-east-1`."""
        return self._region

    def client(self, service: str) -> Any:
        """The client of a service, always the same one. Raises InputError if there cannot be one in this region."""
        with self._mutex:
            if service not in self._clients:
                try:
                    self._clients[service] = self._boto.client(service, region_name=_home(service), config=self._config)
                except (BotoCoreError, ValueError) as error:
                    raise InputError(explain(error)) from error
            return self._clients[service]


def _home(service: str) -> str | None:
    """The region of a service that is not in every one; None: the session's."""
    return "us-east-1" if service == "pricing" else None


def open_session(region: str) -> BotoSession:
    """AWS in `region`; the environment's AWS_ENDPOINT_URL, AWS_PROFILE and so on hold. It makes no call yet.

    Raises InputError if the settings do not hold together (a profile that is not there, no such region's name).
    """
    return BotoSession(region)
