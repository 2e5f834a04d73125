"""Base models and data of the Hugging Face hub, which each machine fetches once, before trials start on it.

The entrance of the feature: `rubberband/features.py` joins this module. `planned` asks the hub for commits and sizes,
`fetch_here` fills the cache of this machine, and `fetch` carries out an order on an instance, in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from rubberband.cloud.fetch import bandwidth
from rubberband.cloud.fetch.bandwidth import record
from rubberband.cloud.fetch.cache import Fetched, Place, commit_here
from rubberband.cloud.fetch.hub import TOKEN, Listing, NoAnswerError, look_up
from rubberband.errors import InputError
from rubberband.installation import install_hint
from rubberband.spec.experiment import Experiment
from rubberband.spec.fetching import Source
from rubberband.spec.resources import Resources
from rubberband.units import error_line, format_bytes, format_duration

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
"""Variables of trials, which have all they need."""
_SHORT = 7
"""Characters of a commit in a line."""
_BESIDE_START_S = 20.0
"""On EC2 a machine checks its GPUs and joins the cluster while it fetches: an assumption."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Files that a machine is to have. It can be pickled."""

    words: Mapping[str, Any]
    """Sources, mirror and variables, as `rubberband.cloud.fetch.__main__` reads them."""
    token: str = field(default="", repr=False)


def planned(experiment: Experiment, home: Path, *, is_required: bool, is_trusted: bool = True) -> Experiment:
    """Return an experiment with the commits that it fetches, the time that this takes, and a note on it.

    Where the hub does not answer, a note says so, unless it `is_required`. Not `is_trusted`: the experiment is another
    user's, whose words name no server that is asked from here. Raises InputError for what the hub refuses.
    """
    resources, fetch = experiment.resources, experiment.resources.fetch
    assert fetch is not None, "the caller looks"
    if find_spec("huggingface_hub") is None:
        raise InputError(f"resources.fetch needs huggingface_hub; run {install_hint('hf')}")
    is_here, found = resources.kind.is_this_machine, list[tuple[Source, Listing, int]]()
    if not is_trusted and (resources.secrets or any(name.startswith("HF_") for name in resources.env)):
        return experiment.with_notes("fetch: sizes are asked from the hub when the experiment runs.")
    try:
        for source in fetch.sources:
            commit = fetch.commits.get(source.key)
            known = _place_here(resources, source, commit) if is_here else None
            if known is not None and commit is not None and known.fetched() is not None:
                found.append((source, Listing(commit=commit, files=()), 0))
                continue
            try:
                listing = look_up(source, commit, _token(resources), _variable(resources, "HF_ENDPOINT"))
            except NoAnswerError:
                if known is None or known.fetched() is None:
                    raise
                listing = Listing(commit=known.commit, files=())
            place = _place_here(resources, source, listing.commit) if is_here else None
            missing = listing.size if place is None else 0 if place.fetched() else place.missing(listing.files)
            found.append((source, listing, missing))
    except NoAnswerError as error:
        line = f"{error}, so that the size of {source.name} is not known"
        if is_required:
            raise InputError(f"{source.place}: {line}; check the network, or HF_ENDPOINT") from None
        return experiment.with_notes(f"fetch: {line}; the time to fetch it is not in the plan.")
    if is_required and fetch.mirror is not None and not resources.kind.is_simulated:
        from rubberband.cloud.fetch.mirror import require_mirror

        require_mirror(fetch.mirror)
    return _with_sizes(experiment, home, found)


def _with_sizes(experiment: Experiment, home: Path, found: list[tuple[Source, Listing, int]]) -> Experiment:
    resources = experiment.resources
    assert resources.fetch is not None
    size, named = (
        sum(missing for *_, missing in found),
        ", ".join(f"{s.name} at {a.commit[:_SHORT]}" for s, a, _ in found),
    )
    disk_gb = resources.aws.volume_gb
    if resources.kind.is_rented and disk_gb is not None and size > disk_gb * 1e9:
        raise InputError(
            f"resources.aws.volume_gb: {disk_gb} GB are less than the {format_bytes(size)} of resources.fetch; raise it"
        )
    seen = bandwidth.measured(home, resources)
    seconds = bandwidth.seconds_of(size, seen)
    basis = "a guess" if seen is None else "measured"
    rate = f"{format_bytes(seen or bandwidth.ASSUMED)}/s ({basis})"
    where = "this machine" if resources.kind.is_this_machine else "each instance"
    note = f"fetch: {where} downloads {format_bytes(size)} once, about {format_duration(seconds)} at {rate}: {named}."
    if not size:
        note = f"fetch: the cache of this machine has {named}."
    commits = {source.key: listing.commit for source, listing, _ in found}
    pinned = resources.fetch.model_copy(update={"commits": commits})
    changed = experiment.model_copy(update={"resources": resources.model_copy(update={"fetch": pinned})})
    beside_s = _BESIDE_START_S if resources.kind.is_rented and resources.pool is None else 0.0
    return changed.with_fetch(seconds, beside_s).with_notes(note)


