"""Adaptive batch sizes against GPUs and stage, in the form of Pollux's Figure 1b, as a plain Plotly figure. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from statistics import median

from rubberband.executor.result import Result
from rubberband.planner.goodput.choice import choose
from rubberband.values.adaptive import GoodputProfile
from rubberband.views.batch_charts import powers
from rubberband.views.batch_words import amount
from rubberband.views.charts import LEGEND, STAGE_COLOURS, Figure, gpus_per_instance
from rubberband.views.words import counted

_APART = 1.03
"""Points of several stages at the same count stand side by side, each so many times as far right."""

Curve = Mapping[int, int]
"""GPUs -> batch size."""


def batches_by_gpus(result: Result) -> Figure | None:
    """The batch sizes that trials came to, against their GPUs: a series a stage; None if batches are fixed."""
    settled = _settled(result)
    if not settled:
        return None
    used = {gpus for by_gpus in settled.values() for gpus in by_gpus}
    modelled = _modelled(result, used)
    sizes = [size for by_gpus in settled.values() for found in by_gpus.values() for size in found]
    sizes += [size for _, curve in modelled.values() for size in curve.values()]
    counts = sorted({*used, *(gpus for _, curve in modelled.values() for gpus in curve)})
    layout = {
        "height": 400,
        "showlegend": True,
        "xaxis": {
            "title": {"text": "GPUs of a trial"},
            "type": "log",
            "range": [math.log10(counts[0] / 1.3), math.log10(counts[-1] * 1.3)],
            "tickmode": "array",
            "tickvals": counts,
        },
        "yaxis": {"title": {"text": "batch size", "standoff": 14}, **powers(sizes)},
        **LEGEND,
    }
    curves = [_dashed(stage, noise, curve) for stage, (noise, curve) in sorted(modelled.items())]
    points = [_points(stage, by_gpus, _places(settled, stage)) for stage, by_gpus in sorted(settled.items())]
    return {"data": [*curves, *points], "layout": layout}


def _settled(result: Result) -> dict[int, dict[int, list[int]]]:
    """Stage -> GPUs -> the batch size that each trial had at last."""
    settled: dict[int, dict[int, list[int]]] = {}
    for trial in result.trials:
        for (stage, gpus), size in {(s.stage, s.gpus): s.batch_size for s in trial.batches}.items():
            settled.setdefault(stage, {}).setdefault(gpus, []).append(size)
    return settled


def _modelled(result: Result, used: Set[int]) -> dict[int, tuple[float, Curve]]:
    """Stage -> its noise scale and the best batches by the model; no stage without noise scale, or where no model is.

    A stage's noise scale is the median of those that trials had at its end. GPUs: those `used`, those that the profile
    has timed, and powers of two between.
    """
    profile = result.goodput
    if profile is None:
        return {}
    known = used | {point.gpus for point in profile.points}
    counts = sorted(known | {2**n for n in range(max(known).bit_length())})
    if len(counts) < 2:
        return {}
    noises: dict[int, list[float]] = {}
    for trial in result.trials:
        for stage, noise in {s.stage: s.noise_scale for s in trial.batches if s.noise_scale is not None}.items():
            noises.setdefault(stage, []).append(noise)
    per_instance = gpus_per_instance(result)
    return {
        stage: (median(found), _curve(profile, median(found), per_instance, counts)) for stage, found in noises.items()
    }


def _curve(profile: GoodputProfile, noise_scale: float, per_instance: int, counts: Sequence[int]) -> Curve:
    return {
        gpus: choose(profile.throughput, noise_scale, profile.limits, -(-gpus // per_instance), gpus).batch_size
        for gpus in counts
        if gpus <= profile.limits.max
    }


def _dashed(stage: int, noise_scale: float, curve: Curve) -> Figure:
    colour = STAGE_COLOURS[stage % len(STAGE_COLOURS)]
    return {
        "type": "scatter",
        "mode": "lines",
        "name": f"stage {stage}, by the model",
        "legendgroup": str(stage),
        "showlegend": False,
        "x": list(curve),
        "y": list(curve.values()),
        "hovertext": [
            f"stage {stage}, {counted(gpus, 'GPU')}: best batch {size:,}<br>by the model, at noise scale "
            f"{amount(noise_scale)}"
            for gpus, size in curve.items()
        ],
        "hoverinfo": "text",
        "line": {"color": colour, "width": 1.5, "dash": "dash"},
    }


def _places(settled: Mapping[int, Mapping[int, object]], stage: int) -> list[float]:
    """Where the stage's points stand on the axis of GPUs: at their count, or around it, side by side with others."""
    places = []
    for gpus in sorted(settled[stage]):
        sharing = sorted(other for other in settled if gpus in settled[other])
        places.append(gpus * _APART ** (sharing.index(stage) - (len(sharing) - 1) / 2))
    return places


def _points(stage: int, by_gpus: Mapping[int, Sequence[int]], places: Sequence[float]) -> Figure:
    colour = STAGE_COLOURS[stage % len(STAGE_COLOURS)]
    points = [(gpus, median(sizes), min(sizes), max(sizes), len(sizes)) for gpus, sizes in sorted(by_gpus.items())]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": f"stage {stage}",
        "legendgroup": str(stage),
        "x": list(places),
        "y": [middle for _, middle, *_ in points],
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [most - middle for _, middle, _, most, _ in points],
            "arrayminus": [middle - least for _, middle, least, _, _ in points],
            "color": colour,
            "thickness": 1.2,
        },
        "hovertext": [
            f"stage {stage}, {counted(gpus, 'GPU')}: batch {middle:,.6g}"
            f"<br>{least:,} to {most:,} over {counted(count, 'trial')}"
            for gpus, middle, least, most, count in points
        ],
        "hoverinfo": "text",
        "line": {"color": colour, "width": 2},
        "marker": {"color": colour, "size": 8},
    }
