"""Takes programs of the kinds that people have through init, check and run; prints what was changed, and what resulted.

python -m tests.bench.bench_public_programs [--init] [NAME…]
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from tests.builders.public_programs import Door, Program, programs


def steps(door: Door, *, only_init: bool) -> Iterator[str]:
    """Take a program to its winner; iterate over what was seen. Raises AssertionError."""
    program = door.program
    init = door.init()
    if program.outcome == "refused" and not program.changes:
        if init.returncode == 0:
            door.check()
        assert door.refusal(), f"not refused by {program.says!r}"
        yield f"refused: {door.refusal()}"
        return
    assert door.file.exists(), f"init wrote no file: {init.stderr.strip().splitlines()[-1:]}"
    if only_init:
        yield door.summary()
        return
    door.change()
    door.require_right()
    check = door.check()
    assert check.returncode == 0, f"check: {check.stderr.strip()[-600:]}"
    best = door.run()
    door.compare(best)
    yield f"finished; {door.metric[0]} {best.metrics[door.metric[0]]:.4g} as by hand"


def tried(program: Program, folder: Path, *, only_init: bool) -> tuple[str, Door]:
    door, found = Door(program, folder), list[str]()
    try:
        found += steps(door, only_init=only_init)
    except Exception as error:
        found.append(f"WRONG: {type(error).__name__}: {error}"[:900].replace("\n", " "))
    return "; ".join(found), door


def main() -> None:
    only_init, names = "--init" in sys.argv, [name for name in sys.argv[1:] if name[:1] != "-"]
    print("| program | kind | lines in program | in file | result | s |\n|---|---|---|---|---|---|")
    for name, program in programs().items():
        if (names and name not in names) or not all(find_spec(module) for module in program.needs):
            continue
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            result, door = tried(program, Path(folder), only_init=only_init)
            log = Path(tempfile.gettempdir(), f"public-{name}.log")
            log.write_text("\n".join([*door.said, door.file.read_text() if door.file.exists() else "no file"]))
        lines = [sum(c.lines for c in program.changes if (c.file == "experiment") is there) for there in (False, True)]
        print(
            f"| {name} | {program.after} | {lines[0]} | {lines[1]} | {result} | {time.monotonic() - began:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
