"""The page of the pool that experiments share, as the service renders it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from rubberband.api.settings import SharedPool
from rubberband.api.store.schema import Promise
from rubberband.spec.pool import PoolFile
from rubberband.states import ExperimentState
from rubberband.values.submission import Submission
from tests.builders.fake_runs import FakeService, fake_service, spent, words
from tests.builders.pools import broker, lending_pool

HTML = {"Accept": "text/html"}
FILE = PoolFile(name="team", instances=1, gpus_per_instance=2, provider="virtual")


def shared(folder: str | None = None, **more: Any) -> SharedPool:
    return SharedPool(name="team", provider="virtual", instances=1, gpus_per_instance=2, folder=folder, **more)


def add(service: FakeService, name: str, owner: str, spans: list[tuple[int, float]]) -> None:
    now = service.clock()
    row = Submission(
        name=name,
        owner=owner,
        state=ExperimentState.RUNNING,
        created_at=now,
        changed_at=now,
        words={"resources": {"provider": "virtual"}},
        summary=spent(0.25, now, instances=1, max_instances=1),
        admitted_usd=1.0 if spans else 0.0,
    )
    promise = Promise(experiment=name, start_at=now, spans=spans, cost_usd=1.0) if spans else None
    assert service.store.add(row, promise)


def shown(service: FakeService, path: str = "/pool") -> str:
    answer = service.client.get(path, headers=HTML)
    assert answer.status_code == 200, answer.text
    return " ".join(answer.text.split())


def test_the_page_shows_who_holds_what_until_when_and_each_tokens_share(tmp_path: Path) -> None:
    with broker(lending_pool(), FILE, tmp_path) as folder:
        pool = shared(str(folder.path), weights={"ann": 2.0}, budgets_usd={"ann": 5.0})
        with fake_service(tmp_path, pool=pool) as service:
            add(service, "a", "ann", [(2, 600.0)])
            add(service, "c", "ben", [])
            page = shown(service)
    assert page.count('<a href="/experiments/a">a</a>') == 2, "a row of those that run, and one of the loans"
    assert ">b&lt;script&gt;</td>" in page, "the service does not know it"
    assert re.search(r"2 GPUs</td> <td[^>]*>now, ends in (10m|9m\d+s)<", page), page
    assert "none: it has no deadline" in page
    ann, ben = (
        re.search(rf'<td role="cell" data-label="token"[^>]*>{name}</td>(.*?)</tr>', page) for name in ("ann", "ben")
    )
    assert ann is not None
    assert ben is not None
    assert re.findall(r">([^<>]+)</td>", ann[1]) == ["2", "1", "0.06", "80 %", "1.00 USD", "5.00 USD"]
    assert re.findall(r">([^<>]+)</td>", ben[1])[3:] == ["20 %", "0.25 USD", "none"]
    figures = json.loads(re.search(r'id="figures">(.*?)</script>', page)[1])  # type: ignore[index]
    assert set(figures) == {"promises", "loans", "spend"}
    leads = {trace["name"]: trace.get("meta") for trace in figures["loans"]["data"]}
    assert leads["a"] == {"href": "/experiments/a"}
    assert leads["b<script>"] is None
    assert "b<script>" not in page, "names never become markup"
    assert "provider&#39;s bill" in page
    assert 'aria-label="3 % of the cap"' in page
    assert "of 5.00 USD" in page
    assert "0.75 USD more planned" in page


def test_a_token_whose_experiments_are_over_keeps_its_share_of_the_month(tmp_path: Path) -> None:
    path = str(tmp_path / "pools" / "team")
    with broker(lending_pool(), FILE, tmp_path), fake_service(tmp_path, pool=shared(path)) as service:
        add(service, "c", "ben", [])
        service.store.change("c", at=service.clock(), state=ExperimentState.DONE, reason="")
        page = shown(service)
    assert "No experiment runs on the pool" in page
    ben = re.search(r'<td role="cell" data-label="token"[^>]*>ben</td>(.*?)</tr>', page)
    assert ben is not None
    assert re.findall(r">([^<>]+)</td>", ben[1])[3:] == ["100 %", "0.25 USD", "none"]


def test_a_pool_whose_broker_does_not_answer_has_a_page(tmp_path: Path) -> None:
    with fake_service(tmp_path, pool=shared(str(tmp_path / "pools" / "team"))) as service:
        add(service, "a", "", [(2, 600.0)])
        page = shown(service, "/fragments/pool")
    assert "broker does not answer" in page
    assert "2 of 2 GPUs" in page


def test_only_a_service_that_shares_a_pool_has_the_page(tmp_path: Path) -> None:
    link = '<a href="/pool"'
    with fake_service(tmp_path / "with", pool=shared()) as service:
        page = shown(service)
        assert "No experiment runs on the pool" in page
        assert "broker" not in page
        assert link in shown(service, "/")
    with fake_service(tmp_path / "without") as service:
        assert service.client.get("/pool", headers=HTML).status_code == 404
        assert link not in shown(service, "/")


def test_the_form_says_before_a_submission_what_the_pool_would_refuse(tmp_path: Path) -> None:
    with fake_service(tmp_path, pool=shared()) as service:

        def reason(**changes: Any) -> str:
            text: str = service.client.post("/plan/check", json=words(**changes)).json()["reason"]
            return text

        assert reason() == ""
        assert reason(resources__max_instances=9) == "", "it gets those that there are"
        assert "gpus_per_trial.min: 9 is too many" in reason(resources__gpus_per_trial={"min": 9})
        assert reason(profile=None).startswith("profile: a pool promises a plan")
        assert reason(profile=None, constraints={"max_cost": 1}) == ""
