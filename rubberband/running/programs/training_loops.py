"""The training loop of a script, by its syntax tree: what it trains, what it carries from one epoch to the next."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

Scope = ast.Module | ast.FunctionDef
Loop = ast.For | ast.While

_EPOCHS = re.compile(r"epoch|^ep$|round|episode|generation|^step|^iter|^update$", re.IGNORECASE)
_TRAINS = ("backward", "partial_fit", "manual_backward")
_STEPS = ("step", *_TRAINS)
_PRINTS = ("print", "report", "write", "info", "log", "log_metrics", "set_postfix", "echo", "secho")
_METRICS = re.compile(r"loss|acc|score|reward|return|err|auc|f1|ppl|bleu|mse|val|eval|metric", re.IGNORECASE)
_OPTIMIZER = re.compile(r"(^|\.)(optim\.\w+|Adam\w*|SGD|RMSprop|Adagrad|Adadelta|LBFGS|NAdam|RAdam|Lion|Adafactor)$")
_SCHEDULER = re.compile(r"lr_scheduler\.|(LR|Restarts|Plateau|scheduler\w*)$")
_SCALER = re.compile(r"GradScaler$")
_EMA = re.compile(r"(^|\.)(\w*EMA|\w*Ema|AveragedModel)$")
_MODEL = re.compile(
    r"model|net(work)?[A-Z]?$|encoder|decoder|generator|discriminator|actor|critic|policy", re.IGNORECASE
)
_OF_MODELS = re.compile(r"name|path|dir|file|args|config|type|size|save|load", re.IGNORECASE)
_DATA = re.compile(
    r"pars|open$|load|read|fetch|split|frombuffer|Path|Logger|time|Writer|tqdm|wandb|init$|device|count|config|namespace",
    re.IGNORECASE,
)
"""Calls whose value a loop reads and does not change, or that no file can keep."""
_OPTIONS = re.compile(
    r"^(self\.)?(args?|opts?|options|cfg|config|conf|hparams|params|flags|parser|logger|device)$", re.IGNORECASE
)
_RANDOM = re.compile(r"(default_rng|RandomState|random\.Random)$")


@dataclass(slots=True)
class TrainingLoop:
    """The loop over epochs, and the objects whose state it changes."""

    loop: Loop
    models: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    """Optimizers, schedulers, scalers and averages: all that have a `state_dict`."""
    values: list[str] = field(default_factory=list)
    """Numbers, lists and arrays that an epoch takes from the one before."""
    fitted: list[str] = field(default_factory=list)
    """Models of scikit-learn, and generators of random numbers."""
    objects: list[str] = field(default_factory=list)
    """Other objects that the loop reads and may change in place, beside those of PyTorch."""
    outer: set[str] = field(default_factory=set)
    """Names of the module, where the loop is in a function."""
    before: ast.stmt | None = None
    """The statement before which a save belongs, as it prints the metric when nothing is left to train."""
    after: ast.stmt | None = None
    """The statement after which a save belongs, where none is to be before one."""
    condition: str = ""
    """Under which the metric is printed; empty: in each pass."""
    is_begun: bool = True
    """Whether the pass of the loop has trained where the save is."""


def dotted(node: ast.expr) -> str:
    """Return `a.b.c` of an expression, and of what is called; empty for others."""
    if isinstance(node, ast.Call):
        return dotted(node.func)
    if isinstance(node, ast.Attribute):
        return f"{start}.{node.attr}" if (start := dotted(node.value)) else ""
    return node.id if isinstance(node, ast.Name) else ""


def calls_in(node: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls within a node."""
    return (each for each in ast.walk(node) if isinstance(each, ast.Call))


def training_loop(tree: ast.Module) -> TrainingLoop | None:
    """Return the loop over epochs of a script; None where none is found."""
    program = _Program(tree)
    found = [(program.score(loop), scope, loop) for scope, loop in program.loops()]
    best = max(found, key=lambda each: each[0], default=None)
    if best is None or best[0] < 2:
        return None
    return program.described(best[1], best[2])


