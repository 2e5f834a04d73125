"""The boot script of an instance (UserData): always the same text for the same values.

A worker first arms its lease, so that it ends itself if anything fails later. Then it installs its packages, fetches
the Ray token from SSM with its role, and joins the head. The script has no secret, as every process of the instance can
read it. The shell code is in `boot.sh` and `worker.sh`; this module sets its values.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

from rubberband.cloud.aws.calls import NodeStart
from rubberband.errors import InputError
from rubberband.installation import DISTRIBUTION
from rubberband.units import shown

MAX_BYTES = 16 * 1024
"""EC2's limit of UserData, before base64."""
UV_VERSION = "0.13.9"
UV_SHA256 = (
    "d7f459fe4fd247d830351c75686d3996ace3c6f3f728eb0e85a30b7ada0cef19",
    "5435c5ce14a56431208ca0996416d310f1598e8c2c8ba707688985a16bb82dbe",
)
"""The installer that makes environments, as root: its version, and its wheels' digests for x86_64 and aarch64."""

_OUR_WHEEL = re.compile(r"(https|s3)://\S*/rubberband_tune-[^/\s]+\.whl(#\S*)?")
_OURS = re.compile(r"rubberband[-_.]+tune(?![-\w.]).*", re.IGNORECASE | re.DOTALL)
_OTHERS = re.compile(r"rubberband(?![-\w.]).*|\S*/rubberband-[^/\s]+\.whl(#\S*)?", re.IGNORECASE | re.DOTALL)
"""On a package index this name belongs to another project."""
_S3_WHEEL = re.compile(r"s3://[^/\s]+/\S*[^/\s]\.whl(#sha256=[0-9a-f]{64})?")
_EXTRAS = "[ray,aws]"
_IS_OURS = re.compile(r"(^|/)rubberband[-_.]+tune(?![\w])", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """Packages that an instance installs first; none without requirements."""

    python: str
    """Such as `3.11`: the driver's, as Ray requires."""
    requirements: tuple[str, ...] = ()
    """pip's requirements; wheels of `wheels` by their path, such as `./wheels/mine-0.1-py3-none-any.whl`."""
    wheels: tuple[str, ...] = ()
    """s3:// addresses of wheels, which the instance fetches with its role into ./wheels, and checks if the address
    ends in #sha256=…."""
    index_url: str | None = None
    """pip's index; None: PyPI, or as configured in the image."""
    constraints: str = ""
    """Versions of the driver's packages, as `wheel.sent` returns them; empty: any that fit."""


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
    ray_settings: Mapping[str, str]
    """Environment of the Ray node."""
    device: Literal["cpu", "cuda"] = "cpu"
    """With `cuda`, an instance joins only if it has its GPUs, and its torch can use them."""


def brings_the_package(install: str) -> bool:
    """Return whether `resources.aws.install` names this package, or is `none`. Raises InputError."""
    return install.strip() == "none" or any(
        _OURS.fullmatch(word) or _OUR_WHEEL.fullmatch(word) for word in words_of(install)
    )


def installation(install: str, *, python: str, ray: str, index_url: str | None = None) -> Installation:
    """Return the installation of `resources.aws.install`: requirements, wheels by URL, or `none`.

    `ray` is the driver's version. A wheel of this package gets its extras. Raises InputError for an unclosed quote, and
    for words that would install this package from a public index, or the other project of its name.
    """
    if install.strip() == "none":
        return Installation(python=python)
    words = words_of(install)
    for word in words:
        if word.startswith("s3://") and not _S3_WHEEL.fullmatch(word):
            raise InputError(f"resources.aws.install: {shown(word)} is not a wheel; write s3://bucket/….whl")
        if _OTHERS.fullmatch(word):
            raise InputError(
                f"resources.aws.install: {shown(word)} is another project on the package index; this one is "
                f"{DISTRIBUTION}, and instances install the driver's by themselves: leave it out"
            )
        if index_url is None and _OURS.fullmatch(word) and "@" not in word:
            raise InputError(
                f"resources.aws.install: {shown(word)} does not say where to install from; give the index that has it "
                "(resources.aws.index_url), write the URL of a wheel, or leave it out for the driver's own"
            )
    return Installation(
        python=python,
        requirements=(*(_requirement(word) for word in words), f"ray=={ray}"),
        wheels=tuple(word for word in words if word.startswith("s3://")),
        index_url=index_url,
    )


def words_of(install: str) -> tuple[str, ...]:
    """Split `resources.aws.install` as a shell would. Raises InputError."""
    try:
        return tuple(shlex.split(install))
    except ValueError as error:
        raise InputError(
            f"resources.aws.install: {shown(install)} has an unclosed quote ({error}); write requirements as on pip's "
            "command line"
        ) from None


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


def _requirement(word: str) -> str:
    ours = _OUR_WHEEL.fullmatch(word) is not None
    if word.startswith("s3://"):
        return f"./wheels/{word.partition('#')[0].rpartition('/')[2]}{_EXTRAS if ours else ''}"
    return f"{DISTRIBUTION}{_EXTRAS} @ {word}" if ours else word


def _quoted(value: str | tuple[str, ...]) -> str:
    return shlex.quote(value) if isinstance(value, str) else f"({' '.join(shlex.quote(each) for each in value)})"


@cache
def _shell(name: str) -> str:
    """Return a shell file of this package without its comments, as EC2's limit is small."""
    text = files("rubberband.cloud.aws").joinpath(name).read_text(encoding="utf-8")
    return re.sub(r"^ *# (?!shellcheck ).*\n", "", text, flags=re.MULTILINE)
