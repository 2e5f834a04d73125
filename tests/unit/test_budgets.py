"""The cap of a month: a plan that it does not cover is refused with what would do, in a preview and a submission."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubberband.api.experiments.budgets import Budgets
from rubberband.api.experiments.extending import Extensions, Wanted
from rubberband.api.plans.process import RestAnswer, RestQuestion, with_limits
from rubberband.api.problems import HttpProblem
from rubberband.api.settings import SharedPool
from rubberband.api.store.schema import Promise
from rubberband.client.calls import raise_for
from rubberband.errors import InfeasibleError
from rubberband.planning.month_cap import Expense, MonthCap
from rubberband.spec.pool import PoolFile
from rubberband.states import ExperimentState
from rubberband.units import month_end
from rubberband.values.submission import Summary
from tests.builders.fake_runs import FakeService, fake_service, spent, words
from tests.builders.pools import broker, lending_pool

POOL = SharedPool(name="team", provider="virtual", instances=4, gpus_per_instance=1, max_usd_per_month=0.5)
CALM = {"constraints__deadline": "20m"}
"""0.24 USD."""
DEC, JAN = (datetime(2026, 12, 1, tzinfo=UTC).timestamp(), datetime(2027, 1, 1, tzinfo=UTC).timestamp())


@pytest.fixture
def service(tmp_path: Path) -> Iterator[FakeService]:
    with fake_service(tmp_path, pool=POOL) as made:
        yield made


def submit(service: FakeService, name: str, **changes: Any) -> Any:
    return service.client.post("/v1/experiments", json=words(name=name, **changes))


def test_a_plan_that_the_months_cap_does_not_cover_is_refused_before_and_at_its_submission(
    service: FakeService,
) -> None:
    assert submit(service, "one", **CALM).status_code == 201
    assert submit(service, "two", **CALM).status_code == 201
    refused = submit(service, "three", **CALM)
    assert refused.status_code == 422
    problem, preview = refused.json(), service.client.post("/v1/plans", json=words(name="three", **CALM))
    assert (preview.status_code, preview.json()["detail"]) == (422, problem["detail"])
    now = service.clock()
    month, after = f"{datetime.fromtimestamp(now, UTC):%B %Y}", datetime.fromtimestamp(month_end(now), UTC)
    assert problem["detail"] == (
        f"pool team's max_usd_per_month: 0.48 USD of 0.50 USD are spent or planned in {month}, 0.0200 USD are left, "
        f"and this plan costs 0.24 USD; submit it from {after:%Y-%m-%dT%H:%M:%SZ} on, or make the search smaller"
    )
    assert problem["type"] == "/problems/infeasible"
    assert problem["left_usd"] == pytest.approx(0.02)
    assert problem["estimate"]["feasible"]
    with pytest.raises(InfeasibleError, match="are left, and this plan costs"):
        raise_for(httpx.Response(422, json=problem))
    service.store.change("one", at=now, state=ExperimentState.DONE, reason="")
    assert submit(service, "three", **CALM).status_code == 201, "the first one cost nothing"


def test_the_budget_that_would_do_is_named_and_does(service: FakeService) -> None:
    fast = {"constraints__deadline": "30m", "constraints__objective": "min_time", "resources__minimum_billed": "60s"}
    assert submit(service, "one", **CALM).status_code == 201
    problem = submit(service, "two", **fast).json()
    assert re.search(
        r"set constraints\.max_cost=0\.2\d \(that plan takes \d+m\S*, and costs 0\.2\d USD\), or submit",
        problem["detail"],
    )
    (remedy,) = problem["remedies"]
    (change,) = remedy["changes"]
    assert change["key"] == "constraints.max_cost"
    with pytest.raises(InfeasibleError) as refused:
        raise_for(httpx.Response(422, json=problem))
    assert refused.value.remedies[0].changes[0].setting == f"constraints.max_cost={change['value']}"
    made = submit(service, "two", constraints__max_cost=change["value"], **fast)
    assert made.status_code == 201, made.json()


def test_an_experiment_without_a_deadline_counts_too(service: FakeService) -> None:
    free = {"constraints": {"max_cost": 1}}
    assert submit(service, "one", **free).status_code == 201
    assert submit(service, "two", **free).status_code == 201
    assert "spent or planned" in submit(service, "three", **free).json()["detail"]
    less = spent(0.01, service.clock(), forecast_cost_usd=0.02)
    service.store.change("one", at=service.clock(), state=ExperimentState.RUNNING, summary=less)
    assert submit(service, "three", **free).status_code == 422, "it counts with what it was admitted for until it ends"
    service.store.change("one", at=service.clock(), state=ExperimentState.DONE)
    assert submit(service, "three", **free).status_code == 201
    more = Summary(forecast_cost_usd=0.4)
    service.store.change("two", at=service.clock(), state=ExperimentState.RUNNING, summary=more)
    used_usd = Budgets(POOL, service.store).used_usd("", service.clock())
    assert used_usd == pytest.approx(0.01 + 0.4 + 0.24), "a forecast counts where it is more"


def test_a_plan_above_the_whole_cap_has_no_month_that_would_do(tmp_path: Path) -> None:
    with fake_service(tmp_path, pool=replace(POOL, max_usd_per_month=0.1)) as service:
        problem = submit(service, "one", **CALM).json()
    assert problem["detail"].endswith("this plan costs 0.24 USD; make the search smaller, or raise the cap")
    assert "start_at" not in problem


def test_the_pools_own_bill_of_the_month_counts(tmp_path: Path) -> None:
    pool = lending_pool()
    with broker(pool, PoolFile(name="team", instances=1, gpus_per_instance=2), tmp_path) as folder:
        shared = replace(POOL, folder=str(folder.path))
        with fake_service(tmp_path) as service:
            assert Budgets(shared, service.store).bill_usd() == pytest.approx(pool.state.month_usd(pool.now()))


def test_a_cost_counts_wholly_in_each_month_in_which_it_is_paid() -> None:
    across = Expense(cost_usd=8.0, start_at=JAN - 1000.0, duration_s=5000.0)
    assert across.months(DEC) == [DEC, JAN]
    assert across.months(JAN + 5.0) == [JAN], "what was spent before is spent"
    assert across.months(JAN + 1e6) == [JAN]
    assert replace(across, duration_s=1000.0).months(DEC) == [DEC], "it ends as the month does"
    assert replace(across, start_at=JAN, duration_s=0.0).months(DEC) == [JAN]


def test_a_month_that_ends_during_an_experiment_pays_for_it_and_so_does_the_next(service: FakeService) -> None:
    row = service.add("one", words={"resources": {"provider": "virtual"}}, state=ExperimentState.DONE)
    promised = replace(row, name="two", state=ExperimentState.RUNNING, admitted_usd=0.45)
    promise = Promise(experiment="two", start_at=JAN - 300.0, spans=[(1, 600.0)])
    assert service.store.add(promised, promise)
    budgets = Budgets(POOL, service.store)
    assert budgets.committed_usd(DEC, bill_usd=None) == {DEC: pytest.approx(0.45), JAN: pytest.approx(0.45)}
    fits = Expense(cost_usd=0.04, start_at=DEC, duration_s=60.0)
    assert budgets.shortage(fits, DEC, bill_usd=None) is None
    short = budgets.shortage(Expense(cost_usd=0.2, start_at=JAN - 60.0, duration_s=240.0), DEC, bill_usd=None)
    assert short is not None
    assert (short.month, short.left_usd) == (DEC, pytest.approx(0.05))
    assert short.next_at == month_end(JAN)


def test_an_expense_that_ends_before_the_month_does_counts_in_no_other_one(service: FakeService) -> None:
    summary = Summary(cost_usd=0.2, forecast_cost_usd=0.3, jct_s=3000.0, forecast_jct_s=3600.0)
    words = {"resources": {"provider": "virtual"}}
    service.add("nearly-done", words=words, summary=summary, created_at=DEC, state=ExperimentState.RUNNING)
    for before_s, months in ((601.0, [DEC]), (599.0, [DEC, JAN])):
        assert list(Budgets(POOL, service.store).committed_usd(JAN - before_s, bill_usd=None)) == months


def test_an_experiment_counts_what_it_has_cost_will_cost_or_is_promised_and_only_on_its_pool(
    service: FakeService,
) -> None:
    mine, elsewhere = ({"resources": {"provider": provider}} for provider in ("virtual", "aws"))
    service.add("dearer-than-forecast", words=mine, summary=spent(0.3, DEC, forecast_cost_usd=0.2), created_at=DEC)
    service.add("elsewhere", words=elsewhere, summary=spent(7.0, DEC), created_at=DEC)
    row = service.add("earlier", words=mine, summary=spent(3.0, DEC - 1.0), created_at=DEC - 1.0)
    service.store.change("earlier", at=DEC, state=ExperimentState.DONE)
    resumes = replace(
        row, name="resumes", state=ExperimentState.INTERRUPTED, created_at=DEC, summary=Summary(), admitted_usd=0.04
    )
    assert service.store.add(resumes, Promise(experiment="resumes", start_at=DEC, spans=[(1, 60.0)]))
    budgets = Budgets(POOL, service.store)
    assert budgets.committed_usd(DEC, bill_usd=None) == {DEC: pytest.approx(0.34)}
    assert budgets.used_usd("", DEC) == pytest.approx(7.34), "a token's budget is for all pools, and for this month"


@given(st.lists(st.integers(1, 10**6), min_size=2, max_size=5))
def test_an_expense_of_just_what_is_left_fits_and_one_of_a_cent_more_does_not(cents: list[int]) -> None:
    *used, cost_usd = (each / 100.0 for each in cents)
    cap = MonthCap(title="a cap", cap_usd=sum(cents) / 100.0, committed_usd={DEC: sum(used)})
    expense = Expense(cost_usd=cost_usd, start_at=DEC, duration_s=60.0)
    assert cap.shortage(expense, DEC) is None
    assert cap.shortage(replace(expense, cost_usd=cost_usd + 0.01), DEC) is not None


def test_a_refusal_names_the_month_in_which_least_is_left_and_the_next_one_with_room_for_all() -> None:
    later = month_end(JAN)
    committed = {DEC: 0.4, JAN: 0.45, later: 0.2}
    cap = MonthCap(title="a cap", cap_usd=0.5, committed_usd=committed)
    short = cap.shortage(Expense(cost_usd=0.4, start_at=JAN - 60.0, duration_s=120.0), DEC)
    assert short is not None
    assert (short.month, short.left_usd) == (JAN, pytest.approx(0.05))
    at_once = cap.shortage(Expense(cost_usd=0.25, start_at=DEC, duration_s=60.0), DEC)
    assert at_once is not None
    assert (at_once.month, at_once.next_at) == (DEC, later), "January has no room for all of it"


def test_an_extension_that_the_cap_or_a_budget_does_not_cover_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, dear = replace(POOL, budgets_usd={"": 0.45}), {"max_cost": 0.6}
    quick = {"constraints__objective": "min_time", "constraints__max_cost": 0.3, "resources__minimum_billed": "60s"}
    with fake_service(tmp_path, pool=pool) as service:
        granted: list[str] = []

        def question(name: str, wanted: Wanted, *, request: str = "") -> RestQuestion:
            row = service.store.submission(name)
            assert row is not None
            other = with_limits(row.words, None, wanted.max_cost_usd)
            return RestQuestion(name=name, now=service.clock(), words=dict(row.words), other=other)

        def grant(_asked: RestQuestion, answer: RestAnswer, request: str) -> Any:
            granted.append(request)
            return answer.extension

        def extend(name: str, **limits: Any) -> Any:
            return service.client.post(f"/v1/experiments/{name}/extend", json=limits)

        unused: Any = None
        settings: Any = SimpleNamespace(clock=service.clock)
        assert service.runs.admission is not None
        extensions = Extensions(settings, service.store, unused, unused, service.runs.admission.budgets)
        monkeypatch.setattr(extensions, "question", question)
        monkeypatch.setattr(extensions, "grant", grant)
        monkeypatch.setattr(type(service.runs), "extensions", extensions)
        first = submit(service, "one", constraints__deadline="40m", **quick)
        assert first.status_code == 201, first.json()
        assert extend("one", **dear, dry_run=False).json()["added_usd"] > 0.03
        assert len(granted) == 1

        mine = service.store.submission("one")
        assert mine is not None
        other = replace(
            mine,
            name="other",
            request="",
            owner="someone",
            state=ExperimentState.DONE,
            summary=spent(0.3, service.clock()),
        )
        assert service.store.add(other)
        for dry_run in (True, False):
            refused = extend("one", **dear, dry_run=dry_run)
            assert refused.status_code == 422
            assert re.search(
                r"pool team's max_usd_per_month: .* are left, and the extension costs .*; extend it by less, or raise",
                refused.json()["detail"],
            )
        assert len(granted) == 1

        row = replace(mine, name="mine", request="", state=ExperimentState.DONE, summary=spent(0.2, service.clock()))
        assert service.store.add(row)
        budget = extend("one", **dear).json()["detail"]
        assert re.search(r"budget of : .*, and the extension costs .*; extend it by less, or next month", budget)


@pytest.mark.parametrize(
    ("start_at", "cost_usd", "used"),
    [
        (DEC, 0.35, r"0\.10 USD of 0\.40 USD .* in December 2026"),
        (JAN, 0.2, r"0\.25 USD of 0\.40 USD .* in January 2027"),
    ],
)
def test_the_amount_in_a_refusal_is_that_of_the_month_that_it_names(
    service: FakeService, start_at: float, cost_usd: float, used: str
) -> None:
    row = service.add("spent", summary=spent(0.1, DEC), created_at=DEC)
    service.store.change("spent", at=DEC, state=ExperimentState.DONE)
    later = replace(row, name="later", state=ExperimentState.RUNNING, summary=Summary(), admitted_usd=0.25)
    assert service.store.add(later, Promise(experiment="later", start_at=JAN + 60.0, spans=[(1, 60.0)]))
    expense = Expense(cost_usd=cost_usd, start_at=start_at, duration_s=60.0)
    with pytest.raises(HttpProblem, match=used):
        Budgets(replace(POOL, budgets_usd={"": 0.4}), service.store).require_budget("", expense, DEC)


def test_no_month_is_named_for_what_is_more_than_a_whole_budget(service: FakeService) -> None:
    pool = replace(POOL, budgets_usd={"": 0.3})
    now = service.clock()
    expense = Expense(cost_usd=0.4, start_at=now, duration_s=0.0)
    with pytest.raises(HttpProblem, match=r"costs 0\.40 USD; submit a cheaper one, or ask the operator for a larger"):
        Budgets(pool, service.store).require_budget("", expense, now)
