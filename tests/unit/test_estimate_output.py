"""What `rubberband estimate` prints of noise, spot, several types and hyperband; its page."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial

import pytest

from rubberband.planner.estimates import estimate, estimate_plan
from rubberband.planner.exact.model import predict
from rubberband.planner.problem import Problem
from rubberband.planning.assumptions import assumptions
from rubberband.units import parse_duration
from rubberband.values.offer import Offer, Spot
from rubberband.values.plan import Plan, PlanningConstraints, Stage, StagePlan
from rubberband.values.profile import Profile, Spread
from rubberband.views.report import page as report_html
from tests.builders.cli_runs import file as file
from tests.builders.cli_runs import rubberband as rubberband
from tests.builders.tables import cases

NOISE = ["-s", "profile.trial_cv=0.1", "-s", "constraints.deadline=32m"]
SPOT = ["-s", "resources.market=spot", "-s", "resources.spot.price_per_hour=3.7", "-s", "constraints.deadline=1h"]
HYPERBAND = [
    "-s", "search.scheduler={type: hyperband, max_t: 9, reduction_factor: 3}", "-s", "constraints.deadline=2h",
    "-s", "resources.head_price_per_hour=0.5",
]  # fmt: skip
TYPES = [
    "-s", "resources.instance_type=", "-s", "resources.instance_types=[p3.2xlarge, p3.8xlarge]",
    "-s", "resources.gpus_per_instance=", "-s", "resources.price_per_hour=", "-s", "constraints.deadline=40m",
]  # fmt: skip
LATE = ["-s", "constraints.deadline=5m"]


@pytest.fixture
def command(file, rubberband, monkeypatch):
    """`rubberband estimate` on the example."""
    monkeypatch.setattr(report_html, "PLOTLY", "report.js")
    estimated = partial(rubberband, "estimate", file)
    estimated.json = partial(rubberband.json, "estimate", file)
    estimated.refused = partial(rubberband.refused, "estimate", file)
    return estimated


def section(out: str, title: str) -> list[str]:
    """The lines of a table."""
    lines = out.splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith(title))
    end = next((at for at in range(first, len(lines)) if not lines[at]), len(lines))
    return lines[first + 1 : end]


def test_the_same_seed_gives_the_same_figures(command):
    first, again, other = (command.json(*NOISE, "--seed", seed)["prediction"] for seed in ("1", "1", "2"))
    assert first == again
    assert first != other


def test_the_nearest_to_the_limit_of_several_infeasible_types_is_named(command):
    answer = command.json(*TYPES, "-s", "constraints.deadline=9h", "-s", "constraints.max_cost=5", code=3)
    each = [
        command.json(*TYPES[4:], "-s", f"resources.instance_type={name}", "-s", "constraints.deadline=9h",
                     "-s", "constraints.max_cost=5", code=3)["nearest"]["cost_usd"]
        for name in ("p3.2xlarge", "p3.8xlarge")
    ]  # fmt: skip
    assert answer["nearest"]["cost_usd"] == pytest.approx(min(each))


def test_hyperband_has_a_table_by_lanes_that_adds_up(command):
    out = command(*HYPERBAND)
    rows = section(out, "Stages")
    total = next(row for row in rows if row.strip().startswith("total"))
    figures = [row.split() for row in rows[1:] if row.strip() and row.split()[-1].replace(".", "").isdigit()]
    lanes = [row for row in figures if row[0] in ("lane", "head")]
    stages = [row for row in figures if row[0].isdigit()]
    if any(row[0] == "lane" for row in lanes):
        assert sum(float(row[-1]) for row in lanes) == pytest.approx(float(total.split()[-1]))
        assert sum(float(row[-1]) for row in stages) < float(total.split()[-1])
    assert {row[1] for row in stages} == {"0", "1", "2"}
    answer = command.json(*HYPERBAND)
    stages_usd = sum(stage["cost_usd"] for stage in answer["plan"]["stages"])
    assert stages_usd + answer["head_usd"] == pytest.approx(answer["prediction"]["cost_usd"]["mean"])
    brackets = answer["brackets"]
    assert sorted(bracket["bracket"] for bracket in brackets) == [0, 1, 2]
    assert all(bracket["stages"] for bracket in brackets)


def test_other_deadlines_cost_less_the_later_they_are(command):
    rows = section(command("--verbose"), "Other deadlines")[1:-1]
    costs_usd = [float(row.split()[1]) for row in rows]
    assert len(rows) > 4
    assert costs_usd == sorted(costs_usd, reverse=True)


@cases("objective", "arguments")
def test_a_row_that_looks_better_than_the_chosen_one_says_what_is_against_it(objective, arguments, command):
    """By the objective, options that are better are not allowed or take another policy; so of other deadlines."""
    out = command("-s", f"constraints.objective={objective}", *arguments)
    chosen, *others = [row.split("  ") for row in section(out, "Options")[1:]]
    plan = [cell.strip() for cell in chosen if cell.strip()]
    for row in others:
        cells = [cell.strip() for cell in row if cell.strip()]
        if cells[1] == "none":
            assert cells[-1] == "not within the limits"
            continue
        faster, cheaper = parse_duration(cells[2]) < parse_duration(plan[2]), float(cells[3]) < float(plan[3])
        if faster if objective == "min_time" else cheaper:
            against = r"over the budget|past the deadline|too risky: .* %|-.* \((--policy|scheduler) \w+\)"
            assert re.fullmatch(against, cells[-1])
        elif faster or cheaper:
            assert cells[-1].startswith(("+", "same time, +", "same cost, +"))
    for row in section(out, "Other deadlines")[1:]:
        _, cost, _, against = re.split(r" {2,}", row.strip())
        if float(cost) < float(plan[3]):
            assert against.endswith(("slower", "past your deadline", "(--policy optimal)"))


def test_json_has_the_whole_frontier_on_request(command):
    own, whole = command.json()["frontier"], command.json("--frontier")["frontier"]
    assert len(own) == 1 < len(whole)
    assert own[0]["cost_usd"] == pytest.approx(min(p["cost_usd"] for p in whole if p["jct_s"] <= 1200))
    costs_usd = [point["cost_usd"] for point in whole]
    assert costs_usd == sorted(costs_usd, reverse=True)


@cases("arguments", "stages", "words")
def test_a_plan_that_does_not_fit_is_one_line(arguments, stages, words, command, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"stages": [{"instances": 2, "gpus_per_trial": 1}] * stages}))
    assert words in command.refused(*arguments, "--plan", str(path))


@pytest.mark.by_default(2)
@pytest.mark.parametrize("arguments", [[], NOISE, SPOT, HYPERBAND])
def test_the_page_is_one_file_with_charts_and_tables(arguments, command, tmp_path):
    path = tmp_path / "estimate.html"
    command(*arguments, "--html", str(path))
    page = path.read_text()
    figures = json.loads(re.search(r'id="figures">(.*?)</script>', page, re.DOTALL).group(1))
    assert {"allocation", "frontier"} <= set(figures)
    assert ("times" in figures) == (arguments in (NOISE, SPOT))
    assert ("The estimate assumes that nothing varies" in page) == ("times" not in figures)
    assert not re.search(r'(src|href)="', page)
    for title in ("Stages", "Options", "Assumptions"):
        assert f"<h2>{title}" in page


def test_the_page_of_an_infeasible_request_has_the_frontier(command, tmp_path):
    path = tmp_path / "estimate.html"
    command(*LATE, "--html", str(path), code=3)
    page = path.read_text()
    assert '"allocation"' not in page
    assert '"frontier"' in page
    assert "cannot be written" in command.refused("--html", str(tmp_path / "none" / "x.html"))


def test_the_allocation_ends_with_the_plan_and_at_nothing(command, tmp_path):
    path = tmp_path / "estimate.html"
    answer = command.json("--html", str(path))
    figures = json.loads(re.search(r'id="figures">(.*?)</script>', path.read_text(), re.DOTALL).group(1))
    trace = figures["allocation"]["data"][0]
    assert trace["x"][-1] * 60 == pytest.approx(answer["prediction"]["jct_s"]["mean"], rel=1e-5)
    assert trace["y"][-1] == 0
    assert trace["y"][0] == answer["plan"]["stages"][0]["instances"]


STAGES = [Stage(trials=8, iterations=20), Stage(trials=2, iterations=80)]
PROFILE = Profile(seconds_per_iteration={1: 30.0, 4: 9.0}, trial_startup_s=2.0)
OFFER = Offer(
    instance_type="p3.8xlarge", gpus=4, price_usd_per_hour=3.6, max_instances=8, provision_delay_s=20.0,
    init_delay_s=40.0, minimum_billed_s=60.0, head_price_usd_per_hour=0.36, data_usd_per_instance=0.5,
)  # fmt: skip
PLAN = Plan(stages=(StagePlan(instances=2, gpus_per_trial=1), StagePlan(instances=4, gpus_per_trial=8)))


def estimated(profile=PROFILE, offer=OFFER, plan=PLAN, **limits):
    constraints = PlanningConstraints(max_gpus_per_trial=8, **limits)
    problem = Problem(brackets=[STAGES], offer=offer, profile=profile, constraints=constraints)
    return estimate_plan(problem, plan, compare=False)


def effects(answer, bases=None):
    return {one.name: one for one in assumptions(answer, bases or {})}


def test_every_effect_is_the_difference_that_a_changed_prediction_makes():
    answer = estimated()
    found = effects(answer)
    changed = {
        "time per iteration": (replace(PROFILE, seconds_per_iteration={1: 33.0, 4: 9.9}), OFFER),
        "start-up of a trial": (replace(PROFILE, trial_startup_s=2.2), OFFER),
        "provisioning of an instance": (PROFILE, replace(OFFER, provision_delay_s=22.0)),
        "initialising of an instance": (PROFILE, replace(OFFER, init_delay_s=44.0)),
        "price of an instance": (PROFILE, replace(OFFER, price_usd_per_hour=3.96)),
        "head node": (PROFILE, replace(OFFER, head_price_usd_per_hour=0.396)),
        "data": (PROFILE, replace(OFFER, data_usd_per_instance=0.55)),
        "speed beyond measured GPU counts": (replace(PROFILE, seconds_per_iteration={1: 30.0, 4: 9.0, 8: 9.9}), OFFER),
    }
    assert set(found) == {*changed, "noise of trials"}
    for name, (profile, offer) in changed.items():
        prediction = predict(STAGES, PLAN, profile, offer)
        assert found[name].effect_usd == pytest.approx(prediction.cost_usd - answer.prediction.cost_usd), name
        assert found[name].effect_s == pytest.approx(prediction.jct_s - answer.prediction.jct_s), name


def test_effects_have_the_sign_and_the_order_of_what_they_do():
    found = assumptions(estimated(), {})
    assert [abs(one.effect_usd) for one in found] == sorted((abs(one.effect_usd) for one in found), reverse=True)
    assert all(one.effect_usd >= 0 and one.effect_s >= 0 for one in found)
    by_name = {one.name: one for one in found}
    assert by_name["price of an instance"].effect_s == 0
    assert by_name["noise of trials"].effect_s > 0
    assert by_name["noise of trials"].value == "none"


def test_the_source_of_every_input_is_reported():
    found = effects(estimated(), {"time per iteration": "measured", "start-up of a trial": "default"})
    assert found["time per iteration"].basis == "measured"
    assert found["start-up of a trial"].basis == "default"
    assert found["price of an instance"].basis == "given"
    assert found["speed beyond measured GPU counts"].basis == "extrapolated"
    narrower = Plan(stages=(PLAN.stages[0], StagePlan(instances=4, gpus_per_trial=2)))
    assert effects(estimated(plan=narrower))["speed between measured GPU counts"].basis == "interpolated"


def test_a_zero_time_is_tried_as_some_seconds():
    found = effects(estimated(offer=replace(OFFER, provision_delay_s=0.0)))["provisioning of an instance"]
    assert (found.change, found.effect_s) == ("10s instead", 20.0)


def test_a_limit_that_a_change_breaks_is_reported():
    tight = estimated(deadline_s=estimated().prediction.jct_s + 1.0)
    found = effects(tight)
    assert found["time per iteration"].p_kept == 0.0
    assert found["price of an instance"].p_kept == 1.0


def test_with_noise_the_effects_are_those_on_the_means():
    noisy = replace(PROFILE, trial_cv=0.2)
    answer = estimated(noisy, replace(OFFER, init_spread=Spread(cv=0.5)), deadline_s=1500.0)
    found = effects(answer)
    certain = effects(estimated())
    assert found["time per iteration"].effect_usd == pytest.approx(certain["time per iteration"].effect_usd, rel=0.5)
    assert found["price of an instance"].effect_s == 0.0
    assert found["noise of trials"].effect_s > 0.0
    assert 0.0 < found["time per iteration"].p_kept < found["price of an instance"].p_kept <= 1.0
    assert effects(answer) == found


def test_spot_prices_and_interruptions_count_where_the_plan_is_on_spot():
    offer = replace(OFFER, spot=Spot(price_usd_per_hour=1.2, interruptions_per_hour=0.5, restart_s=60.0))
    on_spot = Plan(stages=tuple(replace(choice, market="spot") for choice in PLAN.stages))
    found = effects(estimated(offer=offer, plan=on_spot))
    assert found["price of a spot instance"].effect_usd > 0 == found["price of an instance"].effect_usd
    assert found["spot interruptions"].effect_s > 0


def test_brackets_share_the_head_node():
    brackets = [STAGES, [Stage(trials=2, iterations=50)]]
    limits = PlanningConstraints(max_gpus_per_trial=4, deadline_s=4000.0)
    problem = Problem(brackets=brackets, offer=OFFER, profile=PROFILE, constraints=limits)
    answer = estimate([problem], clock=lambda: 0.0, compare=False)
    found = effects(answer)
    assert found["head node"].effect_usd == pytest.approx(0.1 * OFFER.head_cost_usd(answer.prediction.jct_s))
    assert found["price of an instance"].effect_usd > 0


def test_without_a_plan_there_is_nothing_to_assume():
    limits = PlanningConstraints(deadline_s=1.0)
    problem = Problem(brackets=[STAGES], offer=OFFER, profile=PROFILE, constraints=limits)
    assert assumptions(estimate([problem], clock=lambda: 0.0), {}) == ()
