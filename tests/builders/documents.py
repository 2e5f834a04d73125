"""The code blocks of README and of the pages in docs/: found, told apart, and run as a reader would run them.

A comment above a block says how it is run where that is not by default: `<!-- not run: WHY -->`, or
`<!-- run: WHERE -->` with a place of `PLACES`. A block with a title is a file, which later blocks of its page use.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from fnmatch import fnmatch
from io import StringIO
from pathlib import Path
from unittest.mock import patch

from rubberband import cli

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/examples").glob("*.md"))]
PLACES = {
    "": "here",
    "ray": "on local instances",
    "service": "beside a service",
    "laptop": "before EC2",
    "head": "on EC2",
}
_BLOCK = re.compile(
    r"(?:^<!-- (?P<how>not run|run): (?P<where>.*?) -->\n)?"
    r'^```(?P<language>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$',
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One code block; `place` is a key of PLACES, and None where it is not run for the `reason`."""

    page: Path
    line: int
    language: str
    title: str | None
    place: str | None
    reason: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        ignored = found["how"] == "not run"
        yield Block(
            page=page,
            line=text.count("\n", 0, found.start("language")) + 1,
            language=found["language"],
            title=found["title"],
            place=None if ignored else (found["where"] or ""),
            reason=found["where"] if ignored else "",
            text=found["text"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command of a console block, and what the page says that it prints (`...` is anything)."""

    words: str
    expected: str


def commands(text: str) -> Iterator[Command]:
    """The commands of a console block: lines after `$ `, continued by a backslash."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        words, _, expected = part.replace("\\\n", "").partition("\n")
        yield Command(words=words, expected=expected)


def agrees(expected: str, printed: str) -> bool:
    """Whether a command printed what the page says; a page that says nothing of it is content."""
    if not expected.strip():
        return True
    lines = [r"(?:.*\n)*?" if line.strip() == "..." else _line(line) for line in expected.splitlines()]
    return re.fullmatch("".join(lines), printed.rstrip("\n") + "\n") is not None


def _line(line: str) -> str:
    return re.escape(line.rstrip()).replace(r"\.\.\.", ".*") + r"[ ]*\n"


IGNORED = [line.strip("/") for line in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()]
"""Patterns of names of files and folders that a run leaves."""


def kept_files(folder: Path, pattern: str = "*") -> list[Path]:
    """Return the files below a folder without those that git ignores."""
    return [
        path
        for path in sorted(folder.rglob(pattern))
        if path.is_file()
        and not any(fnmatch(part, ignored) for part in path.relative_to(folder).parts for ignored in IGNORED)
    ]


class Reader:
    """Follows a page in a folder of its own, with the examples in it and a home beside it.

    Python and the commands of rubberband run in this process, which has imported what they need; the rest in a shell.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str] = os.environ) -> None:
        self.folder = folder / "here"
        shutil.copytree(ROOT / "examples", self.folder / "examples", ignore=shutil.ignore_patterns(*IGNORED))
        self.environment = {
            **environment,
            "RUBBERBAND_HOME": str(folder / "home"),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}",
            "PYTHONPATH": str(ROOT),
        }

    def save(self, block: Block) -> None:
        """Keep a block that is a file, or a whole file before and after a change."""
        assert block.title is not None
        if block.language == "diff":
            for name, sign in zip(block.title.split(" -> "), "-+", strict=True):
                kept = [line[1:] for line in block.text.splitlines() if line[:1] in ("", " ", sign)]
                (self.folder / name).write_text("\n".join(kept) + "\n", encoding="utf-8")
            return
        (self.folder / block.title).write_text(block.text, encoding="utf-8")

    def run(self, block: Block, translate: Callable[[str], str] = str) -> str:
        """Run a block of commands, or of Python; what it printed. Fails where that is not what the page says."""
        text = translate(block.text)
        if block.language == "python":
            with self._here():
                exec(compile(text, str(block), "exec"), {"__name__": "documents"})
            return ""
        if block.language == "sh":
            return self.shell(text)
        printed = ""
        for command in commands(text):
            exits = 3 if "no plan" in command.expected else 0
            answer = self._rubberband(command.words, exits) or self.shell(command.words)
            assert agrees(command.expected, answer), (
                f"{block}: {command.words}\n{answer[:4000]}\nis not {command.expected}"
            )
            printed += answer
        return printed

    def shell(self, words: str) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", words],
            env=self.environment,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"exit {done.returncode} of {words}\n{done.stdout}"
        return done.stdout

    def _rubberband(self, words: str, exits: int) -> str:
        """What one of our commands prints; nothing where it is another's, or several."""
        program, *arguments = shlex.split(words)
        if program != "rubberband" or {"|", "&&", "&"} & set(arguments):
            return ""
        file = arguments[-1] if arguments[-2:-1] == [">"] else None
        printed = StringIO()
        with self._here(["rubberband", *(arguments if file is None else arguments[:-2])]):
            with redirect_stdout(printed), redirect_stderr(printed):
                code = _exit_code(cli.main)
            if file is not None:
                Path(file).write_text(printed.getvalue(), encoding="utf-8")
        assert code == exits, f"exit {code} of {words}\n{printed.getvalue()}"
        return printed.getvalue()

    @contextmanager
    def _here(self, argv: Sequence[str] = ("python",)) -> Iterator[None]:
        """This process in the reader's folder and environment."""
        path = [str(self.folder), *sys.path]
        with (
            chdir(self.folder),
            patch.dict(os.environ, self.environment, clear=True),
            patch.object(sys, "argv", list(argv)),
            patch.object(sys, "path", path),
        ):
            yield


def _exit_code(main: Callable[[], None]) -> int:
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0
