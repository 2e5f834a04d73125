"""Values of `resources.secrets` on their way to the head: an encrypted parameter of SSM, deleted when it is read.

The history of Run Command keeps all that it sends, so that it sends the parameter's name only. AWS deletes a parameter
that no head has read.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from rubberband.cloud.aws.calls import AwsSession
from rubberband.cloud.aws.errors import ignoring, in_one_line
from rubberband.errors import InputError

MOST_BYTES = 6144
"""8 KB, the most of a parameter, before base64, which hides `{{`: SSM takes no value with it."""
_KEPT_S = 3600.0
_ATTEMPTS = 5
_PAUSE_S = 2.0


def packed_secrets(values: Mapping[str, str]) -> str:
    """Return variables as the text of a parameter; empty without any. Raises InputError for values that are too long
    for one."""
    if not values:
        return ""
    content = json.dumps(dict(values)).encode()
    if len(content) > MOST_BYTES:
        raise InputError(
            f"resources.secrets: names and values have {len(content)} bytes, and {MOST_BYTES} can be sent to a head; "
            "leave --on head out, or put a long value into a store that trials read, and list its key"
        )
    return base64.b64encode(content).decode()


def put_secrets(session: AwsSession, owner: str, key: str, packed: str, *, clock: Callable[[], float]) -> str:
    """Put values where the owner's head can read them, and return the parameter's name. Raises InputError."""
    name = f"/rubberband/{owner}/secrets/{key}"
    until = datetime.fromtimestamp(clock() + _KEPT_S, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
    with in_one_line():
        session.client("ssm").put_parameter(
            Name=name,
            Value=packed,
            Type="SecureString",
            Tier="Advanced",  # no other expires
            Policies=json.dumps([{"Type": "Expiration", "Version": "1.0", "Attributes": {"Timestamp": until}}]),
            Description="Secrets of RubberBand, until a head reads them",
        )
    return name


def take_secrets(session: AwsSession, name: str, *, sleep: Callable[[float], None] = time.sleep) -> dict[str, str]:
    """Return the variables that a parameter has, and delete it. Raises InputError if it is gone."""
    with in_one_line():
        for _ in range(_ATTEMPTS):  # it may have been put a moment ago
            with ignoring("ParameterNotFound"):
                found = session.client("ssm").get_parameter(Name=name, WithDecryption=True)["Parameter"]["Value"]
                delete_secrets(session, name)
                return dict(json.loads(base64.b64decode(found)))
            sleep(_PAUSE_S)
    raise InputError(
        f"the values of resources.secrets are not in SSM ({name}): they are read once, and within an hour; "
        "give the command again"
    )


def delete_secrets(session: AwsSession, name: str) -> None:
    """Delete a parameter, if it is there. Raises botocore's errors."""
    with ignoring("ParameterNotFound"):
        session.client("ssm").delete_parameter(Name=name)
