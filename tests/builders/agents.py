"""A scripted client of `rubberband mcp`: the official package over stdio, with a real process."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcp import ClientSession, StdioServerParameters, stdio_client


@dataclass
class Agent:
    """Calls tools, and keeps what it asked and heard."""

    session: ClientSession
    transcript: list[tuple[str, dict[str, Any], str, float]] = field(default_factory=list)
    """Tool, arguments, answer, seconds."""

    async def call(self, tool: str, *, refused: bool = False, **arguments: Any) -> str:
        began = time.monotonic()
        found: Any = await self.session.call_tool(tool, arguments)
        (content,) = found.content
        assert found.is_error is refused, content.text
        self.transcript.append((tool, arguments, content.text, time.monotonic() - began))
        text: str = content.text
        return text


def parameters(home: Path, folder: Path, **environment: str) -> StdioServerParameters:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    words = {"RUBBERBAND_HOME": str(home), "PATH": path, "LC_ALL": "C.UTF-8", **environment}
    return StdioServerParameters(command=sys.executable, args=["-m", "rubberband.cli", "mcp"], env=words, cwd=folder)


@asynccontextmanager
async def agent(home: Path, folder: Path, **environment: str) -> AsyncIterator[Agent]:
    """An agent with the tools for the files of `folder`."""
    with open(folder / "mcp.log", "w") as log:
        async with (
            stdio_client(parameters(home, folder, **environment), errlog=log) as (reads, writes),
            ClientSession(reads, writes) as session,
        ):
            await session.initialize()
            yield Agent(session)
