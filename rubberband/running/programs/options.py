"""Finds a program's options and metrics for `rubberband init`, without training: its parser is asked, its source read.

The options are those of an ArgumentParser. The program runs in a process of its own until it parses its arguments; one
whose source names no ArgumentParser is not started.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rubberband.errors import InputError
from rubberband.executor.training.entrypoint import Entrypoint, files_named, files_of
from rubberband.running.programs import parser_probe
from rubberband.values.command import PLACES, launcher_of, words_of
from rubberband.values.metric_lines import metrics_in

LIMIT_S = 60.0
"""Time until a program parses its arguments; its imports may take long."""
_BOOL_OF_TRAINER = "string_to_bool"
"""Name of the type that HfArgumentParser gives to its options that are true or false."""
_ROLES = (
    (r"((max|num|n|total|train)_)*epochs?", "${max_t}"),
    (r"seed", "${seed}"),
    (
        r"(.*_)?(out|output|save|checkpoint|checkpoints|ckpt|ckpts|model|work)_?(dir|folder|path|file)|out|output|workdir"
        r"|save(_to)?|checkpoint|ckpt",
        "${checkpoint}",
    ),
)
"""Name of an option -> the place that fills it."""
_FIXED = re.compile(
    r"(.*_)?(seed|workers|interval|freq|frequency|every|port|rank|world_size|gpus?|nodes?|machines|devices?|verbose|"
    r"verbosity|threads|procs|processes|version|cache|timeout|limit|backend|host|cuda|mps|precision|dtype|dataset|data|"
    r"task|split|mode|name|tags?|project|steps|strategy|debug|local_rank|prefetch|folds?)|(log|print|save|eval|test|val|"
    r"cache|data|wandb|ddp|fsdp|hub|push|report|tensorboard|dry|use_cpu|per_(device|gpu)_eval|no)_.*"
)
"""Names of options that no search changes."""
_OUTPUT = re.compile(r"(.*_)?(out|output|save|work)_?(dir|folder|path)|out|output|workdir")
"""Names of options with the place to which a program writes."""
_OF_TRAINER = {
    "do_train": (),
    "do_eval": (),
    "eval_strategy": ("epoch",),
    "evaluation_strategy": ("epoch",),
    "save_strategy": ("epoch",),
}
"""Option of the Trainer of transformers -> its value, for an iteration that is an epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramOption:
    """An option of a program."""

    name: str
    flags: tuple[str, ...]
    """Empty for a positional argument."""
    kind: str
    """Class of the action, such as StoreAction."""
    type: str | None
    default: Any
    choices: tuple[Any, ...] | None
    takes_one: bool
    required: bool
    booleans: tuple[str, ...] | None = None
    """Words for true and false that its type distinguishes, if it was given one of them; None: it is not known."""

    @property
    def flag(self) -> str:
        """The flag that is written: the longest; empty for a positional argument."""
        return max(self.flags, key=len, default="")

    @property
    def is_switch(self) -> bool:
        """Whether it takes a text that stands for true or false."""
        return self.kind == "StoreAction" and (self.type == "bool" or isinstance(self.default, bool))

    @property
    def is_tunable(self) -> bool:
        """Whether it is one value that a search may change, as far as its name says."""
        is_value = self.kind == "BooleanOptionalAction" or (self.kind == "StoreAction" and self.takes_one)
        if not is_value or self.is_switch or self.name in PLACES or _FIXED.fullmatch(self.name.lower()):
            return False
        return self.choices is not None or isinstance(self.default, int | float) or self.type in ("int", "float")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramFindings:
    """Findings about a program."""

    words: tuple[str, ...]
    """Its command line, with `${…}` for parameters and places."""
    parameters: tuple[ProgramOption, ...] = ()
    epochs: int | None = None
    """Its default number of epochs, if `${max_t}` stands for it."""
    reported: tuple[str, ...] = ()
    """Metrics in calls of `rubberband.report`, and else in what it prints."""
    prints: bool = False
    """Whether the metrics are printed."""
    remarks: tuple[str, ...] = ()


