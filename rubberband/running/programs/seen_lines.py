"""Finds the metrics in the lines that a program prints: by lines that repeat with other numbers.

Numbers of one place of the program are a `Kind`. Its name ranks it, as does the line: one of an epoch comes before one
of a batch, and one of held-out data before one of training.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise

from rubberband.running.first_file import LESS_IS_BETTER, MORE_IS_BETTER, is_maximised, words_of_name
from rubberband.values.metric_lines import ambiguous, is_another_kind, metrics_in, plain_text, unread

_NUMBER = r"(?i:-?\d*\.?\d+(?:e[-+]?\d+)?|-?inf|nan)"
_NAME = r"(?<![\w./@-])(?P<name>[A-Za-z_][\w./@-]*)"
_END = r"(?![\w@]|\.\w|,\d|[-:]\d)"
_PAIR = re.compile(rf"{_NAME}(?P<sign>['\"]?\s*(?:[=:]|->)\s*|\s+(?:is\s+|of\s+)?)(?P<number>{_NUMBER}){_END}")
_SENTENCE = re.compile(rf"{_NAME}(?P<sign>\s[^=:|,;]{{1,60}}[=:]\s*)(?P<number>{_NUMBER}){_END}")
"""`Cost after epoch 10: 0.3`, `Accuracy of the network on the 10000 test images: 54 %`; for known names alone."""
_KNOWN = (*MORE_IS_BETTER, *LESS_IS_BETTER, "elbo", "objective")
"""Words that name metrics, the best first."""
_NONE = re.compile(
    r"devices?|gpus?|cuda|cpus?|world|ranks?|seeds?|versions?|totals?|params?|parameters?|times?|lr\d*|rates?|epochs?|ep|"
    r"steps?|iters?|its?|iterations?|batch|batches|bs|size|sizes|sec|secs|seconds?|s|ms|mins?|minutes?|hours?|eta|"
    r"elapsed|speed|throughput|samples?|examples?|images?|tokens?|mem|memory|grad|norm|gnorm|wd|decay|momentum|num|n|"
    r"workers?|ports?|pid|line|code|runtime|progress|temperature|temp|epsilon|eps|episodes?|rounds?|len|length|fps|"
    r"date|threads?|gb|mb|kb|flos|flops|mfu|percent|scale|threshold|std|var|variance|patience|count|id|idx|index|"
    r"dur|duration|layers?|heads?|dim|hidden|width|depth|beta|alpha|gamma|updates?|wps|ups|loadavg|per|trainable|"
    r"classes|vocab|dataset|datasets|train|val|valid|test|eval|fold|k|port|warmup|budget|level|resumed|model",
    re.IGNORECASE,
)
_BESIDE = frozenset(("best", "last", "min", "max", "aux", "kl", "running", "ema", "smoothed"))
"""Words of a metric that is derived from another, or is a part of it."""
_IMPROVED = re.compile(
    r"\bso far\b|\bnew (best|top|record|high)|\bis (the |a )?(new )?best\b|\bimproved\b|\b(de|in)creased\b",
    re.IGNORECASE,
)
"""Words of a line that a program prints only when a metric has become better."""
_BAR = re.compile(r"([^|%]*):\s*\d+%\|")
_ALL = "all"
"""First cell of the row of all classes, below `Class`."""
_PART = re.compile(r"(\d+)\s*/\s*(\d+)")
_AVERAGE = re.compile(rf"\s*\(\s*({_NUMBER})\s*\)")
"""The running average behind the number of a batch, as meters print it: `Loss: 0.51 (0.62)`."""
_MEAN = frozenset(("average", "avg", "mean", "total"))
_HELD_OUT = frozenset(
    ("val", "valid", "validation", "eval", "evaluation", "evaluate", "dev", "test", "testing", "holdout", "heldout")
)
_TRAINING = frozenset(["train", "training", "trn"])
_EPOCH = re.compile(r"(?<![a-z])(?:epochs?|ep|rounds?|episodes?|generation|gen)\W{0,4}(\d+(?:\.\d+)?)", re.IGNORECASE)
_EPOCH_OF = re.compile(r"(?<![a-z])(?:epochs?|ep|rounds?)\W{0,4}(\d+)\s*(?:/|of)\s*(\d+)", re.IGNORECASE)
_COUNT = re.compile(r"(?<![a-z])(?:steps?|iters?|iterations?|updates?)\W{0,4}(\d+)", re.IGNORECASE)
_STEP = re.compile(
    r"(?<![a-z])(?:steps?|iters?|iterations?|batch|batches|updates?)(?![a-z])|\d\s*/\s*\d|\d%", re.IGNORECASE
)
_MANY_LINES = 50_000
_WIDTH = 90


@dataclass(slots=True)
class Occurrence:
    """One number of a kind."""

    line: int
    at: float
    value: float
    epoch: float | None
    step: float | None
    is_last_part: bool = False
    """Whether its line is the last part of several, as `[40/40]` says."""


@dataclass(slots=True)
class Kind:
    """Numbers that one place of a program prints."""

    name: str
    """The name before the number, as it is printed."""
    label: str
    """The same, with a word for the data before it, up to the number."""
    full_name: str
    phase: str
    """held-out, train or empty."""
    before: str
    """Text before the label in the latest line."""
    text: str
    """The latest line."""
    is_ratio: bool = False
    """Whether it is the first number of `9833/10000`."""
    seen: list[Occurrence] = field(default_factory=list)
    is_batch: bool = False
    """Whether its lines come several times an epoch."""
    is_average: bool = False
    """Whether it is the running average behind the number of a batch."""
    is_whole: bool = False
    """Whether it has the last ones alone of lines such as `[40/40]`."""
    is_between: bool = False
    """Whether it was printed between two epochs, which other lines name."""

    @property
    def knows(self) -> int | None:
        """The place of its name among those of metrics; None: it is not known."""
        return _place_of(self.full_name)

    @property
    def has_steps(self) -> bool:
        """Whether its line counts something below an epoch."""
        return not self.is_whole and _STEP.search(_EPOCH_OF.sub("", self.before)) is not None

    @property
    def repeats(self) -> bool:
        """Whether it is printed again and again."""
        return len(self.seen) > 1 or self.is_between

    @property
    def may_be_of_a_batch(self) -> bool:
        """Whether a line of a whole epoch may still come."""
        return self.is_batch or (self.has_steps and self.seen[-1].epoch is None)

    @property
    def is_of_best(self) -> bool:
        """Whether its line comes only when the metric has become better."""
        return _IMPROVED.search(self.text) is not None

    @property
    def is_in_parts(self) -> bool:
        """Whether its lines are parts such as `[0/40]`, of which no last one has come twice."""
        return self.has_steps and not self.is_batch and _part_of(self.before) is not None

    @property
    def an_epoch(self) -> int | None:
        """The number of its lines an epoch; None where it is not known."""
        counts = Counter(each.epoch for each in self.seen if each.epoch is not None)
        return max(counts.values()) if len(counts) > 1 else None

    @property
    def stride(self) -> int:
        """The epochs or steps from one line to the next; 1 where the lines do not say it."""
        for counts in ([each.epoch for each in self.seen], [each.step for each in self.seen]):
            known = [count for count in counts if count is not None]
            if len(known) > 1:
                return max(1, round(known[-1] - known[-2]))
        return 1

    @property
    def phase_word(self) -> str:
        """The word of its line that names the phase; empty: none does, or its name has it."""
        words = re.findall(r"[a-z]+", f"{self.label} {self.before}".lower())
        return next((word for word in reversed(words) if _phase_of(word) == self.phase != ""), "")

    def could_be_before(self, other: Kind) -> bool:
        """Whether it would be better than another if it were printed again."""
        return self.rank()[1:] < other.rank()[1:] and self.seen[0].line > other.seen[0].line

    def epoch_at(self, line: int) -> float | None:
        """Return the epoch of its latest number before a line; that of the latest of all if there is none."""
        return next((each.epoch for each in reversed(self.seen) if each.line < line), self.seen[-1].epoch)

    def rank(self) -> tuple[bool, bool, bool, bool, int, bool, bool, int, int]:
        """Return the key by which the best metric is the first."""
        known, words = self.knows, words_of_name(self.full_name)
        own = [word for word in words if word not in _HELD_OUT and word not in _TRAINING]
        return (
            not self.repeats,
            self.is_batch,
            known is None,
            self.is_of_best,
            {"held-out": 0, "": 1, "train": 2}[self.phase],
            not _BESIDE.isdisjoint(words),
            not is_maximised(self.full_name),
            len(own),
            len(_KNOWN) if known is None else known,
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """A metric that was found, as the experiment file has it."""

    name: str
    metrics: str
    """`entrypoint.metrics`: stdout, or {pattern: …}."""
    kind: Kind

    @property
    def line(self) -> str:
        """The line from which it was read, cut to a width around the metric."""
        text = " ".join(plain_text(self.kind.text).split())
        begin = min(text.find(" ".join(self.kind.label.split())) - _WIDTH // 2, len(text) - _WIDTH)
        text = f"…{text[begin + 1 :]}" if begin > 0 else text
        return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 1]}…"


class SeenLines:
    """The lines of a program so far, and the kinds of numbers in them."""

    def __init__(self, pattern: re.Pattern[str] | None = None) -> None:
        """`pattern`: the one of the user's own metric, by which lines are read alone."""
        self._pattern = pattern
        self.lines: list[str] = []
        self._kinds: dict[tuple[str, str], Kind] = {}
        self._header: list[str] = []
        self._of_classes: list[str] = []
        """The header that begins with `Class`."""
        self.epochs: int | None = None
        """Number of epochs, where a line has `Epoch 1/5`."""

    @property
    def is_full(self) -> bool:
        return len(self.lines) >= _MANY_LINES

    def add(self, line: str, at: float) -> None:
        """Take in a line, as it was printed at that time."""
        number = len(self.lines)
        self.lines.append(line)
        text = plain_text(line)
        if (total := _EPOCH_OF.search(text)) is not None and int(total[2]) >= int(total[1]):
            self.epochs = int(total[2])
        bare = text.replace("'", "").replace('"', "")
        epoch, step = _EPOCH.search(bare) or _EPOCH.search(line), _COUNT.search(bare)  # that of a bar, too
        if (bar := _BAR.match(line)) is not None:  # Ultralytics has the header of its table in a bar
            self._row(bar[1])
        for kind, key, value in self._readings(text) if self._pattern is None else self._matched(line, self._pattern):
            found = self._kinds.setdefault(key, kind)
            if found.seen and found.seen[-1].line == number:
                continue
            found.text, found.before, found.label = line, kind.before, kind.label
            counts = [float(each[1]) if each else None for each in (epoch, step)]
            part = _part_of(kind.before) if kind.has_steps else None
            is_last = part is not None and part[1] == part[2]
            found.seen.append(Occurrence(number, at, value, counts[0], counts[1], is_last))

    def kinds(self) -> list[Kind]:
        """Return the kinds that may be metrics, the best first."""
        every = [each for kind in self._kinds.values() for each in (*_whole(kind), kind)]
        found = [kind for kind in every if kind.knows is not None or _changes(kind)]
        known = [kind for kind in found if kind.knows is not None]
        for kind in found:
            kind.is_batch = _is_batch(kind, known)
        for kind in known:
            kind.is_between = len(kind.seen) == 1 and any(
                each.is_batch and each.epoch_at(kind.seen[0].line) != each.seen[-1].epoch for each in known
            )
        return sorted(found, key=Kind.rank)

    def choice_of(self, kind: Kind) -> Choice | None:
        """Return how the file says that this kind counts; None where no pattern reads it alone."""
        if (
            kind.full_name == kind.name and not kind.is_average and self._is_plain(kind)
        ):  # there may be a test loss yet beside a valid loss
            return Choice(kind.name, "stdout # a line with the metric is an iteration", kind)
        name = re.sub(r"\W+", "_", kind.full_name).strip("_")
        if kind.phase_word and not _phase_of(kind.full_name):
            name = f"{kind.phase_word}_{name.lower()}"
        name = f"_{name}" if name[:1].isdigit() else name
        for pattern in _patterns(kind, name):
            if self._reads_only(re.compile(pattern), kind, name):
                quoted = pattern.replace("'", "''")
                return Choice(name, f"{{pattern: '{quoted}'}} # a line that matches is an iteration", kind)
        return None

    def _matched(self, line: str, pattern: re.Pattern[str]) -> Iterator[tuple[Kind, tuple[str, str], float]]:
        for name, value in metrics_in(line, pattern).items():
            if name in pattern.groupindex:
                yield Kind(name, name, name, _phase_of(name), "", line), ("", name), value

    def _readings(self, text: str) -> Iterator[tuple[Kind, tuple[str, str], float]]:
        """Iterate over the kinds of the numbers in a line, with their keys and values."""
        content = metrics_in(text) if text.startswith("{") else {}
        if content and (any(_place_of(name) is not None for name in content) or "{" not in text[1:]):
            words = re.findall(r"[:]\s*[\"']([A-Za-z]+)[\"']", text)
            phase = _phase_of(" ".join(words))
            for name, value in content.items():
                if _place_of(name) is None and _says_no(name, str(value)):
                    continue
                place = re.search(rf"[\"']{re.escape(name)}[\"']\s*:\s*", text)
                before, label = (text[: place.start()], place[0]) if place else ("", name)
                own = _phase_of(name) or phase
                yield Kind(name, label, name, own, before, text), (f"{{{own}", name), value
            return
        if (row := self._row(text)) is not None:
            yield from row
            return
        ends = set[int]()
        for match in _matches(text):
            if match.start("number") in ends:
                continue
            ends.add(match.start("number"))
            name, value = match["name"], float(match["number"])
            before, full_name = text[: match.start()], name
            if adjacent := re.search(r"([A-Za-z]+)[ \t]+$", before):
                word = adjacent[1].lower()
                if word in _HELD_OUT | _TRAINING | _BESIDE | _MEAN:
                    before = before[: adjacent.start()]
                    full_name = name if word in _MEAN else f"{word}_{name.lower()}"
            label = text[len(before) : match.start("number")]
            phase = _phase_of(full_name) or _phase_of(label) or _phase_of(before) or _phase_behind(text[match.end() :])
            kind = Kind(name, label, full_name, phase, before, text)
            average = _AVERAGE.match(text, match.end()) if kind.has_steps else None
            if average is not None and kind.knows is not None:
                kind.is_average, value = True, float(average[1])
            kind.is_ratio = re.match(r"\s*/\s*\d", text[match.end() :]) is not None
            is_signed = re.fullmatch(r"\s*[=:]\s*", match["sign"]) is not None
            is_argument = re.search(r"\w\([^)]*$", before) is not None  # of a model that is printed
            if kind.knows is not None or (is_signed and not is_argument and not _says_no(full_name, match["number"])):
                yield kind, (_skeleton(before), _skeleton(label)), value

    def _row(self, text: str) -> list[tuple[Kind, tuple[str, str], float]] | None:
        """Return the numbers of a table's row; None for another line. The header is kept."""
        cells = [cell for cell in re.split(r"[\s|,;]+", text) if cell]
        if len(cells) > 1 and all(re.fullmatch(r"[A-Za-z_][\w./@%()-]*", cell) for cell in cells):
            if any(_place_of(cell) is not None for cell in cells):
                self._header = cells
                self._of_classes = cells if cells[0].lower() == "class" else self._of_classes
            return None
        header = self._of_classes if cells[:1] == [_ALL] else self._header
        is_row = len(cells) == len(header) > 1 and re.fullmatch(rf"\d+|{_ALL}", cells[0])
        if not is_row or not all(re.fullmatch(rf"{_NUMBER}%?|[\d:.]+s?|-+", cell) for cell in cells[1:]):
            return None
        found = []
        for place, (name, cell) in enumerate(zip(header, cells, strict=True)):
            if place > 0 and re.fullmatch(_NUMBER, cell):
                kind = Kind(name, f"column {place}", name, _phase_of(name), "", text)
                if kind.knows is not None:
                    found.append((kind, (f"table of {len(cells)}", f"{header[0]} {name}"), float(cell)))
        return found

    def _is_plain(self, kind: Kind) -> bool:
        """Whether every line that has its name is its own, as the runner of a program reads lines."""
        own, before, found = {each.line for each in kind.seen}, "", 0
        for number, line in enumerate(self.lines):
            if kind.name not in line:
                continue
            if ambiguous(line, kind.name) or unread(line, kind.name)[1]:
                return False
            if kind.name not in metrics_in(line):
                continue
            if before and is_another_kind(line, before, kind.name):
                return False
            before, found = line, found + (number in own)
        return found == len(own)

    def _reads_only(self, pattern: re.Pattern[str], kind: Kind, name: str) -> bool:
        """Whether a pattern reads the lines of a kind, and no others."""
        own = {each.line: each.value for each in kind.seen}
        for number, line in enumerate(self.lines):
            found = metrics_in(line, pattern).get(name)
            if number in own and (found is None or (found != own[number] and found == found)):
                return False
            if number not in own and pattern.search(line) is not None:
                return False
        return True


