"""Pages and charts of a pool and of its simulation: who held which GPUs, what it cost, who waits, what is promised.

The page is made from the JSON of the pool's status. The page of a service that shares a pool draws the same charts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rubberband.planner.sharing import Calendar
from rubberband.planner.sharing.simulation import Outcome
from rubberband.pools.simulating import Simulation
from rubberband.units import counted, format_duration, format_usd
from rubberband.views.charts.parts import (
    PLANNED,
    STAGE_COLOURS,
    Figure,
    axis,
    chart,
    line_at,
    scatter,
    time_axis,
    time_unit,
)
from rubberband.views.formatting import Card, Gauge, TextTable
from rubberband.views.report.page import STRIP, STRIP_END, chart_section, page, page_header, table_section

PoolStatus = Mapping[str, Any]
"""JSON of `rubberband pool status -o json`."""

_ROW_PX, _AROUND_PX, _CHART_PX = 22, 130, 320
_MOST_LOANS = 2000
"""Loans of the chart; of more, the latest."""
CHARTS = {
    "promises": (
        "Promises",
        "GPUs that each experiment is promised from now on. The policy divides the rest among those that run.",
    ),
    "loans": (
        "Loans over time",
        "A row is a GPU of an instance, a bar what one experiment held. The empty parts were idle, and are the pool's.",
    ),
    "sizes": ("Instances", "Instances that run, and the number that the pool's autoscaling allows."),
    "spend": ("Spend", "Cost of each experiment over time, at its share of the instances that it held."),
}
"""Name -> title and note of each chart of a pool, in their order."""


def experiments_table(status: PoolStatus) -> TextTable:
    """Return a row for each run of an experiment, the latest first."""
    loans: dict[str, list[PoolStatus]] = {}
    for loan in status["loans"]:
        loans.setdefault(loan["tenant"], []).append(loan)
    rows = []
    for tenant in reversed(status["tenants"]):
        own = loans.get(tenant["tenant"], [])
        waited_s = sum(loan["running_at"] - loan["requested_at"] for loan in own)
        gpu_s = sum(loan["gpus"] * ((loan["ended_at"] or status["now"]) - loan["running_at"]) for loan in own)
        rows.append(
            (
                tenant["experiment"],
                str(tenant["gpus"]),
                str(tenant["waiting_gpus"]) if tenant["waiting_gpus"] else "-",
                f"{gpu_s / 3600.0:.2f}",
                f"{sum(loan['was_warm'] for loan in own)} of {len(own)}",
                format_duration(waited_s / len(own)) if own else "-",
                format_usd(tenant["usd"]),
            )
        )
    header = ("experiment", "GPUs", "waits for", "GPU hours", "warm instances", "mean wait", "cost")
    return TextTable(title="Experiments", header=header, rows=tuple(rows))


def money_table(status: PoolStatus) -> TextTable:
    """Return how the provider's bill is made of the experiments' bills and the pool's idle time."""
    usd = status["usd"]
    rows = (("experiments", format_usd(usd["lent"])), ("idle", format_usd(usd["idle"])))
    return TextTable(
        title="Bill",
        header=("part", "cost"),
        rows=rows,
        total=("provider's bill", format_usd(usd["bill"])),
        notes=("Idle: GPUs that no experiment held, starts, and minima that are not used up.",),
    )


def pool_cards(status: PoolStatus, *, planned: str = "") -> list[Card]:
    """Return the cards: instances, and money against the caps. `planned`: a note on the rest of the month."""
    usd = status["usd"]
    free = f"{status['free_gpus']} of {counted(status['gpus'], 'GPU')} free"
    warm = sum(loan["was_warm"] for loan in status["loans"])
    started = f"{counted(status['started'], 'instance')} started"
    return [
        Card("instances", f"{status['instances']} of {status['max_instances']}", (autoscaled_words(status), free)),
        _money_card("this month", usd["month"], usd["max_per_month"], planned),
        _money_card("per hour now", usd["per_hour"], usd["max_per_hour"]),
        Card("lent warm", f"{warm} of {len(status['loans'])}", (started,)),
    ]


def _money_card(title: str, spent_usd: float, cap_usd: float | None, *notes: str) -> Card:
    notes = ("no cap" if cap_usd is None else f"of {format_usd(cap_usd)}", *notes)
    if not cap_usd:
        return Card(title, format_usd(spent_usd), notes)
    share = spent_usd / cap_usd
    gauge = Gauge(done=min(share, 1.0), over=share > 1.0, label=f"{100 * share:.0f} % of the cap")
    return Card(title, format_usd(spent_usd), notes, gauge)


