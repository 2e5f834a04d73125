"""The list of experiments in groups: by tag, by the first part of the name, with sums of what is charged."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubberband.api.dashboard import listing
from rubberband.api.dashboard.list_groups import groups_of
from rubberband.api.dashboard.listing import row
from rubberband.states import ExperimentState
from rubberband.values.submission import Labels, Submission, Summary
from tests.builders.fake_runs import FakeService


def submission(name: str, cost_usd: float = 1.0, tags: tuple[str, ...] = (), **summary: object) -> Submission:
    return Submission(
        name=name,
        state=ExperimentState.DONE,
        created_at=1.0,
        changed_at=2.0,
        labels=Labels(tags=tags),
        summary=Summary(started_at=1.0, cost_usd=cost_usd, **summary),  # type: ignore[arg-type]
    )


ROWS = [
    submission("sweep-1", 2.0, ("vision",), metric="loss", mode="min", best_value=0.3),
    submission("sweep-2", 3.0, ("vision", "nightly"), metric="loss", mode="min", best_value=0.2),
    submission("sweep-3", 50.0, ("vision",), is_rehearsal=True, is_charged=False),
    submission("other", 0.5, metric="accuracy", best_value=0.9),
]


def test_names_are_grouped_up_to_their_last_part_and_sums_leave_rehearsals_out() -> None:
    sweep, other = groups_of(ROWS, "name")
    assert (sweep.title, sweep.search, sweep.cost, sweep.free) == ("sweep-", "sweep-", "5.00", "1 not charged")
    assert (sweep.states, sweep.best, sweep.name) == ("3 experiments", "loss 0.2", "sweep-2")
    assert (other.title, other.cost, other.best) == ("other", "0.50", "accuracy 0.9")


def test_an_experiment_is_in_the_group_of_each_of_its_tags() -> None:
    groups = {one.title: one for one in groups_of(ROWS, "tag")}
    assert groups.keys() == {"vision", "nightly", "without a tag"}
    assert (groups["vision"].cost, groups["nightly"].cost, groups["without a tag"].cost) == ("5.00", "3.00", "0.50")
    assert groups["vision"].tag == "vision"


def test_metrics_that_differ_have_no_best() -> None:
    mixed = [submission("a-1", metric="loss", best_value=1.0), submission("a-2", metric="accuracy", best_value=1.0)]
    (group,) = groups_of(mixed, "name")
    assert (group.best, group.name) == ("", "")


NAMES = st.from_regex(r"[a-z]{1,3}(-[a-z0-9]{1,2}){0,2}", fullmatch=True)


@given(st.lists(st.tuples(NAMES, st.floats(0.0, 100.0), st.booleans()), unique_by=lambda one: one[0], max_size=12))
def test_every_experiment_is_in_one_group_of_names_and_no_charged_cent_is_lost(
    found: list[tuple[str, float, bool]],
) -> None:
    rows = [submission(name, cost, is_charged=charged) for name, cost, charged in found]
    groups = groups_of(rows, "name")
    assert sum(int(one.states.split()[0]) for one in groups) == len(rows)
    sums = [float(one.cost.replace(",", "")) for one in groups if one.cost]
    whole = math.fsum(cost for _, cost, charged in found if charged)
    assert sum(sums) == pytest.approx(whole, abs=0.01 * max(1, len(groups)))


def test_the_page_shows_groups_with_links_to_their_experiments(service: FakeService) -> None:
    for one in ROWS:
        service.add(one.name, state=one.state, summary=one.summary, labels=one.labels)
    html = service.client.get("/?group=tag", headers={"Accept": "text/html"}).text
    (table,) = re.findall(r'<table class="stacks groups".*?</table>', html, re.DOTALL)
    assert '<a href="/?tag=vision">vision</a>' in table
    assert ">5.00 <small" in table
    named = service.client.get("/?group=name", headers={"Accept": "text/html"}).text
    assert '<a href="/?search=sweep-">sweep-</a>' in named
    assert 'class="stacks list"' in service.client.get("/?group=nonsense", headers={"Accept": "text/html"}).text


def test_sums_have_all_experiments_of_a_list_that_is_read_in_several_parts(
    service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "_AT_ONCE", 2)
    for number in range(5):
        summary = Summary(started_at=1.0, cost_usd=10.0**number)
        service.add(f"a-{number}", state=ExperimentState.DONE, summary=summary)
    html = service.client.get("/?group=name", headers={"Accept": "text/html"}).text
    (table,) = re.findall(r'<table class="stacks groups".*?</table>', html, re.DOTALL)
    assert "5 experiments" in table
    assert ">11,111.00<" in table
    assert "count here" not in html
    monkeypatch.setattr(listing, "_MOST_GROUPED", 3)
    html = service.client.get("/?group=name", headers={"Accept": "text/html"}).text
    assert "Only the newest 4 experiments count here; older ones are in no sum." in html


def test_costs_of_a_page_stand_below_each_other_at_the_point(service: FakeService) -> None:
    for name, cost_usd in (("small", 0.0123), ("large", 12.5)):
        service.add(name, state=ExperimentState.DONE, summary=Summary(started_at=1.0, cost_usd=cost_usd))
    html = service.client.get("/", headers={"Accept": "text/html"}).text
    costs = re.findall(r'<td class="spend.*?<span>([\d.]+)</span>', html, re.DOTALL)
    assert sorted(costs) == ["0.0123", "12.5000"]


def test_a_running_experiment_says_when_it_ends() -> None:
    going = Submission(
        name="one",
        state=ExperimentState.RUNNING,
        created_at=1000.0,
        changed_at=1000.0,
        summary=Summary(started_at=1000.0, stages=1, iterations=3, target_iterations=9, forecast_jct_s=300.0),
    )
    assert row(going, 1100.0).progress == "3 of 9 iterations; ends 1970-01-01T00:21:40Z (in 3m20s)"
    rehearsed = replace(going, summary=replace(going.summary, is_rehearsal=True))
    assert row(rehearsed, 1100.0).progress == "3 of 9 iterations", "its clock is no time of day"


def test_a_best_that_breaks_its_limits_is_no_groups_best_beside_one_that_keeps_them() -> None:
    broken = submission("a-1", metric="loss", mode="min", best_value=0.1, best_note="not feasible")
    kept = submission("a-2", metric="loss", mode="min", best_value=0.3, best_note="mean 0.3 of 2 repeats")
    (group,) = groups_of([broken, kept], "name")
    assert (group.best, group.name) == ("loss 0.3", "a-2")
    (alone,) = groups_of([broken], "name")
    assert alone.best == "loss 0.1, not feasible"


def test_the_link_of_a_group_leads_to_the_experiments_that_it_counts(service: FakeService) -> None:
    for name, tags in (("a-1", ("mine", "night")), ("a-2", ("night",)), ("a-3", ("mine",)), ("b-1", ("mine",))):
        service.add(name, state=ExperimentState.DONE, labels=Labels(tags=tags))
    for asked, title in (("?tag=mine&group=name", "a-"), ("?search=a-&group=tag", "mine")):
        html = service.client.get(f"/{asked}", headers={"Accept": "text/html"}).text
        (link, count) = re.findall(rf'<a href="([^"]+)">{title}</a></th>\s*<td[^>]*>(\d+) ', html)[0]
        found = service.client.get(link.replace("&amp;", "&"), headers={"Accept": "text/html"}).text
        (table,) = re.findall(r'<table class="stacks list".*?</table>', found, re.DOTALL)
        assert sorted(re.findall(r'href="/experiments/([^"]+)"', table)) == ["a-1", "a-3"], asked
        assert int(count) == 2


def test_another_choice_of_experiments_is_grouped_as_before(service: FakeService) -> None:
    for one in ROWS:
        service.add(one.name, state=one.state, summary=one.summary, labels=one.labels)
    html = service.client.get("/?group=name&tag=vision", headers={"Accept": "text/html"}).text
    (states,) = re.findall(r'aria-label="Which experiments">.*?</nav>', html, re.DOTALL)
    addresses = [*re.findall(r'href="([^"]+)"', states), *re.findall(r'<a href="([^"]+)" aria-label="Show those', html)]
    assert len(addresses) > 2
    assert all("group=name" in address for address in addresses)
    assert '<input type="hidden" name="group" value="name">' in html
