"""Lines of checkpoint for a script that has none: `rubberband init --patch train.py`.

The lines save below `RUBBERBAND_CHECKPOINT` alone, so the script runs on its own as before. Nothing of it is run.
"""

from __future__ import annotations

import ast
import difflib
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from rubberband.errors import InputError
from rubberband.running.programs.training_loops import TrainingLoop, calls_in, dotted, range_of, training_loop
from rubberband.values.command import script_of

PAGE = "docs/commands.md#the-patch"
BY_HAND = """\
    folder = os.environ.get("RUBBERBAND_CHECKPOINT")  # not set where the script runs on its own
    saved = torch.load(f"{folder}/state.pt") if folder and os.path.exists(f"{folder}/state.pt") else {}
    if saved: model.load_state_dict(saved["model"]); optimizer.load_state_dict(saved["optimizer"])
    for epoch in range(saved.get("epoch", 0), epochs):
        ...
        if folder: torch.save({"epoch": epoch + 1, "model": model.state_dict(), ...}, f"{folder}/state.pt")
        print(...)  # the line with the metric, right after the save
"""
"""The lines, where a loop is not recognised."""


class UnknownLoop(InputError):
    """No training is recognised in a script; `lines` are those to write by hand."""

    lines = BY_HAND


@dataclass(frozen=True, slots=True)
class Patch:
    """A script with lines of checkpoint."""

    path: Path
    before: str
    after: str
    remark: str
    """How it resumes."""

    @property
    def diff(self) -> str:
        """The unified diff, as `patch` takes it."""
        pair = (self.before.splitlines(keepends=True), self.after.splitlines(keepends=True))
        return "".join(difflib.unified_diff(*pair, self.path.name, self.path.name))

    @property
    def copy(self) -> Path:
        """Path of the copy that `--apply` writes."""
        return self.path.with_name(f"{self.path.stem}_resumable.py")


def patch_of(program: str) -> Patch:
    """Return the patch of a script, or of a command line with one.

    Raises InputError, with the lines to write by hand, for one whose training is not recognised.
    """
    words = shlex.split(program)
    path = Path(program if Path(program).is_file() else script_of(words) or words[-1])
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read ({error}); give a Python script: init --patch train.py") from None
    if path.suffix != ".py":
        inner = re.findall(r"[\w./-]+\.py\b", text)
        which = f"it starts {inner[0]}: rubberband init --patch {inner[0]}" if inner else "give the script that trains"
        raise InputError(f"{path} is no Python script; {which}")
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise InputError(f"{path} cannot be parsed (line {error.lineno}: {error.msg})") from None
    if "RUBBERBAND_CHECKPOINT" in text or "get_checkpoint" in text:
        raise InputError(f"{path} uses RubberBand's checkpoint already: nothing to patch")
    return _Patching(path, text, tree).patched()


