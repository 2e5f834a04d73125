"""Checkpoints that are folders: a packed folder comes back as it was, and a damaged archive leaves nothing."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rubberband.errors import CheckpointError
from rubberband.executor import MANIFEST, is_archive, read_manifest, unpack
from rubberband.executor.checkpoints import folders
from rubberband.executor.checkpoints.folders import pack


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (place := tmp_path / "out" / "below").mkdir(parents=True)
    (place / "weights.pt").write_bytes(bytes(range(256)) * 10)
    (tmp_path / "out" / "state.json").write_text("{}")
    return tmp_path / "out"


@pytest.fixture
def packed(folder: Path, tmp_path: Path) -> Path:
    pack(folder, tmp_path / "packed", iterations=3, metrics={"loss": 0.5})
    return tmp_path / "packed"


def content(folder: Path) -> dict[bytes, bytes | None]:
    """Paths below a folder, with the content of files."""
    top, found = os.fsencode(folder), {}
    for place, below, names in os.walk(top):
        found |= {os.path.relpath(os.path.join(place, name), top): None for name in below}
        for name in names:
            path = os.path.join(place, name)
            with open(path, "rb") as file:
                found[os.path.relpath(path, top)] = file.read()
    return found


def test_a_folder_comes_back_as_it_was(folder: Path, packed: Path, tmp_path: Path) -> None:
    manifest = unpack(packed, tmp_path / "there")
    assert content(tmp_path / "there") == content(folder)
    assert (manifest["kind"], manifest["iterations"], manifest["metrics"]) == ("program", 3, {"loss": 0.5})
    assert manifest == read_manifest(packed)
    assert unpack(packed.read_bytes(), tmp_path / "from bytes") == manifest
    assert is_archive(packed)
    assert not is_archive(b"\x80\x04")


def test_every_name_and_empty_folder_comes_back(folder: Path, tmp_path: Path) -> None:
    (folder / "empty" / "below").mkdir(parents=True)
    for name in ("ümläut 日本 🎈", "n" * 250, "with\nline", "-rf", "a" * 99 + "é", "rubberband-manifest.json"):
        (folder / name).write_text(name)
    with open(os.fsencode(folder) + b"/no\xff unicode", "wb") as file:
        file.write(b"1")
    pack(folder, tmp_path / "packed", iterations=1, metrics={})
    unpack(tmp_path / "packed", tmp_path / "there")
    assert content(tmp_path / "there") == content(folder)


def test_times_and_the_right_to_execute_come_back(folder: Path, tmp_path: Path) -> None:
    (folder / "run.sh").write_text("true")
    (folder / "run.sh").chmod(0o755)
    os.utime(folder / "state.json", (1000.5, 1000.5))
    pack(folder, tmp_path / "packed", iterations=1, metrics={})
    unpack(tmp_path / "packed", tmp_path / "there")
    assert os.access(tmp_path / "there" / "run.sh", os.X_OK)
    assert not (tmp_path / "there" / "state.json").stat().st_mode & 0o111
    assert (tmp_path / "there" / "state.json").stat().st_mtime == 1000.5


def test_a_link_to_something_in_the_folder_stays_a_link(folder: Path, tmp_path: Path) -> None:
    (folder / "last.pt").symlink_to("below/weights.pt")
    (folder / "below" / "up.json").symlink_to("../state.json")
    (folder / "latest").symlink_to(folder / "below")
    pack(folder, tmp_path / "packed", iterations=1, metrics={})
    there = tmp_path / "there"
    unpack(tmp_path / "packed", there)
    links = {path.relative_to(there).as_posix(): os.readlink(path) for path in there.rglob("*") if path.is_symlink()}
    assert links == {"last.pt": "below/weights.pt", "below/up.json": "../state.json", "latest": "below"}
    assert (there / "latest" / "weights.pt").read_bytes() == (folder / "below" / "weights.pt").read_bytes()


def test_another_link_is_what_it_leads_to(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "data").write_bytes(b"data")
    (folder / "file").symlink_to(tmp_path / "outside" / "data")
    (folder / "data").symlink_to(tmp_path / "outside")
    os.link(folder / "state.json", folder / "same.json")
    pack(folder, tmp_path / "packed", iterations=1, metrics={})
    unpack(tmp_path / "packed", tmp_path / "there")
    there = content(tmp_path / "there")
    assert there[b"file"] == there[b"data/data"] == b"data"
    assert there[b"same.json"] == b"{}"
    assert not any(path.is_symlink() for path in (tmp_path / "there").rglob("*"))


@pytest.mark.parametrize(("path", "target"), [("a", "/etc/passwd"), ("a", "../outside"), ("b/c", "../../x")])
def test_a_link_out_of_the_folder_is_refused(tmp_path: Path, path: str, target: str) -> None:
    damaged = archive(tmp_path / "damaged", of("files/b/d"), links=[{"path": path, "target": target}])
    with pytest.raises(CheckpointError, match="which is not in its folder"):
        unpack(damaged, tmp_path / "there")
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize(
    ("put", "message"),
    [
        (lambda folder: (folder / "up").symlink_to(".."), "up is a link to a folder that has it"),
        (lambda folder: (folder / "gone.pt").symlink_to("nowhere"), "gone.pt is a link to nowhere, which is not there"),
        (lambda folder: os.mkfifo(folder / "pipe"), "pipe is neither a file nor a folder"),
    ],
)
def test_links_to_nothing_and_pipes_are_refused_by_name(
    folder: Path, tmp_path: Path, put: Callable[[Path], None], message: str
) -> None:
    put(folder / "below")
    with pytest.raises(CheckpointError, match=message):
        pack(folder, tmp_path / "packed", iterations=1, metrics={})
    assert not (tmp_path / "packed").exists()


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ENOSPC])
def test_a_file_that_cannot_be_read_is_named_and_leaves_no_archive(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def opened(path: Any, *words: Any, **named: Any) -> Any:
        if str(path).endswith("weights.pt"):
            raise OSError(code, os.strerror(code), str(path))
        return open(path, *words, **named)

    monkeypatch.setattr(folders, "open", opened, raising=False)
    with pytest.raises(CheckpointError, match=rf"weights\.pt cannot be packed: {os.strerror(code)}"):
        pack(folder, tmp_path / "packed", iterations=1, metrics={})
    assert not (tmp_path / "packed").exists()


def amid(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object], *, times: int) -> None:
    """Call `act` the first `times` times that a file is packed."""
    add, left = tarfile.TarFile.addfile, [times]

    def added(*words: Any) -> None:
        if left[0]:
            left[0] -= 1
            act()
        add(*words)

    monkeypatch.setattr(tarfile.TarFile, "addfile", added)
    monkeypatch.setattr(folders, "_PAUSE_S", 0.0)


def vanish(folder: Path) -> None:
    (folder / "state.json").rename(folder / "renamed.json")


def grow(folder: Path) -> None:
    with open(folder / "below" / "weights.pt", "ab") as file:
        file.write(b"more")


def shrink(folder: Path) -> None:
    with open(folder / "below" / "weights.pt", "r+b") as file:
        file.truncate(file.seek(0, os.SEEK_END) // 2)


def appear(folder: Path) -> None:
    (folder / f"new-{len(list(folder.iterdir()))}").write_text("")


@pytest.mark.parametrize("act", [vanish, grow, shrink, appear])
def test_a_folder_that_changes_meanwhile_is_packed_as_it_is_in_the_end(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: Callable[[Path], None]
) -> None:
    amid(monkeypatch, lambda: act(folder), times=1)
    pack(folder, tmp_path / "packed", iterations=1, metrics={})
    unpack(tmp_path / "packed", tmp_path / "there")
    assert content(tmp_path / "there") == content(folder)


def test_a_folder_that_never_rests_is_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    amid(monkeypatch, lambda: appear(folder), times=100)
    with pytest.raises(CheckpointError, match=r"new-\d+ changes while .* finish its files before it reports"):
        pack(folder, tmp_path / "packed", iterations=1, metrics={})
    assert not (tmp_path / "packed").exists()


def archive(
    path: Path,
    *members: tuple[tarfile.TarInfo, bytes],
    listed: list[str] | None = None,
    links: Sequence[Mapping[str, str]] = (),
) -> Path:
    """Write an archive by hand, with the files in it, or those `listed`, in its manifest."""
    with tarfile.open(path, "w") as made:
        files = []
        for info, data in members:
            info.size = len(data)
            made.addfile(info, io.BytesIO(data))
            files.append({"path": info.name.removeprefix("files/"), "size": len(data)})
        if listed is not None:
            files = [{"path": name, "size": 0} for name in listed]
        content = {"format": 1, "kind": "program", "folders": [], "links": list(links), "files": files}
        manifest = json.dumps(content).encode()
        info = tarfile.TarInfo(MANIFEST)
        info.size = len(manifest)
        made.addfile(info, io.BytesIO(manifest))
    return path


def of(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info, b""


@pytest.mark.parametrize(
    ("members", "listed", "message"),
    [
        ([of("files/../escaped")], None, "'../escaped', which would leave its folder"),
        ([of("files//etc/escaped")], None, "'/etc/escaped', which would leave its folder"),
        ([of("/escaped")], ["escaped"], "which would leave its folder"),
        ([of("files/a"), of("files/../b")], ["a"], "would leave its folder"),
        ([of("files/link", tarfile.SYMTYPE, "/etc/passwd")], None, "'files/link', which is no file: it is a link"),
        ([of("files/link", tarfile.LNKTYPE, "files/a")], None, "which is no file"),
        ([of("files/null", tarfile.CHRTYPE)], None, "which is no file"),
        ([of("files/pipe", tarfile.FIFOTYPE)], None, "which is no file"),
        ([of("files/folder", tarfile.DIRTYPE)], None, "which is no file"),
        ([of("files/a"), of("files/b")], ["a"], "'files/b', which its manifest does not list"),
        ([of("other")], [], "'other', which its manifest does not list"),
        ([of("files/a"), of("files/a")], None, "which its manifest does not list"),
        ([], ["a"], "lacks the file 'a', which its manifest lists"),
    ],
)
def test_an_archive_with_anything_else_is_refused_and_leaves_nothing(
    tmp_path: Path, members: list[Any], listed: list[str] | None, message: str
) -> None:
    made = archive(tmp_path / "packed", *members, listed=listed)
    with pytest.raises(CheckpointError, match=message) as raised:
        unpack(made, tmp_path / "there")
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == [made]


def test_a_file_with_another_size_is_named(packed: Path, tmp_path: Path) -> None:
    whole = packed.read_bytes()
    with pytest.raises(CheckpointError, match=r"'below/weights\.pt' has 2560 bytes instead of 2561"):
        unpack(whole.replace(b'"size": 2560', b'"size": 2561'), tmp_path / "there")
    assert not (tmp_path / "there").exists()


def test_an_archive_that_is_cut_off_or_damaged_anywhere_is_refused_and_leaves_nothing(
    packed: Path, folder: Path, tmp_path: Path
) -> None:
    whole, place = packed.read_bytes(), tmp_path / "place"
    place.mkdir()
    end = whole.rindex(b"]}") + 2
    for size in range(0, end, 97):
        with pytest.raises(CheckpointError):
            unpack(whole[:size], place / "there")
    lengths = {path: len(data or b"") for path, data in content(folder).items()}
    for at in range(0, end, 61):
        damaged = bytearray(whole)
        damaged[at] ^= 1
        try:
            unpack(bytes(damaged), place / "there")
        except CheckpointError:
            assert list(place.iterdir()) == []
            continue
        # A bit of the padding, of a time or an owner, or of a file's content, which the digest of the whole shows.
        assert {path: len(data or b"") for path, data in content(place / "there").items()} == lengths
        shutil.rmtree(place / "there")


def test_a_folder_with_files_is_not_unpacked_over(packed: Path, folder: Path) -> None:
    before = content(folder)
    with pytest.raises(CheckpointError, match="not empty"):
        unpack(packed, folder)
    assert content(folder) == before


def test_a_later_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(folders, "FORMAT", 2)
    pack(folder, tmp_path / "packed", iterations=1, metrics={})
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="has format 2; this version reads format 1"):
        unpack(tmp_path / "packed", tmp_path / "there")
