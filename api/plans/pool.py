"""The processes that plan, as the server sees them: asked one question each at a time, ended and replaced as needed.

Callers take turns. A question that turns out to be hard goes on in a lane for such ones, so that the others need not
wait for it; where that lane is taken it is given up, and asked again when its turn comes there.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from rubberband.api.problems import KINDS, TOO_LONG, UNAVAILABLE, Problem
from rubberband.api.settings import Settings

# Who is next: those who wait are taken in turn by caller, however much one of them asks. Pure.


Item = TypeVar("Item")


class Turns(Generic[Item]):
    """What waits, by who asks for it."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[Item]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def put(self, caller: str, item: Item) -> None:
        """Add to what waits; a caller for whom nothing waits comes last."""
        self._waiting.setdefault(caller, deque()).append(item)
        self._count += 1

    def has_others(self, caller: str) -> bool:
        """Whether anybody else waits."""
        return any(each != caller for each in self._waiting)

    def take(self, busy: Collection[str] = ()) -> Item:
        """The next one: of the caller who waits longest for a turn, and first of those who are not `busy`.

        Raises LookupError if nothing waits.
        """
        if not self._waiting:
            raise LookupError("nothing waits")
        caller = next((each for each in self._waiting if each not in busy), next(iter(self._waiting)))
        item = self._waiting[caller].popleft()
        self._shrunk(caller)
        if caller in self._waiting:
            self._waiting.move_to_end(caller)
        return item

    def drop(self, caller: str, item: Item) -> None:
        """Wait no longer for it. Idempotent."""
        waiting = self._waiting.get(caller, ())
        if item in waiting:
            self._waiting[caller].remove(item)
            self._shrunk(caller)

    def displace(self, caller: str) -> Item | None:
        """Make room for a caller: the last that was asked by who has most waiting; None if that is the caller."""
        most = max(self._waiting, key=lambda each: len(self._waiting[each]), default=caller)
        if len(self._waiting.get(most, ())) <= len(self._waiting.get(caller, ())) + 1:
            return None
        item = self._waiting[most].pop()
        self._shrunk(most)
        return item

    def _shrunk(self, caller: str) -> None:
        self._count -= 1
        if not self._waiting[caller]:
            del self._waiting[caller]


EASY_S = 1.0
"""What takes longer is a hard question: nobody else waits for it."""
OWN_S = 5.0
"""Nor does who asked it, from then on: with what that one asks besides."""
_LINE_BYTES = 8 << 20
"""Longest line that a planner may answer with."""
_WAIT_S = 30.0
"""So long a question waits for a free slot at least."""
_START_S = 60.0
"""What has not started by then never will."""
_MOST_WAITING = 128
"""Questions that wait for each planner."""
_KINDS = {kind.slug: kind for kind in KINDS}
_log = logging.getLogger(__name__)

Json = dict[str, Any]


class HardError(Exception):
    """The question was given up since it is hard and others wait: to be asked again as a hard one."""


class _ProcessEnded(Exception):
    """The process is gone."""


