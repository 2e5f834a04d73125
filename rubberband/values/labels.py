"""Tags, note and archive of an experiment: what people add to find it again. Runs do not read them."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass

from rubberband.errors import InputError
from rubberband.units import TURNING, shown

MOST_TAGS, LONGEST_TAG, LONGEST_NOTE = 20, 32, 1000
_TAG = re.compile(rf"\w[\w.:/@-]{{0,{LONGEST_TAG - 1}}}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """Labels of an experiment."""

    tags: tuple[str, ...] = ()
    """In lower case, by alphabet."""
    note: str = ""
    archived: bool = False
    """Whether lists leave it out once it does not run."""


NO_LABELS = Labels()


class NoteChangedError(InputError):
    """The note was changed since it was read."""

    def __init__(self, note: str) -> None:
        """`note` is the present one."""
        super().__init__(f"the note was changed meanwhile, to {shown(note)}; read it, then replace that")
        self.note = note


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelChange:
    """Change of labels. Repeating it changes nothing."""

    add_tags: tuple[str, ...] = ()
    remove_tags: tuple[str, ...] = ()
    note: str | None = None
    """None: as it is."""
    note_before: str | None = None
    """The note that `note` replaces; any other one stays. None: it replaces any."""
    archived: bool | None = None
    """None: as it is."""

    def applied(self, labels: Labels) -> Labels:
        """Return the labels after it.

        Raises NoteChangedError for another note than `note_before`, InputError for a bad tag and beyond the limits.
        """
        added, removed = {*map(checked_tag, self.add_tags)}, {*map(checked_tag, self.remove_tags)}
        if both := sorted(added & removed):
            raise InputError(f"tag {shown(both[0])} is both added and removed; give one of them")
        tags = tuple(sorted({*labels.tags} - removed | added))
        if len(tags) > max(MOST_TAGS, len(labels.tags)):
            raise InputError(f"an experiment has at most {MOST_TAGS} tags, and this makes {len(tags)}; remove some")
        if self.note is None and self.note_before is not None:
            raise InputError("note_before is the note that `note` replaces, and there is no note; give both or neither")
        note = labels.note if self.note is None else _checked_note(self.note)
        if self.note_before is not None and labels.note not in (note, _checked_note(self.note_before)):
            raise NoteChangedError(labels.note)
        return Labels(tags=tags, note=note, archived=labels.archived if self.archived is None else self.archived)


def checked_tag(tag: str) -> str:
    """Return a tag in lower case. Raises InputError."""
    checked = same_case(tag)
    if _TAG.fullmatch(checked) is None:
        raise InputError(
            f"tag {shown(tag)}: a tag has 1 to {LONGEST_TAG} letters, digits and - _ . : / @, and begins with a letter "
            "or digit; write it so"
        )
    return checked


def same_case(tag: str) -> str:
    """Return a tag in lower case, with each letter and its accents as one character (macOS has several)."""
    return unicodedata.normalize("NFC", tag.lower())


def _checked_note(note: str) -> str:
    text = note.strip().replace("\r\n", "\n")
    if len(text) > LONGEST_NOTE:
        raise InputError(f"the note has {len(text)} characters, and at most {LONGEST_NOTE} are kept; shorten it")
    if any(sign in TURNING or (unicodedata.category(sign) in ("Cc", "Cs") and sign not in "\n\t") for sign in text):
        raise InputError("the note has control characters; leave them out")
    return text


def has_tags(labels: Iterable[str], wanted: Iterable[str]) -> bool:
    """Whether all wanted tags, in upper or lower case, are among those of an experiment."""
    return {*map(same_case, wanted)} <= {*labels}
