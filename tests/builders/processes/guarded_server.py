"""`rubberband serve` that tells in HOME/forbidden.log what a server must never do: import ray or torch, or unpickle.

With STAND_IN set, experiments run in processes that stand in for real ones.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

FORBIDDEN = frozenset({"ray", "torch", "cloudpickle"})


def main() -> None:
    log = os.open(Path(os.environ["RUBBERBAND_HOME"]) / "forbidden.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "pickle.find_class" or (event == "import" and arguments[0] in FORBIDDEN):
            os.write(log, f"{event} {arguments[0]}\n".encode())

    sys.addaudithook(watch)
    from rubberband.api import app
    from rubberband.api.experiments import ExperimentRuns

    if stand_in := os.environ.get("STAND_IN"):
        app.ExperimentRuns = functools.partial(ExperimentRuns, command=(sys.executable, "-S", stand_in))  # type: ignore[assignment,misc]
    from rubberband import cli

    cli.main()


if __name__ == "__main__":
    main()
