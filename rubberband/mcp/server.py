"""The server of the tools: the official `mcp` package over stdin and stdout. Other output goes to stderr."""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
from functools import wraps
from pathlib import Path
from typing import Any

import anyio
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations
from pydantic import ValidationError

import rubberband
from rubberband.errors import RubberbandError
from rubberband.interrupts import heeded
from rubberband.mcp.tools import Tools
from rubberband.units import nearest

SKILL = Path(__file__).with_name("SKILL.md")
_READS = ("plan", "status", "report")


class _Server(MCPServer[Any]):
    """A server that refuses in one line what it does not understand, and reads past nothing."""

    async def call_tool(self, name: str, arguments: dict[str, Any], context: Any = None) -> Any:
        """Call a tool. Raises ToolError in one line."""
        known = self._tool_input_schema(name)
        if known is None:
            tools = [tool.name for tool in await self.list_tools()]
            raise ToolError(f"there is no tool {name!r}; {nearest(name, tools)}")
        for each in arguments:
            if each not in known["properties"]:
                raise ToolError(f"{name} has no argument {each!r}; {nearest(each, known['properties'])}")
        try:
            return await super().call_tool(name, arguments, context)
        except ToolError as error:
            raise ToolError(_one_line(error)) from error


def _one_line(error: ToolError) -> str:
    cause = error.__cause__
    if isinstance(cause, ValidationError):
        faults = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in cause.errors()]
        return "; ".join(faults)
    if isinstance(cause, ToolError):
        return " ".join(str(cause).split())
    return f"{' '.join(str(error).split())} (rubberband failed; the trace-back is on stderr of the server)"


def _told(function: Any) -> Any:
    """Let a tool's errors for users reach the agent."""

    @wraps(function)
    async def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return await function(*args, **kwargs)
        except RubberbandError as error:
            raise ToolError(str(error)) from None

    return call


def make_server(tools: Tools) -> MCPServer[Any]:
    """Return the server of the tools."""
    server = _Server(
        "rubberband",
        instructions="Plan before you submit. Refusals name the fix; a cap that refuses is a person's to raise.",
        version=rubberband.__version__,
        log_level="WARNING",
    )
    for name in ("plan", "submit", "status", "report", "extend", "add", "clone", "stop"):
        tool = getattr(tools, name)
        about = " ".join((tool.__doc__ or "").split())
        hints = ToolAnnotations(read_only_hint=name in _READS, destructive_hint=name == "stop")
        server.add_tool(_told(tool), name=name, description=about, annotations=hints, structured_output=False)
    return server


def serve(home: Path, server: str | None, folder: Path) -> None:
    """Serve the tools until stdin is closed; a signal ends this at once. Experiments go on."""
    tools = Tools(home, server, folder)

    def end(*_: object) -> None:
        tools.end()
        os._exit(130)  # a thread waits for a line on stdin

    for number in heeded():
        signal.signal(number, end)
    logging.captureWarnings(True)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a line that a tool prints must not be left for after the protocol
        sys.stdout.reconfigure(line_buffering=True)
    anyio.run(make_server(tools).run_stdio_async)
