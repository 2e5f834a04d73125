"""Checkpoint stores: one suite that every implementation passes, and what is particular to directories."""

import hashlib
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from rubberband.errors import CheckpointError, InputError
from rubberband.executor.checkpoints import CheckpointStore, open_store

Opener = Callable[[Path], CheckpointStore]

STORES: dict[str, Opener] = {
    "path": lambda folder: open_store(str(folder / "new" / "checkpoints")),
    "file URL": lambda folder: open_store((folder / "with space").as_uri()),
}
"""Add a store here and it is held to the same promises."""


@pytest.fixture(params=STORES)
def store(request, tmp_path) -> CheckpointStore:
    return STORES[request.param](tmp_path)


def test_what_is_saved_is_loaded(store):
    payload = bytes(range(256)) * 100
    ref = store.save(3, 12, payload)
    assert store.load(ref) == payload
    assert ref.size_bytes == len(payload)
    assert ref.digest == hashlib.sha256(payload).hexdigest()


def test_an_empty_payload_is_a_payload(store):
    assert store.load(store.save(0, 1, b"")) == b""


def test_another_attempt_never_overwrites(store):
    first = store.save(3, 12, b"first")
    second = store.save(3, 12, b"second")
    assert (store.load(first), store.load(second)) == (b"first", b"second")


def test_a_discarded_checkpoint_is_gone_and_may_be_discarded_again(store):
    ref, other = store.save(3, 12, b"x"), store.save(3, 12, b"y")
    store.discard(ref)
    store.discard(ref)
    with pytest.raises(CheckpointError, match="gone"):
        store.load(ref)
    assert store.load(other) == b"y"


def test_a_reference_to_other_bytes_is_refused(store):
    ref = store.save(3, 12, b"bytes")
    with pytest.raises(CheckpointError, match="SHA-256"):
        store.load(replace(ref, digest="0" * 64))
    with pytest.raises(CheckpointError, match="5 bytes instead of 6"):
        store.load(replace(ref, size_bytes=6))


def test_a_pickled_store_is_the_same_store(store):
    ref = store.save(3, 12, b"bytes")
    assert pickle.loads(pickle.dumps(store)).load(ref) == b"bytes"


def test_a_reference_outside_the_store_is_refused(store, tmp_path):
    outside = tmp_path / "precious"
    outside.write_bytes(b"x")
    ref = replace(store.save(0, 1, b"x"), url=outside.as_uri())
    with pytest.raises(CheckpointError, match="does not lie in the store"):
        store.discard(ref)
    assert outside.exists()


def test_the_file_is_named_after_trial_and_iterations_and_nothing_else_is_left(tmp_path):
    ref = open_store(str(tmp_path)).save(3, 12, b"bytes")
    (file,) = tmp_path.iterdir()
    assert file == Path(unquote(urlsplit(ref.url).path))
    assert "trial-0003" in file.name
    assert "000012" in file.name


@pytest.mark.parametrize(
    ("damage", "message"), [(lambda p: p[:-1], "3 bytes instead of 4"), (lambda p: b"bits", "SHA")]
)
def test_a_damaged_file_is_refused(tmp_path, damage, message):
    store = open_store(str(tmp_path))
    ref = store.save(0, 1, b"good")
    (file,) = tmp_path.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(CheckpointError, match=message):
        store.load(ref)


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


@pytest.mark.parametrize("url", ["s3://bucket/checkpoints", "http://host/x"])
def test_another_scheme_is_not_supported_yet(url):
    with pytest.raises(InputError, match="not supported yet"):
        open_store(url)


def test_a_file_url_of_another_host_is_refused():
    with pytest.raises(InputError, match="host 'server'"):
        open_store("file://server/checkpoints")
