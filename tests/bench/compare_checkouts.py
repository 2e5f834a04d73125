"""Whether two checkouts behave the same, whatever their modules are called: the proof of a move or a clean-up.

Both answer the same questions, each in processes of its own (checkout_probe), and the answers are compared:

* service: the OpenAPI document, what the service says of journals, and previews of plans;
* plans: `rubberband estimate` of random experiment files, valid and invalid;
* replays: journals that the old checkout wrote, read, extended and resumed by both; and virtual runs made afresh;
* names: public names with their signatures, and the schema of an experiment;
* flags: commands, options, defaults and help.

Real time stands still for commands, so that every figure is compared exactly. What is of the moment in an answer of the
service (instants, identifiers, `planning_s`) is left out. No cloud, no Ray and no network beyond this machine is used.

Run: python tests/bench/compare_checkouts.py OLD NEW [--jobs 500] [--only SECTION] [--allow-text]
OLD and NEW are folders; OLD may be a git ref. The exit code is 1 where something differs.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.bench.random_experiments import virtual_experiment, write_experiments

PROBE = Path(__file__).with_name("checkout_probe.py")
REPOSITORY = Path(__file__).parents[2]
SECTIONS = ("names", "flags", "service", "replays", "plans")
VIRTUAL_RUNS = 4
MOST_LINES, WIDEST = 40, 300
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_TEXT_KEYS = ("description", "help", "short_help", "summary", "title")
_SCREENS = ("help page", "stdout")


class Side:
    """A checkout, and a folder of its own with the files that its probes read."""

    def __init__(self, checkout: Path, folder: Path) -> None:
        self.checkout, self.folder = checkout.resolve(), folder

    def ask(self, section: str) -> dict[str, Any]:
        """What a probe answers, without the paths of this side. Raises RuntimeError if it does not get that far."""
        answer = self.folder / f"{section}.json"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RUBBERBAND_")}
        environment |= {
            "PYTHONPATH": str(self.checkout),
            "PYTHONHASHSEED": "0",
            "RUBBERBAND_HOME": str(self.folder / "home"),
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "120",
        }
        done = subprocess.run(
            [sys.executable, "-P", str(PROBE), section, str(answer)],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"the probe of {section} failed in {self.checkout}:\n{done.stderr[-4000:]}")
        text = answer.read_text(encoding="utf-8")
        document = json.loads(text.replace(str(self.folder), "FOLDER").replace(str(self.checkout), "CHECKOUT"))
        if document["imported"] != "CHECKOUT":
            raise RuntimeError(f"the probe imported rubberband from {document['imported']}, not {self.checkout}")
        found: dict[str, Any] = document["answer"]
        return found


def prepare(old: Side, new: Side, jobs: int, *, journals: bool) -> None:
    """Give both sides the same experiment files and, where they are needed, the same journals, written by the old."""
    commands = write_experiments(old.folder / "experiments", jobs)
    (old.folder / "commands.json").write_text(json.dumps(commands), encoding="utf-8")
    (old.folder / "virtual").mkdir()
    for index in range(VIRTUAL_RUNS):
        document = virtual_experiment(index)
        path = old.folder / "virtual" / f"{document['name']}.yaml"
        path.write_text(yaml.safe_dump(document), encoding="utf-8")
    if journals:
        ended = Counter(text["exit"] for text in old.ask("record").values())
        if set(ended) - {0, 4}:
            raise RuntimeError(f"virtual runs of {old.checkout} ended with exit codes {dict(ended)}; 0 or 4 are right")
        for path in sorted((old.folder / "home" / "experiments").iterdir()):
            cut_off(path, path.with_name(f"{path.name}-cut"))
    shutil.copytree(old.folder, new.folder, dirs_exist_ok=True)


def cut_off(folder: Path, copy: Path) -> None:
    """Copy an experiment's folder under another name, as if its driver had died in the middle."""
    shutil.copytree(folder, copy)
    with contextlib.closing(sqlite3.connect(copy / "journal.db")) as journal, journal:
        (last,) = journal.execute("SELECT max(seq) FROM events").fetchone()
        journal.execute("DELETE FROM events WHERE seq > ?", (last // 2,))
        journal.execute("UPDATE events SET experiment = ?", (copy.name,))
        journal.execute("UPDATE experiments SET name = ?, job = json_set(job, '$.name', ?)", (copy.name, copy.name))


def differences(old: Mapping[str, Any], new: Mapping[str, Any], *, allow_text: bool) -> Iterator[str]:
    """The lines of a unified diff, of one answer after the other."""
    for key in sorted({*old, *new}):
        before, after = (_lines(answers, key, allow_text=allow_text) for answers in (old, new))
        if before != after:
            yield from difflib.unified_diff(before, after, f"old: {key}", f"new: {key}", lineterm="", n=2)


def _lines(answers: Mapping[str, Any], key: str, *, allow_text: bool) -> list[str]:
    if key not in answers:
        return []
    value = figures_of(answers[key]) if allow_text else answers[key]
    text = json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False)
    return text.replace("\\n", "\n").splitlines()  # so that a screen is compared line by line


def figures_of(value: Any) -> Any:
    """The value with every sentence as the numbers in it; whole screens are left out."""
    if isinstance(value, list):
        return [figures_of(item) for item in value]
    if isinstance(value, str):
        return _numbers(value) if re.search(r"\s", value.strip()) else value
    if not isinstance(value, dict):
        return value
    return {
        key: _numbers(item) if key in _TEXT_KEYS and isinstance(item, str) else figures_of(item)
        for key, item in value.items()
        if not (key in _SCREENS and isinstance(item, str) and "\n" in item)
    }


def _numbers(sentence: str) -> str:
    return f"a sentence with {', '.join(sorted(_NUMBER.findall(sentence))) or 'no number'}"


def compare(section: str, old: Side, new: Side, *, allow_text: bool) -> bool:
    """Ask both sides and print what differs; whether they agree."""
    began_s = time.perf_counter()
    with ThreadPoolExecutor(2) as pool:
        before, after = pool.map(lambda side: side.ask(section), (old, new))
    lines = list(differences(before, after, allow_text=allow_text))
    took = f"{len(before)} answers, {time.perf_counter() - began_s:.0f} s"
    if not lines:
        print(f"{section}: same ({took})", flush=True)
        return True
    print(f"{section}: {sum(line.startswith('--- old: ') for line in lines)} differ ({took})")
    print("\n".join(line[:WIDEST] for line in lines[:MOST_LINES]))
    if len(lines) > MOST_LINES:
        print(f"... {len(lines) - MOST_LINES} more lines")
    sys.stdout.flush()
    return False


@contextlib.contextmanager
def checkout_of(name: str, folder: Path) -> Iterator[Path]:
    """The folder of a checkout; of a git ref, a worktree that is there meanwhile."""
    if Path(name).is_dir():
        yield Path(name)
        return
    git = ["git", "-C", str(REPOSITORY), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(folder), name], check=True)
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("old", help="a checkout, or a git ref")
    parser.add_argument("new", help="a checkout, or a git ref")
    parser.add_argument("--jobs", type=int, default=500, help="random experiment files (%(default)s)")
    parser.add_argument("--only", choices=SECTIONS, action="append", help="compare this section; repeats")
    parser.add_argument("--allow-text", action="store_true", help="sentences may differ, except for their numbers")
    asked = parser.parse_args(arguments)
    sections = [section for section in SECTIONS if section in (asked.only or SECTIONS)]
    with tempfile.TemporaryDirectory(prefix="compare-") as work, contextlib.ExitStack() as stack:
        sides = []
        for number, name in enumerate((asked.old, asked.new), start=1):
            folder = Path(work).resolve() / f"side-{number}"
            folder.mkdir()
            checkout = stack.enter_context(checkout_of(name, Path(work) / f"checkout-{number}"))
            sides.append(Side(checkout, folder))
        prepare(*sides, asked.jobs, journals=bool({"replays", "service"} & set(sections)))
        same = [compare(section, *sides, allow_text=asked.allow_text) for section in sections]
    return 0 if all(same) else 1


if __name__ == "__main__":
    sys.exit(main())
