"""`rubberband mcp`: tools for agents, by the Model Context Protocol."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rubberband.commands.common import LOCAL, ServerOption


def mcp(
    server: ServerOption = None,
    skill: Annotated[
        bool, typer.Option("--skill", help="Print the instructions for agents (SKILL.md), and end.")
    ] = False,
) -> None:
    """Let an agent plan and run experiments.

    Serves tools by the Model Context Protocol on stdin and stdout: plan, submit, status, report, extend, add, clone and
    stop, for the experiment files below the current folder. The `agents` section of policy.yaml caps what they may
    cost. An agent's program starts this command; experiments go on when it ends.
    """
    from rubberband.installation import default_home, require

    if skill:
        print(Path(__file__).parents[1].joinpath("mcp", "SKILL.md").read_text(encoding="utf-8"), end="")
        return
    require("rubberband mcp", "mcp", "httpx", "httpx_sse")
    from rubberband.mcp.server import serve

    serve(default_home(), None if server in (None, "", LOCAL) else server, Path.cwd())
