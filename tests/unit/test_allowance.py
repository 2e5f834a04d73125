"""Nothing is rented without a limit of its bill, nor beyond the policy of the account: every door, every key."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from rubberband import cli
from rubberband.api.experiments import ExperimentRuns
from rubberband.api.experiments.extending import Wanted
from rubberband.api.problems import HttpProblem
from rubberband.api.settings import Settings
from rubberband.api.store import open_store
from rubberband.cloud.offers import offer
from rubberband.cloud.pool import FileJournal
from rubberband.cloud.pool.journal import MachineEnded, MachineRuns, Opened, PoolLimits, SliceRequested
from rubberband.commands import common
from rubberband.commands.local_experiment import local_experiment
from rubberband.commands.run import resume
from rubberband.errors import Cancelled, InfeasibleError, InputError
from rubberband.executor import ExperimentFolder, Inbox, JournalFollower, cancel_on_signals
from rubberband.executor.run import allowance
from rubberband.executor.run.allowance import (
    committed_usd,
    note_of_head,
    pledge_on_head,
    pledged,
    require_image,
    require_pool,
    require_runnable,
)
from rubberband.files import EXCLUSIVE, locked
from rubberband.planning.feasible import PricesAndQuotas
from rubberband.pools import process as pools
from rubberband.pools.process import bring_up
from rubberband.running import check, run, starting
from rubberband.running.estimating import estimate
from rubberband.running.run import tune
from rubberband.spec.experiment import Experiment
from rubberband.spec.loading import load_policy
from rubberband.spec.pool import PoolFile, PoolFolder
from rubberband.states import ExperimentState
from rubberband.units import format_usd, month_begin, month_end
from rubberband.values.offer import Offer, SideCost, Spot
from rubberband.values.submission import Submission, Summary
from tests.builders.experiment_words import MINIMAL
from tests.builders.journalled_runs import recorded
from tests.builders.journalled_runs import words as virtual_words
from tests.builders.pools import mid_month as mid_month

pytestmark = pytest.mark.usefixtures("mid_month", "trials")
RESOURCES = {
    "provider": "aws",
    "instance_type": "g5.xlarge",
    "max_instances": 4,
    "checkpoints": "s3://bucket/x",
    "price_per_hour": 1.0,
    "side_price_per_hour": 0.0,
    "aws": {"driver_address": "127.0.0.1"},
}
REFUSALS = [
    ("max_usd_per_run: 4", "max_usd_per_run of policy.yaml: constraints.max_cost is 5.00 USD, more than 4.00 USD"),
    ("max_usd_per_hour: 3.5", "max_usd_per_hour of policy.yaml: resources.max_instances=4 of g5.xlarge may cost 4.00"),
    ("max_usd_per_month: 4", "max_usd_per_month of policy.yaml: 0.00 USD of 4.00 USD are spent or may be in "),
    ("instance_types: [g4dn.*, p3.2xlarge]", "instance_types of policy.yaml: 'g5.xlarge' is not one of g4dn.*, p3.2x"),
    ("regions: [eu-west-1]", "regions of policy.yaml: resources.region='us-east-1' is not one of eu-west-1; use one"),
]
"""A policy -> how an experiment of 4 x g5.xlarge in us-east-1 with a max_cost of 5 USD is refused."""
NOTHING = "constraints.max_cost: missing, and without it the bill of rented instances has no limit; write max_cost, or"


def words(max_cost: float | None = 5, **resources: Any) -> dict[str, Any]:
    constraints: dict[str, Any] = {"deadline": "2h"} | ({} if max_cost is None else {"max_cost": max_cost})
    asked = {"entrypoint": "trials:train", "constraints": constraints, "resources": RESOURCES | resources}
    return MINIMAL | asked


@pytest.fixture
def trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trials.py").write_text("def train(config): ...")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUBBERBAND_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(run, "cloud_prices_and_quotas", lambda *_: PricesAndQuotas())

    def begun(*_: Any) -> None:
        raise Cancelled("begun")

    monkeypatch.setattr(starting, "create", begun)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def policy(home: Path, text: str) -> None:
    (home / "policy.yaml").write_text(text)


@contextmanager
def refused(message: str) -> Iterator[None]:
    with pytest.raises(InputError) as caught:
        yield
    assert str(caught.value).startswith(message)


def by_command(home: Path, **changes: Any) -> None:
    file = home.parent / "file.yaml"
    file.write_text(json.dumps(words(**changes)))
    done = CliRunner().invoke(cli.app, ["run", "file.yaml", "--no-check"])
    assert isinstance(done.exception, InputError), done.output
    raise done.exception


def by_tune(home: Path, **changes: Any) -> None:
    tune(home=home, check=False, verbose=0, **words(**changes))


def by_check(home: Path, **changes: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            check,
            "_checked",
            lambda *given, **_: check.CheckReport(entrypoint="", device="cpu", limit_s=1.0, problems=given[-1]),
        )
        (problem,) = check.check_experiment(Experiment(**words(**changes)), home=home).problems
    raise InputError(problem.line)


def by_estimate(home: Path, **changes: Any) -> None:
    prefix = "a run is refused now: "
    (note,) = (note for note in estimate(home=home, **words(**changes)).notes if note.startswith(prefix))
    raise InputError(note.removeprefix(prefix))


def by_service(home: Path, **changes: Any) -> None:
    store = open_store(None, home)
    try:
        runs = ExperimentRuns(Settings(home=home, providers=("aws",)), store, lambda: None)
        with pytest.raises(HttpProblem) as caught:
            runs.submit(Experiment(**words(**changes)))
        assert caught.value.kind.status == 422
        assert store.submission("small") is None
    finally:
        store.close()
    raise InputError(str(caught.value))


DOORS = [by_command, by_tune, by_check, by_estimate, by_service]


@pytest.mark.parametrize("door", DOORS)
def test_every_door_refuses_what_nothing_limits(home: Path, door: Any) -> None:
    with refused(NOTHING):
        door(home, max_cost=None)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("limit", "message"), REFUSALS)
def test_every_door_keeps_the_policy(home: Path, door: Any, limit: str, message: str) -> None:
    policy(home, limit)
    with refused(message):
        door(home)


def test_a_policy_of_money_needs_a_max_cost_even_where_the_user_wants_none(home: Path) -> None:
    for key in ("max_usd_per_run", "max_usd_per_month"):
        policy(home, f"{key}: 5")
        with refused(f"{key} of policy.yaml: "):
            require_runnable(Experiment(**words(None)), home, no_cap=True)
    policy(home, "max_usd_per_hour: 5")
    require_runnable(Experiment(**words(None)), home, no_cap=True)


def test_a_run_within_the_policy_begins(home: Path) -> None:
    limits = "max_usd_per_run: 5\nmax_usd_per_hour: 4\nmax_usd_per_month: 5\n"
    policy(home, f"{limits}instance_types: [g5.*]\nregions: [us-east-1]")
    with pytest.raises(Cancelled, match="begun"):
        by_tune(home)
    with pytest.raises(Cancelled, match="begun"):
        run.run_experiment(
            Experiment(**words(None)),
            ExperimentFolder(home=home.parent, name="small"),
            starting.RunOptions(check=False, no_cap=True),
        )
    assert not any("refused" in note for note in estimate(home=home, **words()).notes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_usd_per_run: -1", "policy.yaml:1: max_usd_per_run: -1"),
        ("max_usd_per_run: .inf", "policy.yaml:1"),
        ("regions: [us-east-1]\nmax_usd_per_day: 3", "policy.yaml:2: max_usd_per_day: unknown key; "),
        ("instance_types: []", "policy.yaml:1: instance_types: is empty; write at least one entry"),
        ("regions: us-east-1", "policy.yaml:1: regions: 'us-east-1' is not a list; write one"),
        ("# nothing", "policy.yaml is empty; write limits: max_usd_per_run, max_usd_per_hour"),
        ("max_usd_per_run: 1\nmax_usd_per_run: 2", "policy.yaml:2"),
    ],
)
def test_a_policy_is_read_strictly_and_a_wrong_one_lets_nothing_be_rented(home: Path, text: str, message: str) -> None:
    policy(home, text)
    with refused(message):
        by_tune(home)


def test_a_policy_that_cannot_be_read_is_not_taken_for_none(home: Path) -> None:
    (home / "policy.yaml").mkdir()
    with refused("'"):
        load_policy(home)
    (home / "policy.yaml").rmdir()
    (home / "policy.yaml").symlink_to("missing.yaml")
    with refused("there is no policy file"):
        load_policy(home)
    assert load_policy(home / "nowhere") is None


# The question.


class Asked:
    """A terminal on which each question is answered alike."""

    def __init__(self, patch: pytest.MonkeyPatch, answer: bool, *, is_terminal: bool = True) -> None:
        self.questions: list[str] = []
        self._answer = answer
        patch.setattr(common.sys, "stdin", SimpleNamespace(isatty=lambda: is_terminal))
        patch.setattr(common.sys, "stderr", SimpleNamespace(isatty=lambda: is_terminal))
        patch.setattr(common.typer, "confirm", self._confirm)

    def _confirm(self, question: str, **_: Any) -> bool:
        self.questions.append(question)
        return self._answer


@pytest.mark.parametrize(
    ("answer", "yes", "is_terminal"), [(True, False, True), (False, True, True), (False, False, False)]
)
def test_the_answer_yes_the_option_and_a_pipe_let_it_go_on(
    monkeypatch: pytest.MonkeyPatch, answer: bool, yes: bool, is_terminal: bool
) -> None:
    asked = Asked(monkeypatch, answer, is_terminal=is_terminal)
    common.confirm_bill("at most 1.00 USD", "run", yes=yes)
    assert asked.questions == (["at most 1.00 USD; run?"] if answer else [])


def test_the_answer_no_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    Asked(monkeypatch, False)
    with pytest.raises(Cancelled, match="not confirmed; nothing was rented"):
        common.confirm_bill("at most 1.00 USD", "run", yes=False)


def test_a_signal_ends_the_question_also_where_the_command_only_notes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    Asked(monkeypatch, True)
    monkeypatch.setattr(common.typer, "confirm", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    with cancel_on_signals() as cancelled:
        with pytest.raises(Cancelled, match="nothing was rented"):
            common.confirm_bill("at most 1.00 USD", "run", yes=False)
        assert not cancelled()
        signal.raise_signal(signal.SIGINT)
        assert cancelled(), "from then on it is as before"


def bills(home: Path, *, max_cost: float | None = 5, profile: bool = True, **changes: Any) -> list[str]:
    """What a run asks before it begins."""
    asked = words(max_cost, **changes) | ({} if profile else {"profile": None})
    found = list[str]()
    with pytest.raises((Cancelled, InfeasibleError)):
        run.run_experiment(
            Experiment(**asked),
            ExperimentFolder(home=home, name="small"),
            starting.RunOptions(check=False, no_cap=True, confirm=found.append),
        )
    return found


def test_a_run_says_what_is_known_of_its_bill(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (bill,) = bills(home)
    assert bill.startswith("at most 5.00 USD (max_cost), about 0.")
    (bill,) = bills(home, max_cost=None)
    assert bill.startswith("no max_cost, about 0.")
    assert bills(home, provider="local", aws={}, checkpoints=None) == [], "this machine costs nothing"

    def measured(*_: Any, **__: Any) -> None:
        raise Cancelled("measured")

    monkeypatch.setattr(starting, "measure_profile", measured)
    asked = "at most 5.00 USD (max_cost); no profile yet: measuring it comes first and counts"
    assert bills(home, profile=False) == [asked]


def test_a_resume_shows_what_is_spent_and_left_and_asks(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spent_usd = on_ec2(home, "one", 20)
    asked = Asked(monkeypatch, False)
    with pytest.raises(Cancelled, match="not confirmed"):
        resume("one")
    (question,) = asked.questions
    assert question.startswith(f"at most 4.00 USD (max_cost), {format_usd(spent_usd)} spent, about 1.")
    assert question.endswith(" USD more; go on?")
    on_ec2(home, "done")
    resume("done")
    assert len(asked.questions) == 1, "an experiment that is over rents nothing"


def test_a_pool_is_asked_for_only_with_a_cap_and_within_the_policy(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = {"name": "team", "provider": "aws", "instance_type": "g5.xlarge", "instances": 3, "price_per_hour": 1.0}
    words |= {"side_price_per_hour": 0.0, "checkpoints": "s3://bucket/team"}
    with refused(
        "max_usd_per_month: missing, and without it the bill of rented instances has no limit; write max_usd_"
    ):
        bring_up(PoolFile(**words), home)
    monkeypatch.setattr(pools, "_offered", lambda pool, *_: offer(pools.resources_of(pool)))

    def no(bill: str) -> None:
        raise Cancelled(bill)

    def up(**caps: float) -> None:
        bring_up(PoolFile(**words, **caps), home, confirm=no)

    bill = (
        "at most 2 instances of g5.xlarge at 1.00 USD an hour each, none until an experiment asks; max_usd_per_hour=2"
    )
    with pytest.raises(Cancelled, match=bill):
        up(max_usd_per_hour=2)
    assert not (home / "pools").exists()
    for limit, caps, message in (
        ("max_usd_per_hour: 1.5", {"max_usd_per_hour": 2}, "max_usd_per_hour of policy.yaml: this pool may cost more"),
        ("max_usd_per_hour: 1.5", {"max_usd_per_month": 9}, "max_usd_per_hour of policy.yaml: this pool may cost more"),
        ("max_usd_per_month: 9", {"max_usd_per_hour": 2}, "max_usd_per_month of policy.yaml: this pool has no max_usd"),
        ("max_usd_per_month: 9", {"max_usd_per_month": 10}, "max_usd_per_month of policy.yaml: 0.00 USD of 9.00 USD"),
        ("instance_types: [p*]", {"max_usd_per_month": 9}, "instance_types of policy.yaml: 'g5.xlarge'"),
        ("regions: [eu-west-1]", {"max_usd_per_month": 9}, "regions of policy.yaml: region='us-east-1'"),
    ):
        policy(home, limit)
        with refused(message):
            up(**caps)


@pytest.mark.parametrize(
    ("limit", "cost_usd", "message"),
    [
        ("instance_types: [p*]", 0.5, "instance_types of policy.yaml: 'g4dn.xlarge'"),
        ("max_usd_per_run: 0.4", 0.5, "max_usd_per_run of policy.yaml: the cost of the builder is 0.50 USD, more than"),
        ("max_usd_per_run: 0.4", None, "max_usd_per_run of policy.yaml: the price of a g4dn.xlarge is not known"),
        ("max_usd_per_month: 0.4", 0.5, "max_usd_per_month of policy.yaml: 0.00 USD of 0.40 USD are spent or may be"),
    ],
)
def test_an_image_is_built_within_the_policy(home: Path, limit: str, cost_usd: float | None, message: str) -> None:
    resources = Experiment(**words()).resources
    require_image(resources, home, "g4dn.xlarge", cost_usd)
    policy(home, limit)
    with refused(message):
        require_image(resources, home, "g4dn.xlarge", cost_usd)


# The month.


def on_ec2(home: Path, name: str, events: int | None = None, *, max_cost: float | None = 4.0) -> float:
    """A run on EC2 lies in the home; return what it cost."""
    done = recorded(virtual_words(constraints={"max_cost": max_cost}))
    resources = done.setup["experiment"]["resources"] | {"provider": "aws", "checkpoints": "s3://bucket/x"}
    setup = {**done.setup, "experiment": {**done.setup["experiment"], "resources": resources}}
    folder = replace(done.named(name), setup=setup).put(home, events)
    with closing(JournalFollower(folder)) as follower:
        follower.refresh(live=False)
        return follower.summary().cost_usd


def test_the_month_has_what_runs_have_spent_and_what_those_that_run_still_may(home: Path) -> None:
    spent_usd = on_ec2(home, "one")
    assert 0.0 < spent_usd < 4.0
    assert committed_usd(home, time.time()) == pytest.approx(spent_usd)
    cut_usd = on_ec2(home, "two", 20)
    folder = ExperimentFolder(home=home, name="two")
    assert committed_usd(home, time.time()) == pytest.approx(spent_usd + cut_usd)
    assert committed_usd(home, time.time(), but="two") == pytest.approx(spent_usd)
    with folder.driving():
        assert committed_usd(home, time.time()) == pytest.approx(spent_usd + 4.0)
    policy(home, f"max_usd_per_month: {spent_usd + cut_usd + 5.0 - 0.01}")
    with refused("max_usd_per_month of policy.yaml: "):
        by_tune(home)
    policy(home, f"max_usd_per_month: {spent_usd + cut_usd + 5.0 + 0.01}")
    with pytest.raises(Cancelled, match="begun"):
        by_tune(home)
    next_month = month_end(time.time()) + 3600.0
    assert committed_usd(home, next_month) == 0.0
    with folder.driving():  # what it has spent belongs to this month
        assert committed_usd(home, next_month) == pytest.approx(4.0 - cut_usd)


def test_a_journal_of_last_month_counts_once_its_log_is_of_this_one(home: Path) -> None:
    spent_usd, journal = on_ec2(home, "one", 20), ExperimentFolder(home=home, name="one").journal
    os.utime(journal, (before := month_begin(time.time()) - 3600.0, before))
    journal.with_name(f"{journal.name}-wal").write_bytes(bytes(32))  # SQLite writes to the file later
    assert committed_usd(home, time.time()) == pytest.approx(spent_usd)


def test_a_resume_and_an_extension_keep_the_policy(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one_usd = on_ec2(home, "one", 20, max_cost=None)
    with refused(
        "max_cost: missing, and without it the bill of rented instances has no limit; go on without one by `rubberband "
    ):
        resume("one")
    asked = Asked(monkeypatch, False)
    with pytest.raises(Cancelled):
        resume("one", no_cap=True)
    assert asked.questions[0].startswith("no max_cost, ")
    on_ec2(home, "two", 20)
    for limit, key in (("max_usd_per_run: 3", "max_usd_per_run"), ("max_usd_per_month: 4", "max_usd_per_month")):
        policy(home, limit)
        with refused(f"{key} of policy.yaml: "):
            resume("two")
        with local_experiment("two") as found, refused(f"{key} of policy.yaml: "):
            found.extension(None, 5.0, granted=True)
        assert not Inbox(ExperimentFolder(home=home, name="two").inbox).pending()
    policy(home, "instance_types: [g5.*]")
    with refused("instance_types of policy.yaml: "):
        resume("two")
    policy(home, f"max_usd_per_month: {one_usd + 4.01}")  # what it has spent itself counts once
    with pytest.raises(Cancelled):
        resume("two")


def test_the_cost_of_a_measurement_counts_while_it_is_made_and_after(home: Path) -> None:
    experiment, folder = Experiment(**words()), ExperimentFolder(home=home, name="small")
    error = Cancelled("amid it")
    error.spent_usd = 0.5

    def now_usd() -> float:
        return committed_usd(home, time.time())

    with suppress(Cancelled), pledged(experiment, folder):
        assert now_usd() == 5.0
        raise error
    assert now_usd() == 0.5
    with pledged(experiment, folder) as held:
        held.spent_usd = 0.25
    assert now_usd() == 0.75
    with suppress(ZeroDivisionError), pledged(experiment, folder):  # its process dies
        raise ZeroDivisionError
    assert now_usd() == 5.75
    policy(home, "max_usd_per_month: 10.74")
    with refused("max_usd_per_month of policy.yaml: 5.75 USD of 10.74"), pledged(experiment, folder):
        pytest.fail("it is refused")
    on_ec2(home, "small")
    assert now_usd() < 5.0, "the journal has what was pledged"
    (home / "spending" / "torn.json").write_text("{")
    with refused("max_usd_per_month of policy.yaml: what was spent by"):
        now_usd()


def test_the_bill_of_a_pool_counts_and_its_cap_while_it_is_up(home: Path) -> None:
    pool = {"name": "team", "provider": "aws", "instances": 1, "gpus_per_instance": 1, "max_usd_per_month": 40.0}
    folder = PoolFolder(path=home / "pools" / "team")
    folder.write(pool)
    assert committed_usd(home, time.time()) == 40.0
    assert committed_usd(home, time.time(), but_pool="team") == 0.0
    folder.note_closed()
    now = time.time()
    limits = PoolLimits(instances=1, gpus=1, price_usd_per_hour=2.0)
    FileJournal(folder.path).append(
        [
            Opened(at=now - 7300.0, limits=limits),
            SliceRequested(at=now - 7300.0, tenant="a", instance="i-001", experiment="a", gpus=1, lease_s=60.0),
            MachineRuns(at=now - 7200.0, machine="m1", running_at=now - 7200.0),
            MachineEnded(at=now - 3600.0, machine="m1", running_at=now - 7200.0, ended_at=now - 3600.0),
        ]
    )
    assert committed_usd(home, now) == pytest.approx(2.0)


def test_a_service_refuses_a_resume_and_other_limits_beyond_the_policy(home: Path) -> None:
    on_ec2(home, "begun", 20)
    with ExperimentFolder(home=home, name="begun").driving():
        pass  # a driver of this home ran it
    now = time.time()
    state, limited = ExperimentState.INTERRUPTED, Summary(max_cost_usd=4.0)
    begun = Submission(name="begun", state=state, created_at=now, changed_at=now, summary=limited)
    queued = replace(begun, name="queued", state=ExperimentState.QUEUED, words=Experiment(**words()).to_words())
    with closing(open_store(None, home)) as store:
        store.add(begun)
        store.add(queued)
        runs = ExperimentRuns(Settings(home=home, providers=("aws", "virtual")), store, lambda: None)
        policy(home, "max_usd_per_run: 5.5")
        for name in ("queued", "begun"):
            runs.extensions.question(name, Wanted(max_cost_usd=5.5))
            with pytest.raises(HttpProblem, match=r"max_usd_per_run of .*max_cost is 6\.00 USD, more than 5\.50"):
                runs.extensions.question(name, Wanted(max_cost_usd=6.0))
        policy(home, "max_usd_per_run: 3")
        with pytest.raises(
            HttpProblem, match=r"max_usd_per_run of policy\.yaml: max_cost is 4\.00 USD, more than 3\.00"
        ):
            runs.resume("begun")


def test_a_damaged_journal_of_this_machine_costs_nothing_and_one_of_ec2_what_is_left_of_it(home: Path) -> None:
    spent_usd = on_ec2(home, "rented")
    recorded(virtual_words()).named("own").put(home)
    for name in ("rented", "own"):
        cut = ExperimentFolder(home=home, name=name).journal
        with closing(sqlite3.connect(cut)) as file:
            (last,) = file.execute("SELECT max(seq) FROM events").fetchone()
            file.execute("DELETE FROM events WHERE seq = ?", (last - 3,))
            file.commit()
    left_usd = committed_usd(home, time.time())
    assert 0.0 < left_usd <= spent_usd
    assert left_usd == pytest.approx(spent_usd, rel=0.1)


def test_the_rate_of_a_pool_has_the_dearer_market_and_all_beside_the_rent(home: Path) -> None:
    words = {"name": "team", "provider": "aws", "instances": 2, "gpus_per_instance": 1, "max_usd_per_month": 9.0}
    offered = Offer(
        instance_type="g5.xlarge",
        gpus=1,
        price_usd_per_hour=1.0,
        max_instances=2,
        spot=Spot(price_usd_per_hour=1.5, interruptions_per_hour=0.0),
        side_costs=(SideCost(line="root volumes", usd_per_hour=0.25),),
        head_price_usd_per_hour=0.1,
    )
    policy(home, "max_usd_per_hour: 3.59")
    with refused("max_usd_per_hour of policy.yaml: this pool may cost more than 3.59 USD an hour"):
        require_pool(PoolFile(**words), home, offered)
    require_pool(PoolFile(**words, max_usd_per_hour=3.5), home, offered)
    policy(home, "max_usd_per_hour: 3.61")
    require_pool(PoolFile(**words), home, offered)


def test_each_of_several_types_is_one_of_the_policys(home: Path) -> None:
    policy(home, "instance_types: [g5.*]")
    both = words(instance_type=None, instance_types=["g5.xlarge", "g6.xlarge"], price_per_hour=None)
    with refused("instance_types of policy.yaml: 'g6.xlarge' is not one of g5.*"):
        require_runnable(Experiment(**both), home)


def test_a_head_is_believed_once_it_must_know_of_each_run(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head, at = "us-east-1.rubberband", time.time()

    def counted(after_s: float, usd: float, open_usd: float, *, has_ended: bool = False) -> tuple[float, float]:
        monkeypatch.setattr(time, "time", lambda: at + after_s)
        note_of_head(home, head, usd, open_usd, has_ended=has_ended)
        return committed_usd(home, at + after_s), committed_usd(home, month_end(at))

    pledge_on_head(home, head, 2.0)
    monkeypatch.setattr(time, "time", lambda: at + 60.0)
    pledge_on_head(home, head, 3.0)
    assert counted(61.0, 0.5, 0.0, has_ended=True) == (5.0, 5.0), "it may not know of the second yet"
    assert counted(950.0, 0.5, 0.0) == (5.0, 5.0)
    assert counted(961.0, 0.5, 0.0) == (0.5, 0.0)
    pledge_on_head(home, head, 2.0)
    assert counted(962.0, 0.75, 0.0, has_ended=True) == (0.75, 0.0)


def test_one_process_at_a_time_pledges_the_month(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allowance, "_PATIENCE_S", 0.0)
    folder = ExperimentFolder(home=home, name="small")
    with pledged(Experiment(**words()), folder), open(home / "spending" / "lock", "a") as lock:
        assert locked(lock, EXCLUSIVE)
        for ask in (
            lambda: pledge_on_head(home, "us-east-1.rubberband", 2.0),
            lambda: note_of_head(home, "us-east-1.rubberband", 0.0, 0.0, has_ended=False),
            lambda: pledged(Experiment(**words()), folder).__enter__(),
        ):
            with pytest.raises(InputError, match="is locked by another process; try again"):
                ask()
