"""Commands that start a program: launchers, and shell scripts that pass their words on."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from pathlib import Path

from rubberband.errors import InputError
from rubberband.values.command import LAUNCHED_MODULES, PLACES, launcher_of, line_of, named

_PYTHON_LINE = re.compile(r"^(?!\s*(#|echo\b)).*\b(python[\d.]*|torchrun|accelerate launch|uv run)\s.*?(\.py\b|-m\s)")
_FOLDER = re.compile(r"^\s*cd\s(?!.*dirname)", re.MULTILINE)
"""A line that goes to another folder than that of the script."""
PLACEMENT = (
    *("--num_processes", "${workers}", "--num_machines", "${machines}", "--machine_rank", "${machine_rank}"),
    *("--main_process_ip", "${master_addr}", "--main_process_port", "${master_port}"),
)
"""Words of Accelerate for the workers of a gang, with launch: machine."""
_PLACED = (
    *("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port"),
    *("gpu_ids", "multi_gpu", "cpu", "same_network", "rdzv_backend", "module", "m"),
)
_OF_ACCELERATE = re.compile(
    r"accelerate_config|config_file|use_(deepspeed|fsdp|megatron_lm|parallelism_config)|zero_stage|zero3_\w+|"
    r"offload_\w+_device|deepspeed_\w+|fsdp_(?!config|transformer)\w+|mixed_precision|dynamo_\w+"
)
"""Options of Accelerate that change how a program trains, among those of TRL."""


def example_of(words: Sequence[str], *more: str) -> str:
    """Return a command line with these words too, as a shell takes it."""
    return shlex.quote(" ".join([line_of(words), *more]))


def interpreter_of(script: str) -> str:
    """Return the program that runs a script."""
    if script.endswith(".sh"):
        return "bash"
    return "python" if shutil.which("python") is not None else "python3"


def seen_from(folder: Path, words: Sequence[str]) -> tuple[str, ...]:
    """Return words of the current folder with the paths of their files from another one."""
    here = Path.cwd()
    if folder.absolute() == here:
        return tuple(words)
    return tuple(os.path.relpath(word, folder) if (here / word).is_file() else word for word in words)


def without_launcher(words: Sequence[str]) -> list[str]:
    """Return the words of the program that a launcher starts, behind `uv run` and the like."""
    if (module := LAUNCHED_MODULES.get(launcher_of(words) or "")) is not None:
        at = next(at for at in range(len(words)) if " ".join(words[at : at + 2]).endswith(str(launcher_of(words))))
        return [*words[:at], interpreter_of(".py"), "-m", module, *words[at + 2 :]]
    script = next((at for at, word in enumerate(words) if word.endswith(".py")), None)
    modules = [at for at, word in enumerate(words[:-1]) if word == "-m" and not launcher_of(["python", *words[at:]])]
    if script is None and not modules:
        raise InputError(f"{line_of(words)} names no script; write it as python SCRIPT.py")
    begin = max(at for at in range(len(words)) if launcher_of(words[at:]) is not None)
    at = script if script is not None else modules[0]
    return [*words[:begin], interpreter_of(words[at]), *words[at:]]


def front_of(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words before a launcher or an interpreter, as `env A=1` and `uv run`, and those of the interpreter.

    Without CUDA_VISIBLE_DEVICES, which a trial's worker has by itself.
    """
    for at, (word, after) in enumerate(pairwise((*words, ""))):
        name = word.rpartition("/")[2]
        is_python = re.fullmatch(r"python[\d.]*", name) is not None
        if is_python or word in ("-m", "--module") or launcher_of([name, after]) is not None:
            front = [each for each in words[:at] if not each.startswith("CUDA_VISIBLE_DEVICES=")]
            end = next((end for end in range(at, len(words)) if words[end] == "-m"), at) if is_python else at
            return ([] if front == ["env"] else front), list(words[at:end])
    return [], []