def _matches(text: str) -> Iterator[re.Match[str]]:
    """Iterate over the names with a number; a sentence about a known name comes before what is within it."""
    pairs = list(_PAIR.finditer(text))
    taken = {match.start("name") for match in pairs if _place_of(match["name"]) is not None}
    for known in re.finditer(_NAME, text):
        if _place_of(known["name"]) is not None and known.start() not in taken:
            match = _SENTENCE.match(text, known.start())
            if match is not None and not any(known.start() < start < match.end() for start in taken):
                yield match
    yield from pairs


@cache
def _place_of(name: str) -> int | None:
    """Return the place of a name among the known ones; None: it is not known. Its last known word counts."""
    words = words_of_name(name)
    if any(map(_NONE.fullmatch, words)) and not (words and _place_of_word(words[-1]) is not None):
        return None
    return next((place for word in reversed(words) if (place := _place_of_word(word)) is not None), None)


def _says_no(name: str, number: str) -> bool:
    """Whether a name says that its number is no metric; `Val: 0.61` may be one."""
    words = words_of_name(name)
    is_phase = "." in number and _HELD_OUT.union(_TRAINING).issuperset(words)
    return not is_phase and any(map(_NONE.fullmatch, words))


def _place_of_word(word: str) -> int | None:
    return next((place for place, known in enumerate(_KNOWN) if re.fullmatch(known, word)), None)


