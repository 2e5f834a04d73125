"""Plan previews: each question is planned once, in a process of its own, and its answer is cached."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from rubberband.api.body import JSON_TYPE, require_json
from rubberband.api.plans.pool import HardError, Planner, PlannerPool
from rubberband.api.plans.process import RestAnswer, RestQuestion, option_id, read_answer
from rubberband.api.problems import INTERNAL, NOT_FOUND, PROVIDER, TOO_LONG, UNAVAILABLE, HttpProblem
from rubberband.api.settings import MIB, Settings
from rubberband.api.store import Store
from rubberband.api.store.schema import StoredPlan
from rubberband.errors import RubberbandError
from rubberband.spec.experiment import Experiment
from rubberband.values.plan import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAnswer:
    """Answer to a preview, ready to be sent."""

    id: str
    status: int
    """200; 422 where no plan meets the constraints."""
    body: bytes
    """`rubberband.estimate/1` as JSON, or a problem that carries it."""
    words: Mapping[str, Any] = field(default_factory=dict)
    """The experiment that was planned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRequest:
    """Known meaning of a request: the id of its question, or its problem."""

    meaning: str | HttpProblem
    until: float | None = None
    """Unix time; None: unlimited."""


class Memory:
    """Cache of answers by id, and of the ids of requests. The least recently used are dropped first."""

    def __init__(self, most_bytes: int, most_requests: int) -> None:
        self._most_bytes, self._most_requests = most_bytes, most_requests
        self._requests: OrderedDict[Hashable, KnownRequest] = OrderedDict()
        self._answers: OrderedDict[str, PlanAnswer] = OrderedDict()
        self._bytes = 0

    def recall(self, request: Hashable, now: float) -> PlanAnswer | HttpProblem | None:
        """Return the answer to a request, if it is still valid at `now` (Unix time)."""
        known = self._requests.get(request)
        if known is None:
            return None
        if known.until is not None and known.until <= now:
            del self._requests[request]
            return None
        self._requests.move_to_end(request)
        return known.meaning if isinstance(known.meaning, HttpProblem) else self.answer(known.meaning)

    def answer(self, id: str) -> PlanAnswer | None:
        """Return the answer with this id."""
        found = self._answers.get(id)
        if found is not None:
            self._answers.move_to_end(id)
        return found

    def keep_answer(self, answer: PlanAnswer) -> None:
        """Store an answer, unless it alone is too large."""
        before = self._answers.pop(answer.id, None)
        self._bytes -= 0 if before is None else len(before.body)
        if len(answer.body) > self._most_bytes:
            return
        self._answers[answer.id] = answer
        self._bytes += len(answer.body)
        while self._bytes > self._most_bytes:
            _, oldest = self._answers.popitem(last=False)
            self._bytes -= len(oldest.body)

    def keep_request(self, request: Hashable, known: KnownRequest) -> None:
        """Store the meaning of a request."""
        self._requests[request] = known
        self._requests.move_to_end(request)
        if len(self._requests) > self._most_requests:
            self._requests.popitem(last=False)


_PASSING = (TOO_LONG, UNAVAILABLE, INTERNAL, PROVIDER)
"""Problems that may not recur; they are not cached."""
_MOST_BYTES = 64 * MIB
_MOST_REQUESTS = 50_000
_MOST_UNKEPT = 1000
"""Answers waiting to be stored; beyond that, the oldest are dropped."""
_KEEP_EVERY_S = 0.1
"""Answers are stored in batches at this interval; single writes would double the server's load."""
_log = logging.getLogger(__name__)


