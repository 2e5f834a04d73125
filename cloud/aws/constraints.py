"""The versions of the driver's packages, as constraints (pip's -c), so that every instance installs the same ones.

A constraint asks for no package: it says which version is taken of those that are installed. So packages that only the
driver's platform has do no harm.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions

from rubberband.cloud.aws.bucket import is_bucket, put
from rubberband.cloud.aws.machines import Session
from rubberband.distribution import DISTRIBUTION

_CHOSEN_BY_TORCH = re.compile(r"(nvidia|cuda|triton|pytorch-triton)(-.*)?")
"""Every build of torch asks for exact versions of these: those of the driver's build may be of another CUDA."""
_NOT_INSTALLED = frozenset({"pip", "setuptools", "wheel", "uv", DISTRIBUTION})
_REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9][-_.A-Za-z0-9]*)\s*(\[[^\]]*\])?(?P<rest>.*)", re.DOTALL)
_VERSION = re.compile(r"(\d+!)?\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?(\+\S*)?")
"""As an index has it (PEP 440); packages of a Linux distribution have others, which installers refuse to read."""
_WHEEL = re.compile(r"\S*/(?P<name>[^/\s-]+)-[^/\s]*\.whl(#\S*)?")


def constraints(install: Iterable[str] = (), found: Iterable[Distribution] | None = None) -> str:
    """One line `name==version` for each package of this Python's environment, sorted: the same for the same packages.

    `install`: requirements of `resources.aws.install`; a package whose version or source they name is left out. So is
    a package that was installed from a folder, a file or a repository: no index has it. Of a version with a build tag
    (`2.9.0+cpu`) only the public part is asked for: the build for a GPU is another one.
    """
    left_out = _NOT_INSTALLED | {name for word in install if (name := _chosen(word))}
    versions: dict[str, str] = {}
    for package in distributions() if found is None else found:
        # A broken installation has no name or no version; the first of two of one name is the one that is imported.
        name, version = package.metadata["Name"], package.metadata["Version"]
        if name and canonical(name) not in versions:
            of_an_index = _VERSION.fullmatch(version or "") and package.read_text("direct_url.json") is None
            versions[canonical(name)] = version.partition("+")[0] if of_an_index else ""
    kept = {name: version for name, version in versions.items() if version and name not in left_out}
    return "".join(f"{name}=={kept[name]}\n" for name in sorted(kept) if not _CHOSEN_BY_TORCH.fullmatch(name))


def sent(session: Session | None, checkpoints: str | None, text: str) -> str:
    """How a boot script is given the constraints: where they are in the bucket of the checkpoint store (s3:// address
    and digest), or themselves, compressed, where the store is no bucket.

    Raises InputError if the bucket cannot be written; botocore's errors.
    """
    if checkpoints is None or not is_bucket(checkpoints):
        return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()
    digest = hashlib.sha256(text.encode()).hexdigest()
    address = put(session, checkpoints, f"constraints/{digest[:12]}.txt", text.encode(), unless_there=True)
    return f"{address}#sha256={digest}"


def canonical(name: str) -> str:
    """The name of a package as an index compares it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _chosen(word: str) -> str:
    """The package whose version or source a requirement says; empty if it leaves that open."""
    if wheel := _WHEEL.fullmatch(word):
        return canonical(wheel["name"])
    found = _REQUIREMENT.fullmatch(word)
    return canonical(found["name"]) if found and found["rest"].partition(";")[0].strip() else ""
