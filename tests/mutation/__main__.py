"""Plant bugs one at a time, run the tests that should notice, and print how many were caught.

Run by hand: python -m tests.mutation [NAME …] [--list] [--jobs N]. It works on copies of the tree, never on the
checkout. The bugs are those of bugs.toml, one of each kind, and each matters to a user: wrong money, lost work, a wrong
winner, a leak, another user's data. --list also names the stale ones, whose text or test has moved.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

BUGS = Path(__file__).with_name("bugs.toml")
ROOT = BUGS.parents[2]
TIMEOUT_S = 300.0
PATIENCE_S = 30.0
"""Tests wait for what a planted bug keeps from coming; with less patience most of the bugs are judged sooner."""
BASELINE_TIMEOUT_S = 3600.0
ENOUGH = 60 / 64

Verdict = Literal["caught", "missed", "timeout", "stale", "broken"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """A bug to plant: one text in one file becomes another, and some test must notice."""

    name: str
    harm: str
    """What it would cost a user."""
    file: str
    """Relative to the repository's root."""
    old: str
    """Occurs exactly once in the file."""
    new: str
    tests: list[str]
    """Files or node ids of pytest that should notice. Narrow ones: each planted bug runs them anew."""
    hangs: bool = False
    """Whether tests that do not end have noticed it; else a timeout counts as not caught."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What came of a planted bug."""

    bug: Bug
    verdict: Verdict
    took_s: float
    output: str
    """The first test that failed, or why there is no verdict."""

    @property
    def is_caught(self) -> bool:
        """Whether a test noticed."""
        return self.verdict == "caught" or (self.verdict == "timeout" and self.bug.hangs)


def main(arguments: Sequence[str] | None = None) -> int:
    """Plant the bugs asked for; 0 if enough of them are caught."""
    asked = _parse(arguments)
    bugs = _bugs()
    chosen = [bug for bug in bugs if not asked.names or bug.name in asked.names]
    if unknown := sorted(set(asked.names) - {bug.name for bug in bugs}):
        print(f"no planted bug is named {', '.join(unknown)}; see --list", file=sys.stderr)
        return 2
    if asked.list:
        stale = {bug.name: found for bug in chosen if (found := _stale(bug, ROOT))}
        for bug in chosen:
            print(f"{bug.name}: {bug.harm} ({bug.file})")
        for name, found in stale.items():
            print(f"STALE {name}: {found}")
        print(f"{len(chosen)} planted bugs, {len(stale)} of them stale")
        return 1 if stale else 0
    with tempfile.TemporaryDirectory(prefix="rubberband-mutation-") as folder:
        trees = [_copy(Path(folder) / str(number)) for number in range(asked.jobs)]
        if not asked.no_baseline and not _passes_unchanged(trees[0], chosen):
            return 2
        judged = _judge_all(chosen, trees)
    return _report(judged, asked.enough)


def _bugs() -> list[Bug]:
    bugs = [Bug(**row) for row in tomllib.loads(BUGS.read_text("utf-8"))["bug"]]
    assert len({bug.name for bug in bugs}) == len(bugs), "names are of one bug each"
    return bugs


def _stale(bug: Bug, tree: Path) -> str:
    """Why a bug cannot be planted or noticed in a tree; empty if it can."""

    def text(file: str) -> str:
        path = tree / file
        return path.read_text("utf-8") if path.is_file() else ""

    if (count := text(bug.file).count(bug.old)) != 1:
        return f"its text is {count} times in {bug.file}"
    for test in bug.tests:
        file, _, function = test.partition("::")
        name = function.rpartition("::")[2].partition("[")[0]
        if not text(file) or (name and f"def {name}(" not in text(file)):
            return f"there is no test {test}"
    return ""


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these; default: all")
    parser.add_argument("--list", action="store_true", help="name the bugs and their harm; run nothing")
    parser.add_argument("--jobs", type=int, default=1, help="copies of the tree at work at once; default: 1")
    parser.add_argument("--enough", type=float, default=ENOUGH, help="share to be caught; below it the exit code is 1")
    parser.add_argument("--no-baseline", action="store_true", help="do not run the tests without a bug first")
    return parser.parse_args(arguments)


