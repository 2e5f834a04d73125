"""Adapters of PEFT: the base model with its adapter merged into it."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from rubberband.errors import InputError
from rubberband.installation import install_hint

_ADAPTER = "adapter_config.json"


def merge(folder: Path) -> None:
    """Replace the adapter in a folder by its base model with the adapter merged into it, as safetensors.

    The base model is read as PEFT reads it: by the name or the path that the adapter has. Tokenizer and card stay.

    Raises InputError for a folder without an adapter, a base model without a name or that cannot be read, and an
    adapter that cannot be merged.
    """
    if not (folder / _ADAPTER).exists():
        raise InputError(f"--merge: {folder} has no {_ADAPTER}; only an adapter of PEFT is merged, so leave it out")
    try:
        from peft import PeftConfig
    except ImportError:
        raise InputError(f"--merge: peft is not installed; run {install_hint('finetune')}") from None
    base = json.loads((folder / _ADAPTER).read_text("utf-8")).get("base_model_name_or_path")
    if not base:
        raise InputError(
            f"--merge: the base model of {folder} was made in code and has no name; merge it there: "
            f"PeftModel.from_pretrained(base_model, {str(folder)!r}).merge_and_unload().save_pretrained(OTHER)"
        )
    try:
        model = _model_of(PeftConfig.from_pretrained(folder).task_type).from_pretrained(folder)
        model.merge_and_unload().save_pretrained(folder)
    except (OSError, ValueError, AttributeError, NotImplementedError, RuntimeError) as error:
        sizes = re.search(r"size mismatch for .*?Size\(\[(\d+).*?Size\(\[(\d+)", str(error))
        if sizes is not None:
            raise InputError(
                f"--merge: the adapter has {sizes[1]} rows where {base} has {sizes[2]}, as after "
                "resize_token_embeddings; resize the base in Python, then "
                f"PeftModel.from_pretrained(base, {str(folder)!r}).merge_and_unload()"
            ) from None
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(f"--merge: {base} with its adapter cannot be merged: {first}") from None
    for file in folder.glob("adapter_*"):
        file.unlink()
    with suppress(OSError, ValueError):  # a tokenizer beside the adapter stays
        if not (folder / "tokenizer_config.json").exists():
            from transformers import AutoTokenizer

            AutoTokenizer.from_pretrained(base).save_pretrained(folder)


def _model_of(task: Any) -> Any:
    import peft

    kinds = {
        "CAUSAL_LM": peft.AutoPeftModelForCausalLM,
        "SEQ_CLS": peft.AutoPeftModelForSequenceClassification,
        "SEQ_2_SEQ_LM": peft.AutoPeftModelForSeq2SeqLM,
        "TOKEN_CLS": peft.AutoPeftModelForTokenClassification,
    }
    return kinds.get(str(getattr(task, "value", task)), peft.AutoPeftModel)
