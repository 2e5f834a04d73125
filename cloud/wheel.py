"""The wheel of this package, built from the running files, always with the same bytes.

`python3 -m rubberband.cloud.wheel` prints its name and digest.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import io
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import rubberband
from rubberband.errors import InputError
from rubberband.installation import DISTRIBUTION

_FILE_NAME = DISTRIBUTION.replace("-", "_")
_EPOCH = (1980, 1, 1, 0, 0, 0)
OTHER_WAYS = "or name what instances install instead: resources.aws.index_url, or install: the URL of a wheel"


def build_wheel(root: Path | None = None) -> tuple[str, bytes]:
    """Return name and content of the wheel, whose version ends in a plus and the digest of its content.

    `root`: the package's folder, in a checkout or as pip installed it. Raises InputError if a file cannot be read, or
    if it is neither.
    """
    root = root or Path(rubberband.__file__).parent
    try:
        content = dict(sorted(_files(root).items()))
        lines = _needs(root)
    except OSError as error:
        raise InputError(
            f"resources.aws.install: {error.filename} of this rubberband cannot be packed for instances "
            f"({error.strerror}); make it readable, {OTHER_WAYS}"
        ) from None
    digest = hashlib.sha256(_metadata(lines, ""))
    for path, data in content.items():
        digest.update(f"{path}\0{len(data)}\0".encode() + data)
    version = f"{public_version()}+{digest.hexdigest()[:12]}"
    info = f"{_FILE_NAME}-{version}.dist-info"
    content[f"{info}/METADATA"] = _metadata(lines, version)
    content[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: rubberband\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    content[f"{info}/entry_points.txt"] = b"[console_scripts]\nrubberband = rubberband.cli:main\n"
    content[f"{info}/RECORD"] = _record(content, f"{info}/RECORD")
    return f"{_FILE_NAME}-{version}-py3-none-any.whl", zipped(content)


def needs(root: Path | None = None) -> list[str]:
    """Return the metadata lines with the package's requirements. Raises as `build_wheel` does."""
    return _needs(root or Path(rubberband.__file__).parent)


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
    content: dict[str, bytes] = {}
    for path in root.iterdir():
        if path.name == "__pycache__" or path.name.startswith("."):
            continue
        if path.is_dir():
            content |= {f"{root.name}/{inner}": data for inner, data in _files(path).items()}
        else:
            content[f"{root.name}/{path.name}"] = path.read_bytes()
    return content


def _metadata(lines: list[str], version: str) -> bytes:
    return "\n".join(("Metadata-Version: 2.1", f"Name: {DISTRIBUTION}", f"Version: {version}", *lines, "")).encode()


def _needs(root: Path) -> list[str]:
    pyproject = root.resolve().parent / "pyproject.toml"  # an editable install is a link to it
    project: dict[str, Any] = {}
    if pyproject.is_file():
        try:
            project = tomllib.loads(pyproject.read_text(encoding="utf-8")).get("project", {})
        except ValueError as error:
            raise InputError(f"resources.aws.install: {pyproject} cannot be read ({error}); correct it") from None
    if project.get("name") != DISTRIBUTION:
        return _needs_as_installed(root)
    lines = [f"Requires-Python: {project['requires-python']}"]  # the installed metadata may be older than a checkout
    lines += [f"Requires-Dist: {need}" for need in project["dependencies"]]
    for extra, wanted in project["optional-dependencies"].items():
        lines += [f"Provides-Extra: {extra}", *(f'Requires-Dist: {need}; extra == "{extra}"' for need in wanted)]
    return lines


def _needs_as_installed(root: Path) -> list[str]:
    try:
        installed = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        installed = None
    if installed is None or Path(str(installed.locate_file(root.name))).resolve() != root.resolve():
        raise InputError(
            f"resources.aws.install: the rubberband in {root} was never installed, so what it needs is unknown; "
            f"install it with pip, {OTHER_WAYS}"
        )
    lines = (installed.read_text("METADATA") or "").partition("\n\n")[0].splitlines()
    return [line for line in lines if line.startswith(("Requires-Python:", "Requires-Dist:", "Provides-Extra:"))]


def _record(content: dict[str, bytes], own: str) -> bytes:
    def digest(data: bytes) -> str:
        return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()

    lines = (f"{path},sha256={digest(data)},{len(data)}" for path, data in content.items())
    return "\n".join((*lines, f"{own},,", "")).encode()


def main() -> None:
    """Print name and digest of the wheel of the running files: the same on the driver and its instances."""
    name, content = build_wheel()
    print(f"{hashlib.sha256(content).hexdigest()}  {name}")


if __name__ == "__main__":
    main()
