"""Report of the paper's experiments as one self-contained page."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rubberband.views.report.page import PLOTLY, asset

if TYPE_CHECKING:
    from common import Finding, Report, Table

Figure = Mapping[str, Any]
"""`data` and `layout` of a Plotly figure."""

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2430; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.35rem; } h2 { font-size: 1.05rem; margin-top: 2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #e3e6ea; }
th { color: #5b6472; font-weight: 600; }
li { margin-bottom: .5rem; }
.verdict { font-weight: 600; color: #b0452f; } .agrees { color: #1f7a54; } .part { color: #9a6a12; }
.scroll { overflow-x: auto; }
"""


def write_page(path: str, report: Report) -> None:
    """Write the report to `path`."""
    figure = json.dumps(_styled(report.figure)).replace("</", "<\\/")
    parts = [
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{html.escape(report.title)}</title>",
        f"<style>{_STYLE}</style><h1>{html.escape(report.title)}</h1><div id='figure'></div>",
        "<h2>The paper's words, and what was found</h2><ul>",
        *(_finding(each) for each in report.findings),
        "</ul>",
        *(_table(each) for each in report.tables),
        "<h2>Assumptions</h2><ul>",
        *(f"<li>{html.escape(each)}</li>" for each in report.assumptions),
        f"</ul><script>{asset(PLOTLY)}</script><script>const figure = {figure};",
        "Plotly.newPlot('figure', figure.data, figure.layout, {responsive: true, displaylogo: false});</script></html>",
    ]
    Path(path).write_text("\n".join(parts), encoding="utf-8")


def panels(
    data: Sequence[Mapping[str, Any]],
    titles: Sequence[str],
    *,
    x: str,
    y: str = "cost (USD)",
    every_x: Mapping[str, Any] | None = None,
    every_y: Mapping[str, Any] | None = None,
) -> Figure:
    """Return panels side by side, one for each title, with the same axes; `every_x` and `every_y` extend these."""
    gap = 0.06
    width = (1.0 - gap * (len(titles) - 1)) / len(titles)
    layout: dict[str, Any] = {"annotations": []}
    for at, title in enumerate(titles, start=1):
        left = (at - 1) * (width + gap)
        layout[f"xaxis{at}"] = {"domain": [left, left + width], "anchor": f"y{at}", "title": {"text": x, "standoff": 8}}
        layout[f"xaxis{at}"] |= every_x or {}
        layout[f"yaxis{at}"] = {"anchor": f"x{at}", "rangemode": "tozero", "title": {"text": y if at == 1 else ""}}
        layout[f"yaxis{at}"] |= every_y or {}
        layout["annotations"].append(
            {"text": title, "x": left + width / 2, "y": 1.02, "xref": "paper", "yref": "paper"}
            | {"showarrow": False, "xanchor": "center", "yanchor": "bottom", "font": {"size": 14}}
        )
    return {"data": list(data), "layout": layout}


def _styled(figure: Figure) -> Figure:
    layout = {
        "height": 470,
        "margin": {"l": 65, "r": 20, "t": 50, "b": 100},
        "legend": {"orientation": "h", "x": 0, "y": -0.17, "yanchor": "top"},
        "hovermode": "x unified",
        "plot_bgcolor": "#fafbfc",
        "font": {"family": "system-ui, sans-serif", "size": 13},
        **figure["layout"],
    }
    for name, axis in layout.items():
        if name.startswith(("xaxis", "yaxis")):
            layout[name] = {"gridcolor": "#e3e6ea", "zeroline": False, "automargin": True} | axis
    return {"data": figure["data"], "layout": layout}


def _finding(finding: Finding) -> str:
    kind = {"agrees": "agrees", "agrees in part": "part"}.get(finding.verdict, "")
    return (
        f"<li><span class='verdict {kind}'>{finding.verdict}</span>: “{html.escape(finding.says)}”<br>"
        f"{html.escape(finding.found)}</li>"
    )


def _table(table: Table) -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in table.columns)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    return (
        f"<h2>{html.escape(table.title)}</h2><div class='scroll'><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )
