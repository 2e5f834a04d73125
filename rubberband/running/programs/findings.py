"""Findings about a program, for the experiment file that `rubberband init` writes."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from rubberband.running.first_file import MOST, TrialFindings, is_maximised, name_of
from rubberband.running.programs import objectives, options, sagemaker, sweeps
from rubberband.running.programs.options import booleans_of, program_of
from rubberband.running.programs.patches import patch_of
from rubberband.values.command import script_of, words_of

__all__ = ["booleans_of", "findings_of", "is_program", "patch_of"]


_READERS: tuple[tuple[Callable[[str], bool], Callable[[str, Path], TrialFindings]], ...] = (
    (sweeps.is_sweep, sweeps.findings_of),
    (objectives.is_objective, objectives.findings_of),
    (sagemaker.is_job, sagemaker.findings_of),
)
"""Whether a text is of one kind -> its findings; another text is a program."""


def is_program(text: str) -> bool:
    """Whether `init` reads the text as a program, a sweep or an objective."""
    return any(reads(text) for reads, _ in _READERS) or options.is_program(text)


def findings_of(program: str, path: Path) -> TrialFindings:
    """Look at a program, a sweep or an objective, for the file at `path`. Raises InputError if it cannot be run."""
    for reads, findings in _READERS:
        if reads(program):
            return findings(program, path)
    return _findings_of_program(program, path)


def _findings_of_program(program: str, path: Path) -> TrialFindings:
    folder, here = path.absolute().parent, Path.cwd()
    env = sagemaker.variables_of(words_of(program if " " in program.strip() else [program]), here)
    with sagemaker.looked_at(env).within():
        found = program_of(program, here)
    remarks = list(found.remarks)

    def seen_from_file(words: tuple[str, ...]) -> tuple[str, ...]:
        is_there = folder == here
        return tuple(
            os.path.relpath(here / word, folder) if not is_there and (here / word).is_file() else word for word in words
        )

    words = seen_from_file(found.words)
    metrics = [name for name in found.reported if re.match("(val|valid|eval|test|dev)", name.lower())] or found.reported
    better = [name for name in metrics if is_maximised(name)]
    prints = found.prints or script_of(found.words) is None  # another language prints
    source = "stdout # a line with the metric is an iteration" if prints else "report # rubberband.report({...})"
    if not metrics:
        remedy = "" if prints else " call rubberband.report, or write metrics: stdout and let it"
        remarks.append(f"no metric was found in its source: let the program{remedy} print lines such as loss=0.12")
    return TrialFindings(
        command=words,
        start=seen_from_file(found.start),
        metrics=source,
        name=name_of(Path(next((word for word in words if word.endswith((".py", ".sh"))), words[0])).stem, path),
        space=found.space,
        others=found.others,
        booleans=found.booleans,
        metric=(better or metrics or ["loss"])[0],
        env=env,
        most=max(2, found.epochs or MOST),
        remarks=tuple(remarks),
    )
