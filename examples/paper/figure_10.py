"""Figure 10: the effect of the price of data on the saving, SHA(64, 4, 508), with small and large data sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import common
from common import COLOURS, CURVES, Finding, Report, Table, cells, verdict
from page import Figure, panels

from rubberband.spec.search import sha

ITERATION_S, DEADLINE_S = 4.0, 1200.0
DATA_GB = {"CIFAR-10": 0.15, "ImageNet": 150.0}
PRICES_USD_PER_GB = (0.0, 0.01, 0.02, 0.04, 0.08, 0.16)
STAGES = sha(64, 4, 508, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Costs of both policies at one price."""

    data: str
    curve: str
    usd_per_gb: float
    fixed_usd: float
    elastic_usd: float

    @property
    def saving(self) -> float:
        """Cost of fixed over elastic."""
        return self.fixed_usd / self.elastic_usd


def point(data: str, curve: str, usd_per_gb: float) -> Point:
    """Return the costs of both policies' cheapest plans."""
    offer = common.p3_8xlarge(max_instances=256, data_usd=DATA_GB[data] * usd_per_gb)
    profile = common.profile(CURVES[curve], ITERATION_S)
    fixed, elastic = (
        common.needed(common.best(STAGES, profile, offer, DEADLINE_S, policy)) for policy in ("static", "optimal")
    )
    return Point(
        data=data,
        curve=curve,
        usd_per_gb=usd_per_gb,
        fixed_usd=fixed.prediction.cost_usd,
        elastic_usd=elastic.prediction.cost_usd,
    )


def findings(points: Sequence[Point]) -> list[Finding]:
    """Return the statements of §6.1.2."""
    dearest = max(each.usd_per_gb for each in points)
    at = {(each.data, each.curve, each.usd_per_gb): each.saving for each in points}
    small = {curve: at["CIFAR-10", curve, dearest] for curve in CURVES}
    free, paid = ({curve: at["ImageNet", curve, price] for curve in CURVES} for price in (0.0, dearest))
    least = min(each.saving for each in points)
    return [
        Finding(
            says="When the majority of expenditure is on data movement, the benefit of elastic [...] is diminished.",
            verdict=verdict(*(paid[curve] < free[curve] for curve in CURVES)),
            found=f"ImageNet, from 0 to {dearest:g} USD per GB: "
            + "; ".join(f"{free[curve]:.2f}x to {paid[curve]:.2f}x ({curve})" for curve in CURVES)
            + ".",
        ),
        Finding(
            says="The elastic policy never does worse than the static one.",
            verdict=verdict(least >= 1.0 - 1e-9),
            found=f"The least that fixed costs of elastic is {least:.3f}x, over {len(points)} cases.",
        ),
        Finding(
            says="With CIFAR-10 we observe a modest ~1.5x improvement even at 0.16 USD per GB.",
            verdict=verdict(*(1.35 <= saving <= 1.65 for saving in small.values())),
            found="; ".join(f"{saving:.2f}x ({curve})" for curve, saving in small.items())
            + f" at {dearest:g} USD per GB; without any data {at['CIFAR-10', 'placed', 0.0]:.2f}x and "
            f"{at['CIFAR-10', 'scattered', 0.0]:.2f}x. How trials scale decides, not this data's price.",
        ),
    ]


def compute(prices_usd_per_gb: Sequence[float] = PRICES_USD_PER_GB) -> Report:
    """Compute the sweep, which starts with free data."""
    points = [point(data, curve, price) for data in DATA_GB for curve in CURVES for price in prices_usd_per_gb]
    rows = [
        cells(each.data, each.curve, f"{each.usd_per_gb:g}", each.fixed_usd, each.elastic_usd, f"{each.saving:.2f}x")
        for each in points
    ]
    columns = ("data set", "scaling", "USD per GB", "fixed USD", "elastic USD", "saving")
    return Report(
        title="Figure 10: cost of SHA(64, 4, 508) by the price of bringing the data set to every instance",
        tables=[Table(title="Cost", columns=columns, rows=rows)],
        figure=figure(points),
        findings=findings(points),
        assumptions=[
            *common.common_assumptions(),
            "CIFAR-10 is 0.15 GB and ImageNet 150 GB, paid once for each instance started. The paper tells neither "
            "deadline nor iteration time here: 20 minutes (its Figure 11) and 4 s with 1 GPU (its Figure 9); init 0 s.",
        ],
    )


def figure(points: Sequence[Point]) -> Figure:
    """Return a panel for each data set, cost over price."""
    lines = []
    for axis, data in enumerate(DATA_GB, start=1):
        for curve, dash in zip(CURVES, ("solid", "dot"), strict=True):
            shown = [each for each in points if (each.data, each.curve) == (data, curve)]
            prices = [each.usd_per_gb for each in shown]
            fixed, elastic = [each.fixed_usd for each in shown], [each.elastic_usd for each in shown]
            lines.append(common.line(f"fixed, {curve}", prices, fixed, COLOURS[0], axis, dash=dash, width=4.5))
            lines.append(common.line(f"elastic, {curve}", prices, elastic, COLOURS[1], axis, dash=dash))
    titles = [f"({letter}) {data}, {size:g} GB" for letter, (data, size) in zip("ab", DATA_GB.items(), strict=True)]
    return panels(lines, titles, x="price of data (USD per GB)")


if __name__ == "__main__":
    common.show(compute)
