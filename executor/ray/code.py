"""The user's code for instances that are other machines: packed by the driver, unpacked beside the workers.

It holds the folders of the entry point's search path, links followed, without secrets, without files that no trial
imports, and without RUBBERBAND_HOME. An instance installs packages itself.
"""

from __future__ import annotations

import fnmatch
import hashlib
import io
import logging
import os
import shutil
import stat
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import rubberband
from rubberband.cloud.node import machine_folder
from rubberband.errors import InputError
from rubberband.executor.training.entrypoint import Entrypoint, files_named, files_of
from rubberband.installation import restored_home

MAX_BYTES = 50 * 10**6
MAX_FILES = 20_000
IGNORE_FILE = ".rubberbandignore"
"""In a folder of the search path: patterns of file names to leave out, one per line (`data`, `*.parquet`)."""

_SKIPPED = (".*", "__pycache__", "node_modules", "checkpoints", "*.egg-info", "*.pyc", "*.pyo", "*.ckpt")
_SECRET = (
    "*.pem", "*.key", "*.ppk", "*.p12", "*.pfx", "id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", "*.env", "rootkey.csv",
    "*[aA]ccessKeys.csv", "*credentials.csv", "kaggle.json",
)  # fmt: skip
"""Private keys, and files in which consoles hand out keys; other credentials are in files that begin with a dot."""
_OF_A_HOME = ("ray-token", "server.db*", "pools", "profiling", "heads")
"""Parts of RUBBERBAND_HOME beside experiments: tokens, and what their owners have open."""
_SYSTEM = ("/usr/", "/bin/", "/sbin/", "/opt/")
"""Programs there may be on the instances too."""
_EPOCH = (1980, 1, 1, 0, 0, 0)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """The driver's folders in one archive; the same files make the same bytes."""

    archive: bytes
    digest: str
    places: tuple[tuple[str, str], ...]
    """(folder of the driver, its place in the archive)."""
    working: str | None
    """Place of the driver's working folder in the archive."""


def pack(folders: Sequence[str]) -> Code:
    """Pack the folders. Raises InputError if they are too large (it names the largest parts), or cannot be read."""
    places = _places(folders)
    buffer = io.BytesIO()
    homes: list[Path] = []
    files = _files(places, homes)
    if homes:
        _log.warning("not sent to the instances, as experiments are kept there: %s", ", ".join(map(str, homes)))
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, path in files:
            try:
                archive.writestr(_entry(name, path), path.read_bytes())
            except FileNotFoundError:  # removed since it was found: another program's
                continue
            except (OSError, UnicodeError) as error:  # also for a name that is no text
                named = os.fsencode(path).decode(errors="backslashreplace")
                reason = getattr(error, "strerror", None) or "its name is not text"
                raise InputError(
                    f"{named} cannot be read to be sent to the instances ({reason}); give access, or list it in "
                    f"{IGNORE_FILE}"
                ) from None
    payload = buffer.getvalue()
    working = dict(places).get(os.getcwd())
    digest = hashlib.sha256(repr((places, working)).encode() + payload).hexdigest()[:32]
    return Code(archive=payload, digest=digest, places=tuple(places), working=working)


def unsent(entrypoint: Entrypoint, *, installs: bool = False) -> str:
    """Return why instances could not run the entry point, in one line: too much code, or files that are not sent.

    `installs`: instances have packages beside rubberband's, of which a trial may import modules that lie elsewhere
    here. Nothing is packed. Empty if they could, as far as files say.
    """
    try:
        sent = _sent(entrypoint)
    except InputError as error:
        return str(error)
    if (command := entrypoint.command) is not None:
        folder = Path(entrypoint.search_path[0])
        faults = (_fault_of(word, folder, sent, is_first=not index) for index, word in enumerate(command.words))
        if fault := next(filter(None, faults), ""):
            return f"entrypoint.command: {fault}"
    if not installs and (elsewhere := unsent_modules(entrypoint)):
        what = "entrypoint" if command is None else "entrypoint.command: its program"
        return (
            f"{what} imports {next(iter(elsewhere.values()))}, which is not sent to the instances: they get "
            f"{entrypoint.search_path[0]} less {IGNORE_FILE}; move it there, or install it on them "
            "(resources.aws.install)"
        )
    return ""


