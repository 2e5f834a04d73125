"""Steps of a worker before it joins the head: check its GPUs, fetch the Ray token.

`python3 -m rubberband.cloud.aws.joining gpus GPUS` runs there: a late NVIDIA driver lets pip install a torch without
CUDA silently, and trials would train on the CPU at the price of GPUs. `joining token PARAMETER REGION FILE` writes the
token to a file that only its user can read.

The token is the one secret of a cluster and never in UserData: the driver publishes it in SSM as a SecureString, and
instances fetch it with their role. All drivers of an owner share one; a machine without one adopts the published one.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rubberband.cloud.aws.calls import AwsSession
from rubberband.cloud.aws.errors import explain, ignoring
from rubberband.cloud.ray_head import ray_node
from rubberband.errors import InputError
from rubberband.files import make_directories, write_atomically
from rubberband.units import counted, error_line

WAIT_S = 120.0
"""Longest delay of the driver."""
_LOOK_S = 5.0
_HUNG_S = 120.0
_TORCH = """
try:
    import torch
except ModuleNotFoundError:
    raise SystemExit(0)  # trials use something else
if not torch.backends.cuda.is_built():
    raise SystemExit(f"torch {torch.__version__} is a build without CUDA")
for index in range(torch.cuda.device_count()):
    if torch.ones(8, device=f"cuda:{index}").sum().item() != 8.0:
        raise SystemExit(f"GPU {index} calculates wrongly")
if torch.cuda.device_count() < GPUS:
    torch.cuda.init()  # says why, if it can
    raise SystemExit(f"torch {torch.__version__} sees {torch.cuda.device_count()} of GPUS GPUs")
"""


Run = Callable[[list[str]], tuple[bool, str]]
"""Runs a command: whether it succeeded, and its output."""


def gpu_trouble(
    gpus: int,
    *,
    run: Run | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Return the problem with its remedy, in one line; empty if `gpus` GPUs can be used.

    Missing or failing GPUs may still appear within `WAIT_S`.
    """
    run = run or _run
    deadline = clock() + WAIT_S
    while trouble := _look_at_gpus(gpus, run):
        if clock() >= deadline or "without CUDA" in trouble:
            return trouble
        sleep(_LOOK_S)
    return ""


def _look_at_gpus(gpus: int, run: Run) -> str:
    ok, listed = run(["nvidia-smi", "-L"])
    found = sum(line.startswith("GPU ") for line in listed.splitlines())
    if found < gpus:
        why = "" if ok else f" ({_what_failed(listed)})"
        return (
            f"{found} of {counted(gpus, 'GPU')} found within {WAIT_S:.0f} s{why}; give an image with a driver for them "
            "(resources.aws.image), or another type"
        )
    ok, text = run([sys.executable, "-c", _TORCH.replace("GPUS", str(gpus))])
    if ok:
        return ""
    fix = "give a fitting build or driver (resources.aws.index_url, resources.aws.image), or another type"
    return f"{_what_failed(text)[:110]}; {fix}"


def _run(command: list[str]) -> tuple[bool, str]:
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=_HUNG_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, f"{command[0]}: {getattr(error, 'strerror', None) or 'no answer'}"
    return ran.returncode == 0, ran.stdout or ran.stderr


def _what_failed(text: str) -> str:
    return error_line(text) or "it said nothing"


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


def fetch_token(parameter: str, region: str, path: Path) -> int:
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


def main(what: str, *words: str) -> int:
    """Do one step, `gpus` or `token`, and return its exit status."""
    if what == "gpus":
        if trouble := gpu_trouble(int(words[0])):
            print(trouble, flush=True)
        return int(bool(trouble))
    parameter, region, path = words
    return fetch_token(parameter, region, Path(path))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