def _copy(tree: Path) -> Path:
    """The files that git knows or would add, links kept."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in listed.stdout.decode().split("\0"):
        source, target = ROOT / name, tree / name
        if name and os.path.lexists(source):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    return tree


def _pytest(tree: Path, tests: Iterable[str], timeout_s: float, *options: str) -> subprocess.CompletedProcess[str]:
    """Run tests in a copy, in one process, without what a run leaves behind. Raises TimeoutExpired."""
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "--import-mode=importlib"]
    command += ["-p", "no:cacheprovider", "-p", "no:schemathesis"]  # that plugin takes half a second to import
    command.append(f"--basetemp={tree}.tmp")  # else a run beside it may remove this one's folders: no bug of the tree's
    environment = os.environ | {
        "PYTHONPATH": str(tree),
        "RUBBERBAND_TEST_PATIENCE_S": f"{PATIENCE_S:g}",
        "HYPOTHESIS_PROFILE": "fixed",
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # else each run compiles the whole tree anew
    run = subprocess.Popen(
        [*command, "-q", "-m", "not long", "--no-header", "--tb=short", "-rfE", *options, *tests],
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        expected, _ = run.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, 9)
        run.communicate()
        raise
    return subprocess.CompletedProcess(run.args, run.returncode, expected)


def _passes_unchanged(tree: Path, bugs: Sequence[Bug]) -> bool:
    tests = sorted({test for bug in bugs if not _stale(bug, tree) for test in bug.tests})
    print(f"{len(bugs)} bugs; without one, the tests …", end=" ", flush=True)
    began = time.monotonic()
    found = _pytest(tree, tests, BASELINE_TIMEOUT_S)
    print(f"{'pass' if found.returncode == 0 else 'FAIL'} ({time.monotonic() - began:.0f} s)", flush=True)
    if found.returncode != 0:
        print(found.stdout)
    return found.returncode == 0


def _judge_all(bugs: Sequence[Bug], trees: Sequence[Path]) -> list[Judged]:
    free: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for tree in trees:
        free.put(tree)

    def judge(bug: Bug) -> Judged:
        tree = free.get()
        try:
            found = _judge(bug, tree)
        finally:
            free.put(tree)
        print(f"{found.verdict:8}{found.took_s:6.1f} s  {bug.name:40} {found.output}", flush=True)
        return found

    with ThreadPoolExecutor(len(trees)) as pool:
        return list(pool.map(judge, bugs))


def _judge(bug: Bug, tree: Path) -> Judged:
    began = time.monotonic()

    def judged(verdict: Verdict, output: str) -> Judged:
        return Judged(bug=bug, verdict=verdict, took_s=time.monotonic() - began, output=output)

    if stale := _stale(bug, tree):
        return judged("stale", stale)
    path = tree / bug.file
    text = path.read_text("utf-8")
    _write(path, text.replace(bug.old, bug.new))
    try:
        found = _pytest(tree, bug.tests, TIMEOUT_S, "-x")
    except subprocess.TimeoutExpired:
        return judged("timeout", f"the tests took longer than {TIMEOUT_S:.0f} s")
    finally:
        _write(path, text)
    lines = found.stdout.splitlines()
    failed = next(
        (line for line in lines if line.startswith(("FAILED tests", "ERROR tests"))), lines[-1] if lines else ""
    )
    if found.returncode == 1 and failed.startswith(("FAILED", "ERROR")):
        return judged("caught", failed.partition(" - ")[0])
    return judged("missed" if found.returncode == 0 else "broken", "" if found.returncode == 0 else failed)


def _write(path: Path, text: str) -> None:
    """At a second of its own: compiled code is known to be old by the second and the length."""
    later = int(max(path.stat().st_mtime + 2.0, time.time()))
    path.write_text(text, "utf-8")
    os.utime(path, (later, later))


def _report(judged: Sequence[Judged], enough: float) -> int:
    caught = sum(found.is_caught for found in judged)
    counts = Counter(found.verdict for found in judged)
    print("\n" + ", ".join(f"{verdict} {count}" for verdict, count in counts.most_common()))
    for found in judged:
        if not found.is_caught:
            print(f"NOT CAUGHT {found.bug.name} ({found.verdict}): {found.bug.harm}")
    print(f"caught {caught} of {len(judged)}")
    return 0 if caught >= enough * len(judged) else 1


if __name__ == "__main__":
    sys.exit(main())