def render_pool(status: PoolStatus) -> str:
    """Return the page, which needs no network."""
    drawn = pool_charts(status)
    waiting = len(status["waiting"])
    answers = [f"{counted(waiting, 'request')} wait{'s' * (waiting == 1)}"] if waiting else []
    body = "\n".join(
        [
            page_header(status["name"], {"done": "pool"}, answers, pool_cards(status)),
            STRIP,
            *(chart_section(name, *CHARTS[name], drawn) for name in ("loans", "sizes", "spend")),
            STRIP_END,
            table_section(experiments_table(status), sortable=True),
            table_section(money_table(status)),
        ]
    )
    return page(f"{status['name']} - RubberBand pool", body, drawn)


Colours = Mapping[str, str]
"""Experiment -> colour in every chart of a page."""


def colours_of(experiments: Iterable[str]) -> Colours:
    """Return a colour for each experiment; the colours repeat where there are too few."""
    return {name: STAGE_COLOURS[at % len(STAGE_COLOURS)] for at, name in enumerate(dict.fromkeys(experiments))}


def pool_charts(status: PoolStatus, colours: Colours | None = None) -> dict[str, Figure]:
    """Return the charts `loans`, `spend` and, of a pool that scales, `sizes`; none for a pool that lent nothing.

    `colours` has all its experiments.
    """
    loans = status["loans"][-_MOST_LOANS:]
    if not loans:
        return {}
    chosen = colours_of(loan["experiment"] for loan in loans) if colours is None else colours
    drawn = {"loans": _loans(status, loans, chosen), "spend": _spend(status, loans, chosen)}
    return drawn | ({"sizes": _sizes(status, loans)} if status.get("scales") else {})


def promises_chart(calendar: Calendar, now: float, colours: Colours) -> Figure | None:
    """Return the promised GPUs over time from `now` (Unix time) on, stacked; None where nothing is promised."""
    ends = {
        name: start_at + sum(span.duration_s for span in plan) for name, (start_at, plan) in calendar.promises.items()
    }
    names = [name for name in ends if ends[name] > now]
    if not names:
        return None
    edges = {now}
    for name in names:
        at, plan = calendar.promises[name]
        for span in plan:
            edges |= {at, at + span.duration_s}
            at += span.duration_s
    instants = sorted(edge for edge in edges if edge >= now)
    unit, unit_s = time_unit(instants[-1] - now)
    traces = []
    for name in names:
        ends_in = f"until {format_duration(ends[name] - now)} from now"
        points = [
            ((at - now) / unit_s, gpus, f"{name}: {counted(gpus, 'GPU')}, {ends_in}")
            for at, gpus in ((at, calendar.promised(name, at)) for at in instants)
        ]
        line = {"shape": "hv", "width": 1, "color": colours[name]}
        traces.append(scatter(name, points, line=line, stackgroup="promised"))
    count = {"tickformat": "d", "nticks": min(calendar.gpus + 1, 8)}
    return chart(
        traces,
        _CHART_PX,
        time_axis(unit, (instants[-1] - now) / unit_s, "time from now"),
        axis(f"GPUs of {calendar.gpus}", range=[0, calendar.gpus * 1.1], **count),
        showlegend=True,
        shapes=[line_at(calendar.gpus, "y", {"width": 1.5, "dash": "dash", "color": PLANNED})],
    )


def _loans(status: PoolStatus, loans: Sequence[PoolStatus], colours: Colours) -> Figure:
    """Return bars over time: a row for each GPU of each instance."""
    begin, now = min(loan["running_at"] for loan in loans), status["now"]
    unit, unit_s = time_unit(now - begin)
    rows = _lanes(loans, status["gpus_per_instance"])
    names = sorted({row for lanes in rows for row in lanes}, key=_row_order)
    traces = []
    for experiment in dict.fromkeys(loan["experiment"] for loan in loans):
        bars = [
            (row, loan)
            for loan, lanes in zip(loans, rows, strict=True)
            if loan["experiment"] == experiment
            for row in lanes
        ]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": experiment,
                "y": [row for row, _ in bars],
                "base": [(loan["running_at"] - begin) / unit_s for _, loan in bars],
                "x": [((loan["ended_at"] or now) - loan["running_at"]) / unit_s for _, loan in bars],
                "marker": {"color": colours[experiment]},
                "hovertext": [_loan_text(loan, now) for _, loan in bars],
                "hoverinfo": "text",
            }
        )
    return chart(
        traces,
        _ROW_PX * len(names) + _AROUND_PX,
        time_axis(unit, (now - begin) / unit_s, "time since the first loan"),
        {"type": "category", "categoryorder": "array", "categoryarray": names[::-1], "fixedrange": True},
        barmode="overlay",
        bargap=0.15,
    )


