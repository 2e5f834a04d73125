"""Packages that an instance installs: the file's requirements, and the driver's own package and versions.

The versions of the driver's
packages are constraints (pip's -c), so that every instance installs the same ones.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import importlib.metadata
import re
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib.metadata import Distribution, distributions
from typing import TYPE_CHECKING

from rubberband.cloud.aws import installing
from rubberband.cloud.wheel import OTHER_WAYS, build_wheel, public_version
from rubberband.errors import InputError
from rubberband.installation import DISTRIBUTION, requirement
from rubberband.spec.resources import Aws
from rubberband.units import shown

if TYPE_CHECKING:
    from rubberband.cloud.aws.s3 import Packages

_OUR_WHEEL = re.compile(r"(https|s3)://\S*/rubberband_tune-[^/\s]+\.whl(#\S*)?")
_OURS = re.compile(r"rubberband[-_.]+tune(?![-\w.]).*", re.IGNORECASE | re.DOTALL)
_OTHERS = re.compile(r"rubberband(?![-\w.]).*|\S*/rubberband-[^/\s]+\.whl(#\S*)?", re.IGNORECASE | re.DOTALL)
"""On a package index this name belongs to another project."""
_S3_WHEEL = re.compile(r"s3://[^/\s]+/\S*[^/\s]\.whl(#sha256=[0-9a-f]{64})?")
_EXTRAS = "[ray,aws]"


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


def _requirement(word: str) -> str:
    ours = _OUR_WHEEL.fullmatch(word) is not None
    if word.startswith("s3://"):
        return f"./wheels/{word.partition('#')[0].rpartition('/')[2]}{_EXTRAS if ours else ''}"
    return f"{DISTRIBUTION}{_EXTRAS} @ {word}" if ours else word


def what_to_install(packages: Packages, words: Aws) -> Installation:
    """Return what an instance installs: the file's requirements, and the driver's rubberband unless they name one.

    Packages have the driver's versions, except those whose version the file names. The driver's rubberband is sent as
    a wheel through the bucket of the checkpoints; with an index of the user's, its version is installed from there.
    Without a session nothing is put into the bucket. Raises InputError if there is neither.
    """
    install = words.install or ""
    names_ours = any(_OURS.fullmatch(word) or _OUR_WHEEL.fullmatch(word) for word in words_of(install))
    if install.strip() != "none" and not names_ours:
        own = installing.upload_wheel(packages) if words.index_url is None else _at_the_index()
        install = f"{own} {install}"
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    found = installation(install, python=python, ray=importlib.metadata.version("ray"), index_url=words.index_url)
    if not found.requirements:
        return found
    return replace(found, constraints=sent(packages, constraints(words_of(install))))


def _at_the_index() -> str:
    version = public_version()
    if version == "0":
        raise InputError(
            "resources.aws.index_url: this rubberband was never installed and has no version to ask for there; install "
            f"it (pip install -e .), or name one by resources.aws.install: {DISTRIBUTION}[ray,aws]==VERSION"
        )
    return f"{requirement('ray', 'aws')}=={version}"


def upload_wheel(packages: Packages) -> str:
    """Put the wheel into the bucket of the checkpoint store, unless it is there. Return its s3:// address and digest.

    Without a session nothing is written. Raises InputError if the store is no bucket or cannot be written, or if this
    package cannot be packed; botocore's errors.
    """
    from rubberband.cloud.aws.s3 import is_bucket  # with boto3, which nodes of a Ray cluster do without

    if not is_bucket(packages.checkpoints):
        raise InputError(
            "resources.checkpoints: instances install this driver's rubberband from a bucket; give "
            f"s3://bucket/prefix, {OTHER_WAYS}"
        )
    name, content = build_wheel()
    address = packages.put(f"wheels/{name}", content)
    return f"{address}#sha256={hashlib.sha256(content).hexdigest()}"


# A constraint requires no package: it only sets the version of one that is installed. So packages that exist only on
# the driver's platform do no harm.


_CHOSEN_BY_TORCH = re.compile(r"(nvidia|cuda|triton|pytorch-triton)(-.*)?")
"""Every build of torch requires exact versions of these: the driver's build may be for another CUDA."""
_NOT_INSTALLED = frozenset({"pip", "setuptools", "wheel", "uv", DISTRIBUTION})
_REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9][-_.A-Za-z0-9]*)\s*(\[[^\]]*\])?(?P<rest>.*)", re.DOTALL)
_VERSION = re.compile(r"(\d+!)?\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?(\+\S*)?")
"""Version of an index (PEP 440); Linux distributions have others, which installers refuse."""
_WHEEL = re.compile(r"\S*/(?P<name>[^/\s-]+)-[^/\s]*\.whl(#\S*)?")


def constraints(install: Iterable[str] = (), found: Iterable[Distribution] | None = None) -> str:
    """Return a line `name==version` for each package of this Python's environment, sorted.

    Packages whose version or source `install` (of `resources.aws.install`) names are left out, and packages installed
    from a folder, a file or a repository, which no index has. A build tag (`2.9.0+cpu`) is dropped, as the build for a
    GPU has another.
    """
    left_out = _NOT_INSTALLED | {name for word in install if (name := _chosen(word))}
    versions: dict[str, str] = {}
    for package in distributions() if found is None else found:
        # A broken installation has no name or version. Of two packages of one name, Python imports the first.
        name, version = package.metadata["Name"], package.metadata["Version"]
        if name and canonical(name) not in versions:
            of_an_index = _VERSION.fullmatch(version or "") and package.read_text("direct_url.json") is None
            versions[canonical(name)] = version.partition("+")[0] if of_an_index else ""
    kept = {name: version for name, version in versions.items() if version and name not in left_out}
    return "".join(f"{name}=={kept[name]}\n" for name in sorted(kept) if not _CHOSEN_BY_TORCH.fullmatch(name))


def sent(packages: Packages, text: str) -> str:
    """Return the constraints for a boot script: their s3:// address and digest, or, without a bucket, the compressed
    text. Raises InputError if the bucket cannot be written; botocore's errors.
    """
    from rubberband.cloud.aws.s3 import is_bucket

    if not is_bucket(packages.checkpoints):
        return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()
    digest = hashlib.sha256(text.encode()).hexdigest()
    address = packages.put(f"constraints/{digest[:12]}.txt", text.encode())
    return f"{address}#sha256={digest}"


def canonical(name: str) -> str:
    """Return a package's normalized name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _chosen(word: str) -> str:
    """Return the package whose version or source a requirement sets; empty if it sets neither."""
    if wheel := _WHEEL.fullmatch(word):
        return canonical(wheel["name"])
    found = _REQUIREMENT.fullmatch(word)
    return canonical(found["name"]) if found and found["rest"].partition(";")[0].strip() else ""
