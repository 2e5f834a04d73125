"""The cap of a pool's month, without a service: an estimate tells it, and a run is refused before it rents anything."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rubberband.commands.local_experiment import local_experiment
from rubberband.commands.run import resume
from rubberband.errors import Cancelled, InfeasibleError, ProviderError
from rubberband.executor import ExperimentFolder, Inbox, JournalFollower
from rubberband.planning.month_cap import month_cap
from rubberband.running import run, starting
from rubberband.running.estimating import estimate
from rubberband.running.run import tune
from rubberband.spec.experiment import Experiment
from rubberband.spec.pool import PoolFile, PoolFolder, on_pool
from rubberband.units import format_usd
from tests.builders.experiment_words import MINIMAL
from tests.builders.journalled_runs import recorded
from tests.builders.pools import broker, lending_pool
from tests.builders.pools import mid_month as mid_month

pytestmark = pytest.mark.usefixtures("mid_month")
SPENT_USD = 0.16
"""The bill of `lending_pool`: one instance for 160 s at 3.60 USD an hour."""


def words(**constraints: Any) -> dict[str, Any]:
    """Return an experiment of about 0.6 USD on the pool `team`."""
    return {
        **MINIMAL,
        "entrypoint": "trials:train",
        "constraints": {"deadline": "9h", **constraints},
        "resources": {"pool": "team"},
        "profile": {"seconds_per_iteration": {1: 60.0}},
    }


@pytest.fixture
def trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trials.py").write_text("def train(config): ...")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@contextmanager
def team(home: Path, cap_usd: float) -> Iterator[PoolFolder]:
    """A pool with a cap, and with a bill of `SPENT_USD` this month."""
    file = PoolFile(name="team", instances=1, gpus_per_instance=2, price_per_hour=3.6, max_usd_per_month=cap_usd)
    with broker(lending_pool(), file, home) as folder:
        yield folder


@pytest.mark.usefixtures("trials")
def test_an_estimate_warns_of_a_plan_that_the_cap_does_not_cover_and_a_run_refuses_it(home: Path) -> None:
    with team(home, 0.5):
        text = estimate(home=home, **words())
        with pytest.raises(InfeasibleError) as refused:
            tune(home=home, check=False, verbose=0, **words())
    assert text.feasible
    cost = format_usd(text.estimate.prediction.cost_usd)
    left = format_usd(0.5 - SPENT_USD)
    assert str(refused.value) == (
        f"pool team's max_usd_per_month: {format_usd(SPENT_USD)} of 0.50 USD are spent in November 2026, {left} are "
        f"left, and this plan costs {cost}; set a lower constraints.max_cost, make the search smaller, or raise the cap"
    )
    assert f"pool: a run is refused now: {refused.value}." in text.notes
    assert not (home / "experiments" / "small").exists(), "nothing was begun"


@pytest.mark.usefixtures("trials")
def test_the_next_month_is_named_where_it_would_do(home: Path) -> None:
    with team(home, 1.0 - 1e-9):
        cost_usd = estimate(home=home, **words()).estimate.prediction.cost_usd
    with team(home, cost_usd + SPENT_USD / 2.0), pytest.raises(InfeasibleError, match=r"or start it from 2026-12-01T"):
        tune(home=home, check=False, verbose=0, **words())


@pytest.mark.usefixtures("trials")
def test_a_run_begins_where_the_cap_covers_it_or_a_service_has_admitted_it(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def created(*_: Any) -> None:
        raise Cancelled("begun")

    monkeypatch.setattr(starting, "create", created)
    with team(home, 5.0):
        assert not any("refused" in note for note in estimate(home=home, **words()).notes)
        with pytest.raises(Cancelled, match="begun"):
            tune(home=home, check=False, verbose=0, **words())
    folder = ExperimentFolder(home=home, name="small")
    with team(home, 0.5):
        experiment = Experiment(**on_pool(words(), home))
        with pytest.raises(Cancelled, match="begun"):
            run.run_experiment(experiment, folder, starting.RunOptions(check=False, is_admitted=True))


@pytest.mark.usefixtures("trials")
def test_a_pool_without_a_cap_has_none_and_without_a_broker_it_is_said_that_nothing_is_known(home: Path) -> None:
    with team(home, 5.0) as folder:
        found = month_cap(folder.path, time.time())
        assert found is not None
        assert sum(found.committed_usd.values()) == pytest.approx(SPENT_USD)
        PoolFolder(path=home / "pools" / "free").write({"name": "free", "instances": 1, "gpus_per_instance": 1})
    with pytest.raises(ProviderError, match="the broker of pool team does not answer"):
        month_cap(folder.path, time.time())
    assert any(
        "max_usd_per_month covers the plan is not known" in note for note in estimate(home=home, **words()).notes
    )
    assert month_cap(home / "pools" / "free", time.time()) is None


def cut_off(home: Path, pool: PoolFolder) -> str:
    """The name of a run on a pool that was cut off at half of its events."""
    run = recorded()
    experiment = {
        **run.setup["experiment"],
        "resources": {**run.setup["experiment"]["resources"], "pool": str(pool.path)},
    }
    on_it = replace(run, setup={**run.setup, "experiment": experiment})
    on_it.put(home, len(run.events) // 2)
    return run.name


def test_a_resume_and_an_extension_by_hand_ask_for_the_rest_of_the_months_cap(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUBBERBAND_HOME", str(home))
    with team(home, SPENT_USD + 0.01) as pool:
        name = cut_off(home, pool)
        with pytest.raises(InfeasibleError, match=r"0\.0100 USD are left, and the rest of it costs .*; raise the cap"):
            resume(name)
        with local_experiment(name) as experiment:
            assert not experiment.extension(None, 4.5, granted=False)["applied"]
            added_usd = experiment.extension(None, 4.5, granted=False)["added_usd"]
            assert added_usd <= 0.01, "it costs nothing more"
            assert experiment.extension(None, 4.5, granted=True)["applied"]


def test_an_extension_by_hand_that_costs_more_than_is_left_is_not_granted(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with team(home, SPENT_USD + 0.01) as pool:
        name = cut_off(home, pool)
        outlook = {"jct_s": 1.0, "cost_usd": 1.0}
        dearer = SimpleNamespace(added_usd=0.5, added_s=60.0, before=outlook, after=outlook)
        monkeypatch.setenv("RUBBERBAND_HOME", str(home))
        monkeypatch.setattr(JournalFollower, "extension", lambda *_, **__: dearer)
        with local_experiment(name) as experiment, pytest.raises(InfeasibleError, match=r"the extension costs 0\.50"):
            experiment.extension(None, 4.5, granted=True)
        assert Inbox(ExperimentFolder(home=home, name=name).inbox).pending() == []
