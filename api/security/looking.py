"""Finding out who shows what, for all that ask meanwhile in one look: the store has one at a time, however many ask.

So a flood of wrong tokens costs the store no more than one after the other, and a right one waits for two looks at
most, whoever else asks from its address.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Set
from itertools import islice

from rubberband.api.security.tokens import Credential, Tokens
from rubberband.api.store.records import Principal
from rubberband.errors import JournalError

AT_ONCE = 500
"""Credentials in one look; databases take some thousand values in a query."""

log = logging.getLogger("rubberband.server")


class Looks:
    """Looks credentials up. For one event loop."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._asked: dict[Credential, asyncio.Future[Principal | None]] = {}
        """What the next look is for: what is asked while one is under way may have changed since that one read."""
        self._looking: asyncio.Task[None] | None = None
        self._noting: asyncio.Task[None] | None = None

    async def who(self, credential: Credential) -> Principal | None:
        """Who shows this; None if nobody may by it. Raises JournalError if the store cannot be read."""
        known = self._tokens.recall(credential)
        if known is not None:
            return known
        if credential not in self._asked:
            self._asked[credential] = asyncio.get_running_loop().create_future()
        answer = self._asked[credential]
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        return await asyncio.shield(answer)

    async def _look(self) -> None:
        while self._asked:
            asked = dict(islice(self._asked.items(), AT_ONCE))
            for credential in asked:
                del self._asked[credential]
            try:
                found = await self._found(asked.keys())
            except Exception as error:
                for answer in asked.values():
                    answer.set_exception(error)
                    answer.exception()  # who asked may have left
            except asyncio.CancelledError:
                for answer in asked.values():
                    answer.cancel()
                raise
            else:
                for credential, answer in asked.items():
                    answer.set_result(found.get(credential))

    async def _found(self, asked: Set[Credential]) -> Mapping[Credential, Principal]:
        """Who shows these, but for what the look before has found out."""
        known = {one: principal for one in asked if (principal := self._tokens.recall(one)) is not None}
        if len(known) == len(asked):
            return known
        found = await asyncio.to_thread(self._tokens.look_up, asked - known.keys())
        if found and (self._noting is None or self._noting.done()):
            self._noting = asyncio.create_task(self._note(list(found)))
        return {**known, **found}

    async def _note(self, found: list[Credential]) -> None:
        """Write down that they were used: nobody waits for it."""
        try:
            await asyncio.to_thread(self._tokens.note_use, found)
        except JournalError as error:
            log.debug("when tokens were used is not noted: %s", error)
