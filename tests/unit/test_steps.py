"""Steps before a run: the first line comes before slow imports, and a spinner moves only on a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from pathlib import Path

from typer.testing import CliRunner

from rubberband import cli

SCALING = str(Path(__file__).parents[2] / "examples/scaling.yaml")
FIRST = """
import sys
from rubberband.views.live.steps import Steps
def first(self, step):
    print(step, sorted({"numpy", "torch", "ray", "sqlalchemy", "rich"} & sys.modules.keys()))
    sys.exit()
Steps.__call__ = first
from rubberband.cli import main
main()
"""
ON_A_TERMINAL = """
import time
from rubberband.views.live.steps import Steps
with Steps() as step:
    step("reading [a] file")
    time.sleep(0.5)
    step("")
    print("a line")
    step("checking")
    time.sleep(0.5)
"""


def test_the_first_line_needs_no_slow_import() -> None:
    command = [sys.executable, "-c", FIRST, "run", SCALING]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60.0)
    assert done.stdout == f"reading {SCALING} []\n"


def test_elsewhere_than_on_a_terminal_a_step_is_a_plain_line(home: Path) -> None:
    done = CliRunner().invoke(cli.app, ["run", SCALING, "-s", "resources.provider=virtual"])
    assert done.exit_code == 0, done.output
    assert done.stderr.startswith(f"reading {SCALING}\nplan: ")


def test_a_spinner_turns_on_a_terminal_and_leaves_nothing_behind() -> None:
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "80"}
    process = subprocess.Popen([sys.executable, "-c", ON_A_TERMINAL], stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    seen, until_s = b"", time.monotonic() + 60.0
    while time.monotonic() < until_s:
        try:
            seen += os.read(ours, 1 << 16)
        except OSError:  # its end
            break
    os.close(ours)
    assert process.wait(60.0) == 0
    text = seen.decode()
    assert text.count("reading [a] file") > 1
    assert text.index("reading") < text.index("a line") < text.index("checking")
    assert text.endswith("\x1b[2K"), "the last step is erased"