def boot_order(resources: Resources) -> str:
    """Return the order that a rented machine begins with, as JSON: without a token, as all of its processes see it."""
    public = resources.model_copy(update={"env": {k: v for k, v in resources.env.items() if k != TOKEN}, "secrets": ()})
    return json.dumps(order_of(public).words, separators=(",", ":"))


def order_of(resources: Resources, environment: Mapping[str, str] = os.environ) -> Order:
    """Return the order of an experiment whose commits are known."""
    fetch = resources.fetch
    assert fetch is not None, "the caller looks"
    given = {name: environment[name] for name in ("HF_ENDPOINT", "HF_HUB_DISABLE_XET") if environment.get(name)}
    token = environment.get(TOKEN, "") if TOKEN in resources.secrets else resources.env.get(TOKEN, "")
    return Order(
        words={
            "sources": [{**source._asdict(), "commit": fetch.commits[source.key]} for source in fetch.sources],
            "from": fetch.mirror,
            "token": None if token or resources.kind.is_this_machine else False,
            "variables": {**given, **{k: v for k, v in resources.env.items() if k.startswith("HF_") and k != TOKEN}},
        },
        token=token,
    )


def fetch(order: Order) -> tuple[Fetched, dict[str, str]]:
    """Carry out an order on this machine; return what was fetched, and the variables of its trials.

    Raises InputError, in one line, for what cannot be fetched.
    """
    variables = {**os.environ, **({TOKEN: order.token} if order.token else {})}
    command = [sys.executable, "-P", "-m", "rubberband.cloud.fetch", json.dumps(dict(order.words))]
    with TemporaryFile("w+") as err:
        process = subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=err,
            text=True,
            start_new_session=True,  # it may fill the mirror for longer
        )
        try:
            assert process.stdout is not None
            with process.stdout as output:
                out = output.read()
        except BaseException:
            process.kill()
            raise
        try:
            found = json.loads(out.splitlines()[-1])
        except (IndexError, ValueError):
            err.seek(0)
            raise InputError(f"fetch: its process ended with {process.wait()}: {error_line(err.read())}") from None
    threading.Thread(target=process.wait, daemon=True, name="fetch").start()
    if "fault" in found:
        raise InputError(found["fault"])
    return Fetched(**found["fetched"]), {**OFFLINE, "HF_HOME": found["home"]}


def fetch_here(experiment: Experiment, home: Path, announce: Callable[[str], None]) -> None:
    """Fetch what the cache of this machine lacks, before anything runs here. Raises InputError."""
    resources = experiment.resources
    assert resources.fetch is not None, "the caller looks"
    sources, commits = resources.fetch.sources, resources.fetch.commits
    places = [_place_here(resources, source, commits.get(source.key)) for source in sources]
    if all(place is not None and place.is_named and place.fetched() for place in places):
        return
    fetched, _ = fetch(order_of(resources))
    record(home, resources, fetched)
    taken = f"{format_bytes(fetched.size)} in {format_duration(fetched.seconds)}"
    announce(f"fetched {taken}, and verified them; trials do not ask the hub")


def _place_here(resources: Resources, source: Source, commit: str | None) -> Place | None:
    """Return the place of a commit, or of that of a revision, in this machine's cache; None if that is not known."""
    from huggingface_hub import constants

    home, root = _variable(resources, "HF_HOME"), _variable(resources, "HF_HUB_CACHE")
    root = root or (f"{home}/hub" if home else constants.HF_HUB_CACHE)
    commit = commit or commit_here(Path(root), source)
    return None if commit is None else Place(Path(root), source, commit)


def _variable(resources: Resources, name: str) -> str | None:
    return resources.env.get(name) or os.environ.get(name) or None


def _token(resources: Resources) -> str | bool | None:
    given = resources.env.get(TOKEN) or (os.environ.get(TOKEN) if TOKEN in resources.secrets else None)
    return given or (None if resources.kind.is_this_machine else False)