def _sizes(status: PoolStatus, loans: Sequence[PoolStatus]) -> Figure:
    """Return the instances over time, and those that autoscaling allows."""
    begin, now = min(loan["running_at"] for loan in loans), status["now"]
    unit, unit_s = time_unit(now - begin)

    def steps(name: str, changes: Sequence[PoolStatus], **line: Any) -> Figure:
        points = []
        for change in [*changes, {**changes[-1], "at": now}] if changes else []:
            efficiency = f" at {100.0 * change['efficiency']:.0f} % efficiency" if "efficiency" in change else ""
            text = f"{name}: {counted(change['instances'], 'instance')}{efficiency}"
            points.append(((change["at"] - begin) / unit_s, change["instances"], text))
        return scatter(name, points, line={"shape": "hv", **line})

    traces = [
        steps("running", status["sizes"], color=STAGE_COLOURS[0]),
        steps("autoscaling", status["scales"], color=PLANNED, dash="dash"),
    ]
    across = time_axis(unit, (now - begin) / unit_s, "time since the first loan")
    count = axis(f"instances of {status['max_instances']}", rangemode="tozero", tickformat="d")
    return chart(traces, _CHART_PX, across, count, showlegend=True)


def autoscaled_words(status: PoolStatus) -> str:
    """Return what the autoscaling of a pool allows: `autoscaled to 2 (62 % efficiency)`; empty if it does not scale."""
    if status["autoscaled"] is None:
        return ""
    latest = status["efficiency"]
    return f"autoscaled to {status['autoscaled']}" + (f" ({100.0 * latest:.0f} % efficiency)" if latest else "")


def _loan_text(loan: PoolStatus, now: float) -> str:
    held = format_duration((loan["ended_at"] or now) - loan["running_at"])
    warm = "taken warm" if loan["was_warm"] else "started for it"
    return f"{loan['experiment']}: {loan['machine']}, {counted(loan['gpus'], 'GPU')} for {held}, {warm}"


def _row_order(row: str) -> tuple[int, int]:
    machine, _, gpu = row.partition(" GPU ")
    return int(machine.removeprefix("m")), int(gpu or 0)


def _lanes(loans: Sequence[PoolStatus], gpus: int) -> list[list[str]]:
    """Return for each loan the rows that it fills: the first GPUs of its instance that are free from its start on."""
    free_at: dict[str, float] = {}
    found: dict[int, list[str]] = {}
    for index, loan in sorted(enumerate(loans), key=lambda pair: pair[1]["running_at"]):
        rows = [f"{loan['machine']} GPU {gpu}" for gpu in range(gpus)]
        free = [row for row in rows if free_at.get(row, 0.0) <= loan["running_at"]] or rows
        found[index] = free[: loan["gpus"]]
        for row in found[index]:
            free_at[row] = float("inf") if loan["ended_at"] is None else loan["ended_at"]
    return [found[index] for index in range(len(loans))]


def _spend(status: PoolStatus, loans: Sequence[PoolStatus], colours: Colours) -> Figure:
    """Return the cost of each experiment over time; a loan costs the same at every moment."""
    begin, now = min(loan["running_at"] for loan in loans), status["now"]
    unit, unit_s = time_unit(now - begin)
    traces = []
    for experiment in dict.fromkeys(loan["experiment"] for loan in loans):
        own = [loan for loan in loans if loan["experiment"] == experiment]
        instants = sorted(
            {begin, now, *(loan["running_at"] for loan in own), *(loan["ended_at"] or now for loan in own)}
        )
        points = []
        for at in instants:
            usd = sum(loan["usd"] * _share(loan, at, now) for loan in own)
            points.append(((at - begin) / unit_s, usd, f"{experiment}: {format_usd(usd)}"))
        traces.append(scatter(experiment, points, line={"color": colours[experiment]}))
    return chart(traces, _CHART_PX, axis(f"time since the first loan ({unit})"), axis("USD"))


def _share(loan: PoolStatus, at: float, now: float) -> float:
    """Return the part of a loan that has passed by `at`."""
    length_s = (loan["ended_at"] or now) - loan["running_at"]
    passed_s = min(max(0.0, at - loan["running_at"]), length_s)
    return passed_s / length_s if length_s > 0.0 else float(at >= loan["running_at"])


