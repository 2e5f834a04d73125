"""A driver to be killed with -9: holds two instances of one slot and trains on one of them. `python -m … DIRECTORY`."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.builders.conversation import Conversation, make_backend

if __name__ == "__main__":
    talk = Conversation(make_backend(Path(sys.argv[1])))
    talk.launch("a", "b")
    talk.start(0, ("a", 0), until=100_000)
    talk.report(0, 3)
    print("training", flush=True)
    talk.listen(1000.0)
