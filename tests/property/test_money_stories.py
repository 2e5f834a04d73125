"""No order of submissions, cancels, resumes, extensions and restarts takes an owner above the budget of a month."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.builders.budget import examples
from tests.builders.money_stories import BUDGETS_USD, HOUR_S, world

OWNERS = st.sampled_from(list(BUDGETS_USD))
NUMBERS = st.integers(0, 100)


class Owners(RuleBasedStateMachine):
    """Three owners of one service."""

    def __init__(self) -> None:
        super().__init__()
        self._stack = ExitStack()
        home = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        self.world = self._stack.enter_context(world(home))

    @rule(
        owner=OWNERS,
        share=st.floats(0.1, 1.2),
        factor=st.floats(0.8, 1.5),
        usd_per_hour=st.floats(0.3, 3.0),
        has_profile=st.booleans(),
    )
    def submit(self, owner: str, share: float, factor: float, usd_per_hour: float, has_profile: bool) -> None:
        self.world.submit(owner, share * BUDGETS_USD[owner], factor, usd_per_hour, has_profile=has_profile)

    @precondition(lambda self: self.world.truths)
    @rule(number=NUMBERS, act=st.sampled_from(["cancel", "resume", "resume", "kill"]))
    def act(self, number: int, act: str) -> None:
        names = self.world.names()
        getattr(self.world, act)(names[number % len(names)])

    @precondition(lambda self: self.world.truths)
    @rule(number=NUMBERS, factor=st.floats(1.01, 3.0))
    def extend(self, number: int, factor: float) -> None:
        names = self.world.names()
        self.world.extend(names[number % len(names)], factor)

    @rule(hours=st.floats(0.0, 8.0))
    def wait(self, hours: float) -> None:
        self.world.pass_time(hours * HOUR_S)

    @invariant()
    def no_owner_passes_a_budget(self) -> None:
        assert self.world.passed_usd <= 1e-9

    def teardown(self) -> None:
        self.world.pass_time(24.0 * HOUR_S)
        assert self.world.passed_usd <= 1e-9
        self._stack.close()


Owners.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=12, deadline=None, suppress_health_check=list(HealthCheck)
)
test_no_order_of_requests_takes_an_owner_above_a_budget = Owners.TestCase
