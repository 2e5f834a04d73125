"""The page of the REST API: whole without the network, and every operation of the document is on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rubberband.api.app import create_app
from rubberband.api.settings import Settings
from rubberband.api.store import open_store
from tests.builders.browser import PHONE, chromium, served, visiting
from tests.builders.fake_runs import fake_service


@pytest.mark.long
def test_it_runs_scripts_of_the_service_only(tmp_path: Path) -> None:
    with fake_service(tmp_path) as service:
        answer = service.client.get("/docs", headers={"Accept": "text/html"})
        assert answer.status_code == 200
        assert 'spec-url="/openapi.json"' in answer.text
        assert "script-src 'self'" in answer.headers["Content-Security-Policy"]
        assert service.client.get("/openapi.json").status_code == 200
        assert service.client.get("/static/rapidoc-min.js").status_code == 200


@pytest.mark.long
def test_every_operation_is_shown(tmp_path: Path) -> None:
    app: Any = create_app(Settings(home=tmp_path), store=open_store(None, tmp_path))
    summaries = [each["summary"] for path in app.openapi()["paths"].values() for each in path.values()]
    with served(app) as address, chromium() as browser, visiting(browser, address) as visit:
        page = visit.open("/docs")
        for summary in summaries:
            page.get_by_text(summary, exact=True).first.wait_for(state="attached")
        assert visit.overflow_px() <= 0
        visit.shot("docs")
        page.set_viewport_size(PHONE)
        assert visit.overflow_px() <= 0
        visit.shot("docs-phone")
