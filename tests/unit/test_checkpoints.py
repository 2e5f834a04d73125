"""Checkpoint stores: one suite that every implementation passes, and what is particular to directories."""

import errno
import hashlib
import io
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from io import BufferedIOBase
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import boto3
import pytest
from botocore.config import Config

from rubberband import installation
from rubberband.cloud.aws.s3 import S3Folder
from rubberband.errors import CheckpointError, CheckpointLostError, InputError, StoreAwayError
from rubberband.executor import CheckpointStore, checkpoints, make_store, open_store
from rubberband.executor.checkpoints import MARK, reopen_store
from rubberband.executor.checkpoints.folders import unpack, write_archive
from rubberband.executor.checkpoints.objects import ObjectStore
from rubberband.executor.core.events import CheckpointRef
from tests.builders.buckets import BUCKETS, bucket
from tests.builders.power_cut import PowerCut

Opener = Callable[[Path], CheckpointStore]

STORES: dict[str, Opener] = {
    "path": lambda folder: open_store(str(folder / "new" / "checkpoints")),
    "file URL": lambda folder: open_store((folder / "with space").as_uri()),
}
"""Add a store here and it is held to the same promises."""


@pytest.fixture(params=[*STORES, *BUCKETS])
def store(request, tmp_path) -> CheckpointStore:
    if request.param in BUCKETS:
        return bucket(request.param, request, tmp_path)
    return STORES[request.param](tmp_path)


def test_a_saved_checkpoint_is_loaded(store):
    payload = bytes(range(256)) * 100
    ref = store.save(3, 12, payload)
    assert store.load(ref) == payload
    assert ref.size_bytes == len(payload)
    assert ref.digest == hashlib.sha256(payload).hexdigest()


def test_a_checkpoint_that_writes_itself_is_loaded(store):
    payload = bytes(range(256)) * 100
    ref = store.save(3, 12, lambda path: path.write_bytes(payload) and None)
    assert store.load(ref) == payload
    with store.file(ref) as path:
        assert path.read_bytes() == payload
    assert ref == replace(store.save(3, 12, payload), url=ref.url)


