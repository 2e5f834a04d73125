"""Launch parameters from `resources.aws`, and the boot scripts (UserData): always the same text for the same values.

A worker first arms its lease, so that it ends itself if anything fails later. Then it installs its packages, fetches
the Ray token from SSM with its role, and joins the head. The script has no secret, as every process of the instance can
read it. The shell code is in `boot.sh` and `worker.sh`; this module sets its values.

`resolve` rents nothing. It creates what the account lacks and is free of charge: the security group, the published Ray
token, and this package's wheel in the bucket.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Literal

from rubberband.cloud.aws.calls import AwsSession, Machines, NodeStart, Reservation
from rubberband.cloud.aws.capacity import reservation_of
from rubberband.cloud.aws.client import type_facts
from rubberband.cloud.aws.errors import in_one_line
from rubberband.cloud.aws.images import built_image, choose_image
from rubberband.cloud.aws.installing import Installation, what_to_install
from rubberband.cloud.aws.joining import publish_token, token_parameter
from rubberband.cloud.aws.network import OwnInstance, choose_subnets, ensure_group, own_place
from rubberband.cloud.aws.prices import TypeFacts
from rubberband.cloud.aws.s3 import Packages
from rubberband.cloud.ray_head import ray_node
from rubberband.errors import InputError
from rubberband.spec.resources import Aws
from rubberband.values.environment import HASH_SEED

MAX_BYTES = 16 * 1024
"""EC2's limit of UserData, before base64."""
UV_VERSION = "0.13.9"
UV_SHA256 = (
    "d7f459fe4fd247d830351c75686d3996ace3c6f3f728eb0e85a30b7ada0cef19",
    "5435c5ce14a56431208ca0996416d310f1598e8c2c8ba707688985a16bb82dbe",
)
"""The installer that makes environments, as root: its version, and its wheels' digests for x86_64 and aarch64."""
_IS_OURS = re.compile(r"(^|/)rubberband[-_.]+tune(?![\w])", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Boot:
    """Values that the boot scripts of all instances of an experiment share."""

    region: str
    token_parameter: str
    """SSM parameter with the Ray token."""
    installation: Installation
    setup: tuple[str, ...] = ()
    """Shell commands, run as root after the installation."""
    built: bool = False
    """Whether the image has the environment (`rubberband cloud image build`), all but the driver's own package."""
    fetch: str = ""
    """The order of models and data that the machine fetches while it joins, as JSON; empty: none."""
    ray_settings: Mapping[str, str]
    """Environment of the Ray node."""
    device: Literal["cpu", "cuda"] = "cpu"
    """With `cuda`, an instance joins only if it has its GPUs, and its torch can use them."""


def worker_script(boot: Boot, start: NodeStart) -> str:
    """Return the UserData of a worker. Raises InputError if it exceeds EC2's 16 KB, by its set-up commands."""
    values = {
        "LEASE_S": str(max(1, int(start.lease_s))),
        "BOOT_S": str(max(1, int(max(start.lease_s, start.boot_s)))),
        "LIFETIME_S": str(max(1, int(start.lifetime_s))),
        "INSTANCES": start.instances,
        "HEAD_ADDRESS": start.head_address,
        "GPUS": str(start.gpus),
        "DEVICE": boot.device,
        "TOKEN": boot.token_parameter,
        "IMAGE_MARKER": start.image_marker,
        "FETCH": boot.fetch,
        "RAY_SETTINGS": tuple(f"{key}={value}" for key, value in sorted(boot.ray_settings.items())),
        **_shared_values(boot.region, boot.installation, boot.setup),
    }
    return script(
        values,
        "boot.sh",
        *(["built.sh"] if boot.built else []),
        *(["builder.sh"] if start.image_marker else []),
        "worker.sh",
    )


def head_script(
    region: str,
    installed: Installation,
    setup: tuple[str, ...],
    folders: tuple[str, ...],
    *,
    idle_s: float = 0.0,
    bucket: str = "",
) -> str:
    """Return the UserData of the head, which fetches packed folders from s3:// addresses. Raises as a worker's does.

    The head stops itself once nothing has run on it for `idle_s` seconds; 0: never. It remembers `bucket`, as
    `rubberband aws setup` does on a laptop.
    """
    values: dict[str, str | tuple[str, ...]] = {
        "FOLDERS": folders,
        "BUCKET": bucket,
        "IDLE_S": str(int(idle_s)),
        "MADE_OF": made_of(installed, setup, idle_s=idle_s),
    }
    return script({**values, **_shared_values(region, installed, setup)}, "boot.sh", "head.sh")


def made_of(installed: Installation, setup: tuple[str, ...], *, idle_s: float = 0.0) -> str:
    """Return a digest of a head's code, packages and settings, and the requirement of its rubberband.

    Where the packages lie in a bucket makes no difference.
    """
    packages = [address.rpartition("#")[2] for address in (*installed.wheels, installed.constraints)]
    words = [installed.python, installed.index_url, installed.requirements, packages, setup, int(idle_s)]
    own = next((word for word in installed.requirements if _IS_OURS.search(word)), "")
    return f"{hashlib.sha256(json.dumps(words).encode()).hexdigest()[:16]} {own}".rstrip()


def remake_script(key: str, boot: str) -> str:
    """Return the script that makes a head that is there anew by the boot script `boot`, once for each `key`."""
    return script({"KEY": key, "BOOT": base64.b64encode(gzip.compress(boot.encode(), mtime=0)).decode()}, "remake.sh")


def script(values: Mapping[str, str | tuple[str, ...]], *shell_files: str) -> str:
    """Return a bash script that sets the quoted values and continues with the shell files of this package."""
    lines = [f"{name}={_quoted(value)}" for name, value in values.items()]
    text = "\n".join(("#!/bin/bash", *lines, "", *(_shell(name) for name in shell_files)))
    if len(text.encode()) > MAX_BYTES:
        raise InputError(
            f"resources.aws.setup: the boot script has {len(text.encode())} bytes, and EC2 takes {MAX_BYTES}; shorten "
            "the commands, let one fetch a script, or keep checkpoints in a bucket (s3://…), which has room for more"
        )
    return text


def _shared_values(region: str, installed: Installation, setup: tuple[str, ...]) -> dict[str, str | tuple[str, ...]]:
    return {
        "REGION": region,
        "PYTHON_VERSION": installed.python,
        "REQUIREMENTS": installed.requirements,
        "WHEELS": installed.wheels,
        "INDEX_URL": installed.index_url or "",
        "UV_VERSION": UV_VERSION,
        "UV_SHA256": UV_SHA256,
        "CONSTRAINTS": installed.constraints,
        "SETUP": setup,
    }


def _quoted(value: str | tuple[str, ...]) -> str:
    return shlex.quote(value) if isinstance(value, str) else f"({' '.join(shlex.quote(each) for each in value)})"


@cache
def _shell(name: str) -> str:
    """Return a shell file of this package without its comments, as EC2's limit is small."""
    text = files("rubberband.cloud.aws").joinpath(name).read_text(encoding="utf-8")
    return re.sub(r"^ *# (?!shellcheck ).*\n", "", text, flags=re.MULTILINE)


def resolve(
    session: AwsSession,
    words: Aws,
    instance_type: str,
    *,
    checkpoints: str | None = None,
    place: OwnInstance | None = None,
    device: Literal["cpu", "cuda"] | None = None,
    token_path: Path | None = None,
    sleep: Callable[[float], None] = time.sleep,
    builds: bool = False,
    hash_seed: str = "0",
    fetch: str = "",
) -> Machines:
    """Return the launch parameters of instances of one type, on the owner's built image unless this call `builds` one.

    `checkpoints`: the store's URL, where the wheel is put. `device`: where trials train (None: on the GPUs of a type
    that has some). `fetch`: see `Boot`. `place`: this machine's in EC2 (None: by its metadata service). Raises
    InputError, in one line with the remedy, for a wrong setting in the file or the account.
    """
    with in_one_line():
        facts, packages = type_facts(session, instance_type), Packages(session, checkpoints)
        installed = what_to_install(packages, words)
        installs = bool(installed.requirements)
        own = None if builds else built_image(session, words, installed, facts)
        image, volume_gb = choose_image(session, words.image, facts, words.volume_gb, installs=installs, own=own)
        held = None if builds else reservation_of(session, words.reservation, instance_type)
        vpc, subnets = choose_subnets(session, words.subnets, instance_type, place or own_place())
        group = security_group(session, words, vpc, sleep)
        publish_token(session, words.owner, token_path)
    return Machines(
        image=image.image_id,
        subnets=subnets if held is None else _in_zone(subnets, held),
        security_group=group,
        instance_profile=words.worker_profile,
        key_name=words.key_name,
        owner=words.owner,
        volume_gb=volume_gb,
        root_device=image.root_device,
        further_disks=image.further_disks,
        reservation=held,
        user_data=_user_data(
            session.region,
            words,
            packages,
            installed,
            facts,
            built=own is not None,
            device=device,
            hash_seed=hash_seed,
            fetch=fetch,
        ),
    )


def _user_data(
    region: str,
    words: Aws,
    packages: Packages,
    installed: Installation,
    facts: TypeFacts,
    *,
    built: bool,
    device: Literal["cpu", "cuda"] | None,
    hash_seed: str,
    fetch: str,
) -> Callable[[NodeStart], str]:
    """Return the function that makes an instance's boot script, once its packages are in the bucket."""
    boot = Boot(
        region=region,
        token_parameter=token_parameter(words.owner),
        installation=installed,
        setup=words.setup,
        built=built,
        fetch=fetch,
        ray_settings=ray_node.SETTINGS | ray_node.NETWORK_SETTINGS | {HASH_SEED: hash_seed},
        device=device or ("cuda" if facts.gpus else "cpu"),
    )
    return partial(_script, packages, boot)


def _script(packages: Packages, boot: Boot, start: NodeStart) -> str:
    packages.renew()
    return worker_script(boot, start)


def _in_zone(subnets: Mapping[str, str], held: Reservation) -> dict[str, str]:
    """Return the subnet in a reservation's zone. Raises InputError without one."""
    if held.zone not in subnets:
        raise InputError(
            f"resources.aws.subnets: {held.reservation_id} is in {held.zone}, and the subnets are in "
            f"{', '.join(subnets)}; add a subnet in {held.zone}"
        )
    return {held.zone: subnets[held.zone]}


def security_group(session: AwsSession, words: Aws, vpc: str, sleep: Callable[[float], None] = time.sleep) -> str:
    """Return the group that instances and the head share. Raises as `ensure_group` does."""
    return words.security_group or ensure_group(session, words.owner, vpc, sleep=sleep)
