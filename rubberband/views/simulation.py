"""Tables and page of a simulated workload: policies side by side, completion times, and GPUs over time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rubberband.planner.sharing.simulation import Outcome
from rubberband.planning.simulating import Simulation
from rubberband.units import counted, format_duration, format_usd
from rubberband.views.charts.parts import STAGE_COLOURS, Figure, axis, chart, scatter, time_unit
from rubberband.views.report.page import STRIP, STRIP_END, card, chart_section, page, page_header, table_section
from rubberband.views.report.tables import TextTable

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
    header = [
        "policy",
        "mean JCT",
        "median JCT",
        "p99 JCT",
        "makespan",
        "utilisation",
        "fairness",
        "worst",
        "moves per job",
    ]
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
        f"{counted(found.capacity.instances, 'instance')} of {counted(found.capacity.gpus_per_instance, 'GPU')}",
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
        drawn["instances"] = _sizes(found)
    drawn |= {f"kinds-{number}": _kinds(each) for number, each in enumerate(found.outcomes.values())}
    figures = first.summary(found.usd_per_hour)
    cards = [
        card("Mean JCT", _time(figures["mean_jct_s"]), f"under {name}"),
        card("p99 JCT", _time(figures["p99_jct_s"]), "99 % of the jobs are faster"),
        card(
            "Utilisation",
            f"{100.0 * first.utilisation:.0f} %",
            f"of {'at most ' * (found.autoscaling is not None)}{counted(found.capacity.gpus, 'GPU')}",
        ),
    ]
    sections = [
        chart_section(f"kinds-{number}", f"Allocations under {policy}", "GPUs that each kind of job holds.", drawn)
        for number, policy in enumerate(found.outcomes)
    ]
    body = "\n".join(
        [
            page_header(found.workload, "done", "simulated", [policy_table(found).title], cards),
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


def _sizes(found: Simulation) -> Figure:
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