def unsent_modules(entrypoint: Entrypoint) -> dict[str, str]:
    """Return module -> file of each top-level module of the user's that it imports, and that is not sent.

    Modules of installed packages are left out. Raises InputError if there is too much code.
    """
    sent = _sent(entrypoint)
    folder = Path(next(iter(entrypoint.search_path), os.getcwd()))
    named = files_named(entrypoint.command.words, folder) if entrypoint.command is not None else []
    elsewhere: dict[str, str] = {}
    for file in files_of(entrypoint):
        path = Path(file)
        if path.suffix == ".py" and path not in named and path.resolve() not in sent and not file.startswith(_SYSTEM):
            elsewhere.setdefault(_top_level(path), file)
    return elsewhere


def _sent(entrypoint: Entrypoint) -> set[Path]:
    """Return the files that instances get. Raises InputError if there is too much code."""
    return {path.resolve() for _, path in _files(_places(entrypoint.search_path))}


def _top_level(path: Path) -> str:
    """Return the name by which a program imports a file, up to the first dot."""
    folders = [Path(folder) for folder in sys.path if path.is_relative_to(Path(folder).absolute())]
    place = max(folders, key=lambda folder: len(folder.parts), default=path.parent)
    return path.relative_to(place.absolute()).parts[0].removesuffix(".py")


def _fault_of(word: str, folder: Path, sent: Collection[Path], *, is_first: bool) -> str:
    """Return why a word of a command means nothing on instances; empty if it may mean something there."""
    name = word.partition("=")[2] if word.startswith("-") else word
    path, is_looked_up = folder / name, is_first and "/" not in name
    if not name or "$" in name or is_looked_up or name.startswith(_SYSTEM) or not os.path.exists(path):
        return ""
    if os.path.isabs(name):
        if path.resolve() in sent or path.resolve() == folder.resolve():
            here = os.path.relpath(name, folder)
            return f"{name} is a path of this machine; write {here}, as commands run in the copy of {folder}"
        if path.parent == Path(sys.executable).parent:
            return f"{name} is a path of this machine; write {path.name}, as instances have their own"
        if not is_first and path.suffix not in (".py", ".sh"):
            return ""  # data may be mounted there as it is here
    is_inside = path.resolve().is_relative_to(folder.resolve())
    if path.resolve() in sent or (path.is_dir() and is_inside):
        return ""
    return (
        f"{os.path.relpath(path, folder)} is not sent to the instances, which get {folder} less {IGNORE_FILE}, hidden "
        "files, checkpoints and keys; move it there, or give its path on the image"
    )


def install(code: Code, entrypoint: Entrypoint) -> Entrypoint:
    """Unpack the code on this machine, unless it is there, and change to it; return the entry point in it."""
    root = _unpack(code)
    if code.working is not None:
        os.chdir(root / code.working)
    here = tuple(str(root / place) for _, place in code.places)
    return replace(entrypoint, search_path=here)


def _is_the_users(folder: str) -> bool:
    """Whether it is a folder of the user's own code, not of Python or of installed packages."""
    installed = {os.path.abspath(path) for path in sysconfig.get_paths().values()} | {os.path.abspath(sys.prefix)}
    return (
        os.path.isdir(folder)
        and folder not in installed
        and not {"site-packages", "dist-packages"} & set(Path(folder).parts)
    )


def _places(folders: Sequence[str]) -> list[tuple[str, str]]:
    """Return the place in the archive of each folder of the user's: one that is within another is not packed twice."""
    ours = [folder for folder in dict.fromkeys(map(os.path.abspath, folders)) if _is_the_users(folder)]
    tops: dict[str, str] = {}
    places = {}
    for folder in sorted(ours, key=len):
        top = next((top for top in tops if _holds(top, folder)), None)
        if top is None:
            places[folder] = tops[folder] = str(len(tops))
        else:
            places[folder] = f"{tops[top]}/{Path(folder).relative_to(top).as_posix()}"
    return [(folder, places[folder]) for folder in ours]


def _holds(top: str, folder: str) -> bool:
    path = Path(folder)
    if not path.is_relative_to(top):
        return False
    patterns = _patterns(Path(top))
    parts = path.relative_to(top).parts
    above = [PurePosixPath(*parts[: depth + 1]) for depth in range(len(parts))]
    return not any(_skips(patterns, parent.name, str(parent)) or _is_home(Path(top, parent)) for parent in above)


def _files(places: Iterable[tuple[str, str]], homes: list[Path] | None = None) -> list[tuple[str, Path]]:
    """Return (name in the archive, path) of every file of the folders that are within no other.

    Homes are left out, and added to `homes`. Raises InputError if the files are too large.
    """
    files: list[tuple[str, Path]] = []
    sizes: dict[str, int] = {}
    for folder, place in places:
        if "/" in place:  # it is in another one
            continue
        for relative, path, size in _walk(Path(folder), [] if homes is None else homes):
            files.append((f"{place}/{relative}", path))
            part = os.path.join(folder, relative.split("/", 1)[0])
            sizes[part] = sizes.get(part, 0) + size
            if len(files) > MAX_FILES or sum(sizes.values()) > 20 * MAX_BYTES:
                raise InputError(_too_much(sizes, len(files), at_least=True))
    if sum(sizes.values()) > MAX_BYTES:
        raise InputError(_too_much(sizes, len(files), at_least=False))
    return files


