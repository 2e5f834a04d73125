"""A service whose program prints its secret: no page, no answer, no stream and no file of the service has it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fastapi.routing import iter_route_contexts

from rubberband.api.app import create_app
from rubberband.api.dashboard.frame import asset_names
from rubberband.api.settings import Settings
from rubberband.api.store import open_store
from rubberband.client.client import Client
from tests.builders.command_line import EXPERIMENT
from tests.builders.secret_watch import watched
from tests.builders.server_process import serving

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(420)]

TOKEN = "hf_aVery$ecret/token"
PROGRAM = """
import json, os, pathlib, sys

out, x, until = pathlib.Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
token = os.environ["HF_TOKEN"]
begin = int((out / "n").read_text()) if (out / "n").exists() else 0
print("token", token, flush=True)
print("complains of", token, file=sys.stderr, flush=True)
if x > 0.5:
    raise SystemExit(f"the server refuses {token}, or {json.dumps(token)}")
import rubberband
for iteration in range(begin + 1, until + 1):
    (out / "n").write_text(str(iteration))
    rubberband.report({"score": x * iteration})
"""
SETTINGS = (
    "name=guarded",
    f"entrypoint={{command: '{sys.executable} train.py ${{checkpoint}} ${{x}} ${{max_t}}'}}",
    "search.scheduler={type: sha, num_samples: 4, max_t: 2, reduction_factor: 2}",
    "resources.env={DATA: /data}",
    "resources.secrets=[HF_TOKEN]",
)


def answers(address: str, home: Path) -> Iterator[tuple[str, str]]:
    """Ask every route that reads, as a page and as JSON; its address and what it answers."""
    store = open_store(None, home)
    app = create_app(Settings(home=home), store=store)
    paths = sorted({str(route.path) for route in iter_route_contexts(app.routes) if "GET" in (route.methods or ())})
    app.state.service.feed.close()
    store.close()
    values = {"{name}": ["guarded"], "{slug}": ["not-found"], "{id}": ["none"]}
    with httpx.Client(base_url=address, follow_redirects=True) as client:
        for path in paths:
            places = re.findall(r"\{[^}]+\}", path)
            filled = values[places[0]] if places else [""]
            if path.startswith("/static/"):
                filled = list(asset_names())
            for value in filled:
                for query in QUERIES.get(path, [""]):
                    where = (path.replace(places[0], value) if places else path) + query
                    for accepted in ("text/html", "application/json"):
                        yield f"{where} as {accepted}", _read(client, where, accepted)


QUERIES = {
    "/compare": ["?name=guarded"],
    "/fragments/compare": ["?name=guarded"],
    "/v1/events": ["?after=0"],
    "/v1/experiments/{name}/export": ["", "?reports=true"],
    "/v1/experiments/{name}/logs": ["?source=trials", "?source=process", "?source=trials&trial=0"],
    "/v1/experiments/{name}/trials": ["?curves=true"],
}


def _read(client: httpx.Client, where: str, accepted: str) -> str:
    """Return an answer; of a stream, what it has at once."""
    text = ""
    try:
        with client.stream("GET", where, headers={"Accept": accepted}, timeout=5.0) as answer:
            for part in answer.iter_text():
                text += part
    except httpx.ReadTimeout:
        assert "/v1/events" in where
    return text


def test_no_answer_of_a_service_has_the_secret_that_its_programs_print(tmp_path: Path) -> None:
    code, home = tmp_path / "code", tmp_path / "home"
    code.mkdir()
    (code / "train.py").write_text(PROGRAM)
    (tmp_path / "sleepy.yaml").write_text(EXPERIMENT)
    options = ("--allow-commands", "--code", str(code), "--secret", "HF_TOKEN", "--env", "DATA")
    with watched([TOKEN], tmp_path) as seen, serving(home, *options, environment={"HF_TOKEN": TOKEN}) as server:
        with Client(server.address) as client:
            client.submit(tmp_path / "sleepy.yaml", overrides=SETTINGS)
            followed = [line["text"] for line in client.logs("guarded", source="trials", follow=True)]
            assert client.wait("guarded")["state"] == "done"
            process = [line["text"] for line in client.logs("guarded", source="process")]
            preview = client.plan(tmp_path / "sleepy.yaml", overrides=SETTINGS)
        told = dict(answers(server.address, tmp_path))
        told |= {
            "logs --follow": "\n".join(followed),
            "logs --process": "\n".join(process),
            "plan": json.dumps(preview),
        }
    assert "token ***" in told["logs --follow"]
    assert "complains of ***" in told["logs --follow"]
    assert "the server refuses ***" in told["/v1/experiments/guarded/trials?curves=true as application/json"]
    assert "guarded" in told["/v1/events?after=0 as application/json"]
    assert "<html" in told["/experiments/guarded/report as text/html"]
    assert [where for where, text in told.items() if TOKEN in text or json.dumps(TOKEN)[1:-1] in text] == []
    assert seen == []