def _phase_of(text: str) -> str:
    """Return the phase that the last such word of a text names; empty: none does."""
    for word in reversed(re.findall(r"[a-z]+", re.sub(r"([a-z])([A-Z])", r"\1 \2", text).lower())):
        if word in _HELD_OUT:
            return "held-out"
        if word in _TRAINING:
            return "train"
    return ""


def _phase_behind(text: str) -> str:
    label = re.search(r"\((\w+)\)\s*$", text)
    return _phase_of(label[1]) if label else ""


def _skeleton(text: str) -> str:
    """Return a text with signs for what changes from line to line: numbers, ratios and dates."""
    text = re.sub(r"\w*\d\s*/\s*\d\w*", "÷", text.lower())
    text = re.sub(r"[-+]?\b(?:nan|inf)\b|[-+]?\w*\d\w*", "#", text)
    text = re.sub(r"[#÷](?:[^a-z#÷]*[#÷])*", lambda run: "÷" if "÷" in run[0] else "#", text)
    return re.sub(r"\s+", " ", text).strip()


def _changes(kind: Kind) -> bool:
    """Whether a number of an unknown name may be a metric: it changes, and does not count."""
    values = [each.value for each in kind.seen]
    steps = {round(later - value, 9) for value, later in pairwise(values)}
    return not kind.repeats or (steps != {0.0} and not (all(map(float.is_integer, values)) and len(steps) == 1))


