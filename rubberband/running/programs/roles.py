"""Roles of a program's options by their names: a place of the trial, or an option that no search changes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from rubberband.running.ranges import plain_name, rank_of

EPOCHS, SEED, OUTPUT, RESUME = "${max_t}", "${seed}", "${checkpoint}", "resume"

_EPOCHS = re.compile(
    r"((max|num|no|nb|n|number_of|total|train|training|of)_?)*epochs?(_num)?|n_?iter|max_t|"
    r"(n|num|number_of)_?(boost(ing)?_)?rounds?"
)
_SEED = re.compile(r"((manual|random|torch|global|rng|np|numpy|train|training)_?)*seed|random_state|seed_everything")
_FOLDER = r"(dir|directory|folder|path|root)"
_OUTPUT = re.compile(
    rf"(.*_)?(out|output|save|results?|work|exp|experiment|run|checkpoints?|ckpts?|snapshots?|dump)_?{_FOLDER}"
    r"|out|outf|output|save(_to)?|default_root_dir|(output|save|checkpoint|ckpt|out)_?(file|name)|save_model|"
    r"checkpoint|ckpt"
)
_LOGS = re.compile(rf"(.*_)?(log|logs|logging|tensorboard|tb)_?{_FOLDER}|logf")
"""Folders for logs, which are a trial's own only where no other folder is."""
_RESUME = re.compile(
    r"resume(_.*)?|init_from|ckpt_path|load(_(from|model|checkpoint|ckpt|path|weights|dir))*|restore(_(from|path|checkpoint|file))?|"
    r"(start_)?from_checkpoint|continue(_(train|training|from))?|checkpoint|ckpt|(checkpoint|ckpt)_(path|file)"
)
_LOADS = re.compile(r"\b(resum\w*|load\w*|restor\w*|pre-?trained|continu\w*|start(ing)? from)\b", re.IGNORECASE)
_SAVES = re.compile(r"\b(sav\w*|writ\w*|stor\w*|output\w*|dump\w*)\b", re.IGNORECASE)

_ASIDE = re.compile(
    r"(log|print|save|eval|test|val|valid|validation|cache|wandb|ddp|fsdp|hub|push|report|tensorboard|dry|use_cpu|no|"
    r"per_(device|gpu)_eval|early_stop\w*|dist|deepspeed|tpu|xla|jit|torch_compile|include|skip|ignore|dataloader|min|"
    r"plot|show|hf|logging|checkpoint|gradient_(accumulation|checkpointing)|max_train|num_train|auto_find|always)(_.*)?|"
    r"(in|input|img|image|out|output)_?(channels?|dims?|features|planes|size|shape|h|w|height|width|ch)|"
    r"(warmup|final|end|cooldown)_lr|context_(length|size)"
)
"""Names of options that measure, save or show, or that are sizes of the data, also if they end as a parameter does."""
_FIXED = re.compile(
    r"(.*_)?(seed|workers?|jobs|intervals?|freq|frequency|every|ports?|rank|world|world_size|n?gpus?|nodes?|machines|env|"
    r"devices?|verbose|verbosity|threads?|procs|processes|version|caches?|timeout|limit|backend|host|cuda|mps|precision|"
    r"dtype|datasets?|data|task|split|mode|names?|tags?|project|entity|group|steps?|strategy|debug|prefetch|folds?|"
    r"iters?|iterations?|updates|runs|repeats?|trials|time_?steps|frames|episodes|deterministic|tracking|track|render|video|epochs?|class(es)?|labels?|n?_?vocab(_size)?|block_size|seq_?len(gth)?|max_len(gth)?|"
    r"max_.*_len(gth)?|bptt|dim_?in|dim_?out|size|crop|resolution|imgsz|nc|upscale(_factor)?|scale_factor|samples|"
    r"examples|n_(train|test|val)|start|end|index|id|paths?|dirs?|files?|folder|root|url|key|token|patience|top_?k|"
    r"fps|memory|(train|test|val|valid|eval)_\w+|n_?heads?|heads|eps(ilon)?|tf32|[bf]p?f?16|half|compile|"
    r"distributed|resume|pretrained|local|evaluate|train|predict)|"
    r"accumulate_.*|fast_dev_run|num_return.*|(data|dataset|fp16|bf16|ckpt|push_to)_.*"
)
"""Names of options that change what is measured, or nothing but the machine, unless they are known parameters."""


def is_fixed(name: str) -> bool:
    """Whether no search changes an option of this name."""
    if re.match(r"(trainer|data_?loader|logger|log|wandb|hydra|paths?|eval\w*|test)[./]", name):
        return True
    text = plain_name(name)
    return bool(_ASIDE.fullmatch(text)) or (rank_of(name) is None and bool(_FIXED.fullmatch(text)))


def role_of(name: str, kind: str, default: Any, help_text: str) -> str | None:
    """Return the place that an option stands for, `resume` for what loads a checkpoint, or None.

    The words of its help decide where `--checkpoint` may be either.
    """
    text = plain_name(name)
    if kind == "value" and _EPOCHS.fullmatch(text):
        return EPOCHS
    if kind == "value" and _SEED.fullmatch(text):
        return SEED
    is_resume, is_output = _RESUME.fullmatch(text) is not None, _OUTPUT.fullmatch(text) is not None
    if name == "hydra.run.dir":
        return OUTPUT
    if is_output and kind == "value" and not isinstance(default, int | float):
        loads, saves = _LOADS.search(help_text) is not None, _SAVES.search(help_text) is not None
        if not is_resume or (saves and (default or not loads)) or (default and not loads):
            return OUTPUT
    return RESUME if is_resume else None


def is_logs(name: str) -> bool:
    """Whether an option is a folder for logs."""
    return _LOGS.fullmatch(plain_name(name)) is not None


def output_of(default: Any) -> str:
    """Return the words of a trial's own folder, or of a file in it where the default is one."""
    file = Path(default).name if isinstance(default, str) else ""
    return f"{OUTPUT}/{file}" if Path(file).suffix else OUTPUT
