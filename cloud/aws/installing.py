"""Packages that an instance installs: the file's requirements, and the driver's own package and versions.

The wheel of this package is built from the running files, always with the same bytes. The versions of the driver's
packages are constraints (pip's -c), so that every instance installs the same ones.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import importlib.metadata
import io
import re
import shlex
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rubberband
from rubberband.cloud.aws import installing
from rubberband.errors import InputError
from rubberband.installation import DISTRIBUTION, install_hint, requirement
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
    if not brings_the_package(install):
        own = installing.upload_wheel(packages) if words.index_url is None else _at_the_index()
        install = f"{own} {install}"
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    found = installation(install, python=python, ray=_ray_version(), index_url=words.index_url)
    if not found.requirements:
        return found
    return replace(found, constraints=sent(packages, constraints(words_of(install))))


def _at_the_index() -> str:
    version = installing.public_version()
    if version == "0":
        raise InputError(
            "resources.aws.index_url: this rubberband was never installed and has no version to ask for there; install "
            f"it (pip install -e .), or name one by resources.aws.install: {DISTRIBUTION}[ray,aws]==VERSION"
        )
    return f"{requirement('ray', 'aws')}=={version}"


def _ray_version() -> str:
    try:
        return importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        raise InputError(f"ray is not installed here; run {install_hint('ray', 'aws')}") from None


_FILE_NAME = DISTRIBUTION.replace("-", "_")
_EPOCH = (1980, 1, 1, 0, 0, 0)
_OTHER_WAYS = "or name what instances install instead: resources.aws.index_url, or install: the URL of a wheel"


def upload_wheel(packages: Packages) -> str:
    """Put the wheel into the bucket of the checkpoint store, unless it is there. Return its s3:// address and digest.

    Without a session nothing is written. Raises InputError if the store is no bucket or cannot be written, or if this
    package cannot be packed; botocore's errors.
    """
    from rubberband.cloud.aws.s3 import is_bucket  # with boto3, which nodes of a Ray cluster do without

    if not is_bucket(packages.checkpoints):
        raise InputError(
            "resources.checkpoints: instances install this driver's rubberband from a bucket; give "
            f"s3://bucket/prefix, {_OTHER_WAYS}"
        )
    name, content = build_wheel()
    address = packages.put(f"wheels/{name}", content)
    return f"{address}#sha256={hashlib.sha256(content).hexdigest()}"


def build_wheel(root: Path | None = None) -> tuple[str, bytes]:
    """Return name and content of the wheel, whose version ends in a plus and the digest of its content.

    `root`: the package's folder, in a checkout or as pip installed it. Raises InputError if a file cannot be read, or
    was changed after the installation.
    """
    root = root or Path(rubberband.__file__).parent
    try:
        content = dict(sorted(_files(root).items()))
        needs = _needs(root, content)
    except OSError as error:
        raise InputError(
            f"resources.aws.install: {error.filename} of this rubberband cannot be packed for instances "
            f"({error.strerror}); make it readable, {_OTHER_WAYS}"
        ) from None
    digest = hashlib.sha256(_metadata(needs, ""))
    for path, data in content.items():
        digest.update(f"{path}\0{len(data)}\0".encode() + data)
    version = f"{public_version()}+{digest.hexdigest()[:12]}"
    info = f"{_FILE_NAME}-{version}.dist-info"
    content[f"{info}/METADATA"] = _metadata(needs, version)
    content[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: rubberband\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    content[f"{info}/entry_points.txt"] = b"[console_scripts]\nrubberband = rubberband.cli:main\n"
    content[f"{info}/RECORD"] = _record(content, f"{info}/RECORD")
    return f"{_FILE_NAME}-{version}-py3-none-any.whl", zipped(content)


def needs(root: Path | None = None) -> list[str]:
    """Return the metadata lines with the package's requirements. Raises as `build_wheel` does."""
    root = root or Path(rubberband.__file__).parent
    return _needs(root, _files(root))


def public_version() -> str:
    """Return the version without its part after a plus; `0` for a checkout that was never installed."""
    return rubberband.__version__.partition("+")[0]


