"""An extension of the limits, as the report and the live view tell it."""

from __future__ import annotations

import io
import json
import re

from rubberband.executor import Controller, DriverRequest, Job, Result, VirtualBackend, drive, summarise
from rubberband.views.live.view import open_view
from rubberband.views.report.page import render_html
from tests.builders.memory import MemoryJournal
from tests.builders.results import a_job, configurations, render
from tests.builders.timed_requests import TimedInbox, extend

REQUESTS = (extend(60.0, deadline_s=1800.0, max_cost_usd=2.5), extend(80.0, "r-2", deadline_s=2400.0))
EXTENDED = "extended: deadline 30m instead of 20m, max_cost 2.50 USD instead of 1.00 USD"


def run(job: Job, *requests: DriverRequest) -> tuple[Result, str]:
    """The result, and what was told meanwhile."""
    controller, stream = Controller(job), io.StringIO()
    backend = VirtualBackend(job.name, job.offer, job.profile, metric=job.metric)
    inbox = TimedInbox(backend.now, *requests)
    with open_view(job, backend.now, stream, is_terminal=False) as view:
        drive(controller, backend, MemoryJournal(), observers=[view], requests=inbox)
    return summarise(controller.state, configurations(job), backend.now()), stream.getvalue()


def test_the_report_lists_every_extension_and_uses_the_limits_in_force() -> None:
    result, _ = run(a_job(), *REQUESTS)
    text = render(result)
    assert re.match(r"deadline 40m met, .*; max_cost 2\.50 USD kept, ", text.splitlines()[1])
    assert f"it was {EXTENDED}." in text
    assert "it was extended: deadline 40m instead of 30m." in text
    assert EXTENDED in render_html(result)
    assert [extension["deadline_s"] for extension in json.loads(json.dumps(result.to_json()))["extensions"]] == [
        1800.0,
        2400.0,
    ]


def test_it_is_said_when_it_happens() -> None:
    _, text = run(a_job(), *REQUESTS)
    assert f"  {EXTENDED}\n" in text
    assert text.count("extended") == 2


def test_an_extension_without_effect_is_not_reported() -> None:
    result, text = run(a_job(max_cost_usd=None), extend(60.0, deadline_s=600.0, max_cost_usd=7.0))
    assert result.extensions == ()
    assert "extended" not in render(result) + text


def test_extended_before_its_first_event_it_begins_with_what_it_has_then() -> None:
    result, text = run(a_job(), extend(0.0, deadline_s=1800.0))
    assert "planned 1m57s and 0.0202 USD; deadline 30m; max_cost 1.00 USD" in text
    assert result.extensions[0].at_s == 0.0
