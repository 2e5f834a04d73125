"""Findings about a program, for the experiment file that `rubberband init` writes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from rubberband.running.first_file import MOST, TrialFindings, name_of
from rubberband.running.programs import objectives, options, sagemaker, sweeps
from rubberband.running.programs.looking import clear_away, files_of_models, look, with_look
from rubberband.running.programs.options import ProgramFindings, booleans_of, program_of
from rubberband.running.programs.patches import patch_of
from rubberband.running.programs.roles import EPOCHS
from rubberband.running.programs.starters import interpreter_of, seen_from
from rubberband.values.command import line_of, words_of

__all__ = [
    "booleans_of",
    "clear_away",
    "files_of_models",
    "findings_of",
    "is_program",
    "look",
    "patch_of",
    "with_look",
]


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
    with sagemaker.looking_with(env):
        found = program_of(_with_interpreter(program), here)
    words = seen_from(folder, found.words)
    return TrialFindings(
        command=words,
        start=seen_from(folder, _long_enough(found)),
        metrics="report # rubberband.report({...})" if found.reports else "stdout",
        name=name_of(Path(next((word for word in words if word.endswith((".py", ".sh"))), words[0])).stem, path),
        space=found.space,
        others=found.others,
        booleans=found.booleans,
        resume=found.resume,
        metric="",
        env=env,
        most=max(2, found.epochs or MOST),
        remarks=found.remarks,
    )


def _with_interpreter(program: str) -> str:
    """Return a command line that begins with a script as one that begins with its interpreter."""
    if " " not in program.strip():
        return program
    words = words_of(program)
    is_script = words[0].endswith((".py", ".sh")) and not os.access(words[0], os.X_OK)
    return line_of([interpreter_of(words[0]), *words]) if is_script else program


def _long_enough(found: ProgramFindings) -> tuple[str, ...]:
    """Return the words of a look, with a few epochs where the program would train no more than two by itself."""
    words = list(found.start)
    if found.epochs is None or found.epochs > 2:
        return tuple(words)
    for before, word in zip(("", *found.words), found.words, strict=False):
        if EPOCHS in word and word not in words:
            words += [before, "4"] if word == EPOCHS and before.startswith("-") else [word.replace(EPOCHS, "4")]
    return tuple(words)
