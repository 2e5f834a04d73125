"""This installation of rubberband: the name of its distribution, its home folder, and the database of its journals."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from rubberband.errors import InputError

DISTRIBUTION = "rubberband-tune"
"""Its name on a package index, where `rubberband` is another project. The import is `rubberband`."""


def requirement(*extras: str) -> str:
    """The distribution with these extras, such as `rubberband-tune[aws]`."""
    return f"{DISTRIBUTION}[{','.join(extras)}]"


def install_hint(*extras: str) -> str:
    """The command that adds what the extras bring: `pip install 'rubberband-tune[aws]'`."""
    return f"pip install '{requirement(*extras)}'"


_EXTRAS = {
    "ray": "ray torch",
    "aws": "boto3 botocore s3transfer",
    "gcs": "gcsfs fsspec",
    "azure": "adlfs",
    "hf": "huggingface_hub",
    "server": "fastapi starlette jinja2 prometheus_client python_multipart uvicorn",
    "client": "httpx httpx_sse",
    "mcp": "mcp",
    "postgres": "psycopg",
    "optuna": "optuna cmaes",
    "pandas": "pandas pyarrow",
    "lightning": "lightning pytorch_lightning",
    "transformers": "transformers accelerate",
    "safetensors": "safetensors",
    "examples": "sklearn",
}
EXTRA_OF = {module: extra for extra, modules in _EXTRAS.items() for module in modules.split()}
"""Module -> the extra that brings it."""


def require(what: str, *modules: str) -> None:
    """Raise InputError, with the command that installs them, if modules of extras that `what` needs are missing."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        extras = dict.fromkeys(EXTRA_OF[module] for module in missing)
        raise InputError(f"{what} needs {' and '.join(missing)}; run {install_hint(*extras)}")


STORE_DRIVERS = {
    "s3": "boto3",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "hf": "huggingface_hub",
    "memory": "fsspec",
}
"""Scheme of a checkpoint store -> the module that opens it; each writes an object whole or not at all."""


def require_driver(url: str) -> str:
    """Return the scheme of a checkpoint store; empty: it is a directory.

    Raises InputError for one that is not supported, names no bucket, or whose module is not installed.
    """
    scheme, separator, rest = url.partition("://")
    if not separator or scheme == "file":
        return ""
    if scheme not in STORE_DRIVERS:
        raise InputError(
            f"the checkpoint store {url} is not supported: {scheme}:// is unknown; give s3://bucket/prefix, gs://, "
            "az://, abfs:// or hf://, or a directory that every instance sees (a path, or file:///path)"
        )
    if not rest.strip("/"):
        raise InputError(f"the checkpoint store {url} names no bucket; write {scheme}://bucket/prefix")
    require(f"the checkpoint store {url}", STORE_DRIVERS[scheme])
    return scheme


FEWEST_FILES = 256
"""Open files that a process needs at least. Ray's nodes hang while they start where they may open fewer."""


def require_ray(what: str, *modules: str) -> None:
    """Raise InputError if Ray, or `modules`, is not installed, or cannot start as processes may open too few files."""
    require(what, "ray", *modules)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files < FEWEST_FILES:
        raise InputError(
            f"a process may open {files} files here (ulimit -n), and Ray needs {FEWEST_FILES}; run `ulimit -n 4096`, "
            "or ask the administrator of this machine to raise the limit"
        )


def remedy_of(error: BaseException) -> str | None:
    """Return the command that installs the module that an import lacked, or None if no extra brings it."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    extra = EXTRA_OF.get((name or "").partition(".")[0])
    return None if extra is None else install_hint(extra)


RESTORING = "restoring"
"""Folder in a home while it is restored from a backup."""


def default_home(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the home folder: RUBBERBAND_HOME, or `~/.rubberband`.

    Raises InputError without a `~`, and for one that is half restored.
    """
    return _whole(restored_home(environment))


def restored_home(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the home folder, whether it is whole or half restored. Raises InputError without a `~`."""
    try:
        return _readable(environment.get("RUBBERBAND_HOME") or Path.home() / ".rubberband")
    except RuntimeError as error:
        raise InputError(f"this user has no home folder ({error}); set RUBBERBAND_HOME to a folder") from None


def home_at(path: str | os.PathLike[str] | None) -> Path:
    """Return the home folder at `path`; None or empty: the default one. Raises InputError as `default_home` does."""
    return _whole(_readable(path)) if path else default_home()


def _readable(path: str | os.PathLike[str]) -> Path:
    home = Path(path).expanduser().resolve()
    require_readable(home)
    return home


def _whole(home: Path) -> Path:
    if (home / RESTORING).exists():
        raise InputError(
            f"{home} is being restored, or that was cut off: wait for `rubberband restore FOLDER`, or run it again"
        )
    return home


def require_readable(*paths: str | os.PathLike[str]) -> None:
    """Raise InputError for a path that the locale cannot read: journals and workers could not name it."""
    for path in paths:
        try:
            os.fspath(path).encode()
        except UnicodeEncodeError:
            name = os.fsencode(path).decode(errors="replace")
            raise InputError(
                f"{name} has characters that this locale cannot read; set LC_ALL=C.UTF-8, or PYTHONUTF8=1"
            ) from None


def default_store(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the SQLAlchemy URL of the database of journals: RUBBERBAND_STORE; None: each is a file of its own."""
    return environment.get("RUBBERBAND_STORE") or None
