"""The card of a model that a search found, beside its files: where it comes from, what it cost, its configuration."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from rubberband.spec.loading import Dumper
from rubberband.units import counted, duration, format_usd, in_unit

if TYPE_CHECKING:
    from rubberband.executor.result.parts import TrialResult
    from rubberband.executor.result.result import Result

CARD, CONFIGURATION = "README.md", "search-config.yaml"
_MODELS = ("adapter_config.json", "config.json")
"""Files of Hugging Face's libraries, one of which a folder of a model has."""
_FRONT_MATTER = re.compile(r"---\n.*?\n---\n", re.DOTALL)


def write_card(result: Result, trial: TrialResult, folder: Path) -> None:
    """Write the card and the configuration into a folder that has a model of Hugging Face; others stay as they are.

    The card keeps the front matter that the Trainer wrote, and replaces its template of a text.
    """
    if not any((folder / name).exists() for name in _MODELS):
        return
    values = yaml.dump(dict(trial.configuration), Dumper=Dumper, sort_keys=False, allow_unicode=True)
    (folder / CONFIGURATION).write_text(values, encoding="utf-8")
    card = folder / CARD
    front = _FRONT_MATTER.match(card.read_text("utf-8", "replace")) if card.exists() else None
    card.write_text(f"{front[0] if front else ''}\n{_card(result, trial)}", encoding="utf-8")


def _card(result: Result, trial: TrialResult) -> str:
    value: Any = trial.metrics.get(result.metric)
    measured = f"{result.metric} {value:.6g}" if isinstance(value, float | int) else "not measured"
    cost = in_unit(format_usd(result.whole_cost_usd), result.unit)
    charged = "" if result.is_charged else " (nothing was charged)"
    rows = "\n".join(f"| {_cell(name)} | {_cell(value)} |" for name, value in trial.configuration.items())
    better = "lower" if result.mode == "min" else "higher"
    fetched = "".join(f"* **From the hub**: {name}, commit `{commit}`.\n" for name, commit in result.fetched.items())
    return f"""# {result.name}, trial {trial.trial}

The best of {counted(len(result.trials), "trial")} of a hyperparameter search by RubberBand.

* **Result**: {measured} after {counted(trial.iterations, "iteration")} ({better} is better).
* **Search**: {duration(result.actual_jct_s)} and {cost}{charged}; planned {duration(result.planned_jct_s)}.
* **Seed**: {trial.seed}.
{fetched}
| parameter | value |
|---|---|
{rows}

`{CONFIGURATION}` has the same values, as a config file of `trl` takes them where they have its names.
"""


def _cell(value: object) -> str:
    return " ".join(str(value).replace("|", "\\|").split())
