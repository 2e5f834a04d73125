"""`rubberband tag`, `rm` and `cleanup`: tags, notes and archive of experiments, their end, and what they left."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rubberband.commands.common import (
    ConfirmOption,
    Name,
    OnOption,
    ServerOption,
    argument,
    client_of,
    experiment_names,
    option,
)
from rubberband.errors import InputError, RubberbandError
from rubberband.units import counted, shown

if TYPE_CHECKING:
    from rubberband.api.store import Store
    from rubberband.client.client import Client
    from rubberband.executor.journal.folder import ExperimentFolder
    from rubberband.executor.run.removing import Removal
    from rubberband.values.submission import LabelChange, Labels

tag = typer.Typer(add_completion=False, rich_markup_mode=None)


@tag.command("tag", context_settings={"ignore_unknown_options": True, "help_option_names": ["--help"]})
def tag_(
    name: Name,
    tags: Annotated[list[str] | None, argument("[+TAG|-TAG]...", "Tags to add and to remove.")] = None,
    note: Annotated[str | None, option("--note", "TEXT", "The new note; an empty one removes it.")] = None,
    archive: Annotated[
        bool | None,
        typer.Option(
            "--archive/--unarchive",
            help="Leave it out of lists, or list it again; nothing is deleted.",
            show_default=False,
        ),
    ] = None,
    server: ServerOption = None,
    on: OnOption = None,
) -> None:
    """Show and change tags and a note, or archive.

    `rubberband ps --tag vision` lists those with a tag, and `rubberband ps --archived` those that were archived.
    """
    from rubberband.values.submission import LabelChange
    from rubberband.views.live.status import labels as lines

    added, removed = _signed(tags or ())
    change = LabelChange(add_tags=added, remove_tags=removed, note=note, archived=archive)
    is_asked = bool(added or removed) or note is not None or archive is not None
    client = client_of(server)
    if client is not None:
        found = _at_service(client, name, change if is_asked else None)
    else:
        here = _here(name, change if is_asked else None)
        found = {"tags": here.tags, "note": here.note, "archived": here.archived}
    print("\n".join(lines(found)) or "no tags and no note")


def _signed(words: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the tags with + and those with -. Raises InputError for a word with neither."""
    for word in words:
        if word[:1] not in ("+", "-") or word.startswith("--"):
            raise InputError(f"{shown(word)} is neither an option nor a tag; write +TAG to add one, -TAG to remove one")
    return tuple(word[1:] for word in words if word[0] == "+"), tuple(word[1:] for word in words if word[0] == "-")


def _at_service(client: Client, name: str, change: LabelChange | None) -> dict[str, object]:
    with client:
        if change is None:
            return dict(client.experiment(name))
        found = client.tag(
            name, *change.add_tags, remove=change.remove_tags, note=change.note, archived=change.archived
        )
        return dict(found)


def _here(name: str, change: LabelChange | None) -> Labels:
    from rubberband.executor.journal.folder import change_labels, open_folder, read_labels, write_labels

    folder = open_folder(name)
    folder.require()
    if change is None:
        return read_labels(folder)
    if folder.store is not None and not folder.is_here:
        raise InputError(f"experiment {name!r} was started in another home; tag it there, or at its service (--server)")
    with _listing(folder) as store:
        labels = None if store is None else store.upkeep.label(name, change)
        if labels is None:
            return change_labels(folder, change)
    write_labels(folder, labels)
    return labels


@contextmanager
def _listing(folder: ExperimentFolder) -> Iterator[Store | None]:
    """Open the store of the home's service; None if there never was one."""
    from rubberband.installation import default_store

    store = default_store()
    if store is None and not (folder.home / "server.db").exists():
        yield None
        return
    from rubberband.features import part

    with closing(part("listing")(store, folder.home)) as opened:
        yield opened


