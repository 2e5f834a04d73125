"""The process that fetches on a machine: `python -m rubberband.cloud.fetch ORDER`, a mapping in JSON.

The library of the hub reads its variables when it is imported, so that each order has a process of its own. A JSON line
says how it ended; then the mirror is filled, if there is one, while trials start.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rubberband.cloud.fetch.cache import Fetched, Place, free_bytes
from rubberband.cloud.fetch.hub import File, NoAnswerError, look_up
from rubberband.cloud.node import LEASE_VARIABLE, machine_folder
from rubberband.errors import CheckpointError, InputError
from rubberband.spec.fetching import Source
from rubberband.units import counted, error_line, format_bytes

ATTEMPTS = 10
"""Attempts in a row that get no further file."""
_WRONG_ATTEMPTS = 3
"""Attempts of which each got wrong bytes."""
_LONGEST_PAUSE_S = 30.0
_MOST_CONFIGURATIONS = 16
"""Limit of a dataset's configurations that are prepared; of more, only the default one is."""


class FetchError(Exception):
    """Something cannot be fetched; the message is one line."""


def main(order: Mapping[str, Any]) -> int:
    """Carry out an order, print how it ended, and return the exit status."""
    own = {"HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    os.environ.update({**order["variables"], **own})
    if LEASE_VARIABLE in os.environ and "HF_HOME" not in order["variables"]:  # a rented machine's own disk
        os.environ["HF_HOME"] = str(machine_folder() / "huggingface")
    fills: list[Callable[[], None]] = []
    _resume_after_resets()
    try:
        found = _fetch(order, fills)
    except ImportError as error:
        _say({"fault": f"fetch: {error.name} is missing on the instance; install huggingface_hub there"})
        return 1
    except (FetchError, InputError, OSError) as error:
        line = error_line(str(error))
        _say({"fault": line if line.startswith("resources.fetch") else f"fetch: {line}"})
        return 1
    _say(found)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)  # who waits for the end of the output goes on
    for fill in fills:
        with suppress(CheckpointError):  # another instance fills it
            fill()
    return 0


def _say(words: Mapping[str, Any]) -> None:
    print(json.dumps(words), flush=True)


def _fetch(order: Mapping[str, Any], fills: list[Callable[[], None]]) -> dict[str, Any]:
    from huggingface_hub import constants

    size, seconds, is_mirrored, trouble = 0, 0.0, False, ""
    for words in order["sources"]:
        place = Place(
            Path(constants.HF_HUB_CACHE), Source(words["kind"], words["name"], words["revision"]), words["commit"]
        )
        with place.locked():
            fetched = place.fetched()
            if fetched is None:
                fetched = _fetch_one(place, order.get("from"), order.get("token"), fills)
            place.name()
        size, seconds = size + fetched.size, seconds + fetched.seconds
        is_mirrored, trouble = is_mirrored or fetched.is_mirrored, trouble or fetched.trouble
    fetched = Fetched(size=size, seconds=seconds, is_mirrored=is_mirrored, trouble=trouble)
    return {"fetched": asdict(fetched), "home": constants.HF_HOME}


def _fetch_one(place: Place, mirror: str | None, token: Any, fills: list[Callable[[], None]]) -> Fetched:
    """Fetch a commit and verify it. Raises FetchError and InputError."""
    from rubberband.cloud.fetch.mirror import Mirror

    began_s, trouble = time.monotonic(), ""
    copy = None if mirror is None else Mirror.of(mirror, place)
    try:
        files = None if copy is None else copy.files()
    except CheckpointError as error:
        trouble, copy, files = str(error), None, None
    is_mirrored = files is not None
    if files is None:
        files = _asked(place, token)
    need, free = place.missing(files), free_bytes(place.root)
    if need > free:
        raise FetchError(
            f"{place.source.name} needs {format_bytes(need)}, and {format_bytes(free)} are free in {place.root}; give "
            "the instance a larger disk (resources.aws.volume_gb), or set HF_HOME to one"
        )
    if copy is not None and is_mirrored:
        _until_right(place, files, lambda: copy.read(place, files))
    else:
        _until_right(place, files, lambda: _download(place, token))
        try:
            if copy is not None and copy.claim():
                fills.append(lambda: copy.fill(place, files))
        except CheckpointError as error:
            trouble = str(error)
    if place.source.kind == "dataset":
        _prepare(place)
    fetched = Fetched(size=need, seconds=time.monotonic() - began_s, is_mirrored=is_mirrored, trouble=trouble)
    place.note(files, fetched)
    return fetched