def without(words: Sequence[str], keys: Collection[str]) -> list[str]:
    """Return words without the options of some keys, and their values."""
    return _parted(words, lambda key: key in keys)[1]


def on_one(words: Sequence[str]) -> list[str]:
    """Return the words of a launcher with the places of one worker on this machine, and a free port."""
    one = {"${workers}": "1", "${machines}": "1", "${machine_rank}": "0", "${master_addr}": "127.0.0.1"}
    return [one.get(word, word) for word in words]


def of_accelerate(words: Sequence[str]) -> list[str]:
    """Return the words of `accelerate launch` that change how its program trains: without those that place workers."""
    begin = next(at for at, word in enumerate(words) if word == "launch" or word.endswith("commands.launch")) + 1
    ends = (at for at, word in enumerate(words) if at >= begin and (word.endswith(".py") or word in ("-m", "--module")))
    return without(words[begin : next(ends, len(words))], _PLACED)


def parted_by_accelerate(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words of Accelerate among those of `trl sft` that change how it trains, and those of TRL."""
    kept, rest = _parted(words, lambda key: _OF_ACCELERATE.fullmatch(key) is not None)
    return kept, without(rest, _PLACED)


def _parted(words: Sequence[str], is_one: Callable[[str], bool]) -> tuple[list[str], list[str]]:
    """Return the options, with their values, whose key is one, and the other words."""
    ours, others, is_ours = list[str](), list[str](), False
    for word in words:
        key, is_one_word, _ = word.partition("=")
        if word.startswith("-") or is_one_word:
            is_ours = is_one(key.lstrip("-").replace("-", "_"))
        (ours if is_ours else others).append(word)
    return ours, others


def inside_shell(words: Sequence[str], folder: Path) -> list[str] | None:
    """Return the words by which a shell script starts a program with its own words; None for other commands.

    Raises InputError for a script that does not pass them on, or not to a single program.
    """
    script = next((word for word in words if word.endswith(".sh")), None)
    if script is None or any(name not in PLACES for word in words for name in named(word)):
        return None
    text = (folder / script).read_text("utf-8-sig", "replace").replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if _PYTHON_LINE.search(line)]
    by_hand = f"name them: rubberband init {example_of(words, '--lr ${lr}')}"
    if len(lines) != 1 or _FOLDER.search(text) or ("dirname" in text and "/" in script):
        what = "runs in another folder" if len(lines) == 1 else f"has {len(lines)} lines of python, not one"
        raise InputError(f"{script} {what}, so its options are not known; {by_hand}")
    if re.search(r"\$@|\$\*|\$\{@", lines[0]) is None:
        raise InputError(
            f'{script} does not pass its words on; end its line of python with "$@", then rubberband init {script}'
        )
    try:
        inner = [_value(word, text) for word in shlex.split(re.split(r"[|>&;]", lines[0])[0])]
    except ValueError:
        raise InputError(f"{script} has quotes over several lines, so its options are not known; {by_hand}") from None
    while inner and (inner[0] in ("exec", "time", "nohup") or re.match(r"\w+=", inner[0])):
        inner = inner[1:]
    inner = [word for word in inner if "$@" not in word and "$*" not in word]
    if (launcher := launcher_of(inner)) is not None:
        plain = line_of(without_launcher(inner))
        raise InputError(
            f"{script} starts {launcher}, and each worker would; give the program: rubberband init {shlex.quote(plain)}"
        )
    return inner


def _value(word: str, text: str) -> str:
    """Return a word with the value of a variable that the script sets: `LR=0.1`, or `LR=${LR:-0.1}`."""
    variable = re.fullmatch(r"\$\{?(\w+)\}?", word)
    if variable is None:
        return word
    found = re.search(rf"(?m)^\s*(?:export\s+)?{variable[1]}=(?:\$\{{\w+:-)?['\"]?([^}}\s'\"]+)", text)
    return found[1] if found else word
