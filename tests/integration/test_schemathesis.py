"""The whole REST surface, asked what its own OpenAPI document leads a stranger to ask, and much that it forbids.

No answer is a failure of the service; every answer is one that the document tells; what does not fit is refused; and
nothing is told to who has no token.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from schemathesis.config import SchemathesisConfig
from schemathesis.engine import events, from_schema

from rubberband.api.app import create_app
from rubberband.api.routes import NAME_PATTERN
from rubberband.api.security import Tokens
from rubberband.api.settings import ServiceLimits, Settings
from rubberband.api.store import open_store
from rubberband.executor import ExperimentFolder
from rubberband.running.run import run_experiment
from tests.builders.browser import served
from tests.builders.service_runs import cut_off, experiment

LIMITS = ServiceLimits(requests_per_s=1e6, burst=1_000_000, concurrent=1000, planning_s=5.0, max_running=1)
REFUSALS = [400, 401, 403, 404, 405, 409, 413, 415, 422]
"""How what does not fit is answered; a failure of the service is no refusal."""


DONE, CUT_OFF = "digits-sha", "stopped"
"""Experiments that are there from the start; the document's examples name the first."""


@dataclass(kw_only=True)
class Findings:
    """What came of all requests."""

    statuses: Counter[int] = field(default_factory=Counter)
    by_operation: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    @property
    def num_requests(self) -> int:
        """How many were answered."""
        return self.statuses.total()


@contextmanager
def fuzzed_service(home: Path) -> Iterator[tuple[str, str]]:
    """The address of a whole service that asks for tokens, and a token that may do everything.

    It has an experiment that is done, and one whose driver died. Its streams of events end at once, since a stream that
    goes on is never answered whole.
    """
    for name in (DONE, CUT_OFF):
        run_experiment(experiment(name), ExperimentFolder(home=home, name=name))
    cut_off(ExperimentFolder(home=home, name=CUT_OFF).journal, at=30)
    store = open_store(None, home)
    _, token = Tokens(store).create("fuzz", "admin", lasts_s=None)
    app = create_app(Settings(home=home, auth=True, providers=("virtual",), limits=LIMITS), store=store)
    with served(app) as address:
        httpx.get(f"{address}/healthz", timeout=60.0).raise_for_status()
        app.state.service.feed.close()
        yield address, token


def fuzz(address: str, token: str, *, max_examples: int, phases: tuple[str, ...], seed: int = 0) -> Findings:
    """Send the requests that schemathesis generates, and return what it found."""
    phase = {name: {"enabled": name in phases} for name in ("examples", "coverage", "fuzzing", "stateful")}
    config = SchemathesisConfig.from_dict(
        {
            "seed": seed,
            "headers": {"Authorization": f"Bearer {token}"},
            "generation": {"max-examples": max_examples, "database": "none", "no-shrink": True},
            "phases": phase,
            "checks": {
                # What fits the schema may still be refused: a name that is taken, a plan that is infeasible.
                "positive_data_acceptance": {"enabled": False},
                "negative_data_rejection": {"expected-statuses": REFUSALS},
            },
        }
    )
    schema = schemathesis.openapi.from_url(
        f"{address}/openapi.json", config=config, headers={"Authorization": f"Bearer {token}"}
    )
    if phases == ("fuzzing",):
        schema.hook("map_path_parameters")(_name_what_there_is)
    found = Findings()
    for event in from_schema(schema).execute():
        _note(event, found)
    return found


def _name_what_there_is(_context: object, parameters: dict[str, Any] | None) -> dict[str, Any] | None:
    """Ask for an experiment that is there, two times of three: of names that are made up none is."""
    name = (parameters or {}).get("name")
    if not isinstance(name, str) or not re.fullmatch(NAME_PATTERN, name, re.ASCII):
        return parameters
    return {**(parameters or {}), "name": (DONE, CUT_OFF, name)[zlib.crc32(name.encode()) % 3]}


def _note(event: Any, found: Findings) -> None:
    if isinstance(event, events.NonFatalError | events.FatalError):
        found.failures.append(str(getattr(event, "value", None) or getattr(event, "exception", event)))
    if not isinstance(event, events.ScenarioFinished):
        return
    recorder = event.recorder
    for interaction in recorder.interactions.values():
        if interaction.response is not None:
            found.statuses[interaction.response.status_code] += 1
    found.by_operation[f"{event.phase.value} {recorder.label}"] += len(recorder.interactions)
    for check in (check for checks in recorder.checks.values() for check in checks if check.failure_info is not None):
        failure, sample = check.failure_info.failure, check.failure_info.code_sample
        found.failures.append(f"{recorder.label} [{check.name}] {failure.title}: {failure.message}\n{sample}")


def require_sound(found: Findings) -> None:
    """Print how many requests there were, and fail with the first few that were answered wrongly."""
    print(f"\nschemathesis: {found.num_requests} requests, {dict(sorted(found.statuses.items()))}")
    assert not found.failures, f"{len(found.failures)} failures:\n" + "\n\n".join(found.failures[:5])
    assert not [status for status in found.statuses if status >= 500]


PHASES = {"coverage": (0, 4_000), "fuzzing": (450, 7_000), "stateful": (120, 600)}
"""Phase -> examples of each operation, and how many requests it then makes at least."""


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("phase", PHASES)
def test_ten_thousand_requests(tmp_path: Path, phase: str) -> None:
    max_examples, least = PHASES[phase]
    with fuzzed_service(tmp_path) as (address, token):
        found = fuzz(address, token, max_examples=max_examples or 1, phases=(phase,))
    require_sound(found)
    assert found.num_requests >= least
    assert sum(least for _, least in PHASES.values()) >= 10_000
