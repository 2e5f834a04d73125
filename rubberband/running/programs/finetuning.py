"""Reads a config file of fine-tuning, or the command that names it: `rubberband init sft.yaml`, `init "trl sft …"`."""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from rubberband.errors import InputError
from rubberband.running.first_file import TrialFindings
from rubberband.running.programs.finetuning_tools import (
    AXOLOTL,
    LLAMA_FACTORY,
    RESUME,
    SWITCHED_OFF,
    TRL,
    Tool,
    as_words,
    domains,
    is_set,
    is_true,
    number_of,
    task_of,
    tool_of,
)
from rubberband.running.programs.options import MOST_PARAMETERS
from rubberband.running.programs.starters import (
    PLACEMENT,
    front_of,
    interpreter_of,
    of_accelerate,
    on_one,
    parted_by_accelerate,
    seen_from,
    without,
)
from rubberband.running.programs.written import TO_THE_END, TRIALS, schedule_of
from rubberband.running.ranges import middle_of
from rubberband.spec.fields import name_like
from rubberband.units import shown
from rubberband.values.command import LAUNCHED_MODULES, PER_WORKER, launcher_of, line_of, words_of

_OF_MODULES = {"trl": TRL, "axolotl": AXOLOTL, "llamafactory": LLAMA_FACTORY}
_WHOLE = range(20, 65)
"""Epochs with which an iteration is one. With others it is a part of the training: the first stage is 5 % of it."""
_PARTS = 32
_PART = f"{1 / _PARTS:g}"
"""An iteration, as a part of all steps: the Trainer takes it for `eval_steps`, `save_steps` and `logging_steps`."""
_REWARDED = ("grpo", "rloo", "ppo")


def is_finetuning(text: str) -> bool:
    """Whether the text names a config file of fine-tuning, or is a command that takes one."""
    if _is_file(text):
        with suppress(InputError):
            return tool_of(_read(text)) is not None
        return False
    with suppress(InputError):
        return " " in text.strip() and _module_in(words_of(text)) is not None
    return False


def findings_of(text: str, path: Path) -> TrialFindings:
    """Read a config file, or a command with one, for the file at `path`. Raises InputError for what is not known."""
    return _Config.read(text).findings(path)


def _is_file(text: str) -> bool:
    return text.endswith((".yaml", ".yml")) and Path(text).is_file()


class _Loader(yaml.SafeLoader):
    """Reads YAML, and `2e-4` as the number that is meant."""


_Loader.yaml_implicit_resolvers = {first: [*each] for first, each in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+\Z"), list("-+.0123456789")
)


def _read(file: str) -> dict[str, Any]:
    try:
        content = yaml.load(Path(file).read_text(encoding="utf-8"), Loader=_Loader)
    except FileNotFoundError:
        raise InputError(f"there is no {file} in {Path.cwd()}; give its path from there") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"{file} cannot be read as YAML ({str(error).splitlines()[0]}); correct it") from None
    if not isinstance(content, dict):
        raise InputError(f"{file} has no keys; a config file has lines such as learning_rate: 2.0e-4")
    return {str(key): value for key, value in content.items()}


def _config_in(file: str) -> dict[str, Any]:
    """Read a config file of which all trials begin where it says. Raises InputError for one that begins elsewhere."""
    values = _read(file)
    if is_set(values.get(RESUME)):
        raise InputError(
            f"{file} has {RESUME}: {shown(values[RESUME])}, so each trial would begin there; delete that line: a trial "
            "resumes from its own checkpoint"
        )
    return values


def _module_in(words: Sequence[str]) -> tuple[str, int] | None:
    """Return the module of a tool that a command starts, and the place of the word behind it; None for others."""
    for at, (word, after) in enumerate(pairwise((*words, ""))):
        launcher = f"{word.rpartition('/')[2]} {after}"
        if launcher in LAUNCHED_MODULES:
            return LAUNCHED_MODULES[launcher], at + 2
        if word in ("-m", "--module") and after in LAUNCHED_MODULES.values():
            return after, at + 2
        if word.endswith((".py", ".sh")):
            return None
    return None


