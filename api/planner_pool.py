"""The processes that plan, as the server sees them: asked one question each at a time, ended and replaced as needed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from rubberband.api.problems import KINDS, TOO_LONG, UNAVAILABLE, Problem
from rubberband.api.settings import Settings

_LINE_BYTES = 8 << 20
"""Longest line that a planner may answer with."""
_MOST_WAITING = 128
"""Questions that wait for each planner."""
_KINDS = {kind.slug: kind for kind in KINDS}

Json = dict[str, Any]


class _Ended(Exception):
    """The process is gone."""


class Planner:
    """One process; started when it is first asked."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """Of the process; None if there is none."""
        return None if self._process is None else self._process.pid

    async def ask(self, question: Mapping[str, Any]) -> Json:
        """What identifies a question: `id` and `good_s`. Raises Problem, and _Ended."""
        return await self._exchange(json.dumps(question).encode())

    async def plan(self) -> tuple[Json, bytes]:
        """The answer to the question that was asked: what is told of it, and its body."""
        told = await self._exchange(b"plan")
        return told, await self._read(told["length"])

    async def skip(self) -> None:
        """The answer is not needed."""
        process = await self._started()
        assert process.stdin is not None, "it is a pipe"
        process.stdin.write(b"skip\n")

    async def end(self) -> None:
        """End the process, whatever it does. The next question starts another."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()

    async def _exchange(self, line: bytes) -> Json:
        process = await self._started()
        assert process.stdin is not None, "it is a pipe"
        assert process.stdout is not None, "it is a pipe"
        try:
            process.stdin.write(line + b"\n")
            await process.stdin.drain()
            told = await process.stdout.readline()
        except (ConnectionError, ValueError):
            raise _Ended from None
        if not told.endswith(b"\n"):
            raise _Ended
        answer: Json = json.loads(told)
        if "problem" in answer:
            raise Problem(_KINDS[answer["problem"]], answer["detail"], **answer["extensions"])
        return answer

    async def _read(self, length: int) -> bytes:
        assert self._process is not None, "it has answered"
        assert self._process.stdout is not None, "it is a pipe"
        try:
            return await self._process.stdout.readexactly(length)
        except (ConnectionError, asyncio.IncompleteReadError):
            raise _Ended from None

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is None:
            live = ["--live"] if "aws" in self._settings.providers else []
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "rubberband.api.planner_process", str(self._settings.home), *live),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
                limit=_LINE_BYTES,
                # Ctrl-C in the server's terminal ends the server, which then ends its planners.
                start_new_session=True,
            )
        return self._process


class Pool:
    """The planners of a server."""

    def __init__(self, settings: Settings) -> None:
        self._planning_s = settings.limits.planning_s
        self._planners = [Planner(settings) for _ in range(max(1, settings.planners))]
        self._free: asyncio.Queue[Planner] = asyncio.LifoQueue()
        for planner in self._planners:
            self._free.put_nowait(planner)
        self._waiting = 0

    @asynccontextmanager
    async def planner(self) -> AsyncIterator[Planner]:
        """A planner that is free, for one question and no longer than one may take.

        Raises Problem: UNAVAILABLE where too many wait or the planner dies, TOO_LONG where it takes too long.
        """
        planner = await self._wait()
        whole = False
        try:
            async with asyncio.timeout(self._planning_s):
                yield planner
            whole = True
        except Problem:
            whole = True
            raise
        except TimeoutError:
            raise Problem(
                TOO_LONG,
                f"no plan was found within {self._planning_s:g} s, the most here; ask without frontier=true, give "
                "fewer instance_types or stages, or lower max_instances or the number of trials",
            ) from None
        except _Ended:
            raise self._busy("the process that planned has ended") from None
        finally:
            if not whole:
                await planner.end()
            self._free.put_nowait(planner)

    @property
    def pids(self) -> list[int]:
        """Of the processes that there are."""
        return [planner.pid for planner in self._planners if planner.pid is not None]

    async def close(self) -> None:
        """End all processes."""
        await asyncio.gather(*(planner.end() for planner in self._planners))

    async def _wait(self) -> Planner:
        if self._waiting >= _MOST_WAITING * len(self._planners):
            raise self._busy(f"{self._waiting} previews wait already")
        self._waiting += 1
        try:
            async with asyncio.timeout(self._planning_s):
                return await self._free.get()
        except TimeoutError:
            raise self._busy("every planner is at work on previews that take long") from None
        finally:
            self._waiting -= 1

    def _busy(self, reason: str) -> Problem:
        return Problem(UNAVAILABLE, f"{reason}; ask again in a few seconds", headers={"Retry-After": "2"})
