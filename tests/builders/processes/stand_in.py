"""Stands in for the process of an experiment: it journals what another run journalled, slowly, and starts at once.

`python stand_in.py HOME NAME LOCK`. HOME/stand-in.json tells `template` (a journal), `now` (Unix time), `pause_s` and
`ways` (by name): `refuse` (it never begins), `vanish` (it ends before it signs), `silent` (after that), `cut` (amid its
events), `hold` (it waits for HOME/go amid its events). Needs nothing but the standard library.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
import sys
import time
from pathlib import Path


def main(home: Path, name: str, lock: int) -> int:
    found = json.loads((home / "stand-in.json").read_text())
    way = found.get("ways", {}).get(name, "")
    folder = home / "experiments" / name
    order = json.loads((folder / "order.json").read_text())
    if way == "vanish":
        return 1
    mark = {"pid": os.getpid(), "attempt": order["attempt"], "started_at": found["now"]}
    os.ftruncate(lock, 0)
    os.pwrite(lock, json.dumps(mark).encode(), 0)
    with open(home / "starts.log", "a") as starts:
        starts.write(f"{name} {os.getpid()} {order['attempt']}\n")
    if way == "silent":
        return 1
    if way == "refuse":
        return end(folder, order["attempt"], 3, "no plan meets the deadline of 1s", found["now"])
    print(f"{name}: at work", flush=True)
    with open(folder / "driver.lock", "w") as driver:
        fcntl.flock(driver, fcntl.LOCK_EX)
        run(home, folder, name, found, way)
    if way == "cut":
        return 1
    return end(folder, order["attempt"], 0, "", found["now"])


def run(home: Path, folder: Path, name: str, answer: dict[str, object], way: str) -> None:
    template = sqlite3.connect(str(answer["template"]))
    events = template.execute("SELECT seq, occurred_at, kind, body FROM events ORDER BY seq").fetchall()
    if not (folder / "journal.db").exists():
        begin(folder, name, template, answer["now"])
    template.close()
    journal = sqlite3.connect(folder / "journal.db", isolation_level=None)
    journal.execute("PRAGMA journal_mode=WAL")
    (done,) = journal.execute("SELECT count(*) FROM events").fetchone()
    for number, event in enumerate(events[done:], start=done):
        if way in ("cut", "hold") and number == len(events) // 2:
            if way == "cut" and not done:
                break
            while way == "hold" and home.exists() and not (home / "go").exists():
                time.sleep(0.01)  # it has the standard library alone, and no helper
        journal.execute("INSERT INTO events VALUES (?, ?, ?, ?, ?)", (name, *event))
        time.sleep(float(str(answer.get("pause_s", 0.0))))
    journal.close()


def begin(folder: Path, name: str, template: sqlite3.Connection, now: object) -> None:
    """As `rubberband.executor.journal.journal` does: the journal appears whole."""
    draft = folder / ".journal.db.new"
    draft.unlink(missing_ok=True)
    journal = sqlite3.connect(draft)
    journal.execute("PRAGMA journal_mode=WAL")
    for (statement,) in template.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL"):
        journal.execute(statement)
    ((_, _, job, setup),) = template.execute("SELECT name, created_at, job, setup FROM experiments").fetchall()
    job = json.dumps({**json.loads(job), "name": name}, separators=(",", ":"))  # as it was encoded
    journal.execute("INSERT INTO experiments VALUES (?, ?, ?, ?)", (name, now, job, setup))
    journal.commit()
    journal.close()
    os.replace(draft, folder / "journal.db")


def end(folder: Path, attempt: int, exit_code: int, error: str, now: object) -> int:
    draft = folder / ".ending.new"
    draft.write_text(json.dumps({"attempt": attempt, "exit_code": exit_code, "error": error, "at": now}))
    os.replace(draft, folder / "ending.json")
    return exit_code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
