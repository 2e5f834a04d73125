"""The planning processes of a server: each answers one question at a time, and is killed and replaced as needed.

Callers take turns. A question that takes long continues in a second lane, so that others need not wait for it. If that
lane is full, it is given up, and asked again when its turn comes there.

An executor of the standard library would not do: it cannot end one task, and its workers outlive a killed server. Nor
would `anyio.to_process`: the server would unpickle what processes with users' code in them write, their errors would be
in no log, and they would get this process's environment and Ctrl-C, and none would be ready before it is needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from rubberband.api.problems import KINDS, TOO_LONG, UNAVAILABLE, HttpProblem
from rubberband.api.settings import Settings, child_environment

Item = TypeVar("Item")


class Turns(Generic[Item]):
    """Queue with a turn for each caller, however much one of them asks."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[Item]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def put(self, caller: str, item: Item) -> None:
        """Add an item; a new caller comes last."""
        self._waiting.setdefault(caller, deque()).append(item)
        self._count += 1

    def has_others(self, caller: str) -> bool:
        """Whether another caller waits."""
        return any(each != caller for each in self._waiting)

    def take(self, busy: Collection[str] = ()) -> Item:
        """Remove and return the next item: of the first caller that is not `busy`, or else of the first.

        Raises LookupError if the queue is empty.
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
        """Remove an item. Idempotent."""
        waiting = self._waiting.get(caller, ())
        if item in waiting:
            self._waiting[caller].remove(item)
            self._shrunk(caller)

    def displace(self, caller: str) -> Item | None:
        """Remove and return the last item of the caller with most items; None if `caller` has about as many."""
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
"""A question that takes longer is hard: no other caller waits for it."""
OWN_S = 5.0
"""Beyond this, other questions of the same caller do not wait for it either."""
_LINE_BYTES = 8 << 20
"""Longest line of an answer."""
_WAIT_S = 30.0
"""Shortest time limit for waiting in the queue."""
_START_S = 60.0
"""Time limit for the start of a process."""
_MOST_WAITING = 128
"""Queued questions for each planner."""
_KINDS = {kind.slug: kind for kind in KINDS}
_log = logging.getLogger(__name__)

Json = dict[str, Any]


class HardError(Exception):
    """A hard question was given up because others wait; ask again with `is_hard`."""


class _ProcessEndedError(Exception):
    """The planning process ended."""


class Planner:
    """A planning process (`rubberband.api.plans.process`), which answers one question at a time."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._process: asyncio.subprocess.Process | None = None
        self._spawning: asyncio.Task[asyncio.subprocess.Process] | None = None

    @property
    def pid(self) -> int | None:
        """Id of the process; None without one."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start a process and wait until it is ready. Raises _ProcessEndedError."""
        await self.end()
        # Shielded: a cancelled start must not leave half a process behind.
        self._spawning = asyncio.create_task(self._spawned())
        try:
            self._process = await asyncio.shield(self._spawning)
        except OSError as error:  # no memory, or too many files or processes: there may be room again
            self._spawning = None
            _log.warning("no planning process could be started: %s", error)
            raise _ProcessEndedError from None
        self._spawning = None
        await self._read_line()

    async def ask(self, question: Mapping[str, Any]) -> Json:
        """Return `id` and `good_s` of a question. Raises Problem, and _ProcessEndedError."""
        return await self._exchange(json.dumps(question).encode())

    async def plan(self) -> tuple[Json, bytes]:
        """Plan the question of `ask`; return facts about the answer, and its body."""
        found = await self._exchange(b"plan")
        assert self._process is not None, "it has answered"
        assert self._process.stdout is not None, "it is a pipe"
        try:
            return found, await self._process.stdout.readexactly(found["length"])
        except (ConnectionError, asyncio.IncompleteReadError):
            raise _ProcessEndedError from None

    async def rest(self, question: Json) -> Json:
        """Preview other limits (`RestQuestion`). Raises Problem, and _ProcessEndedError."""
        answer: Json = (await self._exchange(json.dumps(question).encode()))["rest"]
        return answer

    def skip(self) -> None:
        """Drop the question of `ask`."""
        self._write(b"skip\n")

    def give_up(self) -> None:
        """Kill the process; a call that waits for its answer raises _ProcessEndedError."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def end(self) -> None:
        """Kill the process, and wait for its end."""
        if self._spawning is not None:
            with contextlib.suppress(OSError):
                self._process = await self._spawning
            self._spawning = None
        self.give_up()
        if self._process is not None:
            await self._process.communicate()
        self._process = None

    async def _exchange(self, line: bytes) -> Json:
        try:
            await self._write(line + b"\n").drain()
        except ConnectionError:
            raise _ProcessEndedError from None
        answer = await self._read_line()
        if "problem" in answer:
            raise HttpProblem(_KINDS[answer["problem"]], answer["detail"], **answer["extensions"])
        return answer

    def _write(self, line: bytes) -> asyncio.StreamWriter:
        assert self._process is not None, "it was started"
        assert self._process.stdin is not None, "it is a pipe"
        self._process.stdin.write(line)
        return self._process.stdin

    async def _read_line(self) -> Json:
        assert self._process is not None, "it was started"
        assert self._process.stdout is not None, "it is a pipe"
        try:
            line = await self._process.stdout.readline()
        except (ConnectionError, ValueError):
            raise _ProcessEndedError from None
        if not line.endswith(b"\n"):
            raise _ProcessEndedError
        answer: Json = json.loads(line)
        return answer

    async def _spawned(self) -> asyncio.subprocess.Process:
        live = ["--live"] if self._settings.rents else []
        live += ["--cluster"] if self._settings.has_cluster else []
        live += [f"--code={folder}" for folder in self._settings.code]
        live += [f"--allow={name}" for name in self._settings.entrypoints]
        live += [] if self._settings.pool is None else [f"--lent={self._settings.pool.provider}"]
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "rubberband.api.plans.process", str(self._settings.home), *live),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=child_environment(self._settings.store) | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            limit=_LINE_BYTES,
            # Ctrl-C in the server's terminal ends the server, which then ends its planners.
            start_new_session=True,
        )


@dataclass(eq=False, slots=True, kw_only=True)
class _Turn:
    """Question in the pool."""

    caller: str
    granted: asyncio.Future[Planner] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    planner: Planner | None = None
    """Planner of the question, once it is its turn."""
    timer: asyncio.TimerHandle | None = None
    is_hard: bool = False
    """Whether it took longer than EASY_S."""
    is_very_hard: bool = False
    """Whether it took longer than OWN_S."""
    is_given_up: bool = False
    """Whether it was ended because others wait."""

    def refuse(self, reason: str) -> None:
        """Stop waiting, with Problem UNAVAILABLE."""
        if not self.granted.done():
            self.granted.set_exception(_busy(reason))


class _Lane:
    """Slots for questions planned at the same time, and their queue."""

    def __init__(self, width: int) -> None:
        self._width = width
        self.planned: list[_Turn] = []
        """Oldest first."""
        self.waiting: Turns[_Turn] = Turns()

    @property
    def room(self) -> int:
        """Number of free slots."""
        return self._width - len(self.planned)

    @property
    def startable(self) -> int:
        """Number of queued questions with a free slot."""
        return min(self.room, len(self.waiting))

    def leave(self, turn: _Turn) -> None:
        """Remove a question from slots and queue."""
        self.waiting.drop(turn.caller, turn)
        if turn in self.planned:
            self.planned.remove(turn)


class PlannerPool:
    """Planners of a server: `Settings.planners` for all questions, and as many again for hard ones."""

    def __init__(self, settings: Settings) -> None:
        width = max(1, settings.planners)
        self._planning_s = settings.limits.planning_s
        # One more, which starts while the others work.
        self._planners = [Planner(settings) for _ in range(2 * width + 1)]
        self._cold = list(self._planners)
        """Planners without a process."""
        self._ready: list[Planner] = []
        """Planners with a free process."""
        self._starting: set[asyncio.Task[None]] = set()
        self._easy, self._hard = _Lane(width), _Lane(width)
        self._most_waiting = _MOST_WAITING * width
        self._is_closed = False

    @asynccontextmanager
    async def planner(self, caller: str = "", *, is_hard: bool = False) -> AsyncIterator[Planner]:
        """Wait for a planner for one question, which has the time limit of the settings.

        Pass `is_hard` after a HardError; then none is raised. Raises Problem: UNAVAILABLE if too many wait or the
        planner dies, TOO_LONG after the time limit.
        """
        turn = _Turn(caller=caller)
        try:
            planner = await self._wait(turn, self._hard if is_hard else self._easy)
            async with self._limited(turn, planner):
                yield planner
        finally:
            self._leave(turn)

    def warm_up(self) -> None:
        """Start a process for the first question; that question waits for it at most for what is left of its start."""
        if not (self._ready or self._starting):
            self._start()

    @property
    def pids(self) -> list[int]:
        """Ids of all processes."""
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
        except HttpProblem:
            whole = True
            raise
        except TimeoutError:
            raise HttpProblem(
                TOO_LONG,
                f"no plan was found within {self._planning_s:g} s, the limit here; ask without frontier=true, give "
                "fewer instance_types or stages, or lower max_instances or the number of trials",
            ) from None
        except _ProcessEndedError:
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
        """Refuse a question of the caller with most questions."""
        displaced = self._easy.waiting.displace(caller)
        reason = f"{self._most_waiting} previews are queued already"
        if displaced is None:
            raise _busy(reason)
        displaced.refuse(reason)

    def _leave(self, turn: _Turn) -> None:
        """Free the slot and the planner of a question."""
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
        """Give planners to queued questions, and start missing ones."""
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
        if not turn.granted.done():  # a caller that left at this moment gives it back
            turn.granted.set_result(turn.planner)

    def _start(self) -> None:
        """Start a process. Turns are decided when it is ready."""
        starting = asyncio.create_task(self._started(self._cold.pop()))
        self._starting.add(starting)
        starting.add_done_callback(self._over)

    async def _started(self, planner: Planner) -> None:
        try:
            async with asyncio.timeout(_START_S):
                await planner.start()
        except (_ProcessEndedError, TimeoutError):
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


def _busy(reason: str) -> HttpProblem:
    return HttpProblem(UNAVAILABLE, f"{reason}; ask again in a few seconds", headers={"Retry-After": "2"})
