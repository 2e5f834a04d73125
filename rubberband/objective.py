"""Runs an objective of Optuna as a program: `python -m rubberband.objective study.py:objective '{"lr": 0.1}'`.

The objective gets a trial that answers `suggest_…` from the configuration, and reports `trial.report` as iterations.
With `--space FD` it is called again and again, up to its first report, and its parameters are written to that file.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from textwrap import dedent
from typing import Any, NoReturn

from rubberband.integrations.optuna import Trial, evaluated

LIMIT_S = 60.0
"""Time in which the parameters of an objective are found."""
_QUIET_S = (5.0, 2.0)
"""Least time after its last `suggest_…` at which an objective is taken to train: in its first call, in the others."""
_MOST_RUNS = 200


def main(words: Sequence[str]) -> None:
    """Run an objective, or find its space."""
    maximizes = words[0] == "--maximize"
    first, *more = words[maximizes:]
    if first == "--space":
        path, _, name = more[1].rpartition(":")
        with os.fdopen(int(more[0]), "w") as answer:
            for run in _explore(_objective(path, name), maximizes):
                print(json.dumps(run), file=answer, flush=True)
        os._exit(0)
    path, _, name = first.rpartition(":")
    config = json.loads(more[0] if more else os.environ["RUBBERBAND_CONFIG"])
    evaluated(_objective(path, name), Trial(config, maximizes))


def _end(line: str) -> NoReturn:
    raise SystemExit(f"rubberband: {line}")


def _objective(path: str, name: str) -> Callable[[Any], Any]:
    """Import a file without the part below `if __name__ == "__main__":`, up to a study that it starts; return the
    objective."""
    sys.path[0], sys.argv = os.path.dirname(os.path.abspath(path)), [path]
    _without_studies(name)
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except _Studies:
        pass
    except ValueError as error:  # of study.best_params, below a study of another objective
        if "No trials" not in str(error):
            raise
    try:
        found: Callable[[Any], Any] = attrgetter(name)(module)
    except AttributeError:
        _end(f"{path} has no {name} at its top, above the study that it starts; define it there")
    if inspect.isclass(found) or not callable(found):
        _end(f"{name} is no function; write `def objective(trial): return {name}(…)(trial)`")
    required = [
        each.name
        for each in inspect.signature(found).parameters.values()
        if each.default is each.empty and each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    if len(required) != 1:
        rest = ", ".join(["trial", *required[1:]])
        _end(f"{name} takes {', '.join(required) or 'nothing'}; write `def tuned(trial): return {name}({rest})`")
    return found


class _Studies(BaseException):
    """The file starts its study while it is imported."""


def _without_studies(name: str) -> None:
    """Let a study at the top of the file end its import, and keep none in a database."""
    try:
        optuna: Any = importlib.import_module("optuna")
    except ImportError:
        return  # the file says so, if it needs it
    create = optuna.create_study

    def optimize(study: Any, func: Any, *_: Any, **__: Any) -> None:
        if getattr(func, "__name__", name) in (name, "<lambda>"):
            raise _Studies

    def create_study(*args: Any, **options: Any) -> Any:
        kept = {key: each for key, each in options.items() if key not in ("storage", "load_if_exists", "study_name")}
        return create(*args, **kept)

    optuna.study.Study.optimize = optimize
    optuna.create_study = optuna.study.create_study = create_study


# The space.


class _Seen(BaseException):
    """The objective has asked for its parameters, and begins to train."""


class _Recorder(Trial):
    """A trial that takes down what it is asked for; numbers are at one end of their ranges."""

    def __init__(self, forced: Mapping[str, int], end: str, maximizes: bool, quiet_s: float) -> None:
        super().__init__({}, maximizes)
        self._quiet_s = quiet_s
        self.asked: dict[str, dict[str, Any]] = {}
        self.chosen: dict[str, int] = {}
        self.reports, self.asks, self.iterations = False, False, 0
        self.until = math.inf
        """Time from which it is taken to train."""
        self._forced, self._at, self._began = forced, end, time.monotonic()

    def _value(self, name: str, words: dict[str, Any]) -> Any:
        if name in self.asked and self.asked[name] != words:
            raise ValueError(f"{name} has two ranges in one trial")
        self.asked[name] = words
        now = time.monotonic()
        self.until = now + max(self._quiet_s, 3 * (now - self._began))
        if words["kind"] != "choice":
            return words[self._at]
        self.chosen[name] = min(self._forced.get(name, 0), len(words["values"]) - 1)
        return json.loads(json.dumps(words["values"][self.chosen[name]], default=repr))

    def report(self, value: float, step: int, *, checkpoint: Any = None) -> None:
        self.reports, self.iterations = True, _rounds(sys._getframe(1))
        raise _Seen

    def should_prune(self) -> bool:
        self.asks = True
        raise _Seen


def _rounds(frame: Any) -> int:
    """Return how many steps the loops around the line of a frame report; 0 if it is not known."""
    with suppress(Exception):  # a loop over anything
        lines, first = inspect.getsourcelines(frame.f_code)
        at, found = frame.f_lineno - max(first, 1) + 1, ast.walk(ast.parse(dedent("".join(lines))))
        around = [node for node in found if getattr(node, "lineno", at) <= at <= getattr(node, "end_lineno", 0)]
        call = next(node for node in around if getattr(getattr(node, "func", None), "attr", "") == "report")
        loops: Any = [node for node in around if isinstance(node, ast.For | ast.While)]
        steps: Any = [*call.args[1:], *call.keywords]  # type: ignore[attr-defined]
        names = set().union(*map(_names, steps))
        counted = [loop for loop in loops if isinstance(loop, ast.For) and _names(loop.target) & names] or loops
        return math.prod(_passes(loop.iter, frame) for loop in counted) if counted else 0
    return 0


def _passes(node: Any, frame: Any) -> int:
    """Return how often a loop over an expression goes round: over a range, or over something with a length."""
    while getattr(getattr(node, "func", None), "id", "") in ("tqdm", "enumerate"):
        node = node.args[0]
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") != "range":
        raise TypeError("its values would be made")
    return len(eval(ast.unparse(node), frame.f_globals, frame.f_locals))


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _explore(objective: Callable[[Any], Any], maximizes: bool) -> Iterator[dict[str, Any]]:
    """Call the objective with each option of its choices, alone and then together; yield what each call asked for."""
    deadline, tried = time.monotonic() + LIMIT_S, set[str]()
    waiting: list[tuple[dict[str, int], str]] = [({}, "high"), ({}, "low"), ({}, "high")]
    quiet_s = _QUIET_S[0]
    while waiting and len(tried) < _MOST_RUNS and time.monotonic() < deadline:
        waiting.sort(key=lambda each: len(each[0]))  # one option at a time first
        forced, end = waiting.pop(0)
        run = _recorded(objective, _Recorder(forced, end, maximizes, quiet_s), deadline)
        quiet_s = _QUIET_S[1]
        yield {**run, "end": end, "left": len(waiting)}
        for name, words in run["asked"].items():
            for option in range(len(words.get("values", ()))):
                more = {**{key: at for key, at in run["chosen"].items() if at}, name: option}
                text = json.dumps({key: at for key, at in more.items() if at}, sort_keys=True)
                if option and text not in tried:
                    tried.add(text)
                    waiting.append((more, "high"))


def _recorded(objective: Callable[[Any], Any], trial: _Recorder, deadline: float) -> dict[str, Any]:
    fault = ""

    def look(*_: Any) -> None:
        if time.monotonic() > min(trial.until, deadline):
            raise _Seen

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
    try:
        objective(trial)
    except _Seen:
        pass
    except (Exception, SystemExit) as error:
        fault = f"{type(error).__name__}: {error}".splitlines()[0]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    asked = json.loads(json.dumps(trial.asked, default=repr))
    return {
        "asked": asked,
        "chosen": trial.chosen,
        "reports": trial.reports or trial.asks,
        "iterations": trial.iterations,
        "fault": fault,
    }


if __name__ == "__main__":
    main(sys.argv[1:])
