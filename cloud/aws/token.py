"""The Ray token in SSM: the driver publishes it as a SecureString, instances fetch it with their role.

It is the one secret of a cluster and never in UserData. One owner has one token, which all of the owner's drivers
share: a machine without one adopts what is published. As `python -m rubberband.cloud.aws.token PARAMETER REGION FILE`
it writes the published token to a file that only its user can read.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from rubberband.cloud.aws.calls import AwsSession
from rubberband.cloud.aws.errors import code_of, explain
from rubberband.cloud.local import ray_node
from rubberband.errors import InputError

_ATTEMPTS = 20
_PAUSE_S = 3.0


def token_parameter(owner: str) -> str:
    """Name of the parameter that holds the token of an owner."""
    return f"/rubberband/{owner}/ray-token"


def publish_token(session: AwsSession, owner: str, path: Path | None = None) -> None:
    """Make the token at `path` (by default this user's) and the published one the same.

    Raises InputError if both exist and differ, and botocore's errors.
    """
    path = path or ray_node.default_token_path()
    published = read_token(session, token_parameter(owner))
    if published is not None and not path.exists():
        write_private(path, published)
    own = ray_node.ensure_token(path).read_text().strip()
    if published is None:
        _put(session.client("ssm"), token_parameter(owner), own)
    elif published != own:
        raise InputError(
            f"resources.aws.owner: another driver has published another Ray token as {token_parameter(owner)}; use "
            f"another owner here, or take that token over (delete {path}), or end that owner's cluster: "
            f"`rubberband down --owner {owner}`"
        )


def read_token(session: AwsSession, parameter: str) -> str | None:
    """The published token; None if there is none. Raises botocore's errors."""
    try:
        answer = session.client("ssm").get_parameter(Name=parameter, WithDecryption=True)
    except Exception as error:
        if code_of(error) == "ParameterNotFound":
            return None
        raise
    return str(answer["Parameter"]["Value"])


def delete_token(session: AwsSession, owner: str) -> bool:
    """Take the published token back; whether there was one. Raises botocore's errors."""
    try:
        session.client("ssm").delete_parameter(Name=token_parameter(owner))
    except Exception as error:
        if code_of(error) == "ParameterNotFound":
            return False
        raise
    return True


def write_private(path: Path, token: str) -> None:
    """Write the token to a file that only this user can read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(token)


def _put(ssm: Any, parameter: str, token: str) -> None:
    try:
        ssm.put_parameter(Name=parameter, Value=token, Type="SecureString", Description="Ray token of RubberBand")
    except Exception as error:
        if code_of(error) != "ParameterAlreadyExists":
            raise
        raise InputError(f"another driver has just published a token as {parameter}; start again") from None


def main(parameter: str, region: str, path: Path) -> int:
    """Fetch the token on an instance; its role's credentials may take a while to be there."""
    from rubberband.cloud.aws.client import open_session

    said = ""
    for attempt in range(_ATTEMPTS):
        try:
            token = read_token(open_session(region), parameter)
        except Exception as error:
            said = explain(error)
        else:
            if token is not None:
                write_private(path, token)
                return 0
            said = f"there is no parameter {parameter} in {region}"
        print(f"no Ray token yet, attempt {attempt + 1} of {_ATTEMPTS}: {said}", file=sys.stderr, flush=True)
        time.sleep(_PAUSE_S)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
