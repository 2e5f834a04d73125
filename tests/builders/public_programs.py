"""Programs of the kinds that people have, each with what a user of `rubberband init` has to change by hand.

`tests/programs/programs.yaml` says how a program is started, and what a right search of it is. A Door takes a program
through init, the changes, check and run, and compares its winner with the program run by hand.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from rubberband.executor import ExperimentFolder, TrialResult, read_journal
from tests.builders.command_line import ROOT

PROGRAMS = ROOT / "tests" / "programs"
SEARCH = {
    "search.scheduler": "{type: sha, num_samples: 4, grace_period: 1, max_t: 4, reduction_factor: 2}",
    "resources.max_instances": "2",
    "resources.minimum_billed": "0s",
    "constraints.deadline": "20m",
    "constraints.max_cost": "null",
}
"""Settings for a short search through two SYNCs: what `init` wrote on these is the user's wish, not the program's."""
SYNCS = (1, 2, 4)
LIMIT_S = 400.0


@dataclass(frozen=True, kw_only=True)
class Change:
    """Lines that the user writes in place of others."""

    file: str
    """The program's file, or `experiment` for the file that `init` wrote."""
    old: str
    """A regular expression; empty: `new` is added at the end."""
    new: str
    why: str

    @property
    def lines(self) -> int:
        return max(1, len(self.new.strip("\n").splitlines()))


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program of the set."""

    name: str
    after: str
    """The public program whose habits it has."""
    start: str
    """How its users start it, without the options that a search changes."""
    init: str
    """Words after `rubberband init`."""
    folder: str = ""
    """Its folder, if that has another name."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Parameter -> the words by which a user gives its value: `--lr {}`; a switch has no `{}`."""
    metrics: tuple[tuple[str, str, str], ...] = ()
    """Name, mode, and pattern of the printed value, of each metric that its user would tune."""
    epochs: str = ""
    """The words for the epochs, with `{}`."""
    steps: int = 1
    """Steps of an iteration, where these words count steps."""
    seed: str = ""
    by_hand: str = ""
    """A script in place of `start`, for a file of Python: it gets the module and the configuration as JSON."""
    resume: str = ""
    """Words for a second start in the same folder, if its random numbers differ after one: by hand it is broken too."""
    repeats: int = 0
    """Values that are printed before any training, at each start."""
    within: float = 0.0
    """How much a value may differ from the one by hand: the sums of two workers have another order."""
    changes: tuple[Change, ...] = ()
    outcome: str = "finished"
    says: str = ""
    """A regular expression for the line that refuses it."""
    needs: tuple[str, ...] = ()
    """Modules without which it cannot be tried."""
    env: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    """Settings of the search, beside SEARCH."""


@cache
def programs() -> Mapping[str, Program]:
    table = yaml.safe_load((PROGRAMS / "programs.yaml").read_text())
    return {name: _program(name, dict(row)) for name, row in table.items()}


def _program(name: str, row: dict[str, Any]) -> Program:
    changes = tuple(Change(**change) for change in row.pop("changes", ()))
    return Program(name=name, changes=changes, **row)