class PreviewOptions(BaseModel):
    """How a plan is searched for: the query of a preview."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True, frozen=True)

    policy: Policy = Field("optimal", description="The plans to search: all of them, or those of a baseline.")
    frontier: bool = Field(False, description="Include the whole frontier of cost against deadline; this takes longer.")
    size: bool = Field(
        False,
        description="Size the search to the limits first. A search whose num_samples or max_t is auto is always sized.",
    )
    seed: int = Field(0, ge=0, le=2**63 - 1, description="Seed of the samples, where times vary.")
    overrides: list[str] = Field(
        [],
        alias="set",
        max_length=100,
        description="KEY=VALUE replaces a value of the body, as `-s` on the command line; repeats.",
        examples=[["constraints.deadline=30m"]],
    )


OPTIONS = PreviewOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """Question in a request: the body of an experiment that would start now, and options."""

    body: bytes
    media_type: str = JSON_TYPE
    options: PreviewOptions = OPTIONS
    beside: tuple[str, str, float] | None = None
    """Plan, scheduler and Unix time of the plan, where the row of another scheduler beside it is asked for."""


@dataclass(slots=True)
class _Asked:
    """Request being answered, for all its senders."""

    task: asyncio.Task[PlanAnswer] = field(init=False)
    waiting: int = 0
    begun: bool = False
    """Whether a process plans it."""


class Plans:
    """Previews plans. The same question has the same answer and id."""

    def __init__(self, settings: Settings, store: Store) -> None:
        self._settings, self._store = settings, store
        self.alive = False
        """Whether it was started and not closed."""
        self._memory = Memory(_MOST_BYTES, _MOST_REQUESTS)
        self._pool = PlannerPool(settings)
        self._asked: dict[bytes, _Asked] = {}
        self._planning: dict[str, asyncio.Future[PlanAnswer]] = {}
        self._unkept: dict[str, StoredPlan] = {}
        self._keeper: asyncio.Task[None] | None = None
        self._kept: dict[str, None] = {}
        """Ids of answers that may be in the store, the latest last; other questions need no lookup."""

    async def start(self) -> None:
        """Get ready. The first planning process starts with the first question, or by `warm_up`."""
        self._kept = dict.fromkeys(await asyncio.to_thread(self._store.plan_ids))
        self.alive = True

    def warm_up(self) -> None:
        """Start a planning process, whose imports take a second, before the first question."""
        self._pool.warm_up()

    async def close(self) -> None:
        """End the planning processes, give up their questions, and store all answers."""
        self.alive = False
        tasks = [asked.task for asked in self._asked.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._pool.close()
        await self.keep()

    async def keep(self) -> None:
        """Wait until all present answers are stored; others may be answered all the time."""
        present = list(self._unkept.values())
        while self._keeper is not None and any(self._unkept.get(plan.id) is plan for plan in present):
            done, _ = await asyncio.wait([self._keeper], timeout=_KEEP_EVERY_S)
            if done:
                return

    @property
    def pids(self) -> list[int]:
        """Ids of the planning processes."""
        return self._pool.pids

    async def preview(
        self, experiment: Experiment, options: PreviewOptions = OPTIONS, *, caller: str = ""
    ) -> PlanAnswer:
        """Plan an experiment that would start now; its `overrides` are applied already. Raises Problem."""
        words = experiment.given_words()
        options = options.model_copy(update={"overrides": []})
        preview = Preview(body=json.dumps(words).encode(), options=options)
        return await self.answer(preview, fingerprint(preview.body, options.model_dump_json().encode()), caller)

    async def rest(self, question: RestQuestion, caller: str = "") -> RestAnswer:
        """Preview other limits for an experiment. Callers take turns. Raises Problem."""
        planning_s, is_hard = self._settings.limits.planning_s, False
        asked = {"rest": asdict(question), "planning_s": planning_s}
        while True:
            try:
                async with self._pool.planner(caller, is_hard=is_hard) as planner:
                    return read_answer(await planner.rest(asked))
            except HardError:
                is_hard = True
            except HttpProblem as problem:
                if problem.kind is not TOO_LONG:
                    raise
                by_hand = f"`rubberband extend {question.name}` on the machine where it runs may take longer"
                raise HttpProblem(
                    TOO_LONG,
                    f"the outlook for these limits was not known within {planning_s:g} s, the limit here; {by_hand}",
                ) from None

    def recall(self, fingerprint: bytes) -> PlanAnswer | None:
        """Return the cached answer to a request, if any. Raises its cached Problem."""
        found = self._memory.recall(fingerprint, self._settings.clock())
        if isinstance(found, HttpProblem):
            raise again(found)
        return found

    async def answer(self, preview: Preview, fingerprint: bytes, caller: str = "") -> PlanAnswer:
        """Answer a request, which `fingerprint` identifies. Callers take turns. Raises Problem."""
        known = self.recall(fingerprint)
        if known is not None:
            return known
        asked = self._asked.get(fingerprint)
        if asked is None:
            require_json(preview.body, preview.media_type)
            asked = self._asked[fingerprint] = _Asked()
            asked.task = asyncio.create_task(self._ask(preview, fingerprint, asked, caller))
            asked.task.add_done_callback(lambda done: self._forget(fingerprint, done))
        asked.waiting += 1
        try:
            return await asyncio.shield(asked.task)
        except HttpProblem as problem:
            raise again(problem) from None
        finally:
            asked.waiting -= 1
            # A question that was begun is finished for the cache.
            if not (asked.waiting or asked.begun):
                asked.task.cancel()
                self._asked.pop(fingerprint, None)

    async def find(self, id: str) -> PlanAnswer | None:
        """Return the answer with this id; None if there is none, or it expired."""
        known = self._memory.answer(id)
        return known if known is not None else await self._stored(id)

    async def option(self, id: str, scheduler: str, caller: str = "") -> PlanAnswer | None:
        """Return the row of another scheduler beside a plan; None where no plan has this id. Raises Problem."""
        known = self._memory.answer(option_id(id, scheduler))
        plan = None if known is not None else await self._stored_plan(id)
        if known is not None or plan is None:
            return known
        options = dict(plan.options)
        now = options.pop("now", plan.created_at)
        body = json.dumps(plan.words).encode()
        preview = Preview(body=body, options=PreviewOptions(**options), beside=(id, scheduler, now))
        return await self.answer(preview, fingerprint(id.encode(), scheduler.encode()), caller)

    def _forget(self, fingerprint: bytes, done: asyncio.Task[PlanAnswer]) -> None:
        if fingerprint in self._asked and self._asked[fingerprint].task is done:
            del self._asked[fingerprint]
        if not done.cancelled():
            done.exception()

    async def _ask(self, preview: Preview, fingerprint: bytes, request: _Asked, caller: str) -> PlanAnswer:
        is_hard = False
        while True:
            try:
                return await self._ask_once(preview, fingerprint, request, caller, is_hard=is_hard)
            except HardError:
                is_hard, request.begun = True, False
                if not request.waiting:
                    raise HttpProblem(
                        UNAVAILABLE, "the preview was cancelled because its caller left; ask again"
                    ) from None

    async def _ask_once(
        self, preview: Preview, fingerprint: bytes, request: _Asked, caller: str, *, is_hard: bool
    ) -> PlanAnswer:
        now = float(int(self._settings.clock())) if preview.beside is None else preview.beside[2]
        until, identified = None, False
        try:
            async with self._pool.planner(caller, is_hard=is_hard) as planner:
                request.begun = True
                asked = await planner.ask(self._question(preview, now))
                identified, until = True, None if asked["good_s"] is None else now + asked["good_s"]
                answer = await self._planned(planner, _identified(planner, asked["id"], preview), preview, now)
            answer = answer if isinstance(answer, PlanAnswer) else await asyncio.shield(answer)
        except HttpProblem as problem:
            # Where instances are rented, parsing may ask AWS, which may answer differently the next time.
            if problem.kind not in _PASSING and (identified or not self._settings.rents):
                self._memory.keep_request(fingerprint, KnownRequest(meaning=again(problem), until=until))
            raise
        self._memory.keep_request(fingerprint, KnownRequest(meaning=answer.id, until=until))
        return answer

    def _question(self, preview: Preview, now: float) -> dict[str, Any]:
        return {
            "body": preview.body.decode("latin-1"),
            "media_type": preview.media_type,
            **preview.options.model_dump(),
            "option": "" if preview.beside is None else preview.beside[1],
            "most_usd": self._settings.limits.max_cost_usd,
            "now": now,
            "planning_s": self._settings.limits.planning_s,
        }

    async def _planned(
        self, planner: Planner, id: str, preview: Preview, now: float
    ) -> PlanAnswer | asyncio.Future[PlanAnswer]:
        """Return the answer to the planner's question, or the future of another planner that works on it."""
        # Another planner may begin it, or finish, during the lookup in the store.
        known = (await self.find(id) if id in self._kept else None) or self._memory.answer(id) or self._planning.get(id)
        if known is not None:
            planner.skip()
            return known
        promise = self._planning[id] = asyncio.get_running_loop().create_future()
        try:
            answer = await self._plan(planner, id, preview, now)
            promise.set_result(answer)
        except HttpProblem as problem:
            promise.set_exception(again(problem))
            promise.exception()
            raise
        finally:
            del self._planning[id]
            if not promise.done():  # given up: others that wait for it ask by themselves
                promise.set_exception(HardError())
                promise.exception()
        return answer

    async def _plan(self, planner: Planner, id: str, preview: Preview, now: float) -> PlanAnswer:
        facts, body = await planner.plan()
        answer = PlanAnswer(id=id, status=facts["status"], body=body, words=facts["words"])
        self._memory.keep_answer(answer)
        if preview.beside is not None:
            return answer
        options = preview.options.model_dump(exclude={"overrides"}) | {"now": now}
        self._keep(
            StoredPlan(
                id=id,
                created_at=self._settings.clock(),
                words=facts["words"],
                options=options,
                status=answer.status,
                body=body,
            )
        )
        return answer

    async def _stored_plan(self, id: str) -> StoredPlan | None:
        unkept = self._unkept.get(id)
        try:
            return unkept or await asyncio.to_thread(self._store.plan, id)
        except RubberbandError as error:
            _log.warning("plan %s was not looked up: %s", id, error)
            return None

    async def _stored(self, id: str) -> PlanAnswer | None:
        found = await self._stored_plan(id)
        if found is None:
            return None
        answer = PlanAnswer(id=found.id, status=found.status, body=found.body, words=found.words)
        self._memory.keep_answer(answer)
        return answer

    def _keep(self, plan: StoredPlan) -> None:
        """Store a plan in the next batch."""
        self._unkept[plan.id] = plan
        self._kept.pop(plan.id, None)
        self._kept[plan.id] = None
        if len(self._kept) > self._settings.keeping.plans:
            del self._kept[next(iter(self._kept))]
        if len(self._unkept) > _MOST_UNKEPT:
            del self._unkept[next(iter(self._unkept))]
        if self._keeper is None or self._keeper.done():
            self._keeper = asyncio.create_task(self._keep_all())

    async def _keep_all(self) -> None:
        while self._unkept:
            await asyncio.sleep(_KEEP_EVERY_S)
            plans = list(self._unkept.values())
            try:
                await asyncio.to_thread(self._store.keep_plans, plans)
            except RubberbandError as error:
                _log.warning("%d plans were not stored: %s", len(plans), error)
            for plan in plans:
                self._unkept.pop(plan.id, None)


def _identified(planner: Planner, id: str, preview: Preview) -> str:
    """Return the id of an answer. Raises Problem NOT_FOUND if the plan that a row is beside would be another today."""
    if preview.beside is None:
        return id
    plan, scheduler, _ = preview.beside
    if id != plan:
        planner.skip()
        detail = f"plan {plan} was made with other prices or start times than today's; POST /v1/plans makes a new one"
        raise HttpProblem(NOT_FOUND, detail)
    return option_id(plan, scheduler)


def fingerprint(*parts: bytes) -> bytes:
    """Return a digest of parts."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.digest()


def again(problem: HttpProblem) -> HttpProblem:
    """Return a copy of a problem without its traceback, to be raised again."""
    return HttpProblem(problem.kind, problem.detail, headers=problem.headers, **problem.extensions)
