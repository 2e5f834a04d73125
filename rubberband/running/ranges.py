"""Ranges of parameters, guessed by names and defaults, for the experiment file that `rubberband init` writes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

REQUIRED = object()
"""Default of a parameter that has none."""


@dataclass(frozen=True, slots=True)
class _Known:
    """A parameter that people search."""

    names: str
    """Regular expression of its name, in small letters with `_`."""
    usual: str
    """Its domain where there is no default, or a default such as 0, which says nothing."""
    spread: str = "log"
    """Its domain around a default: `log` (a tenth to ten times), `half` (to double), `below_one`, `to_one`."""


_LOG = "{{type: loguniform, lower: {}, upper: {}}}"
_UNIFORM = "{{type: uniform, lower: {}, upper: {}}}"
_CHOICE = "{{type: choice, values: {}}}"

_KNOWN = (
    _Known(r"lr|.*_lr|lr0|lrate|(.*_)?learning_rate|eta", _LOG.format("1e-4", "1e-1")),
    _Known(r"(.*_)?(batch_?size|bsz?|mini_?batch)(_.*)?|batch", _CHOICE.format([32, 64, 128]), "half"),
    _Known(r"(.*_)?(weight_decay|wd|wdecay|l2(_.*)?)", _LOG.format("1e-6", "1e-2")),
    _Known(
        r"(.*_)?(dropout|drop(_?path)?|p_?drop|drop_?prob)(_.*)?|(.*_)?drop", _UNIFORM.format(0.0, 0.5), "below_one"
    ),
    _Known(r"momentum", _UNIFORM.format(0.5, 0.99), "below_one"),
    _Known(
        r"(.*_)?(hidden|width|units|channels|filters|dim|emsize|nhid|n_?embd?|d_model|d_ff|d_hidden|ngf|ndf|nf)(_.*)?",
        _CHOICE.format([32, 64, 128]),
        "half",
    ),
    _Known(r"(.*_)?n?_?(layers?|depth|blocks)|max_depth", "{type: randint, lower: 1, upper: 5}", "half"),
    _Known(r"warmup_(ratio|frac(tion)?|prop(ortion)?|pct)", _UNIFORM.format(0.0, 0.2), "below_one"),
    _Known(r"(lr_)?warmup(?!_epochs?)(_.*)?", _CHOICE.format([0, 100, 1000]), "half"),
    _Known(r"(.*_)?beta_?\d?", _UNIFORM.format(0.5, 0.999), "below_one"),
    _Known(r"(.*_)?gamma|(lr_)?decay(_rate|_factor)?", _UNIFORM.format(0.5, 1.0), "to_one"),
    _Known(r"(.*_)?(temperature|temp)|tau", _LOG.format("1e-1", "10")),
    _Known(r"(.*_)?(label_)?smoothing", _UNIFORM.format(0.0, 0.2), "below_one"),
    _Known(r"(.*_)?(clip|grad_norm|clip_(val|norm|value|grad(_norm)?)|gradient_clip.*)", _LOG.format("1e-1", "10")),
    _Known(r"(.*_)?n_?estimators|num_?leaves", _CHOICE.format([50, 100, 200]), "half"),
    _Known(r"sub_?sample|col_?sample(_by.*)?|(feature|bagging)_fraction", _UNIFORM.format(0.5, 1.0), "to_one"),
    _Known(r"optim(izer)?|opt|algo(rithm)?", ""),
    _Known(r"act(ivation)?(_(fn|function))?|nonlinearity|norm|kernel", ""),
    _Known(r"(lr_)?sched(uler)?(_type)?", ""),
)
"""Usual ranges, the best known parameter first."""
_SWITCHES = re.compile(
    r"(use_)?(nesterov|amsgrad|bias|bn|batch_?norm|layer_?norm|residual|bidirectional|tied?(_.*)?|augment(ation)?|"
    r"mixup|cutmix|ema|cosine|normali[sz]e|attention)"
)
"""Names of options for true and false that change how a model learns."""


def rank_of(name: str, *, is_boolean: bool = False) -> int | None:
    """Return the place of a parameter among the known ones, the best known first; None: its name is unusual."""
    text = plain_name(name)
    if is_boolean:
        return len(_KNOWN) if _SWITCHES.fullmatch(text) else None
    return next((at for at, known in enumerate(_KNOWN) if re.fullmatch(known.names, text)), None)


def domain_of(name: str, default: Any) -> tuple[str, str]:
    """Return a parameter's domain, and a comment."""
    said = f"the default is {default}" if default is not REQUIRED and default is not None else ""
    if isinstance(default, bool):
        return _CHOICE.format("[true, false]"), said
    known = next((each for each in _KNOWN if re.fullmatch(each.names, plain_name(name))), None)
    if isinstance(default, int | float) and default > 0:
        return _around(default, known.spread if known else "log"), said
    if known is not None and known.usual:
        usual = known.usual
        if said and known.spread == "below_one":
            usual = re.sub(r"lower: [\d.]+", "lower: 0.0", usual)
        return usual, f"a usual range; {said}" if said else "a usual range"
    return _UNIFORM.format(0.0, 1.0), "a guess: write its range"


def plain_name(name: str) -> str:
    """Return the last part of a name in small letters: `weight_decay` of `optimizer.weightDecay`."""
    last = re.split(r"[./]", name)[-1]
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", last).lower().replace("-", "_")


def _around(default: float, spread: str) -> str:
    """Return a domain around a default above 0."""
    if isinstance(default, int):
        return _CHOICE.format(sorted({max(1, default // 2), default, 2 * default}))
    if spread in ("below_one", "to_one") and default < 1.0:
        if default > (0.5 if spread == "below_one" else 0.9):  # beta2 of 0.999: as far below 1 as above
            return _UNIFORM.format(f"{1 - min(0.5, 5 * (1 - default)):.6g}", f"{1 - (1 - default) / 5:.6g}")
        if spread == "below_one":
            return _UNIFORM.format("0.0", f"{min(0.9, max(0.5, 2 * default)):g}")
    if (spread == "to_one" and default <= 1.0) or (spread == "log" and 0.5 <= default < 1.0):
        return _UNIFORM.format(f"{default / 2:g}", "1.0")
    if spread == "half":
        return _UNIFORM.format(f"{default / 2:g}", f"{2 * default:g}")
    return _LOG.format(f"{default / 10:g}", f"{default * 10:g}")


def middle_of(domain: Mapping[str, Any]) -> Any:
    """Return a value in the middle of a domain as a file has it, for a program that is only looked at."""
    if "values" in domain:
        return domain["values"][len(domain["values"]) // 2]
    lower, upper = float(domain["lower"]), float(domain["upper"])
    if domain["type"] == "loguniform":
        return (lower * upper) ** 0.5
    middle = (lower + upper) / 2
    return int(middle) if domain["type"] == "randint" else middle