def _is_batch(kind: Kind, others: Collection[Kind]) -> bool:
    """Whether a line comes several times an epoch: with the same epoch again, or with a step, and another has none."""
    epochs = [each.epoch for each in kind.seen if each.epoch is not None]
    if len(epochs) > 1:
        return len(set(epochs)) < len(epochs) or any(epoch % 1 for epoch in epochs)
    if not kind.has_steps:
        return False
    return any(each is not kind and each.repeats and not each.has_steps and not each.is_of_best for each in others)


def _part_of(before: str) -> re.Match[str] | None:
    """Return the part that a line says before a metric, as in `Test: [40/40]`, but no epoch."""
    return _PART.search(_EPOCH_OF.sub(lambda epoch: " " * len(epoch[0]), before))


def _whole(kind: Kind) -> list[Kind]:
    """Return the kind of the lines that are the last of several parts; none where these are not known."""
    last = [each for each in kind.seen if each.is_last_part]
    if not 1 < len(last) < len(kind.seen):
        return []
    return [replace(kind, seen=last, is_whole=True)]


# Patterns.


def _patterns(kind: Kind, name: str) -> Iterator[str]:
    """Iterate over patterns for the lines of a kind, the shortest first."""
    number = rf"(?P<{name}>[-+.\w]*\w)" + (r"(?=\s*/)" if kind.is_ratio else "")
    text = plain_text(kind.text)
    if kind.label.startswith("column "):
        place = int(kind.label.split()[1])
        rest = len([cell for cell in re.split(r"[\s|,;]+", text) if cell]) - place - 1
        first = _ALL if text.split()[:1] == [_ALL] else r"\d+"
        between = rf"[\s|,;]+(?:[^\s|,;]+[\s|,;]+){{{place - 1}}}"
        yield rf"^[\s|]*{first}{between}{number}(?:[\s|,;]+[^\s|,;]+){{{rest}}}[\s|]*$"
        return
    label = kind.name.join(map(_generalised, kind.label.partition(kind.name)[::2]))
    if kind.name.startswith('"') or kind.name not in kind.label:
        label = _generalised(kind.label)
    begin = r"\b" if kind.label[:1].isalnum() else ""
    if kind.is_average:
        label += r"\S+\s*\(\s*"
    if kind.is_whole and (part := _part_of(kind.before)) is not None:
        yield rf"^\s*{_generalised(kind.before[: part.start()].rstrip())}\s*(\d+)\s*/\s*\1\b.*?{begin}{label}{number}"
        return
    start = re.match(r"[^\d]*", kind.before)
    assert start is not None
    yield f"{begin}{label}{number}"
    if not kind.before.strip():
        yield rf"^\s*{label}{number}"
    if re.search(r"[A-Za-z]", start[0]):
        between = "" if start[0] == kind.before else f".*?{begin}"
        yield rf"^\s*{_generalised(start[0])}{between}{label}{number}"
    words = re.findall(r"[A-Za-z]+", kind.before)
    for word in dict.fromkeys(reversed(words)):
        if _phase_of(word):
            yield rf"\b{word}\b.*?{begin}{label}{number}"
    for count in range(1, min(4, len(words)) + 1):
        at = [match.start() for match in re.finditer(r"[A-Za-z]+", kind.before)][-count]
        yield rf"\b{_generalised(kind.before[at:])}{label}{number}"
    yield rf"^\s*{_generalised(kind.before)}{label}{number}"


def _generalised(text: str) -> str:
    """Return a pattern for a text whose numbers and blanks may change."""
    parts: Sequence[str] = re.split(r"(\s*[-+]?\d[\d.,:/]*(?:e[-+]?\d+)?\s*|\s+)", text)
    found = ""
    for number, part in enumerate(parts):
        if number % 2 == 0:
            found += re.escape(part).replace("\\'", "'").replace('\\"', '"')
        elif part.strip():
            found += r"\s*[-+.,:/\de]+\s*"
        else:
            is_between = parts[number - 1][-1:].isalnum() and parts[number + 1][:1].isalnum()
            found += r"\s+" if is_between or (number + 1 == len(parts) - 1 and not parts[-1]) else r"\s*"
    return found