class _Patching:
    def __init__(self, path: Path, text: str, tree: ast.Module) -> None:
        self.path, self.text, self.tree = path, text, tree
        self.lines = text.splitlines(keepends=True)
        if self.lines and not self.lines[-1].endswith("\n"):
            self.lines[-1] += "\n"
        nodes = list(ast.walk(tree))
        names = {each.id for each in nodes if isinstance(each, ast.Name)}
        self.folder, self.saved, self.file = (
            name if name not in names else f"rubberband_{name}" for name in ("folder", "saved", "state_file")
        )
        imported = [alias for each in nodes if isinstance(each, ast.Import) for alias in each.names]
        self.imports = {alias.name: alias.asname or alias.name for alias in imported}
        """Module -> its name in the script."""
        self.modules = [*self.imports, *(each.module or "" for each in nodes if isinstance(each, ast.ImportFrom))]
        self.needed: list[str] = []

    def patched(self) -> Patch:
        packages = {name.partition(".")[0] for name in self.modules}
        trainer, accelerator = self._made("Trainer"), self._made("Accelerator")
        if trainer and "transformers" in packages | {"trl"} & packages:
            remark = self._of_trainer(trainer)
        elif trainer and packages & {"lightning", "pytorch_lightning"}:
            remark = self._of_lightning(trainer)
        else:
            found = training_loop(self.tree)
            is_read = found is not None and found.loop.body[0].lineno > found.loop.lineno
            if found is None or not is_read or (accelerator and isinstance(found.loop, ast.While)):
                raise self._refused(packages)
            if accelerator:
                remark = self._of_accelerate(found, accelerator)
            elif "torch" in packages and found.models and found.others:
                remark = self._of_loop(found, is_torch=True)
            elif (found.values or found.fitted or found.objects) and "backward(" not in self.text:
                remark = self._of_loop(found, is_torch=False)
            else:
                raise self._refused(packages)
        self._import()
        return Patch(self.path, self.text, "".join(self.lines), remark)

    def _refused(self, modules: set[str]) -> InputError:
        if "LightningCLI" in self.text:
            saves = "--trainer.callbacks+=ModelCheckpoint --trainer.callbacks.dirpath=${checkpoint} "
            saves += "--trainer.callbacks.save_last=true"
            return InputError(
                f"{self.path}: LightningCLI saves by its options: add {saves} to the command"
                f", and resume: --ckpt_path=${{checkpoint}}/last.ckpt to entrypoint ({PAGE})"
            )
        if modules & {"keras", "tensorflow"}:
            why = (
                "Keras saves by itself: pass callbacks=[keras.callbacks.BackupAndRestore("
                "os.environ['RUBBERBAND_CHECKPOINT'], delete_checkpoint=False)] to fit"
            )
            return InputError(f"{self.path}: {why} ({PAGE})")
        return UnknownLoop(
            f"{self.path}: no loop over epochs is recognised (for epoch in range(…), with the training and the line of "
            f"the metric in it); write the lines above by hand, see {PAGE}"
        )

    def _made(self, kind: str) -> str | None:
        """Return the first name that gets an object of a class with such an end."""
        return next(
            (
                name
                for each in ast.walk(self.tree)
                if isinstance(each, ast.Assign) and isinstance(each.value, ast.Call)
                for target in each.targets
                if (name := dotted(target)) and re.search(rf"(^|\.)\w*{kind}$", dotted(each.value))
            ),
            None,
        )

    # The lines of each kind

    def _folder_line(self) -> str:
        self._need("os")
        return f'{self.folder} = os.environ.get("RUBBERBAND_CHECKPOINT")'

    def _of_loop(self, found: TrainingLoop, *, is_torch: bool) -> str:
        """A loop in plain PyTorch, also in DDP, where rank 0 saves; or in numpy, scikit-learn or plain Python."""
        is_gang = is_torch and ("init_process_group" in self.text or "DistributedDataParallel" in self.text)
        models = found.models if is_torch else []
        inner = {name: f'getattr({name}, "module", {name})' if "DataParallel" in self.text else name for name in models}
        stateful = inner | {name: name for name in (found.others if is_torch else ())}
        kept = [] if is_torch else [*found.fitted, *found.objects]
        outer = {name: f'globals()["{name}"]' for name in found.outer if not name.startswith("self.")}
        rng, again = self._random(is_torch)
        if is_gang and again:
            again = ['if int(os.environ.get("WORLD_SIZE", 1)) == 1:', *(f"    {line}" for line in again)]
        restore = [
            *(f'{path}.load_state_dict({self.saved}["{name}"])' for name, path in stateful.items()),
            *(f'{outer.get(name, name)} = {self.saved}["{name}"]' for name in kept),
            *(f'{name} = {self.saved}["{name}"]' for name in found.values),
            *again,
        ]
        content = ", ".join(
            [
                *([f'"epoch": {self._epochs(found)[2]}'] if isinstance(found.loop, ast.For) else ()),
                *(f'"{name}": {path}.state_dict()' for name, path in stateful.items()),
                *(f'"{name}": {name}' for name in (*kept, *found.values)),
                *rng,
            ]
        )
        new = f'{self.file} + ".new"'
        if is_torch:
            load = f'torch.load({self.file}, map_location="cpu", weights_only=False)'
            save = [f"torch.save({{{content}}}, {new})"]
        else:
            load = f'pickle.load(open({self.file}, "rb"))'
            save = [f'with open({new}, "wb") as file:', f"    pickle.dump({{{content}}}, file)"]
        self._need("torch" if is_torch else "pickle")
        head = [
            self._folder_line(),
            f'{self.file} = f"{{{self.folder}}}/state.{"pt" if is_torch else "pickle"}"',
            f"{self.saved} = {load} if {self.folder} and os.path.exists({self.file}) else {{}}",
            f"if {self.saved}:",
            *(f"    {line}" for line in restore),
        ]
        says_rank = "rank" in found.condition or "main_process" in found.condition
        only = ' and int(os.environ.get("RANK", 0)) == 0' if is_gang and not says_rank else ""
        self._insert(found, head, [*save, f"os.replace({new}, {self.file})"], only)
        return f"it resumes with its random numbers{'; a gang has others then' if is_gang else ''}"

    def _of_accelerate(self, found: TrainingLoop, accelerator: str) -> str:
        """A loop of Accelerate, which saves models, optimizers, schedulers and random numbers itself."""
        self._need("shutil")
        first, last, after = self._epochs(found)
        values = [f'"{name}": {name}' for name in found.values]
        place = f'f"{{{self.folder}}}/{{{self.saved}}}'
        head = [
            self._folder_line(),
            f"{self.saved} = max(map(int, os.listdir({self.folder})), default=None) if {self.folder} else None",
            f"if {self.saved} is not None:",
            f'    {accelerator}.load_state({place}")',
        ]
        body = [f'{accelerator}.save_state(f"{{{self.folder}}}/{{{after}}}")']
        if values:
            self._need("torch")
            head.append(f'    values = torch.load({place}/values.pt", weights_only=False)')
            head += [f'    {name} = values["{name}"]' for name in found.values]
            body.append(f'torch.save({{{", ".join(values)}}}, f"{{{self.folder}}}/{{{after}}}/values.pt")')
        body.append(f'shutil.rmtree(f"{{{self.folder}}}/{{{last}}}", ignore_errors=True)')
        self._insert(found, head, body, "", f"{first} if {self.saved} is None else {self.saved}")
        return "it resumes with its random numbers, on one worker"

    def _of_trainer(self, trainer: str) -> str:
        """The Trainer of Hugging Face, which resumes from the last checkpoint in its folder."""
        call = self._call(trainer, "train")
        self.needed.append("from transformers.trainer_utils import get_last_checkpoint")
        args = f"{trainer}.args.output_dir, {trainer}.args.save_strategy, {trainer}.args.save_total_limit"
        head = [self._folder_line(), f"if {self.folder}:", f'    {args} = {self.folder}, "epoch", 1']
        resume = f"get_last_checkpoint({self.folder}) if {self.folder} else None"
        self._with_keyword(call, "resume_from_checkpoint", resume, head)
        return "it resumes with its random numbers"

    def _of_lightning(self, trainer: str) -> str:
        """The Trainer of Lightning, with a checkpoint after each epoch."""
        call = self._call(trainer, "fit")
        is_old = any("pytorch_lightning" in name for name in self.modules)
        package = "pytorch_lightning" if is_old else "lightning.pytorch"
        self.needed.append(f"from {package}.callbacks import ModelCheckpoint")
        last = f'f"{{{self.folder}}}/last.ckpt"'
        head = [
            self._folder_line(),
            f"if {self.folder}:",
            f'    {trainer}.callbacks.append(ModelCheckpoint({self.folder}, "last", enable_version_counter=False))',
        ]
        self._with_keyword(call, "ckpt_path", f"{last} if {self.folder} and os.path.exists({last}) else None", head)
        return "it resumes; other random numbers"

    # Parts of lines

    def _random(self, is_torch: bool) -> tuple[list[str], list[str]]:
        """Return the entries of random states, and the lines that set them."""
        numpy = self.imports.get("numpy")
        is_global = numpy and re.search(rf"\b{numpy}\.random\.(?!default_rng|RandomState|Generator)", self.text)
        states = [  # whether it has one, what reads it, what sets it
            (is_torch, "torch.get_rng_state", "torch.set_rng_state"),
            (is_torch and "cuda" in self.text, "torch.cuda.get_rng_state_all", "torch.cuda.set_rng_state_all"),
            (is_global, f"{numpy}.random.get_state", f"{numpy}.random.set_state"),
            (self.imports.get("random") == "random", "random.getstate", "random.setstate"),
        ]
        used = [(get, restore) for is_used, get, restore in states if is_used]
        if not used:
            return [], []
        sets = [f'{restore}({self.saved}["random"][{number}])' for number, (_, restore) in enumerate(used)]
        return [f'"random": ({"".join(f"{get}(), " for get, _ in used).rstrip()})'], sets

    def _epochs(self, found: TrainingLoop) -> tuple[str, str, str]:
        """Return the first value of a loop, and the pass that is saved last and next at its save, as in its source."""
        assert isinstance(found.loop, ast.For), "only such a loop has a range"
        call = range_of(found.loop)
        assert call is not None, "only such loops are found"
        given = [ast.unparse(each) for each in call.args]
        if dotted(call.func).endswith("count"):
            given = [given[0] if given else "0", "", *given[1:]]
        first, step = (given[0] if len(given) > 1 else "0"), (given[2] if len(given) > 2 else "1")
        name = ast.unparse(found.loop.target)
        return (first, name, f"{name} + {step}") if found.is_begun else (first, f"{name} - {step}", name)

    # Edits, from the end of the file to its begin, so that the numbers of earlier lines stay

    def _insert(self, found: TrainingLoop, head: list[str], body: list[str], only: str, first: str = "") -> None:
        loop = found.loop
        place = found.before or found.after
        assert place is not None, "a loop that is found prints"
        inner = " " * loop.body[0].col_offset
        also = f" and ({found.condition})" if found.condition else ""
        save = [f"{inner}if {self.folder}{only}{also}:\n", *(f"{inner}    {line}\n" for line in body)]
        at = place.lineno - 1 if found.before is not None else (place.end_lineno or place.lineno)
        self.lines[at:at] = save
        if isinstance(loop, ast.For):
            self._with_first(loop, first or f'{self.saved}.get("epoch", {self._epochs(found)[0]})')
        outer = " " * loop.col_offset
        self.lines[loop.lineno - 1 : loop.lineno - 1] = [f"{outer}{line}\n" for line in head]

    def _with_first(self, loop: ast.For, first: str) -> None:
        """Let the range of a loop begin at another value."""
        call = range_of(loop)
        assert call is not None, "only such loops are found"
        given = [ast.unparse(each) for each in call.args]
        is_end = len(given) == 1 and not dotted(call.func).endswith("count")
        words = [first, *(given if is_end else given[1:]), *map(ast.unparse, call.keywords)]
        self._replace(call, f"{ast.unparse(call.func)}({', '.join(words)})")

    def _replace(self, node: ast.expr, text: str) -> None:
        start, end = node.lineno - 1, node.end_lineno or node.lineno
        before = self.lines[start].encode()[: node.col_offset].decode()
        after = self.lines[end - 1].encode()[node.end_col_offset :].decode()
        self.lines[start:end] = f"{before}{text}{after}".splitlines(keepends=True)

    def _call(self, owner: str, method: str) -> ast.Call:
        calls = [each for each in calls_in(self.tree) if dotted(each.func) == f"{owner}.{method}"]
        if not calls:
            raise InputError(f"{self.path}: {owner}.{method}() is not found; see {PAGE}")
        return calls[-1]

    def _with_keyword(self, call: ast.Call, keyword: str, value: str, head: list[str]) -> None:
        """Give a keyword to a call, and write lines before its statement."""
        statement = next(
            each
            for each in ast.walk(self.tree)
            if isinstance(each, ast.stmt) and not hasattr(each, "body") and call in ast.walk(each)
        )
        given = next((each for each in call.keywords if each.arg == keyword), None)
        if given is not None:
            self._replace(given.value, value.removesuffix("None") + str(ast.get_source_segment(self.text, given.value)))
        else:
            inside = str(ast.get_source_segment(self.text, call)).rstrip()[:-1].rstrip()
            comma = "" if inside.endswith(("(", ",")) else ", "
            self._replace(call, f"{inside}{comma}{keyword}={value})")
        outer = " " * statement.col_offset
        self.lines[statement.lineno - 1 : statement.lineno - 1] = [f"{outer}{line}\n" for line in head]

    def _need(self, module: str) -> None:
        if self.imports.get(module) != module and f"import {module}" not in self.needed:
            self.needed.append(f"import {module}")

    def _import(self) -> None:
        """Write the imports that the lines need before the first one of the script."""
        imports = [each for each in self.tree.body if isinstance(each, ast.Import | ast.ImportFrom)]
        first = next((each for each in imports if getattr(each, "module", "") != "__future__"), None)
        at = first.lineno - 1 if first is not None else 0
        self.lines[at:at] = [f"{line}\n" for line in sorted(self.needed, key=lambda line: (line[:4] == "from", line))]