def is_program(text: str) -> bool:
    """Whether the text is a script or a command line, and no `module:attribute` or file of an experiment."""
    return " " in text.strip() or text.endswith((".py", ".sh"))


def program_of(text: str, folder: Path) -> ProgramFindings:
    """Look at a script or a command line that is run in `folder`. Raises InputError if it cannot be run as it is."""
    given = words_of(text if " " in text.strip() else [_interpreter(text), text])
    words, remarks = [word for word in given if word != "${args}"], list[str]()
    if (launcher := launcher_of(words)) is not None:
        words = _without_launcher(words)
        remarks.append(f"{launcher} is not needed: each worker starts the command once, with torchrun's variables")
    if shutil.which(words[0]) is None and not Path(folder, words[0]).is_file():
        raise InputError(f"{words[0]} is not here; install it, or give its path")
    for word in words:
        if word.endswith((".py", ".sh")) and not (folder / word).is_file():
            raise InputError(f"there is no {word} in {folder}; give its path from there")
    sources = _sources(words, folder)
    if " " not in text.strip() and sources and (trial := _trial_in(sources[0])) is not None:
        raise InputError(f"{text} defines {trial}, a trial in Python: rubberband init {Path(text).stem}:{trial}")
    metrics, prints = _metrics(sources)
    options = None
    if any("ArgumentParser" in text for text in sources):
        options, fault = _options(words, folder)
        remarks += [fault] if fault else []
    elif sources:
        remarks.append(
            "it has no ArgumentParser, so its parameters were not found: write them below, and their options into the "
            "command"
        )
    found = ProgramFindings(words=(*words, "${args}"), reported=tuple(metrics), prints=prints, remarks=tuple(remarks))
    return found if not options else _with_options(found, words, options)


def booleans_of(words: Sequence[str], folder: Path) -> Mapping[str, tuple[str, ...]]:
    """Return flag -> the words for true and false that its type distinguishes, for a command line that has such words.

    Only for the options of an ArgumentParser with a type.
    """
    if not any("ArgumentParser" in text for text in _sources(words, folder)):
        return {}
    options, _ = _options(words, folder)
    return {flag: each.booleans for each in options or () if each.booleans is not None for flag in each.flags}


def _interpreter(script: str) -> str:
    if script.endswith(".sh"):
        return "bash"
    return "python" if shutil.which("python") is not None else "python3"


def _without_launcher(words: Sequence[str]) -> list[str]:
    script = next((at for at, word in enumerate(words) if word.endswith(".py")), None)
    if script is None:
        raise InputError(f"{shlex.join(words)} names no script; write it as python SCRIPT.py")
    return [_interpreter(words[script]), *words[script:]]


def _with_options(found: ProgramFindings, words: Sequence[str], options: Sequence[ProgramOption]) -> ProgramFindings:
    """Return the findings with the program's options in its command."""
    given = {word.partition("=")[0] for word in words if word.startswith("-")}
    positionals = sum(not option.flags for option in options)
    has_positionals = sum(not word.startswith("-") for word in words) >= 2 + positionals
    command, parameters, remarks, epochs = list(words), list[ProgramOption](), list(found.remarks), None
    missing = list[str]()
    is_trainer = any(option.type == _BOOL_OF_TRAINER for option in options)
    for option in options:
        place = _place(option)
        if given & set(option.flags) or (not option.flags and has_positionals):
            if place == "${checkpoint}" and option.flags and _OUTPUT.fullmatch(option.name.lower()):
                remarks += _own_folder(command, option)
            continue
        if is_trainer and option.name in _OF_TRAINER:
            command += [option.flag, *_OF_TRAINER[option.name]]
            continue
        if place is not None and option.flags:
            command += [option.flag, place]
            if place == "${max_t}" and isinstance(option.default, int | float):
                epochs = int(option.default)
        elif option.is_tunable:
            parameters.append(option)
        elif option.required:
            missing.append(option.flag or option.name)
        elif (remark := _switch(option)) is not None:
            remarks.append(remark)
    if missing:
        raise InputError(
            f"{shlex.join(words)} needs {' and '.join(missing)}; give what it needs: "
            f"rubberband init {shlex.quote(shlex.join([*words, missing[0], '…']))}"
        )
    for option in parameters:
        value = f"${{{option.name}}}"
        command += [value] if not option.flags or option.kind == "BooleanOptionalAction" else [option.flag, value]
    if not any("${checkpoint}" in word for word in command):
        remarks.append(
            "it has no option for the folder of its checkpoints: let it save to the folder in "
            'os.environ["RUBBERBAND_CHECKPOINT"], and load from there when it starts'
        )
    return ProgramFindings(
        words=tuple(command) if any("$" in word for word in command) else (*command, "${args}"),
        parameters=tuple(parameters),
        epochs=epochs,
        reported=found.reported,
        prints=found.prints,
        remarks=tuple(remarks),
    )


