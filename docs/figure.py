"""Draws the picture of a shrinking cluster in README and the documentation from the report of a run.

rubberband run examples/scaling.yaml
rubberband report scaling -o json | python docs/figure.py > docs/assets/shrinking.svg
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 720, 100, 16, 44, 80
ROW, GAP = 13, 12
STAGE_COLOURS = ("var(--s0)", "var(--s1)", "var(--s2)", "var(--s3)", "var(--s4)")
WINNER, STARTING, IDLE, INK, FAINT = "#e8710a", "var(--starting)", "var(--idle)", "var(--ink)", "var(--faint)"
STYLE = """<style>
svg { --s0: #9fc5e8; --s1: #6fa8dc; --s2: #3d85c6; --s3: #1c5d99; --s4: #0b3a66; --starting: #e8d9a8; --idle: #e4e6ea;
  --ink: #1f2933; --faint: #6b7280; --paper: #ffffff; }
@media (prefers-color-scheme: dark) { svg { --s0: #cfe2f3; --s1: #9fc5e8; --s2: #6fa8dc; --s3: #3d85c6; --s4: #2a6aa8;
  --starting: #7a6a3a; --idle: #353b45; --ink: #e6e8eb; --faint: #a3acb8; --paper: #1b1f26; } }
</style>"""
Report = Mapping[str, Any]


class Figure:
    """Picture of a report: rows of GPUs over seconds, with the instances held longest at the bottom."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.instances = sorted(report["instances"], key=lambda one: (one["ended_s"], one["instance"]))
        self.gpus = 1 + max(use["gpu"] for use in report["busy"])
        self.end_s = report["actual_jct_s"]
        self.block = self.gpus * ROW + GAP
        self.height = TOP + len(self.instances) * self.block + BOTTOM

    def svg(self) -> str:
        """Return the picture, on a card of its own, light or dark as the reader's system is."""
        what = f"{len(self.instances)} instances of {self.gpus} GPUs, released as trials are stopped"
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" role="img" '
                f'font-family="system-ui, sans-serif" font-size="13" fill="{INK}"><title>{escape(what)}</title>',
                STYLE,
                f'<rect width="{WIDTH}" height="{self.height}" rx="8" fill="var(--paper)"/>',
                *self._held(),
                *self._busy(),
                *self._syncs(),
                *self._axis(),
                *self._legend(),
                "</svg>\n",
            ]
        )

    def _x(self, at_s: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * at_s / self.end_s, 1)

    def _y(self, index: int, gpu: int = 0) -> int:
        return TOP + index * self.block + gpu * ROW

    def _bar(self, start_s: float, end_s: float, y: int, height: int, colour: str) -> str:
        width = round(self._x(min(end_s, self.end_s)) - self._x(start_s), 1)
        return f'<rect x="{self._x(start_s)}" y="{y}" width="{width}" height="{height}" fill="{colour}"/>'

    def _held(self) -> Iterator[str]:
        for index, one in enumerate(self.instances):
            y, height = self._y(index), self.gpus * ROW - 1
            yield self._bar(one["running_s"], one["ready_s"], y, height, STARTING)
            yield self._bar(one["ready_s"], one["ended_s"], y, height, IDLE)
            yield _text(LEFT - 10, y + height / 2 + 4, f"instance {len(self.instances) - index}", "end")
            if one["ended_s"] < 0.95 * self.end_s:
                yield _text(self._x(one["ended_s"]) + 8, y + height / 2 + 4, "released", "start", FAINT)

    def _busy(self) -> Iterator[str]:
        rows = {one["instance"]: index for index, one in enumerate(self.instances)}
        longest = max(self.report["trials"], key=lambda one: one["iterations"])  # in a rehearsal no trial is the best
        best = (self.report["best"] or longest)["trial"]
        for use in self.report["busy"]:
            y = self._y(rows[use["instance"]], use["gpu"])
            colour = WINNER if use["trial"] == best else STAGE_COLOURS[use["stage"] % len(STAGE_COLOURS)]
            yield self._bar(use["start_s"], use["end_s"], y, ROW - 1, colour)

    def _syncs(self) -> Iterator[str]:
        bottom = self._y(len(self.instances)) - GAP + 4
        yield _text(LEFT - 10, TOP - 16, "trials x GPUs", "end", FAINT)
        for stage in self.report["stages"]:
            if stage["stage"]:
                x = self._x(stage["start_s"])
                yield f'<path d="M{x} {TOP - 14}V{bottom}" stroke="{INK}" stroke-width="1.2" stroke-dasharray="3 3"/>'
                yield _text(x, bottom + 14, "SYNC", "middle")
            trials, gpus = stage["trials"], stage["gpus_per_trial"]
            yield _text(self._x(self._middle_s(stage)), TOP - 16, f"{trials} x {gpus}", "middle")

    def _middle_s(self, stage: Mapping[str, Any]) -> float:
        ends = [use["end_s"] for use in self.report["busy"] if use["stage"] == stage["stage"]]
        starts = [use["start_s"] for use in self.report["busy"] if use["stage"] == stage["stage"]]
        return float(min(starts) + max(ends)) / 2

    def _axis(self) -> Iterator[str]:
        for at_s in range(0, int(self.end_s) + 1, 10):
            yield _text(self._x(at_s), self.height - BOTTOM + 36, f"{at_s} s", "middle", FAINT)

    def _legend(self) -> Iterator[str]:
        words = {
            STARTING: "instance starts",
            STAGE_COLOURS[1]: "trial (darker: later stages)",
            WINNER: "best trial",
            IDLE: "idle",
        }
        x, y = LEFT, self.height - 16
        for colour, text in words.items():
            yield f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{colour}"/>'
            yield _text(x + 18, y, text, "start")
            x += 46 + 7 * len(text)


def _text(x: float, y: float, text: str, anchor: str, colour: str = INK) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'


if __name__ == "__main__":
    sys.stdout.write(Figure(json.load(sys.stdin)).svg())
