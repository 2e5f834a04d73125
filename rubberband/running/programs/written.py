"""Parts that readers of other tools share: words of commands, domains and schedulers, as an experiment has them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from rubberband.running.first_file import NO_FOLDER
from rubberband.running.programs.options import ProgramFindings, program_of
from rubberband.spec.fields import word_error
from rubberband.spec.loading import Dumper
from rubberband.spec.schedulers import SCHEDULERS
from rubberband.spec.space import Domain
from rubberband.values.command import PLACES, ProgramCommand, line_of

TRIALS = 16
"""Trials of a search that does not say how many."""
TO_THE_END = "Each trial trains once, to its end."
TPE = "{type: optuna, sampler: tpe, seed: 1}"
EPOCHS = re.compile(r"(.*[._-])?((max|num|n|total|train)[_-]?)*epochs?", re.IGNORECASE)
"""Names of parameters that say how long a trial trains, in epochs."""


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def name_in_space(name: str) -> str:
    """Return the name of a parameter in the space: that of a place gets an underscore."""
    return f"{name}_" if name in PLACES else name


def filled(words: Sequence[str], space: Mapping[str, Any], booleans: str, most: int) -> list[str]:
    """Return the words of a look: with the middle of each domain, and `${checkpoint}` alone as a place."""
    middle = {name: domain.draw(0.5) if isinstance(domain, Domain) else domain for name, domain in space.items()}
    places = {"max_t": str(most), "checkpoint": "${checkpoint}", "seed": "1"}
    return ProgramCommand(words=tuple(words), booleans=booleans).line(middle, places)


def looked_at(
    words: Sequence[str], space: Mapping[str, Any], booleans: str, most: int
) -> tuple[list[str], ProgramFindings]:
    """Look at the program of a command; return the command with its options for places, and the findings."""
    start = filled(words, space, booleans, most)
    found = program_of(line_of(start), Path.cwd(), is_chosen=True)
    command = list(words)
    for before, word in zip(("", *found.words), found.words, strict=False):
        if word in start or not re.search(r"\$\{(checkpoint|max_t|seed)\}", word):
            continue
        flag, is_one_word, _ = word.partition("=")
        before = "" if is_one_word or not before.startswith("-") else before
        given = [
            at + 1 if before else at
            for at, each in enumerate(command)
            if (each == before if before else is_one_word and each.startswith(f"{flag}="))
        ]
        if given:
            command[given[0]] = word
        else:
            command += [before, word] if before else [word]
    return command, found


def folder_remarks(words: Sequence[str], source: str) -> list[str]:
    """Return a remark on a program that has no folder for its checkpoints, by its words and by its source."""
    if re.search(r"\$\{checkpoint\}|RUBBERBAND_CHECKPOINT|get_checkpoint", "\n".join([*words, source])):
        return []
    return [NO_FOLDER]


def flow(value: Any) -> str:
    """Return a plain value as YAML in one line."""
    text = yaml.dump(value, Dumper=Dumper, default_flow_style=True, width=1_000_000, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")


def written(space: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return a space of domains and constants as the file writes it."""
    return {name: (_written(domain), "") for name, domain in space.items()}


def _written(domain: Any) -> str:
    if not isinstance(domain, Domain):
        return flow(domain)
    words = {key: value for key, value in domain.to_words().items() if key != "base"}
    if not domain.sub_spaces:
        return flow(words)
    text = yaml.dump(words, Dumper=Dumper, default_flow_style=None, width=1_000_000, sort_keys=False)
    return "\n" + "\n".join(f"      {line}" for line in text.splitlines())


def schedule_of(words: Mapping[str, Any], comment: str = "", *, trials: int = 0) -> dict[str, Any]:
    """Return the findings on a scheduler of these words; `trials` are those of a grid, which its words do not name."""
    kind = "sha" if words["type"] == "asha" else words["type"]  # which trains as much
    given = {**({"num_samples": trials} if trials else {}), **words, "type": kind}
    try:
        scheduler: Any = SCHEDULERS[kind](**given)
        brackets = scheduler.brackets()
    except ValidationError as error:
        raise word_error(error) from None
    above = f"  # {comment}\n" if comment else ""
    return {
        "scheduler": f"{above}  scheduler: {flow(dict(words))}",
        "trials": sum(bracket[0].trials for bracket in brackets),
        "work": sum(stage.trials * stage.iterations for bracket in brackets for stage in bracket),
        "most": int(words["max_t"]),
    }