def _asked(place: Place, token: Any) -> tuple[File, ...]:
    """Return the files by the hub, which is asked again while it does not answer."""
    for attempt in range(ATTEMPTS):
        try:
            return look_up(place.source, place.commit, token).files
        except NoAnswerError as error:
            if attempt + 1 == ATTEMPTS:
                raise FetchError(f"{place.source.name}: {error}") from None
            _pause(attempt)
    raise AssertionError("the last attempt returns or raises")


def _until_right(place: Place, files: Sequence[File], get: Callable[[], object]) -> None:
    """Get files until all are here and right. Raises FetchError after attempts that got nothing further."""
    attempt, wrongs, lacking, why = 0, 0, math.inf, ""
    while attempt < ATTEMPTS and wrongs < _WRONG_ATTEMPTS:
        try:
            get()
        except InputError:
            raise
        except Exception as error:  # of the HTTP client, which is another one in other versions, and of the bucket
            why = f"{type(error).__name__}: {error_line(str(error))}"
        else:
            if not (wrong := place.wrong(files)):
                return
            wrongs += 1
            why = f"{counted(len(wrong), 'file')} not as the hub's digests say, such as {wrong[0]}"
            for path in wrong:
                place.drop(path)
        left = place.missing(files)
        attempt, lacking = (1 if left < lacking else attempt + 1), left
        print(f"{place.source.name}: {why}", file=sys.stderr, flush=True)
        if attempt < ATTEMPTS and wrongs < _WRONG_ATTEMPTS:
            _pause(attempt - 1)
    raise FetchError(f"{place.source.name} was not fetched after {attempt} attempts: {why}"[:300])


def _pause(attempt: int) -> None:
    time.sleep(min(_LONGEST_PAUSE_S, 2.0**attempt))


def _download(place: Place, token: Any) -> None:
    """Download what lacks; the library goes on where a connection broke. Raises InputError for what is refused."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    source = place.source
    try:
        snapshot_download(source.name, repo_type=source.kind, revision=place.commit, cache_dir=place.root, token=token)
    except (GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise InputError(f"{source.place}: the hub refuses {source.name}: {error_line(str(error))}") from None


def _resume_after_resets() -> None:
    """Let the library go on where a connection was reset, as it does where one ended early: else a file begins anew."""
    try:
        from huggingface_hub import set_client_factory
        from huggingface_hub.utils._http import default_client_factory
    except ImportError:  # another version
        return

    def make() -> Any:
        client: Any = default_client_factory()
        http: Any = sys.modules[type(client).__module__.partition(".")[0]]

        class Stream(http.SyncByteStream):  # type: ignore[misc]
            def __init__(self, stream: Any) -> None:
                self._stream = stream

            def __iter__(self) -> Iterator[bytes]:
                try:
                    yield from self._stream
                except http.ReadError as error:
                    raise http.RemoteProtocolError(str(error)) from error

            def close(self) -> None:
                self._stream.close()

        def resume(response: Any) -> None:
            response.stream = Stream(response.stream)

        hooks = client.event_hooks
        client.event_hooks = {**hooks, "response": [*hooks.get("response", ()), resume]}
        return client

    set_client_factory(make)


def _prepare(place: Place) -> None:
    """Convert a dataset as `load_dataset(NAME)` does at its first call, which finds it then without the hub."""
    try:
        import datasets
        from datasets.naming import camelcase_to_snakecase
    except ImportError:
        return  # no trial loads it so
    folder, (*owner, own) = str(place.snapshot), place.source.name.split("/")
    own = camelcase_to_snakecase(own)
    root = Path(datasets.config.HF_DATASETS_CACHE) / "___".join((*owner, own))
    try:
        names = datasets.get_dataset_config_names(folder)
        for name in names if len(names) <= _MOST_CONFIGURATIONS else [None]:
            builder = datasets.load_dataset_builder(folder, name)
            builder.dataset_name = own  # as the files of the cache are named
            builder.download_and_prepare(str(root / builder.config.name / str(builder.config.version) / place.commit))
    except Exception as error:  # no data files that it knows: trials read them by huggingface_hub
        print(f"{place.source.name} is not prepared for load_dataset: {error_line(str(error))}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
