"""Plain English wherever a user looks: the patterns that readers stumble over are not in any text of the program.

Texts are strings of the source, the page and the boot scripts, and the prose of the documentation.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("rubberband", "planner", "executor", "cloud", "api")

# A pattern, and the words to use instead.
_BANNED = {
    r"\b(told|tells?|telling)\b": "say, report, show (with the thing as the subject)",
    r"\bso (many|long)\b(?! as)": "the number or the duration",
    r"\b(nobody|somebody|everybody|himself|herself)\b": "name the caller, holder, owner or process",
    r"\bfor ever\b": "never expires, never ends",
    r"\bat work on\b": "is running, holds",
    r"\b(is|are) had\b": "is available",
    r"\b(gets?|got) further\b": "makes progress",
    r"\breckon(s|ed|ing)?\b": "assume, count",
    r"\bamiss\b": "wrong",
    r"\bmended\b": "fixed",
    r"\bgo(es)? on by itself\b": "restarts automatically",
    r"\bthere (is|are) no such\b": "not found",
    r"\bwithout a word\b": "unexpectedly",
    r"\bof itself\b": "by itself",
    r"\bis none (that|of)\b": "is not one of",
    r"\b(stand|stands) in\b": "is used instead",
    r"\btill\b": "until",
    r"\bthe most here\b": "the limit here",
    r"\bkept no longer\b": "deleted, no longer kept",
    r"\bcame? of it\b": "resulted",
    r"\bnot (known|read) here\b": "unknown, not accepted",
}
_SUBJECT_FIRST = re.compile(r"(?:^|[.!?]\s+)((?:What|Who|Whoever|Whatever|Of)\s[^.!?]*(?:[.!]|$))")
_OPENER = re.compile(r"(Whose|So|It|They|Those|Where|When|As)\b")
_TEST_NAME = re.compile(
    r"def (test_(?:what|who|whoever|whatever|of)_\w+|test_\w*(?:nobody|somebody|_told|_tells|reckon)\w*)"
)
_HOLE = "…"
MOST_DOCSTRING_FAULTS = 1
"""A number that only falls: lower it after a clean-up."""


def _text(node: ast.Constant | ast.JoinedStr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    return "".join(str(part.value) if isinstance(part, ast.Constant) else _HOLE for part in node.values)


@cache
def _strings(source: str) -> tuple[list[tuple[int, str]], set[int]]:
    """Line and text of each string, f-strings with a mark per value; lines of those that only document code."""
    nodes = list(ast.walk(ast.parse(source)))
    inner = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    texts = [
        (node.lineno, _text(node))
        for node in nodes
        if isinstance(node, ast.JoinedStr)
        or (isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner)
    ]
    alone = {node.value.lineno for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)}
    return texts, alone


def _python_texts(source: str) -> list[tuple[int, str]]:
    """Line and text of each string, f-strings with a mark for each value."""
    return _strings(source)[0]


def _script_texts(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each literal of a JavaScript file or echo of a shell script."""
    for number, line in enumerate(source.splitlines(), 1):
        for match in re.finditer(r"\"([^\"\\]*)\"|'([^'\\]*)'|`([^`]*)`", re.sub(r"^\s*(//|#).*", "", line)):
            yield number, re.sub(r"\$\{[^}]*\}", _HOLE, next(filter(None, match.groups()), ""))


def _page_texts(source: str) -> Iterator[tuple[int, str]]:
    """Line and text between the tags of a template, and titles and labels in them."""
    words = re.sub(r"\{\{.*?\}\}", _HOLE, re.sub(r"\{#.*?#\}|\{%.*?%\}", " ", source))
    for number, line in enumerate(words.splitlines(), 1):
        yield number, " ".join(re.sub(r"<[^>]*>", " ", line).split())
        for match in re.finditer(r"\"([^\"]* [^\"]*)\"", line):
            yield number, match.group(1)


def _prose_texts(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each paragraph outside blocks of code."""
    prose = re.sub(r"^( *)```.*?^\1```", lambda block: "\n" * block.group().count("\n"), source, flags=re.M | re.S)
    number = 1
    for paragraph in re.split(r"(\n(?:\s*\n|(?=\s*[-*|#])))", prose):
        yield number, re.sub(r"`[^`]*`", _HOLE, " ".join(paragraph.split()))
        number += paragraph.count("\n")


_READERS = {".py": _python_texts, ".js": _script_texts, ".sh": _script_texts, ".html": _page_texts, ".md": _prose_texts}


def _files() -> list[Path]:
    sources = [path for package in PACKAGES for path in (REPOSITORY / package).rglob("*") if path.suffix in _READERS]
    prose = [REPOSITORY / "README.md", REPOSITORY / "CHANGELOG.md", *(REPOSITORY / "docs").glob("**/*.md")]
    return sorted(path for path in {*sources, *prose} if "min.js" not in path.name)


def faults(text: str) -> list[str]:
    """The patterns in a text that a reader stumbles over."""
    found = [f"{m.group()!r}: {use}" for pattern, use in _BANNED.items() for m in re.finditer(pattern, text, re.I)]
    found += [f"{match[:40]!r}: the subject comes first" for match in _SUBJECT_FIRST.findall(text)]
    return found


def _found(path: Path) -> list[str]:
    source = path.read_text(encoding="utf-8")
    quiet = _strings(source)[1] if path.suffix == ".py" else set()
    return [
        f"{path.relative_to(REPOSITORY)}:{line}: {fault} in {text[:100]!r}"
        for line, text in _READERS[path.suffix](source)
        if " " in text.strip() and line not in quiet
        for fault in faults(text)
    ]


def _docstring_faults(path: Path) -> list[str]:
    """Faults of docstrings, each of which begins with a verb or the name of the thing and ends with a full stop."""
    texts, at = _strings(path.read_text(encoding="utf-8"))
    found = []
    for line, text in texts:
        if line in at:
            first = " ".join(text.split("\n\n")[0].split())
            wrong = [f"begins with {found[0]!r}" for found in [_OPENER.match(first)] if found]
            wrong += [] if first.endswith((".", ":", "?", "…")) else ["its first paragraph does not end with a stop"]
            found += [f"{path.relative_to(REPOSITORY)}:{line}: {fault}" for fault in [*faults(text), *wrong]]
    return found


def test_names_of_tests_have_a_subject_and_a_verb() -> None:
    tests = (REPOSITORY / "tests").rglob("test_*.py")
    assert [name for path in tests for name in _TEST_NAME.findall(path.read_text(encoding="utf-8"))] == []


def test_docstrings_get_no_more_faults() -> None:
    found = [fault for path in _files() if path.suffix == ".py" for fault in _docstring_faults(path)]
    assert len(found) <= MOST_DOCSTRING_FAULTS, "\n".join(found)


def test_no_text_that_a_user_sees_has_a_pattern_that_readers_stumble_over() -> None:
    assert [fault for path in _files() for fault in _found(path)] == []


def test_a_text_is_read_with_marks_for_its_values() -> None:
    source = 'print(f"{name} is at work on "\n      f"{what}")'
    assert list(_python_texts(source)) == [(1, "… is at work on …")]
    assert faults("… is at work on …") == ["'at work on': is running, holds"]
    assert faults("It stopped. What waits is refused.") == ["'What waits is refused.': the subject comes first"]
    assert faults("What is refused? As long as it runs, nothing.") == []