class Planner:
    """One process; started when it is first asked."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._process: asyncio.subprocess.Process | None = None
        self._spawning: asyncio.Task[asyncio.subprocess.Process] | None = None

    @property
    def pid(self) -> int | None:
        """Of the process; None if there is none."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Have a process that is ready for a question. Raises _Ended."""
        await self.end()
        # Who is stopped now must not leave half a process behind.
        self._spawning = asyncio.create_task(self._spawned())
        try:
            process = await asyncio.shield(self._spawning)
        except OSError as error:  # no memory, or too many files or processes: there may be room again
            self._spawning = None
            _log.warning("no planning process could be started: %s", error)
            raise _ProcessEnded from None
        self._process, self._spawning = process, None
        await self._told(process)

    async def ask(self, question: Mapping[str, Any]) -> Json:
        """What identifies a question: `id` and `good_s`. Raises Problem, and _Ended."""
        return await self._exchange(json.dumps(question).encode())

    async def plan(self) -> tuple[Json, bytes]:
        """The answer to the question that was asked: what is told of it, and its body."""
        told = await self._exchange(b"plan")
        return told, await self._read(told["length"])

    async def rest(self, question: Json) -> Json:
        """Preview other limits of an experiment (`api.experiments.limit_preview`). Raises Problem, and _Ended."""
        answer: Json = (await self._exchange(json.dumps(question).encode()))["rest"]
        return answer

    async def skip(self) -> None:
        """The answer is not needed."""
        process = self._at_work()
        assert process.stdin is not None, "it is a pipe"
        process.stdin.write(b"skip\n")

    def give_up(self) -> None:
        """End what it does: whoever waits for the answer is told that the process is gone."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def end(self) -> None:
        """End the process, whatever it does. The next question starts another."""
        if self._spawning is not None:
            with contextlib.suppress(OSError):
                self._process = await self._spawning
            self._spawning = None
        self.give_up()
        if self._process is not None:
            await self._process.communicate()
        self._process = None

    async def _exchange(self, line: bytes) -> Json:
        process = self._at_work()
        assert process.stdin is not None, "it is a pipe"
        try:
            process.stdin.write(line + b"\n")
            await process.stdin.drain()
        except ConnectionError:
            raise _ProcessEnded from None
        answer = await self._told(process)
        if "problem" in answer:
            raise Problem(_KINDS[answer["problem"]], answer["detail"], **answer["extensions"])
        return answer

    async def _told(self, process: asyncio.subprocess.Process) -> Json:
        assert process.stdout is not None, "it is a pipe"
        try:
            told = await process.stdout.readline()
        except (ConnectionError, ValueError):
            raise _ProcessEnded from None
        if not told.endswith(b"\n"):
            raise _ProcessEnded
        answer: Json = json.loads(told)
        return answer

    async def _read(self, length: int) -> bytes:
        assert self._process is not None, "it has answered"
        assert self._process.stdout is not None, "it is a pipe"
        try:
            return await self._process.stdout.readexactly(length)
        except (ConnectionError, asyncio.IncompleteReadError):
            raise _ProcessEnded from None

    def _at_work(self) -> asyncio.subprocess.Process:
        assert self._process is not None, "it was started"
        return self._process

    async def _spawned(self) -> asyncio.subprocess.Process:
        live = ["--live"] if self._settings.rents else []
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "rubberband.api.plans.process", str(self._settings.home), *live),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=_environment(self._settings),
            limit=_LINE_BYTES,
            # Ctrl-C in the server's terminal ends the server, which then ends its planners.
            start_new_session=True,
        )


def _environment(settings: Settings) -> dict[str, str]:
    """Of a planner. The store's URL is there and not among the arguments, which everybody may read."""
    kept = {name: value for name, value in os.environ.items() if name != "RUBBERBAND_STORE"}
    store = {} if settings.store is None else {"RUBBERBAND_STORE": settings.store}
    return {**kept, **store, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


@dataclass(eq=False, slots=True, kw_only=True)
class _Turn:
    """One question, from when it waits."""

    caller: str
    granted: asyncio.Future[Planner] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    planner: Planner | None = None
    """From when it is its turn."""
    timer: asyncio.TimerHandle | None = None
    is_hard: bool = False
    """Whether it takes longer than an easy one."""
    is_very_hard: bool = False
    """Whether it takes so long that not even its caller should wait for it."""
    is_given_up: bool = False
    """Whether it was ended since others wait."""

    def refuse(self, reason: str) -> None:
        """It waits no longer."""
        if not self.granted.done():
            self.granted.set_exception(_busy(reason))


class _Lane:
    """So many questions that are planned at the same time, and those that wait for it."""

    def __init__(self, width: int) -> None:
        self._width = width
        self.planned: list[_Turn] = []
        """First those that began first."""
        self.waiting: Turns[_Turn] = Turns()

    @property
    def room(self) -> int:
        """How many more may be planned."""
        return self._width - len(self.planned)

    @property
    def startable(self) -> int:
        """How many of those that wait may be planned at once."""
        return min(self.room, len(self.waiting))

    def leave(self, turn: _Turn) -> None:
        """It is not planned in this lane (any more), and does not wait for it."""
        self.waiting.drop(turn.caller, turn)
        if turn in self.planned:
            self.planned.remove(turn)


class Pool:
    """The planners of a server: as many as the operator says for all questions, and as many again for hard ones."""

    def __init__(self, settings: Settings) -> None:
        width = max(1, settings.planners)
        self._planning_s = settings.limits.planning_s
        # One more, that starts while the others are asked.
        self._planners = [Planner(settings) for _ in range(2 * width + 1)]
        self._cold = list(self._planners)
        """Those without a process."""
        self._ready: list[Planner] = []
        """Those that can be asked at once."""
        self._starting: set[asyncio.Task[None]] = set()
        self._easy, self._hard = _Lane(width), _Lane(width)
        self._most_waiting = _MOST_WAITING * width
        self._is_closed = False

    @asynccontextmanager
    async def planner(self, caller: str = "", *, is_hard: bool = False) -> AsyncIterator[Planner]:
        """A planner that is free, for one question and no longer than one may take.

        `is_hard` is to be said of what was given up by HardError, which is raised of nothing that is hard. Raises
        Problem: UNAVAILABLE where too many wait or the planner dies, TOO_LONG where it takes too long.
        """
        turn = _Turn(caller=caller)
        try:
            planner = await self._wait(turn, self._hard if is_hard else self._easy)
            async with self._limited(turn, planner):
                yield planner
        finally:
            self._leave(turn)

    @property
    def pids(self) -> list[int]:
        """Of the processes that there are."""
        return [planner.pid for planner in self._planners if planner.pid is not None]

    async def close(self) -> None:
        """End all processes."""
        self._is_closed = True
        for starting in self._starting:
            starting.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        await asyncio.gather(*(planner.end() for planner in self._planners))

    @asynccontextmanager
    async def _limited(self, turn: _Turn, planner: Planner) -> AsyncIterator[None]:
        whole = False
        try:
            async with asyncio.timeout(self._planning_s):
                turn.timer = asyncio.get_running_loop().call_later(EASY_S, self._found_hard, turn)
                yield
            whole = True
        except Problem:
            whole = True
            raise
        except TimeoutError:
            raise Problem(
                TOO_LONG,
                f"no plan was found within {self._planning_s:g} s, the limit here; ask without frontier=true, give "
                "fewer instance_types or stages, or lower max_instances or the number of trials",
            ) from None
        except _ProcessEnded:
            if turn.is_given_up:
                raise HardError from None
            raise _busy("the planning process has ended") from None
        finally:
            if turn.is_given_up or not whole:
                turn.planner = None
                try:
                    await planner.end()
                finally:
                    self._cold.append(planner)

    async def _wait(self, turn: _Turn, lane: _Lane) -> Planner:
        if len(self._easy.waiting) + len(self._hard.waiting) >= self._most_waiting:
            self._make_room(turn.caller)
        lane.waiting.put(turn.caller, turn)
        self._go_on()
        try:
            async with asyncio.timeout(max(self._planning_s, _WAIT_S)):
                return await turn.granted
        except TimeoutError:
            raise _busy("all planning processes are busy with long previews") from None

    def _make_room(self, caller: str) -> None:
        """Whoever asks most is refused first."""
        displaced = self._easy.waiting.displace(caller)
        reason = f"{self._most_waiting} previews are queued already"
        if displaced is None:
            raise _busy(reason)
        displaced.refuse(reason)

    def _leave(self, turn: _Turn) -> None:
        """It has its answer, or none."""
        if turn.timer is not None:
            turn.timer.cancel()
        for lane in (self._easy, self._hard):
            lane.leave(turn)
        if turn.planner is not None:
            self._ready.append(turn.planner)
        self._go_on()

    def _found_hard(self, turn: _Turn) -> None:
        turn.is_very_hard = turn.is_hard
        turn.is_hard = True
        if not turn.is_very_hard:
            turn.timer = asyncio.get_running_loop().call_later(OWN_S - EASY_S, self._found_hard, turn)
        self._go_on()

    def _go_on(self) -> None:
        """Give planners to those that wait, as far as may be, and start those that are lacking."""
        if self._is_closed:
            return
        for turn in list(self._easy.planned):
            leaving = sum(each.is_given_up for each in self._easy.planned)
            if turn.is_hard and not turn.is_given_up and len(self._easy.waiting) > self._easy.room + leaving:
                self._step_aside(turn)
        for lane in (self._easy, self._hard):
            while lane.startable and self._ready:
                self._grant(lane)
        while self._cold and self._easy.startable + self._hard.startable > len(self._starting):
            self._start()

    def _step_aside(self, turn: _Turn) -> None:
        if self._hard.room:
            self._easy.planned.remove(turn)
            self._hard.planned.append(turn)
            return
        if not (turn.is_very_hard or self._easy.waiting.has_others(turn.caller)):
            return
        turn.is_given_up = True
        assert turn.planner is not None, "it is planned"
        turn.planner.give_up()
        if self._cold and not (self._ready or self._starting):
            self._start()

    def _grant(self, lane: _Lane) -> None:
        turn = lane.waiting.take([each.caller for each in (*self._easy.planned, *self._hard.planned)])
        lane.planned.append(turn)
        turn.planner = self._ready.pop()
        if not turn.granted.done():  # who waited may have left at this very moment, and gives it back then
            turn.granted.set_result(turn.planner)

    def _start(self) -> None:
        """Whoever waits goes on waiting meanwhile, so that it is asked whose turn it is then."""
        starting = asyncio.create_task(self._started(self._cold.pop()))
        self._starting.add(starting)
        starting.add_done_callback(self._over)

    async def _started(self, planner: Planner) -> None:
        try:
            async with asyncio.timeout(_START_S):
                await planner.start()
        except (_ProcessEnded, TimeoutError):
            await planner.end()
            self._cold.append(planner)
            for lane in (self._easy, self._hard):
                while lane.startable:
                    lane.waiting.take().refuse("no planning process could be started")
        else:
            self._ready.append(planner)

    def _over(self, starting: asyncio.Task[None]) -> None:
        self._starting.discard(starting)
        if not starting.cancelled():
            self._go_on()


def _busy(reason: str) -> Problem:
    return Problem(UNAVAILABLE, f"{reason}; ask again in a few seconds", headers={"Retry-After": "2"})
