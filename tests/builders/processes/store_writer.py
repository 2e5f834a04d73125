"""A process that writes to a store: `python -m tests.builders.processes.store_writer URL append|die EXPERIMENT N`."""

from __future__ import annotations

import os
import signal
import sys

import sqlalchemy as sql

from rubberband.api.store import Store
from rubberband.api.store.schema import Entry


def entry(experiment: str, seq: int) -> Entry:
    return Entry(experiment=experiment, seq=seq, kind="Tick", occurred_at=1.0, data={"seq": seq})


def main(url: str, what: str, experiment: str, count: int) -> None:
    store = Store(url)
    if what == "append":
        for seq in range(0, count, 2):
            store.append([entry(name, one) for one in (seq, seq + 1) for name in (experiment, "common")])
    else:
        sql.event.listen(sql.Engine, "commit", lambda _: os.kill(os.getpid(), signal.SIGKILL))
        store.append([entry(experiment, seq) for seq in range(count)])
    store.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