def zipped(content: dict[str, bytes]) -> bytes:
    """Return a zip archive of path -> bytes, the same for the same content."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in content.items():
            entry = zipfile.ZipInfo(path, _EPOCH)
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(entry, data)
    return buffer.getvalue()


def _files(root: Path) -> dict[str, bytes]:
    """Return path in the wheel -> bytes; sub-packages may be links, as in a checkout. Raises OSError."""
    found: dict[str, bytes] = {}
    for path in root.iterdir():
        if path.name == "__pycache__" or path.name.startswith("."):
            continue
        if path.is_dir():
            found |= {f"{root.name}/{inner}": data for inner, data in _files(path).items()}
        else:
            found[f"{root.name}/{path.name}"] = path.read_bytes()
    return found


def _metadata(needs: list[str], version: str) -> bytes:
    return "\n".join(("Metadata-Version: 2.1", f"Name: {DISTRIBUTION}", f"Version: {version}", *needs, "")).encode()


def _needs(root: Path, content: dict[str, bytes]) -> list[str]:
    pyproject = root.resolve().parent / "pyproject.toml"  # an editable install is a link to it
    project: dict[str, Any] = {}
    if pyproject.is_file():
        try:
            project = tomllib.loads(pyproject.read_text(encoding="utf-8")).get("project", {})
        except ValueError as error:
            raise InputError(f"resources.aws.install: {pyproject} cannot be read ({error}); correct it") from None
    if project.get("name") != DISTRIBUTION:
        return _needs_as_installed(root, content)
    lines = [f"Requires-Python: {project['requires-python']}"]  # the installed metadata may be older than a checkout
    lines += [f"Requires-Dist: {need}" for need in project["dependencies"]]
    for extra, needs in project["optional-dependencies"].items():
        lines += [f"Provides-Extra: {extra}", *(f'Requires-Dist: {need}; extra == "{extra}"' for need in needs)]
    return lines


def _needs_as_installed(root: Path, content: dict[str, bytes]) -> list[str]:
    try:
        installed = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        raise InputError(
            f"resources.aws.install: the rubberband in {root} was never installed, so what it needs is unknown; "
            f"install it with pip, {_OTHER_WAYS}"
        ) from None
    if changed := _changed(installed, root, content):
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise InputError(
            f"resources.aws.install: {DISTRIBUTION} {installed.version} in {root.parent} was changed after its "
            f"installation ({', '.join(changed[:3])}{more}); reinstall it (pip install --force-reinstall), run a "
            f"checkout (pip install -e .), {_OTHER_WAYS}"
        )
    lines = (installed.read_text("METADATA") or "").partition("\n\n")[0].splitlines()
    return [line for line in lines if line.startswith(("Requires-Python:", "Requires-Dist:", "Provides-Extra:"))]


def _changed(installed: Distribution, root: Path, content: dict[str, bytes]) -> list[str]:
    """Return the package's files that differ from pip's RECORD."""
    written = {
        file.as_posix(): file.hash
        for file in installed.files or ()
        if file.parts[0] == root.name and "__pycache__" not in file.parts
    }
    if not written or Path(str(installed.locate_file(root.name))).resolve() != root.resolve():
        return ["its files are not listed"]
    changed = [f"{path} is missing" for path in written.keys() - content.keys()]
    changed += [f"{path} was added" for path in content.keys() - written.keys()]
    for path in written.keys() & content.keys():
        noted = written[path]
        if noted is not None and noted.value != _digest(content[path], noted.mode):
            changed.append(f"{path} was changed")
    return sorted(changed)


def _digest(data: bytes, kind: str = "sha256") -> str:
    """Return the digest in the form of RECORD."""
    return base64.urlsafe_b64encode(hashlib.new(kind, data).digest()).rstrip(b"=").decode()


def _record(content: dict[str, bytes], own: str) -> bytes:
    lines = (f"{path},sha256={_digest(data)},{len(data)}" for path, data in content.items())
    return "\n".join((*lines, f"{own},,", "")).encode()


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


def main() -> None:
    """Print name and digest of the wheel of the running files: the same on the driver and its instances."""
    name, content = build_wheel()
    print(f"{hashlib.sha256(content).hexdigest()}  {name}")


if __name__ == "__main__":
    main()
