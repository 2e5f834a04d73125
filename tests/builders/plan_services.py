"""The plans of a service, in this process, and questions to them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from rubberband.api.plans.previews import Plans, Preview, fingerprint
from rubberband.api.settings import Settings
from rubberband.api.store import open_store
from tests.builders.experiment_words import words


def served(home: Path, act: Callable[[Plans], Awaitable[None]], **settings: Any) -> None:
    """Act on the plans of a service in `home`."""

    async def run() -> None:
        store = open_store(None, home)
        plans = Plans(Settings(home=home, **settings), store)
        await plans.start()
        try:
            await act(plans)
        finally:
            await plans.close()
            store.close()

    asyncio.run(run())


def preview(**changes: Any) -> Preview:
    return Preview(body=json.dumps(words(**changes)).encode())


def of(asked: Preview) -> bytes:
    return fingerprint(asked.body)
