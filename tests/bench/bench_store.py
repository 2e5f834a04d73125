"""The stores: writes and reads a second, on SQLite and on a PostgreSQL server (by a socket). Prints, asserts nothing.

Every write is durable (an fsync) but those that are marked; run it on the disk that is meant: TMPDIR.

Run: python tests/bench/bench_store.py [SECONDS]
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path

from rubberband.api.store import Store
from rubberband.api.store.schema import Entry, StoredPlan, TakenIn, TokenRecord
from rubberband.executor import ExperimentFolder, Journal, JournalFollower, TrialReported
from rubberband.executor.run import session
from rubberband.states import ExperimentState
from rubberband.values.submission import Submission, Summary
from tests.builders.databases import DURABLE, database, programs, server
from tests.builders.jobs import EVENTS, JOB
from tests.builders.sessions import run_spec

PAGE = 500


def per_second(work: Callable[[], object], seconds: float, *, each: int = 1, threads: int = 1) -> float:
    """How often `work` was done in a second, times `each`; the first time does not count."""
    work()
    until = time.perf_counter() + seconds
    done = [0] * threads

    def repeat(place: int) -> None:
        while time.perf_counter() < until:
            work()
            done[place] += 1

    started = time.perf_counter()
    workers = [threading.Thread(target=repeat, args=(place,)) for place in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(done) * each / (time.perf_counter() - started)


def entry(seq: int) -> Entry:
    data = {"trial": seq % 64, "attempt": 1, "iterations": seq, "metrics": {"loss": 0.5, "accuracy": 0.25}}
    return Entry(experiment=f"x{seq % 3}", seq=seq, kind="TrialReported", occurred_at=float(seq), data=data)


def store_figures(store: Store, seconds: float) -> Iterator[tuple[str, float]]:
    seqs = count()
    yield "feed: appends of 1 event", per_second(lambda: store.append([entry(next(seqs))]), seconds)
    yield "  of 4 threads", per_second(lambda: store.append([entry(next(seqs))]), seconds, threads=4)
    fifty = per_second(lambda: store.append([entry(next(seqs)) for _ in range(50)]), seconds, each=50)
    yield "  events, 50 in each append", fifty
    yield f"  events read, {PAGE} a page", per_second(lambda: store.feed(limit=PAGE), seconds, each=PAGE)
    last = store.last_feed_id()
    yield "  reads with nothing new", per_second(lambda: store.feed(after=last), seconds)
    long_after = 1e9
    yield "  events let go, 1000 in each write", let_go(store, seqs, long_after)
    yield "  last_seqs of 3 experiments", per_second(lambda: store.last_seqs(["x0", "x1", "x2"]), seconds)
    names = count()
    for _ in range(200):
        store.add(submission(f"x{next(names)}"))
    olds = count()
    taken = lambda: [TakenIn(submission=submission(f"o{next(olds)}"), entries=(), last_seq=40) for _ in range(50)]  # noqa: E731
    yield "  taken in, 50 in each write", per_second(lambda: store.take_in(taken()), seconds, each=50)
    changes = count()
    yield "experiments: added", per_second(lambda: store.add(submission(f"x{next(names)}")), seconds)
    yield "  changed", per_second(lambda: store.change("x1", at=1.0, summary=Summary(stage=next(changes))), seconds)
    yield "  pages of 50 read", per_second(lambda: store.submissions(limit=50), seconds)
    body, ids = b"x" * 20_000, count()
    plan = lambda: StoredPlan(id=f"p{next(ids)}", created_at=1.0, words={}, options={}, status=200, body=body)  # noqa: E731
    yield "plans of 20 kB: kept (not durable)", per_second(lambda: store.keep_plans([plan()]), seconds)
    yield "  read", per_second(lambda: store.plan("p0"), seconds)
    store.add_token(TokenRecord(id="t", name="t", scope="read", created_at=1.0), "hash")
    yield "tokens: read", per_second(lambda: store.token("t"), seconds)
    keys = count()
    claim = lambda: store.claim_key(f"k{next(keys)}", owner="a", request_hash="h", at=1.0)  # noqa: E731
    yield "request keys: claimed", per_second(claim, seconds)


def let_go(store: Store, seqs: Iterator[int], at: float) -> float:
    for name in ("x0", "x1", "x2"):
        store.add(submission(name))
    for _ in range(20):
        store.append([entry(next(seqs)) for _ in range(1000)])
    gone, began = 0, time.perf_counter()
    while some := store.prune_feed(at=at):
        gone += some
    return gone / (time.perf_counter() - began)


def submission(name: str) -> Submission:
    return Submission(name=name, state=ExperimentState.DONE, created_at=1.0, changed_at=1.0)


def journal_figures(home: Path, url: str | None, seconds: float) -> Iterator[tuple[str, float]]:
    folder = ExperimentFolder(home=home, name="test", store=url)
    session.create(folder, JOB, run_spec(checkpoints=str(folder.checkpoints)))
    journal = Journal(folder.journal_url, "test")
    report = next(event for event in EVENTS if isinstance(event, TrialReported))
    yield "journal: appends of 1 event", per_second(lambda: journal.append([report]), seconds)
    yield "  events, 20 in each append", per_second(lambda: journal.append([report] * 20), seconds, each=20)
    events = sum(1 for _ in journal.events())
    yield "  events read and decoded", per_second(lambda: list(journal.events()), seconds, each=events)
    last = events - 1
    follower = JournalFollower(folder)
    follower.seq = last
    yield "  refreshes with nothing new", per_second(partial(follower.refresh, live=False), seconds)
    follower.close()
    journal.close()


def figures(home: Path, url: str | None, seconds: float) -> dict[str, float]:
    store = Store(url or f"sqlite:///{home}/server.db")
    try:
        return dict(journal_figures(home, url, seconds)) | dict(store_figures(store, seconds))
    finally:
        store.close()


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
    found = {}
    with ExitStack() as stack:
        homes = [Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(2)]
        found["SQLite"] = figures(homes[0], None, seconds)
        bin = programs()
        if bin is not None:
            url = stack.enter_context(database(stack.enter_context(server(bin, DURABLE)).url))
            found["PostgreSQL"] = figures(homes[1], url, seconds)
    print(f"{'a second':<40}" + "".join(f"{name:>12}" for name in found))
    for what in found["SQLite"]:
        print(f"{what:<40}" + "".join(f"{column[what]:>12,.0f}" for column in found.values()))


if __name__ == "__main__":
    main()