@dataclass(kw_only=True)
class _Config:
    """A config file with the words of its command."""

    tool: Tool
    module: str
    file: str | None
    """The config file; None: all is in the words."""
    values: dict[str, Any]
    """Values of the file and of the words, which count."""
    words: list[str]
    """The user's own words behind the file."""
    given: Mapping[str, Any]
    """Values of the words alone."""
    launcher: tuple[list[str], list[str]] | None = None
    """Words of a launcher that changes how it trains, before the file and behind it; None: none does."""
    interpreter: list[str] = field(default_factory=lambda: [interpreter_of(".py")])
    """Words that start Python, with what comes before it, as `env` and `uv run`."""
    remarks: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, text: str) -> _Config:
        """Read a file's name, or a command. Raises InputError."""
        if _is_file(text):
            return cls._of_file(text)
        words = [word for word in words_of(text) if word != "${args}"]
        found = _module_in(words)
        assert found is not None, "is_finetuning was asked"
        module, begin = found
        tool, rest = _OF_MODULES[module.partition(".")[0]], words[begin:]
        rest, behind = (rest[: rest.index("--")], rest[rest.index("--") + 1 :]) if "--" in rest else (rest, [])
        file, rest = _file_in(tool, rest, line_of(words[:begin]))
        config = _config_in(file) if file is not None else {}
        front, interpreter = front_of(words[:begin])
        launcher: tuple[list[str], list[str]] | None = None
        if launcher_of(words) == "accelerate launch":
            kept = of_accelerate(words)
            launcher = ([*front, "accelerate", "launch", *kept, *PLACEMENT, "-m", module], []) if kept else None
        elif tool is TRL and words[begin - 2] != "-m":
            kept, rest = parted_by_accelerate(rest)
            if kept or parted_by_accelerate(as_words(config))[0]:
                launcher = words[:begin], [*kept, *PLACEMENT]
        elif tool is AXOLOTL and words[begin - 2] != "-m":
            kept, rest = (
                of_accelerate(["launch", *behind]),
                without(rest, ("launcher", "num_processes", "main_process_port")),
            )
            launcher = ([*front, "accelerate", "launch", *kept, *PLACEMENT, "-m", module], []) if kept else None
            rest = [re.sub(r"^--no[-_](\w[\w-]*)$", r"--\1=False", word) for word in rest]  # as its command reads it
        given = _given(rest)
        return cls(
            tool=tool,
            module=module,
            file=file,
            values={**config, **given},
            words=rest,
            given=given,
            launcher=launcher,
            interpreter=[*front, *(interpreter or [interpreter_of(".py")])],
        )

    @classmethod
    def _of_file(cls, file: str) -> _Config:
        values = _config_in(file)
        tool = tool_of(values)
        assert tool is not None, "is_finetuning was asked"
        task, launcher = task_of(values, Path(file).stem), None
        if tool is TRL and parted_by_accelerate(as_words(values))[0]:
            launcher = ["trl", task], [*PLACEMENT]
        module = {"trl": f"trl.scripts.{task}", "axolotl": "axolotl.cli.train"}.get(
            tool.package, "llamafactory.launcher"
        )
        remark = f"{file} is taken for trl {task}; if it is another: rubberband init 'trl TASK --config {file}'"
        return cls(
            tool=tool,
            module=module,
            file=file,
            values=values,
            words=[],
            given={},
            launcher=launcher,
            remarks=[remark] if tool is TRL else [],
        )

    def findings(self, path: Path) -> TrialFindings:
        """Return the findings for the file at `path`."""
        method = self.tool.method(self.values, self.module.rpartition(".")[2])
        space, others = self._space(method)
        folder, most, metric = path.absolute().parent, self._most(), self._metric(method)
        own = self._own(metric, most, space)
        overrides = [word for key in space for word in self.tool.option(key, self._place_of(key))]
        middle = [
            word
            for key, (domain, _) in space.items()
            for word in self.tool.option(key, str(middle_of(yaml.safe_load(domain))))
        ]
        resume = tuple(self.tool.resume)
        schedule: dict[str, Any] = {"most": most}
        if why := self._cannot_resume(method):
            self.remarks.append(f"{why}: each trial trains in one start, and none is stopped early")
            schedule = schedule_of({"type": "none", "num_samples": TRIALS, "max_t": most}, TO_THE_END, trials=TRIALS)
            resume = ()
        starts = self._starts()
        if self.launcher is not None:
            name = (launcher_of(starts) or starts[0]).split()[0]
            self.remarks.append(f"{name} is started once for each machine, as it changes how the model trains")
        stem = re.sub(r"[._-](cfg|config|conf)$", "", Path(self.file or method).stem)
        return TrialFindings(
            command=seen_from(folder, [*starts, *self.words, *overrides, *own]),
            start=seen_from(folder, [*on_one(starts), *self.words, *middle, *own]),
            metrics="stdout",
            name=name_like(stem) or self.tool.package,
            file=f"{stem}-search.yaml",
            space=space,
            others=others,
            resume=resume,
            metric=metric,
            mode="max" if "reward" in metric else "min",
            rank=self.launcher is not None or any(map(self.values.get, ("deepspeed", "fsdp", "fsdp_config"))),
            launch="" if self.launcher is None else "machine",
            is_known=True,
            missing=self._missing(),
            remarks=tuple(self.remarks),
            **schedule,
        )

    def _place_of(self, key: str) -> str:
        """Return what stands for a parameter in the command."""
        return f"${{{key}{PER_WORKER if key == self.tool.divided(self.values) else ''}}}"

    def _starts(self) -> list[str]:
        """Return the words that start the tool: its module on each worker, or its launcher where that has a setting."""
        file = [] if self.file is None else ["--config", self.file] if self.tool is TRL else [self.file]
        if self.launcher is None:
            return [*self.interpreter, "-m", self.module, *file]
        before, behind = self.launcher
        return [*before, *file, *behind]

    def _space(self, method: str) -> tuple[dict[str, tuple[str, str]], dict[str, tuple[str, str]]]:
        """Return the parameters that are searched, and the others, which the file has in comments."""
        open_ones = [each for each in domains(self.tool, self.values, method) if each[0] not in self.given]
        space = {key: (domain, comment) for key, domain, comment in open_ones[:MOST_PARAMETERS]}
        others = dict[str, tuple[str, str]]()
        for key, domain, comment in open_ones[MOST_PARAMETERS:]:
            asked = f"add {' '.join(self.tool.option(key, self._place_of(key)))} to the command"
            others[key] = domain, f"{comment}; {asked}" if comment else asked
        return space, others

    def _metric(self, method: str) -> str:
        """Return the metric by which trials are ranked."""
        name, has_eval = "reward" if method in _REWARDED else "loss", self.tool.has_eval(self.values)
        if has_eval:
            return f"eval_{name}"
        how = {
            TRL.name: "eval_strategy: steps, and a dataset with a test split",
            AXOLOTL.name: "val_set_size: 0.05",
            LLAMA_FACTORY.name: "val_size: 0.05, and eval_strategy: steps",
        }[self.tool.name]
        if self.tool is AXOLOTL:  # it logs its loss every few steps, and not once for each iteration
            raise InputError(f"{self.file} has no data to evaluate on, by which trials are ranked; write {how}")
        if name == "loss":
            self.remarks.append(f"trials are ranked by the loss on what they train on; to hold data out, write {how}")
        return name

    def _epochs(self) -> float | None:
        return number_of(self.values.get(self.tool.keys["epochs"]))

    def _has_steps(self) -> bool:
        return (number_of(self.values.get("max_steps")) or 0) > 0

    def _most(self) -> int:
        """Return the iterations of a trial: its epochs, or parts of fewer of these."""
        epochs = self._epochs()
        is_whole = epochs is not None and epochs in _WHOLE
        return int(epochs) if epochs is not None and is_whole and not self._has_steps() else _PARTS

    def _own(self, metric: str, most: int, space: Collection[str]) -> list[str]:
        """Return the words for what a trial needs: its folder, its epochs, a line and a save in each iteration.

        A gang's batch is that of one worker: the batch of each, or the batches that it accumulates, are divided.
        """
        tool, epochs, values = self.tool, self._epochs(), self.values
        is_whole = epochs == most and not self._has_steps()
        own, divided = {tool.keys["output"]: "${checkpoint}"}, tool.divided(values)
        if divided not in space:
            own[divided] = f"${{{values.get(divided, tool.batch)}{PER_WORKER}}}"
        kinds = ["save", "eval" if metric.startswith("eval_") else "logging"]
        if is_whole:
            own[tool.keys["epochs"]] = "${max_t}"
        else:
            steps = " and ".join(f"{kind}_steps" for kind in kinds)
            self.remarks.append(
                f"an iteration is 1/{_PARTS} of the whole training, by {steps}; write others with another max_t"
            )
        for kind in kinds:
            own |= _each(kind, is_whole=is_whole, is_axolotl=tool is AXOLOTL, values=values)
        if not values.get("save_total_limit"):
            own["save_total_limit"] = "1"
        for key, (off, why) in SWITCHED_OFF.items():
            if is_set(values.get(key)):
                own[key] = off
                self.remarks.append(f"{key} is {off} now: {why}")
        words = [word for key, value in own.items() for word in tool.option(key, value)]
        taken = [key for key in (*own, RESUME) if key in self.given]
        if divided in taken:
            self.words = without(self.words, [divided])
            taken.remove(divided)
        if taken:
            self.words = without(self.words, taken)
            self.remarks.append(f"{', '.join(taken)} of the command gave way: a trial needs its own")
        is_strict = tool is AXOLOTL and is_true(values.get("strict"))
        return [*(tool.option("strict", "False") if is_strict else []), *words]

    def _cannot_resume(self, method: str) -> str:
        """Return why the tool cannot go on from a checkpoint; empty: it can."""
        if self.tool is LLAMA_FACTORY and method in ("rm", "ppo"):
            return f"LLaMA-Factory does not resume stage {method}"
        return ""

    def _missing(self) -> str:
        package = self.tool.package
        is_here = importlib.util.find_spec(package) is not None or Path(package).is_dir()
        if is_here or shutil.which(LAUNCHERS[package]) is not None:
            return ""
        return (
            f"{package} is not installed here, so no run can be looked at; pip install {package}, or add --no-check to "
            "write the file as it is"
        )


