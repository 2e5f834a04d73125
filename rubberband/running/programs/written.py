"""Domains, schedulers and samplers of other tools, as an experiment file writes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import ValidationError

from rubberband.spec.fields import word_error
from rubberband.spec.loading import Dumper
from rubberband.spec.search import SCHEDULERS
from rubberband.spec.space import Domain, choice

EPOCHS = re.compile(r"(.*[._-])?((max|num|n|total|train)[_-]?)*epochs?", re.IGNORECASE)
"""Names of parameters that say how long a trial trains, in epochs."""
OUTPUT = re.compile(
    r"(.*[._-])?((out|output|save|work|log|ckpt|checkpoint)s?[_-]?(dir|folder|path)|out|outf|output|workdir)",
    re.IGNORECASE,
)
"""Names of parameters with the folder into which a trial writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A scheduler as the file writes it, and the size of its search."""

    line: str
    trials: int
    work: int
    """Iterations of all trials."""
    most: int


def flow(value: Any) -> str:
    """Return a plain value as YAML in one line."""
    text = yaml.dump(value, Dumper=Dumper, default_flow_style=True, width=1_000_000, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")


def written(domain: Any) -> str:
    """Return a domain, or a constant, as the file writes it."""
    if isinstance(domain, Domain):
        words = domain.to_words()
        words.pop("base", None)
        return _indented(words) if domain.sub_spaces else flow(words)
    return flow(choice([domain]).to_words() if isinstance(domain, Mapping) else domain)


def _indented(words: Mapping[str, Any]) -> str:
    """Return a choice whose options have parameters of their own, on lines below its name in the space."""
    text = yaml.dump(words, Dumper=Dumper, default_flow_style=None, width=1_000_000, sort_keys=False)
    return "\n" + "\n".join(f"      {line}" for line in text.splitlines())


def schedule_of(words: Mapping[str, Any], comment: str = "", *, trials: int = 0) -> Schedule:
    """Return a scheduler of these words; `trials` are those of a grid, which name no number of them."""
    kind = "sha" if words["type"] == "asha" else words["type"]  # which trains as much
    given = {**({"num_samples": trials} if trials else {}), **words, "type": kind}
    try:
        scheduler: Any = SCHEDULERS[kind](**given)
        brackets = scheduler.brackets()
    except ValidationError as error:
        raise word_error(error) from None
    stages = [stage for bracket in brackets for stage in bracket]
    above = f"  # {comment}\n" if comment else ""
    return Schedule(
        line=f"{above}  scheduler: {flow(dict(words))}",
        trials=sum(bracket[0].trials for bracket in brackets),
        work=sum(stage.trials * stage.iterations for stage in stages),
        most=int(words["max_t"]),
    )