_HEIGHT_PX = 380
_MOST_POINTS = 1500
"""Points of a line over time; beyond, it is sampled."""
_MOST_DOTS = 50
"""Jobs of a line with dots: one of a single job has no other mark."""
_JCTS = "Share of the jobs that are complete within a time after their submission, for every policy."
_FAIRNESS = (
    "Share of the jobs whose completion time is at most a multiple of that alone on a fair share of the pool; right of "
    "1 a job fared worse than that."
)
_GPUS = "GPUs that jobs hold at every moment, for every policy."
_INSTANCES = "Instances of the pool by its autoscaling, for every policy."


def policy_table(found: Simulation) -> TextTable:
    """Return a row for each policy; with the cost if the pool has a price."""
    header = ["policy", "mean JCT", "median JCT", "p99 JCT", "makespan", "utilisation", "fairness", "worst"]
    header += ["moves per job"]
    unfinished = any(len(outcome.jcts_s) < len(outcome.jobs) for outcome in found.outcomes.values())
    scales = found.autoscaling is not None
    header += ["instances"] * scales + ["cost"] * bool(found.usd_per_hour) + ["unfinished"] * unfinished
    rows = []
    for name, outcome in found.outcomes.items():
        figures = outcome.summary(found.usd_per_hour)
        row = [
            name,
            *(_time(figures[key]) for key in ("mean_jct_s", "median_jct_s", "p99_jct_s", "makespan_s")),
            f"{100.0 * outcome.utilisation:.0f} %",
            *(_multiple(figures[key]) for key in ("mean_finish_time_fairness", "max_finish_time_fairness")),
            f"{figures['moves_per_job']:.1f}",
        ]
        row += [f"{figures['mean_instances']:.1f}"] * scales
        row += [format_usd(figures["cost_usd"] or 0.0)] * bool(found.usd_per_hour)
        rows.append((*row, *[str(figures["unfinished"])] * unfinished))
    jobs = len(next(iter(found.outcomes.values())).jobs)
    notes = []
    if found.autoscaling is not None:
        rule = f"grows above {found.autoscaling.upper:g}, shrinks below {found.autoscaling.lower:g}"
        notes.append(f"Instances: their mean; the pool {rule} of its ideal. A new instance is there at once.")
    return TextTable(
        title=f"{counted(jobs, 'job')} of {found.workload} on {found.pool}: {'at most ' * scales}"
        f"{counted(found.capacity.instances, 'instance')} of {counted(found.capacity.gpus_per_instance, 'GPU')}"
        f"{', shared by gangs' * found.share_machines}"
        f"{f', {100.0 * found.interference:g} % interference' * bool(found.interference)}",
        header=tuple(header),
        rows=tuple(rows),
        words=frozenset({0}),
        notes=(
            *notes,
            "Fairness: completion times over those alone on a fair share of the pool, their mean and the worst.",
            "Simulated: nothing was started, and nothing was charged.",
        ),
    )


def _time(seconds: float | None) -> str:
    return "none" if seconds is None else format_duration(round(seconds))


def _multiple(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}"


def render_simulation(found: Simulation) -> str:
    """Return the page, which needs no network."""
    name, first = next(iter(found.outcomes.items()))
    drawn = {"jcts": _completion(found), "fairness": _fairness(found), "gpus": _held(found)}
    if found.autoscaling is not None:
        drawn["instances"] = _pool_sizes(found)
    drawn |= {f"kinds-{number}": _kinds(each) for number, each in enumerate(found.outcomes.values())}
    figures = first.summary(found.usd_per_hour)
    cards = [
        Card("Mean JCT", _time(figures["mean_jct_s"]), (f"under {name}",)),
        Card("p99 JCT", _time(figures["p99_jct_s"]), ("99 % of the jobs are faster",)),
        Card(
            "Utilisation",
            f"{100.0 * first.utilisation:.0f} %",
            (f"of {'at most ' * (found.autoscaling is not None)}{counted(found.capacity.gpus, 'GPU')}",),
        ),
    ]
    sections = [
        chart_section(f"kinds-{number}", f"Allocations under {policy}", "GPUs that each kind of job holds.", drawn)
        for number, policy in enumerate(found.outcomes)
    ]
    body = "\n".join(
        [
            page_header(found.workload, {"done": "simulated"}, [policy_table(found).title], cards),
            table_section(policy_table(found)),
            STRIP,
            chart_section("jcts", "Job completion times", _JCTS, drawn),
            chart_section("fairness", "Finish-time fairness", _FAIRNESS, drawn),
            chart_section("gpus", "GPUs in use", _GPUS, drawn),
            *([chart_section("instances", "Instances", _INSTANCES, drawn)] if found.autoscaling else []),
            *sections,
            STRIP_END,
        ]
    )
    return page(f"{found.workload} - RubberBand simulation", body, drawn)