class _Program:
    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.functions = {
            each.name: each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        self.classes = [each for each in tree.body if isinstance(each, ast.ClassDef)]

    def loops(self) -> Iterator[tuple[Scope, Loop]]:
        """Yield the outermost loops of the module and of each function."""
        for scope in (self.tree, *self.functions.values()):
            for loop in self._outermost(scope.body):
                yield scope, loop  # type: ignore[misc]

    def _outermost(self, body: Sequence[ast.stmt]) -> Iterator[Loop]:
        for each in body:
            if isinstance(each, ast.For | ast.While):
                yield each
            elif not isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                for name in ("body", "orelse", "finalbody", "handlers"):
                    for inner in getattr(each, name, ()):
                        yield from self._outermost(inner.body if isinstance(inner, ast.ExceptHandler) else [inner])

    def score(self, loop: Loop) -> int:
        """Return how much a loop looks like that over epochs: 2 and more is one."""
        if isinstance(loop, ast.For):
            if not isinstance(loop.target, ast.Name) or range_of(loop) is None:
                return 0
            is_named = bool(_EPOCHS.search(loop.target.id))
        else:
            names = [each.id for each in ast.walk(loop.test) if isinstance(each, ast.Name)]
            is_named = any(map(_EPOCHS.search, names))
        trains = self.reaches(loop, lambda call: _method(call) in _TRAINS)
        fits = any(re.search("train|fit", _method(call), re.IGNORECASE) for call in calls_in(loop))
        prints = self.reaches(loop, _is_print)
        return 2 * is_named + 2 * trains + fits + prints if prints else 0

    def reaches(self, node: ast.AST, wanted: Callable[[ast.Call], bool], depth: int = 4) -> bool:
        """Whether a call like that is in a node, or in a function of the script that it calls."""
        for call in calls_in(node):
            if wanted(call):
                return True
            function = self.functions.get(_method(call))
            if function is not None and depth and function is not node and self.reaches(function, wanted, depth - 1):
                return True
        return False

    def described(self, scope: Scope, loop: Loop) -> TrainingLoop:
        """Return what a loop changes, and where its state is saved."""
        found = TrainingLoop(loop)
        assigned = self._assigned(scope, loop)
        source = {name: dotted(value) if isinstance(value, ast.Call) else "" for name, value in assigned.items()}
        users = {dotted(call.func) for call in calls_in(self.tree)}
        for name, made in source.items():
            bare = name.removeprefix("self.")
            used = {method for user in users if (method := user.removeprefix(f"{name}.")) != user}
            is_scheduler = _SCHEDULER.search(made) and ("sched" in bare.lower() or "step" in used)
            if _OPTIMIZER.search(made) or {"zero_grad", "step"} <= used or _SCALER.search(made) or is_scheduler:
                found.others.append(name)
            elif _EMA.search(made):
                found.models.append(name)
            elif _RANDOM.search(made) or "partial_fit" in used:
                found.fitted.append(name)
            elif (
                "parameters" in used
                or (made and "state_dict" in used)
                or (_MODEL.search(bare) and not _OF_MODELS.search(bare) and (name in users or "train" in used))
            ):
                found.models.append(name)
        known = {*found.models, *found.others, *found.fitted}
        found.values = [name for name in self._carried(scope, loop, assigned) if name not in known]
        read = self._read(loop)
        found.objects = [
            name
            for name, value in assigned.items()
            if name in read and name not in (*known, *found.values) and _may_change(value) and not _OPTIONS.search(name)
        ]
        if isinstance(scope, ast.FunctionDef):
            found.outer = {name for name in assigned if name not in _locals_before(scope, loop)} - _arguments(scope)
        self._place(found)
        return found

    def _assigned(self, scope: Scope, loop: Loop) -> dict[str, ast.expr | None]:
        """Return the names that the loop can see -> the value that each has got last before it."""
        found: dict[str, ast.expr | None] = {}
        for each in self.tree.body if isinstance(scope, ast.FunctionDef) else ():
            found |= _targets(each)
        if isinstance(scope, ast.FunctionDef):
            found |= dict.fromkeys(_arguments(scope))
            owner = next((each for each in self.classes if scope in each.body), None)
            if owner is not None:
                of_self = (_targets(each) for method in owner.body for each in ast.walk(method))
                found |= {name: value for some in of_self for name, value in some.items() if name.startswith("self.")}
        for each in _own_statements(scope):
            if each.lineno < loop.lineno:
                found |= {name: value for name, value in _targets(each).items() if not name.startswith("self.")}
        return found

    def _carried(self, scope: Scope, loop: Loop, assigned: dict[str, ast.expr | None]) -> list[str]:
        """Return names that have a value before the loop, and get another one within it."""
        changed: dict[str, None] = {}
        bodies: list[ast.AST] = [loop]
        if isinstance(scope, ast.Module):
            bodies += [each for each in self.functions.values() if any(isinstance(g, ast.Global) for g in each.body)]
        shared = {name for body in bodies[1:] for g in ast.walk(body) if isinstance(g, ast.Global) for name in g.names}
        for body in bodies:
            for each in ast.walk(body):
                names = [name for name in _targets(each) if body is loop or name in shared]
                if isinstance(each, ast.AugAssign | ast.Assign):
                    targets = [each.target] if isinstance(each, ast.AugAssign) else each.targets
                    names += [dotted(one.value) for one in targets if isinstance(one, ast.Subscript)]
                if isinstance(each, ast.Call) and _method(each) in ("append", "extend") and body is loop:
                    names.append(dotted(each.func).rpartition(".")[0])
                changed |= dict.fromkeys(names)
        local = _locals_before(scope, loop)
        target = loop.target.id if isinstance(loop, ast.For) and isinstance(loop.target, ast.Name) else ""
        return [
            name
            for name in changed
            if name in assigned and name != target and (name in local or name.startswith("self."))
            if not (isinstance(value := assigned[name], ast.Call) and re.search("time|perf_counter", dotted(value)))
        ]

    def _read(self, node: ast.AST, depth: int = 4) -> set[str]:
        """Return the names that a node reads, and the functions of the script that it calls."""
        found = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        found |= {name for each in ast.walk(node) if isinstance(each, ast.Attribute) and (name := dotted(each))}
        for call in calls_in(node):
            if depth and (function := self.functions.get(_method(call))) is not None:
                found |= self._read(function, depth - 1)
        return found

    def _place(self, found: TrainingLoop) -> None:
        """Find the place of a save: beside the line of the metric, and where the state is whole."""
        body = found.loop.body

        def trains(each: ast.stmt) -> bool:
            return self.reaches(each, lambda call: _method(call) in _STEPS)

        def changes(each: ast.stmt) -> bool:
            carried = any(name in found.values for inner in ast.walk(each) for name in _targets(inner))
            fits = any(dotted(call.func).rpartition(".")[0] in found.fitted for call in calls_in(each))
            named = any(re.match("train", _method(call).removeprefix("_")) for call in calls_in(each))
            return carried or trains(each) or _is_global(each, self.functions, found) or named or fits

        metrics = [each for each in body if self.reaches(each, _is_metric)]
        prints = metrics or [each for each in body if self.reaches(each, _is_print)]
        prints = [each for each in prints if not _leaves(each)] or prints
        direct = [each for each in prints if any(map(_is_print, _own_calls(each)))]
        at = body.index((direct or prints)[-1])
        place = body[at]
        after = body[at + 1 :]
        if any(map(trains, after)) and not any(map(trains, body[: at + 1])):
            # it prints first, and then trains: what is saved is what this pass of the loop begins with
            found.before, found.is_begun, found.condition = place, False, _condition(place)
        elif any(map(changes, after)):
            found.after = body[-1]
        else:
            found.condition = _condition(place)
            calls = any(_method(call) in self.functions for call in calls_in(place))
            is_plain = not changes(place) and place in direct and not calls
            found.before, found.after = (place, None) if is_plain else (None, place)


def range_of(loop: ast.For) -> ast.Call | None:
    """Return the call of `range` (or of `trange`) in the head of a loop, also within `tqdm(…)`."""
    return next((call for call in calls_in(loop.iter) if _method(call) in ("range", "trange", "count")), None)


def _method(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else dotted(call.func)


def _is_print(call: ast.Call) -> bool:
    return _method(call) in _PRINTS and dotted(call.func) not in ("f.write", "file.write", "sys.stderr.write")


def _is_metric(call: ast.Call) -> bool:
    return _is_print(call) and bool(_METRICS.search(ast.unparse(call)))


def _leaves(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and any(isinstance(each, ast.Break | ast.Return) for each in statement.body)


def _own_calls(statement: ast.stmt) -> Iterator[ast.Call]:
    """Yield the calls of a statement, and of those within an `if`; none of a loop."""
    if isinstance(statement, ast.If | ast.With):
        for each in (*statement.body, *getattr(statement, "orelse", ())):
            yield from _own_calls(each)
    elif not isinstance(statement, ast.For | ast.While):
        yield from calls_in(statement)


def _condition(statement: ast.stmt) -> str:
    return ast.unparse(statement.test) if isinstance(statement, ast.If) and not statement.orelse else ""


def _targets(node: ast.AST) -> dict[str, ast.expr | None]:
    """Return the names that a statement assigns -> the values that they get; None where that is a part of one."""
    if isinstance(node, ast.Assign):
        pairs: list[tuple[ast.expr, ast.expr]] = [(target, node.value) for target in node.targets]
    elif isinstance(node, ast.AnnAssign | ast.AugAssign) and node.value is not None:
        pairs = [(node.target, node.value)]
    else:
        return {}
    found: dict[str, ast.expr | None] = {}
    for target, value in pairs:
        if isinstance(target, ast.Tuple | ast.List):
            values = value.elts if isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts) else None
            for number, each in enumerate(target.elts):
                if name := dotted(each):
                    found[name] = values[number] if values else value
        elif (name := dotted(target)) and not isinstance(target, ast.Subscript):
            found[name] = value
    return found


def _arguments(scope: ast.FunctionDef) -> set[str]:
    return {each.arg for each in (*scope.args.posonlyargs, *scope.args.args, *scope.args.kwonlyargs)}


def _may_change(value: ast.expr | None) -> bool:
    """Whether a value is made by a call or a list, and is no data, option or clock."""
    if value is None or not any(isinstance(each, ast.Call | ast.List | ast.Dict) for each in ast.walk(value)):
        return False
    return not any(_DATA.search(dotted(call.func)) for call in calls_in(value))


def _own_statements(scope: Scope) -> Iterator[ast.stmt]:
    """Yield the statements of a scope, not those of functions and classes within it."""
    waiting = list(scope.body)
    while waiting:
        each = waiting.pop(0)
        yield each
        if not isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            waiting[:0] = [inner for inner in ast.iter_child_nodes(each) if isinstance(inner, ast.stmt)]


def _locals_before(scope: Scope, loop: Loop) -> set[str]:
    """Return the names that the scope itself assigns before the loop."""
    return {name for each in _own_statements(scope) if each.lineno < loop.lineno for name in _targets(each)}


def _is_global(statement: ast.stmt, functions: Mapping[str, ast.AST], found: TrainingLoop) -> bool:
    """Whether a statement calls a function that changes a value of the loop."""
    called = (functions.get(_method(call)) for call in calls_in(statement))
    shared = (g for function in called if function is not None for g in ast.walk(function) if isinstance(g, ast.Global))
    return any(name in found.values for one in shared for name in one.names)
