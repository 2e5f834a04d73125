"""The whole REST surface, asked what its own OpenAPI document leads a stranger to ask, and much that it forbids.

No answer is a failure of the service; every answer is one that the document tells; what does not fit is refused; and
nothing is told to who has no token.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.builders.api_fuzzing import Findings, fuzz, fuzzed_service


def require_sound(found: Findings) -> None:
    """Print how many requests there were, and fail with the first few that were answered wrongly."""
    print(f"\nschemathesis: {found.num_requests} requests, {dict(sorted(found.statuses.items()))}")
    assert not found.failures, f"{len(found.failures)} failures:\n" + "\n\n".join(found.failures[:5])
    assert not [status for status in found.statuses if status >= 500]


PHASES = {"coverage": (0, 4_000), "fuzzing": (450, 7_000), "stateful": (120, 600)}
"""Phase -> examples of each operation, and how many requests it then makes at least."""


@pytest.mark.long
def test_more_than_a_hundred_requests(tmp_path: Path) -> None:
    with fuzzed_service(tmp_path) as (address, token):
        found = fuzz(address, token, max_examples=6, phases=("examples", "fuzzing"))
    require_sound(found)
    assert found.num_requests >= 120


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
