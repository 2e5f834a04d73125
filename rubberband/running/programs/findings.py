"""Findings about a program, for the experiment file that `rubberband init` writes."""

from __future__ import annotations

import os
import re
from pathlib import Path

from rubberband.running.first_file import (
    KNOWN,
    MOST,
    REQUIRED,
    TrialFindings,
    domain_of,
    is_maximised,
    name_of,
    yaml_key,
)
from rubberband.running.programs.options import ProgramFindings, ProgramOption, booleans_of, is_program, program_of
from rubberband.values.command import script_of

__all__ = ["booleans_of", "findings_of", "is_program"]

_MOST_PARAMETERS = 8
"""Options of a program beyond which only those with usual names are searched."""


def findings_of(program: str, path: Path) -> TrialFindings:
    """Look at a program, which runs in this folder, for the file at `path`. Raises InputError if it cannot be run."""
    folder, here = path.absolute().parent, Path.cwd()
    found = program_of(program, here)
    words = [
        os.path.relpath(here / word, folder) if folder != here and (here / word).is_file() else word
        for word in found.words
    ]
    parameters, remarks = _most_telling(found)
    for left in (each for each in found.parameters if each not in parameters):
        if (place := f"${{{left.name}}}") in words:
            at = words.index(place)
            del words[at - (words[at - 1] in left.flags) : at + 1]
    space = {option.name: _domain_of(option) for option in parameters}
    metrics = [name for name in found.reported if re.match("(val|valid|eval|test|dev)", name.lower())] or found.reported
    better = [name for name in metrics if is_maximised(name)]
    prints = found.prints or script_of(found.words) is None  # another language prints
    source = "stdout # a line with the metric is an iteration" if prints else "report # rubberband.report({...})"
    if not metrics:
        remedy = "" if prints else " call rubberband.report, or write metrics: stdout and let it"
        remarks.append(f"no metric was found in its source: let the program{remedy} print lines such as loss=0.12")
    return TrialFindings(
        command=tuple(words),
        metrics=source,
        name=name_of(Path(next((word for word in words if word.endswith((".py", ".sh"))), words[0])).stem, path),
        space=space,
        metric=(better or metrics or ["loss"])[0],
        most=max(2, found.epochs or MOST),
        remarks=tuple(remarks),
    )


def _most_telling(found: ProgramFindings) -> tuple[list[ProgramOption], list[str]]:
    """Return the parameters that are worth a search, and remarks."""
    known = [option for option in found.parameters if any(re.fullmatch(each, option.name.lower()) for each, _ in KNOWN)]
    remarks = list(found.remarks)
    if len(found.parameters) <= _MOST_PARAMETERS or not known:
        return list(found.parameters), remarks
    remarks.append(f"{len(found.parameters) - len(known)} options are left out, whose names are unusual for a search")
    return known, remarks


def _domain_of(option: ProgramOption) -> tuple[str, str]:
    """Return the domain of a program's option, and a comment."""
    said = "" if option.default is None else f"the program's default is {option.default}"
    if option.kind == "BooleanOptionalAction":
        on, off = (min(option.flags, key=len), max(option.flags, key=len))
        return f"{{type: choice, values: [{on}, {off}]}}", said
    if option.choices is not None:
        return f"{{type: choice, values: [{', '.join(yaml_key(str(value)) for value in option.choices)}]}}", said
    return domain_of(option.name, option.default if option.default is not None else REQUIRED)