def rm(
    names: Annotated[list[str], argument("NAME...", "Experiments that have ended.")],
    yes: ConfirmOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Only show what would be deleted.")] = False,
    server: ServerOption = None,
    on: OnOption = None,
) -> None:
    """Delete experiments that have ended.

    Deletes the journal, the logs and the checkpoints on this machine, or in the home of the service. Checkpoints in
    buckets and other places stay, and what was spent this month counts on. If one may hold instances, none is deleted.
    """
    client, names = client_of(server), list(dict.fromkeys(names))
    if client is None:
        _delete_here(names, yes=yes, dry_run=dry_run)
        return
    with client:
        going = [client.delete(name, dry_run=True)["text"] for name in names]
        if _confirmed(going, yes=yes, dry_run=dry_run):
            for name in names:
                client.delete(name)
                print(f"{name}: deleted", file=sys.stderr)


def _delete_here(names: Sequence[str], *, yes: bool, dry_run: bool) -> None:
    from rubberband.executor.journal.folder import open_folder
    from rubberband.executor.run.removing import remove

    found = []
    for name in names:
        folder = open_folder(name)
        folder.require()
        _require_unlisted(folder)
        found.append((folder, _removal(folder)))
    if _confirmed([f"{going.text}, in {folder.path}" for folder, going in found], yes=yes, dry_run=dry_run):
        for folder, going in found:
            remove(folder, going)
            print(f"{folder.name}: deleted", file=sys.stderr)


def _removal(folder: ExperimentFolder) -> Removal:
    from rubberband.executor.run.follower import JournalFollower, explaining
    from rubberband.executor.run.removing import removal

    with explaining(folder), closing(JournalFollower(folder)) as follower:
        return removal(folder, follower)


def _confirmed(going: Sequence[str], *, yes: bool, dry_run: bool) -> bool:
    """Print what goes, and return whether it is to go."""
    from rubberband.views.formatting import printable

    for text in going:
        print(printable(text), file=sys.stderr)
    return not dry_run and (yes or typer.confirm(f"Delete {counted(len(going), 'experiment')}?", err=True))


def _require_unlisted(folder: ExperimentFolder) -> None:
    """Raise InputError if a service of the home lists the experiment, which would list it without a journal."""
    with _listing(folder) as store:
        if store is not None and store.submission(folder.name) is not None:
            raise InputError(
                f"experiment {folder.name!r} is listed by the service of this home, which deletes it: start it if it "
                f"does not run (`rubberband serve`), then `rubberband rm {folder.name} --server URL` with the address "
                "that it prints (http://127.0.0.1:8642 by default)"
            )


def cleanup(
    name: Annotated[str | None, argument("NAME", "Only this experiment.", autocompletion=experiment_names)] = None,
) -> None:
    """Terminate what crashed runs left running.

    It looks for instances here, on EC2 and at other providers. Those of a living driver keep running. Nothing is lost:
    `rubberband resume` starts new ones and continues from the last reported iterations.
    """
    from rubberband.installation import default_home
    from rubberband.values.kinds import KINDS, part_of, provider_faults

    if name is not None and Path(name).suffix in (".yaml", ".yml", ".json"):
        raise InputError(
            f"{name} is a file, and `cleanup` takes the NAME of an experiment; to run a search: rubberband run {name}"
        )
    home, num_ended, troubles = default_home(), 0, list[str]()
    for fault in provider_faults():
        print(fault, file=sys.stderr)
    for provider, kind in KINDS.items():
        if kind.clean_up is None:
            continue
        try:
            cleaned = part_of(provider, "clean_up")(home, name)
        except RubberbandError as error:
            troubles.append(str(error))
            continue
        for found in cleaned.ended:
            print(f"ended {found}")
        for note in cleaned.notes:
            print(note, file=sys.stderr)
        num_ended += len(cleaned.ended)
        troubles += cleaned.troubles
    if troubles:
        raise RubberbandError("; ".join(troubles))
    if not num_ended:
        print("nothing was left behind")