def _own_folder(command: list[str], option: ProgramOption) -> list[str]:
    """Let a folder in the command, which trials would share, be `${checkpoint}`; return a remark on it."""
    for at, word in enumerate(command):
        flag, is_one_word, value = word.partition("=")
        if flag not in option.flags:
            continue
        value = value if is_one_word else "".join(command[at + 1 : at + 2])
        if "$" in value or Path(value).suffix:
            break
        command[at + (not is_one_word)] = f"{flag}=${{checkpoint}}" if is_one_word else "${checkpoint}"
        return [f"{flag} {value} is ${{checkpoint}} now: all trials would write into {value}"]
    return []


def _place(option: ProgramOption) -> str | None:
    """Return the place that fills an option; None if none does."""
    if option.kind != "StoreAction" or not option.takes_one or option.choices is not None:
        return None
    place = next((place for pattern, place in _ROLES if re.fullmatch(pattern, option.name.lower())), None)
    if place != "${checkpoint}":
        return place
    if option.type in ("int", "float") or isinstance(option.default, int | float):
        return None
    file = Path(option.default).name if isinstance(option.default, str) else ""
    return f"{place}/{file}" if Path(file).suffix else place


def _switch(option: ProgramOption) -> str | None:
    """Return a remark on an option that no value of a parameter can stand for."""
    if _FIXED.fullmatch(option.name.lower()):
        return None
    if option.type == "bool":
        return f"{option.flag} has type=bool, which reads every text as true: it is left out"
    takes_none = option.kind in ("StoreTrueAction", "StoreFalseAction") and not re.match("--no[-_]", option.flag)
    if takes_none or (option.is_switch and option.type != _BOOL_OF_TRAINER):
        return f"{option.flag} is a switch, so that no parameter stands for it: add it to the command if it is wanted"
    return None


# The program's parser.