def test_a_checkpoint_that_cannot_write_itself_leaves_nothing(tmp_path):
    def full(path: Path) -> None:
        path.write_bytes(b"a part")
        raise OSError(28, "No space left on device")

    store = open_store(str(tmp_path))
    with pytest.raises(CheckpointError, match=r"trial 3 after 12 iterations could not .*: No space left on device"):
        store.save(3, 12, full)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_read_only_for_moments_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "_READ_ONLY_PAUSES_S", (0.0, 0.0, 0.0))
    store, tried = open_store(str(tmp_path)), list[Path]()

    def at_last(path: Path) -> None:
        tried.append(path)
        if len(tried) < 3:
            raise OSError(f"RuntimeError: open file failed with strerror: {os.strerror(errno.EROFS)}")
        path.write_bytes(b"whole")

    assert store.load(store.save(3, 12, at_last)) == b"whole"

    def never(path: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with pytest.raises(CheckpointError, match="Read-only file system"):
        store.save(3, 12, never)


def test_another_attempt_never_overwrites(store):
    first = store.save(3, 12, b"first")
    second = store.save(3, 12, b"second")
    assert (store.load(first), store.load(second)) == (b"first", b"second")


def test_a_discarded_checkpoint_is_gone_and_may_be_discarded_again(store):
    ref, other = store.save(3, 12, b"x"), store.save(3, 12, b"y")
    store.discard(ref)
    store.discard(ref)
    with pytest.raises(CheckpointError, match="missing"):
        store.load(ref)
    assert store.load(other) == b"y"


def test_a_checkpoint_in_parts_is_one_archive_and_goes_as_a_whole(store, tmp_path):
    def saved(name: str, files: dict[str, bytes], **content: Any) -> CheckpointRef:
        (folder := tmp_path / name).mkdir()
        for path, text in files.items():
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_bytes(text)
        return store.save(3, 12, lambda to: write_archive({"": folder}, to, **content))

    first = saved("first", {"both": b"1", "own": b"1", "step/old": b"1"}, kind="program", inherited=["step/old"])
    second = saved("second", {"both": b"2", "step/old": b"2", "step/new": b"2"})
    third = saved("third", {"step/new": b"3", "else": b"3"})
    whole = replace(first, parts=(second, third))
    assert whole.total_bytes == sum(each.size_bytes for each in (first, second, third))
    with store.file(whole) as path:
        manifest = unpack(path, tmp_path / "there")
    assert (manifest["kind"], "inherited" in manifest) == ("program", False)
    files = {str(path.relative_to(tmp_path / "there")) for path in (tmp_path / "there").rglob("*") if path.is_file()}
    found = {name: (tmp_path / "there" / name).read_bytes() for name in files}
    assert found == {"both": b"1", "own": b"1", "step/old": b"2", "step/new": b"2", "else": b"3"}
    store.discard(third)
    with pytest.raises(CheckpointLostError), store.file(whole):
        pass
    store.discard(whole)
    assert not any(store.holds(each) for each in whole.files())


def test_a_reference_to_other_bytes_is_refused(store):
    ref = store.save(3, 12, b"bytes")
    with pytest.raises(CheckpointError, match="SHA-256"):
        store.load(replace(ref, digest="0" * 64))
    for read in (store.load, lambda ref: store.file(ref).__enter__()):
        with pytest.raises(CheckpointLostError, match="5 bytes instead of 6"):
            read(replace(ref, size_bytes=6))


def test_a_run_tidies_its_own_checkpoints_and_no_other_s(store):
    store.write_mark("a" * 32)
    ours, theirs, nobody_s = replace(store, run="0a1b2c"), replace(store, run="9f8e7d"), store
    left, kept = ours.save(0, 1, b"left"), [ours.save(0, 2, b"before"), ours.save(0, 3, b"newest")]
    others = [theirs.save(0, 1, b"theirs"), nobody_s.save(0, 1, b"of no run")]
    nobody_s.tidy([])
    assert store.holds(left)
    ours.tidy(kept)
    assert not store.holds(left)
    assert [store.load(ref) for ref in (*kept, *others)] == [b"before", b"newest", b"theirs", b"of no run"]
    assert store.read_mark() == "a" * 32
    ours.tidy(kept)


def test_a_run_tidies_its_drafts(tmp_path):
    store = replace(make_store(str(tmp_path)), run="0a1b2c")
    ref = store.save(0, 1, b"whole")
    name = ref.url.rpartition("/")[2]
    for draft in (f".{name}.0123abcd.new", f".{name.replace('0a1b2c', '9f8e7d')}.0123abcd.new"):
        (tmp_path / draft).write_bytes(b"cut off")
    store.tidy([ref])
    assert sorted(path.name for path in tmp_path.iterdir()) == [draft, MARK, name]


def test_an_upload_that_was_cut_off_is_aborted(s3):
    store = replace(make_store(f"s3://{s3}/x"), run="0a1b2c")
    for run in ("0a1b2c", "9f8e7d"):
        boto3.client("s3").create_multipart_upload(Bucket=s3, Key=f"x/trial-0000-iterations-000001-{run}-abc.ckpt")
    store.tidy([])
    left = boto3.client("s3").list_multipart_uploads(Bucket=s3, Prefix="x/")["Uploads"]
    assert ["9f8e7d" in upload["Key"] for upload in left] == [True]


def test_nothing_is_tidied_in_another_store_at_the_same_place(tmp_path):
    store = replace(make_store(str(tmp_path)), run="0a1b2c")
    ref = store.save(0, 1, b"whole")
    (tmp_path / MARK).write_text("b" * 32)
    with pytest.raises(StoreAwayError):
        store.tidy([])
    assert store.holds(ref)


def test_a_pickled_store_is_the_same_store(store):
    ref = store.save(3, 12, b"bytes")
    assert pickle.loads(pickle.dumps(store)).load(ref) == b"bytes"


@pytest.fixture
def made(store) -> CheckpointStore:
    """A store that is marked."""
    return make_store(store.url)


def forget(store: CheckpointStore, *names: str) -> None:
    """Take files away behind the store's back."""
    for name in names:
        if isinstance(store, ObjectStore):
            store.folder.delete(name)
        else:
            (Path(store.url) / name).unlink()


def name_of(ref) -> str:
    return unquote(ref.url).rpartition("/")[2]


def test_a_store_is_reopened_by_its_mark(made):
    ref = made.save(3, 12, b"bytes")
    for known in ([], [ref]):
        assert reopen_store(made.url, made.mark, known).load(ref) == b"bytes"


def test_another_store_is_not_taken_for_it(made):
    with pytest.raises(
        StoreAwayError, match=r"expected the mark aaaaaaaa…, found the mark \w{8}…; mount or restore it"
    ):
        reopen_store(made.url, "a" * 32, [])


def test_a_store_without_a_mark_is_not_taken_for_it_and_nothing_is_made_in_it(made):
    ref = made.save(3, 12, b"bytes")
    forget(made, MARK, name_of(ref))
    for known in ([], [ref]):
        with pytest.raises(StoreAwayError, match=f"found no file {MARK}"):
            reopen_store(made.url, made.mark, known)
    assert made.read_mark() == ""


def test_a_store_that_came_back_without_its_mark_is_known_by_its_checkpoints_and_marked_again(made):
    lost, ref = made.save(3, 12, b"bytes"), made.save(4, 12, b"bytes")
    forget(made, MARK, name_of(lost))
    assert reopen_store(made.url, made.mark, [lost, ref]).load(ref) == b"bytes"
    assert made.read_mark() == made.mark


def test_a_missing_file_is_lost_only_if_its_store_is_available(made):
    ref = made.save(3, 12, b"bytes")
    forget(made, name_of(ref))
    with pytest.raises(CheckpointLostError, match="is missing"):
        made.load(ref)
    forget(made, MARK)
    with pytest.raises(StoreAwayError):
        made.load(ref)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_machine_without_room_loses_no_checkpoint(made, code):
    ref = made.save(3, 12, b"bytes")

    class Full(io.BytesIO):
        def write(self, _: object) -> int:
            raise OSError(code, os.strerror(code))

    with pytest.raises(OSError, match=os.strerror(code)):
        made.fetch(ref, Full())


def test_a_directory_that_is_not_there_is_away_and_is_not_made(tmp_path):
    with pytest.raises(StoreAwayError, match=r"No such file or directory.*; mount or restore it"):
        reopen_store(str(tmp_path / "disk" / "checkpoints"), "a" * 32, [])
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_into_an_empty_directory_in_its_place(tmp_path):
    store = make_store(str(tmp_path / "disk"))
    (tmp_path / "disk").rename(tmp_path / "unmounted")
    (tmp_path / "disk").mkdir()
    with pytest.raises(StoreAwayError, match=f"found no file {MARK}"):
        store.save(3, 12, b"bytes")
    assert list((tmp_path / "disk").iterdir()) == []


def leave_free(free_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let files of more bytes than that fail, as on a disk that is almost full; empty ones need no room."""

    def limited(write: Callable[..., object], at: int) -> Callable[..., object]:
        def wrapped(*arguments: Any, **named: Any) -> object:
            if len(arguments[at]) > free_bytes:
                raise OSError(28, "No space left on device")
            return write(*arguments, **named)

        return wrapped

    monkeypatch.setattr(Path, "write_bytes", limited(Path.write_bytes, 1))
    monkeypatch.setattr(checkpoints, "write_atomically", limited(checkpoints.write_atomically, 1))


def test_on_a_full_disk_no_store_opens(tmp_path, monkeypatch):
    leave_free(0, monkeypatch)
    with pytest.raises(InputError, match=r"cannot be written to .*: No space left on device; name another"):
        open_store(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("free_bytes", "saved_bytes"), [(0, None), (999_999, 1_000_000)])
def test_a_store_that_has_no_room_for_a_checkpoint_is_away(tmp_path, monkeypatch, free_bytes, saved_bytes):
    store = make_store(str(tmp_path))
    known = [] if saved_bytes is None else [store.save(0, 1, bytes(saved_bytes))]
    leave_free(free_bytes, monkeypatch)
    with pytest.raises(StoreAwayError, match=r"does not accept checkpoints \(No space left on device\); make room"):
        reopen_store(store.url, store.mark, known)


def test_two_that_begin_in_one_store_at_once_find_the_same_store(tmp_path, monkeypatch):
    others: list[CheckpointStore] = []
    really = checkpoints.write_new

    def write_new(path: Path, data: bytes, *, durable: bool) -> None:
        really(path, data, durable=durable)
        if not others:
            others.append(store_of_the_other())

    def store_of_the_other() -> CheckpointStore:
        others.append(open_store(str(tmp_path)))
        return make_store(str(tmp_path))

    monkeypatch.setattr(checkpoints, "write_new", write_new)
    mine, other = make_store(str(tmp_path)), others[-1]
    assert mine.mark == other.mark
    assert mine.load(other.save(0, 1, b"bytes")) == b"bytes"


def test_a_saved_checkpoint_and_the_mark_outlive_a_power_cut(tmp_path, monkeypatch):
    """A file system that keeps what was synced, and nothing else: files, and the names in directories."""
    power = PowerCut(tmp_path, monkeypatch)
    store = make_store(str(tmp_path / "new" / "checkpoints"))
    power.cut()
    assert store.read_mark() == store.mark
    for payload in (b"bytes", lambda path: path.write_bytes(b"bytes") and None):
        ref = store.save(3, 12, payload)
        power.cut()
        assert store.load(ref) == b"bytes"


def test_a_reference_outside_the_store_is_refused(store, tmp_path):
    outside = tmp_path / "precious"
    outside.write_bytes(b"x")
    ref = replace(store.save(0, 1, b"x"), url=outside.as_uri())
    with pytest.raises(CheckpointError, match="is not in the store"):
        store.discard(ref)
    assert outside.exists()


def _unreadable(monkeypatch, code: int, *, times: int, path: str) -> None:
    """Let the first `times` reads of a file whose path ends in `path` fail half-way with the system error `code`."""
    copy, left = shutil.copyfileobj, [times]

    def copyfileobj(source: Any, target: Any, length: int) -> None:
        if source.name.endswith(path) and left[0]:
            left[0] -= 1
            target.write(source.read(2))
            raise OSError(code, os.strerror(code))
        copy(source, target, length)

    monkeypatch.setattr(shutil, "copyfileobj", copyfileobj)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EISDIR, errno.ESTALE, errno.EIO])
def test_one_file_that_cannot_be_read_is_lost_and_its_store_is_well(tmp_path, monkeypatch, code):
    store = make_store(str(tmp_path))
    before, newest = store.save(0, 1, b"before"), store.save(0, 2, b"newest")
    _unreadable(monkeypatch, code, times=10, path=newest.url[-12:])
    with pytest.raises(CheckpointLostError, match=os.strerror(code)):
        store.load(newest)
    assert store.load(before) == b"before"


def test_a_handle_that_is_stale_for_a_moment_loses_nothing(tmp_path, monkeypatch):
    store = make_store(str(tmp_path))
    ref = store.save(0, 1, b"good")
    _unreadable(monkeypatch, errno.ESTALE, times=1, path=".ckpt")
    assert store.load(ref) == b"good"


@pytest.mark.parametrize("has_mark", [True, False])
def test_a_store_that_cannot_be_read_as_a_whole_is_away_and_nothing_is_lost(tmp_path, has_mark):
    store = make_store(str(tmp_path / "store"))
    store = store if has_mark else replace(store, mark="")
    ref = store.save(0, 1, b"good")
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    with pytest.raises(StoreAwayError):
        store.load(ref)
    (tmp_path / "elsewhere").rename(tmp_path / "store")
    assert store.load(ref) == b"good"


def test_an_object_that_may_not_be_read_is_lost_and_its_bucket_is_well(s3, monkeypatch):
    store = make_store(f"s3://{s3}/x")
    before, newest = store.save(0, 1, b"before"), store.save(0, 2, b"newest")
    fetch = S3Folder.fetch

    def refused(folder: S3Folder, name: str, file: BufferedIOBase) -> None:
        if newest.url.endswith(name):
            raise CheckpointError(f"{folder.url}/{name} could not be read: AccessDenied")
        fetch(folder, name, file)

    monkeypatch.setattr(S3Folder, "fetch", refused)
    with pytest.raises(CheckpointLostError, match="AccessDenied"):
        store.load(newest)
    assert store.load(before) == b"before"
    monkeypatch.setattr(S3Folder, "fetch", lambda folder, _, file: refused(folder, name_of(newest), file))
    with pytest.raises(StoreAwayError, match="cannot be read"):
        store.load(newest)


def test_a_failed_write_is_a_checkpoint_error_and_leaves_nothing(tmp_path, monkeypatch):
    store = open_store(str(tmp_path))

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(CheckpointError, match=r"trial 3 after 12 iterations.*No space left"):
        store.save(3, 12, b"bytes")
    assert list(tmp_path.iterdir()) == []


def test_where_nothing_can_be_written_opening_fails(tmp_path):
    (tmp_path / "file").write_text("")
    for url in (str(tmp_path / "file"), str(tmp_path / "file" / "below"), "/proc/checkpoints"):
        with pytest.raises(InputError, match=r"cannot be written.*name another directory"):
            open_store(url)


@pytest.mark.parametrize("url", ["http://host/x", "sftp://host/x", "simplecache::gs://bucket/x"])
def test_another_scheme_is_not_supported(url):
    with pytest.raises(InputError, match=r"not supported: .*:// is unknown; give s3://bucket/prefix, gs://, az://"):
        open_store(url)


@pytest.mark.parametrize(
    ("url", "module", "extra"),
    [
        ("gs://bucket/x", "gcsfs", "gcs"),
        ("az://container/x", "adlfs", "azure"),
        ("abfs://container@account.dfs.core.windows.net/x", "adlfs", "azure"),
        ("hf://buckets/user/name/x", "huggingface_hub", "hf"),
        ("s3://bucket/x", "boto3", "aws"),
    ],
)
def test_a_missing_driver_is_named_with_the_command_that_installs_it(monkeypatch, url, module, extra):
    monkeypatch.setattr(installation, "find_spec", lambda name: None)
    with pytest.raises(InputError) as raised:
        open_store(url)
    assert str(raised.value) == (
        f"the checkpoint store {url} needs {module}; run pip install 'rubberband-tune[{extra}]'"
    )


def test_a_bucket_of_google_that_is_not_there_is_named_with_the_remedy(gcs):
    with pytest.raises(InputError, match=r"written to gs://none/x: FileNotFoundError: .* set GOOGLE_APPLICATION_CRED"):
        open_store("gs://none/x")


@pytest.mark.parametrize(
    ("url", "message"),
    [("s3://", "write s3://bucket/prefix"), ("s3://no-such-bucket/x", "no bucket no-such-bucket.*aws setup")],
)
def test_where_s3_cannot_be_written_the_remedy_is_named(s3, url, message):
    with pytest.raises(InputError, match=message):
        open_store(url)


def test_a_bucket_that_is_gone_or_cannot_be_read_is_away(s3, monkeypatch):
    with pytest.raises(StoreAwayError, match="s3://no-such-bucket/x is not the original one"):
        reopen_store("s3://no-such-bucket/x", "a" * 32, [])
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("rubberband.cloud.aws.s3._CONFIG", Config(retries={"max_attempts": 0}, connect_timeout=1))
    with pytest.raises(StoreAwayError, match=f"s3://{s3}/x cannot be read: .*; give access or put it back"):
        reopen_store(f"s3://{s3}/x", "a" * 32, [])


def test_without_credentials_s3_says_so(s3, monkeypatch):
    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(key)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", os.environ["AWS_ENDPOINT_URL"])  # a client for it is not there yet
    with pytest.raises(InputError, match=r"cannot be written to s3://bucket/x.*no AWS credentials"):
        open_store(f"s3://{s3}/x")
