"""An experiment as lists show it: its state, its words, its summary, and its labels (tags, note and archive)."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any, Literal

from rubberband.errors import InputError
from rubberband.states import ACTIVE, OVER, ExperimentState
from rubberband.units import TURNING, counted, deadline_text, month_begin, parse_deadline, shown
from rubberband.values.kinds import kind_in
from rubberband.values.offer import Unit

MOST_TAGS, LONGEST_TAG, LONGEST_NOTE = 20, 32, 1000
_TAG = re.compile(rf"\w[\w.:/@-]{{0,{LONGEST_TAG - 1}}}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """Tags, note and archive, which people add to find an experiment again. Runs do not read them."""

    tags: tuple[str, ...] = ()
    """In lower case, by alphabet."""
    note: str = ""
    archived: bool = False
    """Whether lists leave it out once it does not run."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Figures of an experiment for a list; all zero or None before it started."""

    trials: int = 0
    stages: int = 0
    stage: int = 0
    """The current (or last begun) stage; of several brackets, how many stages are over."""
    brackets: int = 1
    iterations: int = 0
    """Done by all trials together."""
    target_iterations: int = 0
    """Planned by the scheduler, over all stages."""
    instances: int = 0
    """Held now."""
    max_instances: int | None = None
    """The most that it may hold since it was limited while it ran; None: it was not."""
    started_at: float | None = None
    ended_at: float | None = None
    jct_s: float = 0.0
    """From the start to the last SYNC; to now while it runs."""
    unit: Unit = "USD"
    """Unit of its amounts, also of those named usd: GPU-hours on a Ray cluster without a price."""
    cost_usd: float = 0.0
    """The bill so far. Like every cost here, and max_cost, it includes the measuring of the profile."""
    profiling_cost_usd: float = 0.0
    """The part of `cost_usd` for which the profile was measured."""
    month_at: float | None = None
    """Begin of the calendar month (UTC) in which it spent last."""
    month_cost_usd: float = 0.0
    """The part of `cost_usd` that was spent in that month."""
    planned_jct_s: float | None = None
    planned_cost_usd: float | None = None
    shortest_jct_s: float | None = None
    """Time of the shortest plan within its budget, if it was queued; with 95 % probability where times vary."""
    forecast_jct_s: float | None = None
    forecast_cost_usd: float | None = None
    deadline_s: float | None = None
    """From the start."""
    deadline: str = ""
    """The deadline for people: an instant and the time from the submission, or a duration; empty without one."""
    max_cost_usd: float | None = None
    metric: str = ""
    mode: Literal["max", "min"] = "max"
    best_value: float | None = None
    best_trial: int | None = None
    best_note: str = ""
    """Remark on the best trial: the mean of its configuration's repeats, and whether it is feasible; may be empty."""
    is_rehearsal: bool = False
    """Whether nothing is trained, as on the virtual clock: no trial is the best, and no sum of money counts it."""
    is_charged: bool = True
    """Whether its amounts are paid for; False where they are only metered, as on this machine."""
    added_trials: int = 0
    """Trials that were added while it did not run, and that a resume trains."""
    is_extended: bool = False
    """Whether it has ended and was extended since, so that a resume continues it."""

    def month_usd(self, now: float) -> float:
        """Return what it has spent in the month (UTC) of `now` (Unix time)."""
        if self.is_rehearsal:
            return 0.0
        return self.month_cost_usd if self.month_at is not None and self.month_at >= month_begin(now) else 0.0

    def ends_s(self, *, is_over: bool = False, elapsed_s: float = 0.0) -> float:
        """Return its end from the start: as it was or, until it is over, as expected, after what has passed by now."""
        if is_over:
            return self.jct_s
        expected_s = self.planned_jct_s if self.forecast_jct_s is None else self.forecast_jct_s
        return max(expected_s or 0.0, self.jct_s, elapsed_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """An experiment that the service knows: one that was submitted, or that was run in its home by hand."""

    name: str
    state: ExperimentState
    created_at: float
    changed_at: float
    owner: str = ""
    """Name of the token that submitted it; empty if it was started by hand, or without tokens."""
    words: Mapping[str, Any] = field(default_factory=dict)
    """The experiment in the file's words, deadline made absolute; empty if it was started by hand."""
    policy: str = "optimal"
    plan: str | None = None
    """Id of the plan with which it was submitted."""
    request: str = ""
    """Id of the request that submitted it, to recognise it if it is sent again after a crash; may be empty."""
    reason: str = ""
    """Cause of its state, in one line: an error, or how it ended."""
    attempt: int = 0
    """Number of processes started for it."""
    summary: Summary = Summary()
    home: str = ""
    """`HOST:PATH` of the home whose service drives it; empty where that is the service that was asked."""
    admitted_usd: float = 0.0
    """Whole cost for which it was admitted last: of its plan, a resume or an extension."""
    labels: Labels = Labels()

    def slack_s(self, now: float | None = None) -> float | None:
        """Return the time from its (expected) end to its deadline, negative if late; None without a deadline."""
        summary, is_over = self.summary, self.state in OVER
        if summary.deadline_s is None:
            return None
        elapsed_s = 0.0 if now is None or summary.started_at is None else now - summary.started_at
        return summary.deadline_s - summary.ends_s(is_over=is_over, elapsed_s=elapsed_s)

    @property
    def deadline_at(self) -> float | None:
        """The deadline that its file asks for (Unix time); None without one."""
        constraints = self.words.get("constraints")
        asked = constraints.get("deadline") if isinstance(constraints, Mapping) else None
        if asked is None:
            return None
        try:
            found = parse_deadline(asked)
        except InputError:
            return None
        return found.timestamp() if isinstance(found, datetime) else self.created_at + found

    @property
    def deadline(self) -> str:
        """The deadline in force, for people, as in `Summary`; before its start, as its file says."""
        at = self.deadline_at
        if self.summary.deadline or self.summary.started_at is not None or at is None:
            return self.summary.deadline
        return deadline_text(at, self.created_at)

    @property
    def rehearsal(self) -> bool:
        """Whether nothing is trained; before its start, as its file says."""
        return self.summary.is_rehearsal or (self.summary.started_at is None and kind_in(self.words).is_simulated)

    @property
    def charged(self) -> bool:
        """Whether its amounts are paid for, by its file; by its journal, if it was started by hand."""
        return kind_in(self.words).is_charged(self.summary.unit) if self.words else self.summary.is_charged

    @property
    def waiting(self) -> str:
        """Trials or limits that wait until it runs, in words; empty if nothing does."""
        return waiting(self.name, self.state, asdict(self.summary))

    @property
    def is_archived(self) -> bool:
        """Whether lists leave it out: it was archived, and does not run."""
        return self.labels.archived and self.state not in ACTIVE


WITHDRAWN = "what was added since its end is withdrawn"


def waiting(name: str, state: str, summary: Mapping[str, Any]) -> str:
    """Return what was added to an experiment, or granted to it, and waits until it runs; empty if nothing does.

    `summary` has the fields of a `Summary`.
    """
    added = summary.get("added_trials", 0)
    if not added and not summary.get("is_extended"):
        return ""
    what = f"{counted(added, 'trial')} added" if added else "extended"
    does = f"trains {'it' if added == 1 else 'them'}" if added else "continues it"
    return f"{what}; " + (f"it {does} once it runs" if state in ACTIVE else f"`rubberband resume {name}` {does}")


def search_words(search: str) -> list[str]:
    """Return the words of a search in lower case; no database takes a zero character."""
    return search.replace("\0", " ").lower().split()


def matches(search: str, *texts: str) -> bool:
    """Whether every word of `search` is part of one of `texts`, such as name, state and tags; case does not count."""
    return all(any(word in text.lower() for text in texts) for word in search_words(search))
