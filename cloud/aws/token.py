"""The Ray token in SSM: the driver publishes it as a SecureString, instances fetch it with their role.

It is the one secret of a cluster and never in UserData. All drivers of an owner share one token; a machine without one
adopts the published one. `python -m rubberband.cloud.aws.token PARAMETER REGION FILE` writes the published token to a
file that only its user can read.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from rubberband.atomic import make_directories, write_atomically
from rubberband.cloud.aws.calls import AwsSession
from rubberband.cloud.aws.errors import explain, ignoring
from rubberband.cloud.ray_head import ray_node
from rubberband.errors import InputError

_ATTEMPTS = 20
_PAUSE_S = 3.0


def token_parameter(owner: str) -> str:
    """Return the name of the parameter that holds the token of an owner."""
    return f"/rubberband/{owner}/ray-token"


def publish_token(session: AwsSession, owner: str, path: Path | None = None) -> None:
    """Make the token at `path` (by default this user's) and the published one the same.

    Raises InputError if both exist and differ, and botocore's errors.
    """
    path, parameter = path or ray_node.default_token_path(), token_parameter(owner)
    published = read_token(session, parameter)
    if published is not None and not path.exists():
        write_private(path, published)
    own = ray_node.ensure_token(path).read_text().strip()
    if published is None:
        with ignoring("ParameterAlreadyExists"):
            session.client("ssm").put_parameter(
                Name=parameter, Value=own, Type="SecureString", Description="Ray token of RubberBand"
            )
            return
        raise InputError(f"another driver has just published a token as {parameter}; start again")
    if published != own:
        raise InputError(
            f"resources.aws.owner: another driver has published another Ray token as {parameter}; use "
            f"another owner here, or take that token over (delete {path}), or end that owner's cluster: "
            f"`rubberband cloud down --owner {owner}`"
        )


def read_token(session: AwsSession, parameter: str) -> str | None:
    """Return the published token; None if there is none. Raises botocore's errors."""
    with ignoring("ParameterNotFound"):
        return str(session.client("ssm").get_parameter(Name=parameter, WithDecryption=True)["Parameter"]["Value"])
    return None


def delete_token(session: AwsSession, owner: str) -> bool:
    """Delete the published token and return whether there was one. Raises botocore's errors."""
    with ignoring("ParameterNotFound"):
        session.client("ssm").delete_parameter(Name=token_parameter(owner))
        return True
    return False


def write_private(path: Path, token: str) -> None:
    """Write the token to a file that only this user can read."""
    make_directories(path.parent)
    write_atomically(path, token.encode(), durable=False, mode=0o600)


def main(parameter: str, region: str, path: Path) -> int:
    """Fetch the token on an instance, whose role's credentials may take a while to become available."""
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