def _walk(top: Path, homes: list[Path]) -> Iterator[tuple[str, Path, int]]:
    patterns = _patterns(top)
    for folder, folders, files in os.walk(top, followlinks=True):
        inside = Path(folder).relative_to(top)
        ours = [
            name
            for name in folders
            if not _skips(patterns, name, (inside / name).as_posix())
            and not _is_installed(Path(folder, name))
            and not _leads_back(Path(folder, name), top)
        ]
        kept = {name for name in ours if _is_home(Path(folder, name)) or _is_experiment(Path(folder, name))}
        homes += [Path(folder, name) for name in sorted(kept)]
        folders[:] = sorted(set(ours) - kept)
        for name in sorted(files):
            path, relative = Path(folder, name), (inside / name).as_posix()
            if not _skips(patterns, name, relative):
                with suppress(OSError):  # a link to nowhere
                    status = path.stat()
                    if stat.S_ISREG(status.st_mode):
                        yield relative, path, status.st_size


def _is_installed(folder: Path) -> bool:
    """Whether it is a virtual environment, or this package."""
    return (folder / "pyvenv.cfg").exists() or folder.resolve() == Path(rubberband.__file__).parent.resolve()


def _is_home(folder: Path) -> bool:
    """Whether experiments are kept in it. Journals must not be read: to close a file ends SQLite's locks on it."""
    return folder.resolve() == restored_home().resolve() or any(folder.glob("experiments/*/journal.db"))


def _is_experiment(folder: Path) -> bool:
    """Whether an experiment is kept in it; a journal of another program is the user's."""
    ours = folder.parent.name == "experiments" or any(
        (folder / f"{who}.lock").exists() for who in ("driver", "process")
    )
    return ours and (folder / "journal.db").exists()


def _leads_back(path: Path, top: Path) -> bool:
    """Whether it is a link to a folder that contains it."""
    if not path.is_symlink():
        return False
    target = path.resolve()
    above = [folder for folder in path.parents if folder.is_relative_to(top)]
    return any(folder.resolve().is_relative_to(target) for folder in above)


def _patterns(top: Path) -> tuple[str, ...]:
    ignored = []
    with suppress(OSError, UnicodeError):
        lines = (line.strip() for line in (top / IGNORE_FILE).read_text("utf-8-sig").splitlines())
        ignored = [line.rstrip("/") for line in lines if line and not line.startswith("#")]
    return (*_SKIPPED, *_SECRET, *ignored, *(_OF_A_HOME if _is_home(top) else ()))


def _skips(patterns: Iterable[str], name: str, relative: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(relative, pattern) for pattern in patterns)


def _too_much(sizes: dict[str, int], files: int, *, at_least: bool) -> str:
    largest = sorted(sizes, key=lambda part: -sizes[part])[:3]
    named = ", ".join(f"{part} ({sizes[part] / 1e6:.0f} MB)" for part in largest)
    more = "more than " if at_least else ""
    return (
        f"the code to send to the instances is {more}{sum(sizes.values()) / 1e6:.0f} MB in {files} files; the limit "
        f"is {MAX_BYTES / 1e6:.0f} MB in {MAX_FILES}; the most is in {named}: list what trials do not import in "
        f"{IGNORE_FILE} beside it, or start from a folder of its own"
    )


def _entry(name: str, path: Path) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, date_time=_EPOCH)
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.external_attr = (0o755 if os.access(path, os.X_OK) else 0o644) << 16
    return entry


def _unpack(code: Code) -> Path:
    """Return the folder of the unpacked code. It appears whole, also if several workers unpack at the same time."""
    codes = machine_folder() / "code"
    root = codes / code.digest
    if root.is_dir():
        return root
    codes.mkdir(exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=codes, prefix=".unpacking-"))
    try:
        with zipfile.ZipFile(io.BytesIO(code.archive)) as archive:
            archive.extractall(temporary)
            for entry in archive.infolist():  # zipfile drops the modes, and a command may be a script
                (temporary / entry.filename).chmod(entry.external_attr >> 16)
        for _, place in code.places:
            (temporary / place).mkdir(parents=True, exist_ok=True)
        with suppress(OSError):  # another worker of this machine was faster
            temporary.rename(root)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return root