def _options(words: Sequence[str], folder: Path) -> tuple[list[ProgramOption] | None, str]:
    """Run the program until it parses its arguments; return its options, or None and why there are none."""
    at = next((at for at, word in enumerate(words) if word.endswith(".py") or word == "-m"), None)
    if at is None or not Path(words[0]).name.startswith("python"):
        return (
            None,
            "it does not begin with python and a script, so its options were not read: name them in the command",
        )
    inbound, outbound = os.pipe()
    with os.fdopen(inbound, "rb") as answer:
        process = subprocess.Popen(
            [*words[:at], parser_probe.__file__, str(outbound), *words[at:]],
            cwd=folder,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
            pass_fds=[outbound],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        os.close(outbound)
        try:
            _, printed = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return None, f"it parsed no arguments within {LIMIT_S:g} s, so its options were not read"
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return _answered(answer, printed)


def _answered(answer: IO[bytes], printed: bytes) -> tuple[list[ProgramOption] | None, str]:
    content = answer.read()
    if not content:
        last = printed.decode("utf-8", "replace").strip().splitlines()[-1:]
        why = f" ({last[0]})" if last else ""
        return None, f"it ended before it parsed its arguments{why}, so its options were not read"
    plain = json.loads(content)
    for each in plain:
        each["flags"] = tuple(each["flags"])
        for name in ("choices", "booleans"):
            each[name] = None if each[name] is None else tuple(each[name])
    return [ProgramOption(**each) for each in plain], ""


# The program's source.


def _sources(words: Sequence[str], folder: Path) -> list[str]:
    """Return the source of the program's script, and of the user's modules that it imports."""
    script = next((path for path in files_named(words, folder) if path.suffix == ".py"), None)
    if script is None:
        return []
    places = (str(script.parent), str(folder))
    files = files_of(Entrypoint(module=script.stem, attribute="", search_path=places))
    return [Path(file).read_text("utf-8-sig", "replace") for file in dict.fromkeys([str(script), *files])]


def _trial_in(source: str) -> str | None:
    """Return the name of a class or function that is a trial, in a module that is no program; None: it has none."""
    if "ArgumentParser" in source or "__main__" in source:
        return None
    with suppress(SyntaxError, ValueError):
        for node in ast.parse(source).body:
            match node:
                case ast.ClassDef(name=name, bases=bases) if any(_name_of(base).endswith("Trial") for base in bases):
                    return name
                case ast.FunctionDef(name=name, args=ast.arguments(args=[_])) if any(
                    isinstance(part, ast.Call) and _name_of(part.func) == "report" for part in ast.walk(node)
                ):
                    return name
    return None


_NO_METRIC = re.compile(
    r"(.*[_ ])?(epochs?|steps?|iter|iters|iterations?|time|seconds|sec|lr|eta|batch|rank|gpu|size)", re.I
)


def _metrics(sources: Sequence[str]) -> tuple[list[str], bool]:
    """Return the metrics that are reported, or else printed, and whether they are printed."""
    trees = list[ast.AST]()
    for text in sources:
        with suppress(SyntaxError, ValueError):
            trees.append(ast.parse(text))
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    reported = [
        key for call in calls if _name_of(call.func) == "report" for part in call.args[:1] for key in _keys(part)
    ]
    if reported:
        return list(dict.fromkeys(reported)), False
    if any(_name_of(call.func) in ("Trainer", "Seq2SeqTrainer", "HfArgumentParser") for call in calls) and any(
        re.search(r"^\s*(from|import) transformers\b", text, re.MULTILINE) for text in sources
    ):
        return ["eval_loss"], True  # which the Trainer prints after each evaluation
    printed = [
        name
        for call in calls
        if _name_of(call.func) in ("print", "info", "log", "write", "warning")
        for name in metrics_in(" ".join(_text(part) for part in call.args))
        if not _NO_METRIC.fullmatch(name)
    ]
    return list(dict.fromkeys(printed)), bool(printed)


def _name_of(node: ast.AST) -> str:
    return str(getattr(node, "attr", getattr(node, "id", "")))


def _keys(node: ast.AST) -> Iterator[str]:
    keys = node.keys if isinstance(node, ast.Dict) else []
    return (key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str))


_PERCENT = re.compile(r"%[-+ 0#]*\d*(?:\.\d+)?[dfgesir]")
_BRACES = re.compile(r"\{[^{}]*\}")


def _text(node: ast.AST) -> str:
    """Return what an argument of `print` prints, with 1 for each value."""
    match node:
        case ast.Constant(value=value):
            return str(value)
        case ast.JoinedStr(values=parts):
            return "".join(_text(part) for part in parts)
        case ast.BinOp(left=left, op=ast.Mod()):
            return _PERCENT.sub("1", _text(left))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text(left) + _text(right)
        case ast.Call(func=ast.Attribute(value=ast.Constant(value=str() as text), attr="format")):
            return _BRACES.sub("1", text)
        case ast.Call(func=ast.Attribute(attr="dumps"), args=[ast.Dict() as content]):
            return json.dumps(dict.fromkeys(_keys(content), 1))
        case ast.Dict():
            return json.dumps(dict.fromkeys(_keys(node), 1))
    return "1"
