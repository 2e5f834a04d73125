"""A mirror: a folder of a bucket with commits of the hub, which the first instance fills and later ones read."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

from rubberband.cloud.aws.s3 import S3Folder
from rubberband.cloud.fetch.cache import Place
from rubberband.cloud.fetch.hub import File
from rubberband.errors import CheckpointError, InputError
from rubberband.files import new_file

_AT_ONCE = 4
_CLAIM_S = 3600.0
"""An instance that has not filled the mirror by then has ended."""


@dataclass(frozen=True, slots=True)
class Mirror:
    """The folder of one commit. All methods raise CheckpointError if the bucket does not answer."""

    folder: S3Folder

    @classmethod
    def of(cls, url: str, place: Place) -> Mirror:
        """Return the folder of a commit in the mirror at `url`."""
        return cls(S3Folder.parse(f"{url.rstrip('/')}/{place.repo.name}/{place.commit}"))

    def files(self) -> tuple[File, ...] | None:
        """Return the files of the commit; None while the mirror has not all of them."""
        try:
            return tuple(File(**each) for each in json.loads(self.folder.get("rubberband.json")))
        except FileNotFoundError:
            return None

    def read(self, place: Place, files: Sequence[File]) -> None:
        """Write the files that the cache lacks. Raises OSError."""

        def copy(file: File) -> None:
            target = place.snapshot / file.path
            target.parent.mkdir(parents=True, exist_ok=True)
            with new_file(target, durable=False) as draft, open(draft, "wb") as content:
                self.folder.fetch(f"files/{file.path}", content)

        lacking = [file for file in files if place.missing([file]) or not (place.snapshot / file.path).exists()]
        with ThreadPoolExecutor(_AT_ONCE) as readers:
            list(readers.map(copy, lacking))

    def claim(self) -> bool:
        """Return whether this instance is to fill the mirror: no other one has, or does so now."""
        if self.folder.has("rubberband.json") or self._is_claimed():
            return False
        self.folder.put("claim", f"{time.time()}".encode())
        return True

    def fill(self, place: Place, files: Sequence[File]) -> None:
        """Upload the files, the list last."""
        with ThreadPoolExecutor(_AT_ONCE) as writers:
            list(writers.map(lambda file: self.folder.put(f"files/{file.path}", place.snapshot / file.path), files))
        self.folder.put("rubberband.json", json.dumps([asdict(file) for file in files]).encode())

    def _is_claimed(self) -> bool:
        try:
            return time.time() - float(self.folder.get("claim")) < _CLAIM_S
        except (FileNotFoundError, ValueError):
            return False


def require_mirror(url: str) -> None:
    """Raise InputError unless this machine may write to a mirror, as instances do."""
    folder = S3Folder.parse(url)
    try:
        folder.put(".probe", b"")
        folder.delete(".probe")
    except CheckpointError as error:
        raise InputError(f"resources.fetch.from: {error}; name a bucket of this account, or leave it out") from None
