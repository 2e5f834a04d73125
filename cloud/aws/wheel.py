"""This package as a wheel, made of the files that run, for instances where no index has it. Always the same bytes."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import io
import tomllib
import zipfile
from pathlib import Path

import rubberband
from rubberband.cloud.aws.bucket import is_bucket, put
from rubberband.cloud.aws.machines import Session
from rubberband.distribution import DISTRIBUTION
from rubberband.errors import InputError

_SKIPPED = frozenset({"__pycache__"})
_FILE_NAME = DISTRIBUTION.replace("-", "_")
_EPOCH = (1980, 1, 1, 0, 0, 0)


def on_an_index() -> bool:
    """Whether pip installed this package from an index, so that an instance can do the same."""
    try:
        installed = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return False
    # pip writes direct_url.json (PEP 610) for folders, editable ones, files and URLs; a checkout has no INSTALLER.
    return installed.read_text("INSTALLER") is not None and installed.read_text("direct_url.json") is None


def upload(session: Session, checkpoints: str | None) -> str:
    """Put the wheel into the bucket of the checkpoint store, unless it is there; its s3:// address.

    Raises InputError if the store is no bucket, or one that cannot be written; botocore's errors.
    """
    if checkpoints is None or not is_bucket(checkpoints):
        raise InputError(
            "resources.aws.install: this rubberband was not installed from an index, so instances cannot install it "
            "by name; give resources.checkpoints a bucket (s3://…), where its wheel is then put, or write install: "
            "the URL of a wheel"
        )
    name, content = build()
    return put(session, checkpoints, f"wheels/{name}", content, unless_there=True)


def build(root: Path | None = None) -> tuple[str, bytes]:
    """Name and content of the wheel. Its version has the digest of all that it holds behind a plus."""
    root = root or Path(rubberband.__file__).parent
    content = dict(sorted(_files(root).items()))
    digest = hashlib.sha256(_metadata(root, ""))
    for path, data in content.items():
        digest.update(f"{path}\0{len(data)}\0".encode() + data)
    version = f"{rubberband.__version__.partition('+')[0]}+{digest.hexdigest()[:12]}"
    info = f"{_FILE_NAME}-{version}.dist-info"
    content[f"{info}/METADATA"] = _metadata(root, version)
    content[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: rubberband\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    content[f"{info}/entry_points.txt"] = b"[console_scripts]\nrubberband = rubberband.cli:main\n"
    content[f"{info}/RECORD"] = _record(content, f"{info}/RECORD")
    return f"{_FILE_NAME}-{version}-py3-none-any.whl", zipped(content)


def zipped(content: dict[str, bytes]) -> bytes:
    """A zip archive of path -> bytes, the same for the same content."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in content.items():
            entry = zipfile.ZipInfo(path, _EPOCH)
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(entry, data)
    return buffer.getvalue()


def _files(root: Path) -> dict[str, bytes]:
    """Path in the wheel -> bytes; sub-packages may be links, as in a checkout."""
    found: dict[str, bytes] = {}
    for path in root.iterdir():
        if path.name in _SKIPPED:
            continue
        if path.is_dir():
            found |= {f"{root.name}/{inner}": data for inner, data in _files(path).items()}
        elif path.is_file():
            found[f"{root.name}/{path.name}"] = path.read_bytes()
    return found


def _metadata(root: Path, version: str) -> bytes:
    pyproject = root.parent / "pyproject.toml"
    needs = _needs_of_checkout(pyproject) if pyproject.is_file() else _needs_as_installed()
    return "\n".join(("Metadata-Version: 2.1", f"Name: {DISTRIBUTION}", f"Version: {version}", *needs, "")).encode()


def _needs_of_checkout(pyproject: Path) -> list[str]:
    """What was installed may be older than the checkout that runs."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    lines = [f"Requires-Python: {project['requires-python']}"]
    lines += [f"Requires-Dist: {need}" for need in project["dependencies"]]
    for extra, needs in project["optional-dependencies"].items():
        lines += [f"Provides-Extra: {extra}", *(f'Requires-Dist: {need}; extra == "{extra}"' for need in needs)]
    return lines


def _needs_as_installed() -> list[str]:
    try:
        lines = str(importlib.metadata.distribution(DISTRIBUTION).metadata).splitlines()
    except importlib.metadata.PackageNotFoundError:
        raise InputError(
            "resources.aws.install: this rubberband runs from files that were never installed; run pip install -e . "
            "there, or write install: the URL of a wheel"
        ) from None
    return [line for line in lines if line.startswith(("Requires-Python:", "Requires-Dist:", "Provides-Extra:"))]


def _record(content: dict[str, bytes], own: str) -> bytes:
    def line(path: str, data: bytes) -> str:
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        return f"{path},sha256={digest},{len(data)}"

    return "\n".join((*(line(path, data) for path, data in content.items()), f"{own},,", "")).encode()