def _completion(found: Simulation) -> Figure:
    minutes = {name: [max(1.0, each) / 60.0 for each in outcome.jcts_s] for name, outcome in found.outcomes.items()}
    across = axis("job completion time (minutes)", type="log")
    return _shares(found, minutes, across, lambda value: f"within {format_duration(round(60.0 * value))}")


def _fairness(found: Simulation) -> Figure:
    rhos = {name: outcome.fairness for name, outcome in found.outcomes.items()}
    across = axis("completion time over that alone on a fair share", rangemode="tozero")
    return _shares(found, rhos, across, lambda value: f"at most {value:.2f}")


def _shares(
    found: Simulation, values: Mapping[str, Sequence[float]], across: Figure, words: Callable[[float], str]
) -> Figure:
    """Return the share of the jobs up to every value, a line for each policy."""
    traces = []
    for number, (name, outcome) in enumerate(found.outcomes.items()):
        points = [
            (
                value,
                100.0 * (at + 1) / len(outcome.jobs),
                f"{name}: {100.0 * (at + 1) / len(outcome.jobs):.0f} % {words(value)}",
            )
            for at, value in enumerate(sorted(values[name]))
        ]
        mode = "lines+markers" if len(points) <= _MOST_DOTS else "lines"
        traces.append(scatter(name, points, mode, line={"color": _colour(number), "shape": "hv"}))
    return chart(traces, _HEIGHT_PX, across, axis("% of jobs", range=[0, 102]))


def _held(found: Simulation) -> Figure:
    unit, unit_s = time_unit(max(outcome.ended_at for outcome in found.outcomes.values()))
    traces = []
    for number, (name, outcome) in enumerate(found.outcomes.items()):
        times_s, (gpus,) = _over_time(outcome, [None])
        points = [(at / unit_s, held, f"{name}: {held:.0f} GPUs") for at, held in zip(times_s, gpus, strict=True)]
        traces.append(scatter(name, points, line={"color": _colour(number), "shape": "hv"}))
    return _over(unit, traces)


def _pool_sizes(found: Simulation) -> Figure:
    unit, unit_s = time_unit(max(outcome.ended_at for outcome in found.outcomes.values()))
    traces = []
    for number, (name, outcome) in enumerate(found.outcomes.items()):
        sizes = [*outcome.sizes, (outcome.ended_at, outcome.sizes[-1][1])]
        points = [(at / unit_s, size, f"{name}: {counted(size, 'instance')}") for at, size in sizes]
        traces.append(scatter(name, points, line={"color": _colour(number), "shape": "hv"}))
    return chart(traces, _HEIGHT_PX, axis(f"time ({unit})"), axis("instances", rangemode="tozero"))


def _kinds(outcome: Outcome) -> Figure:
    unit, unit_s = time_unit(outcome.ended_at)
    kinds = sorted({job.kind for job in outcome.jobs})
    times_s, rows = _over_time(outcome, kinds)
    traces = []
    for number, (kind, gpus) in enumerate(zip(kinds, rows, strict=True)):
        points = [(at / unit_s, held, f"{kind}: {held:.0f} GPUs") for at, held in zip(times_s, gpus, strict=True)]
        colour = _colour(number)
        traces.append(scatter(kind, points, stackgroup="one", line={"color": colour, "width": 0.5, "shape": "hv"}))
    return _over(unit, traces)


def _over_time(outcome: Outcome, kinds: Sequence[str | None]) -> tuple[list[float], list[list[float]]]:
    """Return instants, and the GPUs held from each one on by jobs of every kind (None: of all), thinned if many."""
    of = {job.name: job.kind for job in outcome.jobs}
    every = max(1, len(outcome.allocated) // _MOST_POINTS)
    allocated = [*outcome.allocated[::every], (outcome.ended_at, {})]
    rows = [
        [float(sum(gpus for name, gpus in held.items() if kind is None or of[name] == kind)) for _, held in allocated]
        for kind in kinds
    ]
    return [at for at, _ in allocated], rows


def _over(unit: str, traces: Sequence[Figure]) -> Figure:
    return chart(traces, _HEIGHT_PX, axis(f"time ({unit})"), axis("GPUs", rangemode="tozero"))


def _colour(number: int) -> str:
    return STAGE_COLOURS[number % len(STAGE_COLOURS)]
