"""Findings about a program, for the experiment file that `rubberband init` writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rubberband.running.first_file import MOST, TrialFindings, name_of
from rubberband.running.programs import finetuning, objectives, options, sagemaker, sweeps
from rubberband.running.programs.looking import look, tidied, with_look
from rubberband.running.programs.options import booleans_of, program_of
from rubberband.running.programs.patches import patch_of
from rubberband.running.programs.starters import seen_from
from rubberband.values.command import words_of

__all__ = ["booleans_of", "findings_of", "is_program", "look", "patch_of", "tidied", "with_look"]


_READERS: tuple[tuple[Callable[[str], bool], Callable[[str, Path], TrialFindings]], ...] = (
    (sweeps.is_sweep, sweeps.findings_of),
    (finetuning.is_finetuning, finetuning.findings_of),
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
    with sagemaker.looking_with(env):
        found = program_of(program, here)
    words = seen_from(folder, found.words)
    return TrialFindings(
        command=words,
        start=seen_from(folder, found.start),
        metrics="report # rubberband.report({...})" if found.reports else "stdout",
        name=name_of(Path(next((word for word in words if word.endswith((".py", ".sh"))), words[0])).stem, path),
        space=found.space,
        others=found.others,
        booleans=found.booleans,
        resume=found.resume,
        launch=found.launch,
        metric="",
        env=env,
        most=max(2, found.epochs or MOST),
        remarks=found.remarks,
    )