class Door:
    """One program on its way from `init` to its winner, in a folder of its own."""

    def __init__(self, program: Program, folder: Path) -> None:
        self.program, self.folder, self.home = program, folder / program.name, folder / "home"
        shutil.copytree(PROGRAMS / (program.folder or program.name), self.folder)
        self.file = self.folder / "search.yaml"
        self.said: list[str] = []
        binaries = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        self.environment = {
            **os.environ, "RUBBERBAND_HOME": str(self.home), "PYTHONPATH": str(ROOT), "PATH": binaries,
            "OMP_NUM_THREADS": "1", **program.env,
        }  # fmt: skip

    def rubberband(self, *words: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "rubberband.cli", *words],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        self.said.append(
            f"$ rubberband {shlex.join(words)}\n{done.stdout}{done.stderr}\n(exit code {done.returncode})\n"
        )
        return done

    def init(self) -> subprocess.CompletedProcess[str]:
        """Make the changes to the program, and let `init` write its file."""
        self.change_program()
        return self.rubberband("init", *shlex.split(self.program.init), "--file", self.file.name, "--yes")

    def change_program(self) -> None:
        self._change(change for change in self.program.changes if change.file != "experiment")

    def change(self) -> None:
        """Make the changes to the file."""
        self._change(change for change in self.program.changes if change.file == "experiment")

    def _change(self, changes: Iterable[Change]) -> None:
        """Make changes, each of which has to fit what is there."""
        for change in changes:
            path = self.file if change.file == "experiment" else self.folder / change.file
            text = path.read_text()
            if not change.old:
                path.write_text(text + change.new)
                continue
            found = re.sub(change.old, lambda _, new=change.new: new, text, count=1, flags=re.MULTILINE)
            assert found != text, f"{path} has no {change.old!r}:\n{text}"
            path.write_text(found)

    def summary(self) -> str:
        """Return what `init` wrote, in short."""
        entrypoint, search = self.experiment["entrypoint"], self.experiment["search"]
        others = re.findall(r"^ +# (\S+): \{type", self.file.read_text(), re.MULTILINE)
        scheduler = {name: value for name, value in search["scheduler"].items() if name in ("type", "max_t")}
        return f"{entrypoint} space={search['space']} others={others} {scheduler} {search['metric']} {search['mode']}"

    def check(self) -> subprocess.CompletedProcess[str]:
        return self.rubberband("check", self.file.name)

    def refusal(self) -> str:
        """Return the line that refuses the program, of what was said; empty: none does."""
        lines = "".join(self.said).splitlines()
        faults = (line for line in lines if re.match(r"(error|problem): ", line) and re.search(self.program.says, line))
        return next(faults, "")

    def run(self) -> TrialResult:
        """Run the search; return its best trial."""
        settings = {**SEARCH, **self.program.settings}
        words = [word for key, value in settings.items() if value for word in ("-s", f"{key}={value}")]
        done = self.rubberband("run", self.file.name, "--no-check", *words)
        assert done.returncode == 0, self.said[-1]
        result = read_journal(ExperimentFolder(home=self.home, name=self.experiment["name"]))
        assert result.best is not None
        return result.best

    @property
    def experiment(self) -> dict[str, Any]:
        return dict(yaml.safe_load(self.file.read_text()))

    @property
    def metric(self) -> tuple[str, str, str]:
        """The metric of the search its user would have: name, mode, pattern. Raises AssertionError for another."""
        search = self.experiment["search"]
        found = [row for row in self.program.metrics if re.search(row[0], search["metric"], re.IGNORECASE)]
        assert found, f"the metric {search['metric']} is not one that its user would tune"
        assert search["mode"] == found[0][1], f"{search['metric']} is not to be {search['mode']}"
        return search["metric"], found[0][1], found[0][2]

    def require_right(self) -> None:
        """Raise AssertionError if the file has a metric that its user would not tune, or an unknown parameter."""
        known = set(self.program.options) if self.metric else set()
        if self.program.by_hand:
            return
        space = {name.replace("-", "_") for name in self.experiment["search"]["space"]}
        assert space <= known, f"{sorted(space - known)} are no parameters of it"

    def compare(self, best: TrialResult) -> None:
        """Raise AssertionError where the winner's curve differs from what it prints by hand."""
        metric, _, _ = self.metric
        hand = self.by_hand(best)
        for _, iteration, metrics in best.curve:
            assert iteration <= len(hand), f"iteration {iteration} of {len(hand)} by hand"
            gap = abs(metrics[metric] - hand[iteration - 1])
            assert gap <= self.program.within, f"iteration {iteration}: {metrics[metric]}, by hand {hand}"
        most = yaml.safe_load({**SEARCH, **self.program.settings}["search.scheduler"])["max_t"]
        assert best.iterations == most, f"{best.iterations} iterations of {most}"

    def by_hand(self, best: TrialResult) -> list[float]:
        """Start the program itself with the winner's configuration, in a copy; return the metric as it prints it."""
        return self.printed(best.configuration, best.seed, self.metric[2])

    def printed(self, configuration: Mapping[str, Any], seed: int, pattern: str) -> list[float]:
        place = self.folder.with_name(f"{self.folder.name}-by-hand")
        shutil.copytree(PROGRAMS / (self.program.folder or self.program.name), place)
        for change in self.program.changes:
            if change.file != "experiment":
                shutil.copyfile(self.folder / change.file, place / change.file)
        found: list[float] = []
        for number, epochs in enumerate(SYNCS if self.program.resume else SYNCS[-1:]):
            words = self.words_by_hand(configuration, seed, epochs) + (
                shlex.split(self.program.resume) if number else []
            )
            done = subprocess.run(
                words, cwd=place, env=self.environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
            )
            output = done.stdout + done.stderr
            self.said.append(f"$ {shlex.join(words)}\n{output}\n(exit code {done.returncode})\n")
            assert done.returncode == 0, self.said[-1]
            found += [_number(match) for match in re.finditer(pattern, output, re.MULTILINE)][self.program.repeats :]
        return found

    def words_by_hand(self, configuration: Mapping[str, Any], seed: int, epochs: int) -> list[str]:
        program = self.program
        if program.by_hand:
            return [
                sys.executable,
                "-c",
                program.by_hand,
                program.init.partition(".")[0],
                json.dumps(dict(configuration)),
            ]
        words = [word.replace("{}", str(epochs)) for word in shlex.split(program.start)]
        for name, value in configuration.items():
            option = program.options[name.replace("-", "_")]
            if "{}" in option:
                words += [part.replace("{}", _text(value)) for part in shlex.split(option)]
            elif value is True or value == option:
                words += shlex.split(option)
        for option, number in ((program.epochs, program.steps * epochs), (program.seed, seed)):
            words += [part.replace("{}", str(number)) for part in shlex.split(option)]
        return [sys.executable if words[0] == "python" else words[0], *words[1:]]


def _number(match: re.Match[str]) -> float:
    value, *base = (float(group) for group in match.groups())
    return value / base[0] if base else value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else str(value) if isinstance(value, bool) else json.dumps(value)
