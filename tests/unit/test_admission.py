"""A service with a pool promises plans beside those promised before, and says what would do where it cannot."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rubberband import cli
from rubberband.api.experiments import ExperimentRuns
from rubberband.api.experiments.admission import START_S, Admission, OvertakenError, calendar_of
from rubberband.api.experiments.sharing import Sharing
from rubberband.api.experiments.starting import AdmissionPolicy
from rubberband.api.experiments.watcher import Watcher
from rubberband.api.plans.previews import Plans, Preview
from rubberband.api.problems import HttpProblem
from rubberband.api.security import Tokens
from rubberband.api.settings import Settings, SharedPool
from rubberband.api.store import open_store
from rubberband.api.store.schema import Promise
from rubberband.commands import serve
from rubberband.executor import ExperimentFolder, Inbox
from rubberband.spec.experiment import Experiment
from rubberband.spec.pool import PoolFile, on_pool, pool_folder
from rubberband.states import ExperimentState
from tests.builders.fake_runs import FakeService, NearPlans, fake_service, words

POOL = SharedPool(name="small", provider="virtual", instances=2, gpus_per_instance=1)
TIGHT = {"constraints__deadline": "165s", "constraints__objective": "min_cost"}
"""Two instances are needed all the time: 8 x 10 s, then 2 x 80 s."""


@pytest.fixture
def service(tmp_path: Path) -> Iterator[FakeService]:
    with fake_service(tmp_path, pool=POOL) as made:
        yield made


def submit(service: FakeService, name: str, **changes: Any) -> Any:
    return service.client.post("/v1/experiments", json=words(name=name, **changes))


def test_a_second_experiment_is_promised_only_what_the_first_one_leaves(service: FakeService) -> None:
    assert submit(service, "one", **TIGHT).status_code == 201
    refused = submit(service, "two", **TIGHT)
    assert refused.status_code == 422
    problem = refused.json()
    assert problem["type"] == "/problems/infeasible"
    expected = r"the pool is promised to others: the plan can start in 2m\d+s and ends in [45]m(\d+s)?, for 0.24 USD"
    assert re.match(expected, problem["detail"]), problem["detail"]
    assert "set constraints.deadline=" in problem["detail"]
    assert "\n" not in problem["detail"]
    deadline = problem["nearest_words"]["deadline"]
    assert problem["nearest"]["cost_usd"] == pytest.approx(0.24)
    preview = service.client.post("/v1/plans", json=words(name="two", **TIGHT))
    assert (preview.status_code, preview.json()["type"]) == (422, "/problems/infeasible")
    later = submit(service, "two", constraints__deadline=deadline)
    assert later.status_code == 201, later.json()
    starts = [promise.start_at for promise in service.store.promises()]
    assert starts[1] - starts[0] == pytest.approx(120.0 + START_S, abs=5.0)


def test_a_promise_is_not_kept_where_another_took_its_room_meanwhile(service: FakeService) -> None:
    assert submit(service, "one", **TIGHT).status_code == 201
    (one,) = service.store.promises()
    admission, later = Admission(POOL, service.store), Promise(experiment="two", start_at=one.end_at, spans=[(1, 60.0)])
    admission.require_fit(later)
    service.store.move(replace(one, spans=[(2, 1000.0)]))
    with pytest.raises(HttpProblem, match="submit again"):
        admission.require_fit(later)


class MovingFirst:
    """The lock of the promises; whoever takes it finds that a plan took longer, and its promise has moved."""

    def __init__(self, move: Callable[[], None]) -> None:
        self._move = move

    def __enter__(self) -> None:
        self._move()

    def __exit__(self, *_: object) -> None:
        pass


def test_a_promise_that_moves_while_another_is_submitted_keeps_its_room(
    service: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert submit(service, "one", **TIGHT).status_code == 201
    (one,) = service.store.promises()
    runs = ExperimentRuns(Settings(home=tmp_path, pool=POOL), service.store, lambda: None)
    longer = replace(one, spans=[(2, 1000.0)])
    moving = MovingFirst(lambda: service.store.move(longer))
    monkeypatch.setattr(Watcher, "promising", property(lambda _: moving))
    two = Promise(experiment="two", start_at=one.end_at, spans=[(1, 60.0)])
    with pytest.raises(HttpProblem, match="submit again"):
        runs.submit(Experiment(**words(name="two")), promise=two)
    assert [promise.experiment for promise in service.store.promises()] == ["one"]


def test_one_of_two_that_are_submitted_at_once_is_promised_the_pool(
    service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    admit, calls, both, answers = Admission.admit, count(), threading.Barrier(2, timeout=60.0), []
    second = threading.Thread(target=lambda: answers.append(submit(service, "two", **TIGHT)))

    async def slow(*arguments: Any, **named: Any) -> Promise | None:
        found = await admit(*arguments, **named)
        if (call := next(calls)) == 0:
            second.start()
        if call < 2:  # each of them has been checked, and none is promised anything yet
            await asyncio.to_thread(both.wait)
        return found

    monkeypatch.setattr(Admission, "admit", slow)
    answers.append(submit(service, "one", **TIGHT))
    second.join()
    assert sorted(answer.status_code for answer in answers) == [201, 422]
    assert len(service.store.promises()) == 1


def test_a_slow_plan_holds_up_no_other_submission(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    answer, began, go = NearPlans.answer, threading.Event(), threading.Event()

    async def slow(self: NearPlans, preview: Preview, *arguments: Any) -> Any:
        if b"slow" in preview.body:
            began.set()
            await asyncio.to_thread(go.wait)
        return await answer(self, preview, *arguments)

    monkeypatch.setattr(NearPlans, "answer", slow)
    answers: list[Any] = []
    first = threading.Thread(target=lambda: answers.append(submit(service, "slow")))
    first.start()
    assert began.wait(60.0)
    try:
        assert submit(service, "quick").status_code == 201
        assert not answers
    finally:
        go.set()
        first.join()
    assert [made.status_code for made in answers] == [201]


@pytest.mark.by_default(1)
@pytest.mark.parametrize(("overtaken", "status"), [(2, 201), (1000, 503)])
def test_a_submission_is_planned_again_where_others_took_its_room(
    service: FakeService, monkeypatch: pytest.MonkeyPatch, overtaken: int, status: int
) -> None:
    tries, fits = [], Admission.require_fit

    def require_fit(self: Admission, promise: Promise) -> None:
        tries.append(promise)
        if len(tries) <= overtaken:
            raise OvertakenError
        fits(self, promise)

    monkeypatch.setattr(Admission, "require_fit", require_fit)
    answer = submit(service, "one", **TIGHT)
    assert answer.status_code == status, answer.json()
    assert len(service.store.promises()) == (status == 201)
    if status == 503:
        assert answer.headers["Retry-After"]
        assert "submit again" in answer.json()["detail"]
        assert 2 <= len(tries) <= 10


def test_a_plan_is_stored_before_its_experiment_counts(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []

    async def keep(self: Plans) -> None:
        lines.append("plans")

    def require_fit(self: Admission, promise: Promise) -> None:
        lines.append("promise")

    monkeypatch.setattr(NearPlans, "keep", keep)
    monkeypatch.setattr(Admission, "require_fit", require_fit)
    assert submit(service, "one", **TIGHT).status_code == 201
    assert lines[:2] == ["plans", "promise"]


@pytest.mark.parametrize("instances", [4, 8])
def test_the_deadline_of_a_refusal_does_though_a_cheaper_and_slower_plan_keeps_it_too(
    tmp_path: Path, instances: int
) -> None:
    pool = SharedPool(name="p", provider="virtual", instances=instances, gpus_per_instance=1)
    slow = {"resources__provision_delay": "5s", "resources__init_delay": "20s", "constraints__max_cost": 5}
    cheap = {**slow, "constraints__objective": "min_cost"}
    with fake_service(tmp_path, pool=pool) as service:
        first = {**slow, "constraints__deadline": "5m", "constraints__objective": "min_time"}
        assert submit(service, "one", **first).status_code == 201
        refused = submit(service, "two", constraints__deadline="150s", **cheap)
        assert refused.status_code == 422
        (remedy,) = refused.json()["remedies"]
        assert remedy["later_s"] > 0.0
        (change,) = remedy["changes"]
        assert change["key"] == "constraints.deadline"
        made = submit(service, "two", constraints__deadline=change["value"], **cheap)
        assert made.status_code == 201, made.json()


def test_a_preview_says_what_would_be_promised_and_promises_nothing(service: FakeService) -> None:
    before = service.clock()
    preview = service.client.post("/v1/plans", json=words(**TIGHT)).json()
    span = preview["promise"]
    assert span["end_at"] - span["start_at"] == pytest.approx(120.0 + START_S)
    assert before <= span["start_at"] <= service.clock()
    assert service.store.promises() == []


def test_a_narrower_plan_is_promised_where_the_wide_one_does_not_fit(service: FakeService) -> None:
    half = {"constraints__deadline": "10m", "resources__max_instances": 1}
    assert submit(service, "one", **half).status_code == 201
    fast = {"constraints__deadline": None, "constraints__max_cost": 1, "constraints__objective": "min_time"}
    assert submit(service, "free", **fast).status_code == 201, "without a deadline nothing is promised"
    both = {"constraints__deadline": "5m", "constraints__max_cost": 1, "constraints__objective": "min_time"}
    made = submit(service, "two", **both)
    assert made.status_code == 201, made.json()
    promises = {promise.experiment: promise.spans for promise in service.store.promises()}
    assert set(promises) == {"one", "two"}
    assert max(gpus for gpus, _ in promises["two"]) == 1


def test_the_pool_shows_who_may_hold_what_and_until_when(service: FakeService) -> None:
    assert submit(service, "one", **TIGHT).status_code == 201
    assert submit(service, "two", constraints__deadline=None, constraints__max_cost=1).status_code == 201
    shown = service.client.get("/v1/pool").json()
    assert (shown["name"], shown["instances"], shown["policy"]) == ("small", 2, "default")
    members = {member["name"]: member for member in shown["experiments"]}
    assert members["one"]["promised_gpus"] == 2
    assert members["one"]["promise"]["end_at"] - members["one"]["promise"]["start_at"] == pytest.approx(120.0 + START_S)
    assert (members["two"]["promised_gpus"], members["two"]["promise"]) == (0, None)


def test_an_experiment_on_a_pool_that_is_up_has_its_price_and_its_process_gets_its_folder(tmp_path: Path) -> None:
    folder = pool_folder("team", tmp_path)
    file = PoolFile(instances=2, gpus_per_instance=1, instance_type="local", price_per_hour=3.6)
    folder.write(file.model_dump(mode="json", by_alias=True, exclude_none=True))
    pool = SharedPool(name="team", provider="local", instances=2, gpus_per_instance=1, folder=str(folder.path))
    local = {"resources": {"provider": "local"}, "entrypoint": "examples.digits:DigitsTrial"}
    with fake_service(tmp_path, pool=pool) as service:
        made = submit(service, "one", **TIGHT, **local)
        assert made.status_code == 201, made.json()
        row = service.store.submission("one")
        assert row is not None
        resources = dict(row.words["resources"])
        assert (resources["price_per_hour"], resources["max_instances"], "pool" in resources) == (3.6, 2, False)
        ordered = on_pool({**row.words, "resources": {**resources, "pool": str(folder.path)}}, tmp_path)
        assert Experiment.kept(ordered).resources.pool == str(folder.path)
        dearer = submit(service, "two", **{**local, "resources": {"provider": "local", "price_per_hour": 1.0}})
        assert "contradicts pool" in dearer.json()["detail"]


def test_an_experiment_on_a_pool_on_ec2_has_its_market_its_settings_and_its_store(tmp_path: Path) -> None:
    folder = pool_folder("team", tmp_path)
    file = PoolFile(
        provider="aws",
        instances=2,
        gpus_per_instance=1,
        instance_type="p3.2xlarge",
        market="spot",
        price_per_hour=3.06,
        side_price_per_hour=0.02,
        spot={"price_per_hour": 1.2},
        checkpoints="s3://bucket/team",
        aws={"install": "scikit-learn"},
    )
    folder.write(file.model_dump(mode="json", by_alias=True, exclude_none=True))
    pool = SharedPool(name="team", provider="aws", instances=2, gpus_per_instance=1, folder=str(folder.path))
    on_ec2 = {"resources": {"provider": "aws"}, "entrypoint": "examples.digits:DigitsTrial"}
    slow = {"constraints__deadline": "2h", "constraints__objective": "min_cost"}
    with fake_service(tmp_path, pool=pool, providers=("aws",)) as service:
        made = submit(service, "one", **slow, **on_ec2)
        assert made.status_code == 201, made.json()
        row = service.store.submission("one")
        assert row is not None
        ordered = on_pool({**row.words, "resources": {**row.words["resources"], "pool": str(folder.path)}}, tmp_path)
        found = Experiment.kept(ordered)
        found.require_runnable()
        assert (found.resources.market, found.resources.price_usd_per_hour) == ("spot", pytest.approx(3.08))
        assert (found.resources.aws.install, found.resources.checkpoints) == ("scikit-learn", "s3://bucket/team")
        allowed = Settings(home=tmp_path, entrypoints=("examples.digits:*",), providers=("aws",), pool=pool)
        its = ExperimentFolder(home=tmp_path, name="one")
        assert AdmissionPolicy(allowed, service.store).refused(row, its) is None, "what the pool sets is the operator's"
        narrower = AdmissionPolicy(replace(allowed, entrypoints=()), service.store).refused(row, its)
        assert narrower is not None
        assert "entrypoint: 'examples.digits:DigitsTrial' is not allowed here" in narrower.reason


def test_a_service_without_a_pool_shows_none(tmp_path: Path) -> None:
    with fake_service(tmp_path) as service:
        assert service.client.get("/v1/pool").status_code == 404


def test_a_process_that_starts_hears_at_once_what_it_is_promised(service: FakeService, tmp_path: Path) -> None:
    assert submit(service, "one", **TIGHT).status_code == 201
    row = service.store.submission("one")
    assert row is not None
    folder = ExperimentFolder(home=tmp_path, name="one")
    sharing = Sharing(POOL, service.store, lambda name: folder, service.clock)
    assert not sharing.is_member(row), "a simulated run has its clock for itself, and waits for no cap"
    sharing.begin(row)
    (asked,) = Inbox(folder.inbox).pending()
    assert (asked.max_instances, asked.promised_instances) == (0, 2)


def test_a_promise_ends_with_its_experiment(service: FakeService) -> None:
    assert submit(service, "one", **TIGHT).status_code == 201
    assert submit(service, "two", **TIGHT).status_code == 422
    service.store.change("one", at=service.clock(), state=ExperimentState.DONE, reason="")
    assert submit(service, "two", **TIGHT).status_code == 201


def test_a_deadline_that_leaves_no_time_to_start_is_refused_with_one_that_does(service: FakeService) -> None:
    problem = submit(service, "one", **{**TIGHT, "constraints__deadline": "121s"}).json()
    assert problem["detail"] == (
        "the plan ends in 2m31s, for 0.24 USD: a promise counts 30s beside it; "
        "set constraints.deadline=2m31s, or leave the deadline out"
    )
    assert "start_at" not in problem, "nothing is promised to others"
    assert submit(service, "one", **{**TIGHT, "constraints__deadline": "2m31s"}).status_code == 201


@pytest.mark.by_default(1)
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"resources__gpus_per_trial": {"min": 4}},
            "gpus_per_trial.min: 4 is too many; the pool has 2 instances of 1 GPU",
        ),
        ({"resources__gpus_per_instance": 2}, "resources.gpus_per_instance: 2 is too many"),
        ({"profile": None}, "profile: a pool promises a plan"),
    ],
)
def test_an_experiment_that_the_pool_cannot_promise_is_refused_in_one_line(
    service: FakeService, changes: dict[str, Any], text: str
) -> None:
    answer = submit(service, "large", **changes)
    assert answer.status_code == 422
    assert text in answer.json()["detail"]
    assert "\n" not in answer.json()["detail"]


def test_a_larger_max_instances_is_lowered_and_said(service: FakeService) -> None:
    wide = {**TIGHT, "resources__max_instances": 3}
    lines = ["pool: small has 2 instances of 1 GPU; max_instances is 2 instead of 3."]
    preview = service.client.post("/v1/plans", json=words(**wide)).json()
    assert [note for note in preview["notes"] if note.startswith("pool:")] == lines
    made = submit(service, "one", **wide)
    assert (made.status_code, made.json()["notes"]) == (201, lines)
    assert submit(service, "two", constraints__deadline=None).json()["notes"] == []


def test_an_experiment_of_another_provider_does_not_share_the_pool(tmp_path: Path) -> None:
    other = SharedPool(name="small", provider="local", instances=1, gpus_per_instance=1)
    with fake_service(tmp_path, pool=other) as service:
        assert submit(service, "one", **TIGHT).status_code == 201
        assert service.store.promises() == []


def test_promises_of_a_pool_that_has_become_smaller_are_kept_in_their_order() -> None:
    promises = [
        Promise(experiment="late", start_at=10.0, spans=[(2, 100.0)]),
        Promise(experiment="early", start_at=0.0, spans=[(1, 100.0)]),
    ]
    assert set(calendar_of(POOL, promises).promises) == {"early"}


def test_a_months_budget_counts_what_is_spent_and_what_is_planned(tmp_path: Path) -> None:
    pool = SharedPool(name="p", provider="virtual", instances=2, gpus_per_instance=1, budgets_usd={"": 0.5})
    with fake_service(tmp_path, pool=pool) as service:
        free = {"constraints": {"max_cost": 1}}
        assert submit(service, "one", **free).status_code == 201
        assert submit(service, "two", **free).status_code == 201
        refused = submit(service, "three", **free)
        assert refused.status_code == 422
        assert "0.48 USD of 0.50 USD are spent or planned in" in refused.json()["detail"]
        service.store.change("one", at=service.clock(), state=ExperimentState.DONE, reason="")
        assert submit(service, "three", **free).status_code == 201, "it cost nothing"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--weight", "ci=2"], "--weight 'ci=2' needs a pool"),
        (["--pool", "pool.yaml", "--weight", "ci=0"], "--weight 'ci=0' is not NAME=N with N above 0"),
        (["--pool", "pool.yaml", "--budget", "ci"], "--budget 'ci' is not NAME=N"),
        (
            ["--pool", "pool.yaml", "--budget", "a=1", "--budget", "a=2"],
            "'a=2': a has 1 by an earlier --budget; give one",
        ),
        (["--pool", "wrong.yaml"], "policy 'nosuch' does not exist"),
        (["--pool", "blind.yaml"], "policy: 'tiresias' knows no promises, which a service makes; use default, "),
        (["--pool", "dear.yaml"], "max_usd_per_hour: 3.00 USD does not cover one instance (4.00 USD); raise it"),
        (
            ["--pool", "pool.yaml", "--provider", "local"],
            "--provider local leaves out that of the pool; add --provider virt",
        ),
        (["--pool", "none.yaml"], "none.yaml"),
    ],
)
def test_options_of_a_pool_are_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    pool = "instances: 2\ngpus_per_instance: 1\nprovider: virtual\n"
    (tmp_path / "pool.yaml").write_text(pool)
    (tmp_path / "dear.yaml").write_text(f"{pool}price_per_hour: 4\nmax_usd_per_hour: 3\n")
    (tmp_path / "wrong.yaml").write_text(f"{pool}policy: nosuch\n")
    (tmp_path / "blind.yaml").write_text(f"{pool}policy: tiresias\n")
    done = CliRunner().invoke(cli.app, ["serve", *options])
    assert text in str(done.exception)
    assert "\n" not in str(done.exception)


def test_a_budget_of_a_token_that_does_not_exist_is_named_when_the_service_starts(tmp_path: Path) -> None:
    pool = SharedPool(
        name="team", instances=2, gpus_per_instance=1, provider="virtual", budgets_usd={"ann": 1.0, "anne": 1.0}
    )
    settings = Settings(home=tmp_path, auth=True, pool=pool)
    with closing(open_store(None, tmp_path)) as store:
        Tokens(store).create("ann", "submit")
        shown = serve.summary(settings, "http://here", store)
    assert shown[-1] == "note         --budget and --weight name anne, and no valid token has that name"


def test_a_service_shares_as_many_instances_as_the_cap_per_hour_pays_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUBBERBAND_HOME", str(tmp_path))
    made: list[Settings] = []
    monkeypatch.setattr("rubberband.commands.serve._serve", lambda settings, transport: made.append(settings))
    (tmp_path / "pool.yaml").write_text(
        "{instances: 4, gpus_per_instance: 2, provider: virtual, price_per_hour: 3, max_usd_per_hour: 7, "
        "max_usd_per_month: 50}"
    )
    done = CliRunner().invoke(cli.app, ["serve", "--pool", str(tmp_path / "pool.yaml")])
    assert done.exit_code == 0, done.output
    (settings,) = made
    assert settings.pool is not None
    assert (settings.pool.instances, settings.pool.gpus, settings.pool.max_usd_per_month) == (2, 4, 50.0)