LAUNCHERS = {"trl": "trl", "axolotl": "axolotl", "llamafactory": "llamafactory-cli"}
"""Package -> its command."""


def _each(kind: str, *, is_whole: bool, is_axolotl: bool, values: Mapping[str, Any]) -> dict[str, str]:
    """Return key -> value for a save, an evaluation or a logged loss in each iteration."""
    if not is_whole:
        found = {f"{kind}_strategy": "steps", f"{kind}_steps": _PART}
    else:
        found = {f"{kind}_strategy": "epoch"}
        if is_axolotl and values.get(f"{kind}_steps"):
            found[f"{kind}_steps"] = "0"  # they count before the strategy
    if is_axolotl and values.get(f"{kind}s_per_epoch"):
        found[f"{kind}s_per_epoch"] = "0"  # Axolotl refuses both
    return found


def _file_in(tool: Tool, words: list[str], start: str) -> tuple[str | None, list[str]]:
    """Return the config file that the words name, and the other words. Raises InputError for one that is missing."""
    if tool is TRL:
        words = [part for word in words for part in re.split(r"(?<=^--config)=", word)]
        if "--config" not in words:
            return None, words
        at = words.index("--config")
        if at + 1 == len(words):
            raise InputError(f"{start} --config names no file; write --config sft.yaml")
        return words[at + 1], [*words[:at], *words[at + 2 :]]
    if not words or not words[0].endswith((".yaml", ".yml")):
        raise InputError(f"{start} needs its config file, not {shown(' '.join(words[:1]))}; write {start} config.yaml")
    return words[0], words[1:]


def _given(words: Sequence[str]) -> dict[str, Any]:
    """Return what words such as `--key value`, `--key=value` and `key=value` say."""
    found = dict[str, Any]()
    for word, after in pairwise((*words, "")):
        key, is_one_word, value = word.partition("=")
        if word.startswith("-") or is_one_word:
            text = value if is_one_word else "true" if after.startswith("-") or not after else after
            found[key.lstrip("-").replace("-", "_")] = yaml.load(text, Loader=_Loader) if text else text
    return found
